"""The RL loop from end to end, with a tiny model, the real engine, and a reward easy to improve."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from rl_runs import configure, rows_of, same, start, tensors_of, tree
from waiting import DEADLINE_S, until

from engine_api.errors import ConfigError
from engine_trainer.rewards import RewardError, Score, register
from engine_trainer.rl.experience import Experience, collect_experience, round_seed, shaped_rewards
from engine_trainer.rl.loop import train_rl
from engine_trainer.sampling.sampler import Group, Sampled, ScoredCompletion
from engine_trainer.telemetry.logs import Timers, read_metrics
from engine_trainer.telemetry.metrics import HEADLINES, explain

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="session")
def folder(sums_model) -> Path:
    return sums_model


EVAL = {"every": 10, "samples": 2}


@pytest.mark.slow
def test_it_learns(folder, tmp_path):
    out = tmp_path / "out"
    section = {"source": str(folder / "test.jsonl"), **EVAL}
    outcome = train_rl(configure(folder, out, run={"steps": 25}, eval=section))
    assert outcome.step == outcome.total_steps == 25
    rows = rows_of(out)
    before = rows[0]
    after = rows[-1]
    assert before["step"] == 0
    assert before["eval/reward"] < 0.1
    assert after["eval/reward"] > 0.8
    assert after["eval/best@2"] >= after["eval/accuracy"]
    assert [r["step"] for r in rows if "eval/reward" in r] == [0, 10, 20, 25]
    assert all(r["mismatch/max"] < 1e-4 for r in rows[1:])
    assert all(r["train/ratio"] == pytest.approx(1.0) for r in rows[1:])
    assert [name for name in rows[-1] if not explain(name)] == ["step"]
    assert {name for name in HEADLINES if name.startswith(("mismatch/", "train/"))} <= set(rows[-1])
    problems = [
        json.loads(line) for line in (out / "eval" / "step-000025.jsonl").read_text().splitlines()
    ]
    assert len(problems) == 20
    assert len(problems[0]["completions"]) == 2
    correct = sum(c["correct"] for p in problems for c in p["completions"])
    assert after["eval/accuracy"] == pytest.approx(correct / 40)


def test_tokens_per_second_are_those_of_the_same_row(folder, tmp_path):
    """Check a step with several updates, and one with equal rewards that learns nothing."""
    register("varied")(lambda: lambda s: float(sum(map(ord, s.completion))))
    register("constant")(lambda: lambda s: 1.0)
    for reward, learns in (("varied", True), ("constant", False)):
        out = tmp_path / reward
        config = configure(
            folder,
            out,
            run={"steps": 2, "log_every": 1},
            reward={"name": reward},
            algorithm={"prompts_per_step": 8, "mini_batches": 2, "epochs": 2},
            eval={"source": str(folder / "test.jsonl"), "every": 1},
        )
        train_rl(config)
        for row in list(read_metrics(out / "metrics.jsonl"))[1:]:
            seconds = row.get("time/train", 0.0) + row.get("time/log_probs", 0.0)
            assert (row["train/updates"] > 0) is learns
            assert row["perf/trained_tokens_per_s"] * seconds == pytest.approx(
                row.get("train/tokens", 0.0)
            )
            # The row's clock has the evaluation's generation too.
            assert row["perf/generated_tokens_per_s"] * row["time/generate"] > row["rollout/tokens"]


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "prompt shared"])
def test_the_first_update_is_the_textbooks(folder, tmp_path, monkeypatch, shared):
    """Compare a step of plain SGD with GRPO in plain float64 torch.

    Both use the generated completions, whose prompt the engine may compute once a group.
    """
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    seen = []
    monkeypatch.setattr(
        "engine_trainer.rl.loop.collect_experience",
        lambda *a, **k: seen.append(collect_experience(*a, **k)) or seen[0],
    )
    register("mixed")(lambda: lambda s: s.completion.count("7") + s.completion.count("1") / 3)
    engine = {
        "model": {"path": str(folder)},
        "device": "cpu",
        "optimizer": {"name": "torch.optim.SGD", "lr": 0.5, "clip_norm": None},
        "memory": {"share_prefixes": shared},
    }
    train_rl(configure(folder, out, run={"steps": 1}, reward={"name": "mixed"}, engine=engine))
    row = rows_of(out)[-1]

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    loss = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for one in seen[0].groups:
        rewards = torch.tensor([a.score.total for a in one.completions]).double()
        for answer, reward in zip(one.completions, rewards, strict=True):
            tokens += len(answer.tokens)
            if rewards.std() > 1e-9:
                whole = torch.tensor([[*one.prompt.tokens, *answer.tokens]])
                logits = model(input_ids=whole).logits[0, len(one.prompt.tokens) - 1 : -1]
                log_probs = logits.log_softmax(-1).gather(-1, torch.tensor(answer.tokens)[:, None])
                loss = loss - (reward - rewards.mean()) / (rewards.std() + 1e-6) * log_probs.sum()
    assert len(seen[0].groups) == 8
    (loss / tokens).backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert row["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    updated = tensors_of(out / "hf")
    for name, parameter in model.named_parameters():
        expected = parameter.detach() - 0.5 * parameter.grad
        torch.testing.assert_close(updated[name].double(), expected, atol=2e-6, rtol=0)


@pytest.mark.slow
def test_a_run_that_failed_and_is_resumed_ends_bit_for_bit_as_one_left_alone(folder, tmp_path):
    calls = {"left": math.inf}

    def limited(sample):
        calls["left"] -= 1
        if calls["left"] < 0:
            raise OSError("the judge is away")
        return sample.completion.count("7") / 4

    register("limited")(lambda: limited)
    sections = {
        "run": {"steps": 6, "save_every": 2},
        "reward": {"name": "limited"},
        "algorithm": {
            "mini_batches": 2,
            "epochs": 2,
            "dynamic_sampling": {"enabled": True, "max_rounds": 3},
        },
        "eval": {"source": str(folder / "test.jsonl"), "every": 3, "samples": 1},
    }
    alone = tmp_path / "alone"
    broken = tmp_path / "broken"
    train_rl(configure(folder, alone, **sections))
    calls["left"] = 330  # in the middle of a step past the first checkpoint
    with pytest.raises(RewardError, match="the judge is away"):
        train_rl(configure(folder, broken, **sections))
    assert list((broken / "checkpoints").glob("step-*"))
    assert not (broken / "hf").exists()
    calls["left"] = math.inf
    train_rl(configure(folder, broken, **sections))
    assert same(alone / "hf", broken / "hf")
    assert rows_of(broken) == rows_of(alone)


SETTINGS = {
    "dapo": {
        "clip_high": 0.28,
        "mini_batches": 2,
        "dynamic_sampling": {"enabled": True, "max_rounds": 2},
        "overlong": {"buffer": 2, "filter": False},
    },
    "filter": {"overlong": {"filter": True}, "aggregation": "seq-mean-token-mean"},
    "kl_loss": {"kl": {"coefficient": 0.1}, "epochs": 2, "entropy_coefficient": 0.01},
    "kl_reward": {
        "kl": {"coefficient": 0.1, "where": "reward", "estimator": "k1"},
        "advantage": "dr_grpo",
    },
    "off_policy": {
        "old_log_probs": "rollout",
        "aggregation": "seq-mean-token-sum",
        "dual_clip": 3.0,
    },
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_every_setting_runs_and_reports(folder, tmp_path, name):
    out = tmp_path / "out"
    train_rl(configure(folder, out, algorithm={"prompts_per_step": 8, **SETTINGS[name]}))
    rows = rows_of(out)
    assert [r["step"] for r in rows] == [1, 2, 3]
    last = rows[-1]
    assert last["train/entropy"] > 0
    assert all(math.isfinite(v) for r in rows for v in r.values())
    if name == "kl_loss":
        assert rows[0]["train/ref_kl"] >= 0  # the second epoch has already moved
        assert last["train/ref_kl"] > 1e-5
        assert last["train/updates"] == 2
    if name == "dapo":
        assert last["rollout/groups"] <= 8
        assert last["train/updates"] == 2
    if name == "off_policy":
        assert last["train/ratio"] == pytest.approx(1.0, abs=1e-4)
        assert last["train/clipped_high"] == 0


def test_the_reference_of_lora_is_the_adapter_off(folder, tmp_path):
    engine = {
        "model": {"path": str(folder)},
        "device": "cpu",
        "optimizer": {"lr": 0.01},
        "lora": {"rank": 4, "alpha": 8},
    }
    out = tmp_path / "out"
    train_rl(
        configure(
            folder,
            out,
            engine=engine,
            algorithm={"prompts_per_step": 8, "kl": {"coefficient": 0.1}},
        )
    )
    rows = rows_of(out)
    assert rows[0]["train/ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert rows[-1]["train/ref_kl"] > 1e-5


def test_a_step_without_a_difference_changes_nothing(folder, tmp_path):
    register("indifferent")(lambda: lambda s: 1.0)
    out = tmp_path / "out"
    dynamic = {"enabled": True, "max_rounds": 3}
    section = {"prompts_per_step": 8, "dynamic_sampling": dynamic}
    train_rl(configure(folder, out, reward={"name": "indifferent"}, algorithm=section))
    row = rows_of(out)[0]
    assert (row["rollout/groups"], row["rollout/rounds"], row["train/updates"]) == (0, 3, 0)
    assert row["rollout/uninformative_groups"] == 1.0
    from safetensors.torch import load_file

    assert all(
        torch.equal(v, tensors_of(out / "hf")[k])
        for k, v in load_file(folder / "model.safetensors").items()
    )


def test_chosen_steps_leave_a_trace_of_the_profiler(folder, tmp_path):
    train_rl(configure(folder, tmp_path / "out", run={"steps": 3, "profile_steps": [2]}))
    (trace,) = (tmp_path / "out" / "profile").rglob("*.gz")
    assert trace.parts[-2:] == ("step-000002", "rank-0.json.gz")
    assert b"traceEvents" in gzip.decompress(trace.read_bytes())


def test_a_reward_that_raises_ends_the_run_and_leaves_no_checkpoint(folder, tmp_path):
    register("broken")(lambda: lambda s: {}["key"])
    with pytest.raises(RewardError, match="KeyError"):
        train_rl(configure(folder, tmp_path / "out", reward={"name": "broken"}))
    assert not list((tmp_path / "out").glob("checkpoints/*"))


def test_names_that_nobody_knows(folder, tmp_path):
    with pytest.raises(ConfigError, match="sevens"):
        train_rl(configure(folder, tmp_path / "a", reward={"name": "sevns"}))
    with pytest.raises(ConfigError, match="foo"):
        train_rl(
            configure(
                folder, tmp_path / "c", rollout={"n": 8, "max_new_tokens": 4, "options": {"foo": 1}}
            )
        )
    with pytest.raises(ConfigError, match="overlong"):
        train_rl(
            configure(
                folder, tmp_path / "b", algorithm={"prompts_per_step": 8, "overlong": {"buffer": 5}}
            )
        )
    with pytest.raises(ConfigError, match=r"(?s)rollout\.quantization.*vllm"):
        train_rl(
            configure(
                folder, tmp_path / "d", rollout={"n": 8, "max_new_tokens": 4, "quantization": "fp8"}
            )
        )
    with pytest.raises(ConfigError, match=r"(?s)rollout\.lora.*engine\.lora is null"):
        train_rl(
            configure(
                folder, tmp_path / "e", rollout={"n": 8, "max_new_tokens": 4, "lora": "adapter"}
            )
        )
    engine = {"model": {"path": str(folder)}, "device": "cpu", "lora": {"rank": 2}}
    with pytest.raises(ConfigError, match=r"(?s)rollout\.lora.*'local' serves no adapters.*merged"):
        train_rl(
            configure(
                folder,
                tmp_path / "f",
                engine=engine,
                rollout={"name": "local", "n": 8, "max_new_tokens": 4, "lora": "adapter"},
            )
        )


# --- without an engine --------------------------------------------------------------------------


def group(*rewards: float, lengths=None) -> Group:
    lengths = lengths or [2] * len(rewards)
    answers = [
        ScoredCompletion(
            tokens=[2] * n,
            log_probs=[-1.0] * n,
            text="",
            finished=True,
            score=Score(total=r, parts={"mine": r}, correct=r >= 1),
        )
        for r, n in zip(rewards, lengths, strict=True)
    ]
    return Group(prompt=None, completions=answers)  # pyright: ignore[reportArgumentType]


class Script:
    """A sampler that returns groups in order, and records its calls."""

    def __init__(self, *groups: Group) -> None:
        self.groups = list(groups)
        self.calls = []
        self.timers = Timers()

    def sample(self, prompts, *, n, temperature, seed):
        self.calls.append((list(prompts), seed))
        self.timers.add("generate", 0.25)
        taken = self.groups[: len(prompts)]
        self.groups = self.groups[len(prompts) :]
        return Sampled(groups=taken)


class Identity(list):
    def take(self, position, count):
        return list(range(position, position + count))


def run_collect(folder, tmp_path, script, **dynamic) -> Experience:
    section = {"prompts_per_step": 3, "dynamic_sampling": dynamic}
    config = configure(folder, tmp_path, algorithm=section)
    return collect_experience(script, list(range(100)), Identity(), config, step=5, position=10)


def test_dynamic_sampling_refills_with_new_prompts(folder, tmp_path):
    good = group(1, 0)
    bad = group(1, 1)
    script = Script(good, bad, bad, bad, good, good)
    result = run_collect(folder, tmp_path, script, enabled=True, max_rounds=4)
    assert [c[0] for c in script.calls] == [[10, 11, 12], [13, 14], [15]]
    assert [c[1] for c in script.calls] == [round_seed(3, 5, r) for r in range(3)]
    assert (len(result.groups), result.position) == (3, 16)
    assert result.metrics["rollout/rounds"] == 3
    assert result.metrics["rollout/uninformative_groups"] == 0.5
    assert result.metrics["train/reward"] == pytest.approx(0.75)  # of all that was generated
    assert result.metrics["perf/generated_tokens_per_s"] == 6 * 2 * 2 / 0.75  # in all rounds


def test_dynamic_sampling_gives_up_after_its_rounds_and_says_so(folder, tmp_path):
    script = Script(group(1, 0), *[group(0, 0)] * 20)
    result = run_collect(folder, tmp_path, script, enabled=True, max_rounds=2)
    assert (len(result.groups), result.metrics["rollout/groups"], result.position) == (1, 1, 15)


def test_without_dynamic_sampling_every_group_is_taken(folder, tmp_path):
    result = run_collect(folder, tmp_path, Script(*[group(0, 0)] * 3), enabled=False)
    assert (len(result.groups), result.position, result.metrics["rollout/rounds"]) == (3, 13, 1)


def test_seeds_differ_by_run_step_and_round():
    seeds = {round_seed(s, step, r) for s in range(3) for step in range(20) for r in range(4)}
    assert len(seeds) == 240
    assert all(0 <= s < 2**63 for s in seeds)


def test_shaped_rewards_by_hand(folder, tmp_path):
    section = {"prompts_per_step": 3, "overlong": {"buffer": 2, "penalty": 0.5}}
    config = configure(folder, tmp_path, algorithm=section)
    result = shaped_rewards([group(1, 1, 0, lengths=[2, 3, 4])], config)
    assert result.tolist() == [[1.0, 0.75, -0.5]]


# --- several processes --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.nightly
def test_two_ranks_killed_and_resumed_equal_two_ranks_left_alone_and_agree_with_one(
    folder, tmp_path
):
    section = {"source": str(folder / "test.jsonl"), **EVAL}
    outs = {name: tmp_path / name for name in ("one", "two", "killed")}
    correction = {
        "weight": "token",
        "cap": 1.3,
        "reject": "geometric",
        "reject_low": 0.8,
        "reject_high": 1.25,
    }
    sections = {
        "run": {"steps": 8, "save_every": 2},
        "rollout": {"name": "shifted"},
        "algorithm": {"correction": correction},
        "eval": section,
    }
    trees = {n: tree(folder, o, **sections) for n, o in outs.items()}
    for name in ("one", "two"):
        process = start(tmp_path, trees[name], 1 if name == "one" else 2)
        text, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, text
    process = start(tmp_path, trees["killed"], 2)
    saved = outs["killed"] / "checkpoints" / "step-000004"
    until(lambda: saved.is_dir() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGKILL)  # the session that was started for it above
    process.communicate()
    process = start(tmp_path, trees["killed"], 2)
    text, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, text
    assert same(outs["two"] / "hf", outs["killed"] / "hf")
    assert rows_of(outs["killed"]) == rows_of(outs["two"])
    differ_by_rounding(outs["one"], outs["two"])


def differ_by_rounding(one, two):
    """Run on one rank, which draws the same completions as two."""
    for a, b in zip(rows_of(one), rows_of(two), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-6), (a["step"], key)
    for name, weight in tensors_of(one / "hf").items():
        torch.testing.assert_close(tensors_of(two / "hf")[name], weight, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.nightly
def test_two_ranks_that_correct_in_the_update_agree_with_one(folder, tmp_path):
    """Check weights from the update's own log-probs, in several micro-batches.

    Their sums are over all ranks.
    """
    sections = {
        "run": {"steps": 4},
        "rollout": {"name": "shifted"},
        "engine": {"memory": {"max_tokens": 64}},
        "algorithm": {"correction": {"weight": "sequence", "cap": 1.5}},
    }
    for ranks in (1, 2):
        process = start(tmp_path, tree(folder, tmp_path / str(ranks), **sections), ranks)
        text, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, text
    differ_by_rounding(tmp_path / "1", tmp_path / "2")
    assert all(0 < row["correction/ess"] < 0.999 for row in rows_of(tmp_path / "2") if row["step"])
