"""Training throughput on GPUs: tokens/s, MFU and peak memory of ``train_batch`` at Qwen3 shapes.

``python -m benchmarks.mfu --shape 0.6b --tokens 8192 --document 4096`` runs it, also under
torchrun. The weights are random, so no model is needed. Several engines and layouts do the same
work one after another, as in ``--backend fsdp2,megatron,megatron:tp=2+pp=2``; sizes are those of
``Parallelism``. The output is one JSON line each, of which ``tools/engine_table.py`` makes the
table for docs/benchmarks.md.

``--defaults`` measures what ``engine-train`` does with ``engine.backend`` set and nothing else: the
micro-batch of the contract's default, and compilation, recomputation and chunks of logits as the
trainer chooses them for ``auto``. Layouts and ``--options`` still apply. ``--defaults beside`` then
does the same work as the other arguments say, and prints a table of the ratios to the defaults.

``--precision bfloat16,float8:rowwise,float8:tensorwise`` does the work of each engine in each
precision, where the word behind the colon is the engine's ``float8_recipe``, and prints a table of
the ratios to the first one on standard error.

``--recompute full,full:0.2,none`` measures each of these, where the number behind the colon is the
engine's ``kept_activations``, and prints such a table.

MFU = (6 N + 6 L H d S) · tokens/s ÷ (989.5e12 · GPUs): N parameters with the head once (tied), of
experts those of one token, L layers, H query heads, d head width, S document length; the attention
term is the causal half; recomputation does not count; 989.5 TFLOP/s is the H200's dense bf16 peak.
``gpu_ms`` is the time of a step in which the GPU is busy, from a profile of three more steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from benchmarks import shapes
from engine_api import (
    Batch,
    Capability,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    Precision,
    sft_loss,
)
from engine_trainer.config import SFTConfig
from engine_trainer.config.sections import (
    AUTO,
    DataSection,
    EngineSection,
    MemorySection,
    RunSection,
)
from engine_trainer.placement.automatic import settle
from engine_trainer.placement.spmd import Spmd

FAMILY = "qwen3-"
SHAPES: dict[str, dict[str, Any]] = {
    name.removeprefix(FAMILY): shape
    for name, shape in shapes.SHAPES.items()
    if shape["model_type"] in ("qwen3", "qwen3_moe")
}
PEAK = 989.5e12


def full_name(shape: str) -> str:
    """Return the name of a shape in benchmarks/shapes.py."""
    return shape if shape in shapes.SHAPES else FAMILY + shape


def model_folder(shape: str) -> str:
    """Return the folder of a model with random weights, which is made once per machine."""
    return str(shapes.whole_folder(full_name(shape)))


def flops_per_token(shape: dict[str, Any], document: int) -> float:
    """Return the FLOP of forward and backward, by the formula in the module's docstring."""
    hidden, layers, width = shape["hidden_size"], shape["num_hidden_layers"], shape["head_dim"]
    heads, kv = shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = hidden * width * (2 * heads + 2 * kv)
    mlp = 3 * hidden * shape["intermediate_size"]
    if "num_experts" in shape:
        # The experts of a token, and the router.
        inner = shape["moe_intermediate_size"] * shape["num_experts_per_tok"]
        mlp = 3 * hidden * inner + hidden * shape["num_experts"]
    block = attention + mlp + 2 * hidden + 2 * width
    parameters = layers * block + hidden * shape["vocab_size"] + hidden
    return 6.0 * parameters + 6.0 * layers * heads * width * document


def packed(shape: dict[str, Any], tokens: int, document: int, seed: int) -> Batch:
    """Return random documents of one length."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.ones(document)
    weight[0] = 0.0
    ids = torch.randint(0, shape["vocab_size"], (tokens // document, document), generator=generator)
    return Batch.pack([{"input_ids": row, "loss_weight": weight} for row in ids])


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An engine, its layout over ranks, its precision and what it recomputes."""

    backend: str
    layout: Parallelism
    text: str
    precision: str = "bfloat16"
    recompute: str = "none"
    own: dict[str, Any] = field(default_factory=dict[str, Any])
    has_defaults: bool = False

    def in_precision(self, word: str) -> Entry:
        """Return the entry in a precision ``NAME[:RECIPE]`` of ``--precision``."""
        name, _, recipe = word.partition(":")
        own = {"float8_recipe": recipe} if recipe else {}
        return replace(self, precision=name, own=self.own | own)

    def recomputing(self, word: str) -> Entry:
        """Return the entry that recomputes as ``NAME[:SHARE]`` of ``--recompute`` says."""
        name, _, share = word.partition(":")
        own = {"kept_activations": float(share)} if share else {}
        return replace(self, recompute=name, own=self.own | own)


