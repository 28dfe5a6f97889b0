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


def draws_dropout(section: EngineSection) -> bool:
    """Whether an update computes other log-probs than inference does: dropout in the model, or in its adapter."""
    if section.lora is not None and section.lora.dropout > 0:
        return True
    rates = (value for name, value in text_config(section.model).to_dict().items() if "drop" in name)
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
