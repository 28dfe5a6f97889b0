"""From the rewards of completions to an advantage for each token."""

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

Place = tuple[int, int]  # (group, place): the completion whose reward is rewards[group, place]


@dataclass(frozen=True, kw_only=True)
class Credit:
    """What one step's tokens have earned, a tensor ``[T]`` float32 for each share that is held; 0 where a token does not count.

    Attributes:
        advantages: for the policy.
        returns: for the critic; empty without one.
        figures: ``train/kl`` (nats a completion, of the policy to the reference) and ``train/kl_coefficient``, with a KL
            in the reward.
    """

    advantages: list[torch.Tensor]
    returns: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    figures: dict[str, float] = field(default_factory=dict[str, float])


class CreditAssignment:
    """Advantages as ``algorithm`` says, with the KL in the reward and its coefficient.

    Attributes:
        kl_coefficient: of the next step; with ``algorithm.kl.target`` a state that a resumed run needs.
    """

    def __init__(self, algorithm: AlgorithmSection, policy: EngineGroup) -> None:
        self.algorithm, self.policy = algorithm, policy
        self.kl_coefficient = algorithm.kl.coefficient if algorithm.kl.where == "reward" else 0.0

    @property
    def kl_in_reward(self) -> bool:
        """Whether rewards are lowered by the KL; shares then need ``old_log_probs`` and ``ref_log_probs``."""
        return self.kl_coefficient > 0

    @property
    def zero_stays_zero(self) -> bool:
        """Whether a completion that ``before`` gives no advantage has none in the end."""
        return not (self.kl_in_reward or self.algorithm.by_token or self.algorithm.whitened)

    def before(self, rewards: torch.Tensor) -> torch.Tensor:
        """``[P, n]``: advantages of whole completions from their rewards alone; only where ``zero_stays_zero``."""
        assert self.zero_stays_zero, "other tokens' advantages are not known from the rewards"
        return self._by_group(rewards)

    def assign(
        self,
        shares: Sequence[Batch],
        places: Sequence[Sequence[Place]],
        rewards: torch.Tensor,
        values: Sequence[torch.Tensor],
    ) -> Credit:
        """Advantages for the tokens of all shares; on all processes of the loop together.

        Args:
            shares: packed completions with ``mask``.
            places: which completion each document of each share is.
            rewards: ``[P, n]`` float64, the same everywhere.
            values: of the critic, ``[T]`` a share, for ``gae``; empty without one.
        """
        kl = [self._kl(share) for share in shares] if self.kl_in_reward else None
        sums = self._kl_sums(shares, places, kl) if kl else {}
        returns: list[torch.Tensor] = []
        if self.algorithm.by_token:
            advantages, returns = self._by_token(shares, places, rewards, values, kl)
        else:
            whole = self._by_group(rewards - self._penalties(sums, rewards.shape))
            advantages = [
                _spread(whole, share, place) for share, place in zip(shares, places, strict=True)
            ]
        if self.algorithm.whitened:
            advantages = self._whitened(advantages, shares)
        return Credit(
            advantages=[a.float() for a in advantages],
            returns=[r.float() for r in returns],
            figures=self._adapt(sums) if kl else {},
        )

    # --- inside ---------------------------------------------------------------------------------

    def _by_group(self, rewards: torch.Tensor) -> torch.Tensor:
        estimator = self.algorithm.advantage
        assert estimator not in ("gae", "reinforce_pp"), "these are of tokens"
        return group_advantages(rewards, estimator)

    def _by_token(
        self,
        shares: Sequence[Batch],
        places: Sequence[Sequence[Place]],
        rewards: torch.Tensor,
        values: Sequence[torch.Tensor],
        kl: Sequence[torch.Tensor] | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        advantages: list[torch.Tensor] = []
        returns: list[torch.Tensor] = []
        for k, (share, place) in enumerate(zip(shares, places, strict=True)):
            mask, cu = share["mask"], share.cu_seqlens
            scores = _scores(rewards, place)
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
        self, advantages: Sequence[torch.Tensor], shares: Sequence[Batch]
    ) -> list[torch.Tensor]:
        parts = [Moments.of(a, s["mask"]) for a, s in zip(advantages, shares, strict=True)]
        whole = Moments.merge(self.policy.gather(parts))
        return [whiten(a, s["mask"], whole) for a, s in zip(advantages, shares, strict=True)]

    def _kl(self, share: Batch) -> torch.Tensor:
        return kl_divergence(
            share["old_log_probs"], share["ref_log_probs"], self.algorithm.kl.chosen
        )

    def _kl_sums(
        self, shares: Sequence[Batch], places: Sequence[Sequence[Place]], kl: Sequence[torch.Tensor]
    ) -> dict[Place, float]:
        """Σ KL over each completion's tokens, of all ranks."""
        own: list[dict[Place, float]] = []
        for share, place, x in zip(shares, places, kl, strict=True):
            counted = where_counted(x, share["mask"]).double()
            own.append(
                dict(zip(place, sum_by_document(counted, share.cu_seqlens).tolist(), strict=True))
            )
        return {place: value for row in self.policy.gather(own) for place, value in row.items()}

    def _penalties(self, sums: Mapping[Place, float], shape: Sequence[int]) -> torch.Tensor:
        penalties = torch.zeros(*shape, dtype=torch.float64)
        for place, value in sums.items():
            penalties[place] = self.kl_coefficient * value
        return penalties

    def _adapt(self, sums: Mapping[Place, float]) -> dict[str, float]:
        """The figures of this step; the coefficient is that of the next one afterwards."""
        mean = math.fsum(sums[place] for place in sorted(sums)) / max(1, len(sums))
        figures = {"train/kl": mean, "train/kl_coefficient": self.kl_coefficient}
        section = self.algorithm.kl
        if section.target is not None and sums:
            self.kl_coefficient = next_coefficient(
                self.kl_coefficient, mean, target=section.target, gain=section.gain
            )
        return figures


def _scores(rewards: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
    """``[D]``: the rewards of a share's documents."""
    return torch.stack([rewards[place] for place in places]) if places else rewards.new_zeros(0)


def _spread(advantages: torch.Tensor, share: Batch, places: Sequence[Place]) -> torch.Tensor:
    own = torch.repeat_interleave(
        _scores(advantages, places), torch.tensor(share.lengths, dtype=torch.int64)
    )
    return own * share["mask"]
