"""Distillation: a student's divergence to a teacher over the vocabulary, or its best tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_api.batch import (
    TEACHER_STATES,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOG_PROBS,
    Batch,
)
from engine_api.capabilities import Capability
from engine_api.config import EngineConfig, Memory
from engine_api.contract import Engine
from engine_api.distillation import Divergence, OutputHead, Teaching
from engine_api.errors import BatchError, ConfigError, EngineError, EngineStateError
from engine_api.losses import LossFn
from engine_api.results import LossOutput, TokenOutputs, TrainOutput
from engine_conformance.cases._case import FLOAT32, case, must
from engine_conformance.cases._expect import (
    documents,
    oracle_of,
    oracle_training,
    raised_everywhere,
    training_matches,
)
from engine_conformance.cases._ranks import (
    Trained,
    caught,
    checked,
    local_batch,
    opened,
    own_documents,
    step,
    summary,
)
from engine_conformance.cases._rows import Rows, require_bounded_rows, two_chunks
from engine_conformance.cases._target import Setup, Target
from engine_conformance.cases.mechanisms import MODELS
from engine_conformance.compare import assert_close_per_token
from engine_conformance.fixtures import PackedDocuments, packed_documents
from engine_conformance.oracle import OracleModel
from engine_conformance.oracle.losses import divergence_of, weighted_sum
from engine_conformance.seeds import cached_by_seed, current_seed

SINCE = "1.4"
REQUIRES = (Capability.DISTILLATION,)
# Both models have rows of padding beyond the tokens that count, as many as they like.
_VOCABULARY = 256
_STUDENT: dict[str, Any] = {"vocab_size": 264, "tied": False}
_TEACHER: dict[str, Any] = {"vocab_size": 272, "hidden_size": 48, "seed": 5}
# Confident tokens would have gradients that are differences of nearly equal numbers.
_WARM = 1.6
_MEMORY = Memory(max_tokens=14, logit_chunk=5)  # several micro-batches, chunks that do not fit
_TOP = 4
_PLACE = "place"
# More tokens in one micro-batch than either model is wide, which end in a chunk of one.
_WIDE = Memory(max_tokens=200, logit_chunk=1)
_ALONE = Memory(max_tokens=16, logit_chunk=5)  # for the one document of a batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Distil:
    """The weighted sum of the divergence, with each token's as a metric of its own."""

    teaching: Teaching
    needs: tuple[str, ...] = ("log_probs", "divergence")

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the loss. Raise unless the batch has no field of the teacher."""
        shown = [name for name in batch.fields if name.startswith("teacher")]
        must(not shown, "loss", f"is given the fields {shown}, which it does not need")
        given = outputs.divergence
        assert given is not None
        # A loss that does not read a token's divergence at all has no gradient from it.
        counted = given.where(batch.loss_weight > 0, 0.0)
        # A rank without documents has no fields.
        places = batch[_PLACE].tolist() if batch.num_tokens else []
        metrics: dict[str, Tensor | float] = {
            f"token {place}": value.detach() for place, value in zip(places, given, strict=True)
        }
        return LossOutput(loss=(batch.loss_weight * counted).sum(), metrics=metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleDistil:
    """The same loss in float64 (a ``Loss`` of the oracle)."""

    teacher: str | GivenTeacher
    teaching: Teaching
    temperature: float

    def __call__(self, oracle: OracleModel, batch: PackedDocuments, denominator: float) -> Tensor:
        """Return the loss."""
        return weighted_sum(self.tokens(oracle, batch), batch.loss_weight, denominator)

    def tokens(self, oracle: OracleModel, batch: PackedDocuments) -> Tensor:
        """Return each token's divergence ``[T]``, 0 at first tokens."""
        p = _distributions(oracle, batch, self.temperature)
        if isinstance(self.teacher, GivenTeacher):
            return divergence_of(p, self.teacher.log_probs(batch, self.temperature), self.teaching)
        if self.teaching.top:
            ids, log_q = top_of(self.teacher, batch, self.temperature)
            return divergence_of(_classes(p, ids), log_q.double(), self.teaching, ids=ids)
        q = _distributions(oracle_of(self.teacher), batch, self.temperature)
        return divergence_of(p, q, self.teaching)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GivenTeacher:
    """A teacher that no engine is: a head with a bias, a scale and a cap, and states for it."""

    head: OutputHead
    states: Tensor

    @staticmethod
    def drawn(seed: int, tokens: int, width: int = 24) -> GivenTeacher:
        """Return a teacher of random numbers, whose cap bends most logits."""
        generator = torch.Generator().manual_seed(1000 * current_seed() + seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        head = OutputHead(weight=normal(272, width) * 0.4, bias=normal(272), scale=1.5, cap=2.5)
        return GivenTeacher(head=head, states=normal(tokens, width))

    def log_probs(self, batch: PackedDocuments, temperature: float) -> Tensor:
        """Return the log-probs ``[T, vocabulary]`` of each token's distribution, 0 at first ones.

        The row of a token is the state that predicts it.
        """
        logits = logits_of(self.states, self.head)[:, :_VOCABULARY] / temperature
        logits[torch.as_tensor(batch.cu_seqlens[:-1]).long()] = 0.0
        log_q = logits.log_softmax(-1)
        log_q[torch.as_tensor(batch.cu_seqlens[:-1]).long()] = 0.0
        return log_q


def logits_of(states: Tensor, head: OutputHead) -> Tensor:
    """Return the logits ``[n, V]`` that a head makes of states, float64."""
    plain = states.double() @ head.weight.double().T
    plain = head.scale * (plain if head.bias is None else plain + head.bias.double())
    return plain if head.cap is None else head.cap * (plain / head.cap).tanh()


def _distributions(oracle: OracleModel, batch: PackedDocuments, temperature: float) -> Tensor:
    """Return the log-probs ``[T, vocabulary]`` of which each token is drawn, 0 at first tokens."""
    rows = list[Tensor]()
    for start, stop in pairwise(batch.cu_seqlens.tolist()):
        logits = oracle.logits(batch.input_ids[start:stop])[:-1, :_VOCABULARY] / temperature
        rows += [logits.new_zeros(1, _VOCABULARY), logits.log_softmax(-1)]
    return torch.cat(rows)


@cached_by_seed
def top_of(teacher: str, batch: PackedDocuments, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the teacher's best tokens ``[T, k]`` and log-probs ``[T, k + 1]``, as a server's.

    Every third token has one place without a token, every fifth none at all. Every second token has
    the vocabulary's first and last token among them, in the place of others.
    """
    log_q = _distributions(oracle_of(teacher), batch, temperature)
    ids = log_q.topk(_TOP, dim=-1).indices.int()
    for place, edge in ((2, 0), (3, _VOCABULARY - 1)):
        is_named = (ids[::2] == edge).any(-1)
        ids[::2, place] = ids[::2, place].where(is_named, edge)
    ids[::3, 1] = -1
    ids[::5] = -1
    return ids, _classes(log_q, ids).float()


def _classes(log_p: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probs ``[T, k + 1]`` of tokens and of the others, 0 where no token is named.

    Where no token at all is named the others are all tokens, of probability 1.
    """
    named = torch.zeros(log_p.shape, dtype=torch.bool)
    for row, chosen in enumerate(ids.tolist()):
        named[row, [one for one in chosen if one >= 0]] = True
    rest = log_p.masked_fill(named, -torch.inf).logsumexp(-1, keepdim=True)
    chosen = log_p.gather(-1, ids.clamp(min=0).long()).masked_fill(ids < 0, 0.0)
    return torch.cat([chosen, rest], -1)


def shard_of(
    engine: Engine, documents: PackedDocuments, device: str, rows: Mapping[str, Tensor]
) -> Batch:
    """Return this rank's dp shard with the index of each token, and its part of the given rows."""
    mine = own_documents(len(documents.lengths), engine.topology)
    bounds = list(pairwise(documents.cu_seqlens.tolist()))
    places = torch.cat(
        [torch.zeros(0, dtype=torch.int64), *(torch.arange(*bounds[d]) for d in mine)]
    )
    own = {name: value[places].to(device) for name, value in rows.items()}
    batch = local_batch(engine, documents, device)
    return batch.with_fields(**{_PLACE: places.to(device)}, **own) if len(mine) else batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """The states and the head that one rank's engine gave, and the tensors that it exports."""

    dp_rank: int
    dp_size: int
    states: Tensor = field(repr=False)
    weight: Tensor = field(repr=False)
    bias: Tensor | None = field(repr=False)
    head: OutputHead = field(repr=False)
    again: bool


def show(setup: Setup, batch: PackedDocuments, head_name: str) -> Shown:
    """Return states and head of an engine, and whether a step changes neither copy."""
    with opened(setup) as engine:
        own = local_batch(engine, batch, setup.device)
        states = engine.infer_states(own)
        head = engine.output_head()
        must(states.device.type == "cpu", "states", f"on {states.device}, not on the CPU")
        must(not states.requires_grad, "states", "not detached")
        named = dict(engine.get_per_tensor_param())
        weight = named[head_name].to("cpu", copy=True)
        bias = named.get("lm_head.bias")
        bias = None if bias is None else bias.to("cpu", copy=True)
        before = _copied(head)
        step(engine, setup, batch)
        return Shown(
            dp_rank=engine.topology.dp_rank,
            dp_size=engine.topology.dp_size,
            states=states,
            weight=weight,
            bias=bias,
            head=before,
            again=_same(before, _copied(head)),
        )


def _copied(head: OutputHead) -> OutputHead:
    """Return the head with copies of its tensors, on the CPU."""
    bias = None if head.bias is None else head.bias.to("cpu", copy=True)
    return replace(head, weight=head.weight.to("cpu", copy=True), bias=bias)


def _same(one: OutputHead, other: OutputHead) -> bool:
    """Return whether two heads have the same tensors, bit for bit."""
    if one.bias is None or other.bias is None:
        return one.bias is other.bias and torch.equal(one.weight, other.weight)
    return torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias)


@case(id="distill.states", since=SINCE, requires=REQUIRES)
def states(target: Target) -> float:
    """``infer_states`` and ``output_head`` MUST make the model's logits, aligned like log-probs.

    The row of a token is the state that predicts it, and 0 at first tokens; the head is whole on
    every rank, in the dtype of the computation, and no step changes it afterwards. Where the engine
    declares caps, factors or biases of logits, the head of such a model has its own, too.

    If this fails: states are before the last norm, or a token late; a rank has its own rows of
    the head; the head is a view of the weight that the optimizer moves, or is without its cap.
    """
    batch = documents(51)
    margins = list[float]()
    models = ({"tied": True}, {"tied": False}, *_heads_of(target))
    for arguments in models:
        model = target.model(**arguments)
        tied = arguments.get("tied", True)
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        ranks: list[Shown] = target.run(
            show, target.config(model, memory=_MEMORY), batch=batch, head_name=name
        )
        want = oracle_of(str(model)).token_outputs(batch.input_ids, batch.cu_seqlens).log_probs
        bounds = list(pairwise(batch.cu_seqlens.tolist()))
        for rank, one in enumerate(ranks):
            where = f"rank {rank}"
            compute = target.torch_dtype
            dtype = one.head.weight.dtype
            exact = replace(
                one.head,
                weight=one.weight.to(compute),
                bias=None if one.bias is None else one.bias.to(compute),
            )
            must(dtype == compute, "output_head", f"{dtype}", where=where)
            must(_same(one.head, exact), "output_head", "is not the export's", where=where)
            must(one.again, "output_head", "a step changes the copy", where=where)
            must(one.states.dtype == compute, "states", f"{one.states.dtype}", where=where)
            mine = range(one.dp_rank, len(bounds), one.dp_size)
            places = [place for document in mine for place in range(*bounds[document])]
            must(len(one.states) == len(places), "states", f"{len(one.states)} rows", where=where)
            logits = logits_of(one.states, one.head)
            ids = torch.as_tensor(batch.input_ids[places])
            got = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            first = torch.tensor([place in batch.cu_seqlens for place in places], dtype=torch.bool)
            must(not one.states[first].any(), "states", "first tokens are not 0", where=where)
            own = target.tolerance("log_probs")
            exact_log_probs = want[places]
            off = (got - exact_log_probs).abs().masked_fill(first, 0.0)
            margin = float((off / own.bound(exact_log_probs)).max()) if len(off) else 0.0
            must(margin <= 1, "states", f"log-probs are off by {float(off.max()):.3g}", where=where)
            margins.append(margin)
    return max(margins)


_HEADS = (Capability.SOFTCAP, Capability.LOGIT_SCALE, Capability.HEAD_BIAS)


def _heads_of(target: Target) -> list[dict[str, Any]]:
    """Return arguments of a model for each further part of a head that the engine declares."""
    declared = [one for one in _HEADS if one in target.capabilities]
    models = [dict(MODELS[one]) for one in declared]
    return [one for one in models if target.builds(one["family"])]


def distil(
    setup: Setup,
    batch: PackedDocuments,
    teaching: Teaching,
    temperature: float,
    teacher: EngineConfig | None = None,
    rows: Mapping[str, Tensor] | None = None,
    head: OutputHead | None = None,
) -> Trained:
    """Train one step on the divergence to a teacher.

    An engine of its own is the teacher, or it is given by ``rows``, with or without a head.
    """
    given = dict(rows or {})
    inferred: Tensor | None = None
    if teacher is not None:
        with opened(replace(setup, config=teacher)) as engine:
            inferred = engine.infer_states(local_batch(engine, batch, setup.device))
            head = engine.output_head()
    with opened(setup) as engine:
        own = shard_of(engine, batch, setup.device, given)
        if inferred is not None and own.num_tokens:
            own = own.with_fields(**{TEACHER_STATES: inferred.to(setup.device)})
        if head is not None:
            engine.set_teacher(head)
        output = engine.train_batch(own, Distil(teaching=teaching), temperature=temperature)
        return summary(engine, [checked(output, TrainOutput, "train_batch")])


def _compare(
    target: Target, ranks: Sequence[Trained], batch: PackedDocuments, loss: OracleDistil, model: str
) -> float:
    """Compare each token's divergence and the step with the oracle's."""
    oracle = oracle_of(model)
    want = loss.tokens(oracle, batch)
    metrics = ranks[0].outputs[0].metrics
    got = torch.tensor([metrics.get(f"token {t}", torch.nan) for t in range(len(want))])
    name = loss.teaching.divergence
    margin = assert_close_per_token(
        name, got, want, target.tolerance("entropy"), cu_seqlens=batch.cu_seqlens
    )
    trained = oracle_training(model, (batch,), loss=loss)
    return max(margin, training_matches(target, ranks, trained, oracle))


_KINDS: tuple[Divergence, ...] = ("reverse_kl", "forward_kl", "jsd")


@case(id="distill.divergence", since=SINCE, requires=REQUIRES, dtypes=FLOAT32, quick="once")
def divergence(target: Target) -> float:
    """The divergence to a teacher MUST be over the whole vocabulary, and its gradient the oracle's.

    Each token's value, and loss, norm and every weight after a step: reverse and forward KL and the
    generalized JSD, at a temperature of 1.6. The teacher has another size, and both models have
    rows beyond the vocabulary, which do not count. In several micro-batches and chunks, in one
    micro-batch of more tokens than the models are wide in chunks of one, and on ranks without
    documents. A teacher's head may have a bias, a factor and a cap, and so may the student's where
    the engine declares them.

    If this fails: the two KLs are exchanged; the gradient is that of the sampled token alone; the
    temperature divides the student's logits alone; padding of the vocabulary takes probability;
    the teacher's rows are a token late, or of another micro-batch's documents; the last chunk has
    no gradient; a head's cap is that of temperature 1.
    """
    student = target.model(**_STUDENT)
    teacher = target.model(**_TEACHER)
    batch = documents(52)
    config = target.config(student, memory=_MEMORY)
    taught = replace(target.config(teacher, memory=Memory(max_tokens=20)), optimizer=None)
    margins = list[float]()
    for kind in _KINDS:
        teaching = Teaching(vocabulary=_VOCABULARY, divergence=kind, beta=0.3)
        ranks: list[Trained] = target.run(
            distil, config, batch=batch, teaching=teaching, temperature=_WARM, teacher=taught
        )
        loss = OracleDistil(teacher=str(teacher), teaching=teaching, temperature=_WARM)
        margins.append(_compare(target, ranks, batch, loss, str(student)))
    given: tuple[tuple[Divergence, PackedDocuments, Memory], ...] = (
        ("reverse_kl", _long(), _WIDE),
        ("forward_kl", documents(56, "single"), _ALONE),
    )
    for kind, one, memory in given:
        margins.append(_taught_by_head(target, replace(config, memory=memory), one, kind))
    for arguments in _heads_of(target):
        other = target.model(**arguments, vocab_size=264)
        memory = replace(_MEMORY, max_tokens=30)
        margins.append(_taught_by_head(target, target.config(other, memory=memory), batch, "jsd"))
    return max(margins)


@cached_by_seed
def _long() -> PackedDocuments:
    return packed_documents(57, (47, 31, 9))


def _taught_by_head(
    target: Target, config: EngineConfig, batch: PackedDocuments, kind: Divergence
) -> float:
    """Compare a step with the oracle's, whose teacher has a bias, a factor and a cap."""
    given = GivenTeacher.drawn(58, len(batch.input_ids))
    teaching = Teaching(vocabulary=_VOCABULARY, divergence=kind, beta=0.3)
    ranks: list[Trained] = target.run(
        distil,
        config,
        batch=batch,
        teaching=teaching,
        temperature=_WARM,
        rows={TEACHER_STATES: given.states},
        head=given.head,
    )
    loss = OracleDistil(teacher=given, teaching=teaching, temperature=_WARM)
    return _compare(target, ranks, batch, loss, config.model.path)


@case(id="distill.top", since=SINCE, requires=REQUIRES, dtypes=FLOAT32, world=(1, 2), quick="once")
def top(target: Target) -> float:
    """The divergence over a teacher's best tokens MUST count all other tokens as one class.

    Places without a token (-1) are no class, and a token without any teaches nothing. The first and
    the last token of the vocabulary are among those that the teacher names, and a rank may have no
    documents.

    If this fails: the probability of the other tokens is left out, or divided by their number; -1
    counts from the end of the vocabulary; token 0 is taken for none.
    """
    student = target.model(**_STUDENT)
    teacher = str(target.model(**_TEACHER))
    batch = documents(53)
    config = target.config(student, memory=_MEMORY)
    ids, log_probs = top_of(teacher, batch, _WARM)
    rows = {TEACHER_TOP_IDS: ids, TEACHER_TOP_LOG_PROBS: log_probs}
    margins = list[float]()
    for kind in _KINDS:
        teaching = Teaching(vocabulary=_VOCABULARY, divergence=kind, beta=0.3, top=True)
        ranks: list[Trained] = target.run(
            distil, config, batch=batch, teaching=teaching, temperature=_WARM, rows=rows
        )
        loss = OracleDistil(teacher=teacher, teaching=teaching, temperature=_WARM)
        margins.append(_compare(target, ranks, batch, loss, str(student)))
    return max(*margins, _of_one_document(target, replace(config, memory=_ALONE), teacher))


def _of_one_document(target: Target, config: EngineConfig, teacher: str) -> float:
    """Compare a step in which all ranks but one have no documents."""
    batch = documents(59, "single")
    ids, log_probs = top_of(teacher, batch, _WARM)
    rows = {TEACHER_TOP_IDS: ids, TEACHER_TOP_LOG_PROBS: log_probs}
    teaching = Teaching(vocabulary=_VOCABULARY, top=True)
    ranks: list[Trained] = target.run(
        distil, config, batch=batch, teaching=teaching, temperature=_WARM, rows=rows
    )
    loss = OracleDistil(teacher=teacher, teaching=teaching, temperature=_WARM)
    return _compare(target, ranks, batch, loss, config.model.path)


@case(id="distill.fields", since=SINCE, requires=REQUIRES, world=(1, 2))
def fields(target: Target) -> None:
    """The teacher's log-probs MUST count bit for bit, whatever `precision.compute` is.

    Two steps differ in log-probs by less than bfloat16 shows: so must the divergences.

    If this fails: the inputs of a module are cast to the dtype of the computation, and the
    teacher's log-probs with them.
    """
    batch = documents(53)
    config = target.config(target.model(**_STUDENT), memory=_MEMORY)
    ids, log_probs = top_of(str(target.model(**_TEACHER)), batch, _WARM)
    # Of probabilities that are a little smaller, so that their sum stays below 1.
    rounded = (log_probs * (1 + 2**-7)).bfloat16().float()
    found = list[Mapping[str, float]]()
    for given in (rounded, rounded * (1 + 2**-11)):
        rows = {TEACHER_TOP_IDS: ids, TEACHER_TOP_LOG_PROBS: given}
        teaching = Teaching(vocabulary=_VOCABULARY, divergence="forward_kl", top=True)
        ranks: list[Trained] = target.run(
            distil, config, batch=batch, teaching=teaching, temperature=_WARM, rows=rows
        )
        found.append(ranks[0].outputs[0].metrics)
    one, other = found
    # A token without any named teaches nothing.
    taught = [name for name in one if name.startswith("token ") and one[name]]
    same = [name for name in taught if one[name] == other[name]]
    problem = f"the divergence of {len(same)} of {len(taught)} tokens is the same"
    must(2 * len(same) < len(taught), TEACHER_TOP_LOG_PROBS, problem)


_LARGE: dict[str, Any] = {"vocab_size": 640, "tied": False}


def taught_rows(setup: Setup, batch: PackedDocuments, vocab: int, hidden: int) -> tuple[int, int]:
    """Return the rows of logits in a step with the model's own teaching (`Rows.most`, `live`)."""
    with opened(setup) as engine:
        own = shard_of(engine, batch, setup.device, {})
        if own.num_tokens:
            own = own.with_fields(**{TEACHER_STATES: engine.infer_states(own).to(setup.device)})
        else:
            engine.infer_states(own)
        engine.set_teacher(engine.output_head())
        loss = Distil(teaching=Teaching(vocabulary=vocab), needs=("divergence", "log_probs"))
        with Rows(vocab, hidden) as rows:
            engine.train_batch(own, loss)
    return rows.most, rows.live


@case(id="distill.chunks_bound", since=SINCE, requires=REQUIRES)
def chunks_bound(target: Target) -> None:
    """The logits of at most ``logit_chunk`` tokens MUST exist at a time, the teacher's as well.

    The results of all operations of a step are looked at, in forward and backward, and what lives
    of them at a time: no more with many chunks than with two.

    If this fails: the teacher's logits of a whole micro-batch exist, or those that the backward
    pass needs are kept.
    """
    model = target.model(**_LARGE)
    config = target.config(model, memory=Memory(logit_chunk=9))
    few, many = (
        target.run(taught_rows, config, batch=batch, vocab=640, hidden=64)
        for batch in (two_chunks(55, target.world, 9), packed_documents(54, (40, 33, 17)))
    )
    require_bounded_rows(many, few, 9)


class _Untaught:
    """A loss that needs a divergence, and does not say of what."""

    needs = ("divergence",)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        del batch
        assert outputs.divergence is not None
        return LossOutput(loss=outputs.divergence.sum())


_WRONG: Mapping[str, type[EngineError]] = {
    "no head was given": EngineStateError,
    "the loss says nothing of its teacher": ConfigError,
    "a head that is not one": ConfigError,
    "more tokens than the student has": ConfigError,
    "more tokens than the teacher has": ConfigError,
    "no states in the batch": BatchError,
    "states of another width": BatchError,
    "a token that does not count": BatchError,
    "a token that is named twice": BatchError,
    "a log-prob too few": BatchError,
}


def _attempts(
    engine: Engine, batch: Batch, head: OutputHead, width: int, device: str
) -> dict[str, EngineError | None]:
    """Return the error of each wrong call."""
    size = batch.num_tokens

    def trained(extra: Mapping[str, Tensor], loss: LossFn) -> EngineError | None:
        return caught(lambda: engine.train_batch(batch.with_fields(**extra), loss))

    def asking(**given: Any) -> Distil:
        settings: dict[str, Any] = {"vocabulary": _VOCABULARY} | given
        return Distil(teaching=Teaching(**settings))

    states = {TEACHER_STATES: torch.zeros(size, width, device=device)}
    best = {
        TEACHER_TOP_IDS: torch.zeros(size, 2, dtype=torch.int32, device=device),
        TEACHER_TOP_LOG_PROBS: torch.zeros(size, 3, device=device),
    }
    errors = {"no head was given": trained(states, asking())}
    wrong: Any = "head"
    errors["a head that is not one"] = caught(lambda: engine.set_teacher(wrong))
    engine.set_teacher(head)
    errors["the loss says nothing of its teacher"] = trained(states, _Untaught())
    errors["more tokens than the student has"] = trained(best, asking(vocabulary=999, top=True))
    errors["more tokens than the teacher has"] = trained(states, asking(vocabulary=260))
    errors["no states in the batch"] = trained({}, asking())
    narrow = {TEACHER_STATES: torch.zeros(size, width - 1, device=device)}
    errors["states of another width"] = trained(narrow, asking())
    beyond = best | {TEACHER_TOP_IDS: best[TEACHER_TOP_IDS] + _VOCABULARY}
    errors["a token that does not count"] = trained(beyond, asking(top=True))
    errors["a token that is named twice"] = trained(best, asking(top=True))
    few = best | {TEACHER_TOP_LOG_PROBS: torch.zeros(size, 2, device=device)}
    errors["a log-prob too few"] = trained(few, asking(top=True))
    engine.set_teacher(None)
    return errors


def misuse(
    setup: Setup, batch: PackedDocuments, width: int
) -> tuple[dict[str, EngineError | None], Trained]:
    """Return the errors of wrong calls on this rank, and a step of the engine after them."""
    with opened(setup) as engine:
        own = shard_of(engine, batch, setup.device, {})
        head = OutputHead(weight=torch.zeros(_VOCABULARY, width))
        errors = _attempts(engine, own, head, width, setup.device)
        return errors, summary(engine, [step(engine, setup, batch)])


def share(setup: Setup, batch: PackedDocuments, width: int) -> EngineError | None:
    """Return the error of a divergence on this rank, whose documents share prefixes."""
    with opened(setup) as engine:
        own = shard_of(engine, batch, setup.device, {})
        states = {TEACHER_STATES: torch.zeros(own.num_tokens, width, device=setup.device)}
        engine.set_teacher(OutputHead(weight=torch.zeros(_VOCABULARY, width)))
        loss = Distil(teaching=Teaching(vocabulary=_VOCABULARY))
        return caught(lambda: engine.train_batch(own.with_fields(**states), loss))


@case(
    id="distill.refused", since=SINCE, requires=REQUIRES, dtypes=FLOAT32, world=(1, 2), quick="once"
)
def refused(target: Target) -> float:
    """A teacher that does not fit MUST be refused on all ranks, and the engine stays usable.

    A head that was not given or is none, fields that are absent or of another size, tokens that do
    not count or stand twice in a row, a vocabulary larger than that of either model, a loss that
    does not say what it compares with, documents that share prefixes.

    If this fails: an index out of range ends the process on an accelerator, or the student learns
    from zeros.
    """
    model: Path = target.model(**_STUDENT)
    batch = documents(55, "equal")
    ranks = target.run(misuse, target.config(model), batch=batch, width=48)
    for name, kind in _WRONG.items():
        raised_everywhere(name, [errors[name] for errors, _ in ranks], kind)
    if Capability.SHARED_PREFIXES in target.capabilities:
        shared = target.config(model, memory=Memory(share_prefixes=True))
        raised = target.run(share, shared, batch=batch, width=48)
        raised_everywhere("shared prefixes", raised, ConfigError)
    want = oracle_training(str(model), (batch,))
    return training_matches(target, [trained for _, trained in ranks], want, oracle_of(str(model)))
