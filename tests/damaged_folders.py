"""Model folders with damages: hypothesis' strategies of damages, and functions that apply them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tiny_models import tiny_model

Damage = Callable[[Path], None]

_KEYS = (
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "attention_bias",
    "attention_dropout",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "mlp_only_layers",
    "norm_topk_prob",
    "dtype",
    "pad_token_id",
    "eos_token_id",
    "quantization_config",
    "text_config",
    "auto_map",
    "torch_dtype",
    "id2label",
    "num_labels",
    "use_cache",
    "_attn_implementation",
)
_NUMBERS = st.sampled_from(
    [
        0,
        -1,
        1,
        2,
        3,
        4,
        7,
        10**9,
        2**31,
        2**63,
        10**30,
        0.5,
        -0.0,
        1e-30,
        1e300,
        float("nan"),
        float("inf"),
    ]
)
_WORDS = st.sampled_from(
    [
        "",
        "silu",
        "gelu",
        "nonesuch",
        "qwen3",
        "gpt2",
        "mamba",
        "vit",
        "bert",
        "default",
        "yarn",
        "linear",
        "dynamic",
        "longrope",
        "full_attention",
        "float32",
        "bfloat16",
        "int7",
        "\ud800",
        "\x00",
        "../x",
        "x" * 5000,
    ]
)
_PLAIN = st.none() | st.booleans() | _NUMBERS | _WORDS
_ROPE = st.dictionaries(
    st.sampled_from(
        [
            "rope_type",
            "rope_theta",
            "factor",
            "partial_rotary_factor",
            "long_factor",
            "full_attention",
            "beta_fast",
        ]
    ),
    _PLAIN | st.lists(_NUMBERS, max_size=4),
    max_size=4,
)
_VALUES = _PLAIN | _ROPE | st.lists(_PLAIN, max_size=5)


def _set(key: str, value: Any) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))

    return damage


def _remove_key(key: str) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(
            json.dumps(
                {name: value for name, value in json.loads(file.read_text()).items() if name != key}
            )
        )

    return damage


def _index(content: Any) -> Damage:
    return lambda folder: _write(
        folder / "model.safetensors.index.json", json.dumps(content).encode()
    )


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _bytes_at(name: str, at: int, content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        if (file := folder / name).is_file():
            data = bytearray(file.read_bytes())
            start = at % max(1, len(data))
            data[start : start + len(content)] = content
            file.write_bytes(bytes(data))

    return damage


def _cut(name: str, share: float) -> Damage:
    def damage(folder: Path) -> None:
        if (file := folder / name).is_file():
            file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])

    return damage


def _replace(name: str, how: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if how == "folder":
            (folder / name).mkdir(exist_ok=True)
        elif how == "loop":
            (folder / name).symlink_to(folder / name)

    return damage


_NAMES = st.sampled_from(["config.json", "model.safetensors", "generation_config.json"])
_MAPS = st.dictionaries(
    st.sampled_from(["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "x"]),
    st.sampled_from(
        [
            "model.safetensors",
            "config.json",
            "absent.safetensors",
            "../model.safetensors",
            "/etc/passwd",
            "",
            ".",
        ]
    )
    | _PLAIN,
    max_size=4,
)
DAMAGES = st.lists(
    st.one_of(
        st.builds(_set, st.sampled_from(_KEYS), _VALUES),
        st.builds(_remove_key, st.sampled_from(_KEYS)),
        st.builds(
            _index,
            st.fixed_dictionaries({"weight_map": _MAPS | _PLAIN})
            | _PLAIN
            | st.lists(_PLAIN, max_size=2),
        ),
        st.builds(_bytes_at, _NAMES, st.integers(0, 3000), st.binary(min_size=1, max_size=8)),
        st.builds(_cut, _NAMES, st.floats(0, 1)),
        st.builds(_replace, _NAMES, st.sampled_from(["nothing", "folder", "loop"])),
    ),
    min_size=1,
    max_size=2,
)


def whole_folder(folder: Path, model_type: str) -> Path:
    """Write a tiny model without any damage."""
    tiny_model(model_type, num_hidden_layers=2).save_pretrained(folder)
    return folder


def damaged(whole: Path, folder: Path, damages: list[Damage]) -> Path:
    """Copy a folder and damage the copy."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    for damage in damages:
        try:
            damage(folder)
        # An earlier damage may have removed the file, or left nothing to change in it.
        except (OSError, ValueError):
            continue
    return folder
