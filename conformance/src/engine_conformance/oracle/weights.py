"""Weights as float64: safetensors folders, whole or sharded, and plain LoRA adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine_conformance.oracle.config import ModelConfig, UnsupportedModel
from engine_conformance.oracle.names import expected_shapes

__all__ = [
    "Adapter",
    "WeightMismatch",
    "load_adapter",
    "make_adapter",
    "merge_adapter",
    "read_params",
    "read_safetensors",
]

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
# Settings of a PEFT adapter that change the result and are not computed here, with their neutral
# value.
_NEUTRAL = {"use_dora": False, "use_rslora": False, "bias": "none", "fan_in_fan_out": False}
_EMPTY = (
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
)


class WeightMismatch(ValueError):
    """A folder with tensors that are missing, unexpected or of another shape than configured."""


def read_safetensors(folder: str | Path) -> dict[str, Tensor]:
    """Return every tensor of ``model.safetensors`` or of the shards its index names, as stored.

    Raises:
        FileNotFoundError: if there is neither an index nor a whole file.
        WeightMismatch: if the index and its shards disagree on a name.
    """
    folder = Path(folder)
    if not (folder / _INDEX).exists():
        return _read_file(folder / _WHOLE)
    index: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(index.values())):
        tensors.update(_read_file(folder / file))
    if off := sorted(set(tensors) ^ set(index)):
        raise WeightMismatch(f"{folder / _INDEX}: index and shards disagree on {off[:5]}")
    return tensors


def read_params(folder: str | Path, config: ModelConfig) -> dict[str, Tensor]:
    """Return the folder's parameters as float64, in layer order, with names and shapes checked.

    A head stored next to tied embeddings is dropped when it is equal to them, as some
    writers do.

    Raises:
        WeightMismatch: if names or shapes are not the architecture's, or a tied head differs.
    """
    stored = read_safetensors(folder)
    expected = expected_shapes(config)
    _drop_tied_head(stored, config)
    missing = sorted(set(expected) - set(stored) - {"score.bias"})
    unexpected = sorted(
        set(stored) - set(expected) - ({"score.bias"} if config.value_model else set())
    )
    if missing or unexpected:
        raise WeightMismatch(f"{folder}: missing {missing[:5]}, unexpected {unexpected[:5]}")
    for name, shape in expected.items():
        if name in stored and tuple(stored[name].shape) != shape:
            raise WeightMismatch(
                f"{folder}: {name} is {tuple(stored[name].shape)}, expected {shape}"
            )
    order = [
        *(name for name in expected if name in stored),
        *(n for n in stored if n not in expected),
    ]
    return {name: stored[name].to(torch.float64) for name in order}


def _read_file(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        # safetensors' file is not a mapping.
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _drop_tied_head(stored: dict[str, Tensor], config: ModelConfig) -> None:
    head = stored.pop("lm_head.weight", None) if config.tied and not config.value_model else None
    if head is not None and not torch.equal(head, stored["model.embed_tokens.weight"]):
        raise WeightMismatch(
            "lm_head.weight differs from model.embed_tokens.weight, which it is tied to"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A plain LoRA adapter: ``W + scaling * B @ A``.

    Hu et al. 2021, arXiv:2106.09685, section 4.1.

    ``params`` is keyed by the adapter file's own names, float64; ``pairs`` maps a base
    weight's Hugging Face name to the names of its A ``[r, in]`` and B ``[out, r]``.
    """

    params: dict[str, Tensor]
    pairs: dict[str, tuple[str, str]]
    scaling: float

    def merge(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``params`` with every adapted weight replaced, differentiable in both.

        Raises:
            WeightMismatch: if the adapter names a weight that ``params`` does not have.
        """
        if unknown := sorted(set(self.pairs) - set(params)):
            raise WeightMismatch(f"the adapter adapts {unknown[:5]}, which the model does not have")
        merged = dict(params)
        for target, (a, b) in self.pairs.items():
            merged[target] = params[target] + self.scaling * (self.params[b] @ self.params[a])
        return merged


def load_adapter(folder: str | Path) -> Adapter:
    """Read a PEFT adapter folder (``adapter_config.json`` and ``adapter_model.safetensors``).

    Raises:
        UnsupportedModel: on anything but plain LoRA on linear weights.
    """
    folder = Path(folder)
    raw = json.loads((folder / "adapter_config.json").read_text())
    odd = {key: raw[key] for key, neutral in _NEUTRAL.items() if raw.get(key, neutral) != neutral}
    odd |= {key: raw[key] for key in _EMPTY if raw.get(key)}
    if raw.get("peft_type", "LORA") != "LORA" or odd:
        raise UnsupportedModel(
            f"adapter {raw.get('peft_type')} with {odd}: the oracle computes plain LoRA"
        )
    stored = _read_file(folder / "adapter_model.safetensors")
    return make_adapter(stored, raw["lora_alpha"] / raw["r"])


def make_adapter(tensors: Mapping[str, Tensor], scaling: float) -> Adapter:
    """Return the adapter of tensors by their PEFT names.

    Raises:
        UnsupportedModel: on tensors that are no pairs of A and B.
    """
    params = {name: tensor.to(torch.float64) for name, tensor in tensors.items()}
    return Adapter(params=params, pairs=_pairs(params), scaling=scaling)


def merge_adapter(params: Mapping[str, Tensor], adapter_folder: str | Path) -> dict[str, Tensor]:
    """Return ``params`` (Hugging Face names, float64) with a PEFT folder's adapter merged in.

    Raises:
        UnsupportedModel: as `load_adapter`.
        WeightMismatch: if the adapter names a weight that ``params`` does not have.
    """
    return load_adapter(adapter_folder).merge(params)


def _pairs(params: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    a_end = ".lora_A.weight"
    b_end = ".lora_B.weight"
    stems = {name.removesuffix(a_end).removesuffix(b_end) for name in params}
    names = {stem: (stem + a_end, stem + b_end) for stem in sorted(stems)}
    if odd := sorted(set(params) ^ {name for pair in names.values() for name in pair}):
        raise UnsupportedModel(
            f"adapter tensors {odd[:5]}: the oracle reads pairs of lora_A and lora_B"
        )
    return {
        stem.removeprefix("base_model.model.") + ".weight": pair for stem, pair in names.items()
    }
