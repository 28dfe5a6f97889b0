"""Refusals of undeclared capabilities by name, one probe per capability.

After each refusal the engine goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine_api.batch import Batch
from engine_api.capabilities import MECHANISMS, Capability
from engine_api.config import (
    CheckpointConfig,
    EngineConfig,
    LoraConfig,
    Memory,
    OptimizerConfig,
    Parallelism,
    Precision,
)
from engine_api.contract import Engine
from engine_api.distillation import Teaching
from engine_api.errors import EngineError, PluginNotFound, PluginUnavailable, UnsupportedCapability
from engine_api.registry import EngineRegistry
from engine_api.results import LossOutput, TokenOutputs
from engine_conformance.cases._case import LM, VALUE, AcceptedUndeclared, SkipCase, case, must
from engine_conformance.cases._expect import oracle_of, oracle_training, training_matches
from engine_conformance.cases._ranks import Trained, local_batch, opened, step, summary, train
from engine_conformance.cases._target import Setup, Target
from engine_conformance.cases.mechanisms import MODELS
from engine_conformance.cases.portable import GOLD
from engine_conformance.cases.vision import FAMILIES as VISION_FAMILIES
from engine_conformance.cases.vision import moving_documents, write_model
from engine_conformance.compare import ConformanceFailure
from engine_conformance.environment import devices_of
from engine_conformance.fixtures import PackedDocuments, packed_documents
from engine_conformance.fixtures.pictures import (
    PictureDocument,
    picture_batch,
    write_losing_model,
)

BOTH = (LM, VALUE)
_VOCABULARY = 64  # of the smallest fixture that is asked here


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusalReply:
    """Result of a request: an error, or nothing (``error`` is empty then)."""

    error: str = ""
    capability: str = ""
    remedy: str = ""
    text: str = ""


def reply_to(request: Callable[[], Any]) -> RefusalReply:
    """Return the engine's reply to ``request``, any exception included."""
    try:
        request()
    except UnsupportedCapability as error:
        return RefusalReply(
            error="UnsupportedCapability",
            capability=error.capability,
            remedy=error.remedy,
            text=str(error),
        )
    except EngineError as error:
        return RefusalReply(error=type(error).__name__, text=str(error))
    except Exception as error:  # noqa: BLE001 - the boundary to the engine: a wrong type of error is what is looked for
        return RefusalReply(error=type(error).__name__, text=str(error))
    return RefusalReply()


def _adapter_off(engine: Engine, batch: Batch, folder: Path) -> None:
    del folder
    engine.infer_batch(batch, adapter=False)


def _adapter_only(engine: Engine, batch: Batch, folder: Path) -> None:
    del batch, folder
    list(engine.get_per_tensor_param(adapter="only"))


def _move(engine: Engine, batch: Batch, folder: Path) -> None:
    del batch, folder
    engine.to("cpu")


def _save_hf(engine: Engine, batch: Batch, folder: Path) -> None:
    del batch
    engine.save_hf(folder / "hf")


def _shards(engine: Engine, batch: Batch, folder: Path) -> None:
    del batch, folder
    list(engine.get_per_tensor_param_shard())


def _load_gold(engine: Engine, batch: Batch, folder: Path) -> None:
    del batch
    engine.load_checkpoint(folder)


