"""The report of a run: its curves by task, what it folds away, and that texts are never markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import (
    HOSTILE,
    Element,
    completion,
    parsed,
    row,
    tree_of,
    write_evaluation,
    write_metrics,
    write_rollouts,
)

from engine_trainer.errors import DataError
from engine_trainer.telemetry.environment import Start, record
from engine_trainer.telemetry.metrics import CURVES_OF, MEANINGS, explain
from engine_trainer.telemetry.report import write_report
from engine_trainer.telemetry.report.curves import curve, scale_of
from engine_trainer.telemetry.series import Series

PAIRS = ["Loss", "Accuracy", "Margin", "Rewards", "Gradient norm", "Learning rate"]
START = Start(
    task="rl",
    after=0,
    steps=4,
    date="2026-11-25T14:00:00+00:00",
    command="engine-train rl run.yaml",
    ranks=2,
    launcher="none",
    backend="fsdp2",
    device="cpu",
    model="model",
    hardware=("2 cores of a processor", "8 GiB of memory"),
    commit="0123abc",
    versions={"python": "3.12", "torch": "2.13"},
)


def titles(section: Element) -> list[str]:
    """The titles of the curves below an element."""
    return [str(term.children[0]) for term in section.all("span", "term")]


def first_curves(page: Path) -> Element:
    return tree_of(page).all("section", "curves")[0]


def folded(page: Path) -> dict[str, Element]:
    """The parts of a page that are folded away, by the beginning of their summary."""
    return {d.all("summary")[0].text.partition(" (")[0]: d for d in tree_of(page).all("details")}


def everything(task: str) -> list[dict]:
    """Rows with every metric of a task's curves, all of which change."""
    names = [m.replace("*", "name") for c in CURVES_OF[task] for m in c.metrics]
    return [{"step": s} | dict.fromkeys(names, s + 0.5) for s in (1, 2, 3)]


@pytest.mark.parametrize(
    ("task", "shown"),
    [
        (
            "sft",
            [
                "Loss",
                "Held-out accuracy",
                "Gradient norm",
                "Learning rate",
                "Tokens per second",
                "Learned tokens",
            ],
        ),
        (
            "rl",
            [
                "Held-out accuracy",
                "Reward",
                "Response length",
                "Entropy",
                "Gradient norm",
                "Rollout mismatch",
            ],
        ),
        ("dpo", PAIRS),
        ("rm", PAIRS),
        ("kto", ["Loss", "Accuracy", "Rewards", "Margin", "Baseline", "Gradient norm"]),
    ],
)
def test_each_task_shows_its_six_curves_and_folds_the_rest_away(tmp_path, task, shown):
    write_metrics(tmp_path, [r | {"data/dropped": r["step"]} for r in everything(task)])
    page = write_report(tmp_path, task)
    assert titles(first_curves(page)) == shown
    other = folded(page)["All other metrics that change"]
    assert "data/dropped" in titles(other)
    # Each metric is drawn once.
    names = [b.text for b in tree_of(page).all("b") if b.text in everything(task)[0]]
    assert sorted(names) == sorted(set(everything(task)[0]) - {"step"})


def test_a_curve_says_what_its_metrics_mean_and_their_values_without_a_script(tmp_path):
    write_metrics(tmp_path, everything("dpo"))
    figures = first_curves(write_report(tmp_path, "dpo")).all("figure")
    (tip,) = figures[1].all("span", "tip")
    assert [b.text for b in tip.all("b")] == ["train/accuracy", "eval/accuracy"]
    assert MEANINGS["train/accuracy"] in tip.text
    assert MEANINGS["eval/accuracy"] in tip.text
    (term,) = figures[1].all("span", "term")
    assert term.attributes["tabindex"] == "0"  # so that a key and a finger reach it
    notes = [note.text for note in figures[1].all("g", "hits")[0].all("title")]
    assert notes == [f"step {s}: train {s}.5, held-out {s}.5" for s in (1, 2, 3)]
    assert figures[1].all("p", "values")[0].text == notes[-1]
    assert len(figures[1].all("path", "line")) == 2


