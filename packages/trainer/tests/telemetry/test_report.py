from __future__ import annotations

import json

import pytest

from engine_trainer.errors import DataError
from engine_trainer.telemetry.report import load_series, summary, write_report


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
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows) + '{"step": 6, "cut'
    )
    return tmp_path


def test_series_skip_nulls_and_a_half_written_last_line(folder):
    series = load_series(folder / "metrics.jsonl")
    assert series["train/lr"].steps == [1, 3, 4, 5]
    assert series["eval/accuracy"].values == [0.1, 0.6]


def test_the_summary_fits_a_screen_and_shows_before_and_after(folder):
    text = summary(folder)
    assert "5 steps, 0:05:05" in text
    (accuracy,) = [line for line in text.splitlines() if "eval/accuracy" in line]
    assert accuracy.split() == ["eval/accuracy", "0.1", "0.6", "0.6"]
    (loss,) = [line for line in text.splitlines() if "train/loss" in line]
    assert loss.split() == ["train/loss", "3", "0.6", "0.6"]
    assert len(text.splitlines()) < 25


def test_the_report_is_one_file_with_its_plots_inside(folder):
    (folder / "config.yaml").write_text("engine: <b>\n")
    page = write_report(folder).read_text()
    assert sorted(p.name for p in (folder / "plots").iterdir()) == [
        "eval.png",
        "overview.png",
        "phases.png",
        "time.png",
        "train.png",
    ]
    assert (folder / "plots" / "overview.png").read_bytes().startswith(b"\x89PNG")
    assert page.count("data:image/png;base64,") == 5
    assert 'src="plots' not in page
    assert "engine: &lt;b&gt;" in page


def test_the_report_says_where_the_time_went_and_shows_every_set(tmp_path):
    rows = [
        {
            "step": s,
            "time": float(s),
            "time/generate": 3.0,
            "time/train": 1.0,
            "eval/aime/accuracy": 0.1 * s,
            "eval/aime/maj@4": 0.5,
            "mismatch/kl_k3": 1e-4,
            "reward/failures/mine": 1.0,
        }
        for s in (1, 2)
    ]
    rows[1]["time/save"] = 2.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = write_report(tmp_path).read_text()
    for row in (
        "generate</td><td>6</td><td>60.0%</td><td>3<",
        "train</td><td>2</td><td>20.0%</td><td>1<",
        "save</td><td>2</td><td>20.0%</td><td>2<",
    ):
        assert row in page
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {
        "eval-aime.png",
        "mismatch.png",
        "overview.png",
        "phases.png",
        "reward-failures.png",
        "time.png",
    }
    shown = [line.split()[0] for line in summary(tmp_path).splitlines()[2:]]
    assert shown == ["eval/aime/accuracy", "eval/aime/maj@4", "mismatch/kl_k3"]


def test_a_run_without_metrics_is_said(tmp_path):
    with pytest.raises(DataError, match="no metrics file"):
        load_series(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text("")
    assert "no metrics were logged" in summary(tmp_path)
    assert write_report(tmp_path).is_file()
