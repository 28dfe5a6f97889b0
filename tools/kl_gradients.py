"""Write the table of KL gradients in docs/algorithms.md.

With ``--check``, check that the table is current instead.

Every expected gradient is computed exactly: a tabular policy over a few tokens, all sequences of
``LENGTH`` tokens in one batch, each weighted with the probability that the sampler draws it, and
the trainer's own loss and reward functions in float64.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from matrix import ROOT, replace_section, table, write_or_check

from engine_api.batch import Batch
from engine_api.errors import ConfigError
from engine_api.results import TokenOutputs
from engine_trainer.algorithms.correction import correct, ratios
from engine_trainer.algorithms.losses import ESTIMATORS, Estimator, PolicyLoss, kl_divergence
from engine_trainer.algorithms.returns import returns_to_go, token_rewards
from engine_trainer.config import CorrectionSection, KLSection

PAGE = ROOT / "docs" / "algorithms.md"
TOKENS, LENGTH = 3, 3
SEQUENCES = tuple(itertools.product(range(TOKENS), repeat=LENGTH))
PREFIXES = tuple(
    prefix for size in range(LENGTH) for prefix in itertools.product(range(TOKENS), repeat=size)
)
WITHOUT_BOUNDS = CorrectionSection(weight="token", cap=math.inf)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A policy to train, a policy that draws its samples, and a reference.

    Attributes:
        logits: ``[PREFIXES, TOKENS]`` of the policy; requires a gradient.
        sampler: the same of the policy that drew the samples; on policy they are equal.
        reference: the same of the reference.
    """

    logits: torch.Tensor
    sampler: torch.Tensor
    reference: torch.Tensor

    @staticmethod
    def of(distance: float, *, drift: float = 0.0) -> Problem:
        """Build a problem.

        ``distance`` scales how far policy and reference are apart, ``drift`` policy and sampler.
        """
        shape = (len(PREFIXES), TOKENS)
        reference, step, moved = (
            torch.sin(
                frequency * torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64)
            ).view(shape)
            for frequency in (1.3, 2.9, 4.7)
        )
        logits = reference + distance * step
        return Problem(
            logits=logits.clone().requires_grad_(),
            sampler=logits + drift * moved,
            reference=reference,
        )

    def batch(self, old: torch.Tensor | None = None, **fields: torch.Tensor) -> Batch:
        """Return all sequences, one document each, weighted by the sampler's probabilities.

        ``old`` are the logits of the policy that the ratio is taken against; by default the
        sampler's.
        """
        sampled = token_log_probs(self.sampler)
        probability = _by_sequence(sampled).sum(-1).exp()
        mask = _packed(torch.ones(len(SEQUENCES), LENGTH, dtype=torch.float64))
        documents = len(SEQUENCES)
        return Batch(
            input_ids=torch.tensor([token for sequence in SEQUENCES for token in (0, *sequence)]),
            cu_seqlens=torch.arange(documents + 1) * (LENGTH + 1),
            fields={
                "mask": mask,
                "loss_weight": _packed(probability[:, None].expand(-1, LENGTH)),
                "advantages": torch.zeros_like(mask),
                "old_log_probs": token_log_probs(self.sampler if old is None else old),
                "rollout_log_probs": sampled,
                "ref_log_probs": token_log_probs(self.reference),
                **fields,
            },
        )

    def gradient(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the flat gradient of a function of the log-probs ``[T]`` by the logits."""
        return torch.autograd.grad(loss(token_log_probs(self.logits)), self.logits)[0].flatten()

    # --- the gradients that a penalty may have ----------------------------------------------------

    def tokens_kl(self, *, reverse: bool = False) -> torch.Tensor:
        """Return the gradient of the tokens' KL(policy ‖ reference), at the sampler's prefixes.

        With ``reverse``, it is the gradient of KL(reference ‖ policy).
        """
        before = torch.stack([_prefix_probability(self.sampler, prefix) for prefix in PREFIXES])
        policy, reference = self.logits.log_softmax(-1), self.reference.log_softmax(-1)
        one, other = (reference, policy) if reverse else (policy, reference)
        whole = (before * (one.exp() * (one - other)).sum(-1)).sum()
        return torch.autograd.grad(whole, self.logits)[0].flatten()

    def sequence_kl(self) -> torch.Tensor:
        """Return the gradient of KL(policy ‖ reference) of sequences, in nats per completion."""
        return torch.autograd.grad(self.divergence(), self.logits)[0].flatten()

    def divergence(self) -> torch.Tensor:
        """Return KL(policy ‖ reference) of whole sequences, in nats."""
        own = _by_sequence(token_log_probs(self.logits)).sum(-1)
        other = _by_sequence(token_log_probs(self.reference)).sum(-1)
        return (own.exp() * (own - other)).sum()

    # --- the gradients that the trainer's functions have ------------------------------------------

    def in_loss(
        self,
        estimator: Estimator,
        *,
        importance: bool,
        old: torch.Tensor | None = None,
        corrected: bool = False,
    ) -> torch.Tensor:
        """Return the expected gradient of a KL in the loss, with ``old`` as in ``batch``."""
        batch = self.batch(old)
        if corrected:
            given = ratios(
                batch["old_log_probs"], batch["rollout_log_probs"], batch["mask"], batch.cu_seqlens
            )
            weights = correct(given, WITHOUT_BOUNDS).weights
            batch = batch.with_computed(correction=weights)
        loss = PolicyLoss(
            kl_coef=1.0,
            kl_estimator=estimator,
            kl_importance=importance,
            kl_bound=None,
            corrected=corrected,
        )
        return self.gradient(lambda log_probs: loss(TokenOutputs(log_probs=log_probs), batch).loss)

    def in_reward(self, estimator: Estimator, *, by_token: bool = True) -> torch.Tensor:
        """Return the expected gradient of a KL that is subtracted from the reward, undiscounted.

        With ``by_token``, it is subtracted from each token's reward, so that a token is blamed for
        its own KL and that of later tokens. Without, the completion's sum is subtracted from the
        completion's reward.
        """
        batch = self.batch()
        kl = kl_divergence(batch["old_log_probs"], batch["ref_log_probs"], estimator)
        nothing = torch.zeros(len(SEQUENCES), dtype=torch.float64)
        rewards = token_rewards(nothing, batch["mask"], batch.cu_seqlens, kl=kl, coefficient=1.0)
        if by_token:
            advantages = returns_to_go(rewards, batch["mask"], batch.cu_seqlens)
        else:
            advantages = _packed(_by_sequence(rewards).sum(-1, keepdim=True).expand(-1, LENGTH))
        batch = batch.with_fields(advantages=advantages)
        loss = PolicyLoss(clip_low=1.0, clip_high=math.inf)  # never clipped
        return self.gradient(lambda log_probs: loss(TokenOutputs(log_probs=log_probs), batch).loss)


def token_log_probs(logits: torch.Tensor) -> torch.Tensor:
    """Return the packed log-prob of every token of every sequence, 0 at each document's first."""
    log_probs = logits.log_softmax(-1)
    rows = [[log_probs[PREFIXES.index(s[:t]), s[t]] for t in range(LENGTH)] for s in SEQUENCES]
    return _packed(torch.stack([torch.stack(row) for row in rows]))


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Return ``[SEQUENCES, LENGTH]`` flat, with a 0 before each row."""
    return torch.cat([values.new_zeros(len(values), 1), values], dim=1).flatten()


def _by_sequence(packed: torch.Tensor) -> torch.Tensor:
    return packed.view(len(SEQUENCES), LENGTH + 1)[:, 1:]


def _prefix_probability(logits: torch.Tensor, prefix: tuple[int, ...]) -> torch.Tensor:
    log_probs = logits.detach().log_softmax(-1)
    steps = [log_probs[PREFIXES.index(prefix[:t]), prefix[t]] for t in range(len(prefix))]
    return torch.stack([*steps, log_probs.new_zeros(())]).sum().exp()


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the cosine of the angle between two vectors, NaN where one of them is 0."""
    sizes = one.norm() * other.norm()
    return float(one @ other / sizes) if sizes > 1e-15 else math.nan


# --- the table -----------------------------------------------------------------------------------

Where = Literal["reward", "loss"]
DISTANCES: Mapping[str, float] = {"near": 0.035, "far": 0.85}
DRIFT = 0.5
"""Distance of the policy from its sampler after an update, as a share of that to the reference."""


def problems() -> dict[tuple[str, str], Problem]:
    """Return the problems of the table by (distance, policy)."""
    return {
        (name, policy): Problem.of(distance, drift=drift)
        for name, distance in DISTANCES.items()
        for policy, drift in (("on", 0.0), ("off", DRIFT * distance))
    }


def settings() -> list[tuple[Where, Estimator, bool]]:
    """Return the rows of the table.

    A row is the place of the KL, its estimator, and whether the importance ratio multiplies it.
    """
    return [
        *[("reward", estimator, False) for estimator in ESTIMATORS],
        *[
            ("loss", estimator, importance)
            for importance in (True, False)
            for estimator in ESTIMATORS
        ],
    ]


def render() -> str:
    """Return the table."""
    found = problems()
    head = ("`where`", "`estimator`", "`importance`")
    head += tuple(f"{policy} policy, {name}" for name in DISTANCES for policy in ("on", "off"))
    rows: list[tuple[str, ...]] = []
    for where, estimator, importance in settings():
        cells = [_cell(problem, where, estimator, importance) for problem in found.values()]
        named = f"`{estimator}`"
        if not _accepted(where, estimator, importance):
            named += " (refused)"
        rows.append((where, named, {"reward": "", "loss": str(importance).lower()}[where], *cells))
    sizes = ", ".join(
        f"{name} {float(found[name, 'on'].divergence().detach()):.4f} nats" for name in DISTANCES
    )
    angles = ", ".join(
        f"{cosine(found[name, 'on'].tokens_kl(), found[name, 'on'].sequence_kl()):.3f} {name}"
        for name in DISTANCES
    )
    return (
        f"KL(π ‖ reference) of a completion of {LENGTH} tokens: {sizes}. "
        "Cosine of the tokens' and the completion's gradients:"
        f" {angles}.\n\n{table(head, rows)}"
    )


def _accepted(where: Where, estimator: Estimator, importance: bool) -> bool:
    """Return whether the configuration accepts the row."""
    try:
        KLSection(where=where, estimator=estimator, importance=importance or where == "reward")
    except ConfigError:
        return False
    return True


def _cell(problem: Problem, where: Where, estimator: Estimator, importance: bool) -> str:
    """Return cosine and relative length against the gradient that the row's place asks for."""
    if where == "reward":
        given, wanted = problem.in_reward(estimator), problem.sequence_kl()
    else:
        given, wanted = problem.in_loss(estimator, importance=importance), problem.tokens_kl()
    size = float(given.norm() / wanted.norm())
    if size < 1e-9:
        return "no gradient"
    return f"{cosine(given, wanted):.3f} × {size:.3f}"


def main() -> int:
    """Write the table into the page, or compare it."""
    return write_or_check(
        PAGE, replace_section(PAGE.read_text(), "KL gradients", render()), "kl_gradients.py"
    )


if __name__ == "__main__":
    sys.exit(main())
