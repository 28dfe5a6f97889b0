"""The overrides of ``model.config_overrides``, set after transformers has read ``config.json``.

Values that transformers derives while it reads the file are not derived again; a key that would
then have no effect is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getattr_static
from typing import Any

from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_api.hf_config import check_counts, check_sizes, rope_parts

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
    it, for parameters of RoPE that leave out the base or a ``partial_rotary_factor`` that the file
    has (other than 1), and for a value that the model's family does not accept.
    """
    from transformers import PreTrainedConfig

    bases = _bases(config.get_text_config())
    factors = _factors(config.get_text_config())
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
        _check_rope(text, f"{field}.{key}", overrides[key], bases, factors)
    if key := _idle_part(text, overrides):
        raise ConfigError(
            f"{field}.{key}",
            "would have no effect on the part of each head that RoPE rotates",
            why="that part is in rope_parameters once transformers has read config.json",
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


def _check_rope(
    text: Any, field: str, value: Any, bases: str, factors: Mapping[str, float]
) -> None:
    """Raise ``ConfigError`` for parameters of RoPE that leave out some of the file's.

    Args:
        text: the configuration with the override.
        field: the override's configuration key, for errors.
        value: the override.
        bases: the file's base of RoPE in the notation of an override.
        factors: the rotated part of each head in the file, from ``_factors``.
    """
    parts = rope_parts(text)
    missing = _missing_factors(parts, factors)
    if any(part.get("rope_theta") is None for part in parts.values()):
        needed = f"{bases}, {_written(missing)}" if missing else bases
        if value:
            remedy = f"add {needed} to it"
        else:
            remedy = f"give rope_parameters: {{rope_type: default, {needed}}}"
        raise ConfigError(
            field,
            "leaves RoPE without rope_theta",
            why="it replaces all of RoPE's parameters, including the base in the file",
            remedy=remedy,
        )
    if missing:
        raise ConfigError(
            field,
            "leaves RoPE without partial_rotary_factor",
            why="it replaces all of RoPE's parameters, including the part of each head that is "
            "rotated",
            remedy=f"add {_written(missing)} to it, or 1.0 for a rotation of whole heads",
        )


def _bases(text: Any) -> str:
    """Return the file's base of RoPE in the notation of an override."""
    bases = [
        f"{part.get('rope_theta', '…')}{_suffix(kind)}" for kind, part in rope_parts(text).items()
    ]
    return f"rope_theta: {', '.join(bases)}"


def _factors(text: Any) -> dict[str, float]:
    """Return the rotated part of each head, by type of layer, where it is not all of it."""
    factors = {kind: part.get("partial_rotary_factor") for kind, part in rope_parts(text).items()}
    return {kind: factor for kind, factor in factors.items() if factor not in (None, 1)}


def _missing_factors(
    parts: Mapping[str, Mapping[str, Any]], factors: Mapping[str, float]
) -> dict[str, float]:
    """Return the rotated parts of heads in the file that new parameters of RoPE leave out."""
    missing: dict[str, float] = {}
    for kind, part in parts.items():
        if part.get("partial_rotary_factor") is not None:
            continue
        if not kind:
            # Parameters for all layers replace those of each type.
            missing |= factors
        elif (factor := factors.get(kind, factors.get(""))) is not None:
            missing[kind] = factor
    return missing


def _written(factors: Mapping[str, float]) -> str:
    """Return rotated parts of heads in the notation of an override."""
    written = [f"{factor}{_suffix(kind)}" for kind, factor in factors.items()]
    return f"partial_rotary_factor: {', '.join(written)}"


def _suffix(kind: str) -> str:
    return f" ({kind})" if kind else ""


def _idle_part(text: Any, overrides: Mapping[str, Any]) -> str | None:
    """Return the key of an override of RoPE's part of each head that has no effect, or None.

    Where the file states a number of dimensions, the part of other heads is another one.
    """
    if not any(rope_parts(text).values()):
        return None
    keys = [*_ROTATED_PARTS]
    if hasattr(text, "rotary_dim") and not any(key in overrides for key in _ROPE):
        keys.append("head_dim")
    return next((key for key in keys if key in overrides), None)


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
