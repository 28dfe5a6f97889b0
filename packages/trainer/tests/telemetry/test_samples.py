"""Samples of evaluations, which are text wherever they are shown."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from engine_trainer.config.sections import RunSection
from engine_trainer.telemetry.logs import RunLog
from engine_trainer.telemetry.samples import (
    COLUMNS,
    LONGEST,
    ShownSample,
    code_block,
    spread,
    terminal_text,
)

HOSTILE = "<script>alert(1)</script>\n\n# *title* | `code`\x1b[2J"


def sample(**values) -> ShownSample:
    given = {
        "problem": 7,
        "question": "1+1=",
        "answer": "2",
        "completion": HOSTILE,
        "reward": 0.5,
        "correct": False,
        "tokens": 9,
        "finished": False,
    }
    return ShownSample(**(given | values))


def test_the_terminal_shows_each_text_and_nothing_moves_its_cursor():
    text = terminal_text("eval/hard", 20, [sample(), sample(problem=8, answer=None)])
    assert text.splitlines()[:8] == [
        "samples of eval/hard after step 20:",
        "  problem 7: reward 0.5, not correct, 9 tokens, cut off",
        "    question   1+1=",
        "    answer     2",
        "    completion <script>alert(1)</script>",
        "               ",
        "               # *title* | `code`\\x1b[2J",
        "  problem 8: reward 0.5, not correct, 9 tokens, cut off",
    ]
    assert text.count("answer") == 1
    assert all(c.isprintable() or c == "\n" for c in text)


def test_a_long_completion_keeps_its_beginning_and_its_end():
    text = terminal_text("eval", 1, [sample(completion="a" * 5000 + "the answer")])
    line = text.splitlines()[-1]
    assert len(line) < LONGEST + 60
    assert "aaa […4410 characters…] aaa" in line
    assert line.endswith("the answer")


@pytest.mark.parametrize(
    ("total", "count", "numbers"),
    [(10, 3, [0, 3, 6]), (2, 3, [0, 1]), (5, 0, []), (0, 3, [])],
)
def test_samples_are_spread_over_the_problems(total, count, numbers):
    assert spread(total, count) == numbers


# A dependency of TensorBoard's text plug-in says so of itself.
@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning")
def test_what_renders_markdown_shows_a_completion_as_text():
    from tensorboard.plugin_util import markdown_to_safe_html

    html = str(markdown_to_safe_html(code_block(HOSTILE)))
    assert "&lt;script&gt;" in html
    for markup in ("<script", "<h1", "<em", "<table", "<p>"):
        assert markup not in html


def test_tensorboard_and_trackers_get_whole_samples(tmp_path, monkeypatch, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged: dict[str, list] = {"wandb": [], "trackio": []}

    def package(name: str) -> SimpleNamespace:
        run = SimpleNamespace(
            id="abc",
            name="abc",
            log=lambda values, step: logged[name].append((step, values)),
            finish=lambda: None,
        )
        return SimpleNamespace(init=lambda **_: run, Table=lambda columns, data: (columns, data))

    for name in logged:
        monkeypatch.setitem(sys.modules, name, package(name))
    section = RunSection(
        output_dir="o", steps=5, progress=False, tensorboard=True, wandb="p", trackio="p"
    )
    log = RunLog(tmp_path, section, active=True, total_steps=5)
    log.open(0)
    long = sample(completion="a" * 5000)
    log.show_samples("eval", 3, [long, sample()])
    log.show_samples("eval", 4, [])
    log.close()
    ((step, values),) = logged["wandb"]
    columns, rows = values["samples/eval"]
    assert (step, columns, rows) == (3, list(COLUMNS), [long.row(3), sample().row(3)])
    ((_, values),) = logged["trackio"]
    _, rows = values["samples/eval"]
    # trackio renders texts of tables as Markdown.
    assert rows[1][COLUMNS.index("completion")] == code_block(HOSTILE)
    assert rows[1][COLUMNS.index("reward")] == 0.5
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Tensors("samples/eval/text_summary")
    assert event.step == 3
    assert "    <script>alert(1)</script>" in event.tensor_proto.string_val[0].decode()
    assert capsys.readouterr().out.count("problem 7") == 2


def test_other_ranks_show_nothing(tmp_path, capsys):
    section = RunSection(output_dir="o", steps=5, progress=False, tensorboard=False)
    RunLog(tmp_path, section, active=False, total_steps=5).show_samples("eval", 1, [sample()])
    assert capsys.readouterr().out == ""
