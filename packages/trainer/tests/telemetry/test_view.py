"""The page of a run: what it shows, what it leaves out, and that no completion is markup."""

from __future__ import annotations

import base64
import hashlib
import re

import numpy as np
import pytest
from run_folders import HOSTILE, data_of, parsed, row, write_evaluation, write_rollouts

from engine_trainer.cli import main
from engine_trainer.errors import DataError
from engine_trainer.telemetry.pages.charts import histogram_over_steps
from engine_trainer.telemetry.pages.evaluations import evaluation_files, forget_evaluations
from engine_trainer.telemetry.view import write_view
from engine_trainer.telemetry.view.content import read_content


def test_the_page_has_each_token_with_its_numbers(tmp_path):
    some = np.array([0.25, -0.123456, np.nan], dtype=np.float32)
    rows = [row(s, g, k) for s in (1, 2) for g in (0, 1) for k in (0, 1)]
    rows[-1] |= {"entropy": some, "advantages": None, "learned": False}
    write_rollouts(tmp_path, rows)
    page = write_view(tmp_path)
    assert page == tmp_path / "view.html"
    found = data_of(page)
    assert found["steps"] == [1, 2]
    assert [g["group"] for g in found["step-2"]] == [0, 1]
    last = found["step-2"][1]["rows"][1]
    assert last["texts"] == ["a", "b", "c"]
    assert last["mask"] == "110"
    assert last["rollout_log_probs"] == [-1.0, 0.0, 1.0]
    assert last["entropy"] == [0.25, -0.1235, None]
    assert last["ref_log_probs"] is last["advantages"] is None
    assert (last["versions"], last["parts"], last["learned"]) == (2, {"exact": 1.0}, False)
    # One number stands for equal ones.
    assert found["step-1"][0]["rows"][0]["advantages"] == 0.5


@pytest.mark.parametrize("text", HOSTILE)
def test_a_completion_is_text_and_never_markup(tmp_path, text):
    """Compare the elements of the page with those of a page of harmless texts."""
    pages = {}
    for name, given in (("harmless", "x"), ("hostile", text)):
        run = tmp_path / name
        hostile = row(1, 0, 0, text=given) | {
            "prompt": given,
            "question": given,
            "problem": f"{given}:1",
            "answer": given,
            "found_answer": given,
            "error": given,
            "token_texts": [given],
            "tokens": [1],
            "loss_mask": [True],
            "weight_versions": [0],
            "reward_parts": [(given, 1.0)],
            "tool_calls": [{"call": given, "result": given, "start": 0, "end": 1}],
        }
        for field in ("rollout_log_probs", "old_log_probs", "entropy", "advantages"):
            hostile[field] = np.ones(1, dtype=np.float32)
        write_rollouts(run, [hostile])
        write_evaluation(run / "eval", 1, [[True]], question=given, answer=given)
        pages[name] = write_view(run)
    harmless, hostile = (parsed(pages[name]) for name in ("harmless", "hostile"))
    names = [tag for tag, _ in harmless.elements]
    assert [tag for tag, _ in hostile.elements] == names
    assert not any(key.startswith("on") for _, attributes in hostile.elements for key in attributes)
    (group,) = data_of(pages["hostile"])["step-1"]
    (shown,) = group["rows"]
    assert (group["prompt"], group["answer"]) == (text, text)
    assert shown["text"] == text
    assert shown["texts"] == [text]
    assert shown["parts"] == {text: 1.0}
    assert shown["tool_calls"] == [{"call": text, "result": text, "start": 0, "end": 1}]
    assert text in hostile.text
    data = [script for script in hostile.scripts if "use strict" not in script]
    assert data
    assert not any("<" in script for script in data)


