"""Refusals by typed errors: undeclared capabilities, bad batches, arguments and configurations."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import (
    ModelSource,
    OptimizerConfig,
)
from engine_api.errors import BatchError, ConfigError, EngineError, EngineStateError
from engine_api.results import LossOutput, TokenOutputs
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._expect import documents
from engine_conformance.cases._losses import default_loss
from engine_conformance.cases._ranks import (
    build,
    caught,
    digest,
    local_batch,
    opened,
    step,
    whole_weights,
)
from engine_conformance.cases._target import Setup, Target
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.oracle import read_safetensors

TYPES = (LM, VALUE)


def _packed(lengths: list[int], **fields: list[float]) -> Callable[[], Batch]:
    def make() -> Batch:
        total = lengths[-1]
        values = {name: torch.tensor(value) for name, value in fields.items()}
        return Batch(
            input_ids=torch.zeros(max(total, 0), dtype=torch.int64),
            cu_seqlens=torch.tensor(lengths),
            fields=values,
        )

    return make


# What is wrong -> (how to make it, the field that the error must name)
BAD: dict[str, tuple[Callable[[], Batch], str]] = {
    "unsorted": (_packed([0, 3, 2, 4]), "cu_seqlens"),
    "empty document": (_packed([0, 2, 2, 4]), "cu_seqlens"),
    "not from 0": (_packed([1, 4]), "cu_seqlens"),
    "NaN weight": (_packed([0, 2], loss_weight=[0.0, float("nan")]), "loss_weight"),
    "negative weight": (_packed([0, 2], loss_weight=[0.0, -1.0]), "loss_weight"),
    "loss on a first token": (_packed([0, 2], loss_weight=[1.0, 1.0]), "loss_weight"),
    "field of another length": (_packed([0, 2], advantages=[0.0]), "advantages"),
    "ids of another dtype": (
        lambda: Batch(input_ids=torch.zeros(2), cu_seqlens=torch.tensor([0, 2])),
        "input_ids",
    ),
    "padded ids": (
        lambda: Batch(
            input_ids=torch.zeros(2, 2, dtype=torch.int64), cu_seqlens=torch.tensor([0, 4])
        ),
        "input_ids",
    ),
    "short": (
        lambda: Batch(input_ids=torch.zeros(5, dtype=torch.int64), cu_seqlens=torch.tensor([0, 4])),
        "cu_seqlens",
    ),
}


@case(id="contract.bad_batches", world=(1,), model_types=TYPES)
def bad_batches(target: Target) -> None:
    """A batch whose parts do not fit each other MUST raise ``BatchError`` that names the field.

    If this fails: the fault is found in a kernel, or never.
    """
    del target
    for name, (make, field) in BAD.items():
        error = caught(make)
        must(
            isinstance(error, BatchError) and error.field == field,
            "batch",
            f"{error!r}",
            where=name,
        )


def bad_calls(setup: Setup, batch: PackedDocuments) -> tuple[list[EngineError | None], float]:
    """Make calls with arguments that make no sense, then a good one."""
    loss = default_loss(setup.model_type)
    with opened(setup) as engine:
        mine = local_batch(engine, batch, setup.device)
        calls: list[Callable[[], Any]] = [
            lambda: engine.train_batch(mine, loss, denominator=0.0),
            lambda: engine.train_batch(mine, loss, denominator=float("nan")),
            lambda: engine.train_batch(mine, loss, temperature=0.0),
            lambda: engine.infer_batch(mine, temperature=-1.0),
            lambda: list(engine.get_per_tensor_param(adapter="both")),  # type: ignore[arg-type]
            lambda: list(engine.get_per_tensor_param(dtype=torch.int8)),
            lambda: list(engine.get_per_tensor_param(bucket_bytes=0)),
            lambda: engine.infer_batch(mine, adapter="no"),  # type: ignore[arg-type]
            lambda: engine.train_batch(mine, _needs_another_output),
        ]
        if setup.model_type == VALUE:
            calls.append(lambda: engine.infer_batch(mine, entropy=True))
        if Capability.EXPORT_SHARDS in engine.capabilities:
            calls.append(lambda: list(engine.get_per_tensor_param_shard(dtype=torch.int8)))
        if Capability.OFFLOAD in engine.capabilities:
            calls.append(lambda: engine.to("abacus"))
        return [caught(call) for call in calls], step(engine, setup, batch).loss


def _needs_another_output(outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Fail, since no engine gives the output that it needs."""
    raise AssertionError(f"called with {outputs} of {batch}")


_needs_another_output.needs = ("likelihood",)  # type: ignore[attr-defined]


@case(id="contract.bad_arguments", model_types=TYPES, quick=True)
def bad_arguments(target: Target) -> None:
    """Arguments that make no sense MUST raise ``ConfigError``, and leave the engine usable.

    If this fails: a temperature of zero gives infinite logits, a denominator of zero
    NaN gradients, an export in integers zeros; what a loss or caller asks for, and the
    engine does not have, is left out.
    """
    ranks = target.run(bad_calls, target.config(target.model()), batch=documents(1, "equal"))
    for rank, (errors, loss) in enumerate(ranks):
        must(
            all(isinstance(e, ConfigError) for e in errors),
            "error",
            f"{errors}",
            where=f"rank {rank}",
        )
        must(loss > 0, "loss", f"{loss} after the refused calls", where=f"rank {rank}")


