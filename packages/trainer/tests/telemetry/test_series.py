"""A run's metrics as series, their summary, and the meaning of each."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from run_folders import write_metrics

import engine_trainer
from engine_trainer.errors import DataError
from engine_trainer.telemetry.metrics import CURVES_OF, MEANINGS, explain
from engine_trainer.telemetry.series import Series, load_series, summary


@pytest.fixture
def folder(tmp_path):
    rows = [{"step": 0, "time": 100.0, "eval/accuracy": 0.1}]
    rows += [
        {
            "step": s,
            "time": 5000.0 + 61 * s,
            "perf/elapsed_s": 61.0 * s,
            "train/loss": 3.0 / s,
            "train/lr": None if s == 2 else 0.1,
            "time/train": 1.0,
        }
        for s in range(1, 6)
    ]
    rows[-1]["eval/accuracy"] = 0.6
    write_metrics(tmp_path, rows)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "cut')
    return tmp_path


def test_series_skip_a_half_written_last_line_and_note_values_that_are_not_finite(folder):
    series = load_series(folder / "metrics.jsonl")
    assert series["train/lr"].steps == [1, 3, 4, 5]
    assert series["train/lr"].lost == [2]
    assert series["eval/accuracy"].values == [0.1, 0.6]
    assert "perf/elapsed_s" not in series


def test_a_step_counts_once_with_its_later_value(tmp_path):
    rows = [{"step": s, "train/loss": float(s)} for s in (1, 2, 3)]
    write_metrics(tmp_path, [*rows, {"step": 2, "train/loss": 7.0}, {"step": 2, "eval/loss": 1.0}])
    series = load_series(tmp_path / "metrics.jsonl")
    assert (series["train/loss"].steps, series["train/loss"].values) == ([1, 2, 3], [1.0, 7.0, 3.0])
    assert series["eval/loss"].steps == [2]


@pytest.mark.parametrize(
    ("values", "is_flat"),
    [
        ([0.0, 0.0], True),
        ([1e-13, 5e-13], True),
        ([1.0, 1.0 + 1e-13], True),
        ([1.0000003, 1.0000004], True),
        ([1.0, 1.0001], False),
        ([3e-4, 3e-4], True),
        ([1e-7, 2e-7], False),
        ([0.0, 1.0], False),
        ([5.0], False),
        ([], False),
    ],
)
def test_flat_is_what_differs_by_rounding_alone(values, is_flat):
    assert Series(name="x", steps=[*range(len(values))], values=values).is_flat is is_flat


def test_a_series_that_was_not_finite_once_is_not_flat():
    assert not Series(name="x", steps=[1, 2], values=[1.0, 1.0], lost=[3]).is_flat


def test_the_summary_fits_a_screen_and_shows_before_and_after(folder):
    text = summary(folder)
    assert "5 steps, 0:05:05" in text
    (accuracy,) = [line for line in text.splitlines() if "eval/accuracy" in line]
    assert accuracy.split() == ["eval/accuracy", "0.1", "0.6", "0.6"]
    (loss,) = [line for line in text.splitlines() if "train/loss" in line]
    assert loss.split() == ["train/loss", "3", "0.6", "0.6"]
    assert len(text.splitlines()) < 25


def test_the_summary_has_every_held_out_set_and_leaves_out_what_was_never_finite(tmp_path):
    row = {"step": 1, "eval/aime/accuracy": 0.1, "eval/aime/maj@4": 0.5, "mismatch/kl_k3": 1e-4}
    write_metrics(tmp_path, [row | {"train/loss": None}])
    shown = [line.split()[0] for line in summary(tmp_path).splitlines()[2:]]
    assert shown == ["eval/aime/accuracy", "eval/aime/maj@4", "mismatch/kl_k3"]


def test_a_run_without_metrics_is_said(tmp_path):
    with pytest.raises(DataError, match="no metrics file"):
        load_series(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text("")
    assert "no metrics were logged" in summary(tmp_path)


def test_a_meaning_is_one_sentence():
    for pattern, text in MEANINGS.items():
        assert text.endswith("."), pattern
        assert ". " not in text, pattern
        assert text[0].isupper() or text[0].isdigit() or text[0] == "χ", pattern


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("eval/aime/accuracy", "eval/accuracy"),
        ("eval/aime/maj@8", "eval/maj@2"),
        ("reward/format", "reward/*"),
        ("worker/policy-0/train_batch_s", "worker/*_s"),
        ("worker/policy-0/idle", "worker/*/idle"),
        ("time/my_phase", "time/*"),
        ("sync/install_s", "sync/*_s"),
    ],
)
def test_a_metric_with_a_name_of_its_own_has_the_meaning_of_its_kind(name, same):
    assert explain(name) == (MEANINGS.get(same) or explain(same)) != ""


@pytest.mark.slow
def test_each_metric_that_the_code_names_has_a_meaning():
    groups = "|".join(sorted({name.partition("/")[0] for name in MEANINGS}))
    named = re.compile(rf"({groups})/[a-z_]+[a-z0-9]")
    found = {
        node.value
        for path in Path(engine_trainer.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if named.fullmatch(node.value)
    }
    assert len(found) > 50
    assert [name for name in sorted(found) if not explain(name)] == []


def test_each_curve_has_metrics_with_a_meaning_and_each_task_has_six_or_more():
    assert set(CURVES_OF) == {"sft", "rl", "dpo", "kto", "rm"}
    for curves in CURVES_OF.values():
        assert len(curves) >= 6
        for curve in curves:
            assert all(explain(pattern.replace("*", "name")) for pattern in curve.metrics)
