"""Agreement and training throughput of engine-fsdp on a model of each mechanism, in bf16.

``python -m benchmarks.mechanisms --output DIR`` makes a model with random bf16 weights for each
entry of ``MODELS``. All have as many active parameters as the first one, a Qwen3. Of each model

- transformers' eager implementation computes log-probs and gradients in float64 and in bf16, one
  document at a time, in a process that cannot import fla, causal-conv1d or mamba-ssm;
- engine-fsdp computes the same documents packed, in bf16 with the device's kernels, in another
  process. Its differences from float64 stand beside those of transformers in bf16;
- ``train_batch`` of engine-fsdp is timed on other documents, after all comparisons and one model
  after another.

The output is one JSON line each, which ``DIR/rows.jsonl`` gets at once, and a table. ``log_probs``
and ``mean`` are the largest and the mean difference of a token's log-prob in nats, ``gradient`` is
the norm of the difference of all gradients over the gradient's norm, and ``plain_*`` the same of
transformers in bf16. Where scores nearly tie, routers and indexers choose differently in bf16.
Models with experts are therefore compared with as many experts as a token has, and timed with four
times as many; indexers choose in both. On a CPU, in two minutes:

``python -m benchmarks.mechanisms --device cpu --tiny --steps 1 --warmup 1``
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    Precision,
    sft_loss,
)
from engine_torch.boxes import local_of

KERNELS = ("fla", "causal_conv1d", "mamba_ssm")
DOCUMENTS = (900, 31, 500, 64, 1, 1000)
TINY_DOCUMENTS = (37, 5, 1, 60)
LAYERS = 12
# A model's weights must be large enough for caps, sinks and windows to matter.
COMMON: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 12,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}
_TINY_MLA: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
}
_DELTA: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
}
_TINY_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_DEEPSEEK: dict[str, Any] = {
    **_MLA,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
_WITH_EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4}
_EVERY_DEEPSEEK: dict[str, Any] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A mechanism's model.

    Attributes:
        mechanism: name of what it is there for.
        model_type: its family, by transformers' name.
        free: the size that is chosen for the number of active parameters.
        sizes: keys of its configuration, in addition to ``COMMON``.
        tiny: keys of the tiny one, in addition to ``TINY`` and ``sizes``.
        scales: factors of weights by the end of their names.
        tokens: the most tokens of a timed step, or None for those of the command.
        compared: keys of the model that is compared, where it is not the one that is timed.
    """

    mechanism: str
    model_type: str
    free: str = "intermediate_size"
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tiny: Mapping[str, Any] = field(default_factory=dict[str, Any])
    scales: Mapping[str, float] = field(default_factory=dict[str, float])
    tokens: int | None = None
    compared: Mapping[str, Any] = field(default_factory=dict[str, Any])


