"""Credit assignment, from the rewards of completions to an advantage for each token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine_api.batch import Batch
from engine_api.losses import where_counted
from engine_trainer.algorithms.advantages import group_advantages
from engine_trainer.algorithms.kl_controller import next_coefficient
from engine_trainer.algorithms.losses import kl_divergence
from engine_trainer.algorithms.packed import sum_by_document
from engine_trainer.algorithms.returns import Moments, gae, returns_to_go, token_rewards, whiten
from engine_trainer.config.algorithm import AlgorithmSection
from engine_trainer.placement.groups import EngineGroup

# (group, index) of the completion whose reward is rewards[group, index].
CompletionIndex = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The credit that one step's tokens have earned.

    Each tensor is ``[T]`` float32, one for each local dp shard, and 0 where a token does not count.

    Attributes:
        advantages: for the policy.
        returns: targets of the critic; empty without a critic.
        figures: with a KL in the reward ``train/kl`` (KL of the policy to the reference, nats per
            completion) and ``train/kl_coefficient``.
    """

    advantages: list[torch.Tensor]
    returns: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    figures: dict[str, float] = field(default_factory=dict[str, float])


class CreditAssignment:
    """The advantages that ``algorithm`` configures, with the KL in the reward and its coefficient.

    Attributes:
        kl_coefficient: coefficient of the next step; with ``algorithm.kl.target`` it is state that
            a resumed run needs.
    """

    def __init__(self, algorithm: AlgorithmSection, policy: EngineGroup) -> None:
        self.algorithm = algorithm
        self.policy = policy
        self.kl_coefficient = algorithm.kl.coefficient if algorithm.kl.where == "reward" else 0.0

    @property
    def kl_in_reward(self) -> bool:
        """True if rewards are lowered by the KL.

        Shards then need ``old_log_probs`` and ``ref_log_probs``.
        """
        return self.kl_coefficient > 0

    @property
    def zero_stays_zero(self) -> bool:
        """True if a completion without an advantage in ``before`` has none in the end."""
        return not (self.kl_in_reward or self.algorithm.by_token or self.algorithm.whitened)

    def before(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return the advantages ``[P, n]`` of whole completions from their rewards alone.

        Only where ``zero_stays_zero``.
        """
        assert self.zero_stays_zero, "other tokens' advantages are not known from the rewards"
        return self._by_group(rewards)

    def assign(
        self,
        shards: Sequence[Batch],
        indices: Sequence[Sequence[CompletionIndex]],
        rewards: torch.Tensor,
        values: Sequence[torch.Tensor],
    ) -> Credit:
        """Return the advantages of the tokens of all dp shards.

        Called on all processes of the loop together.

        Args:
            shards: packed completions with ``mask``.
            indices: for each shard, the completion that each of its documents is.
            rewards: ``[P, n]`` float64, the same on all processes.
            values: the critic's, ``[T]`` per shard, for ``gae``; empty without a critic.
        """
        kl = [self._kl(shard) for shard in shards] if self.kl_in_reward else None
        sums = self._kl_sums(shards, indices, kl) if kl else {}
        returns: list[torch.Tensor] = []
        if self.algorithm.by_token:
            advantages, returns = self._by_token(shards, indices, rewards, values, kl)
        else:
            whole = self._by_group(rewards - self._penalties(sums, rewards.shape))
            advantages = [
                _spread(whole, shard, index) for shard, index in zip(shards, indices, strict=True)
            ]
        if self.algorithm.whitened:
            advantages = self._whitened(advantages, shards)
        return Credit(
            advantages=[a.float() for a in advantages],
            returns=[r.float() for r in returns],
            figures=self._adapt(sums) if kl else {},
        )

    # --- inside ---------------------------------------------------------------------------------

    def _by_group(self, rewards: torch.Tensor) -> torch.Tensor:
        estimator = self.algorithm.advantage
        assert estimator not in ("gae", "reinforce_pp"), "these estimators are per token"
        return group_advantages(rewards, estimator)

    def _by_token(
        self,
        shards: Sequence[Batch],
        indices: Sequence[Sequence[CompletionIndex]],
        rewards: torch.Tensor,
        values: Sequence[torch.Tensor],
        kl: Sequence[torch.Tensor] | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        advantages: list[torch.Tensor] = []
        returns: list[torch.Tensor] = []
        for k, (shard, index) in enumerate(zip(shards, indices, strict=True)):
            mask = shard["mask"]
            cu = shard.cu_seqlens
            scores = _scores(rewards, index)
            earned = token_rewards(
                scores, mask, cu, kl=kl[k] if kl else None, coefficient=self.kl_coefficient
            )
            if self.algorithm.advantage == "gae":
                own, target = gae(
                    earned, values[k], mask, cu, gamma=self.algorithm.gamma, lam=self.algorithm.lam
                )
                returns.append(target)
            else:
                own = returns_to_go(earned, mask, cu, self.algorithm.gamma)
            advantages.append(own)
        return advantages, returns

    def _whitened(
        self, advantages: Sequence[torch.Tensor], shards: Sequence[Batch]
    ) -> list[torch.Tensor]:
        parts = [Moments.of(a, s["mask"]) for a, s in zip(advantages, shards, strict=True)]
        whole = Moments.merge(self.policy.gather(parts))
        return [whiten(a, s["mask"], whole) for a, s in zip(advantages, shards, strict=True)]

    def _kl(self, shard: Batch) -> torch.Tensor:
        return kl_divergence(
            shard["old_log_probs"], shard["ref_log_probs"], self.algorithm.kl.chosen
        )

    def _kl_sums(
        self,
        shards: Sequence[Batch],
        indices: Sequence[Sequence[CompletionIndex]],
        kl: Sequence[torch.Tensor],
    ) -> dict[CompletionIndex, float]:
        """Return Σ KL over each completion's tokens, for the completions of all ranks."""
        own: list[dict[CompletionIndex, float]] = []
        for shard, index, x in zip(shards, indices, kl, strict=True):
            counted = where_counted(x, shard["mask"]).double()
            own.append(
                dict(zip(index, sum_by_document(counted, shard.cu_seqlens).tolist(), strict=True))
            )
        return {index: value for row in self.policy.gather(own) for index, value in row.items()}

    def _penalties(
        self, sums: Mapping[CompletionIndex, float], shape: Sequence[int]
    ) -> torch.Tensor:
        penalties = torch.zeros(*shape, dtype=torch.float64)
        for index, value in sums.items():
            penalties[index] = self.kl_coefficient * value
        return penalties

    def _adapt(self, sums: Mapping[CompletionIndex, float]) -> dict[str, float]:
        """Return this step's figures, and set the coefficient of the next step."""
        mean = math.fsum(sums[index] for index in sorted(sums)) / max(1, len(sums))
        figures = {"train/kl": mean, "train/kl_coefficient": self.kl_coefficient}
        section = self.algorithm.kl
        if section.target is not None and sums:
            self.kl_coefficient = next_coefficient(
                self.kl_coefficient, mean, target=section.target, gain=section.gain
            )
        return figures


def _scores(rewards: torch.Tensor, indices: Sequence[CompletionIndex]) -> torch.Tensor:
    """Return the rewards ``[D]`` of a dp shard's documents."""
    return torch.stack([rewards[index] for index in indices]) if indices else rewards.new_zeros(0)


def _spread(
    advantages: torch.Tensor, shard: Batch, indices: Sequence[CompletionIndex]
) -> torch.Tensor:
    own = torch.repeat_interleave(
        _scores(advantages, indices), torch.tensor(shard.lengths, dtype=torch.int64)
    )
    return own * shard["mask"]