def test_flat_metrics_are_folded_named_and_replaced_by_the_next_curve(tmp_path):
    rows = [
        r | {"mismatch/kl_k3": 1e-13 * r["step"], "train/entropy": 2.0, "sync/audited": 1.0}
        for r in everything("rl")
    ]
    write_metrics(tmp_path, rows)
    page = write_report(tmp_path, "rl")
    assert titles(first_curves(page))[3:] == [
        "Gradient norm",
        "Critic's explained variance",
        "Groups without a signal",
    ]
    (entries,) = folded(page)["Flat metrics"].all("dl")
    flat = {str(e.children[0]).strip(): e.all("b")[0].text for e in entries.all("dt")}
    assert [e.text for e in entries.all("dd")] == [explain(name) for name in flat]
    assert flat == {
        "mismatch/kl_k3": "1e-13 to 3e-13",
        "sync/audited": "1",
        "train/entropy": "2",
    }
    (said,) = [p.text for p in tree_of(page).all("p") if p.text.startswith("Flat, and")]
    assert said == (
        "Flat, and therefore not drawn: train/entropy (2), mismatch/kl_k3 (1e-13 to 3e-13)."
    )


def test_a_single_point_is_a_dot_and_a_missing_metric_is_no_curve(tmp_path):
    write_metrics(tmp_path, [{"step": 0, "eval/loss": 2.0}, {"step": 1, "train/grad_norm": 1.0}])
    figures = first_curves(write_report(tmp_path, "sft")).all("figure")
    assert [figure.all("span", "term")[0].children[0] for figure in figures] == [
        "Loss",
        "Gradient norm",
    ]
    (dots,) = figures[0].all("path", "dots")
    assert dots.attributes["d"] == "M0.0 150.0h0"


def test_a_value_that_is_not_finite_breaks_the_line_and_is_marked(tmp_path):
    losses = [3.0, 2.5, None, 2.0, 1.5]
    write_metrics(tmp_path, [{"step": s, "train/loss": v} for s, v in enumerate(losses, 1)])
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 6, "train/loss": NaN}\n')
    (figure,) = first_curves(write_report(tmp_path, "sft")).all("figure")
    (line,) = figure.all("path", "line")
    assert line.attributes["d"].count("M") == 2
    lost = [mark.text for mark in figure.all("line", "lost")]
    assert lost == [f"step {s}: train/loss is not finite" for s in (3, 6)]
    assert figure.all("p", "values")[0].text == "step 6: not finite"
    assert "nan" not in line.attributes["d"]


def test_a_run_that_is_never_finite_or_logs_nothing_has_a_report(tmp_path):
    write_metrics(tmp_path, [{"step": s, "train/loss": None} for s in (1, 2)])
    page = write_report(tmp_path, "sft")
    assert "no metric that changes" in tree_of(page).text
    assert "never finite" in folded(page)["Flat metrics"].text
    write_metrics(tmp_path, [])
    assert "no metric that changes" in tree_of(write_report(tmp_path, "sft")).text


def test_a_resumed_run_has_the_steps_of_both_parts_once_and_marks_the_border(tmp_path):
    write_metrics(tmp_path, [{"step": s, "train/loss": 1.0 / s} for s in (1, 2, 3, 4)])
    record(tmp_path, START)
    record(tmp_path, replace(START, after=2, commit="4567def", versions={"torch": "2.14"}))
    page = write_report(tmp_path, "sft")
    (figure,) = first_curves(page).all("figure")
    notes = [note.text for note in figure.all("g", "hits")[0].all("title")]
    assert [note.partition(":")[0] for note in notes] == [f"step {s}" for s in (1, 2, 3, 4)]
    assert [mark.text for mark in figure.all("line", "resumed")] == ["resumed after step 2"]
    starts = [r for r in tree_of(page).all("tr") if "engine-train rl run.yaml" in r.text]
    assert [[cell.text for cell in r.all("td")][1:5] for r in starts] == [
        ["0", "2", "0123abc", "python 3.12, torch 2.13"],
        ["2", "2", "4567def", ""],
    ]


