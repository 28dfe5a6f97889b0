"""``model.config_overrides``: keys of a model's ``config.json`` that are set after transformers has read it.

What transformers works out while it reads is not worked out again; a key that would then do nothing is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_api.hf_config import check_sizes

_FIELD = "model.config_overrides"
_ROPE = ("rope_scaling", "rope_parameters")


def override(config: Any, overrides: Mapping[str, Any]) -> None:
    """Set ``overrides`` in a transformers configuration.

    Raises ``ConfigError`` for a key that is unknown, or that would have no effect or half of it.
    """
    bases = _bases(config.get_text_config())
    for key, value in overrides.items():
        if not hasattr(config, key):
            known = [name for name in config.to_dict() if not name.startswith("_")]
            raise ConfigError(f"{_FIELD}.{key}", "the model's config has no such key", remedy=near_matches(key, known))
        setattr(config, key, value)
    text = config.get_text_config()
    check_sizes(text, _FIELD, _FIELD)
    for key in (key for key in _ROPE if key in overrides):
        if any(part.get("rope_theta") is None for part in _rope(text)):
            raise ConfigError(f"{_FIELD}.{key}", "leaves RoPE without rope_theta",
                              why="it replaces all of RoPE's parameters, the base in the file too",
                              remedy=f"add {bases} to it" if overrides[key] else f"give rope_parameters: {{rope_type: default, {bases}}}")  # fmt: skip
    if "layer_types" not in overrides and (key := _idle_window(text, overrides)):
        raise ConfigError(f"{_FIELD}.{key}", "would have no effect",
                          why="transformers decides which layers have a window when it reads config.json",
                          remedy="override sliding_window and layer_types, or change the file")  # fmt: skip


def _rope(text: Any) -> Iterator[Mapping[str, Any]]:
    """RoPE's parameters: one set, or one for each kind of layer."""
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds: list[Mapping[str, Any]] = [part for part in rope.values() if isinstance(part, Mapping)]
    yield from kinds or [rope]


def _bases(text: Any) -> str:
    """What the file says of RoPE's base, as an override would say it."""
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds: dict[str, Mapping[str, Any]] = {kind: part for kind, part in rope.items() if isinstance(part, Mapping)}
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
