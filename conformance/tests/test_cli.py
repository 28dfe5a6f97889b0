"""Tests of the command line: exit codes and texts for wrong requests and misbehaving engines."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from engine_api.registry import EngineRegistry
from engine_conformance.cases import load_cases
from engine_conformance.cli import main
from engine_conformance.deviations import DeviationError, read_deviations, with_deviations
from engine_conformance.results import Outcome, Setting


class Ended(NamedTuple):
    code: int | str | None
    told: str


Cli = Callable[..., Ended]
Install = Callable[[str, str], None]
DESCRIPTOR = """
from engine_api.plugin import EnginePlugin, Row
PLUGIN = EnginePlugin(name="odd", contract="1.0",
                      rows=(Row(backends=("odd",), devices=("cpu", "cuda"),
                                target="odd_engine:Odd"),))
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a distribution for the registry to find.

    The distribution has a descriptor ``odd_plugin`` and any other modules.
    """

    def add(module: str, text: str) -> None:
        info = tmp_path / "site" / "odd-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[engine_api.engines]\nodd = odd_plugin:PLUGIN\n")
        (tmp_path / "site" / f"{module}.py").write_text(text)

    monkeypatch.syspath_prepend(tmp_path / "site")
    EngineRegistry.refresh()
    yield add
    sys.modules.pop("odd_plugin", None)
    EngineRegistry.refresh()


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs the command line in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as usage:  # argparse's own
            code = usage.code
        return Ended(code, "".join(capsys.readouterr()))

    return run


def ends(done: Ended, code: int, *texts: str) -> None:
    assert done.code == code, done.told
    assert not [text for text in texts if text not in done.told], done.told
    assert "Traceback" not in done.told, done.told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        (["no-such-engine"], 3, ["no engine is called 'no-such-engine'"]),
        (["odd", "--device", "npu"], 3, ["npu", "it has rows for: cpu, cuda"]),
        (["odd", "--device", "cuda"], 3, ["cuda"]),
        (["odd", "--case", "train.mo"], 2, ["did you mean", "train.moe"]),
        (
            ["odd", "--case", "parallel.topology", "--world", "8"],
            3,
            ["nothing to run", "parallel.topology: not declared: dp"],
        ),
        (["odd", "--world", "two"], 2, ["--world: ", "1,2,4, got 'two'"]),
        (["odd", "--dtype", "float64"], 2, ["--dtype float64", "bfloat16"]),
        (["odd", "--model-type", "reward_model"], 2, ["reward_model", "value_model"]),
        (["odd", "--model-type", "value_model"], 3, ["value_model"]),
        (["odd", "--profile", "rollout,rl"], 2, ["one by one"]),
        (["odd", "--parallelism", "tp"], 2, ["NAME=SIZE"]),
        (["odd", "--option", "spec"], 2, ["--option spec", "NAME=VALUE"]),
        (["odd", "--option", "9=1"], 2, ["--option 9=1", "NAME=VALUE"]),
        (["odd", "--certify", "--tier", "quick"], 2, ["leave out --tier quick"]),
        (["odd", "--part", "2/5"], 2, ["add --certify"]),
        (["odd", "--certify", "--part", "6/5"], 2, ["K from 1 to N", "2/5, got '6/5'"]),
        (["odd", "--certify", "--part", "1/2", "--case", "train.*"], 2, ["leave out one"]),
        (["odd", "--patience", "0"], 2, ["--patience"]),
        (["odd", "--seed", "-1"], 2, ["--seed -1", "0 or more"]),
        (["odd", "--plugin", "no.such:PLUGIN"], 2, ["no module 'no.such'"]),
        (
            ["odd", "--report", "/proc/nowhere"],
            2,
            ["--report /proc/nowhere", "name another folder"],
        ),
        (["odd", "--deviations", "absent.toml"], 2, ["absent.toml"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_run_says_why(
    cli: Cli, install: Install, arguments: list[str], code: int, texts: list[str]
) -> None:
    unavailable = DESCRIPTOR + (
        "from engine_api.plugin import ProbeResult\nimport dataclasses\n"
        "PLUGIN = dataclasses.replace(PLUGIN, probe=lambda d: "
        "ProbeResult(ok=d == 'cpu', reason=f'no {d}', remedy='-'))\n"
    )
    install("odd_plugin", unavailable)
    ends(cli("run", *arguments), code, *texts)


@pytest.mark.parametrize(
    ("descriptor", "texts"),
    [
        ("raise ImportError('no libodd.so')", ["its import failed", "no libodd.so"]),
        ("import sys; sys.exit(5)", ["its import failed", "SystemExit: 5"]),
        ("import os; os._exit(6)", ["ended the process (exit code 6)"]),
        ("PLUGIN = 7", ["it names a int, not an EnginePlugin"]),
        (DESCRIPTOR.replace("1.0", "9.0"), ["written for contract 9.0"]),
    ],
)
def test_a_descriptor_that_cannot_be_read_is_reported(
    cli: Cli, install: Install, descriptor: str, texts: list[str]
) -> None:
    install("odd_plugin", descriptor)
    ends(cli("run", "odd"), 3, "could not run 'odd'", *texts)


@pytest.mark.slow
def test_a_class_that_cannot_be_imported_fails_its_case(cli: Cli, install: Install) -> None:
    install("odd_plugin", DESCRIPTOR)
    install("odd_engine", "import sys; print('hello from odd'); sys.exit(4)")
    done = cli("run", "odd", "--case", "plugin.classes", "--world", "1")
    assert done.code == 1, done.told
    # The traceback is the engine's own, as a rank saw it.
    told = (
        "FAILED plugin.classes",
        "rank 0 raised",
        "odd_engine:Odd could not be imported",
        "SystemExit: 4",
    )
    assert not [text for text in told if text not in done.told], done.told
    assert "SUITE-ERROR" not in done.told


@pytest.mark.slow
def test_options_of_variants_need_a_dataclass_that_the_descriptor_names(
    cli: Cli, install: Install
) -> None:
    variants = "rows=(Row(", 'variants=(Variant(options={"fast": True}),), rows=(Row('
    descriptor = DESCRIPTOR.replace(*variants).replace("import ", "import Variant, ", 1)
    install("odd_plugin", descriptor.replace('"1.0"', '"1.3"'))
    install("odd_engine", "class Odd:\n    pass\n")
    done = cli("run", "odd", "--case", "plugin.classes", "--world", "1")
    ends(done, 1, "variants have options, and no options dataclass is named")


@pytest.mark.slow
def test_options_reach_the_engine_and_the_line_that_repeats_a_case(
    cli: Cli, install: Install
) -> None:
    install("odd_plugin", DESCRIPTOR.replace("rows=", 'options="odd_engine:Options", rows=', 1))
    install(
        "odd_engine",
        "class Odd:\n"
        "    def __init__(self, config, **_):\n"
        "        raise ValueError(config.options)\n",
    )
    options = ("--option", "spec=local", "--option", "bytes=1024", "--option", "bias=null")
    done = cli("run", "odd", "--case", "train.epsilon", "--world", "1", *options)
    assert done.code == 1, done.told
    assert "ValueError: {'spec': 'local', 'bytes': 1024, 'bias': None}" in done.told
    assert "--option 'spec=\"local\"' --option bytes=1024 --option bias=null" in done.told


@pytest.mark.slow
def test_cases_of_several_options_all_run(cli: Cli, install: Install) -> None:
    install("odd_plugin", DESCRIPTOR)
    install("odd_engine", "class Odd: ...\n")
    done = cli("run", "odd", "--case", "plugin.contract", "--case", "plugin.classes,plugin.probe")
    assert all(f"plugin.{name} " in done.told for name in ("contract", "classes", "probe"))


@pytest.mark.slow
def test_a_model_family_that_the_engine_does_not_know_fails_without_the_hints_of_the_case(
    cli: Cli, install: Install
) -> None:
    install("odd_plugin", DESCRIPTOR)
    install(
        "odd_engine",
        "from engine_api.errors import ConfigError\n"
        "class Odd:\n"
        "    def __init__(self, config, **_): pass\n"
        "    def initialize(self):\n"
        "        raise ConfigError('model.path', 'expected gpt2, got llama')\n",
    )
    done = cli("run", "odd", "--case", "forward.llama", "--world", "1")
    told = ("cannot build a model of the family llama", "expected gpt2, got llama", "families=")
    ends(done, 1, *told)
    assert "RoPE" not in done.told, done.told


def test_a_descriptor_of_families_that_the_suite_does_not_know_cannot_run(
    cli: Cli, install: Install
) -> None:
    install("odd_plugin", DESCRIPTOR.replace('"1.0",', '"1.3", families=("gpt2",),'))
    told = ("one of the model families llama", "got one that declares gpt2", "`families`")
    ends(cli("run", "odd", "--world", "1"), 3, *told)


@pytest.mark.slow
def test_a_descriptor_that_prints_fails_its_case(cli: Cli, install: Install) -> None:
    install("odd_plugin", "print('loading odd')\n" + DESCRIPTOR)
    ends(
        cli("run", "odd", "--case", "plugin.quiet", "--world", "1"),
        1,
        "FAILED plugin.quiet",
        "loading odd",
    )


def test_list_and_explain(cli: Cli) -> None:
    ends(cli("list", "--group", "moe"), 0, "train.moe")
    ends(cli("list", "--group", "nothing"), 2, "groups: ")
    ends(
        cli("explain", "train.moe"),
        0,
        "MUST",
        "if this fails",
        "engine-conformance run NAME --case train.moe",
    )
    ends(cli("explain", "train.mo"), 2, "did you mean")


def test_an_old_report_is_told_from_a_good_one(cli: Cli, tmp_path: Path) -> None:
    old = tmp_path / "report.json"
    old.write_text(json.dumps({"schema": "0", "name": "odd"}))
    ends(cli("verify", str(old)), 1, "older")
    ends(cli("verify", "absent.json"), 2, "which is not a file")
    ends(cli("badge", str(old)), 2, "does not verify")


@pytest.mark.slow
def test_all_but_the_check_of_a_report_runs_without_jsonschema(tmp_path: Path) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "jsonschema.py").write_text(
        "raise ImportError('jsonschema is blocked')"
    )
    # Ranks and the child that reads descriptors get the path by the environment.
    path = os.pathsep.join([str(tmp_path / "blocked"), *filter(None, sys.path)])

    def run(*arguments: str) -> Ended:
        command = [sys.executable, "-m", "engine_conformance", *arguments]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        return Ended(done.returncode, done.stdout + done.stderr)

    loopback = ("run", "loopback", "--plugin", "engine_loopback.plugin:PLUGIN", "--world", "1")
    ends(run("run", "--help"), 0, "--certify")
    ends(run("list", "--group", "moe"), 0, "train.moe")
    ends(run("explain", "train.moe"), 0, "MUST")
    ends(
        run(
            *loopback,
            "--case",
            "export.exact",
            "--model-type",
            "language_model",
            "--report",
            "report",
        ),
        0,
        "export.exact",
    )
    assert {"report.json", "certificate.md", "report.html"} <= {
        file.name for file in (tmp_path / "report").iterdir()
    }
    for command in ("verify", "badge"):
        ends(
            run(command, "report/report.json"),
            3,
            "jsonschema is blocked",
            "pip install 'engine-conformance[verify]'",
        )


# --- deviations -------------------------------------------------------------------------------

GOOD = (
    'case = "train.moe"\nreason = "bf16 router"\n'
    'issue = "https://example.org/1"\nuntil = 2027-01-31\n'
)


def read(path: Path, text: str) -> list[object]:
    path.write_text(text)
    return [*read_deviations(path, known=load_cases(), today=datetime.date(2026, 11, 20))]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[deviation]\n", "Expected"),
        ("[deviations]\n", "only [[deviation]] tables"),
        ("deviation = 3\n", "only [[deviation]] tables"),
        ("deviation = [3]\n", "expected a table, got 3"),
        ("[[deviation]]\n" + GOOD.replace("bf16 router", ""), "lacks reason"),
        ("[[deviation]]\n" + GOOD.replace("issue", "link"), "lacks issue"),
        ("[[deviation]]\n" + GOOD + "dtypes = ['float32']\n", "unknown keys ['dtypes']"),
        ("[[deviation]]\n" + GOOD.replace("train.moe", "train.mo"), "no case is called 'train.mo'"),
        ("[[deviation]]\n" + GOOD.replace("2027-01-31", "2026-01-31"), "ended on 2026-01-31"),
        ("[[deviation]]\n" + GOOD.replace("2027-01-31", '"soon"'), "write a date"),
        ("[[deviation]]\n" + GOOD + "world = 2\n", "write a list of int"),
    ],
)
def test_a_malformed_deviations_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(DeviationError) as caught:
        read(tmp_path / "conformance.toml", text)
    assert told in str(caught.value)
    assert "conformance.toml" in str(caught.value)


def test_deviations_are_strict(tmp_path: Path) -> None:
    (one,) = read(tmp_path / "c.toml", "[[deviation]]\n" + GOOD + "world = [2]\n")
    setting = Setting(model_type="language_model", device="cpu", world=2, dtype="float32")
    assert one.covers("train.moe", setting)
    assert not one.covers(
        "train.moe", Setting(model_type="language_model", device="cpu", world=1, dtype="float32")
    )
    for status, becomes in {
        "failed": "deviation",
        "timeout": "deviation",
        "passed": "stale-deviation",
        "not-run": "not-run",
        "suite-error": "suite-error",
    }.items():
        assert with_deviations(Outcome(status=status, seconds=1.0), one).status == becomes


def test_a_malformed_deviations_file_ends_the_run(
    cli: Cli, install: Install, tmp_path: Path
) -> None:
    install("odd_plugin", DESCRIPTOR)
    (tmp_path / "here" / "conformance.toml").write_text("[[deviation]]\n")
    ends(cli("run", "odd"), 2, "deviation 1", "lacks case, reason, issue, until")