class _Distils:
    """A loss that needs a divergence to a teacher."""

    needs = ("divergence",)
    teaching = Teaching(vocabulary=2)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the sum of the divergence."""
        del batch
        assert outputs.divergence is not None
        return LossOutput(loss=outputs.divergence.sum())


def _states(engine: Engine, batch: Batch, folder: Path) -> None:
    del folder
    engine.infer_states(batch)


def _head(engine: Engine, batch: Batch, folder: Path) -> None:
    del batch, folder
    engine.output_head()


def _teacher(engine: Engine, batch: Batch, folder: Path) -> None:
    del batch, folder
    engine.set_teacher(None)


def _distil(engine: Engine, batch: Batch, folder: Path) -> None:
    del folder
    engine.train_batch(batch, _Distils())


# By name: a call travels to the ranks as its name.
CALLS: dict[str, Callable[[Engine, Batch, Path], None]] = {
    "infer_batch(adapter=False)": _adapter_off,
    'get_per_tensor_param(adapter="only")': _adapter_only,
    'to("cpu")': _move,
    "save_hf": _save_hf,
    "get_per_tensor_param_shard": _shards,
    "load_checkpoint of a portable checkpoint": _load_gold,
    "infer_states": _states,
    "output_head": _head,
    "set_teacher": _teacher,
    "a loss that needs divergence": _distil,
}
CALLED: dict[Capability, tuple[str, ...]] = {
    Capability.LORA: ("infer_batch(adapter=False)", 'get_per_tensor_param(adapter="only")'),
    Capability.OFFLOAD: ('to("cpu")',),
    Capability.SAVE_HF: ("save_hf",),
    Capability.EXPORT_SHARDS: ("get_per_tensor_param_shard",),
    Capability.PORTABLE_CHECKPOINT: ("load_checkpoint of a portable checkpoint",),
    Capability.DISTILLATION: (
        "infer_states",
        "output_head",
        "set_teacher",
        "a loss that needs divergence",
    ),
}


def _precisions(dtype: Any) -> dict[str, dict[str, Any]]:
    return {
        f"Precision({name}={dtype!r})": {"precision": Precision(**{name: dtype})}
        for name in ("compute", "master", "reduce")
    }


# What is asked for -> the sections of the configuration that ask for it.
CONFIGURED: dict[Capability, Mapping[str, Mapping[str, Any]]] = {
    Capability.HSDP: {"Parallelism(dp_replicate=2)": {"parallelism": Parallelism(dp_replicate=2)}},
    Capability.TP: {"Parallelism(tp=2)": {"parallelism": Parallelism(tp=2)}},
    Capability.PP: {"Parallelism(pp=2)": {"parallelism": Parallelism(pp=2)}},
    Capability.CP: {"Parallelism(cp=2)": {"parallelism": Parallelism(cp=2)}},
    Capability.EP: {"Parallelism(ep=2)": {"parallelism": Parallelism(ep=2)}},
    Capability.ULYSSES: {"Parallelism(ulysses=2)": {"parallelism": Parallelism(ulysses=2)}},
    Capability.LORA: {"LoraConfig()": {"lora": LoraConfig()}},
    Capability.OFFLOAD: {
        "Memory(offload_params=True)": {"memory": Memory(offload_params=True)},
        "Memory(offload_optimizer=True)": {"memory": Memory(offload_optimizer=True)},
    },
    Capability.RECOMPUTE: {'Memory(recompute="full")': {"memory": Memory(recompute="full")}},
    Capability.COMPILE: {"Memory(compile=True)": {"memory": Memory(compile=True)}},
    Capability.SHARED_PREFIXES: {
        "Memory(share_prefixes=True)": {"memory": Memory(share_prefixes=True)}
    },
    Capability.BF16: _precisions("bfloat16"),
    Capability.FP16: _precisions("float16"),
    Capability.FP8: _precisions("float8"),
    Capability.ASYNC_CHECKPOINT: {
        "CheckpointConfig(async_save=True)": {"checkpoint": CheckpointConfig(async_save=True)}
    },
    Capability.ROUTER_REPLAY: {"router_replay=True": {"router_replay": True}},
    Capability.PARAMETER_GROUPS: {
        'OptimizerConfig(decay="matrices")': {"optimizer": OptimizerConfig(decay="matrices")}
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A rank's replies by way of asking, and a step of the same engine afterwards."""

    replies: dict[str, RefusalReply]
    after: Trained = field(repr=False)


def configured(setup: Setup, configs: Mapping[str, EngineConfig]) -> dict[str, RefusalReply]:
    """Return the replies to building an engine of each configuration."""
    setups = {how: replace(setup, config=config) for how, config in configs.items()}
    return {how: reply_to(lambda one=one: _build(one)) for how, one in setups.items()}


def _build(setup: Setup) -> None:
    engine = setup.create()
    try:
        engine.initialize()
    finally:
        engine.close()


def called(setup: Setup, calls: Sequence[str], batch: PackedDocuments, folder: Path) -> Asked:
    """Return the replies to each call on an initialized engine, then a step of it."""
    with opened(setup) as engine:
        mine = local_batch(engine, batch, setup.device)
        replies = {how: reply_to(lambda how=how: CALLS[how](engine, mine, folder)) for how in calls}
        return Asked(replies=replies, after=summary(engine, [step(engine, setup, batch)]))


