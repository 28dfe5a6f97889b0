"""``engine-train export``: the model or the adapter of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from engine_api.config import Parallelism
from engine_api.errors import ConfigError
from engine_trainer.config import Config
from engine_trainer.config.loading import load_config
from engine_trainer.data import load_tokenizer
from engine_trainer.placement.automatic import settle_precision
from engine_trainer.placement.spmd import Spmd
from engine_trainer.preferences.classifier import padding_token, write_classifier
from engine_trainer.run.checkpoints import find_checkpoint, read_extra
from engine_trainer.run.model_folder import export_dtype, write_adapter, write_model


def export_checkpoint(
    checkpoint: Path,
    directory: Path,
    configs: Mapping[str, type[Config]],
    *,
    dtype: str | None = None,
    adapter: bool = False,
    overrides: Sequence[str] = (),
) -> Path:
    """Write the model of a checkpoint to ``directory``, and return the checkpoint.

    The run's ``config.yaml`` says which engine reads the checkpoint. The engine has all ranks that
    call this, sharded over them unless ``overrides`` name other sizes.

    Args:
        checkpoint: see ``find_checkpoint``.
        directory: a new or empty folder.
        configs: class of the configuration by the kind of the run.
        dtype: name of the dtype of the written weights; None is ``run.hf_dtype``, or the dtype of
            the computation.
        adapter: True writes the adapter alone, as PEFT reads it.
        overrides: ``key.sub=value`` for the run's configuration.

    Raises ``ConfigError`` for a folder that is not empty, a run without ``config.yaml``, or a run
    without an adapter; ``CheckpointError`` for the checkpoint.
    """
    found = find_checkpoint(checkpoint)
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError("DIR", f"{directory} is not empty", remedy="name a new folder")
    kind = str(read_extra(found)["kind"])
    file = found.parent.parent / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            "CHECKPOINT",
            f"there is no {file}",
            why="it says which model and engine the checkpoint belongs to",
            remedy="copy the run's config.yaml to this place",
        )
    config = load_config(configs[kind], file, overrides)
    section = replace(config.engine, optimizer=None)
    if not any(override.startswith("engine.parallelism") for override in overrides):
        section = replace(section, parallelism=Parallelism())
    lora = section.lora
    if adapter and lora is None:
        raise ConfigError(
            "--adapter", "the run has no adapter", remedy="leave --adapter out for the whole model"
        )
    tokenizer = load_tokenizer(config.data, section.model)
    state = read_extra(found)["loop"]
    # The folder is to have the processor that the run has trained with.
    if "image_processor" in state:
        if "video_processor" in state["image_processor"]:
            tokenizer.image_processor.load_videos()
        tokenizer.image_processor.require(state["image_processor"])
    launcher = Spmd(timeout_s=config.run.timeout_s)
    try:
        device, capabilities = launcher.resolve(section)
        section, _ = settle_precision(section, device, capabilities)
        policy = launcher.engines(section, section.build(seed=0, total_steps=1), device)
        policy.load_checkpoint(found)
        chosen = export_dtype(dtype or config.run.hf_dtype, section.precision)
        if adapter:
            assert lora is not None
            write_adapter(
                policy.engine,
                launcher.comm,
                directory,
                lora=lora,
                base=section.model.path,
                dtype=chosen,
            )
        else:
            convert = None
            if kind == "rm":
                padding = padding_token(tokenizer, section.model)
                tokenizer.tokenizer.pad_token = tokenizer.tokenizer.convert_ids_to_tokens(padding)
                convert = partial(write_classifier, padding=padding)
            write_model(
                policy,
                launcher.comm,
                directory,
                tokenizer,
                dtype=chosen,
                convert=convert,
            )
    finally:
        launcher.close()
    return found
