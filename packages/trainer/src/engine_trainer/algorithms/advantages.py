"""The built-in advantages: of a group's completions, and of tokens.

Group advantages compare a completion with the other completions of its prompt. They are functions
of a ``[P, n]`` tensor of rewards, with one row per prompt and one column per completion. The
advantage of a completion is given to each of its tokens.
"""

from __future__ import annotations

import torch

from engine_api.errors import ConfigError
from engine_trainer.algorithms.inputs import Completions, CreditTokens
from engine_trainer.algorithms.packed import document_of
from engine_trainer.algorithms.returns import gae, returns_to_go
from engine_trainer.extensions.built_in import ADVANTAGES

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


def grpo_batch(completions: Completions, *, eps: float = EPS) -> torch.Tensor:
    """Return (r - m) / (s + eps) with s the standard deviation over all rewards of the step.

    arXiv:2508.08221, section 4.1 (TRL's ``scale_rewards="batch"``): a group in which rewards hardly
    differ is not blown up. s with Bessel's correction.
    """
    rewards = _comparable(completions.rewards)
    centred = rewards - rewards.mean(-1, keepdim=True)
    return _without_flat(rewards, centred / (rewards.std() + eps))


def gdpo(completions: Completions, *, eps: float = EPS) -> torch.Tensor:
    """Return the sum of each reward's own group advantage, normalized over the step.

    Group reward-decoupled normalization, arXiv:2601.05242 (TRL's ``normalize_then_sum``): A_k =
    (r_k - m_k) / (s_k + eps) within the group for each reward k, A = Σ_k weight_k A_k, and the
    result (A - mean) / (std + eps) over all completions of the step, with Bessel's correction.

    What is added to the total alone (the overlong penalty, a KL in the reward) counts as one more
    reward with the weight 1.
    """
    total = _comparable(completions.rewards)
    objectives = [(completions.weights.get(n, 1.0), r) for n, r in completions.parts.items()]
    rest = total - sum(weight * reward.double() for weight, reward in objectives)
    # A rest of the order of rounding is none.
    if not objectives or float(rest.abs().max()) > 1e-9 * max(1.0, float(total.abs().max())):
        objectives.append((1.0, rest))
    summed = total.new_zeros(total.shape)
    for weight, reward in objectives:
        own = reward.double()
        centred = (own - own.mean(-1, keepdim=True)) / (own.std(-1, keepdim=True) + eps)
        summed = summed + weight * centred.masked_fill(is_flat(own)[:, None], 0.0)
    return ((summed - summed.mean()) / (summed.std() + eps)).float()


def optimal_token_baseline(tokens: CreditTokens, *, zero_tail: bool = True) -> torch.Tensor:
    """Return G_t - B_t, with the optimal baseline of each position within the group.

    arXiv:2602.07078: B_t = Σ_i G_t W_t / Σ_i W_t over the completions i of the prompt that have a
    t-th token, with G_t the reward from t on and W_t = Σ_{j≤t} w_j the energy of the gradient so
    far. The paper's proxy of a token's energy is w = 1 - 2 π(y) + Σ_v π(v)². An engine reports no
    Σ π², so its estimate from the one sampled token takes its place: E_y π(y) = Σ π². Then w = 1 -
    π(y), of the same expectation and never negative.

    ``zero_tail``: where a single completion of the group is left, its baseline is 0, as in verl,
    not its own G_t, with which those tokens would learn nothing.
    """
    assert tokens.old_log_probs is not None
    at = (tokens.mask > 0).nonzero()[:, 0]
    document = document_of(tokens.cu_seqlens)[at]
    counts = torch.bincount(document, minlength=len(tokens.group))
    position = torch.arange(len(at)) - (counts.cumsum(0) - counts)[document]
    # One number for each document and position, 0 where a document has no such token.
    shape = (len(tokens.group), int(counts.max()) if len(counts) else 0)
    gain, energy, alive = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    gain[document, position] = returns_to_go(tokens.rewards, tokens.mask, tokens.cu_seqlens)[at]
    energy[document, position] = 1 - tokens.old_log_probs[at].double().exp()
    alive[document, position] = 1.0
    energy = energy.cumsum(1) * alive
    _, group = tokens.group.unique(return_inverse=True)
    size = (int(group.max()) + 1 if len(group) else 0, shape[1])

    def over_group(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(size).index_add(0, group, values)[group]

    total = over_group(energy)
    baseline = over_group(gain * energy) / total.where(total > 0, 1.0)
    if zero_tail:
        baseline = baseline.masked_fill(over_group(alive) < 2, 0.0)
    found = torch.zeros(tokens.mask.shape, dtype=torch.float64)
    found[at] = (gain - baseline)[document, position]
    return found


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
