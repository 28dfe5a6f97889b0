"""PPO with a critic and per-token advantages in the whole loop.

A tiny model runs on the real engine.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from rl_runs import SEVENS, configure, rows_of, same, tensors_of, tree
from waiting import DEADLINE_S

from engine_api.capabilities import Capability
from engine_api.comm import SingleComm
from engine_api.errors import CheckpointMissing, ConfigError, UnsupportedCapability
from engine_api.registry import EngineRegistry
from engine_trainer.algorithms.losses import PolicyLoss
from engine_trainer.config import AlgorithmSection, RLConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.config.sections import EngineSection
from engine_trainer.placement.spmd import Spmd, SpmdEngines
from engine_trainer.rewards import RewardError, register
from engine_trainer.rl.critic import check_critic
from engine_trainer.rl.experience import collect_experience
from engine_trainer.rl.learner import policy_loss
from engine_trainer.rl.loop import train_rl

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

GAE = {"advantage": "gae", "gamma": 0.9, "lam": 0.8, "critic": {"optimizer": {"lr": 0.003}}}
SGD = {"name": "torch.optim.SGD", "lr": 0.5, "clip_norm": None}


@pytest.fixture(scope="session")
def value_folder(sums_model, tmp_path_factory) -> Path:
    """Return a value model of the policy's shape, with a head that is not small."""
    from transformers import AutoConfig, AutoModelForTokenClassification

    path = tmp_path_factory.mktemp("value") / "model"
    config = AutoConfig.from_pretrained(sums_model)
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(5)
        AutoModelForTokenClassification.from_config(config).save_pretrained(path)
    return path


def plain_gae(rewards, values, gamma, lam):
    """Return the recurrence of one completion, in Python's own numbers."""
    advantages = [0.0] * len(values)
    carried = 0.0
    following = 0.0
    for t in reversed(range(len(values))):
        carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
        following, advantages[t] = values[t], carried
    return advantages


def step_by_hand(model, loss, rate) -> float:
    """Apply plain SGD and return the norm of the gradient."""
    model.zero_grad()
    loss.backward()
    gradients = [(p, p.grad) for p in model.parameters()]
    with torch.no_grad():
        for parameter, gradient in gradients:
            parameter.sub_(rate * gradient)
    return math.sqrt(sum(float(g.square().sum()) for _, g in gradients))


def test_one_step_is_the_textbooks(sums_model, value_folder, tmp_path, monkeypatch):
    """Compare a step of plain SGD with PPO written down in float64.

    It has one update of the policy, and two of the critic with its clip.
    """
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    out = tmp_path / "out"
    seen = []
    clip = 0.02
    monkeypatch.setattr(
        "engine_trainer.rl.loop.collect_experience",
        lambda *a, **k: seen.append(collect_experience(*a, **k)) or seen[0],
    )
    register("mixed")(lambda: lambda s: s.completion.count("7") + s.completion.count("1") / 3)
    critic = {
        "optimizer": {**SGD, "lr": 0.05},
        "model": {"path": str(value_folder)},
        "epochs": 2,
        "value_clip": clip,
    }
    config = tree(
        sums_model,
        out,
        run={"steps": 1},
        reward={"name": "mixed"},
        rollout={"n": 2, "max_new_tokens": 6},
        algorithm={**GAE, "critic": critic},
    )
    config["engine"]["optimizer"] = SGD
    train_rl(from_tree(RLConfig, config))
    row = rows_of(out)[-1]

    double = {"dtype": torch.float64, "attn_implementation": "eager"}
    policy = AutoModelForCausalLM.from_pretrained(sums_model, **double)
    value = AutoModelForTokenClassification.from_pretrained(value_folder, **double)
    answers = [
        (g.prompt.tokens, a.tokens, a.score.total) for g in seen[0].groups for a in g.completions
    ]
    assert len({len(tokens) for _, tokens, _ in answers}) > 1, "all answers have one length"

    def log_probs(prompt, tokens):
        logits = policy(input_ids=torch.tensor([[*prompt, *tokens]])).logits[
            0, len(prompt) - 1 : -1
        ]
        return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]

    def values_now():
        return [
            value(input_ids=torch.tensor([[*p, *t]])).logits[0, len(p) - 1 : -1, 0]
            for p, t, _ in answers
        ]

    old = [v.detach() for v in values_now()]
    estimates = [
        plain_gae([0.0] * (len(t) - 1) + [score], v.tolist(), 0.9, 0.8)
        for (_, t, score), v in zip(answers, old, strict=True)
    ]
    every = [a for own in estimates for a in own]
    mean = statistics.fmean(every)
    scale = math.sqrt(statistics.variance(every) + 1e-8)
    count = len(every)
    advantages = [torch.tensor(own, dtype=torch.float64) for own in estimates]

    losses = []
    norms = []
    held = 0
    for _ in range(2):
        terms = []
        for now, before, advantage in zip(values_now(), old, advantages, strict=True):
            target = advantage + before
            near = before + (now - before).clamp(-clip, clip)
            terms.append((now - target).square().maximum((near - target).square()))
            held += int(((near - target).square() > (now - target).square()).sum())
        losses.append(torch.cat(terms).sum() / 2 / count)
        norms.append(step_by_hand(value, losses[-1], 0.05))
    assert held > 0, "the clip is meant to hold some values back in the second update"
    assert row["critic/loss"] == pytest.approx(statistics.fmean(x.item() for x in losses), rel=1e-5)
    assert row["critic/grad_norm"] == pytest.approx(statistics.fmean(norms), rel=1e-4)
    assert row["critic/clipped"] == pytest.approx(held / (2 * count))

    terms = [
        ((own - mean) / scale * log_probs(p, t)).sum()
        for (p, t, _), own in zip(answers, advantages, strict=True)
    ]
    norm = step_by_hand(policy, -torch.stack(terms).sum() / count, 0.5)
    assert row["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert min(norm, *norms) > 0.1
    saved = tensors_of(out / "checkpoints" / "critic" / "step-000001")
    for model, updated, key in ((policy, tensors_of(out / "hf"), ""), (value, saved, "model.")):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                updated[key + name].double(), parameter.detach(), atol=3e-6, rtol=0
            )


