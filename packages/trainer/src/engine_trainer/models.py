"""What a model's ``config.json`` says."""

from __future__ import annotations

from typing import Any

from engine_api.config import ModelSource
from engine_trainer.sections import EngineSection


def text_config(source: ModelSource) -> Any:
    """The configuration of the model's language part, as transformers reads it."""
    from transformers import AutoConfig

    whole = AutoConfig.from_pretrained(source.path, revision=source.revision, trust_remote_code=source.trust_remote_code,
                                       **source.config_overrides)  # fmt: skip
    return whole.get_text_config()


_RANDOM = ("drop", "jitter")  # in the names of what transformers draws in training and not in inference
_OTHER_HEADS = ("classifier_", "summary_")  # of heads that no engine has: a value is a plain product


def random_rates(source: ModelSource) -> dict[str, float]:
    """By its key in ``config.json``, what makes a training pass another one than inference, and than the one before."""
    found = text_config(source).to_dict()
    return {name: rate for name, rate in found.items()
            if any(part in name for part in _RANDOM) and not name.startswith(_OTHER_HEADS) and isinstance(rate, float) and rate > 0}  # fmt: skip


def draws_dropout(section: EngineSection) -> bool:
    """Whether an update computes other log-probs than inference does: dropout in the model, or in its adapter."""
    if section.lora is not None and section.lora.dropout > 0:
        return True
    return bool(random_rates(section.model))
