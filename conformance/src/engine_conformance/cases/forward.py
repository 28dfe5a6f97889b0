"""Outputs per token: log-probs, entropy and values, aligned, isolated and pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from engine_api.capabilities import Capability
from engine_api.config import Memory
from engine_api.results import TrainOutput
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._expect import asking, documents, merged, oracle_of, outputs_match
from engine_conformance.cases._ranks import (
    InferCall,
    RankOutputs,
    digest,
    infer,
    infer_on_rank,
    opened,
    save,
    step,
    train,
    whole_weights,
)
from engine_conformance.cases._state import assert_same_state, read_rank_files
from engine_conformance.cases._target import Setup, Target
from engine_conformance.compare import assert_bitwise, assert_close_per_token
from engine_conformance.fixtures import LENGTHS, PackedDocuments, concatenate, packed_documents

TYPES = (LM, VALUE)


def _per_token(target: Target, model: Path) -> float:
    """Compare the outputs for every set of lengths with the oracle's."""
    return _all_match(target, model, [asking(target, documents(7, lengths)) for lengths in LENGTHS])


def _all_match(target: Target, model: Path, calls: Sequence[InferCall]) -> float:
    ranks = target.run(infer, target.config(model), calls=calls)
    oracle = oracle_of(str(model))
    margins = list[float]()
    for call, rows in zip(calls, _by_call(ranks), strict=True):
        margins.append(outputs_match(target, oracle, call, rows))
        if target.dtype == "bfloat16":
            _is_float32(merged(call, rows))
    return max(margins)


def _is_float32(outputs: Mapping[str, Tensor]) -> None:
    """Require a float32 softmax though the logits are not.

    Log-probs in bfloat16 are off by up to 2 per cent.
    """
    for name, value in outputs.items():
        if name == "values":
            continue  # of a linear layer: there is no softmax
        rounded = torch.equal(value, value.bfloat16().float())
        must(
            not rounded,
            name,
            "float32 that holds bfloat16 values only: the softmax was not computed in float32",
        )


def _by_call(ranks: Sequence[Sequence[RankOutputs]]) -> list[list[RankOutputs]]:
    return [list(rows) for rows in zip(*ranks, strict=True)]


@case(id="forward.llama", quick=True, families=("llama",))
def llama(target: Target) -> float:
    """Every token's outputs MUST be the oracle's for Llama, with its own head and a tied one.

    The outputs are log-probs and entropy. Also with another base of RoPE and epsilon of
    the norms, by the new and the old keys of config.json, in a document of 600 tokens and
    in 300 documents. In bfloat16 the softmax is float32's.

    If this fails: the hint under the failure names a shift (alignment), a document or
    its first tokens; positions in bfloat16, which holds no odd number above 256
    (transformers #29285); RoPE's base looked for under an old key.
    """
    margins = [
        _per_token(target, target.model(family="llama", tied=tied)) for tied in (False, True)
    ]
    for old in (False, True):
        model = target.model(
            family="llama", rope_theta=500000.0, rms_norm_eps=1e-3, old_config_keys=old
        )
        margins.append(_all_match(target, model, [asking(target, documents(7))]))
    long = asking(target, packed_documents(41, (600, 7)))
    # More documents than a byte counts, of which one is long enough for a mask of all tokens.
    many = asking(target, packed_documents(42, (40, *([2] * 299))))
    model = target.model(family="llama", max_position=1024)
    return max(*margins, _all_match(target, model, [long, many]))


@case(id="forward.qwen2", families=("qwen2",))
def qwen2(target: Target) -> float:
    """Every token's outputs MUST be the oracle's for Qwen2 (biased projections).

    The outputs are log-probs and entropy.

    If this fails: biases not read, or added twice.
    """
    return _per_token(target, target.model(family="qwen2"))


