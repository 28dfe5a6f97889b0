"""Randomness in the training pass of a transformers model: dropout, jitter, sampling of experts.

The log-probs of such a pass differ from those of the policy that generated the completions, and
from those of the previous pass. Only this module knows the keys in a ``config.json``; transformers
is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from engine_api.errors import ConfigError
from engine_api.hf_vision import has_vision

# Parts of the names of rates that transformers applies only in training.
_NOISE = ("drop", "jitter")
# Prefixes of the keys of heads that no engine has; a value head is a plain product.
_OTHER_HEADS = ("classifier_", "summary_")

# Families whose training pass draws random numbers whatever their configuration says.
_ALWAYS = {
    "phimoe": "its router samples the experts of each token in training (sparsemixer); "
    "router_jitter_noise: 0.0 does not turn that off, but changes the model in inference too",
}


def noise_rates(config: Any) -> dict[str, float]:
    """Return the rates above 0 of the language model and of its vision tower, by dotted key."""
    found = dict(_rates(config.get_text_config().to_dict(), ""))
    if has_vision(config):
        # Keys of the whole model, its projector's among them, and the tower's.
        whole = {k: v for k, v in config.to_dict().items() if k != "text_config"}
        found |= dict(_rates(whole, ""))
    return found


def _rates(content: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in ((str(key), value) for key, value in content.items()):
        if isinstance(value, Mapping):
            yield from _rates(cast("Mapping[Any, Any]", value), f"{prefix}{key}.")
        elif (
            _is_noise(key)
            and isinstance(value, int | float)
            and not isinstance(value, bool)
            and value > 0
        ):
            yield f"{prefix}{key}", float(value)


def _is_noise(key: str) -> bool:
    return any(part in key for part in _NOISE) and not key.startswith(_OTHER_HEADS)


def refuse_noise(config: Any, *, where: str) -> None:
    """Raise ``ConfigError`` for a configuration whose training pass would differ from inference.

    Args:
        config: transformers' configuration, with ``model.config_overrides`` applied.
        where: the engine, for the error.
    """
    rates = noise_rates(config)
    always = _ALWAYS.get(str(config.get_text_config().model_type))
    if not rates and always is None:
        return
    source = ", ".join(f"{key} is {rate:g}" for key, rate in rates.items())
    if not rates:
        source = f"a model of type {config.model_type}"
    raise ConfigError(
        "model.config_overrides",
        f"{source}: training would compute other log-probs than inference",
        why=f"{where} trains what it infers; {always or 'these act in training alone'}",
        remedy="train another model" if always is not None else cure(config, rates),
    )


def cure(config: Any, rates: Mapping[str, float]) -> str:
    """Return the advice that turns ``rates`` off.

    It is an override where an override reaches the keys, and a change of the file if not.
    """
    reached = all("." not in key and hasattr(config, key) for key in rates)
    off = ", ".join(f"{key}: 0.0" for key in rates)
    if reached:
        return f"set model.config_overrides: {{{off}}}"
    return f"set {off} in the model's config.json"