def settings_of(options: argparse.Namespace, layout: Entry) -> list[Entry]:
    """Return the entries that measure a layout: with each setting, or at the defaults."""
    own = [
        layout.in_precision(precision).recomputing(recompute)
        for precision in options.precision.split(",")
        for recompute in options.recompute.split(",")
    ]
    defaults = [replace(layout, has_defaults=True)]
    return {None: own, "only": defaults, "beside": defaults + own}[options.defaults]


def entries(text: str) -> list[Entry]:
    """Return the entries of a list ``NAME[:SIZE=N[+SIZE=N…]]``, separated by commas.

    Raises ``ValueError`` for any other text.
    """
    found = []
    for word in text.split(","):
        backend, _, sizes = word.partition(":")
        pairs = [part.split("=") for part in sizes.split("+") if part]
        known = {f.name for f in fields(Parallelism)}
        if not all(len(pair) == 2 and pair[0] in known and pair[1].isdecimal() for pair in pairs):
            raise ValueError(
                f"{word}: write NAME:SIZE=N, as megatron:tp=2+pp=2; sizes: "
                f"{', '.join(sorted(known))}"
            )
        layout = Parallelism(**{name: int(size) for name, size in pairs})
        found.append(Entry(backend=backend, layout=layout, text=sizes))
    return found


def read_micro_batch(text: str) -> int | str:
    """Return a number of tokens, or ``auto``."""
    return text if text == AUTO else int(text)


def micro_batch_tokens(options: argparse.Namespace, layout: Parallelism) -> int:
    """Return the largest number of tokens in a micro-batch.

    A step is one micro-batch unless ``--max-tokens`` says otherwise, or with pipeline stages four
    times as many as there are stages: fewer would measure the pipeline's bubble. Raises
    ``ValueError`` when the documents are too few.
    """
    if options.max_tokens:
        return options.max_tokens
    # These ranks share their documents.
    own = options.tokens * layout.tp * layout.pp * layout.cp * layout.ulysses
    if layout.pp == 1:
        return own
    parts = 4 * layout.pp
    if own // parts < options.document:
        raise ValueError(
            f"pp={layout.pp}: {own} tokens in documents of {options.document} are fewer than "
            f"{parts} micro-batches; "
            f"--tokens {-(-parts * options.document * options.tokens // own)}, or shorter documents"
        )
    return own // parts


def configure(options: argparse.Namespace, entry: Entry) -> EngineConfig:
    """Return the configuration that the options ask for."""
    declared = EngineRegistry.resolve(
        model_type="language_model", backend=entry.backend, device=options.device
    ).plugin.capabilities
    # Only engines that declare the capability compile, and none under tensor parallelism.
    compiled = options.compile and Capability.COMPILE in declared and entry.layout.tp == 1
    return EngineConfig(
        model=ModelSource(path=model_folder(options.shape), attention=options.attention),
        optimizer=OptimizerConfig(lr=1e-5),
        parallelism=entry.layout,
        precision=Precision(compute=entry.precision),  # type: ignore[arg-type]
        memory=Memory(
            max_tokens=micro_batch_tokens(options, entry.layout),
            logit_chunk=options.chunk,
            compile=compiled,
            reshard_after_forward=options.reshard,
            recompute=entry.recompute,  # type: ignore[arg-type]
        ),
        options=json.loads(options.options).get(entry.backend, {}) | entry.own or None,
    )