def _require_refusals(
    capability: Capability, replies: Mapping[str, RefusalReply], *, rank: int = 0
) -> None:
    for how, reply in replies.items():
        if not reply.error:
            raise AcceptedUndeclared(capability, how)
        where = f"{how}, rank {rank}" if rank else how
        if reply.error != "UnsupportedCapability":
            problem = (
                f"{reply.error} instead of UnsupportedCapability({str(capability)!r}): {reply.text}"
            )
            raise ConformanceFailure("refusal", problem, where=where)
        must(
            reply.capability == str(capability),
            "refusal",
            f"names {reply.capability!r}, not {capability}",
            where=where,
        )
        must(bool(reply.remedy), "refusal", "does not say what to do", where=where)


def _batch() -> PackedDocuments:
    return packed_documents(5, (7, 3, 6), vocab_size=_VOCABULARY)


_BATCH = _batch()  # one object: the oracle's step is kept by it


def _still_trains(target: Target, model: Path, ranks: Sequence[Trained]) -> float:
    want = oracle_training(str(model), (_BATCH,))
    return training_matches(target, ranks, want, oracle_of(str(model)))


def _usable(target: Target) -> float:
    """Require that an engine of the plain configuration trains as the oracle does.

    It is made in the same processes after the refusals.
    """
    model = target.model()
    return _still_trains(target, model, target.run(train, target.config(model), batches=[_BATCH]))


def probe_configuration(target: Target, capability: Capability) -> float:
    """Require that every configuration that asks for the capability is refused when it is built."""
    base = target.config(target.model())
    configs = {how: replace(base, **sections) for how, sections in CONFIGURED[capability].items()}
    _require_refusals(capability, target.run(configured, base, configs=configs)[0])
    return _usable(target)


def probe_calls(target: Target, capability: Capability) -> float:
    """Require that every call that asks for the capability is refused.

    The same engine then trains as the oracle does.
    """
    gold = GOLD / "contract-1.0" / target.model_type
    portable = capability is Capability.PORTABLE_CHECKPOINT
    model, folder = (
        (gold / "model", gold / "checkpoint") if portable else (target.model(), target.scratch())
    )
    ranks = target.run(
        called, target.config(model), calls=CALLED[capability], batch=_BATCH, folder=folder
    )
    _require_refusals(capability, ranks[0].replies)
    return _still_trains(target, model, [row.after for row in ranks])


def probe_moe(target: Target) -> float:
    """Require that a mixture of experts is refused when an engine is made of it."""
    config = target.config(target.model(family="qwen3_moe", tied=False))
    _require_refusals(
        Capability.MOE, target.run(configured, config, configs={"a qwen3_moe model": config})[0]
    )
    return _usable(target)


def probe_dp(target: Target) -> float:
    """Require that two ranks are refused on both of them."""
    there = devices_of(target.device)
    if there is not None and there < 2:
        raise SkipCase(f"needs 2 {target.device} devices, there are {there}")
    two = target.with_world(2)
    config = target.config(target.model())
    for rank, replies in enumerate(
        two.run(configured, config, configs={"a world of two ranks": config})
    ):
        _require_refusals(Capability.DP, replies, rank=rank)
    return _usable(target)


def probe_value_head(target: Target) -> float | None:
    """Require that there is no row for value models, or that it refuses."""
    other = target.with_model_type(VALUE)
    try:
        EngineRegistry.resolve(model_type=VALUE, backend=target.backend, device=target.device)
    except (PluginNotFound, PluginUnavailable):
        return None  # nothing offers one: there is nothing to ask
    config = other.config(other.model())
    _require_refusals(
        Capability.VALUE_HEAD, other.run(configured, config, configs={"a value model": config})[0]
    )
    return _usable(target) if target.model_type == LM else None


def probe_mechanism(target: Target, capability: Capability) -> float:
    """Require that a model with the mechanism is refused when an engine is made of it.

    An engine that does not know the model's family at all may refuse that by name.
    """
    arguments = MODELS[capability]
    model = target.with_model_type(LM).model(**arguments)
    _require_model_refused(target, capability, model, arguments["family"])
    return _usable(target)


def _require_model_refused(
    target: Target, capability: Capability, model: Path, family: str
) -> None:
    """Require that the model is refused by the capability's name, or by that of its family."""
    config = target.config(model)
    how = f"a {family} model"
    reply = target.run(configured, config, configs={how: config})[0][how]
    by_family = reply.error == "ConfigError" and family in reply.text
    if not by_family:
        _require_refusals(capability, {how: reply})


