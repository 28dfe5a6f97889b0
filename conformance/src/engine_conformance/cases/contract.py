"""The interface: members, states, and the trace of a resolution."""

from __future__ import annotations

import inspect
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import (
    CheckpointConfig,
    EngineConfig,
    LoraConfig,
    Memory,
    OptimizerConfig,
    ScheduleConfig,
    flatten_config,
)
from engine_api.contract import Engine
from engine_api.distillation import OutputHead
from engine_api.errors import EngineError, EngineStateError
from engine_api.losses import LossFn
from engine_api.plugin import is_older
from engine_api.registry import EngineRegistry
from engine_api.results import TrainOutput
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._expect import documents
from engine_conformance.cases._losses import default_loss
from engine_conformance.cases._ranks import (
    Trained,
    build,
    caught,
    local_batch,
    opened,
    save,
    step,
    summary,
    train,
    whole_weights,
)
from engine_conformance.cases._surroundings import (
    ImportedVariables,
    Surroundings,
    read_surroundings,
)
from engine_conformance.cases._target import Setup, Target
from engine_conformance.compare import assert_bitwise
from engine_conformance.fixtures import LENGTHS, PackedDocuments, packed_documents
from engine_conformance.fixtures.pictures import IMAGE, write_picture_model
from engine_conformance.seeds import cached_by_seed

_MEMBERS = (
    "initialize",
    "resolved",
    "train_batch",
    "forward_backward",
    "optimizer_step",
    "infer_batch",
    "infer_states",
    "output_head",
    "set_teacher",
    "save_checkpoint",
    "load_checkpoint",
    "save_hf",
    "get_per_tensor_param",
    "get_per_tensor_param_shard",
    "to",
    "close",
)
_PROPERTIES = ("topology", "capabilities", "weight_version")
# Members that the protocol has had only since a later contract.
_MEMBERS_SINCE = {
    "resolved": "1.3",
    "infer_states": "1.4",
    "output_head": "1.4",
    "set_teacher": "1.4",
}
_BELONGS = {
    "infer_states": Capability.DISTILLATION,
    "output_head": Capability.DISTILLATION,
    "set_teacher": Capability.DISTILLATION,
    "to": Capability.OFFLOAD,
    "save_hf": Capability.SAVE_HF,
    "get_per_tensor_param_shard": Capability.EXPORT_SHARDS,
}


# Arguments that members have had only since a later contract: an engine written for an older one
# need not take them.
_SINCE = {("get_per_tensor_param_shard", "adapter"): "1.1"}
TYPES = (LM, VALUE)
# Bytes of device memory that a life of an engine may leave behind.
_LEAK = 1 << 20


def signatures_of(setup: Setup) -> list[str]:
    """Return the faults of the class's members.

    It runs in a rank, since importing an unknown class runs its code.
    """
    found = EngineRegistry.resolve(
        model_type=setup.model_type, backend=setup.backend, device=setup.device
    )
    cls = found.load()
    stated = found.plugin.contract
    return [problem for name in _MEMBERS for problem in _member_problems(cls, name, stated)]


def _member_problems(cls: Any, name: str, stated: str) -> list[str]:
    if not callable(getattr(cls, name, None)):
        old = is_older(stated, _MEMBERS_SINCE.get(name, "1.0"))
        return [] if old else [f"{name} is missing"]
    wanted, given = (inspect.signature(getattr(c, name)).parameters for c in (Engine, cls))
    wanted = {
        n: p
        for n, p in wanted.items()
        if n in given or not is_older(stated, _SINCE.get((name, n), "1.0"))
    }
    if list(given)[: len(wanted)] != list(wanted):
        return [f"{name} takes {list(given)}, not {list(wanted)}"]
    differ = [
        f"{name}: {given[argument]}, the contract has {parameter}"
        for argument, parameter in wanted.items()
        if given[argument].kind != parameter.kind or given[argument].default != parameter.default
    ]
    extra = [n for n, p in given.items() if n not in wanted and p.default is p.empty]
    return differ + [f"{name}: {extra} have no default"] * bool(extra)