@case(id="forward.qwen3", families=("qwen3",))
def qwen3(target: Target) -> float:
    """Every token's outputs MUST be the oracle's for Qwen3, read from one file or several.

    The outputs are log-probs and entropy.

    If this fails: norms of queries and keys; the index of a sharded folder.
    """
    models = (
        target.model(family="qwen3"),
        target.model(family="qwen3", tied=False, shards=3, seed=1),
    )
    return max(_per_token(target, model) for model in models)


@case(id="forward.qwen3_moe", requires=(Capability.MOE,), quick=True)
def qwen3_moe(target: Target) -> float:
    """Log-probs and entropy of every token of a mixture of experts MUST be the oracle's.

    The chosen experts' weights are normalised where config.json has ``norm_topk_prob``,
    and only there. Tokens whose choice of experts rounding may change are left out.

    If this fails: weights of the chosen experts not normalised, or always (Qwen3 #687);
    fused expert tensors in another order.
    """
    models = [
        target.model(family="qwen3_moe", tied=False, norm_topk_prob=normed, top_k=chosen)
        for normed, chosen in ((True, 2), (False, 3))
    ]
    return max(_per_token(target, model) for model in models)


@case(id="forward.values", requires=(Capability.VALUE_HEAD,), model_types=(VALUE,), quick=True)
def values(target: Target) -> float:
    """Values MUST be the head's on the tokens before, 0 at first tokens, and the only output.

    If this fails: a value that sees its own token is an alignment error of one.
    """
    model = target.model()
    calls = [asking(target, documents(7, lengths)) for lengths in LENGTHS]
    ranks = target.run(infer, target.config(model), calls=calls)
    for rank, outputs in enumerate(ranks):
        got = sorted(outputs[0].fields)
        must(got == ["values"], "outputs", f"a value model returns {got}", where=f"rank {rank}")
    oracle = oracle_of(str(model))
    return max(
        outputs_match(target, oracle, call, rows)
        for call, rows in zip(calls, _by_call(ranks), strict=True)
    )


@case(id="forward.temperature")
def temperature(target: Target) -> float:
    """Logits MUST be divided by the call's temperature before log-probs and entropy.

    If this fails: log-probs scaled after the softmax, or an entropy that knows no
    temperature.
    """
    calls = [
        InferCall(documents=documents(3), temperature=t, entropy=True) for t in (0.1, 0.5, 0.7, 1.6)
    ]
    return _all_match(target, target.model(), calls)


@case(id="forward.isolation", model_types=TYPES, quick=True)
def isolation(target: Target) -> float:
    """Outputs of one document MUST NOT depend on the batch's other documents, nor on their order.

    If this fails: the mask lets tokens see the document before (packing), or padding is
    not masked.
    """
    first = documents(5)
    other = packed_documents(99, LENGTHS["uneven"])
    keep = [0, 2, 4]
    changed = concatenate([first.take([d]) if d in keep else other.take([d]) for d in range(6)])
    order = [3, 5, 0, 4, 1, 2]
    base, mixed, shuffled = _answers(target, [first, changed, first.take(order)])
    margins = []
    for name, value in base.items():
        parts, tol = value.split(first.lengths), target.tolerance(name)  # type: ignore[arg-type]
        moved = torch.cat([parts[d] for d in order])
        margins.append(
            assert_close_per_token(f"{name} in another order", shuffled[name], moved, tol)
        )
        mine, theirs = (
            torch.cat([v.split(first.lengths)[d] for d in keep]) for v in (value, mixed[name])
        )
        margins.append(assert_close_per_token(f"{name} with other documents", theirs, mine, tol))
    return max(margins)


def _answers(
    target: Target, batches: Sequence[PackedDocuments], **model: Any
) -> list[dict[str, Tensor]]:
    """Return the whole outputs for each batch, with one engine for all of them."""
    calls = [asking(target, batch) for batch in batches]
    ranks = target.run(infer, target.config(target.model(**model)), calls=calls)
    return [merged(call, rows) for call, rows in zip(calls, _by_call(ranks), strict=True)]


