"""The oracle of engine-conformance, imported where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from engine_api.checkpoint import read, without_optimizer
from engine_api.comm import SingleComm
from engine_api.config import ModelSource
from engine_api.errors import ConfigError, PluginNotFound
from engine_api.manifest import read_manifest
from engine_api.weights import ShardSpec
from engine_trainer.config import RLConfig
from engine_trainer.utils.hf_models import MODEL_KEY, require_source

SUITE = "engine_conformance"
Tensors = dict[str, torch.Tensor]


def load_diagnosis() -> Any:
    """Return the module ``engine_conformance.diagnosis``.

    Raises ``PluginNotFound`` where engine-conformance is not installed.
    """
    if importlib.util.find_spec(SUITE) is None:
        raise PluginNotFound(
            "engine-conformance is not installed",
            where="engine-train explain",
            why="the float64 oracle is its own",
            remedy="pip install 'engine-trainer[explain]', or engine-conformance itself",
        )
    return importlib.import_module(f"{SUITE}.diagnosis")


def read_content(source: ModelSource) -> dict[str, Any]:
    """Return the content of a model's ``config.json``, with its overrides.

    Raises ``ConfigError`` for a model that is not here.
    """
    from transformers import PreTrainedConfig

    require_source(source.path, MODEL_KEY, source.revision)
    content, _ = PreTrainedConfig.get_config_dict(source.path, revision=source.revision)
    return {"architectures": ["ModelForCausalLM"], **content, **source.config_overrides}


def read_checkpoint_oracle(diagnosis: Any, config: RLConfig, folder: Path) -> Any:
    """Return the oracle with the weights of a checkpoint.

    Raises ``CheckpointError`` for a checkpoint that is damaged or in an engine's own format, and
    ``ConfigError`` for a model that the oracle does not compute.
    """
    weights, adapter = read_weights(folder)
    lora = config.engine.lora
    scaling = 1.0 if lora is None else lora.alpha / lora.rank
    content = read_content(config.engine.model)
    return _computed(
        lambda: diagnosis.build_oracle(content, weights, adapter, scaling=scaling), folder
    )


def read_model_oracle(diagnosis: Any, config: RLConfig) -> Any | None:
    """Return the oracle of the model that the run began with, None where it was drawn.

    Raises ``ConfigError`` for a model that the oracle does not compute.
    """
    source = config.engine.model
    folder = Path(source.path)
    if source.init == "random" or not folder.is_dir():
        return None
    content = read_content(source)
    return _computed(lambda: diagnosis.read_oracle(content, folder), folder)


def read_weights(folder: Path) -> tuple[Tensors, Tensors]:
    """Return the whole weights of a checkpoint, and those of its adapter, by name.

    Raises ``CheckpointError``.
    """
    found = read(
        folder,
        without_optimizer(read_manifest(folder)),
        comm=SingleComm(),
        layout=lambda entries: {
            key: (ShardSpec.whole(entry.shape), getattr(torch, entry.dtype))
            for key, entry in entries.items()
        },
    )
    parts: dict[str, Tensors] = {"model": {}, "adapter": {}}
    for key, tensor in found.items():
        kind, _, name = key.partition(".")
        parts[kind][name] = tensor
    return parts["model"], parts["adapter"]


def _computed(build: Any, where: Path) -> Any:
    oracle = importlib.import_module(f"{SUITE}.oracle")
    try:
        return build()
    except (oracle.UnsupportedModel, oracle.WeightMismatch, FileNotFoundError) as error:
        raise ConfigError(
            MODEL_KEY,
            "the oracle does not compute this model",
            why=f"{where}: {error}",
            remedy="engine-conformance computes the families that its oracle names; "
            "engine-train replay compares engines with each other for any model",
        ) from error
