"""Tiny models whose folders have a head that predicts further tokens (MTP), and what is kept."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import Tensor

LAYERS = 4
WEIGHTS = "model-00001-of-00002.safetensors"
HEAD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
# By family the prefix of the head's layer, and its other weights.
_HEADS = {
    "deepseek_v3": (f"model.layers.{LAYERS}.", f"model.layers.{LAYERS}."),
    "glm4_moe": (f"model.layers.{LAYERS}.", f"model.layers.{LAYERS}."),
    "qwen3_next": ("mtp.layers.0.", "mtp."),
    "qwen3_5_text": ("mtp.layers.0.", "mtp."),
}


@dataclass(frozen=True, kw_only=True)
class Written:
    """A model's folder whose head is in a file of its own."""

    folder: Path

    head: dict[str, Tensor]
    """The head's weights."""

    copies: dict[str, str]
    """Weights of the head that are copies of the model's, and the names of these."""


def write_folder(folder: Path, family: str, *, copies: bool = True) -> Written:
    """Write a folder as it is published, with ``copies`` of the embedding and the output head."""
    keys: dict[str, Any] = {"num_hidden_layers": LAYERS}
    if family == "qwen3_5_text":
        keys["mtp_num_hidden_layers"] = 1
    tiny_model(family, **keys).save_pretrained(folder)
    model = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / WEIGHTS)
    layer, prefix = _HEADS[family]
    generator = torch.Generator().manual_seed(7)
    last = f"model.layers.{LAYERS - 1}."
    head = {
        name.replace(last, layer): torch.randn(tensor.shape, generator=generator).bfloat16()
        for name, tensor in model.items()
        if name.startswith(last)
    }
    width = model[EMBEDDING].shape[1]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        head[f"{prefix}{name}.weight"] = torch.ones(width)
    head[f"{prefix}eh_proj.weight"] = torch.randn(width, 2 * width, generator=generator)
    own = {f"{prefix}embed_tokens.weight": EMBEDDING, f"{prefix}shared_head.head.weight": OUTPUT}
    for name, original in own.items():
        head[name] = model[original] + (0.0 if copies else 1.0)
    save_file(head, folder / HEAD, metadata={"format": "pt"})
    files = dict.fromkeys(model, WEIGHTS) | dict.fromkeys(head, HEAD)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return Written(folder=folder, head=head, copies=own if copies else {})


def read_saved(folder: Path) -> dict[str, Tensor]:
    """Return all weights of a folder."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_kept(saved: Path, written: Written, exported: Mapping[str, Tensor]) -> None:
    """Compare a saved folder with the export and with the head of the folder it came from."""
    found = read_saved(saved)
    wanted = dict(exported) | written.head
    wanted |= {name: exported[original] for name, original in written.copies.items()}
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    source = json.loads((written.folder / "config.json").read_text())
    config = json.loads((saved / "config.json").read_text())
    assert count_of(config) == count_of(source)


def count_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that say how many layers the head has."""
    return {key: value for key, value in config.items() if re.search("nextn|mtp", key)}


def told(messages: list[str]) -> list[str]:
    """Return what a log says of the head."""
    return [message for message in messages if "MTP" in message]