def probe_vision(target: Target) -> float:
    """Require that a vision-language model is refused by name, and so is `model.freeze`.

    An engine that does not know the model's family at all may refuse that by name.

    If this fails: the tower is left out in silence, as transformers' class for causal language
    models does it for Qwen3.5.
    """
    _require_model_refused(target, Capability.VISION, write_model(target), VISION_FAMILIES[0])
    losing = write_model(target, write_losing_model)
    _require_model_refused(target, Capability.VISION, losing, "qwen3_5")
    base = target.config(target.model())
    freezing = replace(base, model=replace(base.model, freeze=("vision",)))
    replies = target.run(configured, base, configs={"model.freeze": freezing})[0]
    _require_refusals(Capability.VISION, replies)
    return _usable(target)


def show(setup: Setup, documents: Sequence[PictureDocument]) -> dict[str, RefusalReply]:
    """Return the reply to inference on documents with videos."""
    with opened(setup) as engine:
        batch = picture_batch(documents, setup.device)
        return {"a batch with a video": reply_to(lambda: engine.infer_batch(batch))}


def probe_video(target: Target) -> float:
    """Require that a video is refused by name, or the model that would see it.

    If this fails: the frames are seen as images, or an error comes from the model's own code.
    """
    model = write_model(target)
    if Capability.VISION not in target.capabilities:
        _require_model_refused(target, Capability.VISION, model, VISION_FAMILIES[0])
    else:
        documents = moving_documents(by_frame=True)
        replies = target.run(show, target.config(model), documents=documents)[0]
        _require_refusals(Capability.VIDEO, replies)
    return _usable(target)


_OWN: dict[Capability, Callable[[Target], float | None]] = {
    **{one: partial(probe_mechanism, capability=one) for one in MODELS},
    Capability.VISION: probe_vision,
    Capability.VIDEO: probe_video,
    Capability.MOE: probe_moe,
    Capability.DP: probe_dp,
    Capability.VALUE_HEAD: probe_value_head,
}
# Ways of asking that are no entry of a table.
_OTHER_WAYS = {
    **{one: f"a model that asks for it ({model['family']})" for one, model in MODELS.items()},
    Capability.VISION: f"a model that asks for it ({VISION_FAMILIES[0]}), and model.freeze",
    Capability.VIDEO: "a batch with a video, or the model that takes one,",
    Capability.MOE: "a qwen3_moe model",
    Capability.DP: "a world of two ranks",
    Capability.VALUE_HEAD: "a value model",
}


# An engine of an older contract knows no such field.
_SINCE_1_4 = MECHANISMS | {
    Capability.ROUTER_REPLAY,
    Capability.SHARED_PREFIXES,
    Capability.DISTILLATION,
    Capability.VISION,
    Capability.VIDEO,
    Capability.PARAMETER_GROUPS,
}


def _ways(capability: Capability) -> str:
    listed = [*CONFIGURED.get(capability, ()), *CALLED.get(capability, ())]
    return ", ".join(listed) or _OTHER_WAYS[capability]


def _probe(capability: Capability) -> None:
    """Register the probe of one capability."""

    def probe(target: Target) -> float | None:
        if capability in _OWN:
            return _OWN[capability](target)
        margin = probe_configuration(target, capability) if capability in CONFIGURED else 0.0
        return max(margin, probe_calls(target, capability)) if capability in CALLED else margin

    probe.__doc__ = f"""An engine without {capability} MUST refuse {_ways(capability)} by error.

    The error is an ``UnsupportedCapability`` that names {capability} and says what to do, and the
    engine stays usable: its next step is the oracle's.

    If this fails as accepted-undeclared: the request is ignored in silence, or it works and
    {capability} should be declared. If another error comes: the request got as far as code that
    does not know it.
    """
    # The checkpoint to refuse is one of an earlier release.
    families = ("qwen3",) if capability is Capability.PORTABLE_CHECKPOINT else ()
    if capability in MODELS:
        families = (MODELS[capability]["family"],)
    pictured = capability in (Capability.VISION, Capability.VIDEO)
    if pictured:
        families = VISION_FAMILIES
    name = f"refusal.{capability}"
    since = "1.4" if capability in _SINCE_1_4 else "1.0"
    kinds = (LM,) if capability in MODELS or pictured else BOTH
    case(id=name, since=since, probes=capability, world=(1,), model_types=kinds, families=families)(
        probe
    )


for _capability in Capability:
    _probe(_capability)
