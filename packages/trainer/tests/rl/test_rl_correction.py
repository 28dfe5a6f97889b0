"""The correction in a whole step.

The rollout's log-probs are of a different distribution, and the update must follow it.
"""

from __future__ import annotations

import json
import math

import pytest
import rollouts_with_defects
import torch

from engine_api.registry import RolloutRegistry
from engine_trainer.config import RLConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.rewards import register
from engine_trainer.rl.experience import collect_experience
from engine_trainer.rl.loop import train_rl

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LEARNING_RATE = 0.5


@pytest.fixture(autouse=True)
def shifted_rollout():
    RolloutRegistry.register(backend="shifted", device="cpu")(rollouts_with_defects.ShiftsLogProbs)
    register("mixed")(lambda: lambda s: s.completion.count("7") + s.completion.count("1") / 3)
    yield rollouts_with_defects
    RolloutRegistry.unregister("shifted")


def run(model, out, monkeypatch, *, correction=None, **algorithm):
    """Run one step of plain SGD and return (groups, row of metrics, weights after it).

    There are no weights unless ``correction`` says so.
    """
    from safetensors.torch import load_file

    seen = []
    monkeypatch.setattr(
        "engine_trainer.rl.loop.collect_experience",
        lambda *a, **k: seen.append(collect_experience(*a, **k)) or seen[0],
    )
    config = {
        "engine": {
            "model": {"path": str(model)},
            "device": "cpu",
            "memory": {"max_tokens": 64},  # several micro-batches
            "optimizer": {"name": "torch.optim.SGD", "lr": LEARNING_RATE, "clip_norm": None},
        },
        "data": {"source": str(model / "train.jsonl")},
        "run": {
            "output_dir": str(out),
            "steps": 1,
            "seed": 3,
            "progress": False,
            "report": False,
            "tensorboard": False,
        },
        "reward": {"name": "mixed", "workers": 0, "timeout_s": None},
        "rollout": {"name": "shifted", "n": 4, "max_new_tokens": 4},
        "algorithm": {
            "prompts_per_step": 8,
            "correction": {"weight": "none", **(correction or {})},
            **algorithm,
        },
    }
    train_rl(from_tree(RLConfig, config))
    return (
        seen[0].groups,
        json.loads((out / "metrics.jsonl").read_text()),
        load_file(out / "hf" / "model.safetensors"),
    )


def token_log_probs(model, prompt, tokens):
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


class Reference:
    """The same step in float64, one completion at a time."""

    def __init__(self, folder, groups):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
        self.completions = [
            [(g.prompt.tokens, a, self.of(g.prompt.tokens, a).detach()) for a in g.completions]
            for g in groups
        ]

    def of(self, prompt, answer):
        return token_log_probs(self.model, prompt, answer.tokens)

    def deltas(self):
        """Return Δ of the completions that are trained on.

        Those without an advantage are not computed.
        """
        means = [sum(a.score.total for _, a, _ in group) / len(group) for group in self.completions]
        return [
            old - torch.tensor(a.log_probs).double()
            for group, mean in zip(self.completions, means, strict=True)
            for _, a, old in group
            if abs(a.score.total - mean) > 1e-9
        ]

    def update(self, groups, factor, *, length=None):
        """Apply plain SGD, with ``factor(delta)`` as the tokens' factors.

        The denominator is the number of all tokens. With ``length`` it is Dr. GRPO's
        (arXiv:2503.20783): advantages are not divided by the deviation, and the sum is divided by
        this many tokens per completion.
        """
        loss = torch.zeros((), dtype=torch.float64)
        count = 0
        for group in groups:
            rewards = torch.tensor([a.score.total for _, a, _ in group]).double()
            for (prompt, answer, old), reward in zip(group, rewards, strict=True):
                count += length or len(answer.tokens)
                if rewards.std() > 1e-9:
                    advantage = (reward - rewards.mean()) / (
                        1.0 if length else rewards.std() + 1e-6
                    )
                    ratio = (self.of(prompt, answer) - old).exp()
                    held = (advantage * ratio).minimum(advantage * ratio.clamp(0.8, 1.2))
                    loss = (
                        loss - (factor(old - torch.tensor(answer.log_probs).double()) * held).sum()
                    )
        (loss / count).backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(LEARNING_RATE * parameter.grad)
                parameter.grad = None


def product(delta):
    return delta.sum().exp()