@case(id="forward.causal", model_types=TYPES)
def causal(target: Target) -> float:
    """Changing tokens after a position MUST change no output before it, nor at it.

    If this fails: no causal mask, or one that is off by one at the border of documents.
    """
    batch = documents(6, "skewed")
    position = 10
    ids = batch.input_ids.copy()
    ids[position:24] = (ids[position:24] + 77) % 256  # the rest of the first document
    base, changed = _answers(target, [batch, replace(batch, input_ids=ids)])
    margins = []
    for name, value in base.items():
        # A log-prob is about its own token; entropy and value at a position know only what stands
        # before it.
        end = position + (name != "log_probs")
        tol = target.tolerance(name)  # type: ignore[arg-type]
        margins.append(
            assert_close_per_token(
                f"{name} before the change", changed[name][:end], value[:end], tol
            )
        )
        after = (changed[name][end:24] - value[end:24]).abs().max().item()
        must(after > tol.atol, name, "the changed tokens changed nothing after them either")
    return max(margins)


@case(id="forward.loss_weight", model_types=TYPES)
def loss_weight_is_inert(target: Target) -> None:
    """Fields other than tokens (loss weights, advantages) MUST change no output, bit for bit.

    If this fails: masked tokens are cut out of the sequence, so that later ones no
    longer see them.
    """
    batch = documents(5)
    other = replace(batch, loss_weight=batch.loss_weight * 0, advantages=batch.advantages + 1)
    base, changed = _answers(target, [batch, other])
    assert_bitwise(changed, base, name="outputs under other loss weights")


@case(id="forward.one_token_documents", model_types=TYPES)
def one_token_documents(target: Target) -> None:
    """A batch of one-token documents MUST give zeros, as there is nothing to predict.

    If this fails: 0 / 0 in a softmax over no keys, or an empty head.
    """
    for got in _answers(target, [packed_documents(8, (1, 1, 1, 1)), packed_documents(9, (1,))]):
        wrong = [name for name, value in got.items() if bool(value.any())]
        must(not wrong, "outputs", f"{wrong} are not 0 where there is nothing to predict")


@case(id="forward.repeats", model_types=TYPES)
def repeats(target: Target) -> None:
    """Two engines of one configuration MUST give the same bits, whatever their seeds.

    The weights need no seed.

    If this fails: dropout is on in inference, weights are read into uninitialized
    memory, a kernel is not deterministic.
    """
    model = target.model()
    calls = [asking(target, documents(5))]
    ranks = target.run(infer, target.config(model), calls=calls)
    again = target.run(infer, target.config(model, seed=7), calls=calls)
    for rank, (one, two) in enumerate(zip(ranks, again, strict=True)):
        assert_bitwise(
            two[0].fields, one[0].fields, name=f"outputs of a second engine, rank {rank}"
        )


@case(id="forward.microbatch_split", model_types=TYPES)
def microbatch_split(target: Target) -> float:
    """Outputs MUST come in the batch's token order whatever the token budget of a micro-batch is.

    No others than those that the call asks for.

    If this fails: entropy is returned, and paid for, without being asked for; outputs of
    micro-batches are concatenated, though balancing has reordered the documents.
    """
    model = target.model()
    calls = [asking(target, documents(5, "uneven"), entropy=asked) for asked in (True, False)]
    if target.model_type == VALUE:
        calls = [asking(target, documents(5, "uneven"))]
    margins = list[float]()
    for memory in (
        Memory(max_tokens=12),
        Memory(max_tokens=16, pad_to_multiple=8),
        Memory(logit_chunk=5),
    )[: _lengths_for_short_checks(target)]:
        ranks = target.run(infer, target.config(model, memory=memory), calls=calls)
        margins += [
            outputs_match(target, oracle_of(str(model)), call, rows)
            for call, rows in zip(calls, _by_call(ranks), strict=True)
        ]
    return max(margins)


