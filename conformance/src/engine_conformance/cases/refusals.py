"""What is refused: undeclared capabilities, bad batches, arguments and configurations, each by a typed error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import (
    CheckpointConfig,
    EngineConfig,
    LoraConfig,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    Precision,
)
from engine_api.errors import BatchError, ConfigError, EngineError, EngineStateError, UnsupportedCapability
from engine_api.losses import sft_loss
from engine_conformance.cases._case import case, must
from engine_conformance.cases._expect import documents
from engine_conformance.cases._ranks import caught, local_batch, opened
from engine_conformance.cases._target import Setup, Target
from engine_conformance.cases.parallel import initialize
from engine_conformance.fixtures import PackedDocuments


def asking(target: Target) -> dict[Capability, EngineConfig]:
    """For each capability that a configuration can ask for, one that does."""
    base = target.config(target.model())
    sections: dict[Capability, dict[str, Any]] = {
        Capability.HSDP: {"parallelism": Parallelism(dp_replicate=2)},
        Capability.TP: {"parallelism": Parallelism(tp=2)},
        Capability.PP: {"parallelism": Parallelism(pp=2)},
        Capability.CP: {"parallelism": Parallelism(cp=2)},
        Capability.EP: {"parallelism": Parallelism(ep=2)},
        Capability.ULYSSES: {"parallelism": Parallelism(ulysses=2)},
        Capability.LORA: {"lora": LoraConfig()},
        Capability.OFFLOAD: {"memory": Memory(offload_optimizer=True)},
        Capability.RECOMPUTE: {"memory": Memory(recompute="full")},
        Capability.COMPILE: {"memory": Memory(compile=True)},
        Capability.BF16: {"precision": Precision(compute="bfloat16")},
        Capability.FP8: {"precision": Precision(compute="float8")},
        Capability.ASYNC_CHECKPOINT: {"checkpoint": CheckpointConfig(async_save=True)},
    }
    return {capability: replace(base, **parts) for capability, parts in sections.items()}


@case(id="contract.refuses_undeclared", world=(1,))
def refuses_undeclared(target: Target) -> None:
    """A configuration that asks for an undeclared capability MUST raise ``UnsupportedCapability`` that names it.

    If this fails: the option is ignored in silence.
    """
    for capability, config in asking(target).items():
        if capability in target.capabilities:
            continue
        error = caught(lambda config=config: target.setup(config).create())
        named = isinstance(error, UnsupportedCapability) and error.capability == str(capability)
        must(named, "refusal", f"{error!r}", where=str(capability))
        must(bool(error and error.remedy), "refusal", "does not say what to do", where=str(capability))


def _packed(lengths: list[int], **fields: list[float]) -> Callable[[], Batch]:
    def make() -> Batch:
        total = lengths[-1]
        values = {name: torch.tensor(value) for name, value in fields.items()}
        return Batch(
            input_ids=torch.zeros(max(total, 0), dtype=torch.int64), cu_seqlens=torch.tensor(lengths), fields=values
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
        lambda: Batch(input_ids=torch.zeros(2), cu_seqlens=torch.tensor([0, 2])), "input_ids"),
    "padded ids": (
        lambda: Batch(input_ids=torch.zeros(2, 2, dtype=torch.int64), cu_seqlens=torch.tensor([0, 4])), "input_ids"),
    "short": (
        lambda: Batch(input_ids=torch.zeros(5, dtype=torch.int64), cu_seqlens=torch.tensor([0, 4])), "cu_seqlens"),
}  # fmt: skip


@case(id="contract.bad_batches", world=(1,))
def bad_batches(target: Target) -> None:
    """A batch whose parts do not fit each other MUST raise ``BatchError`` that names the field.

    If this fails: the fault is found in a kernel, or never.
    """
    del target
    for name, (make, field) in BAD.items():
        error = caught(make)
        must(isinstance(error, BatchError) and error.field == field, "batch", f"{error!r}", where=name)


def bad_calls(setup: Setup, batch: PackedDocuments) -> tuple[list[EngineError | None], float]:
    """Calls with arguments that make no sense, then a good one."""
    with opened(setup) as engine:
        mine = local_batch(engine, batch, setup.device)
        calls: list[Callable[[], Any]] = [
            lambda: engine.train_batch(mine, sft_loss, denominator=0.0),
            lambda: engine.train_batch(mine, sft_loss, denominator=float("nan")),
            lambda: engine.train_batch(mine, sft_loss, temperature=0.0),
            lambda: engine.infer_batch(mine, temperature=-1.0),
            lambda: engine.to("abacus"),
            lambda: list(engine.get_per_tensor_param(adapter="both")),  # type: ignore[arg-type]
        ]
        return [caught(call) for call in calls], engine.train_batch(mine, sft_loss).loss


@case(id="contract.bad_arguments")
def bad_arguments(target: Target) -> None:
    """Arguments that make no sense MUST raise ``ConfigError``, and leave the engine usable.

    If this fails: a temperature of zero gives infinite logits, a denominator of zero NaN gradients.
    """
    ranks = target.run(bad_calls, target.config(target.model()), batch=documents(1, "equal"))
    for rank, (errors, loss) in enumerate(ranks):
        must(all(isinstance(e, ConfigError) for e in errors), "error", f"{errors}", where=f"rank {rank}")
        must(loss > 0, "loss", f"{loss} after the refused calls", where=f"rank {rank}")


@case(id="contract.bad_configuration")
def bad_configuration(target: Target) -> None:
    """A model, optimizer or option that is not there MUST raise ``ConfigError`` on every rank, and leave no engine behind.

    A folder without weights, a folder that is absent, an unknown optimizer, a misspelt option, head or kernel.

    If this fails: an unknown key is ignored; weights that are missing stay random.
    """
    model, empty = target.model(), target.scratch()
    (empty / "config.json").write_text((model / "config.json").read_text())
    base = target.config(model)
    wrong = {
        "no weights": replace(base, model=ModelSource(path=str(empty))),
        "no folder": replace(base, model=ModelSource(path=str(empty / "no such folder here"))),
        "optimizer": replace(base, optimizer=OptimizerConfig(name="torch.optim.NoSuch")),
        "optimizer arguments": replace(base, optimizer=OptimizerConfig(kwargs={"no_such_argument": 1})),
        "option": replace(base, options={"no_such_option": 1}),
        "override": replace(base, model=ModelSource(path=str(model), config_overrides={"hidden_sise": 1})),
        "kernel": replace(base, model=ModelSource(path=str(model), attention="no-such-kernel")),
    }
    for name, config in wrong.items():
        errors = target.run(built, config)
        must(all(isinstance(error, ConfigError) for error in errors), "error", f"{errors}", where=name)
    must(target.run(initialize, base) == [None] * target.world, "engine", "cannot be made afterwards")


def built(setup: Setup) -> EngineError | None:
    """The error of making or initializing an engine."""
    return caught(lambda: setup.create().initialize())


def inference_only(setup: Setup, batch: PackedDocuments, folder: Path) -> list[EngineError | None]:
    """Without an optimizer: training is refused; inference, export and a load of a training checkpoint work."""
    with_optimizer = replace(setup, config=replace(setup.config, optimizer=OptimizerConfig()))
    with opened(with_optimizer) as engine:
        engine.train_batch(local_batch(engine, batch, setup.device), sft_loss)
        engine.save_checkpoint(folder / "c").result()
    with opened(setup) as engine:
        mine = local_batch(engine, batch, setup.device)
        return [
            caught(lambda: engine.train_batch(mine, sft_loss)),
            caught(lambda: engine.forward_backward(mine, sft_loss)),
            caught(engine.optimizer_step),
            caught(lambda: engine.infer_batch(mine)),
            caught(lambda: list(engine.get_per_tensor_param())),
            caught(lambda: engine.load_checkpoint(folder / "c")),
        ]


@case(id="contract.inference_only")
def without_optimizer(target: Target) -> None:
    """An engine without an optimizer MUST refuse to train by ``EngineStateError``, and infer, export and load weights.

    If this fails: a reference model pays for moments, or cannot read the policy's checkpoint.
    """
    config = target.config(target.model(), optimizer=None)
    ranks = target.run(inference_only, config, batch=documents(1, "equal"), folder=target.scratch())
    for rank, errors in enumerate(ranks):
        refused = all(isinstance(error, EngineStateError) for error in errors[:3])
        must(refused and errors[3:] == [None] * 3, "error", f"{errors}", where=f"rank {rank}")
