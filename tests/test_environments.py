"""What every nox session would install can be installed on a host of its kind."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from layout import ROOT, project
from resolving import ENVIRONMENTS, Question, ask, pins_of, public, questions_for, versions_of

# These sessions install nothing themselves: one starts nox, the other builds an image.
WITHOUT_INSTALL = {"busy", "containers"}


class EndedError(Exception):
    """A session has ended itself with a reason."""


@dataclass
class Recorder:
    """Session of nox that runs no command and keeps what it was to install."""

    folder: Path
    bin: str = "bin"
    posargs: tuple[str, ...] = ()
    installs: list[tuple[str, ...]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def virtualenv(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(location=str(self.folder))

    def install(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.installs.append(arguments)
        self.variables |= env or {}

    def run(self, *arguments: str, **_: Any) -> str:
        if arguments[:2] == ("uv", "build"):
            folder, place = arguments[-3], Path(arguments[-1])
            name = project(ROOT / folder)["name"].replace("-", "_")
            place.mkdir(exist_ok=True)
            (place / f"{name}-0-py3-none-any.whl").write_text(folder)
        if arguments[:3] == ("uv", "pip", "install"):
            self.installs.append(arguments[3:])
        if arguments[:2] == ("git", "rev-parse"):
            return f"{0:040x}\n"
        return ""

    def create_tmp(self) -> str:
        return str(self.folder)

    def chdir(self, _: str) -> Any:
        return pytest.MonkeyPatch.context()

    def error(self, text: str) -> None:
        raise EndedError(text)

    def log(self, _: str) -> None: ...

    def notify(self, *_: Any) -> None: ...


class StubOfNox(types.SimpleNamespace):
    """The part of nox that noxfile.py uses: it keeps the sessions and their parameters."""

    def __init__(self) -> None:
        super().__init__(options=types.SimpleNamespace(), Session=Recorder)
        self.sessions: dict[str, tuple[Any, dict[str, str]]] = {}

    def session(self, function: Any = None, **_: Any) -> Any:
        if function is None:
            return self.session
        for setting in getattr(function, "settings", [{}]):
            values = ", ".join(f"{name}={value!r}" for name, value in setting.items())
            name = f"{function.__name__}({values})" if setting else function.__name__
            self.sessions[name] = (function, setting)
        return function

    def parametrize(self, names: tuple[str, ...], values: list[tuple[str, ...]]) -> Any:
        def mark(function: Any) -> Any:
            function.settings = [dict(zip(names, one, strict=True)) for one in values]
            return function

        return mark


def load_sessions() -> dict[str, tuple[Any, dict[str, str]]]:
    """Return the functions of noxfile.py by the names that ``nox -l`` shows, with parameters."""
    nox = StubOfNox()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nox", nox)
        patch.syspath_prepend(str(ROOT / "tools"))
        spec = importlib.util.spec_from_file_location("noxfile_under_test", ROOT / "noxfile.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    # Whether this Python is one for nox is no question of these tests.
    module.__dict__["PYTHONS"] = (sys.version_info[:2],)
    return nox.sessions


SESSIONS = load_sessions()
ON_NPU_WITH_MEGATRON = [name for name in SESSIONS if re.search(r"megatron.*device='npu'", name)]


def record(name: str, folder: Path) -> Recorder:
    """Return what a session would install."""
    function, parameters = SESSIONS[name]
    recorder = Recorder(folder)
    function(recorder, **parameters)
    return recorder


# By an option of `uv pip install`: that of `uv pip compile`.
OPTIONS = {"-c": "-c", "--overrides": "--override"}


def as_folder(wheel: str) -> str:
    """Return the folder of a wheel, or of ``NAME[EXTRAS] @ file://WHEEL``, with the extras.

    The recorder's wheels hold nothing but the name of their folder.
    """
    name, _, path = wheel.rpartition(" @ file://")
    extras = name[name.index("[") :] if "[" in name else ""
    return f"-e ./{Path(path).read_text()}{extras}"


def questions(recorder: Recorder) -> Iterator[Question]:
    """Yield a session's installations, for each kind of host that is meant for them."""
    for install in recorder.installs:
        wanted: list[str] = []
        arguments: list[str] = []
        rest = iter(install)
        for word in rest:
            if word == "--no-deps":
                break  # a checkout that the user names
            if word in OPTIONS:
                arguments += [OPTIONS[word], next(rest)]
            elif word == "-e":
                wanted.append(f"-e {next(rest)}")
            elif word == "--python":
                next(rest)
            elif word != "--quiet":
                wanted.append(as_folder(word) if word.endswith(".whl") else word)
        if wanted:
            yield from questions_for(arguments, wanted, recorder.variables)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return uv's answers to every session."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed: pip install uv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINDSPEED", str(tmp_path_factory.mktemp("MindSpeed")))
        asked = {
            name: list(questions(record(name, tmp_path_factory.mktemp("session"))))
            for name in SESSIONS
        }
    found = ask(question for one in asked.values() for question in one)
    return {name: [found[question] for question in one] for name, one in asked.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SESSIONS) - WITHOUT_INSTALL))
def test_every_session_can_be_installed_on_its_host(name: str, answers: dict[str, Any]) -> None:
    assert answers[name]
    for answer in answers[name]:
        assert versions_of(answer)