def test_the_environment_and_the_configuration_are_on_the_page(tmp_path):
    write_metrics(tmp_path, everything("rl"))
    (tmp_path / "config.yaml").write_text(
        "engine: {model: {path: Qwen/Qwen3-8B}}\nreward: {kwargs: {api_key: '***'}}\n"
        "algorithm: {advantage: grpo}\n"
    )
    record(tmp_path, START)
    page = tree_of(write_report(tmp_path, "rl"))
    (header,) = page.all("header")
    assert header.all("p")[0].text == (
        "Reinforcement learning · grpo · Qwen/Qwen3-8B · 3 of 4 steps · "
        "fsdp2 on 2 ranks (cpu) · 2026-11-25"
    )
    (entries,) = page.all("dl")
    names = [e.text for e in entries.all("dt")]
    found = dict(zip(names, [e.text for e in entries.all("dd")], strict=True))
    assert found["command"] == "engine-train rl run.yaml"
    assert found["commit"] == "0123abc"
    assert found["versions"] == "python 3.12, torch 2.13"
    assert found["hardware"] == "2 cores of a processor, 8 GiB of memory"
    (settings,) = [d for d in page.all("details") if "config.yaml" in d.text]
    assert "api_key: '***'" in settings.all("pre")[0].text


def write_two_evaluations(folder: Path) -> None:
    """Problem 0 is learned, 1 is lost, 2 stays right, 3 stays wrong."""
    for step, verdicts in ((0, "0110"), (8, "1010")):
        write_evaluation(folder, step, [[v == "1"] for v in verdicts])
        path = folder / f"step-{step:06d}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for r, verdict in zip(rows, verdicts, strict=True):
            r["completions"] = [completion(verdict == "1", f"text {r['problem']} of {step}")]
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_samples_are_the_best_the_worst_and_those_that_changed(tmp_path):
    write_metrics(tmp_path, everything("rl"))
    write_two_evaluations(tmp_path / "eval")
    page = tree_of(write_report(tmp_path, "rl"))
    heads = [h.text for h in page.all("h3") if "step" in h.text]
    assert heads == [
        "Best after step 8",
        "Worst after step 8",
        "Learned between steps 0 and 8",
        "Lost between steps 0 and 8",
    ]
    best, worst, learned, lost = page.all("div", "cards")
    assert [a.all("pre")[-1].text for a in best.all("article")] == ["text 0 of 8", "text 2 of 8"]
    assert [a.all("pre")[-1].text for a in worst.all("article")] == ["text 3 of 8", "text 1 of 8"]
    (card,) = learned.all("article")
    assert card.all("h4")[0].text == "problem 0: 0% → 100% correct"
    assert [p.text for p in card.all("pre")] == ["question 0", "1", "text 0 of 0", "text 0 of 8"]
    (card,) = lost.all("article")
    assert card.all("h4")[0].text == "problem 1: 100% → 0% correct"
    assert "1 problem became better, 1 became worse, and 2 stayed the same" in page.text
    table = folded(tmp_path / "report.html")["Each problem over the evaluations"].all("table")[0]
    assert [td.text for td in table.all("tr")[2].all("td")][:2] == ["100%", "0%"]


def test_long_completions_lose_their_middle(tmp_path):
    write_metrics(tmp_path, everything("rl"))
    write_evaluation(tmp_path / "eval", 1, [[True]], completions=[completion(True, "x" * 10_000)])
    (article,) = tree_of(write_report(tmp_path, "rl")).all("article")
    text = article.all("pre")[-1].text
    assert "[… 7000 characters …]" in text
    assert text.count("x") == 3000


def test_rewards_and_lengths_of_kept_rollouts_are_drawn(tmp_path):
    write_metrics(tmp_path, everything("rl"))
    write_rollouts(tmp_path, [row(s, 0, k) for s in (1, 2, 3) for k in (0, 1)])
    page = tree_of(write_report(tmp_path, "rl"))
    (charts,) = page.all("div", "charts")
    assert [f.all("figcaption")[0].text.split()[0] for f in charts.all("figure")] == [
        "Reward",
        "Tokens",
    ]
    assert len(charts.all("figure")[0].all("rect")) == 6
    # Without an evaluation the samples are those of training.
    assert [h.text for h in page.all("h3")][-2:] == [
        "Best of training in step 3",
        "Worst of training in step 3",
    ]