def test_no_script_runs_but_the_pages_own_and_nothing_comes_from_elsewhere(tmp_path):
    write_rollouts(tmp_path, [row(1, 0, 0)])
    page = write_view(tmp_path)
    parser = parsed(page)
    (policy,) = (
        a["content"] for _, a in parser.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    (script,) = (s for s in parser.scripts if "use strict" in s)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import|\ssrc=|\shref=", text)
    # The script has no way to make markup of a text.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_of_many_completions_the_page_has_groups_of_all_steps_and_the_charts_have_all(tmp_path):
    rows = [row(s, g, k) for s in range(1, 11) for g in range(4) for k in range(2)]
    write_rollouts(tmp_path, rows)
    for limits in ({"rows": 40}, {"tokens": 40 * 3}):
        content = read_content(tmp_path, **limits)
        assert 30 <= content.rows <= 40
        assert len(content.chosen) == 10
        assert len(content.overview.steps) == 80
        whole = [len(group["rows"]) for _, groups in content.steps() for group in groups]
        assert set(whole) == {2}
        assert sum(whole) == content.rows
    assert read_content(tmp_path).rows == 80


def test_problems_over_evaluations_in_each_set(tmp_path):
    write_evaluation(tmp_path / "eval", 0, [[False, False], [True, False]])
    write_evaluation(tmp_path / "eval", 20, [[True, True], [True, False], [False]])
    write_evaluation(tmp_path / "eval" / "hard", 20, [[True]])
    assert main(["view", str(tmp_path)]) == 0
    text = (tmp_path / "view.html").read_text()
    table, hard = text.split("<table>")[1:]
    assert re.findall(r"<th>step (\d+)</th>", table) == ["0", "20"]
    cells = re.findall(r'<th scope="row">(\d)</th>(.*?)</tr>', table)
    shown = {number: re.findall(r"<td[^>]*>([^<]*)</td>", rest)[:2] for number, rest in cells}
    assert shown == {"0": ["0%", "100%"], "1": ["50%", "50%"], "2": ["", "0%"]}
    assert "Held-out problems of hard" in text
    assert re.findall(r"<th>step (\d+)</th>", hard) == ["20"]
    assert "kept no completions" in text


def test_a_run_forgets_the_evaluations_that_it_will_measure_again(tmp_path):
    for step in (0, 20, 40):
        write_evaluation(tmp_path / "eval", step, [[True]])
        write_evaluation(tmp_path / "eval" / "hard", step, [[True]])
    (tmp_path / "eval" / "notes.txt").write_text("mine")
    forget_evaluations(tmp_path, 20)
    assert {name: [*files] for name, files in evaluation_files(tmp_path).items()} == {
        "": [0, 20],
        "hard": [0, 20],
    }
    forget_evaluations(tmp_path, 0)
    assert evaluation_files(tmp_path) == {}
    assert (tmp_path / "eval" / "notes.txt").is_file()


def test_many_evaluations_are_thinned_and_the_last_one_stays(tmp_path):
    for step in range(60):
        write_evaluation(tmp_path / "eval", step, [[True]])
    steps = re.findall(r"<th>step (\d+)</th>", write_view(tmp_path).read_text())
    assert len(steps) == 25
    assert (steps[0], steps[-1]) == ("0", "59")


def test_the_command_prints_the_path_and_refuses_a_folder_without_a_run(tmp_path, capsys):
    run = tmp_path / "run"
    write_rollouts(run, [row(1, 0, 0)])
    assert main(["view", str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    assert "<h1>run</h1>" in (tmp_path / "page.html").read_text()
    assert main(["view", str(tmp_path)]) == 2
    assert "output_dir" in capsys.readouterr().err


def test_a_broken_evaluation_is_named_with_its_line(tmp_path):
    write_evaluation(tmp_path / "eval", 3, [[True]])
    path = tmp_path / "eval" / "step-000003.jsonl"
    path.write_text(path.read_text() + '{"problem": 1}\n')
    with pytest.raises(DataError, match="not a row of an evaluation") as caught:
        write_view(tmp_path)
    assert (caught.value.file, caught.value.row) == (str(path), 2)


def test_a_histogram_counts_every_value_once():
    steps = np.repeat(np.arange(1, 201), 5)
    values = np.tile([0.0, 0.0, 1.0, 1.0, 0.5], 200)
    chart = histogram_over_steps("Reward", steps, values, "")
    counted = re.findall(r": (\d+) of (\d+)</title>", chart)
    assert sum(int(count) for count, _ in counted) == 1000
    assert chart.count("<rect") == 60 * 3
    assert "step 200" in chart
    # A single value is a line in the middle of nothing, and no division by zero.
    assert "<rect" in histogram_over_steps("Tokens", np.array([3]), np.array([7]), "")
