"""Credit assignment, from the rewards of completions to an advantage for each token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine_api.batch import Batch
from engine_api.errors import ConfigError, kind_of
from engine_api.losses import where_counted
from engine_trainer.algorithms.inputs import Completions, CreditTokens
from engine_trainer.algorithms.kl_controller import next_coefficient
from engine_trainer.algorithms.losses import kl_divergence
from engine_trainer.algorithms.packed import sum_by_document
from engine_trainer.algorithms.returns import Moments, token_rewards, whiten
from engine_trainer.config.algorithm import ADVANTAGE_KEYS, AlgorithmSection
from engine_trainer.extensions.built_in import ADVANTAGES
from engine_trainer.placement.groups import EngineGroup

# Per-token fields of ``CreditTokens``.
PER_TOKEN = ("rewards", "mask", "values", "old_log_probs")
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

    @property
    def reads_old_log_probs(self) -> bool:
        """True if shards need ``old_log_probs``."""
        return self.kl_in_reward or "old_log_probs" in self.algorithm.advantage_traits.needs

    def before(self, completions: Completions) -> torch.Tensor:
        """Return the advantages ``[P, n]`` of whole completions from their rewards alone.

        Only where ``zero_stays_zero``.
        """
        assert self.zero_stays_zero, "other tokens' advantages are not known from the rewards"
        return self._by_group(completions)

    def assign(
        self,
        shards: Sequence[Batch],
        indices: Sequence[Sequence[CompletionIndex]],
        completions: Completions,
        values: Sequence[torch.Tensor],
    ) -> Credit:
        """Return the advantages of the tokens of all dp shards.

        Called on all processes of the loop together.

        Args:
            shards: packed completions with ``mask``.
            indices: for each shard, the completion that each of its documents is.
            completions: the rewards of the step, the same on all processes.
            values: the critic's, ``[T]`` per shard, for ``gae``; empty without a critic.
        """
        if not self.algorithm.reads_rewards:
            return Credit(advantages=[torch.zeros_like(shard["mask"]) for shard in shards])
        rewards = completions.rewards
        kl = [self._kl(shard) for shard in shards] if self.kl_in_reward else None
        sums = self._kl_sums(shards, indices, kl) if kl else {}
        returns: list[torch.Tensor] = []
        level = self.algorithm.advantage_traits.level
        if level == "completion":
            penalized = rewards - self._penalties(sums, rewards.shape)
            whole = self._by_group(replace(completions, rewards=penalized))
            advantages = [
                _spread(whole, shard, index) for shard, index in zip(shards, indices, strict=True)
            ]
        else:
            tokens = self._tokens(shards, indices, rewards, values, kl)
            if level == "token":
                results = [self._by_token(shard) for shard in tokens]
            else:
                results = self._by_step(tokens, indices)
            advantages = [own for own, _ in results]
            returns = [target for _, target in results if target is not None]
        if self.algorithm.whitened:
            advantages = self._whitened(advantages, shards)
        return Credit(
            advantages=[a.float() for a in advantages],
            returns=[r.float() for r in returns],
            figures=self._adapt(sums) if kl else {},
        )

    # --- inside ---------------------------------------------------------------------------------

    def _call(self, inputs: Completions | CreditTokens) -> Any:
        """Return what the advantage's function returns."""
        name = self.algorithm.advantage
        keys = {
            key: getattr(self.algorithm, key)
            for key in ADVANTAGE_KEYS
            if ADVANTAGES.reads(name, key)
        }
        return ADVANTAGES.function(name)(inputs, **keys, **self.algorithm.advantage_options)

    def _by_group(self, completions: Completions) -> torch.Tensor:
        """Return the advantages of whole completions, ``[P, n]``."""
        result = self._call(completions)
        return self._checked(result, completions.rewards.shape)

    def _by_token(self, tokens: CreditTokens) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the advantages ``[T]``, and with a critic its targets ``[T]``."""
        result = self._call(tokens)
        shape = tokens.mask.shape
        if not self.algorithm.advantage_traits.critic:
            return self._checked(result, shape), None
        if not isinstance(result, tuple) or len(result) != 2:
            raise ConfigError(
                "algorithm.advantage",
                f"expected {self.algorithm.advantage} to return two tensors, got {kind_of(result)}",
                why="it says that it has a critic (critic=True)",
                remedy="return (advantages, targets of the critic)",
            )
        own, target = result
        return self._checked(own, shape), self._checked(target, shape)

    def _checked(self, result: object, shape: torch.Size) -> torch.Tensor:
        """Return the result of the advantage's function, or raise ``ConfigError``."""
        got = kind_of(result)
        if isinstance(result, torch.Tensor):
            if result.shape == shape and result.is_floating_point():
                return result
            got = f"one of {result.dtype} with the shape {tuple(result.shape)}"
        raise ConfigError(
            "algorithm.advantage",
            f"expected {self.algorithm.advantage} to return a floating tensor with the shape "
            f"{tuple(shape)}, got {got}",
            why=f"its level is {self.algorithm.advantage_traits.level!r}",
            remedy="return one number for each completion or token of its argument; "
            "@advantage(level=…) says which of the two",
        )

    def _tokens(
        self,
        shards: Sequence[Batch],
        indices: Sequence[Sequence[CompletionIndex]],
        rewards: torch.Tensor,
        values: Sequence[torch.Tensor],
        kl: Sequence[torch.Tensor] | None,
    ) -> list[CreditTokens]:
        """Return the tokens of each shard, with their rewards."""
        found: list[CreditTokens] = []
        for k, (shard, index) in enumerate(zip(shards, indices, strict=True)):
            mask = shard["mask"]
            cu = shard.cu_seqlens
            earned = token_rewards(
                _scores(rewards, index),
                mask,
                cu,
                kl=kl[k] if kl else None,
                coefficient=self.kl_coefficient,
            )
            reads = "old_log_probs" in self.algorithm.advantage_traits.needs
            found.append(
                CreditTokens(
                    rewards=earned,
                    mask=mask,
                    cu_seqlens=cu,
                    group=torch.tensor([group for group, _ in index], dtype=torch.int64),
                    values=where_counted(values[k], mask) if values else None,
                    old_log_probs=where_counted(shard["old_log_probs"], mask) if reads else None,
                )
            )
        return found

    def _by_step(
        self, shards: Sequence[CreditTokens], indices: Sequence[Sequence[CompletionIndex]]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the advantages of each shard, from all completions of the step in their order."""
        parts = [_documents(s, index) for s, index in zip(shards, indices, strict=True)]
        rows = self.policy.gather(parts)
        documents = {index: fields for row in rows for index, fields in row.items()}
        order = sorted(documents)
        whole = _packed_tokens([documents[index] for index in order], order)
        advantages, targets = self._by_token(whole)
        lengths = [len(documents[index]["mask"]) for index in order]
        own = dict(zip(order, advantages.split(lengths), strict=True))
        target = {} if targets is None else dict(zip(order, targets.split(lengths), strict=True))

        return [(_select(own, i), _select(target, i) if target else None) for i in indices]

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


def _documents(
    tokens: CreditTokens, indices: Sequence[CompletionIndex]
) -> dict[CompletionIndex, dict[str, torch.Tensor]]:
    """Return the per-token numbers of each completion of a shard."""
    fields = {name: getattr(tokens, name) for name in PER_TOKEN}
    bounds = tokens.cu_seqlens.tolist()
    return {
        index: {name: value[a:b] for name, value in fields.items() if value is not None}
        for index, a, b in zip(indices, bounds, bounds[1:], strict=False)
    }


def _select(
    found: Mapping[CompletionIndex, torch.Tensor], indices: Sequence[CompletionIndex]
) -> torch.Tensor:
    """Return the numbers of these completions one after another, ``[T]`` float64."""
    nothing = torch.zeros(0, dtype=torch.float64)
    return torch.cat([nothing, *(found[index].double() for index in indices)])


def _packed_tokens(
    documents: Sequence[Mapping[str, torch.Tensor]], order: Sequence[CompletionIndex]
) -> CreditTokens:
    """Return the tokens of completions, packed in this order."""
    ends = torch.tensor([0, *(len(d["mask"]) for d in documents)], dtype=torch.int64).cumsum(0)
    names = documents[0] if documents else ("rewards", "mask")
    fields = {
        name: torch.cat([d[name] for d in documents]) if documents else torch.zeros(0)
        for name in names
    }
    group = torch.tensor([group for group, _ in order], dtype=torch.int64)
    return CreditTokens(cu_seqlens=ends, group=group, **fields)  # pyright: ignore[reportArgumentType]


def _spread(
    advantages: torch.Tensor, shard: Batch, indices: Sequence[CompletionIndex]
) -> torch.Tensor:
    own = torch.repeat_interleave(
        _scores(advantages, indices), torch.tensor(shard.lengths, dtype=torch.int64)
    )
    return own * shard["mask"]
