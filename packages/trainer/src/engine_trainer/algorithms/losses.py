"""Policy losses as sums over tokens, with metrics that are sums too.

Fields of the batch, all ``[T]``: ``loss_weight`` (0 on prompts; see
``engine_api.losses.token_weights``), ``advantages``, ``old_log_probs`` (of the policy that the
ratio is taken against), when there is a KL term ``ref_log_probs``, and with a rollout correction
``correction`` (see ``engine_trainer.algorithms.correction``), and where the KL to a teacher is
estimated from sampled tokens ``teacher_log_probs``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from engine_api.arguments import check_loss_output
from engine_api.batch import Batch
from engine_api.config import near_matches
from engine_api.distillation import DIVERGENCE, Teaching
from engine_api.errors import ConfigError
from engine_api.losses import Aggregation, where_counted
from engine_api.results import LossOutput, TokenOutputs
from engine_trainer.algorithms.inputs import PolicyTokens
from engine_trainer.algorithms.packed import document_of, sum_by_document
from engine_trainer.algorithms.surrogates import MAX_LOG_RATIO, exp_ratio, keeps_sequence
from engine_trainer.extensions.built_in import LOSSES
from engine_trainer.extensions.traits import LossTraits

if TYPE_CHECKING:
    import torch

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")
CLIPS = ("clip_low", "clip_high", "dual_clip")
"""Options of losses that have keys of their own in the configuration."""


def kl_divergence(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """Estimate each token's KL(policy ‖ reference) from one sample, in nats.

    Schulman 2020, "Approximating KL Divergence". With ``d = log_probs - ref_log_probs``: ``k1 = d``
    (unbiased, may be negative), ``k2 = d² / 2`` (biased), ``k3 = exp(-d) - 1 + d`` (unbiased, never
    negative). These properties of the value do not hold for its gradient: a penalty in the loss is
    ``kl_penalty``, and a penalty in the reward is ``k1``.

    Args:
        log_probs, ref_log_probs: ``[T]`` floating; the difference is clamped to ±``MAX_LOG_RATIO``.

    Returns:
        ``[T]`` nats.
    """
    d = _log_ratio(log_probs, ref_log_probs)
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else (-d).exp() - 1 + d


def kl_penalty(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    estimator: Estimator,
    *,
    log_ratio: torch.Tensor | None,
    bound: float | None,
) -> torch.Tensor:
    """Return the KL term of a loss for each token: ``[T]`` nats with a gradient.

    Tokens are drawn from a policy that is not the one whose gradient is taken, at least after the
    first update, and even before it the samples' distribution depends on the weights: the gradient
    of the expectation is not the expectation of the estimator's gradient (arXiv:2510.01555). With
    ``r`` the ratio of the policy to what sampled, the term is

        k1, k3    r k, with the gradient through both factors: r (d + 1) ∇log π and r d ∇log π
        k2        sg(r) k, whose gradient is the same r d ∇log π

    In expectation all three are the gradient of each token's KL(policy ‖ reference), on and off
    policy; k1's has more variance.

    Args:
        log_probs: ``[T]`` of the policy, with a gradient.
        ref_log_probs: ``[T]``.
        estimator: see ``kl_divergence``.
        log_ratio: ``[T]``, log r; None: the bare estimator, whose expected gradient on policy is 0
            (k1), that of KL(policy ‖ reference) (k2) or that of KL(reference ‖ policy) (k3), and
            off policy another one.
        bound: nats; a token whose k3 is above it counts as so much (times r) and has no gradient,
            as in verl; None: no bound. It is on k3 before the ratio: a token that the policy has
            overshot (r and d large) keeps its gradient.
    """
    value = kl_divergence(log_probs, ref_log_probs, estimator)
    bounded = value.detach() > bound if bound is not None and estimator == "k3" else None
    if log_ratio is None:
        return value if bounded is None else value.clamp(max=bound)
    # The slope is written out: autograd would take that of k3 as a difference of two numbers up to
    # exp(20).
    ratio = exp_ratio(log_ratio.detach())
    d = _log_ratio(log_probs, ref_log_probs).detach()
    slope = ratio * (d + 1 if estimator == "k1" else d)
    if bounded is not None:
        value = value.clamp(max=bound)
        slope = slope.masked_fill(bounded, 0.0)
    return (ratio * value).detach() + slope * (log_probs - log_probs.detach())


def _log_ratio(log_probs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (log_probs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A policy loss by name, and the terms that DAPO and GRPO add.

    With ``r`` the ratio of ``log_probs`` to ``old_log_probs``, advantage A, weight w and correction
    c, the sum over tokens of::

        w · ( policy_coef · c · S(r, A) + kl_coef · c · KL(r) + teacher_coef · c · D(r)
              - entropy_coef · H )

    where Σ w c S is the loss ``kind``, a function of ``PolicyTokens``, KL that of ``kl_penalty``,
    and D that of the teacher. Without ``teaching`` it is k2 with the importance ratio, the gradient
    of which is r (log π - log teacher) ∇log π. With ``teaching`` it is the engine's output
    ``divergence``, an expectation over the token, so that neither r nor c multiplies it. What a
    batch holds at tokens without weight is not read: it may be NaN.

    Attributes:
        kind: a built-in loss (``engine_trainer.algorithms.policy_losses``), the name of an entry
            point of ``engine_trainer.losses``, or ``file.py:function``.
        options: arguments of the loss, by name.
        clip_low, clip_high: arguments of a loss that has parameters of these names. DAPO's
            clip-higher is ``clip_high > clip_low`` (arXiv:2503.14476, eq. 8).
        dual_clip: for ``ppo``, above 1: where A < 0, S is at most ``-A dual_clip``
            (arXiv:1912.09729, eq. 5); or None.
        kl_coef: weight of the KL to ``ref_log_probs``; 0: the field is not read.
        kl_estimator: see ``kl_divergence``; GRPO's is ``k3`` (arXiv:2402.03300, eq. 4).
        kl_importance: multiply the KL by the ratio r of each token, and by c where there is a
            correction: tokens are then weighted as if the policy had drawn them. Else the bare
            estimator, without c, which is GRPO's.
        kl_bound: nats; see ``kl_penalty``.
        policy_coef: weight of the loss ``kind``; 0: it is not computed.
        teacher_coef: weight of the KL to the teacher; 0: nothing of the teacher is read.
        teaching: the divergence that the engine computes (``engine_api.distillation``); None: the
            KL is estimated from the field ``teacher_log_probs``.
        entropy_coef: weight of the entropy bonus.
        entropy: compute the entropy as a metric although its weight is 0.
        on_policy: the weights are still those that made the old log-probs, so that r is 1 and its
            gradient is that of the log-probs: ``old_log_probs`` is not read, and need not have been
            computed.
        corrected: c is the field ``correction``; else it is 1.
        sequence_mask: mean log-ratio of sampler to policy in nats above which a completion with a
            negative advantage has no policy term (see ``surrogates.keeps_sequence``); the sampler's
            log-probs are ``rollout_log_probs`` where the batch has them. None: no mask.
        denominator, version: what the loss gets under these names.

    Metrics (sums over tokens with weight): those of the loss, ``tokens``, ``weight``,
    ``policy_loss`` (weighted), ``old_kl`` (k3 of old to new policy) and, where computed,
    ``ref_kl``, ``teacher_kl`` (the divergence, or k1, which is unbiased), ``entropy``.

    Raises:
        ConfigError: for a value outside its range.
    """

    kind: str = "ppo"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_importance: bool = True
    kl_bound: float | None = 10.0
    policy_coef: float = 1.0
    teacher_coef: float = 0.0
    teaching: Teaching | None = None
    entropy_coef: float = 0.0
    entropy: bool = False
    on_policy: bool = False
    corrected: bool = False
    sequence_mask: float | None = None
    denominator: float | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        LOSSES.check(self.kind)
        _check(0 <= self.clip_low <= 1, "clip_low", self.clip_low, "give a number in [0, 1]")
        _check(self.clip_high >= 0, "clip_high", self.clip_high, "give a number >= 0")
        _check(
            self.dual_clip is None or self.dual_clip > 1,
            "dual_clip",
            self.dual_clip,
            "give a number > 1, or null",
        )
        _check(
            self.dual_clip is None or LOSSES.reads(self.kind, "dual_clip"),
            "dual_clip",
            self.dual_clip,
            f"null: {self.kind} has no such parameter, ppo has",
        )
        _check(self.kl_coef >= 0, "kl_coef", self.kl_coef, "give a number >= 0")
        remedy = near_matches(str(self.kl_estimator), ESTIMATORS)
        _check(self.kl_estimator in ESTIMATORS, "kl_estimator", self.kl_estimator, remedy)
        _check(
            self.sequence_mask is None or self.sequence_mask >= 0,
            "sequence_mask",
            self.sequence_mask,
            "give nats >= 0, or null",
        )
        bounded = self.kl_bound is None or self.kl_bound > 0
        _check(bounded, "kl_bound", self.kl_bound, "give a number > 0, or null")

    @property
    def needs(self) -> tuple[str, ...]:
        """The outputs that the engine must compute."""
        entropy = self.entropy or self.entropy_coef or "entropy" in self.traits.needs
        needs = ("log_probs", "entropy") if entropy else ("log_probs",)
        return needs if self.teaching is None else (*needs, DIVERGENCE)

    @property
    def traits(self) -> LossTraits:
        """Traits of the loss (``engine_trainer.extensions.traits``)."""
        return LOSSES.traits(self.kind)

    @property
    def only_advantages(self) -> bool:
        """True if a token without an advantage has no gradient.

        Such a token need not be trained on.
        """
        others = (self.kl_coef, self.teacher_coef, self.entropy_coef)
        return not any(others) and self.traits.only_advantages

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the sum over ``batch`` (see the class)."""
        tokens = PolicyTokens.of(
            outputs,
            batch,
            on_policy=self.on_policy,
            corrected=self.corrected,
            needs=tuple(name for name in self.traits.needs if name != "entropy"),
            denominator=self.denominator,
            version=self.version,
        )
        weight = batch.loss_weight
        log_ratio = tokens.log_ratio
        loss, metrics = self._policy(tokens)
        metrics |= {
            "tokens": tokens.mask.sum(),
            "weight": weight.sum(),
            "policy_loss": loss.detach(),
            "old_kl": _old_kl(log_ratio.detach(), tokens.mask),
        }
        loss = loss + self._kl(tokens.log_probs, log_ratio, batch, metrics)
        loss = loss + self._teacher(outputs, tokens.log_probs, log_ratio, batch, metrics)
        loss = loss + self._entropy(outputs.entropy, weight, metrics)
        return LossOutput(loss=loss, metrics=metrics)

    def _policy(self, tokens: PolicyTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor | float]]:
        """Return the weighted policy term and its metrics."""
        if self.policy_coef == 0:
            if self.teaching is not None:
                # The divergence has the gradient: the log-probs need not be computed again.
                return tokens.log_probs.new_zeros(()), {}
            # Without tokens that carry loss it must still have a gradient.
            return 0.0 * tokens.log_probs.sum(), {}
        kept, metrics = self._without_masked(tokens)
        result = self.policy_term(kept)
        metrics = metrics | {name: _detached(value) for name, value in result.metrics.items()}
        # A factor of 1 changes no bit.
        return self.policy_coef * result.loss, metrics

    def policy_term(self, tokens: PolicyTokens) -> LossOutput:
        """Return the policy term Σ w c S and its metrics, without KL and entropy.

        Raises ``ConfigError`` for an output of the loss that cannot be differentiated or added up.
        """
        arguments = {name: getattr(self, name) for name in CLIPS if LOSSES.reads(self.kind, name)}
        result = LOSSES.function(self.kind)(tokens, **arguments, **self.options)
        # Without a gradient in the outputs (a measurement) there is none in the loss.
        if tokens.log_probs.requires_grad or not isinstance(result, LossOutput):
            _check_output(result, self.kind)
        return result

    def _without_masked(
        self, tokens: PolicyTokens
    ) -> tuple[PolicyTokens, dict[str, torch.Tensor | float]]:
        """Return the tokens with the weight 0 where ``sequence_mask`` holds, and their number."""
        if self.sequence_mask is None:
            return tokens, {}
        sampler = tokens.rollout_log_probs
        keeps = keeps_sequence(
            tokens.log_probs,
            tokens.old_log_probs if sampler is None else sampler,
            tokens.advantages,
            tokens.mask,
            tokens.cu_seqlens,
            self.sequence_mask,
        )
        masked = (~keeps & tokens.mask).sum()
        return replace(tokens, weight=tokens.weight * keeps), {"sequence_masked": masked}

    def coefficients(self, batch: Batch) -> torch.Tensor | None:
        """Return the derivative ``[T]`` by each log-prob on policy, where r is 1.

        Off policy it is None, because it depends on r there, and for a loss that does not say what
        its derivative is.

        The derivative is ``-w c A``, and for a loss of whole sequences its mean over the sequence:
        each of a sequence's tokens has the same part in its ratio.
        """
        slope = self.traits.slope
        known = self.on_policy and self.only_advantages and self.sequence_mask is None
        known = known and self.policy_coef == 1
        if not (known and slope):
            return None
        own = -self._policy_weight(batch) * where_counted(batch["advantages"], batch.loss_weight)
        if slope != "sequence":
            return own
        counted = (batch.loss_weight > 0).to(own.dtype)
        counts = sum_by_document(counted, batch.cu_seqlens)
        mean = sum_by_document(own, batch.cu_seqlens) / counts.clamp(min=1.0)
        return mean[document_of(batch.cu_seqlens, own)] * counted

    def _policy_weight(self, batch: Batch) -> torch.Tensor:
        weight = batch.loss_weight
        return weight * where_counted(batch["correction"], weight) if self.corrected else weight

    def _kl(
        self,
        log_probs: torch.Tensor,
        log_ratio: torch.Tensor,
        batch: Batch,
        metrics: dict[str, torch.Tensor | float],
    ) -> torch.Tensor | float:
        if self.kl_coef == 0:
            return 0.0
        weight = batch.loss_weight
        reference = where_counted(batch["ref_log_probs"], weight)
        metrics["ref_kl"] = kl_divergence(log_probs.detach(), reference, self.kl_estimator).sum()
        if self.kl_importance:
            weight = self._policy_weight(batch)
        kl = kl_penalty(
            log_probs,
            reference,
            self.kl_estimator,
            log_ratio=log_ratio if self.kl_importance else None,
            bound=self.kl_bound,
        )
        return self.kl_coef * (weight * kl).sum()

    def _teacher(
        self,
        outputs: TokenOutputs,
        log_probs: torch.Tensor,
        log_ratio: torch.Tensor,
        batch: Batch,
        metrics: dict[str, torch.Tensor | float],
    ) -> torch.Tensor | float:
        if self.teacher_coef == 0:
            return 0.0
        if self.teaching is not None:
            assert outputs.divergence is not None
            divergence = where_counted(outputs.divergence, batch.loss_weight)
            metrics["teacher_kl"] = divergence.detach().sum()
            return self.teacher_coef * (batch.loss_weight * divergence).sum()
        teacher = where_counted(batch["teacher_log_probs"], batch.loss_weight)
        metrics["teacher_kl"] = kl_divergence(log_probs.detach(), teacher, "k1").sum()
        # The gradient of k3 is the same. Its value is 1e8 for a token that only the teacher takes.
        kl = kl_penalty(log_probs, teacher, "k2", log_ratio=log_ratio, bound=None)
        return self.teacher_coef * (self._policy_weight(batch) * kl).sum()

    def _entropy(
        self,
        entropy: torch.Tensor | None,
        weight: torch.Tensor,
        metrics: dict[str, torch.Tensor | float],
    ) -> torch.Tensor | float:
        if entropy is None:
            return 0.0
        entropy = where_counted(entropy, weight)
        metrics["entropy"] = entropy.detach().sum()
        return -self.entropy_coef * (weight * entropy).sum() if self.entropy_coef else 0.0


def _detached(value: torch.Tensor | float) -> torch.Tensor | float:
    return value if isinstance(value, int | float) else value.detach()


def _old_kl(log_ratio: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ((log_ratio.exp() - 1 - log_ratio) * counted).sum()


def denominator(mode: Aggregation, token_counts: Sequence[int], length: int | None = None) -> float:
    """Return the divisor of a sum with ``token_weights(…, mode)``.

    It is over the whole optimizer batch of all ranks.

    Args:
        mode: ``token-mean``: the number of tokens (the sum of the weights; DAPO's token-level
            loss); ``seq-mean-token-sum``, ``seq-mean-token-mean``: the number of sequences;
            ``seq-mean-token-sum-norm``: the number of sequences times ``length``.
        token_counts: one a sequence, the tokens that count; a sequence without any is no sequence
            here.
        length: tokens, the same in all steps of a run; for ``seq-mean-token-sum-norm``, which needs
            it.

    Returns:
        A number >= 0; 0 when nothing counts at all.
    """
    if mode == "token-mean":
        return float(sum(token_counts))
    sequences = float(sum(count > 0 for count in token_counts))
    if mode != "seq-mean-token-sum-norm":
        return sequences
    assert length is not None, "the constant has a default in the configuration alone"
    return sequences * length


RESERVED = (
    "tokens",
    "weight",
    "policy_loss",
    "old_kl",
    "ref_kl",
    "teacher_kl",
    "entropy",
    "sequence_masked",
)
"""Metrics of ``PolicyLoss`` itself."""
PREFIXES = ("mismatch", "correction")
"""Beginnings of the names of the rollout correction's metrics."""


def _check_output(output: object, kind: str) -> None:
    """Raise ``ConfigError`` that names the loss, for an output that is no sum with a gradient."""
    try:
        check_loss_output(output)
    except ConfigError as error:
        raise ConfigError(
            "algorithm.loss",
            f"{kind} returned no sum over tokens ({error.field}: {error.what})",
            why=error.why,
            remedy="return LossOutput(loss=(tokens.weight * x).sum(), metrics={name: sum, …})",
        ) from error
    names = cast("LossOutput", output).metrics
    taken = [name for name in names if name in RESERVED or name.startswith(PREFIXES)]
    if taken:
        raise ConfigError(
            "algorithm.loss",
            f"{kind} returned a metric {taken[0]!r}, which is the trainer's own",
            remedy="give it another name",
        )


def _check(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"algorithm.{name}", f"{value!r} is out of range", remedy=remedy)
