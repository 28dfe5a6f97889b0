"""Options that trade time for memory and must change no output.

Recompute, offload, compile, chunks and half precision.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import EngineConfig, Memory, OptimizerConfig, Precision
from engine_api.contract import Engine
from engine_api.errors import ConfigError, EngineError, EngineStateError, UnsupportedCapability
from engine_api.losses import LossFn, needs_of
from engine_api.results import LossOutput, TokenOutputs
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._expect import (
    CONFIG,
    asking,
    documents,
    merged,
    oracle_of,
    oracle_outputs,
    oracle_training,
    outputs_match,
    training_matches,
)
from engine_conformance.cases._losses import LikelihoodAndEntropy, default_loss
from engine_conformance.cases._ranks import (
    InferCall,
    InferredAndTrained,
    RankOutputs,
    Trained,
    build,
    caught,
    infer,
    infer_and_train,
    infer_on_rank,
    local_batch,
    opened,
    save,
    step,
    summary,
    train,
)
from engine_conformance.cases._rows import Rows, require_bounded_rows, two_chunks
from engine_conformance.cases._state import read_state
from engine_conformance.cases._target import EPS, Setup, Target
from engine_conformance.compare import (
    assert_bitwise,
    assert_scalar_close,
    assert_weights_close,
)
from engine_conformance.fixtures import PackedDocuments, TinyModel, packed_documents
from engine_conformance.oracle import AdamWConfig
from engine_conformance.oracle.weights import read_safetensors
from engine_conformance.seeds import cached_by_seed
from engine_conformance.tolerances import weight_tolerance

TYPES = (LM, VALUE)
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_norm=2.0, eps=EPS)
# Relative difference of a norm whose elements are rounded to bfloat16 a few times.
_ROUNDED = 2.0**-6


def _batches() -> tuple[PackedDocuments, ...]:
    return tuple(
        documents(85 + i, lengths) for i, lengths in enumerate(("uneven", "equal", "skewed"))
    )


def _trains(target: Target, config: EngineConfig, model: Path) -> float:
    """Compare three clipped, decayed steps with the oracle's."""
    ranks = target.run(train, config, batches=_batches())
    want = oracle_training(
        str(model), _batches(), optimizer=AdamWConfig(weight_decay=0.1, max_grad_norm=2.0, eps=EPS)
    )
    return training_matches(target, ranks, want, oracle_of(str(model)))


def _train_with_memory(target: Target, memory: Memory, **model: object) -> float:
    folder = target.model(**model)
    return _trains(target, target.config(folder, optimizer=OPTIMIZER, memory=memory), folder)


@case(id="memory.chunks", model_types=TYPES, quick="once")
def chunks(target: Target) -> float:
    """Chunked logits, padding and kept weights MUST NOT change loss, gradient or update.

    Chunks are of three tokens, and of one. A loss whose derivative is known before may report the
    entropy, which is the oracle's in every chunk.

    If this fails: the last chunk, which is shorter, is dropped, or padding carries
    loss; a chunk of one token loses a dimension; the entropy is left out where gradients are
    computed in the forward pass.
    """
    memory = Memory(logit_chunk=3, pad_to_multiple=16, reshard_after_forward=False, max_tokens=32)
    margin = _train_with_memory(target, memory, tied=False)
    if target.model_type == VALUE:
        return margin
    return max(
        margin,
        _train_with_memory(target, Memory(logit_chunk=1), tied=False),
        _reports_entropy(target, memory),
    )


def _reports_entropy(target: Target, memory: Memory) -> float:
    """Compare a step, and the entropy that its loss reports, with the oracle's."""
    folder = target.model(tied=False)
    batch = _batches()[0]
    config = target.config(folder, memory=memory)
    ranks = target.run(train, config, batches=[batch], loss=LikelihoodAndEntropy())
    oracle = oracle_of(str(folder))
    exact = oracle.token_outputs(batch.input_ids, batch.cu_seqlens).entropy
    weight = torch.as_tensor(batch.loss_weight).double()
    want = float((weight * exact).sum()) / batch.denominator
    got = ranks[0].outputs[0].metrics["entropy"] / batch.denominator
    return max(
        assert_scalar_close("mean entropy", got, want, target.tolerance("entropy")),
        training_matches(target, ranks, oracle_training(str(folder), (batch,)), oracle),
    )


