"""Group advantages, which compare a completion with the other completions of its prompt.

All are functions of a ``[P, n]`` tensor of rewards, with one row per prompt and one column per
completion. The advantage of a completion is given to each of its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from engine_api.config import near_matches
from engine_api.errors import ConfigError

if TYPE_CHECKING:
    import torch

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"]


def group_advantages(
    rewards: torch.Tensor, estimator: Estimator = "grpo", eps: float = 1e-6
) -> torch.Tensor:
    """Return the advantages within each group.

    Args:
        rewards: ``[P, n]`` floating, n >= 2.
        estimator: with r a row, m its mean and s its standard deviation (Bessel's correction, as in
            verl and TRL), ``grpo``: (r - m) / (s + eps) (arXiv:2402.03300, section 4.1.2);
            ``dr_grpo``: r - m, which does not favour easy and hard prompts (arXiv:2503.20783,
            section 3.2); ``rloo``: r_i minus the mean of the others, n / (n - 1) · (r_i - m)
            (arXiv:2402.14740, eq. 8); ``reinforce_pp_baseline``: r - m, to be normalized over the
            tokens of the whole step (arXiv:2501.03262; see
            ``engine_trainer.algorithms.returns.whiten``).
        eps: keeps ``grpo`` finite; a reward difference of its order is no difference.

    Returns:
        ``[P, n]`` float32; exactly zero in a group whose rewards are all equal.

    Raises:
        ConfigError: for an unknown estimator, or n < 2, where no completion can be compared with
            another.
    """
    estimate = _ESTIMATORS.get(estimator)
    if estimate is None:
        raise ConfigError(
            "algorithm.advantage",
            f"unknown estimator {estimator!r}",
            remedy=near_matches(estimator, list(_ESTIMATORS)),
        )
    if rewards.shape[-1] < 2:
        raise ConfigError(
            "rollout.n",
            f"{rewards.shape[-1]} completion(s) a prompt",
            why="the completions of a prompt are compared with each other",
            remedy="draw at least 2",
        )
    # A mean in float32 leaves a rest that 1 / eps would magnify.
    rewards = rewards.double()
    advantages = estimate(rewards, eps)
    return advantages.masked_fill(is_flat(rewards)[:, None], 0.0).float()


def is_flat(rewards: torch.Tensor) -> torch.Tensor:
    """Return whether all rewards of each group are equal: ``[P, n]`` → ``[P]`` bool.

    A group with equal rewards has no advantages.
    """
    return rewards.amax(-1) == rewards.amin(-1)


def _grpo(rewards: torch.Tensor, eps: float) -> torch.Tensor:
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + eps)


def _dr_grpo(rewards: torch.Tensor, eps: float) -> torch.Tensor:
    del eps
    return rewards - rewards.mean(-1, keepdim=True)


def _rloo(rewards: torch.Tensor, eps: float) -> torch.Tensor:
    n = rewards.shape[-1]
    return n / (n - 1) * _dr_grpo(rewards, eps)


_ESTIMATORS = {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo, "reinforce_pp_baseline": _dr_grpo}
