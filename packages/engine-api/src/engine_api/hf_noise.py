"""What makes a training pass of a transformers model compute something else than its inference: dropout, jitter, sampling.

Log-probs of such a pass are neither those of the policy that answered nor those of the pass before. The one place that knows
the keys of a ``config.json``; transformers is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from engine_api.errors import ConfigError

_NOISE = ("drop", "jitter")  # in the names of rates that transformers applies in training alone
_OTHER_HEADS = (
    "classifier_",
    "summary_",
)  # of heads that no engine has: a value is a plain product

# Families whose training pass draws whatever their configuration says.
_ALWAYS = {
    "phimoe": "its router samples the experts of each token in training (sparsemixer); router_jitter_noise: 0.0 does not turn that off, "
    "but changes the model in inference too",
}


def noise_rates(config: Any) -> dict[str, float]:
    """Return the rates above 0 of a transformers configuration (the part of its language model), by dotted key."""
    return dict(_rates(config.get_text_config().to_dict(), ""))


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
        config: transformers', with the overrides of ``model.config_overrides`` in it.
        where: the engine, for the error.
    """
    rates = noise_rates(config)
    always = _ALWAYS.get(str(config.get_text_config().model_type))
    if not rates and always is None:
        return
    said = (
        ", ".join(f"{key} is {rate:g}" for key, rate in rates.items())
        or f"a model of type {config.model_type}"
    )
    raise ConfigError(
        "model.config_overrides",
        f"{said}: training would compute other log-probs than inference",
        why=f"{where} trains what it infers; {always or 'these act in training alone'}",
        remedy="train another model" if always is not None else cure(config, rates),
    )


def cure(config: Any, rates: Mapping[str, float]) -> str:
    """Return the sentence that says how to turn ``rates`` off: an override where one reaches the key, else the file."""
    reached = all("." not in key and hasattr(config, key) for key in rates)
    off = ", ".join(f"{key}: 0.0" for key in rates)
    return (
        f"set model.config_overrides: {{{off}}}"
        if reached
        else f"set {off} in the model's config.json"
    )
