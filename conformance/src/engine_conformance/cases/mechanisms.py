"""Mechanisms of model families beyond a plain transformer, each declared as a capability.

Each case makes a small model of one family that has the mechanism. An engine that does not declare
it refuses such a model by its name (`refusal`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from engine_api.capabilities import Capability
from engine_api.config import Memory, OptimizerConfig
from engine_conformance.cases._case import case
from engine_conformance.cases._expect import (
    asking,
    documents,
    oracle_of,
    oracle_training,
    outputs_match,
    same_on_all_ranks,
    trained_on,
    training_matches,
)
from engine_conformance.cases._ranks import (
    InferredAndTrained,
    Trained,
    infer_and_train,
    train,
)
from engine_conformance.cases._target import Target
from engine_conformance.compare import assert_weights_close
from engine_conformance.fixtures import PackedDocuments, packed_documents
from engine_conformance.oracle import loss_and_grads, sft
from engine_conformance.seeds import cached_by_seed
from engine_conformance.tolerances import gradient_tolerances

SINCE = "1.4"

MODELS: Mapping[Capability, Mapping[str, Any]] = MappingProxyType(
    {
        Capability.SOFTCAP: {
            "family": "gemma2",
            "keys": {
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0,
                "query_pre_attn_scalar": 16,
                "sliding_window": 64,
            },
            "max_position": 1024,
        },
        Capability.LOGIT_SCALE: {"family": "granite"},
        Capability.HEAD_BIAS: {"family": "phi", "tied": False},
        Capability.SAVED_BUFFERS: {"family": "dots1", "tied": False},
        Capability.SINKS: {"family": "granite_swa", "max_position": 1024},
        Capability.LINEAR_ATTENTION: {"family": "lfm2"},
        # YaRN multiplies the scores by the square of a factor, and cosine and sine by another one.
        Capability.SPARSE_ATTENTION: {
            "family": "deepseek_v32",
            "tied": False,
            "rope": {
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            },
        },
    }
)
"""Arguments of `TinyModel`, for the model of each mechanism."""

OTHERS: Mapping[Capability, Mapping[str, Any]] = MappingProxyType(
    {
        Capability.SAVED_BUFFERS: {"family": "deepseek_v3", "tied": False},
        Capability.SINKS: {"family": "gpt_oss", "tied": False, "max_position": 1024},
    }
)
"""The same of other families, for engines that declare these and not the former."""

# A document of more tokens than kernels in blocks take at once (128 to 512), and one behind it.
_LONG = (5, 3, 530, 7)


def _families(capability: Capability) -> tuple[str, ...]:
    return tuple(one[capability]["family"] for one in (MODELS, OTHERS) if capability in one)


def model_of(target: Target, capability: Capability) -> Mapping[str, Any]:
    """Return the model of a mechanism whose family the engine builds."""
    usual = MODELS[capability]
    return usual if target.builds(usual["family"]) else OTHERS.get(capability, usual)


def _holds(target: Target, capability: Capability, **keys: Any) -> float:
    """Compare outputs, a step and the weights after it with the oracle's, saved buffers too."""
    arguments = dict(model_of(target, capability))
    arguments["keys"] = {**arguments.get("keys", {}), **keys}
    model = target.model(**arguments)
    return _compare(target, model, documents(42), trained_on(target, oracle_of(str(model)), 41))


def _compare(
    target: Target, model: Path, inferred: PackedDocuments, trained: PackedDocuments
) -> float:
    """Compare outputs of some documents, and a step on others, with the oracle's."""
    oracle = oracle_of(str(model))
    call = asking(target, inferred)
    ranks: list[InferredAndTrained] = target.run(
        infer_and_train, target.config(model), calls=[call], batch=trained
    )
    want = oracle_training(str(model), (trained,))
    return max(
        outputs_match(target, oracle, call, [rank.outputs[0] for rank in ranks]),
        training_matches(target, [rank.trained for rank in ranks], want, oracle),
    )


@cached_by_seed
def _long_documents(seed: int) -> PackedDocuments:
    return packed_documents(seed, _LONG)


def _holds_at_length(target: Target, capability: Capability) -> float:
    """Compare with the oracle on short documents, and on a long one among short ones."""
    model = target.model(**model_of(target, capability))
    long = _compare(target, model, _long_documents(44), _long_documents(43))
    return max(_holds(target, capability), long)


@case(
    id="mechanisms.softcap",
    since=SINCE,
    requires=(Capability.SOFTCAP,),
    families=_families(Capability.SOFTCAP),
    quick="once",
)
def softcap(target: Target) -> float:
    """Caps of attention's scores and of the logits MUST be applied, forward and backward.

    The model is Gemma 2, with both, and one document is longer than a block of 512 tokens. A second
    model caps its logits alone, and has a short window and scores with the factor of wider heads.

    If this fails: a kernel of attention without caps is used, a chunked head leaves its cap out,
    the cap has no derivative, a kernel in blocks leaves tokens out or counts them twice where two
    blocks meet, or the mask of a window comes with the usual factor of scores.
    """
    # Heads are 16 wide.
    plain = {"attn_logit_softcapping": None, "query_pre_attn_scalar": 40, "sliding_window": 4}
    windowed = _holds(target, Capability.SOFTCAP, **plain)
    return max(_holds_at_length(target, Capability.SOFTCAP), windowed)


