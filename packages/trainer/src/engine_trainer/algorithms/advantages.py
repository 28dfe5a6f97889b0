"""The built-in advantages: of a group's completions, and of tokens.

Group advantages compare a completion with the other completions of its prompt. They are functions
of a ``[P, n]`` tensor of rewards, with one row per prompt and one column per completion. The
advantage of a completion is given to each of its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_api.errors import ConfigError
from engine_trainer.algorithms.inputs import Completions, CreditTokens
from engine_trainer.algorithms.returns import gae, returns_to_go
from engine_trainer.extensions.built_in import ADVANTAGES

if TYPE_CHECKING:
    import torch

EPS = 1e-6
"""Keeps a division by a standard deviation finite; a reward difference of its order is none."""


def group_advantages(
    rewards: torch.Tensor, estimator: str = "grpo", eps: float = EPS
) -> torch.Tensor:
    """Return the advantages within each group.

    Args:
        rewards: ``[P, n]`` floating, n >= 2.
        estimator: a built-in advantage of whole completions: ``grpo``, ``dr_grpo``, ``rloo`` or
            ``reinforce_pp_baseline``, which is ``dr_grpo`` to be normalized over the tokens of the
            whole step (arXiv:2501.03262; see ``engine_trainer.algorithms.returns.whiten``).
        eps: see ``grpo``.

    Returns:
        ``[P, n]`` float32; exactly zero in a group whose rewards are all equal.

    Raises:
        ConfigError: for an unknown estimator, or n < 2, where no completion can be compared with
            another.
    """
    function = ADVANTAGES.function(estimator)
    options = {"eps": eps} if "eps" in ADVANTAGES.parameters(estimator) else {}
    return function(Completions(rewards=rewards), **options)


def grpo(completions: Completions, *, eps: float = EPS) -> torch.Tensor:
    """Return (r - m) / (s + eps) with m the group's mean and s its standard deviation.

    arXiv:2402.03300, section 4.1.2; s with Bessel's correction, as in verl and TRL.
    """
    rewards = _comparable(completions.rewards)
    centred = rewards - rewards.mean(-1, keepdim=True)
    return _without_flat(rewards, centred / (rewards.std(-1, keepdim=True) + eps))


def dr_grpo(completions: Completions) -> torch.Tensor:
    """Return r - m, which does not favour easy and hard prompts (arXiv:2503.20783, 3.2)."""
    rewards = _comparable(completions.rewards)
    return _without_flat(rewards, rewards - rewards.mean(-1, keepdim=True))


def rloo(completions: Completions) -> torch.Tensor:
    """Return r_i minus the mean of the others, n / (n - 1) · (r_i - m).

    arXiv:2402.14740, eq. 8.
    """
    rewards = _comparable(completions.rewards)
    n = rewards.shape[-1]
    return _without_flat(rewards, n / (n - 1) * (rewards - rewards.mean(-1, keepdim=True)))


def reinforce_pp(tokens: CreditTokens, *, gamma: float = 1.0) -> torch.Tensor:
    """Return the reward less the KL from each token on (arXiv:2501.03262)."""
    return returns_to_go(tokens.rewards, tokens.mask, tokens.cu_seqlens, gamma)


def gae_advantage(
    tokens: CreditTokens, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return generalized advantage estimates and the critic's targets.

    arXiv:1506.02438, eq. 16.
    """
    assert tokens.values is not None
    return gae(tokens.rewards, tokens.values, tokens.mask, tokens.cu_seqlens, gamma=gamma, lam=lam)


def is_flat(rewards: torch.Tensor) -> torch.Tensor:
    """Return whether all rewards of each group are equal: ``[P, n]`` → ``[P]`` bool.

    A group with equal rewards has no advantages.
    """
    return rewards.amax(-1) == rewards.amin(-1)


def _comparable(rewards: torch.Tensor) -> torch.Tensor:
    if rewards.shape[-1] < 2:
        raise ConfigError(
            "rollout.n",
            f"{rewards.shape[-1]} completion(s) a prompt",
            why="the completions of a prompt are compared with each other",
            remedy="draw at least 2",
        )
    # A mean in float32 leaves a rest that 1 / eps would magnify.
    return rewards.double()


def _without_flat(rewards: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return advantages.masked_fill(is_flat(rewards)[:, None], 0.0).float()