@case(id="contract.signatures", world=(1,), model_types=TYPES, quick=True)
def signatures(target: Target) -> None:
    """Members of ``Engine`` MUST exist and be callable with the contract's arguments and defaults.

    If this fails: a renamed or reordered argument; an argument of the engine's own
    without a default.
    """
    problems = target.run(signatures_of, target.config(target.model()))[0]
    must(not problems, "members", "; ".join(problems))


def _head(engine: Engine) -> OutputHead:
    """Return the output head. An engine of an older contract lacks the member."""
    return engine.output_head()


def _calls(
    engine: Engine, batch: Batch, loss: LossFn, folder: Path
) -> Mapping[str, Callable[[], Any]]:
    newer = {"resolved": engine.resolved} if hasattr(engine, "resolved") else {}
    return newer | {
        "train_batch": lambda: engine.train_batch(batch, loss),
        "forward_backward": lambda: engine.forward_backward(batch, loss),
        "optimizer_step": engine.optimizer_step,
        "infer_batch": lambda: engine.infer_batch(batch),
        "infer_states": lambda: engine.infer_states(batch),
        "output_head": lambda: _head(engine),
        "set_teacher": lambda: engine.set_teacher(None),
        "save_checkpoint": lambda: engine.save_checkpoint(folder / "c"),
        "load_checkpoint": lambda: engine.load_checkpoint(folder / "c"),
        "save_hf": lambda: engine.save_hf(folder / "hf"),
        "get_per_tensor_param": lambda: list(engine.get_per_tensor_param()),
        "get_per_tensor_param_shard": lambda: list(engine.get_per_tensor_param_shard()),
        "to": lambda: engine.to("cpu"),
    }


def states(setup: Setup, batch: PackedDocuments, folder: Path) -> dict[str, EngineError | None]:
    """Return each member's error before ``initialize`` and after ``close``.

    In addition, the errors of calls that are out of order while the engine is ready.
    """
    engine = setup.create()
    errors = dict[str, EngineError | None]()
    rows = Batch(
        input_ids=torch.tensor(batch.input_ids),
        cu_seqlens=torch.tensor(batch.cu_seqlens),
        fields={"loss_weight": torch.tensor(batch.loss_weight)},
    )
    calls = _calls(engine, rows, default_loss(setup.model_type), folder)
    # What is not declared is refused as such, in any state.
    calls = {
        name: call
        for name, call in calls.items()
        if name not in _BELONGS or _BELONGS[name] in engine.capabilities
    }
    errors |= {f"{name} before initialize": caught(call) for name, call in calls.items()}
    engine.initialize()
    absent = [name for name in _PROPERTIES if not hasattr(engine, name)]
    must(not absent, "engine", f"{type(engine).__name__} lacks {', '.join(absent)}")
    errors |= {
        "initialize twice": caught(engine.initialize),
        "step without gradient": caught(engine.optimizer_step),
    }
    engine.close()
    engine.close()
    errors |= {f"{name} after close": caught(call) for name, call in calls.items()}
    errors["initialize after close"] = caught(engine.initialize)
    unused = setup.create()
    unused.close()
    return errors


def resolved_of(setup: Setup) -> dict[str, Any]:
    """Return what the engine says that it does of what was asked."""
    with opened(setup) as engine:
        return dict(engine.resolved())


