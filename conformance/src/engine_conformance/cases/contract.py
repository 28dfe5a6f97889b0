"""The interface: members, states, and the trace of a resolution."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from engine_api.batch import Batch
from engine_api.contract import Engine
from engine_api.errors import EngineError, EngineStateError
from engine_api.losses import sft_loss
from engine_api.registry import EngineRegistry
from engine_conformance.cases._case import case, must
from engine_conformance.cases._expect import documents
from engine_conformance.cases._ranks import caught
from engine_conformance.cases._target import Setup, Target
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