def test_a_run_says_which_option_keeps_what_it_has_not_kept(tmp_path):
    write_metrics(tmp_path, everything("rl"))
    text = tree_of(write_report(tmp_path, "rl")).text
    assert "run.rollouts keeps them" in text
    assert "The configuration's eval makes them" in text
    text = tree_of(write_report(tmp_path, "sft")).text
    assert "The configuration's eval and reward makes them" in text
    assert "rollouts" not in text
    # Pairs need no completion.
    heads = [h.text for h in tree_of(write_report(tmp_path, "dpo")).all("h2")]
    assert "Samples" not in heads


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_a_run_are_never_markup(tmp_path, text):
    """Compare the elements of the page with those of a page of harmless texts."""
    pages: dict[str, Path] = {}
    for kind, given in (("harmless", "x"), ("hostile", text)):
        run = tmp_path / kind
        write_metrics(run, [r | {f"reward/{given}": r["step"]} for r in everything("rl")])
        write_evaluation(
            run / "eval",
            1,
            [[True]],
            question=given,
            answer=given,
            completions=[completion(True, given)],
        )
        (run / "config.yaml").write_text(json.dumps({"engine": {"model": {"path": given}}}))
        record(run, replace(START, command=given, commit=given, versions={given: given}))
        record(run, replace(START, after=1, command=given, hardware=(given,)))
        pages[kind] = write_report(run, "rl")
    harmless, hostile = (parsed(pages[kind]) for kind in ("harmless", "hostile"))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    assert not any(key.startswith("on") for _, found in hostile.elements for key in found)
    assert hostile.text.count(text) >= harmless.text.count("x\n") + 8


def test_no_script_runs_but_the_pages_own_and_nothing_comes_from_elsewhere(tmp_path):
    write_metrics(tmp_path, everything("rl"))
    page = write_report(tmp_path, "rl")
    parser = parsed(page)
    (policy,) = (
        a["content"] for _, a in parser.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    (script,) = parser.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import|\ssrc=|\shref=", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_phases_have_their_seconds_share_and_median(tmp_path):
    rows = [{"step": s, "time/generate": 3.0, "time/train": 1.0} for s in (1, 2)]
    rows[1]["time/save"] = 2.0
    write_metrics(tmp_path, rows)
    page = tree_of(write_report(tmp_path, "rl"))
    (table,) = [t for t in page.all("table") if "phase" in t.text]
    cells = [[c.text for c in r.children] for r in table.all("tbody")[0].all("tr")]
    assert cells == [
        ["generate", "6", "60.0%", "3"],
        ["save", "2", "20.0%", "2"],
        ["train", "2", "20.0%", "1"],
    ]


def test_a_damaged_file_is_named(tmp_path):
    write_metrics(tmp_path, everything("rl"))
    write_evaluation(tmp_path / "eval", 1, [[True]], completions=[{"text": "no verdict"}])
    with pytest.raises(DataError, match="not a row of an evaluation"):
        write_report(tmp_path, "rl")


def test_long_lines_keep_their_extremes_and_all_scales_hold_their_values():
    values = [1.0] * 5000
    values[2501], values[3333] = 9.0, -9.0
    series = Series(name="train/loss", steps=list(range(5000)), values=values)
    figure = curve("Loss", [series], (0, 4999))
    path = re.search(r'class="line line0" d="([^"]*)"', figure)
    assert path is not None
    heights = [float(point.split()[1]) for point in path[1][1:].split("L")]
    assert len(heights) <= 300
    scale = scale_of(values)
    assert {round(scale.place(x) * 300, 1) for x in (9.0, 1.0, -9.0)} == set(heights)
    assert figure.count("<rect") <= 301


def test_labels_of_a_narrow_scale_differ(tmp_path):
    write_metrics(tmp_path, [{"step": s, "train/loss": 1.0 + s * 1e-5} for s in (1, 2, 3, 4)])
    (figure,) = first_curves(write_report(tmp_path, "sft")).all("figure")
    labels = [span.text for span in figure.all("div", "ticks")[0].all("span")]
    assert labels == ["1.00001", "1.00002", "1.00003", "1.00004"]


@pytest.mark.parametrize(
    ("values", "ticks", "is_logarithmic"),
    [
        ([0.36, 0.59], (0.3, 0.4, 0.5, 0.6), False),
        ([1e-4, 3.0], (1e-4, 1e-2, 1.0), True),
        ([0.0, 1000.0], (0.0, 250.0, 500.0, 750.0, 1000.0), False),
        ([5.0], (2.0, 4.0, 6.0, 8.0), False),
        ([0.0], (-1.0, -0.5, 0.0, 0.5, 1.0), False),
    ],
)
def test_scales_have_round_ticks(values, ticks, is_logarithmic):
    scale = scale_of(values)
    assert scale.ticks == pytest.approx(ticks)
    assert scale.is_logarithmic is is_logarithmic
    assert all(0.0 <= scale.place(value) <= 1.0 for value in values)
