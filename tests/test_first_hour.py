"""docs/first-hour.md, executed: its files are written, its commands run one after the other."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from layout import PACKAGES, ROOT
from waiting import DEADLINE_S

PAGE = ROOT / "docs" / "first-hour.md"
# A block is a fence that follows a line with a file's name, or a fence of shell commands.
BLOCK = re.compile(
    r"(?:^`(?P<file>[\w.]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


def run(command: str, folder: Path) -> str:
    """Run one line of the page with this interpreter and the repository's own sources."""
    words = shlex.split(command)
    start = {"python": [sys.executable], "engine-train": [sys.executable, "-m", "engine_trainer"]}[
        words[0]
    ]
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


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip(
        "reasoning_gym", reason="the tiny model's tokenizer is made of its problems"
    )
    said = ""
    for block in BLOCK.finditer(PAGE.read_text()):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["text"])
        elif block["kind"] == "sh":
            for command in block["text"].splitlines():
                said = run(command, tmp_path)
    # The last command is use.py, which prints an answer.
    assert re.fullmatch(r"#### \d\d", said.strip()), said
    learned = rows(tmp_path / "runs" / "rl")
    assert learned[-1]["eval/accuracy"] > learned[0]["eval/accuracy"] > 0.2
    measured = json.loads((tmp_path / "runs" / "eval" / "evaluation.json").read_text())["figures"]
    assert {"eval/mean@8", "eval/best@2", "eval/best@4", "eval/best@8"} <= set(measured)
    assert abs(measured["eval/accuracy"] - learned[-1]["eval/accuracy"]) < 0.2
    assert (tmp_path / "runs" / "rl" / "report.html").is_file()
