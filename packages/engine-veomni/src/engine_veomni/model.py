"""VeOmni's model classes, as the classes that engine-fsdp builds a model of."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from engine_api.capabilities import Capability
from engine_api.config import ModelSource
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.hf_names import Piece, SavedTensors
from engine_api.hf_vision import has_vision
from engine_torch import attention
from engine_torch.model import Kind, ModelClasses
from engine_veomni import library

__all__ = ["VeOmniClasses"]

# The ends of transformers' class names, by which VeOmni's functions choose a class.
_HEADS: dict[Kind, str] = {
    "language_model": "ForCausalLM",
    "value_model": "ForTokenClassification",
}
# Classes of experts that are computed as transformers' own. Tests have compared no other.
_EXPERTS = ("Qwen3MoeExperts",)
_WITH_TOWER = "ForConditionalGeneration"


class VeOmniClasses(ModelClasses):
    """The classes of VeOmni, which are transformers' with its replacements of some functions."""

    engine = "engine-veomni"

    def find(self, hf_config: Any, kind: Kind) -> Any:
        """Return VeOmni's class of a model (see ``ModelClasses.find``)."""
        head = _WITH_TOWER if has_vision(hf_config) else _HEADS[kind]
        return library.find_class(hf_config.model_type, head)

    def check(self, hf_config: Any, kind: Kind, source: ModelSource) -> None:
        """Raise an error for a model without a class that is right (see ``ModelClasses.check``)."""
        if hf_config.model_type.startswith("qwen3_5"):
            raise UnsupportedCapability(
                Capability.LINEAR_ATTENTION,
                where=f"{self.engine} with a {hf_config.model_type}",
                why="VeOmni's layers have no computation in plain PyTorch, and without fla's "
                "kernels, which no test has compared, they fail",
                remedy="use backend fsdp2 for this model",
            )
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
        # A tower has another one as soon as its model is packed.
        by_part = {"text_config": attention.NAME, "vision_config": "sdpa"}
        # Only this name makes a model from a configuration without one of transformers' own
        # automatic classes.
        lm = self.find(hf_config, kind)._from_config(  # noqa: SLF001
            hf_config,
            attn_implementation=by_part if has_vision(hf_config) else attention.NAME,
            dtype=dtype,
        )
        for fit in _FITS.get(hf_config.model_type, ()):
            fit(lm.base_model)
        return lm

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
            ConfigError: it computes with another number than ``config.json`` says.
        """
        self._refuse_ignored(lm)
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

    def _refuse_ignored(self, lm: Any) -> None:
        """Raise ``ConfigError`` for a number in config.json that VeOmni's class does not read."""
        for key, number in _FIXED.get(lm.config.model_type, {}).items():
            got = getattr(lm.config, key, number)
            if got != number:
                raise ConfigError(
                    "model.path",
                    f"expected {key} {number} in config.json, got {got}",
                    why=f"VeOmni's {type(lm).__name__} computes with {number} in any case",
                    remedy="use backend fsdp2 for this model",
                )


_FIXED = {"gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}}
"""Keys of a configuration that VeOmni's class does not read, and the numbers in their place."""


def _mark_images(model: Any) -> None:
    """Let Qwen2-VL and Qwen2.5-VL take the arguments of transformers' classes.

    VeOmni's want the places of image tokens, or gather the ids of its own group to find them.
    """

    def complete(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        options["image_mask"] = options["input_ids"] == model.config.image_token_id
        positions = options.get("position_ids")
        # Qwen2-VL would take three tokens for three dimensions.
        if positions is not None and positions.ndim == 2:
            options["position_ids"] = positions.expand(4, *positions.shape)
        return args, options

    model.register_forward_pre_hook(complete, with_kwargs=True)


def _find_windows(model: Any) -> None:
    """Let the tower of Qwen2.5-VL find its windows without a warning that its function is old."""
    from transformers.vision_utils import get_vision_window_index

    tower = model.visual

    def find(grid: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        index, bounds = get_vision_window_index(
            grid, tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
        return index, bounds.tolist()

    tower.get_window_index = find


_FITS = {"qwen2_vl": (_mark_images,), "qwen2_5_vl": (_mark_images, _find_windows)}
"""Functions that make the base model of a VeOmni class fit for the arguments it receives here."""


def _list_shapes(lm: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its name."""
    return {name: tuple(parameter.shape) for name, parameter in lm.named_parameters()}
