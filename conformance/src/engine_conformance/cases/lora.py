"""Low-rank adapters: only they train, they come off for a reference, they merge into the export."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import (
    EngineConfig,
    LoraConfig,
    Memory,
    OptimizerConfig,
    Parallelism,
    Precision,
)
from engine_api.contract import Adapter
from engine_api.errors import ConfigError, EngineError, UnsupportedCapability
from engine_api.losses import sft_loss
from engine_api.results import LossOutput, TokenOutputs
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._expect import (
    documents,
    oracle_of,
    outputs_match,
    raised_everywhere,
    training_matches,
)
from engine_conformance.cases._ranks import (
    InferCall,
    RankOutputs,
    Trained,
    build,
    caught,
    infer_on_rank,
    local_batch,
    opened,
    save,
    step,
    summary,
    to_batch,
    train,
    whole_weights,
)
from engine_conformance.cases._shards import Shards, shards_and_whole, shards_make_the_whole
from engine_conformance.cases._target import EPS, Setup, Target
from engine_conformance.cases._written import written_weights
from engine_conformance.compare import (
    assert_bitwise,
    assert_scalar_close,
    assert_weights_close,
)
from engine_conformance.fixtures import PackedDocuments
from engine_conformance.oracle import (
    AdamWConfig,
    OracleModel,
    load_oracle,
    merge_adapter,
    read_safetensors,
    train_steps,
)
from engine_conformance.tolerances import Tolerance

LORA = (Capability.LORA,)
# A scale that no integer gives.
CONFIG = LoraConfig(rank=4, alpha=6.5, target_modules=("q_proj", "v_proj", "down_proj"))
# Off and on again once, and once more.
SWITCHES = (True, False, True, False, True)
PLAIN = AdamWConfig(weight_decay=0.0, eps=EPS)
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_norm=0.5, eps=EPS)

MERGED = Tolerance(atol=1e-6, rtol=2e-7)  # of a product of small matrices in float32, and a sum


def _batches() -> list[PackedDocuments]:
    return [documents(90, "uneven"), documents(91, "equal"), documents(92, "skewed")]


def adapter_run(
    setup: Setup, batches: Sequence[PackedDocuments]
) -> tuple[list[Trained], list[dict[str, Tensor]], list[RankOutputs]]:
    """Train, and look at adapter, merged export and outputs at each step.

    The adapter is taken before the step, the merged export after it. Outputs are with
    and without the adapter.
    """
    with opened(setup) as engine:
        start = whole_weights(engine, adapter="only")
        trained = list[Trained]()
        for batch in batches:
            # Also of weights that later steps move.
            whole_weights(engine)
            trained.append(summary(engine, [step(engine, setup, batch)], adapter="only"))
        merged = whole_weights(engine)
        half = whole_weights(engine, dtype=torch.bfloat16)
        assert_bitwise(
            half, {n: t.bfloat16() for n, t in merged.items()}, name="merged export in bfloat16"
        )
        calls = [InferCall(documents=batches[0], adapter=on, entropy=True) for on in (True, False)]
        outputs = [infer_on_rank(engine, call, setup.device) for call in calls]
        return trained, [start, merged], outputs


def _write_adapter(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write a folder in PEFT's format, as a reader of adapters finds it."""
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    about = {
        "peft_type": "LORA",
        "r": CONFIG.rank,
        "lora_alpha": CONFIG.alpha,
        "target_modules": list(CONFIG.target_modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


@case(id="lora.train", requires=LORA, quick=True)
def trains(target: Target) -> float:
    """Only the adapter MUST train, as the oracle's does, merge into the export and come off.

    Merged it is exported; off it leaves the base model. The adapter's own export has
    PEFT's names, a pair for each layer that the targets name and no other; B starts at zero.
    With bfloat16 masters the sum is formed in float32 and rounded once.

    If this fails: the merged export sends base weights (a comment in verl's
    _merged_lora_per_tensor_param admits it), the scale alpha / rank is applied twice or
    not at all, gradients of A are those of a shard, only some of the targets are adapted.
    """
    model = target.model(tied=False)
    folder = target.scratch()
    batches = _batches()
    config = target.config(model, lora=CONFIG, optimizer=OPTIMIZER)
    ranks = target.run(adapter_run, config, batches=batches)
    trained, (start, merged), _ = ranks[0]
    stems = [name.removesuffix(".weight") for name in merged]
    targets = [stem for stem in stems if stem.rpartition(".")[2] in CONFIG.target_modules]
    wanted = {f"base_model.model.{stem}.lora_{part}.weight" for stem in targets for part in "AB"}
    other = sorted(wanted ^ set(start))
    must(not other, "adapter", f"{other[:3]} on one side only, of {CONFIG.target_modules}")
    must(
        all(bool((t == 0).all()) == (".lora_B." in n) for n, t in start.items()),
        "adapter",
        "B is not zero at the start, or A is",
    )
    exactly = AdamWConfig(weight_decay=0.1, max_grad_norm=0.5, eps=EPS)
    margins = [_steps_match(target, model, start, [row[0] for row in ranks], batches, exactly)]
    exact = merge_adapter(
        oracle_of(str(model)).params, _write_adapter(folder / "end", trained[-1].weights)
    )
    margins.append(assert_weights_close(merged, exact, MERGED, name="merged export"))
    if Capability.BF16 in target.capabilities and target.is_asked_since("1.3"):
        _merges_once(target)
    ended = load_oracle(model, adapter=folder / "end")
    untouched = set(exact) - set(ended.adapter.pairs if ended.adapter else ())
    stored = read_safetensors(model)
    assert_bitwise(
        {n: merged[n] for n in untouched},
        {n: stored[n] for n in untouched},
        name="weights without adapter",
    )
    return max(
        *margins,
        _answers_match(
            target, [row[2] for row in ranks], batches[0], (ended, oracle_of(str(model)))
        ),
    )


def _steps_match(
    target: Target,
    model: Path,
    start: Mapping[str, Tensor],
    ranks: Sequence[Sequence[Trained]],
    batches: Sequence[PackedDocuments],
    optimizer: AdamWConfig = PLAIN,
) -> float:
    """Compare each step with the oracle's from the engine's own adapter before it.

    The moments are the oracle's. Not the run as a whole: in bfloat16 rounding decides
    where an element of B goes whose gradient nearly vanishes, and the next gradient of
    A is made of B.
    """
    margins = list[float]()
    before = start
    done = None
    for index, batch in enumerate(batches):
        oracle = load_oracle(model, adapter=_write_adapter(target.scratch() / "before", before))
        if done is not None:
            errors = {name: one.with_known_weight() for name, one in done.errors.items()}
            done = replace(done, oracle=oracle, errors=errors)
        done = train_steps(oracle, [batch], optimizer=optimizer, start=done)
        mine = [trained[index] for trained in ranks]
        for rank, trained in enumerate(mine):
            must(
                trained.version == index + 1,
                "weight_version",
                f"{trained.version}",
                where=f"rank {rank}",
            )
        margins.append(
            training_matches(target, [replace(one, version=1) for one in mine], done, oracle)
        )
        before = mine[0].weights
    return max(margins)


def _answers_match(
    target: Target,
    ranks: Sequence[list[RankOutputs]],
    batch: PackedDocuments,
    oracles: Sequence[OracleModel],
) -> float:
    """Compare outputs with the adapted oracle's (adapter on) and the base model's (adapter off)."""
    calls = [InferCall(documents=batch, entropy=True, adapter=on) for on in (True, False)]
    return max(
        outputs_match(target, oracle, call, [row[i] for row in ranks])
        for i, (call, oracle) in enumerate(zip(calls, oracles, strict=True))
    )


def merged_weights(
    setup: Setup, batch: PackedDocuments
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return base weights, adapter, and the merged export in two dtypes, after a step."""
    with opened(setup) as engine:
        step(engine, setup, batch)
        exports = [whole_weights(engine, dtype=dtype) for dtype in (None, torch.bfloat16)]
        base = whole_weights(engine, adapter="base")
        return base, whole_weights(engine, adapter="only"), exports


def _merges_once(target: Target) -> None:
    """Require bfloat16 masters to take the sum of weight and adapter rounded once."""
    precision = Precision(master="bfloat16", compute="bfloat16")
    # B becomes as large as A, and the sum's second term as large as its first.
    optimizer = OptimizerConfig(lr=0.1, clip_norm=None, eps=EPS)
    config = target.config(
        target.model(tied=False), lora=CONFIG, precision=precision, optimizer=optimizer
    )
    ranks = target.run(merged_weights, config, batch=documents(90, "uneven"))
    base, adapter, exports = ranks[0]
    must(
        all(tensor.dtype == torch.bfloat16 for tensor in base.values()),
        "base export",
        "is not in the masters' dtype",
    )
    scale = CONFIG.alpha / CONFIG.rank
    exact = {name: tensor.double() for name, tensor in base.items()}
    for name, a in adapter.items():
        if ".lora_A." in name:
            b = adapter[name.replace(".lora_A.", ".lora_B.")]
            own = name.removeprefix("base_model.model.").replace(".lora_A", "")
            exact[own] = exact[own] + scale * (b.double() @ a.double())
    for merged, name in zip(exports, ("the merged export", "it in bfloat16"), strict=True):
        _is_rounded_once(merged, exact, name)


def _is_rounded_once(
    merged: Mapping[str, Tensor], exact: Mapping[str, Tensor], export: str
) -> None:
    """Require values within half a unit in bfloat16's last place of the exact ones."""
    for name, want in exact.items():
        got = merged[name]
        must(got.dtype == torch.bfloat16, export, f"{got.dtype}, not bfloat16", where=name)
        # frexp gives a fraction in [0.5, 1), so that the last of 8 bits is 2 ** (exponent - 8).
        half = torch.ldexp(torch.ones_like(want), torch.frexp(want)[1] - 9)
        off = (got.double() - want).abs() > half * 1.001 + 1e-6
        problem = f"{int(off.sum())} of {off.numel()} values are not the sum rounded once"
        must(not bool(off.any()), export, problem, where=name)


Switched = tuple[dict[str, Tensor], list[RankOutputs], list[Trained]]


def switch(setup: Setup, batches: Sequence[PackedDocuments]) -> Switched:
    """Take a step, infer with the adapter on and off by turns, and take a step.

    The adapter is returned as it is at the start and after each step.
    """
    with opened(setup) as engine:
        start = whole_weights(engine, adapter="only")
        trained = [summary(engine, [step(engine, setup, batches[0])], adapter="only")]
        calls = [InferCall(documents=batches[0], adapter=on) for on in SWITCHES]
        outputs = [infer_on_rank(engine, call, setup.device) for call in calls]
        trained.append(summary(engine, [step(engine, setup, batches[1])], adapter="only"))
        return start, outputs, trained


@case(id="lora.switched", requires=LORA)
def switched(target: Target) -> float:
    """Answers and the next step MUST be the same after the adapter was off and on again.

    The outputs are the trained adapter's, also where it trains with dropout. Each step and
    each data-parallel rank drops inputs of its own, and recomputing drops the same again.

    If this fails: the adapter stays off after a reference; its dropout is on in inference, or
    never, or the same on all ranks; recomputing loses the gradient behind a frozen
    embedding.
    """
    model = target.model(tied=False)
    batches = _batches()[:2]
    recompute = "full" if Capability.RECOMPUTE in target.capabilities else "none"
    config = target.config(model, lora=CONFIG, memory=Memory(recompute=recompute))
    rows = target.run(switch, config, batches=batches)
    margins = [_stays_on(target, model, rows, batches[0])]
    margins.append(_steps_match(target, model, rows[0][0], [row[2] for row in rows], batches))
    if Capability.TP not in target.spread:  # ranks that share a layer need not drop the same inputs
        dropping = target.config(model, lora=replace(CONFIG, dropout=0.5))
        dropped = target.run(switch, dropping, batches=batches)
        margins.append(_stays_on(target, model, dropped, batches[0]))
        same = dropped[0][2][0].digest == rows[0][2][0].digest
        must(not same, "lora.dropout", "0.5 gives the same step as no dropout")
        if target.is_asked_since("1.3"):
            _drops_anew(target, dropping, batches[0])
    return max(margins)


class _Recorder:
    """The likelihood as a loss, which keeps the log-probs that it gets."""

    needs = ("log_probs",)

    def __init__(self) -> None:
        self.seen = list[Tensor]()

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the loss."""
        assert outputs.log_probs is not None
        self.seen.append(outputs.log_probs.detach().cpu())
        return sft_loss(outputs, batch)


Draws = tuple[int, list[Tensor], list[float]]


def draw_dropout(setup: Setup, batch: PackedDocuments) -> Draws:
    """Train on the same documents on all ranks, and return what each call's loss has seen.

    In addition, return the number of the data-parallel rank and the norms of the gradients. Nothing
    was seen on a rank without a loss, as in a pipeline's first stages.
    """
    # An engine may leave the process's generators as they are, and all ranks may have equal ones.
    torch.manual_seed(50)
    with opened(setup) as engine:
        own = to_batch(batch, setup.device)
        # B is zero before the first step, and dropout has no effect on the outputs.
        norms = [engine.train_batch(own, sft_loss).grad_norm]
        seen = list[Tensor]()
        # Of the same weights.
        for _ in range(2):
            recorder = _Recorder()
            engine.forward_backward(own, recorder)
            if recorder.seen:
                seen.append(torch.cat(recorder.seen))
        norms.append(engine.optimizer_step().grad_norm)
        return engine.topology.dp_rank, seen, norms


def _drops_anew(target: Target, config: EngineConfig, batch: PackedDocuments) -> None:
    """Require dropout of its own in each call and on each data-parallel rank.

    Recomputing draws what the forward pass drew: the gradients are those without it.
    """
    by_memory = list[list[Draws]]()
    kinds = ("none", "full") if Capability.RECOMPUTE in target.capabilities else ("none",)
    for recompute in kinds:
        asked = replace(config, memory=Memory(recompute=recompute))
        ranks: list[Draws] = target.run(draw_dropout, asked, batch=batch)
        by_memory.append(ranks)
        lossy = [(rank, data, seen) for rank, (data, seen, _) in enumerate(ranks) if seen]
        must(bool(lossy), "lora.dropout", "no rank has called the loss")
        for index, (rank, data, seen) in enumerate(lossy):
            where = f"rank {rank}, recompute: {recompute}"
            same = torch.equal(seen[0], seen[1])
            must(not same, "lora.dropout", "drops the same inputs in each pass", where=where)
            for other, other_data, other_seen in lossy[:index]:
                same = data != other_data and torch.equal(seen[0], other_seen[0])
                problem = f"drops the same inputs as on rank {other}"
                must(not same, "lora.dropout", problem, where=where)
    plain = by_memory[0][0][2]
    for ranks in by_memory[1:]:
        for index, (got, want) in enumerate(zip(ranks[0][2], plain, strict=True)):
            name = f"grad_norm of step {index} with dropout and recomputing"
            assert_scalar_close(name, got, want, target.tolerance("ratio_grad_norm"))


def _stays_on(
    target: Target, model: Path, rows: Sequence[Switched], batch: PackedDocuments
) -> float:
    """Require the same bits after the adapter was off and on again as before.

    In addition, outputs like the oracle's with the same adapter.
    """
    for rank, (_, outputs, _) in enumerate(rows):
        for again in outputs[2::2]:
            assert_bitwise(
                again.fields,
                outputs[0].fields,
                name=f"outputs with the adapter on again, rank {rank}",
            )
    adapted = load_oracle(
        model, adapter=_write_adapter(target.scratch() / "between", rows[0][2][0].weights)
    )
    return outputs_match(target, adapted, InferCall(documents=batch), [row[1][2] for row in rows])


def step_with_dropout(setup: Setup, batch: PackedDocuments) -> tuple[list[RankOutputs], Trained]:
    """Take two steps with dropout, and return outputs of inference before, between and after."""
    call = InferCall(documents=batch)
    with opened(setup) as engine:
        outputs = [infer_on_rank(engine, call, setup.device)]
        trained = list[Trained]()
        for _ in range(2):
            trained.append(summary(engine, [step(engine, setup, batch)], adapter="only"))
            outputs.append(infer_on_rank(engine, call, setup.device))
        return outputs, trained[-1]


@case(
    id="lora.dropout_tp",
    since="1.4",
    requires=(*LORA, Capability.TP),
    world=(2, 4),
)
def dropout_tp(target: Target) -> float | None:
    """Dropout of an adapter under tensor parallelism MUST be right, or be refused by its name.

    Where it is accepted, inference has the trained adapter and no dropout, on all ranks alike.

    If this fails: the key is read in one layout and ignored in the other; the parts of a layer
    drop different inputs, and the ranks' copies of an adapter drift apart.
    """
    model = target.model(tied=False)
    batch = _batches()[0]
    plain = target.config(model, lora=CONFIG, parallelism=Parallelism(tp=2))
    dropping = replace(plain, lora=replace(CONFIG, dropout=0.5))
    errors: list[EngineError | None] = target.run(build, dropping)
    if any(errors):
        for rank, error in enumerate(errors):
            where = f"rank {rank}"
            refused = isinstance(error, (ConfigError, UnsupportedCapability))
            must(refused and "dropout" in str(error), "lora.dropout", f"{error!r}", where=where)
        return None
    rows = target.run(step_with_dropout, dropping, batch=batch)
    without = target.run(step_with_dropout, plain, batch=batch)
    for rank, (_, trained) in enumerate(rows):
        must(trained.digest == rows[0][1].digest, "adapter", "differs", where=f"rank {rank}")
    same = rows[0][1].digest == without[0][1].digest
    must(not same, "lora.dropout", "0.5 gives the same steps as no dropout")
    adapter = _write_adapter(target.scratch() / "end", rows[0][1].weights)
    oracle = load_oracle(model, adapter=adapter)
    last = [outputs[-1] for outputs, _ in rows]
    return outputs_match(target, oracle, InferCall(documents=batch), last)


@case(id="lora.resume", requires=(*LORA, Capability.PORTABLE_CHECKPOINT))
def resume(target: Target) -> float:
    """An adapter's run MUST resume bit for bit, base weights included.

    An engine without an optimizer that loads it infers without the adapter's dropout.

    If this fails: only the base model is saved, or the adapter's moments are not; a model that
    was never trained is in training mode when it infers.
    """
    model = target.model()
    folder = target.scratch()
    batches = _batches()
    config = target.config(model, lora=CONFIG)
    whole = target.run(train, config, batches=batches, adapter="only")
    target.run(train, config, batches=batches[:2], save_to=folder / "c")
    again = target.run(
        train, replace(config, seed=3), batches=batches[2:], load=folder / "c", adapter="only"
    )
    must(again[0].outputs == whole[0].outputs[2:], "train outputs", "differ after the load")
    if target.is_asked_since("1.4"):
        _infers_without_dropout(target, config, batches[0], folder / "c")
    return assert_bitwise(again[0].weights, whole[0].weights, name="adapter after resuming")


def infer_loaded(setup: Setup, call: InferCall, folder: Path) -> RankOutputs:
    """Return the outputs of a new engine that has loaded a checkpoint."""
    with opened(setup) as engine:
        engine.load_checkpoint(folder)
        return infer_on_rank(engine, call, setup.device)


def _infers_without_dropout(
    target: Target, config: EngineConfig, batch: PackedDocuments, folder: Path
) -> None:
    """Require the outputs of a trained adapter whose engine never trains, with dropout and without.

    They are the same bits.
    """
    call = InferCall(documents=batch)
    plain = replace(config, optimizer=None)
    want: list[RankOutputs] = target.run(infer_loaded, plain, call=call, folder=folder)
    # A layout may refuse dropout.
    dropping = replace(plain, lora=replace(CONFIG, dropout=0.5))
    refused = Capability.TP in target.spread and any(target.run(build, dropping))
    got = [] if refused else target.run(infer_loaded, dropping, call=call, folder=folder)
    for rank, outputs in enumerate(got):
        name = f"outputs with lora.dropout 0.5, rank {rank}"
        assert_bitwise(outputs.fields, want[rank].fields, name=name)


def base_weights(
    setup: Setup, batch: PackedDocuments, *, lora: bool
) -> tuple[dict[str, Tensor], list[str], bool]:
    """Return the base weights and the merged export's names after a step.

    In addition, say whether asking for the base without an adapter is a typed error.
    """
    with opened(setup) as engine:
        if not lora:
            return (
                {},
                [],
                isinstance(
                    caught(lambda: list(engine.get_per_tensor_param(adapter="base"))), ConfigError
                ),
            )
        step(engine, setup, batch)
        return whole_weights(engine, adapter="base"), list(whole_weights(engine)), True


@case(id="lora.base", since="1.1", requires=LORA, model_types=(LM, VALUE), quick=True)
def base(target: Target) -> None:
    """The base export after a step MUST be the folder's weights bit for bit, in the merged order.

    The merged order is that of the merged export. Of an engine that has no adapter it
    is a ``ConfigError``.

    If this fails: the adapter is merged into it, and a server that adds the adapter
    serves it twice; its names have the wrapped layers' ``base_layer``; the head of a
    value model does not train beside the adapter.
    """
    model = target.model(tied=False)
    batch = documents(90, "uneven")
    rows = target.run(base_weights, target.config(model, lora=CONFIG), batch=batch, lora=True)
    stored = read_safetensors(model)
    for rank, (weights, merged, _) in enumerate(rows):
        must(
            list(weights) == merged,
            "base export",
            "its names are not the merged export's",
            where=f"rank {rank}",
        )
        head = [name for name in merged if name.startswith("score.")]
        still = [name for name in head if torch.equal(weights[name], stored[name])]
        must(not still, "value head", f"{still} did not train beside the adapter")
        assert_bitwise(
            {name: weights[name] for name in merged if name not in head},
            {name: stored[name] for name in merged if name not in head},
            name=f"base export, rank {rank}",
        )
    for rank, (_, _, typed) in enumerate(
        target.run(base_weights, target.config(model), batch=batch, lora=False)
    ):
        must(
            typed,
            "adapter",
            "the base export of an engine without adapter is no ConfigError",
            where=f"rank {rank}",
        )


def shards_of(
    setup: Setup, batch: PackedDocuments
) -> dict[Adapter, tuple[Shards, list[str], dict[str, Tensor]]]:
    """Return this rank's shards and the whole's order of every export after a step.

    On rank 0 the whole itself is returned, too.
    """
    with opened(setup) as engine:
        step(engine, setup, batch)
        kinds: tuple[Adapter, ...] = get_args(Adapter)
        return {kind: shards_and_whole(engine, adapter=kind) for kind in kinds}


@case(id="lora.shards", since="1.1", requires=(*LORA, Capability.EXPORT_SHARDS))
def shards(target: Target) -> float:
    """Shards of merged weights, base and adapter MUST each make the whole export, bit for bit.

    If this fails: shards are always merged ones, or those of an adapter have another
    order or no boxes.
    """
    model = target.model(tied=False)
    batch = documents(90, "uneven")
    everything = replace(CONFIG, target_modules="all-linear")
    ranks = target.run(shards_of, target.config(model, lora=everything), batch=batch)
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in ranks[0]["only"][1]}
    linear = {name.split(".")[-2] for name in read_safetensors(model) if "_proj." in name}
    must(adapted >= linear, "all-linear", f"adapts {sorted(adapted)}, not {sorted(linear)}")
    return max(shards_make_the_whole([row[kind] for row in ranks]) for kind in ranks[0])


def save_merged(
    setup: Setup, batch: PackedDocuments, folder: Path
) -> tuple[RankOutputs, dict[str, Tensor]]:
    """Take a step, write the folder, and return the outputs, and on rank 0 the merged export."""
    with opened(setup) as engine:
        step(engine, setup, batch)
        engine.save_hf(folder / "hf")
        save(engine, folder / "c")
        merged = whole_weights(engine)
        own = infer_on_rank(engine, InferCall(documents=batch), setup.device)
        return own, merged if engine.topology.rank == 0 else {}


@case(id="lora.save_hf", requires=(*LORA, Capability.SAVE_HF), world=(1, 2))
def save_hf(target: Target) -> float:
    """The folder of ``save_hf`` MUST hold the merged model, without a trace of the adapter.

    If this fails: names of the adapter's layers, or weights of the base.
    """
    model = target.model()
    folder = target.scratch()
    batch = documents(90, "uneven")
    ranks = target.run(save_merged, target.config(model, lora=CONFIG), batch=batch, folder=folder)
    exact = ranks[0][1]
    written = written_weights(folder / "hf")
    margin = assert_weights_close(written, exact, MERGED, name="weights of the folder")
    oracle = load_oracle(folder / "hf")
    return max(
        margin, outputs_match(target, oracle, InferCall(documents=batch), [own for own, _ in ranks])
    )


def without_adapter(setup: Setup) -> list[bool]:
    """Return whether asking for an adapter that is not there is a typed error."""
    with opened(setup) as engine:
        batch = local_batch(engine, documents(90, "uneven"), setup.device)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: engine.infer_batch(batch, adapter=False),
            lambda: list(engine.get_per_tensor_param(adapter="only")),
        )
        if Capability.EXPORT_SHARDS in engine.capabilities:
            calls += (lambda: list(engine.get_per_tensor_param_shard(adapter="only")),)
        return [isinstance(caught(call), ConfigError) for call in calls]


@case(id="lora.absent", requires=LORA, quick="once")
def absent(target: Target) -> None:
    """Asking for the adapter of an engine that has none MUST raise ``ConfigError``.

    An adapter for layers that the model does not have is one of ``lora.target_modules``, with an
    optimizer and without.

    If this fails: a reference is computed with the policy itself, and every KL is zero; an
    adapter for no layer is found by an optimizer without weights, or never.
    """
    for rank, right in enumerate(target.run(without_adapter, target.config(target.model()))):
        must(
            all(right),
            "adapter",
            f"typed errors of infer_batch and export: {right}",
            where=f"rank {rank}",
        )
    bad = replace(CONFIG, target_modules=("no_such_layer",))
    trained = target.config(target.model(), lora=bad)
    for config in (trained, replace(trained, optimizer=None)):
        errors = target.run(build, config)
        raised_everywhere("lora.target_modules", errors, ConfigError)
        for rank, error in enumerate(errors):
            named = getattr(error, "field", None) == "lora.target_modules"
            must(named, "lora.target_modules", f"another key: {error!r}", where=f"rank {rank}")
    for layer in ("lm_head", "embed_tokens"):
        _trains_or_refuses(target, layer)


def adapt_one(setup: Setup, batch: PackedDocuments) -> tuple[bool, dict[str, Tensor], bool]:
    """Take a step with the adapter alone.

    Return whether it is refused, the merged export, and whether B has left zero.
    """
    error = build(setup)
    if error is not None:
        must(isinstance(error, (ConfigError, UnsupportedCapability)), "adapter", f"{error!r}")
        return True, {}, False
    with opened(setup) as engine:
        step(engine, setup, batch)
        only = whole_weights(engine, adapter="only")
        moved = any(bool(t.any()) for n, t in only.items() if "lora_" in n and ".lora_A." not in n)
        return False, whole_weights(engine), moved


def _trains_or_refuses(target: Target, layer: str) -> None:
    """Require an adapter on a layer outside the blocks to train and merge, or to be refused."""
    model = target.model(tied=False)
    config = target.config(model, lora=replace(CONFIG, target_modules=("q_proj", layer)))
    stored = read_safetensors(model)
    for refused, merged, moved in target.run(adapt_one, config, batch=documents(90, "uneven")):
        if refused:
            continue
        names = [name for name in merged if f"{layer}.weight" in name]
        changed = names and not torch.equal(merged[names[0]], stored[names[0]])
        must(moved and bool(changed), layer, "its adapter is accepted, and the export lacks it")