@case(
    id="mechanisms.logit_scale",
    since=SINCE,
    requires=(Capability.LOGIT_SCALE,),
    families=_families(Capability.LOGIT_SCALE),
)
def logit_scale(target: Target) -> float:
    """The factor of the logits MUST be applied before the temperature, forward and backward.

    The model is Granite, which divides its logits, and multiplies embeddings, scores and what
    each layer adds. Documents are of about the same length, and a long one among short ones, which
    engines pack differently.

    If this fails: the head multiplies where the family divides, a chunked head computes plain
    logits, or the factor of the scores is left out where attention runs under a mask.
    """
    model = target.model(**MODELS[Capability.LOGIT_SCALE])
    skewed = _compare(target, model, documents(46, "skewed"), documents(45, "skewed"))
    return max(_holds(target, Capability.LOGIT_SCALE), skewed)


@case(
    id="mechanisms.head_bias",
    since=SINCE,
    requires=(Capability.HEAD_BIAS,),
    families=_families(Capability.HEAD_BIAS),
)
def head_bias(target: Target) -> float:
    """The bias of the output head MUST be added to the logits, trained and exported.

    The model is Phi. Its gradient is summed in float32 over many chunks, of which each is faint
    next to the first.

    If this fails: a head that is computed in chunks has only the weight, or the bias has a
    gradient of the last chunk alone, or one that is summed in bfloat16.
    """
    return max(_holds(target, Capability.HEAD_BIAS), _sums_over_chunks(target))


_FAINT = 1 / 1024  # below half a unit in bfloat16's last place of 1


@cached_by_seed
def _faint_tokens() -> PackedDocuments:
    """Return documents of one token repeated, whose first has a weight of 1 and the others little.

    All gradients of the head's bias then have one direction, and are not lost in rounding errors of
    other tokens.
    """
    batch = packed_documents(43, (4, *[150] * 4))
    weights = np.full_like(batch.loss_weight, _FAINT)
    weights[:4] = 1 / 3
    weights[batch.cu_seqlens[:-1]] = 0.0
    return replace(batch, input_ids=np.full_like(batch.input_ids, 77), loss_weight=weights)


def _sums_over_chunks(target: Target) -> float:
    """Compare the gradient of one micro-batch in many chunks with the oracle's.

    SGD's update shows the gradient.
    """
    model = target.model(**MODELS[Capability.HEAD_BIAS])
    batch = _faint_tokens()
    config = target.config(
        model,
        optimizer=OptimizerConfig(name="torch.optim.SGD", lr=1.0, clip_norm=None),
        memory=Memory(max_tokens=len(batch.input_ids), logit_chunk=1),
    )
    ranks: list[Trained] = target.run(train, config, batches=[batch], denominators=[1.0])
    same_on_all_ranks(ranks)
    oracle = oracle_of(str(model))
    _, want = loss_and_grads(oracle, batch, sft, 1.0)
    got = {name: start - ranks[0].weights[name].double() for name, start in oracle.params.items()}
    head = [name for name in want if name.startswith("lm_head.")]
    bounds = gradient_tolerances({name: want[name] for name in head}, target.torch_dtype)
    return assert_weights_close(
        {name: got[name] for name in head},
        {name: want[name] for name in head},
        bounds,
        name="gradient over chunks",
    )


@case(
    id="mechanisms.saved_buffers",
    since=SINCE,
    requires=(Capability.SAVED_BUFFERS, Capability.MOE),
    families=_families(Capability.SAVED_BUFFERS),
)
def saved_buffers(target: Target) -> float:
    """Tensors that a model saves and does not train MUST be read, used, kept and exported.

    The model is dots1, or DeepSeek-V3 for an engine that declares this family alone. Its routers
    add a saved bias to select experts, whose weights are without it.

    If this fails: the bias is zero because no file was read into it, it enters the experts'
    weights, is rounded to the dtype of the computation, is updated, or is not in the export.
    """
    return _holds(target, Capability.SAVED_BUFFERS)


@case(
    id="mechanisms.sinks",
    since=SINCE,
    requires=(Capability.SINKS,),
    families=_families(Capability.SINKS),
    quick="once",
)
def sinks(target: Target) -> float:
    """Attention sinks MUST take their part of each head's softmax, and be trained.

    The model is Granite with windows, or gpt-oss for an engine that declares this family alone: a
    layer with a window and one without. One document is longer than a block of 512 tokens.

    If this fails: the sinks are left out, are one for all heads, take part of a token's value, have
    no gradient, or are added once for each block of a long document.
    """
    return _holds_at_length(target, Capability.SINKS)


@case(
    id="mechanisms.linear_attention",
    since=SINCE,
    requires=(Capability.LINEAR_ATTENTION,),
    families=_families(Capability.LINEAR_ATTENTION),
    quick="once",
)
def linear_attention(target: Target) -> float:
    """Layers that carry a state from token to token MUST begin anew at each document.

    The model is LFM2, with a short convolution in one layer and attention in the other.

    If this fails: the state of one document reaches the next one of its pack (transformers'
    fallback drops the bounds; NeMo-RL #4167, prime-rl #3001), or gradients do.
    """
    return _holds(target, Capability.LINEAR_ATTENTION)


@case(
    id="mechanisms.sparse_attention",
    since=SINCE,
    requires=(Capability.SPARSE_ATTENTION,),
    families=_families(Capability.SPARSE_ATTENTION),
    quick="once",
)
def sparse_attention(target: Target) -> float:
    """A token MUST attend to the tokens that its index selects, in its own document.

    The model is DeepSeek-V3.2 without experts, whose index selects four tokens, and whose scores
    have a factor of YaRN (`mscale_all_dim`). The index has no gradient. In 16 bits, where rounding
    decides about tokens of nearly the same index, it selects all.

    If this fails: attention is to all tokens, the index counts tokens of other documents, or the
    scores of selected tokens are without YaRN's factor.
    """
    selected = 4 if target.dtype == "float32" else 64
    return _holds(target, Capability.SPARSE_ATTENTION, index_topk=selected)