@case(id="memory.recompute", requires=(Capability.RECOMPUTE,), model_types=TYPES, quick=True)
def recompute(target: Target) -> float:
    """Recomputing activations MUST NOT change loss, gradient or update.

    If this fails: the second forward runs with other positions, or without its packing.
    """
    return _train_with_memory(target, Memory(recompute="full", max_tokens=24))


class _Saved:
    """A loss that counts the bytes kept for backward when it is called, each storage once."""

    def __init__(self, loss: LossFn) -> None:
        self._loss = loss
        self._storages = dict[int, int]()
        self.needs = needs_of(loss)
        self.most = 0

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Note what is kept now, when the forward pass of the micro-batch is over."""
        self.most = max(self.most, sum(self._storages.values()))
        self._storages.clear()
        return self._loss(outputs, batch)


def saved_bytes(setup: Setup, batch: PackedDocuments) -> tuple[int, str]:
    """Return the bytes that autograd keeps of a step's forward pass, at the call of the loss.

    The second is the kind of recomputing that the engine says it does.
    """
    saved = _Saved(default_loss(setup.model_type))
    with opened(setup) as engine, saved_tensors_hooks(saved.keep, lambda tensor: tensor):
        step(engine, setup, batch, loss=saved)
        return saved.most, engine.resolved()["memory.recompute"]


@case(id="memory.recompute_saves", since="1.3", requires=(Capability.RECOMPUTE,), model_types=TYPES)
def recompute_saves(target: Target) -> float:
    """Recomputing MUST keep less for backward: at most six tenths in a model of six layers.

    The bytes that autograd keeps are counted at the call of the loss.

    If this fails: the option is accepted and nothing is recomputed.
    """
    folder = target.model(num_layers=6)
    margins = list[float]()
    config = target.config(folder)
    kept = [
        target.run(saved_bytes, replace(config, memory=Memory(recompute=kind)), batch=_long())
        for kind in ("none", "full")
    ]
    for rank, ((whole, said), (less, said_then)) in enumerate(zip(*kept, strict=True)):
        where = f"rank {rank}"
        must(
            (said, said_then) == ("none", "full"),
            "resolved",
            f"memory.recompute is {said!r} without recompute, {said_then!r} with it",
            where=where,
        )
        must(whole > 0, "bytes for backward", "autograd keeps nothing in this process", where=where)
        problem = f"{less} with recompute, {whole} without"
        must(less <= 0.6 * whole, "bytes for backward", problem, where=where)
        margins.append(less / (0.6 * whole))
    return max(margins)


@cached_by_seed
def _long() -> PackedDocuments:
    """Return documents long enough for activations to outweigh the weights."""
    return packed_documents(86, (190, 150, 130, 120))


def logit_rows(setup: Setup, batch: PackedDocuments, model: TinyModel) -> tuple[int, int]:
    """Return the rows of logits that exist in a step and in inference: `Rows.most`, `Rows.live`."""
    with opened(setup) as engine, Rows(model.vocab_size, model.hidden_size) as rows:
        step(engine, setup, batch)
        engine.infer_batch(local_batch(engine, batch, setup.device))
    return rows.most, rows.live


@case(id="memory.chunks_bound", since="1.3")
def chunks_bound(target: Target) -> None:
    """The logits of at most ``logit_chunk`` tokens MUST exist at a time, in backward too.

    The results of all operations are looked at, in a step and in inference, and what lives of them
    at a time: no more with many chunks than with two.

    If this fails: the option is accepted, and the logits of all tokens exist, which are
    most of the memory of a large vocabulary; or they are computed in chunks, and kept for the
    backward.
    """
    arguments = {"vocab_size": 640, "tied": False}
    config = target.config(target.model(**arguments), memory=Memory(logit_chunk=9))
    few, many = (
        target.run(logit_rows, config, batch=batch, model=TinyModel(**arguments))
        for batch in (two_chunks(88, target.world, 9), packed_documents(87, (40, 33, 17)))
    )
    require_bounded_rows(many, few, 9)


@case(id="memory.offload", requires=(Capability.OFFLOAD,), model_types=TYPES, quick=True)
def offload(target: Target) -> float:
    """Weights or optimizer state on the host MUST NOT change loss, gradient norm or update.

    If this fails: a gradient norm of the host's part alone, moments that do not come
    back.
    """
    kinds = (Memory(offload_params=True), Memory(offload_optimizer=True))
    return max(
        _train_with_memory(target, memory)
        for memory in kinds[: 1 if target.model_type == VALUE else None]
    )


@cached_by_seed
def _other_lengths() -> PackedDocuments:
    """Return documents of other lengths with as many tokens as the equal ones.

    That holds on each of two ranks, too.
    """
    return packed_documents(84, (12, 5, 4, 11))


# As torch's profiler calls runs of compiled graphs, in forward and backward.
_REGIONS = ("Torch-Compiled Region", "CompiledFunctionBackward", "## Call CompiledFxGraph")
_PRODUCTS = ("aten::mm", "aten::addmm")
# q, k and v (which may be one product), output, gate and up (which may be one), down: each once in
# forward and twice in backward.
_PRODUCTS_OF_BLOCK = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """The results of some steps, and what torch has compiled for them.

    Attributes:
        graphs: number of graphs that torch has compiled in the steps.
        outside: number of matrix products of the last step outside of compiled graphs.
    """

    trained: Trained
    graphs: int
    outside: int


def train_compiled(setup: Setup, batches: Sequence[PackedDocuments]) -> Compiled:
    """Run some steps, and look at the last one with torch's profiler."""
    statistics = torch._dynamo.utils.counters["stats"]  # noqa: SLF001 - torch has no public count
    before = statistics["unique_graphs"]
    with opened(setup) as engine:
        outputs = [step(engine, setup, batch) for batch in batches[:-1]]
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            outputs.append(step(engine, setup, batches[-1]))
        graphs = statistics["unique_graphs"] - before
        products = [event for event in seen.events() or () if event.name in _PRODUCTS]
        outside = sum(not _is_compiled(event) for event in products)
        return Compiled(trained=summary(engine, outputs), graphs=graphs, outside=outside)