@case(id="contract.resolved", since="1.3", model_types=TYPES)
def resolved(target: Target) -> None:
    """``resolved`` MUST name what is done of each option, with a choice in place of ``auto``.

    Explicit values come back as they were asked for; one that is not carried out is
    refused. Of recomputing, chunks and compilation the cases of memory.* measure whether
    it is true.

    If this fails: an option that is read late is reported as it was asked; an automatic
    value is not replaced by the choice; ranks choose alone.
    """
    have = target.capabilities
    given = Memory(
        max_tokens=32,
        logit_chunk=7,
        recompute="full" if Capability.RECOMPUTE in have else "none",
        compile=Capability.COMPILE in have and target.world <= 2,
    )
    for memory in (Memory(), given):
        config = target.config(target.model(), memory=memory)
        want = flatten_config(config, target.world)
        if not target.is_asked_since("1.4"):
            # An engine of an older contract knows no such field.
            del want["memory.share_prefixes"]
        ranks: list[dict[str, Any]] = target.run(resolved_of, config)
        for rank, found in enumerate(ranks):
            _check_resolved(found, want, f"rank {rank}")
            must(found == ranks[0], "resolved", "differs from rank 0's", where=f"rank {rank}")


def _check_resolved(found: Mapping[str, Any], want: Mapping[str, Any], where: str) -> None:
    absent = sorted(want.keys() - found.keys())
    must(not absent, "resolved", f"lacks {', '.join(absent)}", where=where)
    for key, value in want.items():
        got = found[key]
        plain = got is None or isinstance(got, (str, int, float))
        must(plain, "resolved", f"{key} is a {type(got).__name__}", where=where)
        if value == "auto":
            must(got != "auto", "resolved", f"{key} is 'auto', expected the choice", where=where)
        else:
            must(got == value, "resolved", f"{key}: expected {value!r}, got {got!r}", where=where)


@case(id="contract.states", model_types=TYPES, quick=True)
def state_machine(target: Target) -> None:
    """Members MUST raise ``EngineStateError`` before ``initialize`` and after ``close``.

    ``close`` is idempotent.

    If this fails: an AttributeError of something that is not built yet, or a second
    group of ranks.
    """
    ranks = target.run(
        states, target.config(target.model()), batch=documents(1, "equal"), folder=target.scratch()
    )
    for rank, errors in enumerate(ranks):
        wrong = {
            name: repr(error)
            for name, error in errors.items()
            if not isinstance(error, EngineStateError)
        }
        must(not wrong, "state", f"{wrong}", where=f"rank {rank}")


@case(id="contract.registry", world=(1,), model_types=TYPES)
def registry(target: Target) -> None:
    """A resolution MUST keep its trace, with each candidate accepted or rejected for a reason.

    If this fails: no one can tell why a device was chosen.
    """
    trace = target.resolution.trace
    must(
        any(c.accepted and c.device == target.device for c in trace),
        "trace",
        f"{[str(c) for c in trace]}",
    )
    automatic = EngineRegistry.resolve(
        model_type=target.model_type, backend=target.backend, device="auto"
    )
    silent = [str(c) for c in automatic.trace if not c.accepted and not c.reason]
    must(not silent, "trace", f"rejected without a reason: {silent}")


def lives(
    setup: Setup, batch: PackedDocuments, folder: Path, failing: EngineConfig
) -> list[Surroundings]:
    """Return the surroundings before and after each of two engines' lives.

    Before the second one an engine is not built, and behind it the closed engine is still there at
    the first of two looks. They live in a working folder of the
    rank's own, and have one for temporary files.
    """
    home, temporary = Path.cwd(), tempfile.tempdir
    rank = os.environ.get("RANK", "0")
    own, short = folder / f"working-{rank}", folder / f"temporary-{rank}"
    own.mkdir()
    short.mkdir()
    os.chdir(own)
    tempfile.tempdir = str(short)
    imported = ImportedVariables()
    others = frozenset[str]()
    try:
        seen = [read_surroundings(setup.device, others)]
        for index in range(2):
            if index:
                error = build(replace(setup, config=failing))
                must(error is not None, "engine", "is built with an unknown argument")
                del error
            with opened(setup) as engine:
                step(engine, setup, batch)
                engine.infer_batch(local_batch(engine, batch, setup.device))
                whole_weights(engine)
                save(engine, folder / f"asked-{index}")
            others = imported.set_by_others(type(engine))
            if index:
                seen.append(read_surroundings(setup.device, others))
            del engine
            seen.append(read_surroundings(setup.device, others))
        return seen
    finally:
        tempfile.tempdir = temporary
        os.chdir(home)


