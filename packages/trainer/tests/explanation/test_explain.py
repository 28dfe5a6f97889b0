"""``engine-train explain``: seeded defects are named, and a right run has none."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from rl_runs import configure

from engine_trainer.cli import main

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
pytest.importorskip("engine_conformance", reason="the oracle is its own")

LORA = {"lora": {"rank": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}}
# The defect with what the configuration needs for it, the reading that is wrong, and its cause.
DEFECTS = {
    "HalvesPositions": ({}, "engine", "rope scaling: .*divided by 2"),
    "ForgetsTheTemperature": ({}, "engine", "temperature: .*1 in place of 0.7"),
    "JoinsDocuments": ({}, "now", "mask: .*attend to the ones before"),
    "TiesTheHead": ({}, "engine", "tied head: .*the embedding is the head"),
    "DoublesTheAdapter": (LORA, "engine", "adapter scale: .*2 times the scale"),
    "ComputesInBfloat16": ({}, "engine", "dtype: .*rounding to bfloat16"),
    "HasAnotherEpsilon": ({}, "engine", "norm: .*epsilon is 0.001"),
    "ServesStaleWeights": ({}, "rollout", "stale weights: .*those of "),
    "DropsTheTemplate": ({}, "rollout", "chat template: .*without a template"),
    "ForgetsTemperature": ({}, "rollout", "temperature: .*1 in place of 0.7"),
    "Renormalizes": ({}, "rollout", "truncation: .*top_k 5"),
}
# These are tried at every change. The rest takes a run of the loop each.
NOW = ("ForgetsTheTemperature", "ServesStaleWeights")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory, tokenizer_of) -> Path:
    """Return the folder of a two-layer Qwen3 with a chat template and a head of its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("explained") / "model"
    tokenizer = tokenizer_of()
    tokenizer.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(path)
    rows = [
        {"prompt": f"{a} and {b} and {a + b}?", "answer": "7"} for a in range(4) for b in range(8)
    ]
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def record(model: Path, out: Path, *, engine: str = "fsdp2", rollout: str = "local", more=None):
    """Run three steps, with all that an explanation reads."""
    from engine_trainer.rl.loop import train_rl

    config = configure(
        model,
        out,
        engine={
            "backend": engine,
            "optimizer": {"lr": 0.01},
            # The engine's own check at the start would refuse most of the defects.
            "options": {"verify_model": False},
            **(more or {}),
        },
        # Rewards that differ within a group, so that each step learns.
        reward={"name": None, "function": "engine_trainer.rehearsal.noise:rehearsal_noise"},
        run={"save_every": 1, "keep": 0, "rollouts": "all", "save_hf": False},
        rollout={
            "name": rollout,
            "temperature": 0.7,
            "max_new_tokens": 6,
            "top_k": 5 if rollout == "Renormalizes" else 0,
        },
        # The old log-probs are computed before the updates, as inference.
        algorithm={"prompts_per_step": 4, "mini_batches": 2},
    )
    train_rl(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in NOW else pytest.mark.nightly) for n in DEFECTS],
)
def test_a_seeded_defect_is_named(
    name: str, chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from explained_defects import ENGINES, offered

    more, where, cause = DEFECTS[name]
    part = "engine" if name in ENGINES else "rollout"
    with offered():
        record(chat_model, tmp_path / "run", more=more, **{part: name})
        capsys.readouterr()
        status = main(["explain", str(tmp_path / "run"), "--step", "3"])
    told = capsys.readouterr().out

    assert status == 1, told
    blocks = {block.split(":")[0]: block for block in told.split("\n\n")[1:]}
    wrong = next(block for title, block in blocks.items() if title.endswith(where))
    assert "WRONG" in wrong, told
    found = wrong.replace("\n", " ").partition("likeliest cause: ")[2]

    assert re.match(cause, found), told
    sound = "rollout" if part == "engine" else "engine"
    assert "right on" in blocks[sound], told


@pytest.fixture(scope="module")
def right(chat_model: Path, tmp_path_factory) -> Path:
    """Return the folder of a run without a defect."""
    out = tmp_path_factory.mktemp("right") / "run"
    record(chat_model, out)
    return out


def test_nothing_is_found_in_a_right_run(right: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, overrides in (("1", []), ("3", ["engine.precision.compute=auto"])):
        assert main(["explain", str(right), "--step", step, *overrides]) == 0
        told = capsys.readouterr().out
        assert told.endswith("nothing found\n"), told
        assert told.count("right on") == 3
        assert "layers: right" in told


def test_another_engine_is_explained_layer_by_layer(
    right: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An override names an engine whose defect begins in the second layer."""
    from explained_defects import offered

    with offered():
        status = main(["explain", str(right), "--step", "3", "engine.backend=SkipsALayer"])
    told = capsys.readouterr().out
    assert status == 1
    assert "engine: right on" in told
    assert "SkipsALayer now: WRONG" in told
    assert "no cause of the table explains it" in told
    assert "layers: first wrong after layer 1" in told


def test_what_cannot_be_explained_says_why(
    right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    def told(*arguments: str) -> str:
        assert main(["explain", *arguments]) in (1, 2)
        return capsys.readouterr().err

    assert "no run" not in told(str(tmp_path), "--step", "1")
    assert "expected one of the run's 3 steps, got 9" in told(str(right), "--step", "9")
    assert "--documents: expected 1 or more" in told(str(right), "--step", "3", "--documents", "0")

    lost = tmp_path / "lost"
    shutil.copytree(right, lost)
    shutil.rmtree(lost / "checkpoints" / "step-000002")
    missing = told(str(lost), "--step", "3")
    assert "no checkpoint has the weights that step 3 began with" in missing
    assert "steps that have one before them: 1, 2, 4" in missing

    monkeypatch.setattr("engine_trainer.explanation.oracle.SUITE", "no_such_suite")
    assert "pip install 'engine-trainer[explain]'" in told(str(right), "--step", "3")
