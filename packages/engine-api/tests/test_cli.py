"""``python -m engine_api``: what it prints, how fast, and without torch."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import engine_api
from engine_api.__main__ import main
from engine_api.registry import EngineRegistry, RolloutRegistry

PLUGIN = """
from engine_api.plugin import CONTRACT, EnginePlugin, ProbeResult, Row

PLUGIN = EnginePlugin(name="acme", contract=CONTRACT, capabilities=frozenset({"lora"}),
    probe=lambda device: ProbeResult(ok=device == "cpu", reason="none here", remedy="buy one"),
    rows=(Row(backends=("acme",), devices=("cuda", "cpu"), target="acme_engine:Engine"),))
"""


@pytest.fixture(autouse=True)
def acme(add_distribution):
    site = add_distribution("acme", {"acme": "acme_cli:PLUGIN"}, {"acme_cli": PLUGIN}, group="engine_api.engines")
    EngineRegistry.refresh()
    yield site
    EngineRegistry.refresh()
    RolloutRegistry.refresh()


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_list_shows_every_row_and_whether_it_runs_here(capsys):
    assert main(["list"]) == 0
    found = rows(capsys.readouterr().out)
    assert ["language_model", "acme", "cuda", "no", "acme==1.0"] in found
    assert ["language_model", "acme", "cpu", "yes", "acme==1.0"] in found


def test_list_by_capability(capsys):
    main(["list", "--capability", "lora"])
    assert "acme" in capsys.readouterr().out
    main(["list", "--capability", "pp"])
    assert "acme" not in capsys.readouterr().out


def test_explain_shows_the_trace_and_the_choice(capsys):
    assert main(["explain", "acme"]) == 0
    out = capsys.readouterr().out
    assert "cuda by acme==1.0 (acme_cli:PLUGIN): rejected: none here (buy one)" in out
    assert "-> acme_engine:Engine on cpu" in out
    assert "declares: lora" in out


def test_explain_of_what_cannot_be_used(capsys):
    assert main(["explain", "acme", "--device", "cuda"]) == 1
    assert "PluginUnavailable" in capsys.readouterr().out
    assert main(["explain", "nothing-like-it", "--rollout"]) == 1
    assert "no rollout is called" in capsys.readouterr().out


def test_doctor_says_what_is_missing_and_what_is_broken(capsys, add_distribution):
    out = main(["doctor"]), capsys.readouterr().out
    assert "acme on cuda (acme==1.0 (acme_cli:PLUGIN)): none here; to do: buy one" in out[1]
    assert out[0] == 0
    add_distribution("rotten", {"rotten": "rotten_cli:P"}, {"rotten_cli": "1 / 0"}, group="engine_api.engines")
    EngineRegistry.refresh()
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "rotten from rotten==1.0" in text
    assert "ZeroDivisionError" in text
    main(["list"])
    assert "broken: rotten" in capsys.readouterr().out


def test_usage_errors_exit_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["list", "--capability", "flying"])
    assert caught.value.code == 2


def run(code: str, site: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(engine_api.__file__).parents[1]), str(site)])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": path})  # fmt: skip


def test_list_is_quick(acme):
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("from engine_api.__main__ import main; main(['list'])", acme).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime  # a busy machine counts for nothing

    assert min(seconds() for _ in range(3)) < 0.3


def test_the_command_line_imports_no_torch(acme):
    code = "import sys; from engine_api.__main__ import main\nfor c in (['list'], ['doctor'], ['explain', 'acme']):\n    main(c)\n"
    done = run(code + "assert 'torch' not in sys.modules and 'numpy' not in sys.modules", acme)
    assert done.returncode == 0, done.stderr
