"""The arguments of losses and advantages: packed tensors with all that one of them may want."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from engine_api.batch import Batch
from engine_api.losses import where_counted
from engine_api.results import TokenOutputs
from engine_trainer.algorithms.packed import document_of, sum_by_document


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """The tokens of one micro-batch, as a policy loss gets them.

    Documents are whole: none is divided over micro-batches or ranks. Every ``[T]`` tensor is 0
    where ``mask`` is false, whatever the batch holds there. A value at position t is about token t.

    Attributes:
        log_probs: ``[T]`` of the policy, with a gradient.
        old_log_probs: ``[T]`` of the policy before the step's updates, or of the rollout with
            ``algorithm.old_log_probs: rollout``. No gradient.
        advantages: ``[T]``.
        mask: ``[T]`` bool, true where a token carries loss.
        weight: ``[T]``, the factor of each token in the sum, at least 0: that of
            ``algorithm.aggregation`` times that of ``algorithm.correction``.
        cu_seqlens: ``[D+1]`` boundaries of the documents.
        denominator: the number by which the trainer divides the sum over all ranks, once; None
            where it is not known.
        rollout_log_probs: ``[T]`` as the rollout gave them, or None.
        ref_log_probs: ``[T]`` of the reference model, or None; see ``needs``.
        entropy: ``[T]`` nats, with a gradient, or None; see ``needs``.
        weight_versions: ``[T]`` integer, the version of the weights that made each token, or None;
            see ``needs``.
        version: the version of the weights that are trained, or None.
    """

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor
    cu_seqlens: torch.Tensor
    denominator: float | None = None
    rollout_log_probs: torch.Tensor | None = None
    ref_log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    weight_versions: torch.Tensor | None = None
    version: int | None = None

    @staticmethod
    def of(
        outputs: TokenOutputs,
        batch: Batch,
        *,
        on_policy: bool = False,
        corrected: bool = False,
        needs: tuple[str, ...] = (),
        denominator: float | None = None,
        version: int | None = None,
    ) -> PolicyTokens:
        """Return the tokens of a micro-batch.

        Args:
            outputs: of the engine, for ``batch``.
            batch: with ``loss_weight``, ``advantages``, ``old_log_probs`` unless ``on_policy``, and
                ``correction`` if ``corrected``.
            on_policy: the old log-probs are those of ``outputs``.
            corrected: multiply the weight by the field ``correction``.
            needs: fields that the batch must have.
            denominator: see the class.
            version: see the class.

        Raises:
            BatchError: a field is missing.
        """
        assert outputs.log_probs is not None
        weight = batch.loss_weight
        log_probs = where_counted(outputs.log_probs, weight)
        old = log_probs.detach() if on_policy else where_counted(batch["old_log_probs"], weight)

        def optional(name: str) -> torch.Tensor | None:
            if name not in batch.fields and name not in needs:
                return None
            return where_counted(batch[name], weight)

        entropy = outputs.entropy
        versions = None
        if "weight_versions" in needs:
            versions = batch["weight_versions"].masked_fill(weight <= 0, 0)
        return PolicyTokens(
            log_probs=log_probs,
            old_log_probs=old,
            advantages=where_counted(batch["advantages"], weight),
            mask=weight > 0,
            weight=weight * where_counted(batch["correction"], weight) if corrected else weight,
            cu_seqlens=batch.cu_seqlens,
            denominator=denominator,
            rollout_log_probs=optional("rollout_log_probs"),
            ref_log_probs=optional("ref_log_probs"),
            entropy=None if entropy is None else where_counted(entropy, weight),
            weight_versions=versions,
            version=version,
        )

    @property
    def log_ratio(self) -> torch.Tensor:
        """``[T]`` log π - log π_old, with a gradient."""
        return self.log_probs - self.old_log_probs

    @property
    def document(self) -> torch.Tensor:
        """``[T]`` int64, the document of each token."""
        return document_of(self.cu_seqlens, self.log_probs)

    def sum_by_document(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` ``[T]`` over each document: ``[D]``, differentiable."""
        return sum_by_document(values, self.cu_seqlens)


@dataclass(frozen=True, kw_only=True)
class Completions:
    """The completions of one step, as an advantage of whole completions gets them.

    A row is a prompt's group, a column one of its n completions. All ranks have the same numbers.

    Attributes:
        rewards: ``[P, n]`` float64: the weighted sum of the rewards, with the overlong penalty and
            the KL in the reward where there are any.
        parts: the single rewards ``[P, n]`` float64, by name, as the reward functions gave them.
        weights: the factor of each of ``parts`` in the sum.
        lengths: ``[P, n]`` int64, tokens of each completion; None where they are not known.
    """

    rewards: torch.Tensor
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    lengths: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class CreditTokens:
    """Packed completions, as an advantage of tokens gets them.

    Attributes:
        rewards: ``[T]`` float64: the completion's reward at its last token, less the KL in the
            reward at every token.
        mask: ``[T]``, above 0 where the policy chose the token.
        cu_seqlens: ``[D+1]`` boundaries of the documents.
        group: ``[D]`` int64, the prompt that each document answers.
        values: ``[T]`` of the critic, V before each token; None without a critic.
        old_log_probs: ``[T]`` of the policy before the step's updates, or None; see ``needs``.
    """

    rewards: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor
    group: torch.Tensor
    values: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
