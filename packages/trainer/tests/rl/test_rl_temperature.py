"""A step at a temperature that is not 1.

Every log-prob in it is of the distribution that was sampled from.
"""

from __future__ import annotations

import pytest
import torch
from rl_runs import configure, rows_of, tensors_of

from engine_trainer.rewards import register
from engine_trainer.rl.experience import collect_experience
from engine_trainer.rl.loop import train_rl

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TEMPERATURE = 0.7
RATE = 0.25
KL = 0.3


class Textbook:
    """GRPO in float64, one completion at a time, with logits divided by the temperature."""

    def __init__(self, folder, groups):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
        self.completions = [
            [
                (g.prompt.tokens, a, self.log_probs(g.prompt.tokens, a)[0].detach())
                for a in g.completions
            ]
            for g in groups
        ]

    def log_probs(self, prompt, answer):
        """Return ``[t]`` of the completion's tokens, and the entropies where they were drawn."""
        logits = self.model(input_ids=torch.tensor([[*prompt, *answer.tokens]])).logits[
            0, len(prompt) - 1 : -1
        ]
        rows = (logits / TEMPERATURE).log_softmax(-1)
        return rows.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0], -(
            rows.exp() * rows
        ).sum(-1).detach()

    def update(self, groups, kl: float, every: bool) -> torch.Tensor:
        """Apply plain SGD on the mean over the tokens of ``groups``.

        The entropies are of every completion, or of those with an advantage.
        """
        terms = []
        entropies = []
        count = 0
        for group in groups:
            rewards = torch.tensor([a.score.total for _, a, _ in group]).double()
            count += sum(len(a.tokens) for _, a, _ in group)
            for (prompt, answer, old), reward in zip(group, rewards, strict=True):
                advantage = (reward - rewards.mean()) / (rewards.std() + 1e-6)
                if every or advantage != 0:
                    now, entropy = self.log_probs(prompt, answer)
                    ratio = (now - old).exp()  # the reference is the policy before the step, too
                    gain = (advantage * ratio).minimum(advantage * ratio.clamp(0.8, 1.2))
                    terms.append((kl * ratio * (1 / ratio - 1 + (now - old)) - gain).sum())
                    entropies.append(entropy)
        self.model.zero_grad()
        (torch.stack(terms).sum() / count).backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(RATE * parameter.grad)
        return torch.cat(entropies)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"mini_batches": 2, "kl": {"coefficient": KL, "bound": None}},
        {"kl": {"coefficient": KL, "where": "reward"}},
    ],
    ids=["one update", "two updates and a KL in the loss", "a KL in the reward"],
)
def test_a_step_is_the_textbooks_at_another_temperature(
    sums_model, tmp_path, monkeypatch, algorithm
):
    out = tmp_path / "out"
    seen = []
    monkeypatch.setattr(
        "engine_trainer.rl.loop.collect_experience",
        lambda *a, **k: seen.append(collect_experience(*a, **k)) or seen[0],
    )
    # Quarters have exact means.
    register("quarters")(lambda: lambda s: s.completion.count("7") + s.completion.count("1") / 4)
    optimizer = {"name": "torch.optim.SGD", "lr": RATE, "clip_norm": None}
    train_rl(
        configure(
            sums_model,
            out,
            run={"steps": 1},
            reward={"name": "quarters"},
            rollout={"temperature": TEMPERATURE},
            engine={"model": {"path": str(sums_model)}, "device": "cpu", "optimizer": optimizer},
            algorithm={"prompts_per_step": 8, **algorithm},
        )
    )
    groups = seen[0].groups
    row = rows_of(out)[-1]
    updated = tensors_of(out / "hf")

    book = Textbook(sums_model, groups)
    # A KL in the reward is 0, because the reference still equals the policy.
    in_loss = KL if "mini_batches" in algorithm else 0.0
    size = len(groups) // algorithm.get("mini_batches", 1)
    entropies = [
        book.update(book.completions[start : start + size], in_loss, "kl" in algorithm)
        for start in range(0, len(groups), size)
    ]
    for name, parameter in book.model.named_parameters():
        torch.testing.assert_close(updated[name].double(), parameter.detach(), atol=4e-6, rtol=0)
    assert row["train/entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-4)
    assert row["mismatch/max"] < 1e-4  # and what the rollout says of itself is of that distribution
