"""Tests of ``python -m engine_api``: its output, its speed, and that it imports no torch."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import engine_api
from engine_api.__main__ import main
from engine_api.preflight import offenders
from engine_api.registry import EngineRegistry, RolloutRegistry

PLUGIN = """
from engine_api.plugin import CONTRACT, EnginePlugin, ProbeResult, Row

PLUGIN = EnginePlugin(name="acme", contract=CONTRACT, capabilities=frozenset({"lora"}),
    probe=lambda device: ProbeResult(ok=device == "cpu", reason="none here", remedy="buy one"),
    rows=(Row(backends=("acme",), devices=("cuda", "cpu"), target="acme_engine:Engine"),))
"""


@pytest.fixture(autouse=True)
def acme(add_distribution):
    site = add_distribution(
        "acme", {"acme": "acme_cli:PLUGIN"}, {"acme_cli": PLUGIN}, group="engine_api.engines"
    )
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_doctor_says_what_is_missing_and_what_is_broken(capsys, add_distribution):
    out = main(["doctor"]), capsys.readouterr().out
    assert "acme on cuda (acme==1.0 (acme_cli:PLUGIN)): none here; to do: buy one" in out[1]
    assert out[0] == 0
    add_distribution(
        "rotten", {"rotten": "rotten_cli:P"}, {"rotten_cli": "1 / 0"}, group="engine_api.engines"
    )
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
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.slow
def test_list_takes_a_fraction_of_what_importing_torch_takes(acme):
    def seconds(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(code, acme).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # The test compares processor times as a ratio, because a busy machine slows both.
    listing = min(seconds("from engine_api.__main__ import main; main(['list'])") for _ in range(3))
    assert listing < seconds("import torch") / 2


BROKEN = {
    "raises-interrupt": "raise KeyboardInterrupt",
    "raises-base": "class Odd(BaseException): ...\nraise Odd('of its own')",
    "exits": "import sys; sys.exit(5)",
    "ends": "import os; os._exit(6)",
    "no-rows": PLUGIN.replace("rows=(", "rows=None and ("),
    "no-plugin": "PLUGIN = None",
    "ends-in-probe": PLUGIN.replace(
        "probe=lambda device: ", "probe=lambda device: __import__('os')._exit(7) or "
    ),
    "interrupts-in-probe": PLUGIN.replace(
        "probe=lambda device: ", "probe=lambda device: signal.raise_signal(2) or "
    ).replace("from engine_api", "import signal\nfrom engine_api", 1),
}
SAID = {
    "raises-interrupt": "KeyboardInterrupt",
    "raises-base": "of its own",
    "exits": "SystemExit: 5",
    "ends": "its import ended the process (exit code 6)",
    "no-rows": "rows: expected a tuple of one or more Row, got None",
    "no-plugin": "it names a NoneType",
    "ends-in-probe": "ended the process (exit code 7)",
    "interrupts-in-probe": "its probe of 'cpu'",
}


@pytest.mark.slow
def test_plugins_that_break_in_whatever_way_are_named_and_hide_no_other(capsys, add_distribution):
    for name, text in BROKEN.items():
        module = name.replace("-", "_")
        named = text.replace('"acme"', f'"{name}"')
        add_distribution(
            name, {name: f"{module}:PLUGIN"}, {module: named}, group="engine_api.engines"
        )
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert ["language_model", "acme", "cpu", "yes", "acme==1.0"] in rows(out)
    assert main(["explain", "acme"]) == 0
    assert "-> acme_engine:Engine on cpu" in capsys.readouterr().out
    assert main(["doctor"]) == 1
    doctor = capsys.readouterr().out
    assert "by acme on cpu (acme==1.0 (acme_cli:PLUGIN)): ok" in doctor
    for name, said in SAID.items():
        (line,) = [line for line in out.splitlines() if line.startswith(f"broken: {name} ")]
        assert said in line
        assert f"{name} from {name}==1.0" in doctor


@pytest.mark.slow
def test_a_plugin_whose_import_does_not_return_is_named(add_distribution, monkeypatch):
    add_distribution(
        "hangs", {"hangs": "hangs:PLUGIN"}, {"hangs": "import threading; threading.Event().wait()"}
    )
    add_distribution(
        "probes", {"probes": "probes:PLUGIN"}, {"probes": PLUGIN.replace("device ==", "input() ==")}
    )
    monkeypatch.setattr("engine_api.preflight.SILENCE_S", 10.0)
    assert offenders(("test.engines",)) == {
        ("test.engines", "hangs==1.0 (hangs:PLUGIN)"): "its import did not return within 10 s"
    }


@pytest.mark.slow
def test_a_damaged_list_of_entry_points_hides_no_other(capsys, add_distribution):
    site = add_distribution("damaged", {}, {})
    (site / "damaged-1.0.dist-info" / "entry_points.txt").write_text(
        "[engine_api.engines]\nno equals sign\n"
    )
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert ["language_model", "acme", "cpu", "yes", "acme==1.0"] in rows(out)
    assert "broken: damaged from damaged==1.0: its metadata cannot be read" in out


@pytest.mark.slow
def test_two_plugins_that_claim_the_same_are_shown(capsys, add_distribution):
    add_distribution(
        "emca", {"emca": "emca_cli:PLUGIN"}, {"emca_cli": PLUGIN}, group="engine_api.engines"
    )
    said = (
        "conflict: language_model by acme on cuda is offered by "
        "acme==1.0 (acme_cli:PLUGIN) and emca==1.0"
    )
    assert main(["list"]) == 0
    assert said in capsys.readouterr().out
    assert main(["doctor"]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_line_imports_no_torch(acme):
    code = (
        "import sys; from engine_api.__main__ import main\n"
        "for c in (['list'], ['doctor'], ['explain', 'acme']):\n    main(c)\n"
    )
    done = run(code + "assert 'torch' not in sys.modules and 'numpy' not in sys.modules", acme)
    assert done.returncode == 0, done.stderr
