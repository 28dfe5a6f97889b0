"""Training with images, what a tower costs text, and a rollout behind images.

``python -m benchmarks.vision`` runs it on one GPU with the shape of Qwen2.5-VL-3B and random
weights, so no model is needed. Its rows, one JSON line each, are:

- ``text model``: ``train_batch`` of the language model alone, on documents of text;
- ``text``: the same documents in the vision-language model, whose tower nothing reaches;
- ``mixed``: documents of as many tokens, of which a share has an image;
- ``rollout``: the duration of a weight sync, and how far the log-probs of completions behind images
  and behind text are from the engine's, in the dtype of both.

The last line has the time of ``text`` over that of ``text model`` and tokens/s of ``mixed`` over
``text``. ``--device cpu --shape tiny --server local`` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    Memory,
    ModelSource,
    OptimizerConfig,
    Precision,
    RolloutRegistry,
    SamplingParams,
    sft_loss,
)
from engine_api.hf_vision import Vision, read_vision
from engine_api.media import Media
from engine_api.rollout import Completion, PromptImages

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "text": {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
            "max_position_embeddings": 512,
        },
        "sections": [8, 4, 4],
        "tower": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
    },
    "3b": {
        "text": {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 128000,
        },
        "sections": [16, 24, 24],
        "tower": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
}
# Special tokens are the last ids of the vocabulary; text is drawn below them.
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|eos|>")


def write_models(shape: str, place: Path, device: str) -> tuple[Path, Path]:
    """Write the language model and the vision-language model, and return their folders.

    Their random weights are drawn on ``device``: an engine that draws them takes a minute.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        Qwen2_5_VLConfig,
        Qwen2Config,
    )

    own = SHAPES[shape]
    first = own["text"]["vocab_size"] - len(SPECIAL)
    ids = dict(zip(SPECIAL, range(first, first + len(SPECIAL)), strict=True))
    ends = {"bos_token_id": None, "eos_token_id": ids["<|eos|>"], "pad_token_id": None}
    # Published checkpoints are of as many tokens, tied, with this base.
    text = {**own["text"], **ends, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    plain = Qwen2Config(**text, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    write_weights(AutoModelForCausalLM, plain, place / "text", device)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": own["sections"]}
    tower = {**own["tower"], "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    pictured = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=tower,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    write_weights(AutoModelForImageTextToText, pictured, place / "pictured", device)
    write_processor(place / "pictured", own["text"]["vocab_size"])
    return place / "text", place / "pictured"


def write_weights(auto: Any, config: Any, folder: Path, device: str) -> None:
    """Write the model that a class of transformers makes, with random weights in bf16."""
    torch.manual_seed(0)
    with torch.device(device):
        made = auto.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)
    del made
    if device == "cuda":
        torch.cuda.empty_cache()


def write_processor(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer of one word for each id and the processor of images.

    A server plans its memory with them.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

    words = [*(f"w{i}" for i in range(vocabulary - len(SPECIAL))), *SPECIAL]
    numbers = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(numbers, unk_token=words[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=SPECIAL[-1], additional_special_tokens=[*SPECIAL[:-1]]
    )
    tokenizer.save_pretrained(folder)
    names = {
        "vision_start_token": SPECIAL[0],
        "vision_end_token": SPECIAL[1],
        "image_token": SPECIAL[2],
        "video_token": SPECIAL[3],
    }
    file = folder / "tokenizer_config.json"
    given = json.loads(file.read_text())
    given |= {"extra_special_tokens": names, "model_specific_special_tokens": names}
    file.write_text(json.dumps(given))
    Qwen2VLImageProcessorPil(
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 56 * 56, "longest_edge": 1024 * 28 * 28},
    ).save_pretrained(folder)


def draw_documents(
    options: argparse.Namespace, vision: Vision, seed: int, share: float, length: int
) -> list[dict[str, Any]]:
    """Return documents of random tokens, of which the first ``share`` begin with an image."""
    generator = torch.Generator().manual_seed(seed)
    below = SHAPES[options.shape]["text"]["vocab_size"] - len(SPECIAL)
    side = options.patches
    with_image = round(share * options.documents)
    documents: list[dict[str, Any]] = []
    for number in range(options.documents):
        ids = torch.randint(0, below, (length,), generator=generator)
        weight = torch.ones(length)
        weight[0] = 0.0
        document: dict[str, Any] = {"input_ids": ids, "loss_weight": weight}
        if number < with_image:
            grid = [1, side, side]
            features = vision.count_features(grid)
            if features + 3 > length:
                raise SystemExit(f"--document: expected at least {features + 3}, got {length}")
            ids[1 : 1 + features] = vision.image_token
            weight[: 2 + features] = 0.0
            pixels = torch.rand(side * side, *vision.row_shape, generator=generator) * 2 - 1
            document["media"] = {"pixels": pixels, "grid": torch.tensor([grid])}
        documents.append(document)
    return documents


@contextmanager
def engine_of(options: argparse.Namespace, folder: Path, *, trains: bool) -> Iterator[Any]:
    """Open an engine with the weights of a folder."""
    config = EngineConfig(
        model=ModelSource(path=str(folder)),
        optimizer=OptimizerConfig(lr=1e-5) if trains else None,
        precision=Precision(compute=options.dtype),
        memory=Memory(
            max_tokens=options.max_tokens, compile=options.compile, recompute=options.recompute
        ),
    )
    engine: Any = EngineRegistry.create(backend="fsdp2", device=options.device, config=config)
    engine.initialize()
    try:
        yield engine
    finally:
        engine.close()
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def measure_training(
    options: argparse.Namespace, engine: Any, vision: Vision, name: str, share: float
) -> dict[str, Any]:
    """Return the row of ``train_batch`` on documents of which a share has images."""
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for step in range(options.warmup + options.steps):
        batch = Batch.pack(draw_documents(options, vision, step, share, options.document))
        begin = time.perf_counter()
        # The update ends with the gradient norm on the host, so no work is left on the device.
        engine.train_batch(batch, sft_loss)
        times.append(time.perf_counter() - begin)
    counted = sorted(times[options.warmup :])
    seconds = counted[len(counted) // 2]
    images = round(share * options.documents)
    peak = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else 0.0
    return {
        "row": name,
        "shape": options.shape,
        "ms": round(seconds * 1e3, 1),
        "min_ms": round(counted[0] * 1e3, 1),
        "max_ms": round(counted[-1] * 1e3, 1),
        "tokens": options.documents * options.document,
        "tokens_per_s": round(options.documents * options.document / seconds),
        "images": images,
        "images_per_s": round(images / seconds, 1),
        "patches": images * options.patches**2,
        "peak_gib": round(peak, 1),
    }


def measure_rollout(
    options: argparse.Namespace, engine: Any, folder: Path, vision: Vision
) -> dict[str, Any]:
    """Return the row of a rollout that serves the engine's weights."""
    model = ModelSource(path=str(folder))
    begin = time.perf_counter()
    rollout: Any = RolloutRegistry.create(
        name=options.server,
        device=options.device,
        model=model,
        pad_token_id=0,
        dtype=options.dtype,
        batch_size=options.documents,
        **json.loads(options.rollout),
    )
    started = time.perf_counter() - begin
    exporter: Any = RolloutRegistry.create_exporter(
        name=options.server, device=options.device, model=model, dtype=options.dtype
    )
    try:
        syncs: list[float] = []
        for version in range(options.warmup + options.steps):
            begin = time.perf_counter()
            result = rollout.update_weights(exporter.export(engine), version)
            if options.device == "cuda":
                torch.cuda.synchronize()
            syncs.append(time.perf_counter() - begin)
        length = options.document - options.new
        documents = draw_documents(options, vision, 0, options.share, length)
        prompts = [document["input_ids"].tolist() for document in documents]
        images = [_prompt_images(document) for document in documents]
        sampling = SamplingParams(max_new_tokens=options.new, seed=1)
        begin = time.perf_counter()
        completions = rollout.generate(prompts, sampling, images=images)
        generated = time.perf_counter() - begin
    finally:
        exporter.close()
        rollout.close()
    counted = sorted(syncs[options.warmup :])
    tokens = sum(len(one.tokens) for one in completions)
    return {
        "row": "rollout",
        "shape": options.shape,
        "server": options.server,
        "dtype": options.dtype,
        "sync_ms": round(counted[len(counted) // 2] * 1e3, 1),
        "audited": result.audited,
        "tensors": result.num_tensors,
        "bytes": result.num_bytes,
        "start_s": round(started, 1),
        "tokens_per_s": round(tokens / generated),
        **_compare(engine, documents, completions),
    }


def _prompt_images(document: dict[str, Any]) -> PromptImages | None:
    media = Media.pack([document.get("media")])
    if media is None:
        return None
    return PromptImages(media=media, placeholders=[], pictures=())


def _compare(
    engine: Any, documents: Sequence[dict[str, Any]], completions: Sequence[Completion]
) -> dict[str, float]:
    """Return distances of log-probs per token from the engine's, behind images and behind text."""
    rows: list[dict[str, Any]] = []
    for one in completions:
        prompt = documents[one.prompt_index]
        ids = torch.cat([prompt["input_ids"], torch.tensor(one.tokens)])
        rows.append({"input_ids": ids, "media": prompt.get("media")})
    scored = engine.infer_batch(Batch.pack(rows)).log_probs.float().cpu()
    parts = scored.split([len(row["input_ids"]) for row in rows])
    apart: dict[str, list[torch.Tensor]] = {"images": [], "text": []}
    for one, row, part in zip(completions, rows, parts, strict=True):
        kind = "text" if row["media"] is None else "images"
        given = torch.tensor(one.log_probs)
        apart[kind].append(given - part[-len(given) :])
    found: dict[str, float] = {}
    for kind, distances in apart.items():
        if distances:
            every = torch.cat(distances)
            found[f"rms_{kind}"] = float(f"{every.square().mean().sqrt():.1e}")
            found[f"max_{kind}"] = float(f"{every.abs().max():.1e}")
    return found


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield all rows."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory(prefix="vision-") as place:
        text, pictured = write_models(options.shape, Path(place), options.device)
        vision = read_vision(AutoConfig.from_pretrained(pictured), "benchmarks.vision")
        assert vision is not None
        with engine_of(options, text, trains=True) as engine:
            alone = measure_training(options, engine, vision, "text model", 0.0)
        yield alone
        with engine_of(options, pictured, trains=True) as engine:
            only = measure_training(options, engine, vision, "text", 0.0)
            yield only
            mixed = measure_training(options, engine, vision, "mixed", options.share)
        yield mixed
        if options.server != "none":
            with engine_of(options, pictured, trains=False) as engine:
                yield measure_rollout(options, engine, pictured, vision)
        yield {
            "row": "ratios",
            "text_over_text_model": round(only["ms"] / alone["ms"], 3),
            "mixed_tokens_over_text": round(mixed["tokens_per_s"] / only["tokens_per_s"], 3),
            "torch": torch.__version__,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="3b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None, help="bfloat16, or float32 on a CPU")
    parser.add_argument("--documents", type=int, default=16, help="of a step")
    parser.add_argument("--document", type=int, default=1024, help="tokens of a document")
    parser.add_argument("--share", type=float, default=0.5, help="documents with an image")
    parser.add_argument("--patches", type=int, default=32, help="of an image's height and width")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--recompute", choices=("none", "full"), default="full")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--server", default="vllm", help="a rollout with vision, or none")
    parser.add_argument("--new", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--rollout", default="{}", help="rollout.options, as JSON")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.dtype is None:
        options.dtype = "float32" if options.device == "cpu" else "bfloat16"
    for row in measure(options):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
