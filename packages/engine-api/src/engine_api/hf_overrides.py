"""``model.config_overrides``: keys of a model's ``config.json`` that are set after transformers has read it.

What transformers works out while it reads is not worked out again; a key that would then do nothing is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import getattr_static
from typing import Any

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_api.hf_config import check_sizes

_FIELD = "model.config_overrides"
_ROPE = ("rope_scaling", "rope_parameters")


def override(config: Any, overrides: Mapping[str, Any], *, field: str = _FIELD) -> None:
    """Set ``overrides`` in a transformers configuration.

    Args:
        config: transformers' configuration, as it was read.
        overrides: keys of ``config.json`` and their values.
        field: the configuration key that holds them, for errors.

    Raises ``ConfigError`` for a key that is unknown, or that would have no effect or half of it, and for a value that
    the model's family does not take.
    """
    from transformers import PreTrainedConfig

    bases = _bases(config.get_text_config())
    for key, value in overrides.items():
        if not _is_key(config, key):
            known = [name for name in config.to_dict() if _is_key(config, name)]
            raise ConfigError(
                f"{field}.{key}",
                "the model's config has no such key",
                remedy=near_matches(key, known),
            )
        try:
            setattr(config, key, value)
            text: Any = config.get_text_config()
            config.to_dict()  # what a value of another kind breaks, too
        except Exception as error:  # each family's own code looks at a value, and raises anything
            raise ConfigError(
                f"{field}.{key}",
                f"a configuration of {config.model_type} does not take {value!r:.100}",
                why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                remedy="give a value of the kind that the model's config.json has there",
            ) from error
        if not isinstance(text, PreTrainedConfig):
            raise ConfigError(
                f"{field}.{key}",
                f"expected the configuration of a language model, got {text!r:.100}",
                remedy="change the model's config.json itself, where its parts stand",
            )
    text = config.get_text_config()
    check_sizes(text, field, field)
    for key in (key for key in _ROPE if key in overrides):
        if any(part.get("rope_theta") is None for part in _rope(text)):
            raise ConfigError(
                f"{field}.{key}",
                "leaves RoPE without rope_theta",
                why="it replaces all of RoPE's parameters, the base in the file too",
                remedy=f"add {bases} to it"
                if overrides[key]
                else f"give rope_parameters: {{rope_type: default, {bases}}}",
            )
    if "layer_types" not in overrides and (key := _idle_window(text, overrides)):
        raise ConfigError(
            f"{field}.{key}",
            "would have no effect",
            why="transformers decides which layers have a window when it reads config.json",
            remedy="override sliding_window and layer_types, or change the file",
        )


def _is_key(config: Any, key: str) -> bool:
    """Return whether ``key`` is one of ``config.json`` that still has an effect, not one of the class or its methods."""
    if (
        key.startswith("_") or key == "model_type"
    ):  # the family has been chosen when the file was read
        return False
    own = getattr_static(config, key, None)
    if isinstance(own, property):
        return own.fset is not None
    return key in config.to_dict() or key in config.attribute_map or key in vars(config)


def _rope(text: Any) -> Iterator[Mapping[str, Any]]:
    """RoPE's parameters: one set, or one for each kind of layer."""
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds: list[Mapping[str, Any]] = [part for part in rope.values() if isinstance(part, Mapping)]
    yield from kinds or [rope]


def _bases(text: Any) -> str:
    """What the file says of RoPE's base, as an override would say it."""
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds: dict[str, Mapping[str, Any]] = {
        kind: part for kind, part in rope.items() if isinstance(part, Mapping)
    }
    told = [f"{part.get('rope_theta', '…')} ({kind})" for kind, part in kinds.items()]
    return f"rope_theta: {', '.join(told) or rope.get('rope_theta', '…')}"


def _idle_window(text: Any, overrides: Mapping[str, Any]) -> str | None:
    """The override of a window that changes nothing, or None."""
    types, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    slides = window is not None if types is None else "sliding_attention" in types
    if types is not None and "max_window_layers" in overrides:
        return "max_window_layers"
    if (asked := overrides.get("use_sliding_window")) is not None and bool(asked) != slides:
        return "use_sliding_window"
    return "sliding_window" if overrides.get("sliding_window") is not None and not slides else None