def test_the_loss_is_the_one_that_is_configured():
    given = {
        "clip_low": 0.1,
        "clip_high": 0.3,
        "entropy_coefficient": 0.01,
        "correction": {"weight": "token"},
        "epochs": 2,
        "kl": {"coefficient": 0.2, "estimator": "k2"},
    }
    for kind in ("ppo", "gspo", "gspo_token", "cispo"):
        mean = "seq-mean-token-mean" if kind.startswith("gspo") else "token-mean"
        loss = policy_loss(
            from_tree(AlgorithmSection, {**given, "loss": kind, "aggregation": mean})
        )
        assert loss == PolicyLoss(
            kind=kind,
            clip_low=0.1,
            clip_high=0.3,
            entropy_coef=0.01,
            corrected=True,
            kl_coef=0.2,
            kl_estimator="k2",
            kl_importance=True,
            kl_bound=10.0,
            entropy=True,
        )
    assert policy_loss(AlgorithmSection(dual_clip=3.0)) == PolicyLoss(
        dual_clip=3.0, entropy=True, on_policy=True
    )


@pytest.mark.slow
def test_it_learns(sums_model, tmp_path):
    out = tmp_path / "out"
    section = {"source": str(sums_model / "test.jsonl"), "every": 0, "samples": 2}
    critic = {"optimizer": {"lr": 0.01}, "epochs": 4}
    algorithm = {
        "advantage": "gae",
        "gamma": 1.0,
        "lam": 0.95,
        "critic": critic,
        "epochs": 2,
        "mini_batches": 2,
    }
    train_rl(
        configure(
            sums_model,
            out,
            run={"steps": 20},
            algorithm={"prompts_per_step": 8, **algorithm},
            eval=section,
        )
    )
    rows = rows_of(out)
    assert rows[0]["eval/reward"] < 0.1
    assert rows[-1]["eval/reward"] > 0.8
    for row in rows[3:]:  # it follows what completions earn, from nothing to everything
        assert row["critic/value"] == pytest.approx(row["critic/return"], abs=0.1)
    assert rows[-1]["critic/value"] > 0.8
    assert (rows[-1]["critic/updates"], rows[-1]["train/updates"]) == (8, 4)


