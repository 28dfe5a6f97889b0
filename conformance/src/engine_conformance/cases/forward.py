"""What an engine says of tokens: log-probs, entropy and values, aligned, isolated and pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine_api.capabilities import Capability
from engine_api.config import Memory
from engine_conformance.cases._case import case, must
from engine_conformance.cases._expect import documents, merged, oracle_of, outputs_match
from engine_conformance.cases._ranks import Answer, InferCall, answer, infer, opened, save
from engine_conformance.cases._state import read_rank_files, read_state
from engine_conformance.cases._target import Setup, Target
from engine_conformance.compare import assert_bitwise, assert_close_per_token
from engine_conformance.fixtures import LENGTHS, concatenate, packed_documents

BOTH = ("float32", "bfloat16")


def _per_token(target: Target, model: Path) -> float:
    """Every set of lengths, with entropy, against the oracle."""
    calls = [InferCall(documents=documents(7, lengths), entropy=True) for lengths in LENGTHS]
    ranks = target.run(infer, target.config(model), calls=calls)
    oracle = oracle_of(str(model))
    return max(outputs_match(target, oracle, call, rows) for call, rows in zip(calls, _by_call(ranks), strict=True))


def _by_call(ranks: Sequence[Sequence[Answer]]) -> list[list[Answer]]:
    return [list(rows) for rows in zip(*ranks, strict=True)]


@case(id="forward.llama", dtypes=BOTH)
def llama(target: Target) -> float:
    """Log-probs and entropy of every token of a Llama model MUST be the oracle's, with its own head and a tied one.

    If this fails: the hint under the failure names a shift (alignment), a document or its first tokens.
    """
    return max(_per_token(target, target.model(family="llama", tied=tied)) for tied in (False, True))


@case(id="forward.qwen2", dtypes=BOTH)
def qwen2(target: Target) -> float:
    """Log-probs and entropy of every token of a Qwen2 model (biased projections) MUST be the oracle's.

    If this fails: biases not read, or added twice.
    """
    return _per_token(target, target.model(family="qwen2"))


@case(id="forward.qwen3", dtypes=BOTH)
def qwen3(target: Target) -> float:
    """Log-probs and entropy of every token of a Qwen3 model MUST be the oracle's, read from one file or several.

    If this fails: norms of queries and keys; the index of a sharded folder.
    """
    models = target.model(family="qwen3"), target.model(family="qwen3", tied=False, shards=3, seed=1)
    return max(_per_token(target, model) for model in models)


@case(id="forward.qwen3_moe", requires=(Capability.MOE,), dtypes=BOTH)
def qwen3_moe(target: Target) -> float:
    """Log-probs and entropy of every token of a mixture of experts MUST be the oracle's.

    Tokens whose choice of experts rounding may change are left out.

    If this fails: weights of the chosen experts not normalised; fused expert tensors in another order.
    """
    return _per_token(target, target.model(family="qwen3_moe", tied=False))


@case(id="forward.values", requires=(Capability.VALUE_HEAD,), dtypes=BOTH)
def values(target: Target) -> float:
    """Values MUST be those of the head on the tokens before, 0 at first tokens.

    If this fails: a value that sees its own token is an alignment error of one.
    """
    model = target.model(value_model=True, tied=False)
    calls = [InferCall(documents=documents(7, lengths)) for lengths in LENGTHS]
    ranks = target.serving("value_model").run(infer, target.config(model), calls=calls)
    margins = []
    for call, rows in zip(calls, _by_call(ranks), strict=True):
        batch, got = call.documents, merged(call, rows)
        must(set(got) == {"values"}, "outputs", f"a value model answered with {sorted(got)}")
        want = oracle_of(str(model)).values(batch.input_ids, batch.cu_seqlens)
        tol = target.tolerance("values")
        margins.append(assert_close_per_token("values", got["values"], want, tol, cu_seqlens=batch.cu_seqlens))
    return max(margins)


@case(id="forward.temperature", dtypes=BOTH)
def temperature(target: Target) -> float:
    """Logits MUST be divided by the call's temperature before log-probs and entropy.

    If this fails: log-probs scaled after the softmax, or an entropy that knows no temperature.
    """
    model = target.model()
    calls = [InferCall(documents=documents(3), temperature=t, entropy=True) for t in (0.5, 0.7, 1.6)]
    ranks = target.run(infer, target.config(model), calls=calls)
    oracle = oracle_of(str(model))
    return max(outputs_match(target, oracle, call, rows) for call, rows in zip(calls, _by_call(ranks), strict=True))


@case(id="forward.isolation", dtypes=BOTH)
def isolation(target: Target) -> float:
    """What one document gets MUST NOT depend on the other documents of the batch, nor on their order.

    If this fails: the mask lets tokens see the document before (packing), or padding is not masked.
    """
    first, other = documents(5), packed_documents(99, LENGTHS["uneven"])
    keep = [0, 2, 4]
    changed = concatenate([first.take([d]) if d in keep else other.take([d]) for d in range(6)])
    order = [3, 5, 0, 4, 1, 2]
    calls = [InferCall(documents=b, entropy=True) for b in (first, changed, first.take(order))]
    ranks = target.run(infer, target.config(target.model()), calls=calls)
    base, mixed, shuffled = (merged(call, rows) for call, rows in zip(calls, _by_call(ranks), strict=True))
    margins = []
    for name, value in base.items():
        parts, tol = value.split(first.lengths), target.tolerance("log_probs")
        moved = torch.cat([parts[d] for d in order])
        margins.append(assert_close_per_token(f"{name} in another order", shuffled[name], moved, tol))
        mine, theirs = (torch.cat([v.split(first.lengths)[d] for d in keep]) for v in (value, mixed[name]))
        margins.append(assert_close_per_token(f"{name} beside other documents", theirs, mine, tol))
    return max(margins)


@case(id="forward.microbatch_split", dtypes=BOTH)
def microbatch_split(target: Target) -> float:
    """Outputs MUST come in the batch's token order whatever the token budget of a micro-batch is.

    If this fails: outputs of micro-batches are concatenated, though balancing has reordered the documents.
    """
    model = target.model()
    call = InferCall(documents=documents(5, "uneven"), entropy=True)
    margins = []
    for memory in (Memory(max_tokens=12), Memory(max_tokens=16, pad_to_multiple=8), Memory(logit_chunk=5)):
        ranks = target.run(infer, target.config(model, memory=memory), calls=[call])
        margins.append(outputs_match(target, oracle_of(str(model)), call, [rows[0] for rows in ranks]))
    return max(margins)


@case(id="forward.no_documents", world=(2, 4))
def no_documents(target: Target) -> float:
    """A rank without documents MUST take part in inference, and answer with nothing.

    If this fails with a stall: the ranks with documents wait in a collective that the empty one never enters.
    """
    model, call = target.model(), InferCall(documents=documents(5, "single"), entropy=True)
    ranks = target.run(infer, target.config(model), calls=[call])
    return outputs_match(target, oracle_of(str(model)), call, [rows[0] for rows in ranks])


def repeat_and_save(
    setup: Setup, call: InferCall, folders: Sequence[Path]
) -> tuple[list[dict[str, Tensor]], list[int], bool]:
    """Outputs of the same call twice, weight versions, and whether the generator of torch stayed as it was."""
    with opened(setup) as engine:
        save(engine, folders[0])
        before, versions = torch.get_rng_state(), [engine.weight_version]
        outputs = [answer(engine, call, setup.device).fields for _ in range(2)]
        versions.append(engine.weight_version)
        same = torch.equal(before, torch.get_rng_state())
        save(engine, folders[1])
        return outputs, versions, same


@case(id="forward.pure", requires=(Capability.PORTABLE_CHECKPOINT,))
def pure(target: Target) -> float:
    """Inference MUST leave weights, optimizer, generators and ``weight_version`` as they were, and repeat bit for bit.

    If this fails: dropout or a sampler draws from the generator; weights are cast in place; a step counter moves.
    """
    folder = target.scratch()
    folders = [folder / "before", folder / "after"]
    call = InferCall(documents=documents(5), entropy=True)
    for outputs, versions, same in target.run(
        repeat_and_save, target.config(target.model()), call=call, folders=folders
    ):
        assert_bitwise(outputs[1], outputs[0], name="the same call again")
        must(versions == [0, 0], "weight_version", f"{versions} before and after inference")
        must(same, "generator", "torch's generator moved")
    must(read_rank_files(folders[0]) == read_rank_files(folders[1]), "generators", "moved between two saves")
    return assert_bitwise(read_state(folders[1]), read_state(folders[0]), name="state after inference")