def _is_compiled(event: Any) -> bool:
    """Return whether an event of torch's profiler is inside of a compiled graph's run."""
    above = event.cpu_parent
    while above is not None and not above.name.startswith(_REGIONS):
        above = above.cpu_parent
    return above is not None


@case(id="memory.compile", requires=(Capability.COMPILE,), world=(1, 2), slow=True)
def compiled(target: Target) -> float:
    """Compiled blocks MUST NOT change loss, gradient or update, and all blocks MUST be compiled.

    The second batch has as many tokens in documents of other lengths. Of two blocks, fewer matrix
    products than one block has may run outside of compiled graphs.

    If this fails: a graph break or a new shape falls back to another attention; the
    first batch's mask is a constant of the graph; the option is accepted and nothing is
    compiled, or the first block alone.
    """
    folder = target.model()
    batches = (documents(83, "equal"), _other_lengths(), documents(83, "equal"))
    config = target.config(folder, memory=Memory(compile=True))
    ran: list[Compiled] = target.run(train_compiled, config, batches=batches, deadline=400.0)
    for rank, one in enumerate(ran):
        where = f"rank {rank}"
        must(one.graphs > 0, "compile", "torch has compiled no graph", where=where)
        problem = f"{one.outside} matrix products of a step are outside of compiled graphs"
        must(one.outside < _PRODUCTS_OF_BLOCK, "compile", problem, where=where)
    ranks = [one.trained for one in ran]
    return training_matches(
        target, ranks, oracle_training(str(folder), batches), oracle_of(str(folder))
    )


@case(id="memory.half_precision", requires=(Capability.BF16,), model_types=TYPES, quick=True)
def half_precision(target: Target) -> float:
    """bfloat16 on float32 masters MUST stay within its tolerance and move the float32 weights.

    All weights are computed with in bfloat16: outputs are, bit for bit, those of the weights
    rounded to it.

    If this fails: masters are rounded to bfloat16 after the step, so that small updates
    are lost; the computation is in float32 all the same; outputs are bfloat16; embedding, last
    norm or head, which are outside the blocks, keep the masters' dtype.
    """
    model = target.model()
    half = replace(target, dtype="bfloat16")
    config = half.config(model, optimizer=OPTIMIZER, precision=Precision(compute="bfloat16"))
    ranks = target.run(train, config, batches=_batches())
    full = replace(config, precision=Precision(compute="float32"))
    exact = target.run(train, full, batches=_batches()[:1])[0].outputs[0]
    must(exact != ranks[0].outputs[0], "precision.compute", "bfloat16 gives float32's bits")
    calls = [asking(target, _batches()[0])]
    inferred: list[list[RankOutputs]] = target.run(infer, config, calls=calls)
    if target.is_asked_since("1.4"):
        _rounds_all_weights(target, config, inferred, calls)
    for rank, (outputs,) in enumerate(inferred):
        for name, values in outputs.fields.items():
            must(values.dtype == torch.float32, name, f"{values.dtype}", where=f"rank {rank}")
            # A softmax in float32 gives more digits; values come of a linear layer.
            rounded = name != "values" and torch.equal(values, values.bfloat16().float())
            must(not rounded, name, "hold bfloat16 values only", where=f"rank {rank}")
    rounded = [n for n, w in ranks[0].weights.items() if bool((w == w.bfloat16().float()).all())]
    must(not rounded, "masters", f"{rounded[:3]} hold bfloat16 values only")
    want = oracle_training(
        str(model), _batches(), optimizer=AdamWConfig(weight_decay=0.1, max_grad_norm=2.0, eps=EPS)
    )
    return training_matches(half, ranks, want, oracle_of(str(model)))