SETTINGS = {
    "gspo": {
        "loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "seq-mean-token-mean",
        "epochs": 3,
    },
    "gspo_token": {**GAE, "loss": "gspo_token", "aggregation": "seq-mean-token-mean", "epochs": 2},
    "cispo": {
        "loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "mini_batches": 2,
        "correction": {"weight": "token"},
    },
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "kl": {"coefficient": 0.05, "where": "reward", "estimator": "k1"},
    },
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "kl": {"coefficient": 0.05, "estimator": "k2"},
    },
    "gae": {
        **GAE,
        "whiten": False,
        "entropy_coefficient": 0.01,
        "mini_batches": 4,
        "overlong": {"buffer": 2},
    },
    "adaptive": {
        **GAE,
        "kl": {
            "coefficient": 0.5,
            "where": "reward",
            "estimator": "k1",
            "target": 0.01,
            "gain": 0.5,
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SETTINGS))
def test_every_setting_runs_and_reports(sums_model, tmp_path, name):
    out = tmp_path / "out"
    n = 1 if name == "reinforce_pp" else 4  # not compared within a group
    train_rl(
        configure(
            sums_model,
            out,
            rollout={"n": n, "max_new_tokens": 4},
            algorithm={"prompts_per_step": 8, **SETTINGS[name]},
        )
    )
    rows = rows_of(out)
    assert [r["step"] for r in rows] == [1, 2, 3]
    assert all(math.isfinite(v) for r in rows for v in r.values())
    assert all(r["train/updates"] >= 1 for r in rows)
    if name == "gspo":
        # Clipping occurs only after the first update.
        assert rows[-1]["train/clipped_high"] + rows[-1]["train/clipped_low"] > 0
    if name == "adaptive":
        expected = [0.5]
        for row in rows[:-1]:
            error = max(-0.2, min(0.2, (row["train/kl"] - 0.01) / 0.01))
            expected.append(expected[-1] * (1 + 0.5 * error))
        assert [r["train/kl_coefficient"] for r in rows] == pytest.approx(expected, rel=1e-12)
        assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-5)
    if name == "gae":
        assert rows[-1]["critic/updates"] == 4


@pytest.mark.slow
def test_a_run_that_failed_and_is_resumed_ends_bit_for_bit_as_one_left_alone(sums_model, tmp_path):
    calls = {"left": math.inf}

    def limited(sample):
        calls["left"] -= 1
        if calls["left"] < 0:
            raise OSError("the judge is away")
        return sample.completion.count("7") / 4

    register("limited")(lambda: limited)
    algorithm = {
        **SETTINGS["adaptive"],
        "prompts_per_step": 8,
        "mini_batches": 2,
        "epochs": 2,
        "critic": {
            "optimizer": {"lr": 0.01},
            "epochs": 2,
            "schedule": {"name": "cosine", "warmup_steps": 3},
        },
    }
    sections = {
        "run": {"steps": 6, "save_every": 2},
        "reward": {"name": "limited"},
        "algorithm": algorithm,
    }
    alone = tmp_path / "alone"
    broken = tmp_path / "broken"
    train_rl(configure(sums_model, alone, **sections))
    calls["left"] = 8 * 4 * 4 + 3  # in the fifth step
    with pytest.raises(RewardError, match="the judge is away"):
        train_rl(configure(sums_model, broken, **sections))
    # The folders as a kill between the two saves would leave them.
    (broken / "checkpoints" / "critic" / "step-000004").rename(
        broken / "checkpoints" / "critic" / "step-000005"
    )
    (broken / "checkpoints" / "step-000004").rename(tmp_path / "away")
    calls["left"] = math.inf
    train_rl(configure(sums_model, broken, **sections))
    assert rows_of(broken) == rows_of(alone)
    for part in ("hf", "checkpoints/step-000006", "checkpoints/critic/step-000006"):
        assert same(alone / part, broken / part)
    # Only the newest two checkpoints of both engines are kept.
    for run in (alone, broken):
        for folder in (run / "checkpoints", run / "checkpoints" / "critic"):
            assert sorted(p.name for p in folder.glob("step-*")) == ["step-000004", "step-000006"]


