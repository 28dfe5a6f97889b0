"""The conformance suite on the simulated device and on a CPU mesh, and the reports of its runs.

The CPU mesh runs the same classes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_api.devices import SIMULATED_NPU

HERE = Path(__file__).parent
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def conformance(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(entry for entry in (str(HERE), os.environ.get("PYTHONPATH")) if entry)
    return subprocess.run(
        [sys.executable, "-m", "engine_conformance", "run", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment,
    )


# A few cases of each group; at night the whole quick tier runs.
OF_EACH_GROUP = (
    "plugin.*,contract.states,forward.isolation,forward.pure,train.trajectory,train.uneven_ranks,"
    "checkpoint.resume_bitwise,export.exact,export.shards"
)


def run_simulated(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run cases on the simulated device and return the report."""
    done = conformance(
        "fsdp2", "--device", "npu", "--shim", "--quiet", "--report", str(folder), *arguments
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run cases of each group on one rank and on two, and return the folder of the report."""
    folder = tmp_path_factory.mktemp("report")
    run_simulated(folder, "--world", "1,2", "--case", OF_EACH_GROUP)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


@pytest.mark.nightly
def test_the_quick_tier_passes_on_the_simulated_device(tmp_path: Path) -> None:
    rows = run_simulated(tmp_path, "--world", "1,2", "--tier", "quick")["rows"]
    assert {row["status"] for row in rows} == {"passed"}


def test_every_group_of_cases_passes_on_the_simulated_device(report: dict[str, Any]) -> None:
    rows = report["rows"]
    assert {row["status"] for row in rows} == {"passed"}
    seen = {(row["case"].partition(".")[0], row["model_type"], row["world"]) for row in rows}
    groups = ("contract", "forward", "train", "checkpoint", "export")
    kinds = ("language_model", "value_model")
    assert set(itertools.product(groups, kinds, (1, 2))) <= seen
    uneven = {row["model_type"] for row in rows if row["case"] == "train.uneven_ranks"}
    assert uneven == set(kinds)
    assert ("plugin", "language_model", 1) in seen


def test_reports_say_simulated_and_never_npu(folder: Path, report: dict[str, Any]) -> None:
    assert {row["device"] for row in report["rows"]} == {"simulated"}
    assert report["environment"]["accelerator"] == "simulated"
    assert report["selection"]["device"] == "simulated"
    certificate = (folder / "certificate.md").read_text()
    assert "Devices | simulated" in certificate
    assert "accepted: simulated" in certificate
    assert "--shim" in report["command"]
    for file in folder.iterdir():
        text = file.read_text()
        assert "simulated" in text or file.name == "badge.json"
        assert '"device": "npu"' not in text


@pytest.mark.parametrize(
    ("given", "environment"),
    [(["--shim"], {}), ([], {SIMULATED_NPU: "1"})],
    ids=["shim", "environment"],
)
def test_the_simulated_device_gives_no_certificate(
    given: list[str], environment: dict[str, str]
) -> None:
    done = conformance(
        "fsdp2",
        "--device",
        "npu",
        *given,
        "--world",
        "1",
        "--tier",
        "quick",
        "--certify",
        **environment,
    )
    assert done.returncode == 2
    assert "gives no certificate" in done.stderr


def test_without_an_npu_nothing_runs_on_the_cpu() -> None:
    done = conformance("fsdp2", "--device", "npu", "--world", "1", "--tier", "quick")
    assert done.returncode == 3
    assert "no Ascend NPU" in done.stderr


def test_the_same_classes_shard_on_a_cpu_mesh() -> None:
    cases = "parallel.dp,parallel.ulysses,checkpoint.resume_bitwise,export.shards,train.trajectory"
    done = conformance("npu-logic", "--plugin", "npu_logic:PLUGIN", "--world", "2", "--case", cases)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for case in cases.split(","):
        for kind in ("language_model", "value_model"):
            line = rf"passed +{re.escape(case)} +{kind}, cpu, world 2"
            assert re.search(line, done.stdout), (case, kind)
