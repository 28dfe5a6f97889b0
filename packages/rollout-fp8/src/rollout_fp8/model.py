"""Configuration of a model, read without any weight."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from engine_api.config import ModelSource, near_matches
from engine_api.errors import ConfigError
from engine_api.hf_config import check_counts


def config_of(source: ModelSource) -> Any:
    """Return the Hugging Face configuration of a folder or hub id, with the overrides applied.

    Raises:
        ConfigError: transformers cannot read the configuration, it lacks the key of an override, or
            it has counts that no model has.
    """
    config: Any
    try:
        content, _ = PretrainedConfig.get_config_dict(source.path, revision=source.revision)
        check_counts(
            content | dict(source.config_overrides),
            f"{source.path}/config.json or config_overrides",
            "engine.model.path",
        )
        config, unknown = AutoConfig.from_pretrained(
            source.path,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            return_unused_kwargs=True,
            **source.config_overrides,
        )
    except ConfigError:
        raise
    # The model family's own code reads the file, and may raise anything on unexpected values.
    except Exception as error:
        raise ConfigError(
            "engine.model.path",
            f"cannot read the configuration of {source.path}",
            why=" ".join(str(error).split()),
            remedy="give a folder that save_pretrained wrote, or a hub id; "
            "compare engine.model.config_overrides with it",
        ) from error
    for key in unknown:
        known = [name for name in config.to_dict() if not name.startswith("_")]
        raise ConfigError(
            f"engine.model.config_overrides.{key}",
            "the model's config has no such key",
            remedy=near_matches(key, known),
        )
    return config


def architecture_of(source: ModelSource) -> str:
    """Return the class name in ``architectures``.

    Raises:
        ConfigError: config.json has no architecture, or ``config_of`` raises.
    """
    names = config_of(source).architectures
    if not names:
        raise ConfigError(
            "engine.model.path",
            f"config.json of {source.path} names no architecture",
            remedy='add "architectures", as Hugging Face models have it',
        )
    return str(names[0])