# Sides that blocks of 128 and rows of 16 divide.
_WIDE: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_kv_heads": 4,
    "tied": False,
}
# e4m3 has 3 bits of a fraction, and 16 times the rounding of bfloat16: an error of single tokens
# says little. Seen on H200s over 22 layouts, with blocks of 128: log-probs 0.3 of their standard
# deviation, gradients 0.48 of a weight's.
_FP8_LOG_PROBS = 0.6
_FP8_GRADIENT = 0.8


@case(id="memory.float8", since="1.4", requires=(Capability.FP8,))
def float8(target: Target) -> float:
    """FP8 in matrix products MUST stay near the oracle and move float32 masters.

    Only where there is no CUDA device may ``precision.compute`` be refused by name.
    Log-probs are compared over all tokens, and the gradient of each weight as a whole.

    If this fails: float8 is accepted, and computed in bfloat16; a scale is that of another
    matrix, or of an earlier step; weights are kept in FP8, and small updates are lost.
    """
    model = target.model(**_WIDE)
    plain = OptimizerConfig(name="torch.optim.SGD", lr=1.0, clip_norm=None)
    half = replace(target, dtype="bfloat16")
    config = half.config(model, optimizer=plain, precision=Precision(compute="float8"))
    if target.device != "cuda" and _is_refused(target.run(build, config), "precision.compute"):
        return 0.0
    batch = packed_documents(89, (150, 90, 60, 84))
    calls = [asking(target, batch)]
    ranks: list[InferredAndTrained] = target.run(infer_and_train, config, calls=calls, batch=batch)
    got = merged(calls[0], [rank.outputs[0] for rank in ranks])["log_probs"].double()
    half_config = replace(config, precision=Precision(compute="bfloat16"))
    same = target.run(infer, half_config, calls=calls)
    rounded = merged(calls[0], [outputs for (outputs,) in same])["log_probs"].double()
    must(not torch.equal(got, rounded), "precision.compute", "float8 gives bfloat16's bits")
    exact = oracle_outputs(oracle_of(str(model)), calls[0])["log_probs"]
    apart = float((got - exact).square().mean().sqrt() / exact.std())
    must(apart <= _FP8_LOG_PROBS, "log_probs", f"off by {apart:.2f} of their standard deviation")
    stored = {n: w.double() for n, w in read_safetensors(model).items()}
    want = oracle_training(str(model), (batch,))
    gradients = {n: m / (1 - CONFIG.betas[0]) for n, m in want.optimizer.exp_avg.items()}
    after = ranks[0].trained.weights
    margins = [apart / _FP8_LOG_PROBS]
    for name, gradient in gradients.items():
        error = float((stored[name] - after[name].double() - gradient).norm() / gradient.norm())
        must(error <= _FP8_GRADIENT, "gradient", f"of {name} is off by {error:.2f} of its norm")
        margins.append(error / _FP8_GRADIENT)
    coarse = [n for n, w in after.items() if bool((w == w.bfloat16().float()).all())]
    must(not coarse, "masters", f"{coarse[:3]} hold bfloat16 values only")
    return max(margins)


