"""Shapes of known models, for measurements with random weights.

A shape is a ``config.json``, the names of its tensors, and files of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_A3B = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_8B = _COMMON | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _COMMON
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": _COMMON
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _8B,
    # As many layers as one GPU trains.
    "qwen3-8b-12": _8B | {"num_hidden_layers": 12},
    "qwen3-30b-a3b": _A3B,
    # Half the layers fit one GPU together with their export.
    "qwen3-30b-a3b-cut": _A3B | {"num_hidden_layers": 24},
    # As many layers as two GPUs train.
    "qwen3-30b-a3b-6": _A3B | {"num_hidden_layers": 6},
    "tiny": _COMMON
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
    },
    "tiny-moe": _A3B
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "head_dim": 64,
        "vocab_size": 2048,
    },
}


def config(shape: str, layers: int | None = None) -> dict[str, Any]:
    """Return the content of ``config.json``, cut or extended to ``layers`` layers."""
    return SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})


def model_folder(shape: str, layers: int | None = None) -> Path:
    """Return a folder that holds only ``config.json``."""
    folder = Path(tempfile.mkdtemp(prefix=f"{shape}-"))
    (folder / "config.json").write_text(json.dumps(config(shape, layers)))
    return folder


def weights(shape: str, layers: int | None, device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield random bf16 weights at the scale of a trained model's, one at a time."""
    generator = torch.Generator(device).manual_seed(0)
    for name, size in tensors(shape, layers):
        if name.endswith("norm.weight"):
            yield name, torch.ones(size, dtype=torch.bfloat16, device=device)
        else:
            yield (
                name,
                torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) * 0.02,
            )


def whole_folder(shape: str, layers: int | None = None) -> Path:
    """Return a Hugging Face folder with ``weights``, made once per machine.

    The folder is in the machine's shared memory where there is one. An engine that draws the
    weights of an 8B model itself takes minutes, on every rank. The first rank of a launcher writes,
    the remaining ranks wait.
    """
    shared = "/dev/shm"  # noqa: S108 - the files belong to this machine and are not secret
    root = Path(shared if os.access(shared, os.W_OK) else tempfile.gettempdir())
    asked = json.dumps([shape, layers, config(shape, layers)])
    folder = root / f"enginehouse-{shape}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"
    if int(os.environ.get("LOCAL_RANK", "0")) == 0 and not folder.is_dir():
        # The weights are drawn in a separate process, whose GPU memory is free at the measurement.
        subprocess.run(
            [sys.executable, "-m", "benchmarks.shapes", shape, str(layers or 0), str(folder)],
            check=True,
        )
    deadline = time.monotonic() + 600
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{folder} was not written within 600 s: see what the first rank printed"
            )
        time.sleep(0.5)
    return folder


def main() -> None:
    """Write a whole folder for ``SHAPE LAYERS FOLDER``, where 0 layers means all."""
    shape, layers, folder = sys.argv[1], int(sys.argv[2]) or None, Path(sys.argv[3])
    needed, free = (
        sum(2 * math.prod(size) for _, size in tensors(shape, layers)),
        shutil.disk_usage(folder.parent).free,
    )
    if needed > free:
        sys.exit(
            f"{folder.parent} has {free / 1e9:.1f} GB free, {shape} takes {needed / 1e9:.1f} GB: "
            "make room"
        )
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        _write(partial, shape, layers)
        # Another command of this machine may have been faster.
        if not folder.is_dir():
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, shape: str, layers: int | None, shard_bytes: int = 2 << 30) -> None:
    (folder / "config.json").write_text(json.dumps(config(shape, layers) | {"dtype": "bfloat16"}))
    place: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(place.values())):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        place.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, value in weights(shape, layers, "cuda" if torch.cuda.is_available() else "cpu"):
        shard[name] = value.cpu()
        if sum(v.nbytes for v in shard.values()) >= shard_bytes:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": place})
    )


def tensors(shape: str, layers: int | None = None) -> list[tuple[str, tuple[int, ...]]]:
    """Return checkpoint names and shapes, in the order of the model."""
    return list(_tensors(config(shape, layers)))


def _tensors(own: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = own["hidden_size"], own["head_dim"]
    queries, keys = own["num_attention_heads"] * width, own["num_key_value_heads"] * width
    experts, inner = (
        own.get("num_experts"),
        own.get("moe_intermediate_size", own["intermediate_size"]),
    )
    yield "model.embed_tokens.weight", (own["vocab_size"], hidden)
    for layer in range(own["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, shape in (
            ("q", (queries, hidden)),
            ("k", (keys, hidden)),
            ("v", (keys, hidden)),
            ("o", (hidden, queries)),
        ):
            yield f"{at}.self_attn.{name}_proj.weight", shape
        yield f"{at}.self_attn.q_norm.weight", (width,)
        yield f"{at}.self_attn.k_norm.weight", (width,)
        if experts:
            yield f"{at}.mlp.gate.weight", (experts, hidden)
        for mlp in [f"{at}.mlp.experts.{e}" for e in range(experts)] if experts else [f"{at}.mlp"]:
            yield f"{mlp}.gate_proj.weight", (inner, hidden)
            yield f"{mlp}.up_proj.weight", (inner, hidden)
            yield f"{mlp}.down_proj.weight", (hidden, inner)
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not own["tie_word_embeddings"]:
        yield "lm_head.weight", (own["vocab_size"], hidden)


if __name__ == "__main__":
    main()
