"""The interface: members and states, refusals, and typed errors for what is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
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
from engine_api.contract import Engine
from engine_api.errors import BatchError, ConfigError, EngineError, EngineStateError, UnsupportedCapability
from engine_api.losses import sft_loss
from engine_api.registry import EngineRegistry

from engine_conformance.cases._case import case, must
from engine_conformance.cases._expect import documents
from engine_conformance.cases._ranks import caught, local_batch, opened
from engine_conformance.cases._target import Setup, Target
from engine_conformance.cases.parallel import initialize
from engine_conformance.fixtures import PackedDocuments

_MEMBERS = (
    "initialize", "train_batch", "forward_backward", "optimizer_step", "infer_batch", "save_checkpoint",
    "load_checkpoint", "save_hf", "get_per_tensor_param", "get_per_tensor_param_shard", "to", "close",
)  # fmt: skip
_PROPERTIES = ("topology", "capabilities", "weight_version")


@case(id="contract.signatures", world=(1,))
def signatures(target: Target) -> None:
    """Every member of ``Engine`` MUST be there, callable with the contract's arguments and defaults.

    If this fails: a renamed or reordered argument; an argument of the engine's own without a default.
    """
    cls = target.resolution.load()
    for name in _MEMBERS:
        must(callable(getattr(cls, name, None)), "member", "is missing", where=name)
        wanted, given = (inspect.signature(getattr(c, name)).parameters for c in (Engine, cls))
        must(list(given)[: len(wanted)] == list(wanted), "arguments", f"{list(given)}, not {list(wanted)}", where=name)
        for argument, parameter in wanted.items():
            same = given[argument].kind == parameter.kind and given[argument].default == parameter.default
            must(same, "argument", f"{given[argument]}, the contract has {parameter}", where=f"{name} {argument}")
        extra = [p for n, p in given.items() if n not in wanted and p.default is p.empty]
        must(not extra, "arguments", f"{extra} have no default", where=name)


def _calls(engine: Engine, batch: Batch, folder: Path) -> Mapping[str, Callable[[], Any]]:
    return {
        "train_batch": lambda: engine.train_batch(batch, sft_loss),
        "forward_backward": lambda: engine.forward_backward(batch, sft_loss),
        "optimizer_step": engine.optimizer_step,
        "infer_batch": lambda: engine.infer_batch(batch),
        "save_checkpoint": lambda: engine.save_checkpoint(folder / "c"),
        "load_checkpoint": lambda: engine.load_checkpoint(folder / "c"),
        "save_hf": lambda: engine.save_hf(folder / "hf"),
        "get_per_tensor_param": lambda: list(engine.get_per_tensor_param()),
        "get_per_tensor_param_shard": lambda: list(engine.get_per_tensor_param_shard()),
        "to": lambda: engine.to("cpu"),
    }


def states(setup: Setup, batch: PackedDocuments, folder: Path) -> dict[str, EngineError | None]:
    """Each member's error before ``initialize`` and after ``close``, and of what is out of order while ready."""
    engine, errors = setup.create(), dict[str, EngineError | None]()
    rows = Batch(input_ids=torch.tensor(batch.input_ids), cu_seqlens=torch.tensor(batch.cu_seqlens),
                 fields={"loss_weight": torch.tensor(batch.loss_weight)})  # fmt: skip
    calls = _calls(engine, rows, folder)
    errors |= {f"{name} before initialize": caught(call) for name, call in calls.items()}
    engine.initialize()
    assert isinstance(engine, Engine)
    errors |= {"initialize twice": caught(engine.initialize), "step without gradient": caught(engine.optimizer_step)}
    engine.close()
    engine.close()
    errors |= {f"{name} after close": caught(call) for name, call in calls.items()}
    errors["initialize after close"] = caught(engine.initialize)
    unused = setup.create()
    unused.close()
    return errors


@case(id="contract.states")
def state_machine(target: Target) -> None:
    """Every member MUST raise ``EngineStateError`` before ``initialize`` and after ``close``; ``close`` is idempotent.

    If this fails: an AttributeError of something that is not built yet, or a second group of ranks.
    """
    ranks = target.run(states, target.config(target.model()), batch=documents(1, "equal"), folder=target.scratch())
    for rank, errors in enumerate(ranks):
        wrong = {name: repr(error) for name, error in errors.items() if not isinstance(error, EngineStateError)}
        must(not wrong, "state", f"{wrong}", where=f"rank {rank}")


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
        return Batch(input_ids=torch.zeros(max(total, 0), dtype=torch.int64), cu_seqlens=torch.tensor(lengths), fields=values)

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


def bad_calls(setup: Setup, batch: PackedDocuments, folder: Path) -> tuple[list[EngineError | None], float]:
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
    ranks = target.run(bad_calls, target.config(target.model()), batch=documents(1, "equal"), folder=target.scratch())
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


@case(id="contract.registry", world=(1,))
def registry(target: Target) -> None:
    """A resolution MUST keep its trace, with each candidate accepted or rejected for a reason.

    If this fails: nobody can tell why a device was chosen.
    """
    trace = target.resolution.trace
    must(any(c.accepted and c.device == target.device for c in trace), "trace", f"{[str(c) for c in trace]}")
    automatic = EngineRegistry.resolve(model_type=target.model_type, backend=target.backend, device="auto")
    silent = [str(c) for c in automatic.trace if not c.accepted and not c.reason]
    must(not silent, "trace", f"rejected without a reason: {silent}")