def _rounds_all_weights(
    target: Target,
    config: EngineConfig,
    want: Sequence[Sequence[RankOutputs]],
    calls: Sequence[InferCall],
) -> None:
    """Require the outputs of a folder whose weights are rounded already."""
    rounded = replace(config.model, path=str(target.model(stored="bfloat16")))
    ranks = target.run(infer, replace(config, model=rounded), calls=calls)
    for rank, (got, exact) in enumerate(zip(ranks, want, strict=True)):
        for name, values in exact[0].fields.items():
            same = torch.equal(got[0].fields[name], values)
            problem = (
                "weights rounded to bfloat16 give other outputs: some are computed with in float32"
            )
            must(same, name, problem, where=f"rank {rank}")


_Refused = (ConfigError, UnsupportedCapability)


def train_or_refuse(setup: Setup, batches: Sequence[PackedDocuments]) -> Trained | EngineError:
    """Return the results of some steps, or the error by which the configuration is refused."""
    try:
        return train(setup, batches)
    except _Refused as error:
        return error


def infer_or_refuse(setup: Setup, call: InferCall) -> RankOutputs | EngineError:
    """Return the outputs of a call, or the error by which the configuration is refused."""
    try:
        return infer(setup, [call])[0]
    except _Refused as error:
        return error


def _is_refused(ranks: Sequence[object], option: str) -> bool:
    """Return whether all ranks refuse an option by its name, which none or all of them may do."""
    errors = [one for one in ranks if isinstance(one, EngineError)]
    for error in errors:
        must(len(errors) == len(ranks), option, f"is refused on some ranks alone: {error}")
        named = option.rpartition(".")[2] in str(error)
        must(named, option, f"the refusal does not name it: {error}")
    return bool(errors)


@case(id="memory.precisions", since="1.3", requires=(Capability.BF16,))
def precisions(target: Target) -> float:
    """Masters and sums of gradients in bfloat16 MUST be that alone, or be refused by name.

    From bfloat16 masters a computation in float32 is the oracle's of the rounded weights, with
    float32's rounding. Gradients that are summed over ranks in bfloat16 have a norm with other
    bits than in float32, within bfloat16's rounding.

    If this fails: weights are computed with in the dtype in which they are stored;
    ``precision.reduce`` is accepted, and gradients travel in float32 at twice the time.
    """
    exact = replace(target, dtype="float32")
    margins = list[float]()
    model = target.model(stored="bfloat16")
    config = exact.config(model, precision=Precision(master="bfloat16"))
    call = asking(exact, _batches()[0])
    inferred = target.run(infer_or_refuse, config, call=call)
    if not _is_refused(inferred, "precision.master"):
        margins.append(outputs_match(exact, oracle_of(str(model)), call, inferred))
    if target.world > 1 and Capability.DP in target.capabilities:
        margins.append(_sums_in_bfloat16(target))
    return max(margins, default=0.0)


def _sums_in_bfloat16(target: Target) -> float:
    config = target.config(target.model())
    plain = target.run(train, config, batches=_batches()[:1])
    half = replace(config, precision=replace(config.precision, reduce="bfloat16"))
    ranks = target.run(train_or_refuse, half, batches=_batches()[:1])
    if _is_refused(ranks, "precision.reduce"):
        return 0.0
    margins = list[float]()
    for rank, (one, other) in enumerate(zip(ranks, plain, strict=True)):
        got, want = one.outputs[0].grad_norm, other.outputs[0].grad_norm
        must(got != want, "grad_norm", "bfloat16 gives float32's bits", where=f"rank {rank}")
        margins.append(abs(got - want) / (_ROUNDED * want))
        must(margins[-1] <= 1.0, "grad_norm", f"{got}, {want} in float32", where=f"rank {rank}")
    return max(margins)


Away = tuple[list[EngineError | None], list[EngineError | None], Trained]


def call_while_away(setup: Setup, batches: Sequence[PackedDocuments]) -> Away:
    """Call everything that needs model or optimizer while they are away, and step at home.

    Return the errors of calls that need a part that is away, and of the others.
    """
    loss = default_loss(setup.model_type)
    with opened(setup) as engine:
        outputs = [step(engine, setup, batches[0])]
        own = local_batch(engine, batches[1], setup.device)
        engine.to("cpu")
        engine.to("cpu")
        needing = [
            caught(lambda: engine.infer_batch(own)),
            caught(lambda: engine.train_batch(own, loss)),
            caught(lambda: engine.forward_backward(own, loss)),
        ]
        if Capability.DISTILLATION in engine.capabilities and setup.model_type == LM:
            needing += [caught(lambda: engine.infer_states(own)), caught(engine.output_head)]
        others = [caught(lambda: list(engine.get_per_tensor_param()))]
        engine.to(setup.device)
        engine.to(setup.device)
        engine.to("cpu", model=False, grad=False)
        others.append(caught(lambda: engine.infer_batch(own)))
        needing.append(caught(lambda: engine.train_batch(own, loss)))
        engine.to(setup.device, model=False, grad=False)
        engine.forward_backward(own, loss)
        engine.to("cpu")
        needing.append(caught(engine.optimizer_step))
        engine.to(setup.device)
        others.append(caught(engine.optimizer_step))
        outputs.append(step(engine, setup, batches[2]))
        return needing, others, summary(engine, outputs)


