"""Losses and advantages of a user in the RL loop, on one and two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed_packages import forget, install
from rl_runs import configure, rows_of, same, start, tree
from waiting import DEADLINE_S

from engine_api.errors import ConfigError
from engine_trainer.rl.loop import train_rl

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

OWN = """
import torch
from engine_trainer.algorithms import LossOutput, advantage, policy_loss

@policy_loss(only_advantages=True)
def clipped(tokens, *, clip_low: float = 0.2, clip_high: float = 0.2):
    ratio = tokens.log_ratio.exp()
    free = -tokens.advantages * ratio
    held = -tokens.advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    value = free.where(free >= held, held)
    return LossOutput(loss=(tokens.weight * value).sum(), metrics={"squares": (value ** 2).sum()})

@policy_loss(needs=("entropy", "ref_log_probs", "weight_versions"))
def reads_all(tokens):
    fresh = 0.5 ** (tokens.version - tokens.weight_versions)
    assert tokens.denominator > 0 and tokens.rollout_log_probs is not None
    value = -tokens.advantages * tokens.log_ratio.exp()
    value = value + 0.1 * (tokens.log_probs - tokens.ref_log_probs) ** 2 - 0.01 * tokens.entropy
    return LossOutput(
        loss=(tokens.weight * fresh * value).sum(), metrics={"fresh": (fresh * tokens.mask).sum()}
    )

def mean(tokens):
    return LossOutput(loss=-(tokens.advantages * tokens.log_probs).mean())

def centred(completions, *, scale: float = 1.0):
    centre = completions.rewards.mean(-1, keepdim=True)
    return ((completions.rewards - centre) * scale).float()

@advantage(level="step", needs=("old_log_probs",))
def confident(tokens):
    mean = tokens.rewards.sum() / len(tokens.group)
    from engine_trainer.algorithms.packed import document_of, sum_by_document
    whole = sum_by_document(tokens.rewards, tokens.cu_seqlens) - mean
    return whole[document_of(tokens.cu_seqlens)] * (1 - tokens.old_log_probs.exp())
"""


@pytest.fixture(scope="session")
def folder(sums_model) -> Path:
    return sums_model


@pytest.fixture
def own(tmp_path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


UPDATES = {"prompts_per_step": 8, "mini_batches": 2, "epochs": 2}


@pytest.mark.slow
def test_a_custom_loss_that_is_ppos_gives_ppos_weights_bit_for_bit(
    folder, tmp_path, own, monkeypatch
):
    entries = {"engine_trainer.losses": {"packaged": "packaged:clipped"}}
    monkeypatch.syspath_prepend(install(tmp_path / "site", "packaged", entries, OWN))
    forget()
    names = {"built_in": "ppo", "file": f"{own}:clipped", "package": "packaged"}
    for run, name in names.items():
        algorithm = {**UPDATES, "loss": name, "clip_high": 0.25}
        train_rl(configure(folder, tmp_path / run, algorithm=algorithm))
    forget()
    assert same(tmp_path / "built_in" / "hf", tmp_path / "file" / "hf")
    assert same(tmp_path / "built_in" / "hf", tmp_path / "package" / "hf")
    row = rows_of(tmp_path / "file")[-1]
    # A metric of the loss is a mean over tokens in the end.
    assert row["train/squares"] > 0
    assert row["train/entropy"] > 0


@pytest.mark.slow
def test_a_custom_loss_and_advantage_on_one_and_two_ranks(folder, tmp_path, own):
    runs = {}
    for ranks in (1, 2):
        out = tmp_path / f"ranks-{ranks}"
        algorithm = {**UPDATES, "loss": f"{own}:reads_all", "advantage": f"{own}:confident"}
        config = tree(folder, out, algorithm=algorithm, run={"steps": 1})
        config["run"]["output_dir"] = str(out)
        process = start(tmp_path, config, ranks)
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said
        runs[ranks] = rows_of(out)[-1]
    for name in ("train/loss", "train/grad_norm", "train/fresh", "train/entropy"):
        assert runs[2][name] == pytest.approx(runs[1][name], rel=1e-4), name
    # Every token is of the version of the step's beginning. Each of the 4 updates, which have about
    # as many tokens, makes one more.
    assert runs[1]["train/fresh"] == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 8) / 4, rel=0.1)


@pytest.mark.slow
def test_a_custom_advantage_of_groups_takes_options(folder, tmp_path, own):
    for run, section in {
        "built_in": {"advantage": "dr_grpo"},
        "own": {"advantage": f"{own}:centred", "advantage_options": {"scale": 1}},
    }.items():
        train_rl(configure(folder, tmp_path / run, algorithm={**UPDATES, **section}))
    assert same(tmp_path / "built_in" / "hf", tmp_path / "own" / "hf")


def test_a_custom_loss_that_is_a_mean_is_refused_before_a_model_is_loaded(
    folder, tmp_path, own, monkeypatch
):
    monkeypatch.setattr("engine_trainer.rl.loop.load_tokenizer", None)
    config = configure(folder, tmp_path / "out", algorithm={"loss": f"{own}:mean"})
    with pytest.raises(ConfigError, match=r"own\.py:mean: the loss is a mean") as caught:
        train_rl(config)
    assert caught.value.field == "algorithm.loss"
    assert "check_loss" in caught.value.remedy
    assert not (tmp_path / "out").exists()
