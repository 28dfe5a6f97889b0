"""What a model's ``config.json`` says."""

from __future__ import annotations

from typing import Any

from engine_api.config import ModelSource


def text_config(source: ModelSource) -> Any:
    """The configuration of the model's language part, as transformers reads it."""
    from transformers import AutoConfig

    whole = AutoConfig.from_pretrained(source.path, revision=source.revision, trust_remote_code=source.trust_remote_code,
                                       **source.config_overrides)  # fmt: skip
    return whole.get_text_config()