@case(id="memory.away", since="1.4", requires=(Capability.OFFLOAD,), model_types=TYPES)
def away(target: Target) -> float | None:
    """A call that needs a part that ``to`` moved away MUST raise ``EngineStateError``.

    It changes nothing: the waiting gradient is there when the part is back. Inference needs the
    model, and training and the step need the optimizer's state, too. On the CPU no part is ever
    away, and the calls go on.

    If this fails: the call computes on the host, or fails in a kernel; a second move in the same
    direction drops what the first one moved; the gradient stays behind.
    """
    model = target.model()
    batches = _batches()
    ranks: list[Away] = target.run(call_while_away, target.config(model), batches=batches)
    if target.device == "cpu":
        for rank, (needing, _, _) in enumerate(ranks):
            must(needing == [None] * len(needing), "error", f"{needing}", where=f"rank {rank}")
        return None
    for rank, (needing, others, _) in enumerate(ranks):
        where = f"rank {rank}"
        typed = all(isinstance(error, EngineStateError) for error in needing)
        must(typed, "error", f"{needing} of calls that need what is away", where=where)
        must(others == [None] * len(others), "error", f"{others}, at home", where=where)
    want = oracle_training(str(model), batches)
    trained = [one for _, _, one in ranks]
    must(
        all(one.version == len(want.steps) for one in trained),
        "weight_version",
        f"{trained[0].version} after three steps",
    )
    bounds = weight_tolerance(want, target.torch_dtype, layers=want.oracle.config.num_layers)
    return assert_weights_close(
        trained[0].weights, want.params, bounds, start=oracle_of(str(model)).trainable
    )