def _lengths_for_short_checks(target: Target) -> int | None:
    """Return the sets of lengths for a few checks.

    A value model shares all but the head with the language model: its chunks need no
    second look.
    """
    return 2 if target.model_type == VALUE else None


@case(id="forward.no_documents", world=(2, 4), model_types=TYPES, quick=True)
def no_documents(target: Target) -> float:
    """A rank without documents MUST take part in inference, and return nothing.

    If this fails with a stall: the ranks with documents wait in a collective that the
    empty one never enters.
    """
    return _all_match(target, target.model(), [asking(target, documents(5, "single"))])


Repeated = tuple[list[dict[str, Tensor]], list[int], bool, list[str], TrainOutput]


def repeat_and_save(
    setup: Setup, call: InferCall, batch: PackedDocuments, folders: Sequence[Path]
) -> tuple[Repeated, str, list[tuple[int, ...]]]:
    """Make the same call twice between two looks at everything, then take a step.

    The digest of the weights after it is returned, too, and the shapes of the tensors that the
    calls keep for a backward pass. A look is the weights' digest
    and ``weight_version``, and a save where folders are given.
    """
    kept = list[tuple[int, ...]]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with opened(setup) as engine:
        # The generator must not stand where a seed puts it, or an engine that seeds it leaves it as
        # it was.
        torch.rand(3)
        digests = [digest(whole_weights(engine))]
        for folder in folders[:1]:
            save(engine, folder)
        before = torch.get_rng_state()
        versions = [engine.weight_version]
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = [infer_on_rank(engine, call, setup.device).fields for _ in range(2)]
        versions.append(engine.weight_version)
        same = torch.equal(before, torch.get_rng_state())
        for folder in folders[1:]:
            save(engine, folder)
        digests.append(digest(whole_weights(engine)))
        trained = step(engine, setup, batch)
        repeated = (outputs, versions, same, digests, trained)
        return repeated, digest(whole_weights(engine)), kept


@case(id="forward.pure", model_types=TYPES, quick=True)
def pure(target: Target) -> None:
    """Inference MUST change no weights, optimizer, generators or ``weight_version``, and repeat.

    It repeats bit for bit, and keeps nothing for a backward pass.

    If this fails: dropout or a sampler draws from the generator; weights are cast in
    place; a step counter moves; weights stay gathered and the next step updates the
    copies; the graph is built and thrown away, at the memory of a training pass.
    """
    folder = target.scratch()
    batch = documents(4)
    config = target.config(target.model())
    portable = Capability.PORTABLE_CHECKPOINT in target.capabilities
    folders = [folder / "before", folder / "after"] if portable else []
    ranks = target.run(
        repeat_and_save, config, call=asking(target, documents(5)), batch=batch, folders=folders
    )
    undisturbed = target.run(train, config, batches=[batch])
    for rank, ((outputs, versions, same, digests, trained), after, kept) in enumerate(ranks):
        where = f"rank {rank}"
        if target.is_asked_since("1.3"):
            problem = f"{len(kept)} tensors are kept for a backward pass, of shapes {kept[:3]}"
            must(not kept, "inference", problem, where=where)
        assert_bitwise(outputs[1], outputs[0], name="the same call again")
        must(
            versions == [0, 0],
            "weight_version",
            f"{versions} before and after inference",
            where=where,
        )
        must(same, "generator", "torch's generator moved", where=where)
        must(digests[0] == digests[1], "weights", "changed by inference", where=where)
        twin = undisturbed[rank]
        equal = trained == twin.outputs[0] and after == twin.digest
        must(equal, "step", "after inference, it differs from the same step without", where=where)
    if portable:
        must(
            read_rank_files(folders[0]) == read_rank_files(folders[1]),
            "generators",
            "moved between two saves",
        )
        assert_same_state(folders[1], folders[0], name="state after inference")
