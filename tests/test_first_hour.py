"""The pages of docs/ for newcomers, executed: files are written, commands run one after another."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from layout import PACKAGES, ROOT
from waiting import DEADLINE_S

DOCS = ROOT / "docs"
# A block is a fence that follows a line with a file's name, or a fence of shell commands.
BLOCK = re.compile(
    r"(?:^`(?P<file>[\w.]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


def run(command: str, folder: Path) -> str:
    """Run one line of the page with this interpreter and the repository's own sources."""
    words = shlex.split(command)
    start = {
        "python": [sys.executable],
        "engine-train": [sys.executable, "-m", "engine_trainer"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    }[words[0]]
    path = os.pathsep.join([*(str(p / "src") for p in PACKAGES), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [*start, *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def blocks(page: str) -> Iterator[re.Match[str]]:
    """Yield the files, commands and outputs of a page in order."""
    yield from BLOCK.finditer((DOCS / page).read_text())


def run_page(page: str, folder: Path) -> list[str]:
    """Write the files of a page, run its commands, and return what each printed."""
    said = []
    for block in blocks(page):
        if block["file"]:
            (folder / block["file"]).write_text(block["text"])
        elif block["kind"] == "sh":
            lines = block["text"].replace("\\\n", " ").splitlines()
            said += [run(line, folder) for line in lines]
    return said


def test_the_page_of_the_installation_times_the_steps_that_the_tool_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    fresh = importlib.import_module("fresh")
    page = (DOCS / "install.md").read_text()
    shown = page.partition("<!-- begin fresh -->")[2].partition("<!-- end fresh -->")[0]
    cells = [line.split(" | ")[0].removeprefix("| ") for line in shown.splitlines() if "|" in line]
    assert cells[2:-1] == list(fresh.STEPS)
    text = fresh.render(
        {"uv": [(2.0, 1.0)] * len(fresh.STEPS)}, {"torch": 699.4, "numpy": 57.0}, 2.0
    )
    assert "| new environment | 2.0, 1.0 |" in text
    assert f"| in all | **{2 * len(fresh.STEPS)}** |" in text
    assert "756 MB: torch 699, numpy 57" in text
    files = {name for name, _ in fresh.FILE.findall((DOCS / "first-hour.md").read_text())}
    assert files == {"make_data.py", "sft.yaml"}


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def first_hour(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Give the folder in which the first hour ran, and what its commands printed."""
    pytest.importorskip(
        "reasoning_gym", reason="the tiny model's tokenizer is made of its problems"
    )
    folder = tmp_path_factory.mktemp("first-hour")
    return folder, run_page("first-hour.md", folder)


@pytest.mark.slow
def test_the_first_hour_runs_as_it_stands(first_hour: tuple[Path, list[str]]) -> None:
    folder, said = first_hour
    # The last command is use.py, which prints an answer.
    assert re.fullmatch(r"#### \d\d", said[-1].strip()), said[-1]
    learned = rows(folder / "runs" / "rl")
    assert learned[-1]["eval/accuracy"] > learned[0]["eval/accuracy"] > 0.2
    measured = json.loads((folder / "runs" / "eval" / "evaluation.json").read_text())["figures"]
    assert {"eval/mean@8", "eval/best@2", "eval/best@4", "eval/best@8"} <= set(measured)
    assert abs(measured["eval/accuracy"] - learned[-1]["eval/accuracy"]) < 0.2
    assert (folder / "runs" / "rl" / "report.html").is_file()


@pytest.mark.slow
def test_a_loss_of_your_own_prints_what_the_page_says(first_hour: tuple[Path, list[str]]) -> None:
    folder, _ = first_hour
    alone, two_ranks = run_page("own-loss.md", folder)
    (shown,) = [block["text"] for block in blocks("own-loss.md") if block["kind"] == "text"]
    assert alone == shown
    assert two_ranks == shown


@pytest.mark.nightly
def test_a_reward_of_your_own_is_trained_with(first_hour: tuple[Path, list[str]]) -> None:
    folder, _ = first_hour
    tried, *_ = run_page("own-reward.md", folder)
    assert tried.strip() == "0.0 -0.5"
    scored = (folder / "runs" / "scored" / "evaluation" / "step-000000.jsonl").read_text()
    rewards = [
        one["reward"] for line in scored.splitlines() for one in json.loads(line)["completions"]
    ]
    assert set(rewards) == {0.0, 1.0}
    assert {"reward/score", "reward/length"} <= set(rows(folder / "runs" / "combined")[-1])