# Values of config.json of a type that no model has.
_MISTYPED: dict[str, Any] = {
    "hidden_size": "64",
    "num_attention_heads": None,
    "num_hidden_layers": [2],
    "vocab_size": "many",
    "rms_norm_eps": "small",
}
_OF_VALUE_MODELS = ("no weights", "one weight less", "override", "override alone")


@case(id="contract.bad_configuration", model_types=TYPES, quick="once")
def bad_configuration(target: Target) -> None:
    """An absent model, optimizer or option MUST raise ``ConfigError`` on every rank.

    No engine is left behind. A folder without weights or without one of them, a folder that is
    absent, an unknown optimizer, a misspelt option, kernel or key among right ones, a size that
    the weights do not have, a value of another type in config.json (since 1.4).

    If this fails: an unknown key is ignored; weights that are missing stay random; of several
    keys or weights the first or the last one alone is looked at.
    """
    model = target.model()
    empty = target.scratch()
    (empty / "config.json").write_text((model / "config.json").read_text())
    base = target.config(model)
    # The size is the model's, so that the key between the two is the only fault.
    misspelt = {"rms_norm_eps": 1e-6, "hidden_sise": 1, "vocab_size": 256}
    wrong = {
        "no weights": replace(base, model=ModelSource(path=str(empty))),
        "one weight less": replace(
            base, model=ModelSource(path=str(_lacking_one(target, model, _MIDDLE)))
        ),
        "no folder": replace(base, model=ModelSource(path=str(empty / "no such folder here"))),
        "optimizer": replace(base, optimizer=OptimizerConfig(name="torch.optim.NoSuch")),
        "optimizer arguments": replace(
            base, optimizer=OptimizerConfig(kwargs={"no_such_argument": 1})
        ),
        "option": replace(base, options={"no_such_option": 1}),
        "override": replace(base, model=ModelSource(path=str(model), config_overrides=misspelt)),
        "override alone": replace(
            base, model=ModelSource(path=str(model), config_overrides={"hidden_sise": 64})
        ),
        "another size than the files'": replace(
            base, model=ModelSource(path=str(model), config_overrides={"vocab_size": 250})
        ),
        "kernel": replace(base, model=ModelSource(path=str(model), attention="no-such-kernel")),
    }
    if Capability.MOE in target.capabilities and target.model_type == LM:
        mixture = target.model(family="qwen3_moe", tied=False)
        folder = _lacking_one(target, mixture, "model.layers.0.mlp.experts.1.up_proj.weight")
        wrong["one expert's weight less"] = replace(base, model=ModelSource(path=str(folder)))
    if target.model_type == VALUE:  # the rest is the language model's own code
        wrong = {name: wrong[name] for name in _OF_VALUE_MODELS}
    for key, value in _MISTYPED.items() if target.is_asked_since("1.4") else ():
        mistyped = target.edited(model, partial(dict, **{key: value}))
        wrong[f"{key} {value!r}"] = replace(base, model=ModelSource(path=str(mistyped)))
    for name, config in wrong.items():
        errors = target.run(build, config)
        must(
            all(isinstance(error, ConfigError) for error in errors),
            "error",
            f"{errors}",
            where=name,
        )
    must(target.run(build, base) == [None] * target.world, "engine", "cannot be made afterwards")


# A weight that every model has, neither its first nor its last.
_MIDDLE = "model.layers.0.self_attn.o_proj.weight"


def _lacking_one(target: Target, model: Path, name: str) -> Path:
    """Return a copy of a model whose file lacks a weight."""
    folder = target.scratch()
    shutil.copyfile(model / "config.json", folder / "config.json")
    tensors = read_safetensors(model)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def inference_only(setup: Setup, batch: PackedDocuments, folder: Path) -> list[EngineError | None]:
    """Use an engine without an optimizer: training is refused, all else works.

    Inference, export and a load of a training checkpoint work.
    """
    loss = default_loss(setup.model_type)
    with_optimizer = replace(setup, config=replace(setup.config, optimizer=OptimizerConfig()))
    with opened(with_optimizer) as engine:
        step(engine, setup, batch)
        engine.save_checkpoint(folder / "c").result()
        saved = digest(whole_weights(engine))
    with opened(setup) as engine:
        mine = local_batch(engine, batch, setup.device)
        errors = [
            caught(lambda: engine.train_batch(mine, loss)),
            caught(lambda: engine.forward_backward(mine, loss)),
            caught(engine.optimizer_step),
            caught(lambda: engine.infer_batch(mine)),
            caught(lambda: list(engine.get_per_tensor_param())),
            caught(lambda: engine.load_checkpoint(folder / "c")),
        ]
        loaded = digest(whole_weights(engine))
        must(loaded == saved, "weights", "are not those of the checkpoint after a load")
        must(engine.weight_version == 1, "weight_version", f"{engine.weight_version} after a load")
        return errors


@case(id="contract.inference_only", model_types=TYPES)
def without_optimizer(target: Target) -> None:
    """An engine without optimizer MUST refuse to train, but infer, export and load weights.

    It refuses by ``EngineStateError``.

    If this fails: a reference model pays for moments, or cannot read the policy's
    checkpoint.
    """
    config = target.config(target.model(), optimizer=None)
    ranks = target.run(inference_only, config, batch=documents(1, "equal"), folder=target.scratch())
    for rank, errors in enumerate(ranks):
        refused = all(isinstance(error, EngineStateError) for error in errors[:3])
        must(refused and errors[3:] == [None] * 3, "error", f"{errors}", where=f"rank {rank}")