def move_about(
    setup: Setup, batches: Sequence[PackedDocuments], call: InferCall, folder: Path
) -> Trained:
    """Run steps with model and optimizer moved away and back between them.

    Saves are made while they are away and at home.
    """
    with opened(setup) as engine:
        outputs = []
        for batch in batches:
            engine.to("cpu")
            engine.to(setup.device)
            engine.to("cpu", model=False, grad=False)
            engine.to(setup.device, model=False, grad=False)
            outputs.append(step(engine, setup, batch))
        before = infer_on_rank(engine, call, setup.device).fields
        save(engine, folder / "home")
        engine.to("cpu")
        save(engine, folder / "away")
        engine.to(setup.device)
        assert_bitwise(
            infer_on_rank(engine, call, setup.device).fields, before, name="outputs after moving"
        )
        return summary(engine, outputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes of device memory in use with a part at home, away and at home again."""

    home: int
    away: int
    back: int


def move_parts(setup: Setup, batch: PackedDocuments) -> tuple[Held, Held, Trained]:
    """Take a step, move the model and then the optimizer away and back, and take a step.

    Return the device memory around the moves of either part.
    """
    with opened(setup) as engine:
        outputs = [step(engine, setup, batch)]
        model = _move(engine, setup.device, optimizer=False)
        optimizer = _move(engine, setup.device, model=False, grad=False)
        outputs.append(step(engine, setup, batch))
        return model, optimizer, summary(engine, outputs)


def _move(engine: Engine, device: str, **parts: bool) -> Held:
    """Move parts of an engine away and back, and return the device memory around it."""
    home = _device_bytes(device)
    engine.to("cpu", **parts)
    away = _device_bytes(device)
    engine.to(device, **parts)
    return Held(home=home, away=away, back=_device_bytes(device))


def _device_bytes(device: str) -> int:
    """Return the bytes of memory in use on an accelerator, 0 where the host is the device."""
    if device == "cpu":
        return 0
    gc.collect()
    memory: Any = torch.get_device_module(device)
    memory.synchronize()
    return memory.memory_allocated()


def move_untrained(setup: Setup, call: InferCall) -> tuple[RankOutputs, RankOutputs, Held]:
    """Return an engine's outputs before and after a move, and the device memory around it."""
    with opened(setup) as engine:
        before = infer_on_rank(engine, call, setup.device)
        held = _move(engine, setup.device)
        return before, infer_on_rank(engine, call, setup.device), held


def _moves_untrained(target: Target, model: Path) -> None:
    """Require that an engine without an optimizer moves, frees memory and computes the same."""
    config = replace(target.config(model), optimizer=None)
    ranks = target.run(move_untrained, config, call=asking(target, _batches()[0]))
    for rank, (before, after, held) in enumerate(ranks):
        where = f"without an optimizer, rank {rank}"
        assert_bitwise(after.fields, before.fields, name="outputs after moving")
        _is_freed(held, least=_bytes_of(target, model), where=where)


def _bytes_of(target: Target, model: Path) -> int:
    """Return half the bytes of the weights that each rank has at least, in float32."""
    return sum(4 * p.numel() for p in oracle_of(str(model)).params.values()) // target.world // 2


def _is_freed(held: Held, *, least: int, where: str) -> None:
    """Require that a move freed at least so many bytes of device memory, and a move back took them.

    A host, or a simulated device, has no memory of its own.
    """
    if held.home == 0:
        return
    problem = f"{held.home} bytes at home, {held.away} away, {held.back} at home again"
    freed, taken = held.home - held.away, held.back - held.away
    must(min(freed, taken) >= least, "device memory", problem, where=where)


def _stays(held: Held, *, least: int, where: str) -> None:
    """Require that a move of a part that the host keeps took no device memory, nor its return."""
    problem = f"{held.home} bytes before, {held.back} after a move of what the host keeps"
    must(held.back - held.home < least, "device memory", problem, where=where)


def _moves_parts(target: Target, model: Path) -> float:
    """Compare steps around moves with the oracle's, and device memory around each move.

    Of nothing on the host, of its weights and of its optimizer's state.
    """
    batch = _batches()[0]
    least = _bytes_of(target, model)
    want = oracle_training(
        str(model), (batch, batch), optimizer=AdamWConfig(weight_decay=0.0, eps=EPS)
    )
    margins = list[float]()
    for memory in (Memory(), Memory(offload_params=True), Memory(offload_optimizer=True)):
        config = target.config(model, memory=memory)
        ranks: list[tuple[Held, Held, Trained]] = target.run(move_parts, config, batch=batch)
        # An optimizer whose weights are on the host has its state there.
        on_host = (memory.offload_params, memory.offload_params or memory.offload_optimizer)
        for rank, found in enumerate(ranks):
            for part, held, kept in zip(("model", "optimizer"), found[:2], on_host, strict=True):
                check = _stays if kept else _is_freed
                check(held, least=least, where=f"the {part}, {memory}, rank {rank}")
        trained = [one for _, _, one in ranks]
        margins.append(training_matches(target, trained, want, oracle_of(str(model))))
    return max(margins)


@case(
    id="memory.to", requires=(Capability.OFFLOAD, Capability.PORTABLE_CHECKPOINT), model_types=TYPES
)
def to(target: Target) -> float:
    """Moving model and optimizer away and back MUST change nothing, and saves MUST stay whole.

    That includes a save while they are away, an engine without an optimizer, and parts that are on
    the host anyway. On an accelerator a move away frees the memory of the part, and a move back
    takes none for what the host keeps.

    If this fails: a copy stays behind and the optimizer goes on with the other one; a part is
    marked as away, and its memory is not freed; weights of ``memory.offload_params`` come to the
    device.
    """
    model = target.model()
    folder = target.scratch()
    config = target.config(model, optimizer=OPTIMIZER)
    ranks = target.run(
        move_about, config, batches=_batches(), call=asking(target, _batches()[0]), folder=folder
    )
    assert_bitwise(
        read_state(folder / "away"), read_state(folder / "home"), name="state saved while away"
    )
    _moves_untrained(target, model)
    margin = _moves_parts(target, model)
    want = oracle_training(
        str(model), _batches(), optimizer=AdamWConfig(weight_decay=0.1, max_grad_norm=2.0, eps=EPS)
    )
    return max(margin, training_matches(target, ranks, want, oracle_of(str(model))))