def choose(options: argparse.Namespace, entry: Entry) -> EngineConfig:
    """Return the configuration that ``engine-train`` chooses where only the backend is given."""
    folder = model_folder(options.shape)
    section = EngineSection(
        model=ModelSource(path=folder),
        backend=entry.backend,
        device=options.device,
        parallelism=entry.layout,
        options=json.loads(options.options).get(entry.backend, {}),
    )
    longest = None
    if options.max_tokens == AUTO:
        section = replace(section, memory=MemorySection(max_tokens=AUTO))
        longest = options.document
    config = SFTConfig(
        engine=section,
        # Neither is read: the documents are random, and nothing is written.
        data=DataSection(source=folder, max_length=longest),
        run=RunSection(output_dir=folder, steps=1),
    )
    settled, _ = settle(config, Spmd())
    return settled.engine.build(seed=0, total_steps=1)


def build(options: argparse.Namespace, entry: Entry) -> Any:
    """Build the engine for these options and initialize it."""
    config = (choose if entry.has_defaults else configure)(options, entry)
    engine = EngineRegistry.create(backend=entry.backend, device=options.device, config=config)
    engine.initialize()
    return engine


def measure(options: argparse.Namespace, entry: Entry) -> dict[str, Any]:
    """Return the median step time over ``--steps`` after ``--warmup``, with the other figures.

    Every step has different documents.
    """
    shape, on_gpu = SHAPES[options.shape], options.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    engine = build(options, entry)
    started = time.perf_counter() - begin
    world = engine.topology.world_size
    # Ranks that share documents share their tokens.
    own = options.tokens * world // engine.topology.dp_size
    seeds = range(options.warmup + options.steps)
    batches = [
        packed(shape, own, options.document, 1000 * engine.topology.dp_rank + s) for s in seeds
    ]
    times = []
    for batch in batches:
        begin = time.perf_counter()
        # The step ends with the gradient norm on the host, so no work is left on the device.
        result = engine.train_batch(batch, sft_loss)
        times.append(time.perf_counter() - begin)
    step = sorted(times[options.warmup :])[options.steps // 2]
    rate = options.tokens * world / step
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    if options.profile:
        # Every rank takes part, because profiling trains.
        table = profile(engine, batches)
        if engine.topology.rank == 0:
            name = "-".join(
                part for part in (options.profile.stem, entry.backend, entry.text) if part
            )
            options.profile.with_stem(name).write_text(table)
    # Every rank takes part.
    busy = busy_ms(engine, batches[:3]) if on_gpu else 0.0
    row = {
        "backend": entry.backend,
        "layout": entry.text,
        "shape": options.shape,
        "gpus": world,
        "tokens": options.tokens,
        "micro_batches": result.num_micro_batches,
        "document": options.document,
        "defaults": entry.has_defaults,
        "precision": engine.resolved()["precision.compute"],
        "max_tokens": engine.config.memory.max_tokens,
        "attention": getattr(engine, "kernel", options.attention),
        "compile": engine.config.memory.compile,
        "chunk": engine.config.memory.logit_chunk,
        "recompute": engine.config.memory.recompute,
        "options": engine.config.options or {},
        "step_ms": round(step * 1e3, 1),
        "gpu_ms": round(busy, 1),
        "tokens_per_s": round(rate),
        "mfu": round(flops_per_token(shape, options.document) * rate / PEAK / world, 4),
        "peak_gib": round(peak, 1),
        "loss": round(result.loss, 3),
        "start_s": round(started, 1),
        "first_step_s": round(times[0], 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else options.device,
    }
    engine.close()
    # The next engine's blocks have the same code, and torch compiles a function a few times only.
    torch.compiler.reset()
    return row


def compare(rows: list[dict[str, Any]]) -> str:
    """Return a table of the rows with the ratios of their rates to the first one's."""
    titles = "engine | precision | recomputed | ms a step | GPU ms | tokens/s | ratio | MFU"
    lines = [f"| {titles} | peak GiB | loss |", "|---" * 10 + "|"]
    for row in rows:
        recipe = row["options"].get("float8_recipe", "")
        share = row["options"].get("kept_activations", "")
        defaults = "defaults:" if row["defaults"] else ""
        cells = (
            row["backend"],
            " ".join(part for part in (defaults, row["precision"], recipe) if part),
            f"{row['recompute']}, {share} kept" if share else row["recompute"],
            row["step_ms"],
            row["gpu_ms"],
            f"{row['tokens_per_s']:,}",
            f"{row['tokens_per_s'] / rows[0]['tokens_per_s']:.2f}",
            f"{row['mfu']:.1%}",
            row["peak_gib"],
            row["loss"],
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def world_size() -> int:
    """Return the number of ranks of this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Open the group of torchrun's ranks for all engines of the run.

    On one rank there is none: each engine makes its own.
    """
    if world_size() == 1:
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def busy_ms(engine: Any, batches: list[Batch]) -> float:
    """Return the milliseconds of a step in which this rank's GPU computes or copies.

    Kernels that run at the same time count once. A collective that waits for other ranks counts.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as recorded:
        for batch in batches:
            engine.train_batch(batch, sft_loss)
    every = recorded.events() or ()
    events = [event for event in every if event.device_type.name == "CUDA"]
    ranges = [(event.time_range.start, event.time_range.end) for event in events]
    return union_length(ranges) / 1e3 / len(batches)


def union_length(ranges: list[tuple[float, float]]) -> float:
    """Return the length of the union of ranges."""
    total = 0.0
    reached = -math.inf
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def profile(engine: Any, batches: list[Batch]) -> str:
    """Return a table of kernels and host functions in three steps, by their own time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for batch in batches[:3]:
            engine.train_batch(batch, sft_loss)
    tables = [
        recorded.key_averages().table(sort_by=key, row_limit=18, max_name_column_width=60)
        for key in ("self_cuda_time_total", "self_cpu_time_total")
    ]
    return "\n".join(tables)


def main() -> None:
    """Parse the arguments, measure, and print one JSON line each on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="fsdp2", help="NAME[:SIZE=N[+SIZE=N…]] by commas")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=8192, help="packed tokens a step and GPU")
    parser.add_argument("--document", type=int, default=4096)
    parser.add_argument(
        "--defaults",
        nargs="?",
        const="only",
        choices=("only", "beside"),
        help="as engine-train with the backend alone; `beside`: then as the other arguments say",
    )
    parser.add_argument(
        "--precision",
        help="of the computation, NAME[:RECIPE] by commas; default: bfloat16, float32 on cpu",
    )
    parser.add_argument(
        "--max-tokens",
        type=read_micro_batch,
        help="of a micro-batch; default: a step is one; auto, with --defaults: what the trainer "
        "chooses for documents of --document tokens",
    )
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="default: where the engine can"
    )
    parser.add_argument("--no-reshard", dest="reshard", action="store_false")
    parser.add_argument(
        "--recompute",
        default="none",
        help="none or full[:SHARE] by commas, where SHARE of the activations is kept",
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument(
        "--profile", type=Path, help="write rank 0's profile of three steps there, a file a layout"
    )
    parser.add_argument(
        "--options", default="{}", help='JSON: engines\' own options by backend, {"megatron": {…}}'
    )
    options = parser.parse_args()
    options.precision = options.precision or ("float32" if options.device == "cpu" else "bfloat16")
    settings = len(options.precision.split(",")) * len(options.recompute.split(","))
    if options.max_tokens == AUTO and options.defaults != "only":
        parser.error("--max-tokens auto: expected --defaults, without `beside`")
    if options.defaults == "only" and settings > 1:
        parser.error("--defaults: one precision and recomputation, which engine-train chooses")
    layouts = entries(options.backend)
    if unknown := sorted(set(json.loads(options.options)) - {entry.backend for entry in layouts}):
        parser.error(f"--options: {', '.join(unknown)}: no backend of --backend {options.backend}")
    rows = []
    is_first = os.environ.get("RANK", "0") == "0"
    with process_group(options.device):
        for entry in (entry for layout in layouts for entry in settings_of(options, layout)):
            rows.append(measure(options, entry))
            gc.collect()
            if is_first:
                print(json.dumps(rows[-1]), flush=True)
    if is_first and (settings > 1 or options.defaults == "beside"):
        print(compare(rows), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
