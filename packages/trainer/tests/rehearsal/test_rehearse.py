"""``engine-train rehearse``: what it runs, what it finds, and what it leaves out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from layout import ROOT
from safetensors import safe_open

from engine_trainer.cli import main
from engine_trainer.config import RLConfig
from engine_trainer.config.loading import load_config
from engine_trainer.placement import memory
from engine_trainer.rehearsal.estimate import describe_real_run
from engine_trainer.rehearsal.plan import make_plan
from engine_trainer.telemetry.logs import read_metrics

REWARD = """
def score(sample):
    return float(sample.completion.strip() == sample.answer)

def broken(sample):
    raise KeyError(sample.answer)
"""


@pytest.fixture
def file(tmp_path: Path, sums_model: Path) -> Path:
    """Return an RL configuration of sums, too large for a rehearsal in every number."""
    (tmp_path / "mine.py").write_text(REWARD)
    path = tmp_path / "big.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "engine": {
                    "model": {"path": str(sums_model)},
                    "parallelism": {"ulysses": 2},
                    "precision": {"compute": "bfloat16"},
                    "memory": {"recompute": "full"},
                },
                "data": {"source": str(sums_model), "split": "train"},
                "reward": {"function": f"{tmp_path}/mine.py:score"},
                "rollout": {"name": "vllm", "n": 16, "max_new_tokens": 16, "quantization": "fp8"},
                "algorithm": {
                    "prompts_per_step": 64,
                    "mini_batches": 4,
                    "dynamic_sampling": {"enabled": True},
                    "correction": {"weight": "token"},
                },
                "run": {"output_dir": str(tmp_path / "out"), "steps": 500, "save_every": 50},
                "eval": {"source": str(sums_model), "split": "test", "every": 50},
            }
        )
    )
    return path


def rehearse(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str]]:
    """Return the exit status, and the report's text by stage; "" has all of it."""
    status = main(["rehearse", *arguments])
    text = capsys.readouterr().out
    found = re.findall(r"^(ok|FAILED) +(\w+(?: \w+)?)  +(.*(?:\n {9}.*)*)", text, re.MULTILINE)
    return status, {"": text} | {name: f"{state} {line}" for state, name, line in found}


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.slow
def test_a_configuration_is_run_killed_resumed_and_switched_on_two_ranks(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept"

    status, stages = rehearse(capsys, str(file), "--ranks", "2", "--folder", str(folder))

    assert status == 0, stages[""]
    assert "SIGKILL" in stages["first step"]
    assert "continued after step" in stages["resume"]
    assert re.search(r"continued from the checkpoint of fsdp2 on 2 ranks", stages["switch"])
    assert "the rollout vllm" in stages[""].partition("not exercised")[2]
    assert "rollout.quantization: fp8" in stages[""]
    assert "GiB on each of 8 GPUs" in stages[""]
    assert "a step (generate" in stages[""]
    assert not (tmp_path / "out").exists(), "the real run's folder is only tried"
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["train/grad_norm"] > 0 for row in rows[1:]), (
        "the rewards of a group differ, so that there is something to learn"
    )
    assert any("eval/accuracy" in row for row in rows)
    environment = json.loads((folder / "run" / "environment.json").read_text())
    starts = environment["starts"] if isinstance(environment, dict) else environment
    assert [start["ranks"] for start in starts][:2] == [2, 2]
    with safe_open(next((folder / "run" / "hf").glob("*.safetensors")), "pt") as weights:
        assert "model.embed_tokens.weight" in weights.keys()  # noqa: SIM118 - it is no mapping


@pytest.mark.slow
def test_a_reward_that_raises_is_found(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = f"reward.function={file.parent}/mine.py:broken"

    status, stages = rehearse(
        capsys, str(file), broken, "--ranks", "1", "--folder", str(file.parent / "kept")
    )

    assert status == 2
    assert stages["first step"].startswith("FAILED")
    assert "KeyError" in stages["first step"]
    assert "broken" in stages["first step"]
    assert "resume" not in stages


def test_all_that_is_wrong_is_found_at_once_and_nothing_is_trained(
    file: Path, tmp_path: Path, sums_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file")

    status, stages = rehearse(
        capsys,
        str(file),
        "engine.options.no_such=1",
        "data.max_length=3",
        f"run.output_dir={tmp_path}/taken/run",
        "--folder",
        str(tmp_path / "kept"),
    )

    assert status == 2
    assert "engine.options.no_such: unknown key" in stages["engine"]
    assert "is a file" in stages["output folder"]
    assert "longer than 3 tokens" in stages["data"]
    assert f"{sums_model}/train.jsonl" in stages["data"]
    assert "data.max_length" in stages["data"]
    assert "not exercised: training" in stages[""]
    assert not (tmp_path / "kept" / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["engine.parallelism.tp=2"], "'tp' is not supported"),
        (["engine.parallelism.ulysses=3", "--gpus", "8"], "expected sizes whose product divides 8"),
    ],
)
def test_what_the_engine_cannot_do_is_found(
    arguments: list[str],
    told: str,
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Data that ends the rehearsal before anything is trained.
    status, stages = rehearse(
        capsys, str(file), *arguments, "data.max_length=3", "--folder", str(tmp_path / "kept")
    )
    assert status == 2
    assert stages["engine"].startswith("FAILED")
    assert told in stages["engine"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "0"], "--ranks: expected 1 or more, got 0"),
        (["--gpus", "-1"], "--gpus: expected 1 or more, got -1"),
        (["--folder", "."], "exists already"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], told: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", str(file), *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_rehearsal_keeps_references_and_pushes_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHOSE", "me")
    overrides = [
        "run.push_to_hub=${oc.env:WHOSE}/model",
        "run.wandb=project",
        "data.system_prompt=${oc.env:WHOSE}",
        "reward.kwargs={secret: 7}",
    ]
    config = load_config(RLConfig, file, overrides)

    plan = make_plan(config, "rl", file, overrides, tmp_path / "rehearsal", ranks=2)

    assert plan.tree["run"]["push_to_hub"] is None
    assert plan.tree["run"]["wandb"] is None
    assert plan.tree["data"]["system_prompt"] == "${oc.env:WHOSE}"
    mine, noise = plan.tree["reward"]["kwargs"]["rewards"]
    assert mine == {"function": f"{tmp_path}/mine.py:score", "kwargs": {"secret": 7}}
    assert noise["function"].startswith("engine_trainer.rehearsal.noise:")
    assert plan.tree["engine"]["parallelism"]["ulysses"] == 2
    assert "the push to the hub" in plan.missing
    plan.write(tmp_path / "plan.yaml")
    assert (tmp_path / "plan.yaml").stat().st_mode & 0o077 == 0
    written = load_config(RLConfig, tmp_path / "plan.yaml")
    assert (written.algorithm.prompts_per_step, written.rollout.n, written.run.steps) == (4, 2, 2)