@case(id="contract.leaves_nothing", model_types=TYPES)
def leaves_nothing(target: Target) -> None:
    """``close`` MUST leave no thread, child, file, process group, variable or memory behind.

    Switches of torch (dtype, device, determinism, TF32, attention kernels, threads) and
    of Python (signal handlers, hooks, umask) are as before. Process groups,
    daemon threads, descriptors, temporary files, tensors and memory of the device are
    compared after a first life, which may fill caches, and a second one, before which
    another engine's build fails. The engine saves asynchronously if it declares that.
    Tensors and memory are free as soon as it is closed, also while the caller still has it.
    Variables that a library sets when it is imported, and the workers of torch's compiler, are
    not the engine's. So it is with a vision-language model, where `vision` is declared.

    If this fails: a writer thread or a worker keeps the process from ending; groups pile up
    with each engine; weights live as long as the engine's object; the default process group
    is destroyed though the engine did not make it.
    """
    for model in (target.model(), *_pictured_models(target)):
        _leaves_nothing(target, model)


@cached_by_seed
def _plain_documents(seed: int) -> PackedDocuments:
    """Return documents without the ids that stand for images and videos in the pictured model."""
    return packed_documents(seed, LENGTHS["uneven"], IMAGE)


def _leaves_nothing(target: Target, model: Path) -> None:
    """Compare the surroundings of two lives of an engine of this model."""
    folder = target.scratch()
    # An asynchronous save has a thread and groups of its own.
    has_async = Capability.ASYNC_CHECKPOINT in target.capabilities
    saving = CheckpointConfig(async_save=has_async)
    # In ranks of other cases the engine may have left its traces already.
    config = target.config(model, checkpoint=saving)
    ranks = target.run(
        lives,
        config,
        fresh=True,
        batch=_plain_documents(2),
        folder=folder,
        failing=replace(config, optimizer=OptimizerConfig(kwargs={"no_such_argument": 1})),
    )
    for rank, (before, warm, held, after) in enumerate(ranks):
        where = f"rank {rank}"
        for name in ("threads", "children", "files", "group"):
            old = getattr(before, name)
            new = getattr(after, name)
            must(old == new, name, f"{new} after close, {old} before", where=where)
        for name, old, new in (
            (name, old, dict(after.switches)[name]) for name, old in before.switches
        ):
            must(old == new, name, f"{new} after close, {old} before", where=where)
        for name in ("daemons", "descriptors"):
            old, new = getattr(warm, name), getattr(after, name)
            more = len(new) - len(old)
            left = Counter(new) - Counter(old)
            told = ", ".join(f"{count} x {one}" for one, count in left.items())
            must(more <= 0, name, f"{more} more after a second life: {told}", where=where)
        for name in ("groups", "temporary", "tensors"):
            more = getattr(after, name) - getattr(warm, name)
            must(more <= 0, name, f"{more} more after a second life", where=where)
        if target.is_asked_since("1.3"):
            kept = held.tensors - after.tensors
            must(kept <= 0, "tensors", f"{kept} live until the closed engine goes", where=where)
            kept = held.memory - after.memory
            problem = f"{kept} bytes are not free until the closed engine goes"
            must(kept <= _LEAK, "device memory", problem, where=where)
        differing = {name for name, _ in {*before.environment} ^ {*after.environment}}
        changed = sorted(differing - after.imported)
        must(not changed, "environment", f"{', '.join(changed)} differ after close", where=where)
        leak = after.memory - warm.memory
        must(leak <= _LEAK, "device memory", f"{leak} bytes more after a second life", where=where)
    names = sorted(path.name for path in folder.iterdir())
    asked = {"latest", "asked-0", "asked-1"}
    asked |= {f"{kind}-{rank}" for kind in ("working", "temporary") for rank in range(target.world)}
    must(set(names) <= asked, "files", f"not asked for: {sorted(set(names) - asked)}")