@pytest.mark.parametrize(
    ("session", "environment"),
    [
        ("conformance(engine='automodel', device='cpu')", "cpu_automodel"),
        ("conformance(engine='fsdp2', device='cpu')", "cpu"),
        ("conformance(engine='megatron', device='cpu')", "cpu_shimmed"),
        ("conformance(engine='torchtitan', device='cpu')", "cpu_torchtitan"),
        ("conformance(engine='veomni', device='cpu')", "cpu_veomni"),
        ("conformance(engine='veomni', device='cuda')", "h200_veomni"),
        ("conformance(engine='veomni', device='npu')", "ascend_veomni"),
        ("conformance(engine='fsdp2', device='cuda')", "h200"),
        ("conformance(engine='fsdp2', device='npu')", "ascend"),
        ("conformance(engine='mindspeed_megatron', device='npu')", "ascend_megatron"),
        ("rollouts(rollout='vllm', device='cuda')", "vllm_h200"),
        ("rollouts(rollout='sglang', device='cuda')", "sglang_h200"),
        ("vllm", "vllm_cpu"),
    ],
)
def test_a_session_gets_the_versions_of_its_environment(
    session: str, environment: str, answers: dict[str, Any]
) -> None:
    for answer in answers[session]:
        versions = versions_of(answer)
        for name, version in ENVIRONMENTS[environment]["versions"].items():
            assert public(versions[name.replace("_", "-")]) == public(version), name


def test_kernels_are_compiled_by_the_triton_of_the_tested_servers(
    tmp_path: Path, answers: dict[str, Any]
) -> None:
    wanted = [word for install in record("kernels", tmp_path).installs for word in install]
    (compiled_by,) = [word for word in wanted if word.startswith("triton==")]
    for server in ("vllm", "sglang"):
        for answer in answers[f"rollouts(rollout={server!r}, device='cuda')"]:
            served_by = f"triton=={versions_of(answer)['triton']}"
            assert served_by == compiled_by, f"noxfile.py: TRITON is to be {served_by!r}"


def test_the_newest_versions_are_those_of_a_package_that_is_behind_in_an_install_of_its_own(
    tmp_path: Path, answers: dict[str, Any]
) -> None:
    behind = tomllib.loads((ROOT / "constraints/behind.toml").read_text())
    together, *alone = record("newest", tmp_path).installs
    newest, *own = answers["newest"]
    pinned = pins_of("constraints/newest.txt")
    for name in behind:
        assert not any(f"/{name}" in word for word in together)
    for name, version in versions_of(newest).items():
        assert public(version) == pinned.get(name, public(version)), name
    for (name, parts), install, answer in zip(behind.items(), alone, own, strict=True):
        assert any(word.startswith(f"./packages/{name}[") for word in install)
        versions = versions_of(answer)
        assert {part: versions[part] for part in parts} == {
            part: entry["newest"] for part, entry in parts.items()
        }


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_constraints_pin_the_versions_of_the_matrix(name: str) -> None:
    environment = ENVIRONMENTS[name]
    pinned = pins_of(environment["constraints"])
    expected = {part: public(text) for part, text in environment["versions"].items()}
    assert {part: pinned.get(part) for part in expected} == expected


def test_constraints_differ_from_those_of_the_cpu_only_where_a_file_says_why() -> None:
    cpu = pins_of("constraints/cpu.txt")
    for file in {one["constraints"] for one in ENVIRONMENTS.values()}:
        named = (ROOT / file).read_text().splitlines()
        reasons = " ".join(line for line in named if line.startswith("#"))
        matrix = {
            part
            for one in ENVIRONMENTS.values()
            if one["constraints"] == file
            for part in one["versions"]
        }
        for part, version in pins_of(file).items():
            if part not in matrix and version != cpu.get(part, version):
                assert part in reasons, f"{file}: {part} {version}, constraints/cpu.txt: {cpu}"


@pytest.mark.parametrize("name", ON_NPU_WITH_MEGATRON)
@pytest.mark.parametrize("folder", [None, "", "no/such/folder"])
def test_a_part_on_no_index_is_asked_for_before_anything_is_installed(
    name: str, folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINDSPEED", raising=False)
    if folder is not None:
        monkeypatch.setenv("MINDSPEED", folder)
    function, parameters = SESSIONS[name]
    recorder = Recorder(tmp_path)
    with pytest.raises(
        EndedError, match=r"MindSpeed 0\.16\.0 is on no package index.*git clone -b"
    ):
        function(recorder, **parameters)
    assert not recorder.installs


PAGE = (ROOT / "docs/matrix.md").read_text()


def names_of(command: str) -> list[str]:
    """Return the sessions that a command line of nox runs."""
    words = shlex.split(command)
    chosen = words[2]
    if words[1] == "-s":
        return [name for name in SESSIONS if name == chosen]
    return [name for name in SESSIONS if all(word in name for word in chosen.split(" and "))]


def test_the_page_has_a_command_for_every_certificate_and_rollout() -> None:
    commands = re.findall(r"`(nox -[sk] [^`]+)`", PAGE)
    named = {name for command in commands if " -s " in command for name in names_of(command)}
    assert named >= {name for name in SESSIONS if name.startswith(("certify", "rollouts"))}
    assert all(names_of(command) for command in commands)


def test_the_workflow_of_the_page_runs_sessions_that_exist() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    jobs = yaml.safe_load(text)["jobs"]
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    commands = [run[run.index("nox -") :] for run in steps if "nox -" in run]
    assert len(commands) == len(jobs)
    assert all(names_of(command) for command in commands)
    assert set(jobs["table"]["needs"]) == set(jobs) - {"table"}
