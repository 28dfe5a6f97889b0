"""What a model's configuration says, without a weight."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from engine_api.config import ModelSource
from engine_api.errors import ConfigError


def config_of(source: ModelSource) -> Any:
    """The Hugging Face configuration of a folder or hub id, overrides applied."""
    return AutoConfig.from_pretrained(source.path, revision=source.revision, trust_remote_code=source.trust_remote_code,
                                      **source.config_overrides)  # fmt: skip


def architecture_of(source: ModelSource) -> str:
    """The class name in ``architectures``. Raises ``ConfigError`` where config.json has none."""
    names = config_of(source).architectures
    if not names:
        raise ConfigError("engine.model.path", f"config.json of {source.path} names no architecture",
                          remedy='add "architectures", as Hugging Face models have it')  # fmt: skip
    return str(names[0])