def outlive(
    setup: Setup, other: EngineConfig, batches: Sequence[PackedDocuments]
) -> list[tuple[Trained, bool]]:
    """Train two engines, close the first, and train the second on; then close the second first.

    The second one has the configuration ``other``.

    Return the results of the engine that is left, and whether this rank has a process group after
    both are closed, of the one order and the other.
    """
    found = list[tuple[Trained, bool]]()
    for closed, left in ((0, 1), (1, 0)):
        with ExitStack() as stack:
            both = (setup, replace(setup, config=other))
            engines = [stack.enter_context(opened(one)) for one in both]
            before = [step(engine, setup, batches[0]) for engine in engines]
            engines[closed].close()
            after = step(engines[left], setup, batches[1])
            trained = summary(engines[left], [before[left], after])
        found.append((trained, dist.is_initialized()))
    return found


@case(id="contract.closed_first", since="1.3", model_types=TYPES, world=(1, 2))
def closed_first(target: Target) -> None:
    """An engine MUST work on when another engine of its process is closed, in whatever order.

    The ranks are those of a launcher, so that the engines make the process group. They have
    different optimizers, schedules, chunks and adapters. Each
    ends with the bits of an engine alone, the group is gone with the last one, and other
    engines can be built after them.

    If this fails: a setting of one engine is kept in a module or a class, where the other one
    reads it; the engine that made the process group destroys it under the other one,
    which then raises or waits for ranks that never come; the group stays; a group that is
    made again meets the addresses of the former one in the launcher's store.
    """
    lora = [None, None]
    if Capability.LORA in target.capabilities:
        lora = [LoraConfig(rank=4, alpha=8.0), LoraConfig(rank=2, alpha=3.0)]
    config = target.config(target.model(tied=False), lora=lora[0])
    other = target.config(
        target.model(tied=False),
        lora=lora[1],
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.2, clip_norm=0.1),
        schedule=ScheduleConfig(name="linear", warmup_steps=2, total_steps=9),
        memory=Memory(max_tokens=32, logit_chunk=5),
    )
    batches = [documents(3, "uneven"), documents(4, "equal")]
    alone = [target.run(train, one, batches=batches) for one in (other, config)]
    ranks = target.run(outlive, config, other=other, launched=True, batches=batches)
    for rank, orders in enumerate(ranks):
        wanted = [runs[rank] for runs in alone]
        for (trained, stays), want, name in zip(orders, wanted, ("first", "second"), strict=True):
            where = f"rank {rank}, the {name} engine is closed before the other one"
            same = trained.digest == want.digest
            must(same, "weights", "differ from those of an engine alone", where=where)
            must(not stays, "process group", "is there after both are closed", where=where)


# Draws of Python's, NumPy's and torch's generator.
Draws = tuple[float, float, float]


def draws(setup: Setup, states: tuple[int, int]) -> list[tuple[Draws, Draws]]:
    """Return what the process's generators draw without an engine, and after ``initialize``.

    They are in each of ``states`` before, and the engine has ``config.seed``; a last pair is of
    the first state and of the next seed.
    """
    found = list[tuple[Draws, Draws]]()
    next_seed = replace(setup, config=replace(setup.config, seed=setup.config.seed + 1))
    for state, made in ((states[0], setup), (states[1], setup), (states[0], next_seed)):
        _set_generators(state)
        plain = _draw()
        _set_generators(state)
        with opened(made):
            found.append((plain, _draw()))
    return found


def _set_generators(state: int) -> None:
    random.seed(state)
    np.random.seed(state)  # noqa: NPY002 - the process's own generator
    torch.manual_seed(state)


def _draw() -> Draws:
    return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002 - the process's own