def test_a_checkpoint_without_a_critic_is_refused(sums_model, tmp_path):
    out = tmp_path / "out"
    train_rl(configure(sums_model, out, run={"steps": 1}))
    with pytest.raises(CheckpointMissing, match=r"(?s)has no critic.*without one"):
        train_rl(
            configure(sums_model, out, run={"steps": 2}, algorithm={"prompts_per_step": 8, **GAE})
        )


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("memory", "max_tokens", 0), ("options", "foo", 1), ("model", "attention", "foo")],
)
def test_a_critic_that_cannot_be_built_is_named_by_its_own_key(
    sums_model, tmp_path, section, key, value
):
    path = {"path": str(sums_model)} if section == "model" else {}
    critic = {section: {key: value, **path}}
    with pytest.raises(ConfigError) as caught:
        train_rl(
            configure(
                sums_model,
                tmp_path / "out",
                algorithm={"prompts_per_step": 8, **GAE, "critic": critic},
            )
        )
    assert caught.value.field == f"algorithm.critic.{section}.{key}"


def test_reference_and_critic_leave_the_device_to_the_rollout(sums_model, tmp_path, monkeypatch):
    moves: dict[int, list[str]] = {}
    for name in ("offload", "reload"):
        real = getattr(SpmdEngines, name)
        monkeypatch.setattr(
            SpmdEngines,
            name,
            lambda self, n=name, real=real: (moves.setdefault(id(self), []).append(n), real(self)),
        )
    train_rl(
        configure(
            sums_model,
            tmp_path / "out",
            run={"steps": 2},
            rollout={"n": 2, "max_new_tokens": 4, "offload_engine": True},
            algorithm={"prompts_per_step": 8, **SETTINGS["adaptive"]},
        )
    )
    policy, *others = sorted(moves.values(), key=len)
    assert policy == ["offload", "reload"] * 2
    assert others == [["offload", *["reload", "offload"] * 2]] * 2


