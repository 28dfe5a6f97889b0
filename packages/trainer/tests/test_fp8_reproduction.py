"""The recipe that compares rollouts.

Its runs differ in nothing but the rollout, and its table shows the figures that the runs wrote.
"""

from __future__ import annotations

import importlib
import json
import sys

import pytest
from layout import ROOT

from engine_trainer.config import RLConfig
from engine_trainer.config.loading import load_config, to_plain

RECIPE = ROOT / "recipes" / "fp8_reproduction"


@pytest.fixture
def recipe(monkeypatch):
    """Return the modules run.py and plot.py, which are scripts."""
    monkeypatch.setattr(sys, "path", [str(RECIPE), *sys.path])
    names = ("run", "plot", "prepare")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("run"), importlib.import_module("plot")
    for name in names:
        sys.modules.pop(name, None)


def configs(run, monkeypatch, *arguments) -> dict[str, RLConfig]:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    options = run._options()
    jobs = {way: run._rl(options, 5, way) for way in options.ways}
    return {
        way: load_config(RLConfig, job.arguments[1], job.arguments[2:]) for way, job in jobs.items()
    }


def test_the_three_ways_differ_in_the_rollout_alone(recipe, monkeypatch):
    made = configs(
        recipe[0], monkeypatch, "--steps", "40", "--parallel", "6", "algorithm.clip_high=0.3"
    )
    assert {w: c.rollout.quantization for w, c in made.items()} == {
        "bf16": "none",
        "fp8_tis": "fp8",
        "fp8": "fp8",
    }
    assert {
        w: (c.algorithm.correction.weight, c.algorithm.correction.cap) for w, c in made.items()
    } == {"bf16": ("none", 2.0), "fp8_tis": ("token", 2.0), "fp8": ("none", 2.0)}
    plain = [to_plain(c) for c in made.values()]
    for tree in plain:
        assert tree["algorithm"].pop("correction")
        assert tree["rollout"].pop("quantization")
        assert tree["run"].pop("output_dir")
    assert plain[0] == plain[1] == plain[2]
    one = made["fp8"]
    assert (one.run.steps, one.run.seed, one.eval.every, one.algorithm.clip_high) == (40, 5, 4, 0.3)
    assert one.rollout.options["gpu_memory_utilization"] == 0.1


def test_the_local_rollout_runs_bf16_alone(recipe, monkeypatch):
    made = configs(recipe[0], monkeypatch, "--rollout", "local", "--device", "cpu", "--tiny")
    assert list(made) == ["bf16"]
    assert made["bf16"].rollout.options == {}


def test_every_linear_layer_is_made_of_whole_blocks(recipe):
    shape = recipe[0].SHAPE
    heads = [
        shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    ]
    assert not [n for n in (*heads, shape["hidden_size"], shape["intermediate_size"]) if n % 128]


def test_the_table_and_the_picture_say_what_the_runs_wrote(recipe, tmp_path):
    plot = recipe[1]
    for way, seed, final in [("bf16", 0, 0.8), ("bf16", 1, 0.6), ("fp8", 0, 0.5)]:
        folder = tmp_path / f"seed-{seed}" / way
        folder.mkdir(parents=True)
        rows = [{"step": 0, "eval/accuracy": 0.4}] + [
            {
                "step": s,
                "mismatch/kl_k3": 1e-3 * s,
                "mismatch/ess_token": 0.9,
                "mismatch/ess_sequence": 0.5,
                "time/generate": {1: 9.0, 3: 5.0}.get(s, 1.0),
                "time/sync": 0.25,
            }
            for s in (1, 2, 3)
        ]
        rows[-1]["eval/accuracy"] = final
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    runs = plot.read(tmp_path)
    head, _, bf16, fp8 = plot.table(runs).splitlines()
    cells = [dict(zip(head.split("|"), row.split("|"), strict=True)) for row in (bf16, fp8)]
    assert cells[0][" seeds "] == " 0, 1 "
    assert cells[0][" accuracy before "] == " 0.4 ± 0 "
    assert cells[0][" accuracy after "] == " 0.7 ± 0.14 "
    assert cells[0][" mismatch KL "] == " 0.002 ± 0 "
    # Neither the first step nor one with an evaluation counts.
    assert cells[0][" generate, s a step "] == " 1 ± 0 "
    assert cells[1][" accuracy after "] == " 0.5 "
    assert plot.draw(runs, tmp_path / "images" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_runs_is_said(recipe, tmp_path):
    with pytest.raises(SystemExit, match=r"no metrics\.jsonl"):
        recipe[1].read(tmp_path)