@case(id="contract.seeds", since="1.3", model_types=TYPES)
def seeds(target: Target) -> None:
    """``initialize`` MUST seed the process's generators by ``seed``, or leave them as they were.

    They are Python's, NumPy's and torch's, from which dropout and the user's code draw. A
    vision-language model is initialized, too, where `vision` is declared.

    If this fails: the seed is ignored, so that all seeds give one run; weights are drawn
    from the process's generators, so that a run depends on what came before it.
    """
    models = [target.model(), *_pictured_models(target)]
    for model in models:
        # One that only infers may be built in the middle of a run, as a reference is.
        for config in (target.config(model), target.config(model, optimizer=None)):
            _follow_seed(target.run(draws, config, states=(11, 12)))


def _follow_seed(ranks: Sequence[list[tuple[Draws, Draws]]]) -> None:
    for rank, found in enumerate(ranks):
        (plain, first), (other_plain, second), (_, next_seed) = found
        where = f"rank {rank}"
        if (first, second) == (plain, other_plain):
            continue
        problem = f"draw {first} after one state of the process and {second} after another"
        must(first == second, "generators", problem, where=where)
        must(next_seed != first, "generators", f"draw {first} with the next seed, too", where=where)


def _pictured_models(target: Target) -> list[Path]:
    """Return a vision-language model, where the engine declares such models and one can be made."""
    declared = Capability.VISION in target.capabilities and target.model_type == LM
    can_write = find_spec("transformers") is not None
    if not (declared and can_write and target.builds("qwen3_vl")):
        return []
    return [target.written(write_picture_model)]


Computed = tuple[dict[str, torch.Tensor], TrainOutput, dict[str, torch.Tensor]]


@contextmanager
def _torch_defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    """Let torch make tensors in a dtype and on a device inside the block."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(former)


def compute_under_defaults(
    setup: Setup, batch: PackedDocuments, dtype: torch.dtype, device: str | None
) -> Computed:
    """Build, infer, step and export under defaults of torch; return outputs, result and weights."""
    with ExitStack() as stack:
        with _torch_defaults(dtype, device):
            engine = stack.enter_context(opened(setup))
        own = local_batch(engine, batch, setup.device)
        loss = default_loss(setup.model_type)
        distils = Capability.DISTILLATION in engine.capabilities and setup.model_type == LM
        with _torch_defaults(dtype, device):
            outputs = engine.infer_batch(own)
            states = engine.infer_states(own) if distils else None
            trained = engine.train_batch(own, loss)
            weights = {
                name: tensor.to("cpu", copy=True) for name, tensor in engine.get_per_tensor_param()
            }
        fields = {
            name: getattr(outputs, name).cpu()
            for name in ("log_probs", "values")
            if getattr(outputs, name) is not None
        }
        if states is not None:
            fields["states"] = states
        return fields, trained, weights


@case(id="contract.defaults", since="1.4", world=(1, 2), model_types=(LM, VALUE))
def defaults(target: Target) -> None:
    """Torch's default dtype and default device MUST NOT change outputs, updates or exports.

    The engine is built, infers, steps and exports where torch makes float64 tensors, and tensors
    without values (on the device ``meta``), unless told.

    If this fails: positions, masks or angles are made without a dtype or a device, so that a
    notebook that has set one of them trains another model.
    """
    config = target.config(target.model())
    batch = documents(8, "uneven")
    plain, odd = (
        target.run(compute_under_defaults, config, batch=batch, dtype=dtype, device=device)
        for dtype, device in ((torch.float32, None), (torch.float64, "meta"))
    )
    for rank, (got, want) in enumerate(zip(odd, plain, strict=True)):
        where = f"under other defaults of torch, rank {rank}"
        assert_bitwise(got[0], want[0], name=f"outputs {where}")
        must(got[1] == want[1], "train output", f"{got[1]}, {want[1]} without", where=where)
        assert_bitwise(got[2], want[2], name=f"export {where}")
