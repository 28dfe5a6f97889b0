"""Tensor, pipeline, context and expert parallelism, which give one rank's outputs.

They do so alone and together.
"""

from __future__ import annotations

from typing import Any

from engine_api.capabilities import Capability
from engine_api.config import Parallelism
from engine_conformance.cases._case import LM, VALUE, case
from engine_conformance.cases._journeys import Stage, journey
from engine_conformance.cases._layouts import layout_holds, right_or_refused
from engine_conformance.cases._prefixes import holds_with_prefixes
from engine_conformance.cases._target import Target

TP = Capability.TP
PP = Capability.PP
CP = Capability.CP
EP = Capability.EP
DP = Capability.DP
MOE = Capability.MOE
PORTABLE = Capability.PORTABLE_CHECKPOINT
SEVERAL = (2, 4)
BOTH = (LM, VALUE)
# Heads, groups of them, layers and experts enough for four ranks; two query heads a key head.
WIDE: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 4}
DEEP: dict[str, Any] = {"num_layers": 4}
EXPERTS: dict[str, Any] = {"family": "qwen3_moe", "tied": False, "num_experts": 8}


@case(id="parallel.tp", requires=(TP,), world=SEVERAL, model_types=BOTH)
def tp(target: Target) -> float:
    """Tensor parallelism MUST NOT change outputs, loss, norm or update, and its ranks MUST agree.

    The norm is the gradient's. Grouped heads, norms of heads, a head tied to the
    embedding; the norm counts replicated weights once. Documents that share their
    beginnings are computed rightly as well, or refused by name.

    If this fails: gradients of norms, which every rank computes from its own heads, are
    not summed (Megatron-LM #7452), replicated weights enter the norm once a rank (verl
    #4710), the split vocabulary's log-sum-exp is a rank's own.
    """
    return holds_with_prefixes(target, target.model(**WIDE), Parallelism(tp=target.world))


@case(id="parallel.tp_families", requires=(TP,), world=SEVERAL, families=("qwen2", "llama"))
def tp_families(target: Target) -> float:
    """Biases, models without norms of heads and heads of their own MUST be split as rightly.

    If this fails: a bias behind a sum over ranks is added once a rank; the untied head
    is split another way than the embedding, and its gradient is a rank's own.
    """
    kinds = [{"family": family, "tied": False, **WIDE} for family in ("qwen2", "llama")]
    layout = Parallelism(tp=target.world)
    return max(layout_holds(target, model, layout) for model in target.models(*kinds))


@case(id="parallel.pp", requires=(PP,), world=SEVERAL, model_types=BOTH)
def pp(target: Target) -> float:
    """A pipeline MUST NOT change outputs, loss, norm or update, and stages MUST report alike.

    The norm is the gradient's. With batches of fewer micro-batches than stages, and of
    several. Documents that share their beginnings are computed rightly as well, or refused
    by name.

    If this fails: the loss is known on the last stage only, the norm is a stage's own,
    micro-batches are averaged, or the last one is lost when they are fewer than stages.
    """
    model = target.model(tied=False, **DEEP)
    return holds_with_prefixes(target, model, Parallelism(pp=target.world))


@case(id="parallel.pp_tied", requires=(PP,), world=SEVERAL)
def pp_tied(target: Target) -> float:
    """A tied embedding MUST stay one weight when first and last stage both hold it.

    If this fails: the two copies' gradients are not summed, so that they drift apart;
    the norm counts both; the export or a checkpoint holds two (NeMo-RL #227,
    Megatron-LM #7452).
    """
    return layout_holds(target, target.model(tied=True, **DEEP), Parallelism(pp=target.world))


@case(id="parallel.cp", requires=(CP,), world=SEVERAL)
def cp(target: Target) -> float:
    """Context parallelism MUST NOT change outputs or updates, and its ranks MUST agree bitwise.

    With documents that cross the split, and numbers of tokens that it does not divide.
    Documents that share their beginnings are computed rightly as well, or refused by name.

    If this fails: targets are shifted within a rank (verl PR 4250), positions or the
    mask are a rank's own, documents see each other across the split, the gradient is
    counted once a rank.
    """
    return holds_with_prefixes(target, target.model(), Parallelism(cp=target.world))


@case(id="parallel.ep", requires=(EP, MOE), world=SEVERAL)
def ep(target: Target) -> float:
    """Expert parallelism MUST NOT change a token's outputs, nor loss, gradient norm or update.

    If this fails: experts are numbered within a rank, tokens beyond a capacity are
    dropped, the experts' gradients are summed over ranks that hold other experts, or
    averaged as the dense ones (Megatron-LM #7452).
    """
    return layout_holds(target, target.model(**EXPERTS), Parallelism(ep=target.world))


@case(id="parallel.tp_pp", requires=(TP, PP), world=(4,))
def tp_pp(target: Target) -> float:
    """Tensor and pipeline parallelism MUST compose.

    If this fails: the tied embedding's gradient is summed over the wrong group, the
    norm counts a stage or a replicated weight twice (Megatron-LM #7452 lists such
    compositions).
    """
    return layout_holds(target, target.model(**WIDE), Parallelism(tp=2, pp=2))


@case(id="parallel.tp_dp", requires=(TP, DP), world=(4,))
def tp_dp(target: Target) -> float:
    """Tensor and data parallelism MUST compose.

    If this fails: the denominator or a metric counts a data-parallel rank as often as
    it has members.
    """
    return layout_holds(target, target.model(**WIDE), Parallelism(tp=2))


