"""The overrides of ``model.config_overrides``, set after transformers has read ``config.json``.

Values that transformers derives while it reads the file are not derived again; a key that would
then have no effect is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import getattr_static
from typing import Any

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_api.hf_config import check_counts, check_sizes

_FIELD = "model.config_overrides"
_ROPE = ("rope_scaling", "rope_parameters")
_ROTATED_PARTS = ("rotary_dim", "partial_rotary_factor")


def override(config: Any, overrides: Mapping[str, Any], *, field: str = _FIELD) -> None:
    """Set ``overrides`` in a transformers configuration.

    Args:
        config: transformers' configuration, as it was read.
        overrides: keys of ``config.json`` and their values.
        field: the configuration key that holds them, for errors.

    Raises ``ConfigError`` for a key that is unknown, or that would have no effect or only half of
    it, and for a value that the model's family does not accept.
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
        check_counts({key: value}, field, field)
        try:
            setattr(config, key, value)
            text: Any = config.get_text_config()
            # A value of a wrong kind may break this call too.
            config.to_dict()
        # Each family's own code checks a value, and may raise anything.
        except Exception as error:
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
                remedy="change this part in the model's config.json itself",
            )
    text = config.get_text_config()
    check_sizes(text, field, field)
    for key in (key for key in _ROPE if key in overrides):
        if any(part.get("rope_theta") is None for part in _rope(text)):
            if overrides[key]:
                remedy = f"add {bases} to it"
            else:
                remedy = f"give rope_parameters: {{rope_type: default, {bases}}}"
            raise ConfigError(
                f"{field}.{key}",
                "leaves RoPE without rope_theta",
                why="it replaces all of RoPE's parameters, including the base in the file",
                remedy=remedy,
            )
    if key := _idle_part(text, overrides):
        raise ConfigError(
            f"{field}.{key}",
            "would have no effect",
            why="the part of each head that RoPE rotates is in rope_parameters once transformers "
            "has read config.json",
            remedy=f"override rope_parameters, with partial_rotary_factor and {bases}",
        )
    if "layer_types" not in overrides and (key := _idle_window(text, overrides)):
        raise ConfigError(
            f"{field}.{key}",
            "would have no effect",
            why="transformers decides which layers have a window when it reads config.json",
            remedy="override sliding_window and layer_types, or change the file",
        )


def _is_key(config: Any, key: str) -> bool:
    """Return whether ``key`` is a key of ``config.json`` that still has an effect.

    Attributes and methods of the class are not such keys.
    """
    # The family was chosen when the file was read, so model_type has no effect any more.
    if key.startswith("_") or key == "model_type":
        return False
    own = getattr_static(config, key, None)
    if isinstance(own, property):
        return own.fset is not None
    return key in config.to_dict() or key in config.attribute_map or key in vars(config)


def _rope(text: Any) -> Iterator[Mapping[str, Any]]:
    """Yield RoPE's parameters, as one set or as one for each kind of layer."""
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds: list[Mapping[str, Any]] = [part for part in rope.values() if isinstance(part, Mapping)]
    yield from kinds or [rope]


def _bases(text: Any) -> str:
    """Return the file's base of RoPE in the notation of an override."""
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds: dict[str, Mapping[str, Any]] = {
        kind: part for kind, part in rope.items() if isinstance(part, Mapping)
    }
    bases = [f"{part.get('rope_theta', '…')} ({kind})" for kind, part in kinds.items()]
    return f"rope_theta: {', '.join(bases) or rope.get('rope_theta', '…')}"


def _idle_part(text: Any, overrides: Mapping[str, Any]) -> str | None:
    """Return the key of an override of RoPE's part of each head that has no effect, or None."""
    if not any("partial_rotary_factor" in part for part in _rope(text)):
        return None
    return next((key for key in _ROTATED_PARTS if key in overrides), None)


def _idle_window(text: Any, overrides: Mapping[str, Any]) -> str | None:
    """Return the key of a window's override that has no effect, or None."""
    types = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    slides = window is not None if types is None else "sliding_attention" in types
    if types is not None and "max_window_layers" in overrides:
        return "max_window_layers"
    requested = overrides.get("use_sliding_window")
    if requested is not None and bool(requested) != slides:
        return "use_sliding_window"
    if overrides.get("sliding_window") is not None and not slides:
        return "sliding_window"
    return None