@pytest.mark.parametrize(
    ("sizes", "ranks", "ep"),
    [
        ("{ep: 8}", 2, 2),
        ("{ep: 8}", 1, 1),
        ("{ulysses: 4, ep: 8}", 2, 2),
        ("{dp_replicate: 2, ep: 8}", 2, 1),
    ],
)
def test_experts_are_spread_over_the_ranks_that_share_one_copy_of_the_weights(
    sizes: str, ranks: int, ep: int, file: Path, tmp_path: Path
) -> None:
    overrides = ["engine.parallelism=null", f"engine.parallelism={sizes}"]
    config = load_config(RLConfig, file, overrides)

    plan = make_plan(config, "rl", file, overrides, tmp_path / "rehearsal", ranks=ranks)

    assert plan.tree["engine"]["parallelism"]["ep"] == ep
    assert ("engine.parallelism.ep of 8" in plan.missing) == (ep == 1)


def test_weights_in_flight_are_not_demanded_of_the_rollout_of_a_rehearsal(
    file: Path, tmp_path: Path
) -> None:
    overrides = [
        "launcher=ray",
        "ray.rollouts=1",
        "overlap={mode: full, in_flight: true}",
        "algorithm.correction.weight=token",
    ]
    config = load_config(RLConfig, file, overrides)

    plan = make_plan(config, "rl", file, overrides, tmp_path / "rehearsal", ranks=1)

    assert plan.tree["overlap"]["in_flight"] == "auto"
    plan.write(tmp_path / "plan.yaml")
    load_config(RLConfig, tmp_path / "plan.yaml")


def test_what_auto_would_choose_on_a_gpu_is_not_exercised_and_counts_in_the_estimate(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    automatic = ["rollout.name=auto", "engine.precision.compute=auto", "rollout.quantization=none"]
    config = load_config(RLConfig, file, automatic)

    plan = make_plan(config, "rl", file, automatic, tmp_path / "rehearsal", ranks=1)

    assert plan.tree["rollout"]["name"] == "local"
    told = " ".join(plan.missing)
    assert "what auto chooses on a GPU for rollout.name, engine.precision.compute" in told
    assert "engine.memory.compile" in told
    assert "engine.memory.recompute" not in told, "the file has a value"

    monkeypatch.setattr(memory, "count_parameters", lambda source, trunk=False: 8 << 30)
    rows = [SimpleNamespace(fate="kept", length=16)]
    lines = {
        compute: list(
            describe_real_run(
                load_config(RLConfig, file, [*automatic, f"engine.precision.compute={compute}"]),
                SimpleNamespace(task="rl", rows=rows),
                8,
            )
        )
        for compute in ("auto", "bfloat16", "float32")
    }
    assert lines["auto"] == lines["bfloat16"] != lines["float32"]
    assert any("chosen without vllm" in line for line in lines["auto"])


# --- the recipes, as on a laptop --------------------------------------------------------------

QWEN2_32B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 131072,
    "max_window_layers": 64,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN3_600M = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def dapo(number: int) -> dict:
    """Return a row in the layout of DAPO-Math-17k."""
    text = f"Solve the following math problem step by step. What is {number} and {number}?"
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"ground_truth": str(2 * number), "style": "rule"},
    }


def gsm8k(number: int) -> dict:
    """Return a row in the layout of GSM8K."""
    return {"question": f"{number} and {number}?", "answer": f"It is\n#### {2 * number}"}


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("recipe", "model", "row", "sources"),
    [
        ("dapo", QWEN2_32B, dapo, ("data/dapo-math/train.jsonl", "data/aime-2024/train.jsonl")),
        (
            "gsm8k_grpo_ray",
            QWEN3_600M,
            gsm8k,
            ("data/gsm8k/main/train.jsonl", "data/gsm8k/main-test/test.jsonl"),
        ),
    ],
)
def test_a_recipe_is_rehearsed_with_a_config_and_a_tokenizer_alone(
    recipe: str,
    model: dict,
    row,
    sources: tuple[str, str],
    tmp_path: Path,
    tokenizer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if recipe.endswith("ray"):
        pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    for source in sources:
        write_rows(tmp_path / source, [row(number) for number in range(20)])
    held_out = [] if recipe == "dapo" else ["eval.source=data/gsm8k/main-test"]

    status, stages = rehearse(
        capsys,
        f"{ROOT}/recipes/rl/{recipe}.yaml",
        "engine.model.path=model",
        *held_out,
    )

    assert status == 0, stages[""]
    assert {"first step", "resume", "switch"} <= set(stages)