MODELS: dict[str, Model] = {
    "qwen3": Model(mechanism="none", model_type="qwen3", tiny={"head_dim": 16}),
    "qwen3-moe": Model(
        mechanism="experts",
        model_type="qwen3_moe",
        free="moe_intermediate_size",
        sizes=_WITH_EXPERTS,
        tiny={"head_dim": 16},
        compared={"num_experts": 4},
    ),
    "gemma2": Model(
        mechanism="softcap",
        model_type="gemma2",
        sizes={
            "num_attention_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 256,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
        tiny={"head_dim": 32, "sliding_window": 12},
    ),
    "gpt-oss": Model(
        mechanism="sinks",
        model_type="gpt_oss",
        sizes={
            "num_attention_heads": 24,
            "head_dim": 64,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
        tiny={"num_attention_heads": 4, "head_dim": 16, "sliding_window": 12},
        compared={"num_local_experts": 4},
        # Its queries and keys are not normalized, and its experts clamp: at the size of the other
        # models' weights, rounding grows in each layer until nothing of the result is left.
        scales={"q_proj.weight": 0.3, "gate_up_proj": 0.3},
    ),
    "deepseek-v3": Model(
        mechanism="MLA, router bias",
        model_type="deepseek_v3",
        free="moe_intermediate_size",
        sizes=_DEEPSEEK,
        tiny=_TINY_MLA,
        compared=_EVERY_DEEPSEEK,
    ),
    "gemma4": Model(
        mechanism="heads of 512",
        model_type="gemma4_text",
        sizes={
            "num_attention_heads": 8,
            "head_dim": 256,
            "sliding_window": 256,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 256,
        },
        # Its wide heads keep their 512.
        tiny={
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "sliding_window": 12,
            # The last of six layers has them.
            "num_hidden_layers": 6,
        },
        # Its scores are not divided by the root of the width: without training they would be so
        # large that each token attends to one other, which rounding chooses.
        scales={"q_norm.weight": 0.1},
    ),
    "qwen3-next": Model(
        mechanism="linear attention, experts",
        model_type="qwen3_next",
        free="moe_intermediate_size",
        sizes={**_DELTA, **_WITH_EXPERTS},
        tiny=_TINY_DELTA | {"shared_expert_intermediate_size": 32},
        compared={"num_experts": 4},
    ),
    "qwen3.5": Model(
        mechanism="linear attention",
        model_type="qwen3_5_text",
        sizes=_DELTA,
        tiny=_TINY_DELTA,
    ),
    "nemotron-h": Model(
        mechanism="state space (Mamba 2)",
        model_type="nemotron_h",
        sizes={
            # Attention, state spaces and MLPs are layers of their own.
            "layers_block_type": (["linear_attention", "mlp"] * 3 + ["full_attention", "mlp"]) * 3,
            "num_hidden_layers": 2 * LAYERS,
            "mamba_num_heads": 48,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
        },
        tiny={
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "head_dim": 16,
            "chunk_size": 16,
        },
    ),
    "deepseek-v3.2": Model(
        mechanism="selected tokens (DSA)",
        model_type="deepseek_v32",
        free="moe_intermediate_size",
        sizes={
            **_DEEPSEEK,
            "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
            "index_topk": 256,
            "index_n_heads": 8,
        },
        tiny={
            **_TINY_MLA,
            "mlp_layer_types": ["dense", "sparse"] * 2,
            "index_topk": 8,
            "index_head_dim": 32,
        },
        compared=_EVERY_DEEPSEEK,
        # It masks the whole pack.
        tokens=4096,
    ),
}
BASELINE = "qwen3"


# --- the models ---------------------------------------------------------------------------------


def make_config(name: str, *, tiny: bool, active: int | None = None, compared: bool = False) -> Any:
    """Return a model's configuration, with ``active`` active parameters if that is given."""
    chosen = MODELS[name]
    keys = COMMON | dict(chosen.sizes)
    if tiny:
        keys |= TINY | dict(chosen.tiny)
    if compared:
        keys |= dict(chosen.compared)
    if active is None:
        return _configure(chosen.model_type, keys)
    # The count grows by the same number with each unit.
    low, high = (
        count_active(_configure(chosen.model_type, keys | {chosen.free: size}))
        for size in (64, 1088)
    )
    step = 16 if tiny else 64
    size = 64 + (active - low) * 1024 / (high - low)
    keys[chosen.free] = max(step, round(size / step) * step)
    return _configure(chosen.model_type, keys)


def _configure(model_type: str, keys: Mapping[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made: Any = CONFIG_MAPPING[model_type]
    return made(**keys)


def count_active(config: Any) -> int:
    """Return the number of parameters that compute a token, without the embedding's other rows.

    Of experts those count that a token has; a tied head counts once.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    total = 0.0
    for name, parameter in model.named_parameters():
        share = 1.0
        if ".experts." in name:
            experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
            share = text.num_experts_per_tok / experts
        total += parameter.numel() * share
    return round(total)


def make_model(name: str, folder: Path, *, device: str, tiny: bool, compared: bool) -> None:
    """Write a model with random bf16 weights and router biases."""
    from transformers import AutoModelForCausalLM

    active = count_active(make_config(BASELINE, tiny=tiny))
    wanted = None if name == BASELINE else active
    config = make_config(name, tiny=tiny, active=wanted, compared=compared)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # No weight has a value that would hide it, such as 0 or 1.
            parameter.add_(0.02 * torch.randn_like(parameter))
            for end, factor in MODELS[name].scales.items():
                if key.endswith(end):
                    parameter.mul_(factor)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_((0.05 * torch.randn_like(buffer)).to(torch.bfloat16))
    model.save_pretrained(folder)


def documents(vocabulary: int, lengths: Sequence[int]) -> list[Tensor]:
    """Return random token ids of documents."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]


# --- agreement ----------------------------------------------------------------------------------


def _own_documents(folder: Path, *, tiny: bool) -> list[Tensor]:
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    return documents(vocabulary, TINY_DOCUMENTS if tiny else DOCUMENTS)


def compute_plainly(
    folder: Path, rows: Sequence[Tensor], *, device: str, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probs and gradients by transformers' eager implementation, by document."""
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain)
    model = model.eval().to(device)
    total = sum(len(ids) - 1 for ids in rows)
    found: list[Tensor] = []
    for ids in rows:
        placed = ids.to(device)
        logits = model(input_ids=placed[None], use_cache=False).logits[0]
        # As the engine does: scores of bf16 logits are taken in float32.
        scores = (logits if dtype == torch.float64 else logits.float()).log_softmax(-1)
        picked = scores[:-1].gather(-1, placed[1:, None])[:, 0]
        if len(ids) > 1:
            (-picked.sum() / total).backward()
        found.append(torch.cat([picked.new_zeros(1), picked.detach()]).double().cpu())
    gradients = {
        name: parameter.grad.float().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return torch.cat(found), gradients


def compute_oracle(name: str, folder: Path, *, device: str, tiny: bool) -> None:
    """Write the model, what float64 has for it, and how far off transformers in bf16 is."""
    make_model(name, folder, device=device, tiny=tiny, compared=True)
    _free(device)
    rows = _own_documents(folder, tiny=tiny)
    exact, gradients = compute_plainly(folder, rows, device=device, dtype=torch.float64)
    _free(device)
    plain, rounded = compute_plainly(folder, rows, device=device, dtype=torch.bfloat16)
    found = {f"plain_{key}": value for key, value in apart(plain, exact).items()}
    found["plain_gradient"], found["plain_worst"], _ = gradients_apart(rounded, gradients)
    save_file({"log_probs": exact}, folder / "expected.safetensors_")
    save_file(gradients, folder / "gradients.safetensors_")
    (folder / "plain.json").write_text(json.dumps(found))


def _free(device: str) -> None:
    """Return the memory of models that are gone, which other processes need."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def apart(got: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the largest and the mean difference of log-probs in nats."""
    difference = (got.double().cpu() - exact).abs()
    return {"log_probs": float(difference.max()), "mean": float(difference.mean())}


def gradients_apart(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor]
) -> tuple[float, float, str]:
    """Return the relative difference of all gradients, and the worst weight's with its name.

    A weight's is relative to its gradient's norm, or to a thousandth of the norm of all.
    """
    squares = {name: float(one.double().square().sum()) for name, one in want.items()}
    norm = sum(squares.values()) ** 0.5
    total = 0.0
    worst = (0.0, "")
    for name, one in want.items():
        given = got[name].double().cpu() if name in got else torch.zeros(())
        square = float((given - one.double()).square().sum())
        total += square
        relative = square**0.5 / max(squares[name] ** 0.5, 1e-3 * norm)
        # A gradient that is not a number must not pass a comparison.
        relative = math.inf if math.isnan(relative) else relative
        if relative > worst[0]:
            worst = (relative, name)
    return total**0.5 / norm, worst[0], worst[1]


def build(folder: Path, options: argparse.Namespace, *, tokens: int, compiled: bool) -> Any:
    """Build engine-fsdp over a folder and initialize it."""
    config = EngineConfig(
        model=ModelSource(path=str(folder)),
        optimizer=OptimizerConfig(lr=1e-6),
        precision=Precision(compute="bfloat16"),
        memory=Memory(max_tokens=tokens, compile=compiled, recompute=options.recompute),
    )
    engine = EngineRegistry.create(backend="fsdp2", device=options.device, config=config)
    engine.initialize()
    return engine


def compare(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return how far off engine-fsdp in bf16 is, beside transformers in bf16."""
    rows = _own_documents(folder, tiny=options.tiny)
    batch = Batch.pack(
        [
            {"input_ids": ids, "loss_weight": torch.tensor([0.0] + [1.0] * (len(ids) - 1))}
            for ids in rows
        ]
    )
    tokens = sum(map(len, rows))
    engine = build(folder, options, tokens=tokens, compiled=options.compile)
    try:
        exact = load_file(folder / "expected.safetensors_")["log_probs"]
        found: dict[str, Any] = apart(engine.infer_batch(batch).log_probs, exact)
        engine.forward_backward(batch, sft_loss)
        grads = {
            entry.name: local_of(entry.param.grad).float()
            for entry in engine.table
            if entry.trainable and entry.param.grad is not None
        }
        wanted = load_file(folder / "gradients.safetensors_")
        if unknown := sorted(set(wanted) - {entry.name for entry in engine.table}):
            raise ValueError(
                f"{name}: the engine has no weight {unknown[0]}, whose gradient transformers has"
            )
        found["gradient"], found["worst"], found["worst_weight"] = gradients_apart(grads, wanted)
    finally:
        engine.close()
    # They are twice as large as the model.
    (folder / "gradients.safetensors_").unlink()
    return {
        "model": name,
        "mechanism": MODELS[name].mechanism,
        "model_type": MODELS[name].model_type,
        "documents": list(map(len, rows)),
        **found,
        **json.loads((folder / "plain.json").read_text()),
        **_environment(options),
    }


def _environment(options: argparse.Namespace) -> dict[str, Any]:
    import importlib.util

    import transformers

    return {
        "compile": options.compile,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kernels": [one for one in KERNELS if importlib.util.find_spec(one) is not None],
    }


# --- throughput ---------------------------------------------------------------------------------


def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the median time of a training step, and the tokens each second."""
    tokens = min(options.tokens, MODELS[name].tokens or options.tokens)
    on_gpu = options.device == "cuda"
    # Shapes of an earlier model of this process must not count as recompilations of this one.
    torch._dynamo.reset()  # noqa: SLF001
    if MODELS[name].compared:
        make_model(name, folder, device=options.device, tiny=options.tiny, compared=False)
    _free(options.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    engine = build(folder, options, tokens=tokens, compiled=options.compile)
    started = time.perf_counter() - begin
    try:
        times: list[float] = []
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        for seed in range(options.warmup + options.steps):
            batch = _packed(vocabulary, tokens, options.document, seed)
            begin = time.perf_counter()
            # The step ends with the gradient norm on the host: no work is left on the device.
            engine.train_batch(batch, sft_loss)
            times.append(time.perf_counter() - begin)
    finally:
        engine.close()
    step = sorted(times[options.warmup :])[options.steps // 2]
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    return {
        "model": name,
        "active_parameters": count_active(config),
        "tokens": tokens,
        "document": options.document,
        "step_ms": round(step * 1e3, 1),
        "tokens_per_s": round(tokens / step),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if on_gpu else 0.0,
        "start_s": round(started, 1),
        "first_step_s": round(times[0], 1),
        **_environment(options),
    }


def _packed(vocabulary: int, tokens: int, document: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.ones(document)
    weight[0] = 0.0
    ids = torch.randint(3, vocabulary, (tokens // document, document), generator=generator)
    return Batch.pack([{"input_ids": row, "loss_weight": weight} for row in ids])


# --- the command --------------------------------------------------------------------------------


def run_step(step: str, names: Sequence[str], root: Path, options: argparse.Namespace) -> str:
    """Run a step in a process of its own, and return why it failed, or an empty text.

    Its output goes to ``<step>-<name>.log``, and its lines of JSON to standard output.
    """
    log = options.output / f"{step}-{names[0]}.log"
    command = [sys.executable, "-m", "benchmarks.mechanisms", *sys.argv[1:], "--models"]
    command += [",".join(names), "--step", step, "--folder", str(root)]
    with log.open("w") as file:
        ended = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, timeout=options.deadline, check=False
        )
    if ended.returncode == 0:
        return ""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [f"exit {ended.returncode}"])[-1][:300]


def _rows_of(root: Path, names: Sequence[str], kind: str) -> dict[str, dict[str, Any]]:
    files = {name: root / name / f"{kind}.json" for name in names}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def run_all(names: Sequence[str], root: Path, options: argparse.Namespace) -> dict[str, str]:
    """Run all steps of all models, and return the failures by model."""
    failures: dict[str, str] = {}

    def check(name: str) -> None:
        for step in ("oracle", "agreement"):
            try:
                failed = run_step(step, [name], root, options)
            except subprocess.TimeoutExpired:
                failed = f"no result in {options.deadline} seconds"
            if failed:
                failures[name] = f"{step}: {failed}"
                return

    # Comparisons share the device; times do not.
    with ThreadPoolExecutor(options.lanes) as pool:
        list(pool.map(check, names))
    left = [name for name in names if (root / name / "config.json").is_file()]
    while left and options.steps:
        try:
            failed = run_step("speed", left, root, options)
        except subprocess.TimeoutExpired:
            failed = f"no result in {options.deadline} seconds"
        done = _rows_of(root, left, "speed")
        left = [name for name in left if name not in done]
        if failed and left:
            # The first without a result ended the process.
            failures[left[0]] = "; ".join(filter(None, [failures.get(left[0]), f"speed: {failed}"]))
            left = left[1:]
    return failures


def run_named(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Run one step of the named models in this process."""
    if options.step == "oracle":
        for kernel in KERNELS:
            # transformers would take its functions from it, on any device and in any dtype.
            sys.modules[kernel] = None  # type: ignore[assignment]
    for name in names:
        folder = options.folder / name
        if options.step == "oracle":
            compute_oracle(name, folder, device=options.device, tiny=options.tiny)
        else:
            function = compare if options.step == "agreement" else measure
            row = function(name, folder, options)
            (folder / f"{options.step}.json").write_text(json.dumps(row))
            # At once: the command may be ended before its last model.
            _record(row, options)


def _record(row: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Add a row to the file of results."""
    with (options.output / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def table(agreement: Mapping[str, Any], speed: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of all results."""
    base = speed.get(BASELINE, {}).get("tokens_per_s")
    yield (
        "| model | mechanism | largest, mean difference (nats) | transformers in bf16 "
        "| gradient | transformers in bf16 | tokens/s | of Qwen3 |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, model in MODELS.items():
        one, timed = agreement.get(name), speed.get(name)
        if one is None and timed is None:
            continue
        cells = [name, model.mechanism]
        for prefix in ("", "plain_"):
            given = one and f"{one[prefix + 'log_probs']:.3f}, {one[prefix + 'mean']:.4f}"
            cells.append(given or "")
        cells += [f"{one[prefix + 'gradient']:.4f}" if one else "" for prefix in ("", "plain_")]
        rate = timed["tokens_per_s"] if timed else None
        cells.append(f"{rate:,}" if rate else "")
        cells.append(f"{rate / base:.2f}" if rate and base else "")
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    """Measure all models, or run one step of some, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS), help="names, by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--output", type=Path, default=Path("runs/mechanisms"))
    parser.add_argument("--lanes", type=int, default=3, help="models that are compared at once")
    parser.add_argument("--tokens", type=int, default=8192, help="of a timed step")
    parser.add_argument("--document", type=int, default=2048, help="tokens of a timed document")
    parser.add_argument("--steps", type=int, default=8, help="timed steps; 0 leaves the times out")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--deadline", type=float, default=400, help="seconds of a process")
    parser.add_argument("--step", choices=("oracle", "agreement", "speed"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if options.tiny:
        options.tokens, options.document = min(options.tokens, 128), min(options.document, 64)
    if options.step:
        run_named(options, names)
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    shared = "/dev/shm"  # noqa: S108 - the files belong to this machine and are not secret
    place = shared if os.access(shared, os.W_OK) else None
    root = Path(tempfile.mkdtemp(prefix="mechanisms-", dir=place))
    try:
        failures = run_all(names, root, options)
        agreement = _rows_of(root, names, "agreement")
        speed = _rows_of(root, names, "speed")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for name, why in failures.items():
        row = {"model": name, "failed": why}
        _record(row, options)
        print(json.dumps(row), flush=True)
    for row in [*agreement.values(), *speed.values()]:
        print(json.dumps(row), flush=True)
    lines = list(table(agreement, speed))
    (options.output / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