SETTINGS = {
    "the default": ({"weight": "auto"}, lambda d: d.exp().clamp(max=2.0)),
    "token": ({"weight": "token", "cap": 1.3}, lambda d: d.exp().clamp(max=1.3)),
    "sequence": (
        {"weight": "sequence", "cap": 1.5},
        lambda d: product(d).clamp(max=1.5).expand(len(d)),
    ),
    "icepop": (
        {"weight": "icepop", "low": 0.6, "high": 1.7},
        lambda d: d.exp() * (d.exp() > 0.6) * (d.exp() < 1.7),
    ),
    "reject token": (
        {"reject": "token", "reject_low": 0.6, "reject_high": 1.7},
        lambda d: (d.exp() > 0.6) * (d.exp() < 1.7) * 1.0,
    ),
    "reject sequence": (
        {"reject": "sequence", "reject_high": 1.7},
        lambda d: (0.5 < product(d) < 1.7) * torch.ones(len(d)),
    ),
    "token, reject geometric": (
        {
            "weight": "token",
            "cap": 1.3,
            "reject": "geometric",
            "reject_low": 0.81,
            "reject_high": 1.15,
        },
        lambda d: d.exp().clamp(max=1.3) * bool(0.81 < d.mean().exp() < 1.15),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_update_is_the_formulas(sums_model, tmp_path, monkeypatch, name, mini_batches):
    """Check the update on policy and off policy.

    Weights and rejection are of the log-probs before the first update, in every mini-batch.
    """
    correction, factor = SETTINGS[name]
    groups, row, updated = run(
        sums_model, tmp_path / "out", monkeypatch, correction=correction, mini_batches=mini_batches
    )
    reference = Reference(sums_model, groups)
    deltas = reference.deltas()
    factors = torch.cat([factor(d) * torch.ones(len(d)) for d in deltas])
    assert len(factors.round(decimals=6).unique()) > 1
    size = len(groups) // mini_batches
    for start in range(0, len(groups), size):
        reference.update(reference.completions[start : start + size], factor)
    for parameter, expected in reference.model.named_parameters():
        torch.testing.assert_close(
            updated[parameter].double(), expected.detach(), atol=4e-6, rtol=0
        )
    delta = torch.cat(deltas)
    assert row["mismatch/kl_k1"] == pytest.approx(float(-delta.mean()), abs=1e-5)
    assert row["mismatch/max"] == pytest.approx(0.8, abs=1e-4)
    assert row["mismatch/ess_token"] == pytest.approx(
        float(delta.exp().sum() ** 2 / delta.exp().square().sum() / len(delta)), rel=1e-4
    )
    if "weight" in correction and "reject" not in correction:
        units = factors if name != "sequence" else torch.stack([factor(d)[0] for d in deltas])
        assert row["correction/weight_mean"] == pytest.approx(float(units.mean()), rel=1e-4)
    if "weight" not in correction:
        assert row["correction/rejected_tokens"] == pytest.approx(
            float((factors == 0).double().mean())
        )


def test_without_correction_the_shift_changes_nothing_and_is_reported(
    sums_model, tmp_path, monkeypatch
):
    groups, row, updated = run(sums_model, tmp_path / "out", monkeypatch)
    reference = Reference(sums_model, groups)
    reference.update(reference.completions, torch.ones_like)
    for parameter, expected in reference.model.named_parameters():
        torch.testing.assert_close(
            updated[parameter].double(), expected.detach(), atol=4e-6, rtol=0
        )
    delta = torch.cat(reference.deltas())
    assert row["mismatch/rms"] == pytest.approx(float(delta.square().mean().sqrt()), rel=1e-4)
    assert not any(name.startswith("correction/") for name in row)


@pytest.mark.parametrize(("given", "length"), [({}, 4), ({"aggregation_length": 3}, 3)])
def test_a_step_of_dr_grpo_is_divided_by_a_constant(
    sums_model, tmp_path, monkeypatch, given, length
):
    """Check the default constant rollout.max_new_tokens."""
    algorithm = {"advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm", **given}
    groups, row, updated = run(sums_model, tmp_path / "out", monkeypatch, **algorithm)
    assert {len(a.tokens) for g in groups for a in g.completions} != {length}
    reference = Reference(sums_model, groups)
    reference.update(reference.completions, torch.ones_like, length=length)
    for parameter, expected in reference.model.named_parameters():
        torch.testing.assert_close(
            updated[parameter].double(), expected.detach(), atol=4e-6, rtol=0
        )
    assert row["train/grad_norm"] > 0


def test_rejecting_everything_is_no_update(sums_model, tmp_path, monkeypatch, shifted_rollout):
    from safetensors.torch import load_file

    monkeypatch.setattr(shifted_rollout, "shifted", lambda log_prob, token: log_prob - 2)
    correction = {"reject": "geometric"}
    _, row, updated = run(sums_model, tmp_path / "out", monkeypatch, correction=correction)
    assert row["correction/rejected_tokens"] == 1.0
    assert (row["train/updates"], row["train/skipped"]) == (0, 1)
    before = load_file(sums_model / "model.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in updated.items())


@pytest.mark.slow
def test_rejected_tokens_carry_no_kl_and_weighted_ones_do(sums_model, tmp_path, monkeypatch):
    """Check the KL figure, a mean over the tokens with loss.

    A weight of 0 leaves a token's KL, a rejection does not.
    """
    algorithm = {"kl": {"coefficient": 0.5}, "epochs": 2}
    tokens = {}
    for name, correction in {
        "none": {},
        "icepop": {"weight": "icepop", "low": 0.6, "high": 1.7},
        "reject": {"reject": "token", "reject_low": 0.6, "reject_high": 1.7},
    }.items():
        seen: list[float] = []
        monkeypatch.setattr(
            "engine_trainer.rl.learner._figures",
            lambda o, s=seen: s.append(o[0].metrics["tokens"]) or {},
        )
        _, row, _ = run(
            sums_model, tmp_path / name, monkeypatch, correction=correction, **algorithm
        )
        tokens[name] = seen[0]
    assert tokens["icepop"] == tokens["none"]
    share = row["correction/rejected_tokens"]
    assert 0 < share < 1
    assert math.isclose(tokens["reject"], tokens["none"] * (1 - share))
