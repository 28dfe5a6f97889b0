"""VeOmni's model classes, as the classes that engine-fsdp builds a model of."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from engine_api.config import ModelSource
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.hf_names import Piece, SavedTensors
from engine_torch import attention
from engine_torch.model import Kind, ModelClasses
from engine_veomni import library

__all__ = ["VeOmniClasses"]

# The ends of transformers' class names, by which VeOmni's functions choose a class.
_HEADS: dict[Kind, str] = {
    "language_model": "ForCausalLM",
    "value_model": "ForTokenClassification",
}
# Classes of experts that are computed as transformers' own. No other family of VeOmni with experts
# is served.
_EXPERTS = ("Qwen3MoeExperts",)


class VeOmniClasses(ModelClasses):
    """The classes of VeOmni, which are transformers' with its replacements of some functions."""

    engine = "engine-veomni"

    def find(self, hf_config: Any, kind: Kind) -> Any:
        """Return VeOmni's class of a model (see ``ModelClasses.find``)."""
        return library.find_class(hf_config.model_type, _HEADS[kind])

    def check(self, hf_config: Any, kind: Kind, source: ModelSource) -> None:
        """Raise ``ConfigError`` for a model without a class (see ``ModelClasses.check``)."""
        if self.find(hf_config, kind) is None:
            raise ConfigError(
                "model.path",
                f"VeOmni has no {kind} of type {hf_config.model_type!r}",
                why=f"its families are {', '.join(library.list_families())}",
                remedy="use backend fsdp2 for this model",
            )
        if source.trust_remote_code and getattr(hf_config, "auto_map", None):
            raise ConfigError(
                "model.trust_remote_code",
                "expected false, got true for a folder that brings its own code",
                why=f"VeOmni's own classes of {hf_config.model_type} would be computed instead",
                remedy="use backend fsdp2 for this model, or leave trust_remote_code out",
            )

    def make(
        self, hf_config: Any, kind: Kind, *, dtype: torch.dtype, trust_remote_code: bool
    ) -> Any:
        """Make a model with random weights (see ``ModelClasses.make``)."""
        # Only this name makes a model from a configuration without one of transformers' own
        # automatic classes.
        return self.find(hf_config, kind)._from_config(  # noqa: SLF001
            hf_config, attn_implementation=attention.NAME, dtype=dtype
        )

    def knows_experts(self, module: nn.Module) -> bool:
        """Return whether experts can be spread (see ``ModelClasses.knows_experts``)."""
        return type(module).__name__ in _EXPERTS

    def list_pieces(
        self, lm: Any, kind: Kind, folder: SavedTensors | None = None
    ) -> dict[str, list[Piece]]:
        """Return the saved tensors of each parameter, taken from transformers' class of the model.

        transformers knows the saved names of its own classes only.

        Raises:
            UnsupportedCapability: VeOmni's class has other parameters than transformers'.
        """
        with torch.device("meta"):
            twin = super().make(
                copy.deepcopy(lm.config), kind, dtype=lm.dtype, trust_remote_code=False
            )
        own, theirs = _list_shapes(lm), _list_shapes(twin)
        if own != theirs:
            odd = sorted({name for name, _ in own.items() ^ theirs.items()})
            raise UnsupportedCapability(
                f"the parameters of {type(lm).__name__}",
                where=self.engine,
                why=f"{odd[0]} is not as in transformers' class, whose saved names are known",
                remedy="use backend fsdp2 for this model family",
            )
        return super().list_pieces(twin, kind, folder)


def _list_shapes(lm: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its name."""
    return {name: tuple(parameter.shape) for name, parameter in lm.named_parameters()}