def alone_of(ranks: int, monkeypatch) -> None:
    """Pretend that this process is one of ``ranks``, without the other processes."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(
        "engine_trainer.placement.spmd.connect_ranks", lambda timeout_s: SingleComm()
    )


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [({"ulysses": 2}, 1), ({"ulysses": 2}, 3), ({"dp_shard": 2}, 4), ({"dp_replicate": 4}, 2)],
)
def test_sizes_of_a_critic_that_make_no_world_are_refused_before_anything_is_loaded(
    sums_model, tmp_path, monkeypatch, sizes, ranks
):
    critic = {**GAE["critic"], "parallelism": sizes}
    config = configure(
        sums_model, tmp_path / "out", algorithm={"prompts_per_step": 8, **GAE, "critic": critic}
    )
    alone_of(ranks, monkeypatch)
    monkeypatch.setattr(Spmd, "engines", lambda *_: pytest.fail("an engine was made"))
    with pytest.raises(ConfigError, match=f"expected sizes whose product is {ranks}, ") as caught:
        train_rl(config)
    assert caught.value.field == "algorithm.critic.parallelism"


def test_sizes_of_a_critic_that_make_the_world_are_taken(sums_model, tmp_path):
    for sizes, ranks in (
        ({"ulysses": 2}, 4),
        ({"tp": 2, "pp": 2, "dp_shard": 3}, 12),
        ({"dp_replicate": 2}, 2),
    ):
        critic = {**GAE["critic"], "parallelism": sizes}
        found = SimpleNamespace(resolve=lambda *_: ("cpu", frozenset(Capability)))
        check_critic(
            configure(sums_model, tmp_path, algorithm={**GAE, "critic": critic}), found, ranks
        )


def test_what_the_critics_engine_does_not_do_is_refused_before_anything_is_loaded(
    sums_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(Spmd, "engines", lambda *_: pytest.fail("an engine was made"))
    alone_of(2, monkeypatch)
    critic = {**GAE["critic"], "parallelism": {"tp": 2}}
    with pytest.raises(UnsupportedCapability, match="tp"):
        train_rl(
            configure(
                sums_model,
                tmp_path / "out",
                algorithm={"prompts_per_step": 8, **GAE, "critic": critic},
            )
        )


def test_engines_that_share_their_process_groups_are_refused_with_other_sizes(
    sums_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(Spmd, "engines", lambda *_: pytest.fail("an engine was made"))
    alone_of(2, monkeypatch)
    plugin = EngineRegistry.resolve(model_type="value_model", backend="fsdp2", device="cpu").plugin
    shared = SimpleNamespace(
        plugin=replace(plugin, one_layout=True), device="cpu", source="engine-fsdp"
    )
    monkeypatch.setattr("engine_trainer.placement.spmd.EngineRegistry.resolve", lambda **_: shared)
    critic = {**GAE["critic"], "parallelism": {"ulysses": 2}}
    with pytest.raises(ConfigError, match="data-parallel ranks alone, got ulysses 2") as caught:
        train_rl(
            configure(
                sums_model,
                tmp_path / "out",
                algorithm={"prompts_per_step": 8, **GAE, "critic": critic},
            )
        )
    assert caught.value.field == "algorithm.critic.parallelism"
    assert "another backend" in caught.value.remedy
    Spmd().resolve(
        *(from_tree(EngineSection, {"model": {"path": str(sums_model)}}) for _ in range(2))
    )


# --- several processes --------------------------------------------------------------------------

MAIN = SEVENS + "\nimport sys\nfrom engine_trainer.cli import main\nsys.exit(main(sys.argv[1:]))\n"


def launch(tmp_path: Path, config: dict, ranks: int) -> None:
    script = tmp_path / "main.py"
    file = Path(config["run"]["output_dir"]).with_suffix(".yaml")
    script.write_text(MAIN)
    file.write_text(yaml.safe_dump(config))
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks > 1
        else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, str(script), "rl", str(file)],
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def agree(got: Path, want: Path) -> None:
    """Check that figures and weights of the policy are equal up to the order of sums."""
    for a, b in zip(rows_of(want), rows_of(got), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=2e-3, abs=1e-6), (a["step"], key)
    left, right = (tensors_of(folder / "hf") for folder in (want, got))
    for name, weight in left.items():
        torch.testing.assert_close(right[name], weight, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_agree_with_one(sums_model, tmp_path):
    algorithm = {**SETTINGS["adaptive"], "prompts_per_step": 8, "mini_batches": 2, "epochs": 2}
    for ranks in (1, 2):
        launch(
            tmp_path,
            tree(sums_model, tmp_path / str(ranks), run={"steps": 5}, algorithm=algorithm),
            ranks,
        )
    agree(tmp_path / "2", tmp_path / "1")


OTHER_SIZES = [({}, {"ulysses": 2}), ({"ulysses": 2}, {"ulysses": 1})]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.parametrize(("policy", "critic"), OTHER_SIZES)
def test_a_critic_of_another_data_parallel_size_agrees_with_one_rank(
    sums_model, tmp_path, policy, critic
):
    algorithm = {**SETTINGS["adaptive"], "prompts_per_step": 8, "mini_batches": 2, "epochs": 2}
    one = tree(sums_model, tmp_path / "one", algorithm=algorithm)
    algorithm = {**algorithm, "critic": {**GAE["critic"], "parallelism": critic}}
    two = tree(sums_model, tmp_path / "two", algorithm=algorithm)
    two["engine"] = {**two["engine"], "parallelism": policy}
    for config, ranks in ((one, 1), (two, 2)):
        launch(tmp_path, config, ranks)
    agree(tmp_path / "two", tmp_path / "one")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.distributed
def test_on_ray_it_is_bit_for_bit_what_it_is_under_torchrun(sums_model, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    (tmp_path / "rewards_of_sevens.py").write_text(SEVENS)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    algorithm = {**SETTINGS["adaptive"], "prompts_per_step": 8, "mini_batches": 2, "epochs": 2}
    policy, critic = OTHER_SIZES[0]
    algorithm["critic"] = {**GAE["critic"], "parallelism": critic}
    trees = {
        name: tree(sums_model, tmp_path / name, algorithm=algorithm) for name in ("ranks", "ray")
    }
    for one in trees.values():
        one["engine"] = {**one["engine"], "parallelism": policy}
    trees["ray"] |= {"launcher": "ray", "ray": {"engines": 2, "imports": ["rewards_of_sevens"]}}
    for name, ranks in (("ranks", 2), ("ray", 1)):
        launch(tmp_path, trees[name], ranks)
    both = [
        [
            {k: v for k, v in row.items() if not k.startswith("worker/")}
            for row in rows_of(tmp_path / n)
        ]
        for n in trees
    ]
    assert both[0] == both[1]
    assert same(tmp_path / "ranks" / "hf", tmp_path / "ray" / "hf")
    for file in (tmp_path / "ranks" / "checkpoints" / "critic").rglob("*.safetensors"):
        assert (
            file.read_bytes()
            == (tmp_path / "ray" / file.relative_to(tmp_path / "ranks")).read_bytes()
        )