@case(id="parallel.pp_dp", requires=(PP, DP), world=(4,))
def pp_dp(target: Target) -> float:
    """A pipeline and data parallelism MUST compose, also when one rank has fewer documents.

    The rank is a data-parallel one.

    If this fails: pipelines make different numbers of micro-batches and wait for each
    other.
    """
    return layout_holds(target, target.model(), Parallelism(pp=2), lengths=("skewed", "single"))


@case(id="parallel.cp_dp", requires=(CP, DP), world=(4,))
def cp_dp(target: Target) -> float:
    """Context and data parallelism MUST compose, also where a data-parallel rank has no document.

    If this fails: gradients are averaged over one of the two groups; a rank without
    tokens leaves a collective.
    """
    return layout_holds(target, target.model(), Parallelism(cp=2), lengths=("skewed", "single"))


@case(id="parallel.ep_dp", requires=(EP, MOE, DP), world=(4,))
def ep_dp(target: Target) -> float:
    """Expert and data parallelism MUST compose: several ranks hold the same experts.

    If this fails: the copies of an expert drift apart, or their gradients are divided
    by the number of all ranks.
    """
    return layout_holds(target, target.model(**EXPERTS), Parallelism(ep=2))


def _round_trip(target: Target, model: dict[str, Any], *layouts: Parallelism) -> float:
    """Go from one rank through ``layouts`` to one rank again."""
    stages = [Stage(target=target, layout=layout) for layout in layouts]
    alone = Stage(target=target.with_world(1))
    return journey(target.model(**model), [alone, *stages, alone])


@case(id="parallel.tp_checkpoint", requires=(TP, PORTABLE), world=SEVERAL)
def tp_checkpoint(target: Target) -> float:
    """A checkpoint MUST go from one rank into tensor parallelism and back.

    Optimizer and schedule are included.

    If this fails: a split weight is stored with a rank's offset within another
    dimension, replicated ones several times.
    """
    return _round_trip(target, WIDE, Parallelism(tp=target.world))


@case(id="parallel.pp_checkpoint", requires=(PP, PORTABLE), world=SEVERAL)
def pp_checkpoint(target: Target) -> float:
    """A checkpoint MUST go from one rank into a pipeline and back, under the layers' global names.

    If this fails: layers are numbered within a stage (Megatron-LM #7452, NeMo-RL #671),
    a tied head is stored twice.
    """
    return _round_trip(target, DEEP, Parallelism(pp=target.world))


@case(id="parallel.ep_checkpoint", requires=(EP, MOE, PORTABLE), world=SEVERAL)
def ep_checkpoint(target: Target) -> float:
    """A checkpoint MUST go from one rank into expert parallelism and back.

    Experts have their global names in it.

    If this fails: experts are numbered within a rank, or their moments stand in another
    order than they do.
    """
    return _round_trip(target, EXPERTS, Parallelism(ep=target.world))


@case(id="parallel.tp_to_pp", requires=(TP, PP, PORTABLE), world=SEVERAL)
def tp_to_pp(target: Target) -> float:
    """A checkpoint MUST load from tensor parallelism into a pipeline, and from a pipeline back.

    If this fails: shards are stored by rank and not by place (verl, miles and AReaL
    state it as a limit), or under names of a layout (Megatron-LM #7452, NeMo-RL #671).
    """
    tensor = Parallelism(tp=target.world)
    pipeline = Parallelism(pp=target.world)
    return _round_trip(target, WIDE | DEEP, tensor, pipeline, tensor)


@case(id="parallel.tp_indivisible", requires=(TP,), world=(2,))
def tp_indivisible(target: Target) -> float:
    """Sizes that tensor parallelism does not divide MUST be right, or ``ConfigError`` on all ranks.

    Heads, key heads and a vocabulary.

    If this fails: the remainder is dropped, padding of the vocabulary enters the
    log-sum-exp or the export, or some ranks fail while the others wait.
    """
    odd = (
        {"num_heads": 3, "num_kv_heads": 3},
        {"num_heads": 3, "num_kv_heads": 1},
        {"num_kv_heads": 1},
        {"vocab_size": 257},
        {"intermediate_size": 129},
    )
    return max(right_or_refused(target, target.model(**one), Parallelism(tp=2)) for one in odd)


@case(id="parallel.pp_indivisible", requires=(PP,), world=(2,))
def pp_indivisible(target: Target) -> float:
    """Layers that the stages do not divide MUST be right, or ``ConfigError`` on every rank.

    Fewer layers than stages as well.

    If this fails: a layer is lost or computed twice, or an empty stage waits for
    another.
    """
    return max(
        right_or_refused(target, target.model(num_layers=n), Parallelism(pp=2)) for n in (3, 1)
    )


@case(id="parallel.ep_indivisible", requires=(EP, MOE), world=(2,))
def ep_indivisible(target: Target) -> float:
    """Experts that the ranks do not divide MUST be right, or ``ConfigError`` on every rank.

    A model without any expert as well.

    If this fails: the last experts are on no rank, or the size is ignored for a dense
    model.
    """
    models = (target.model(**EXPERTS | {"num_experts": 5}), target.model())
    return max(right_or_refused(target, model, Parallelism(ep=2)) for model in models)
