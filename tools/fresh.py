"""Time the way from wheels to a first trained model, and size the packages that it installs.

``python tools/fresh.py FOLDER`` takes the wheels of a folder into fresh environments, one by uv and
one by pip, follows docs/first-hour.md there up to the SFT, and prints seconds and megabytes. With
``--write`` they replace the table in docs/install.md. `nox -s fresh` builds the wheels before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from environments import environment
from matrix import ROOT, load, replace_section, table

PAGE = ROOT / "docs" / "install.md"
# The files of the page that the SFT reads.
FILE = re.compile(r"^`(make_data\.py|sft\.yaml)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEPS = (
    "new environment",
    "install `enginehouse[gym]` from wheels (pip compiles bytecode, uv leaves it to first starts)",
    "`engine-train recipes copy quickstart`",
    "`python recipes/quickstart/prepare.py model`",
    "[SFT, 120 steps](first-hour.md#3-supervised-fine-tuning), `OMP_NUM_THREADS=1`",
)
INSTALLERS = ("uv", "pip")
SIZES = """
import importlib.metadata, json
found = {}
for one in importlib.metadata.distributions():
    paths = (one.locate_file(file) for file in one.files or ())
    found[one.name] = sum(path.stat().st_size for path in paths if path.is_file()) / 1e6
print(json.dumps(found))
"""
# Number of the largest packages whose size is in the page.
NAMED = 11

Times = list[tuple[float, float]]


def main() -> int:
    """Measure, print, and with ``--write`` put the result into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path, help="folder of the wheels, such as dist")
    parser.add_argument("--write", action="store_true", help=f"write into {PAGE.name}")
    options = parser.parse_args()
    times: dict[str, Times] = {}
    sizes: dict[str, float] = {}
    loads = [os.getloadavg()[0]]
    for installer in INSTALLERS:
        with tempfile.TemporaryDirectory(prefix="fresh-") as folder:
            times[installer] = follow(installer, options.wheels.absolute(), Path(folder))
            loads.append(os.getloadavg()[0])
            if installer == "uv":  # pip counts the bytecode that it makes
                python = str(Path(folder, "venv", "bin", "python"))
                sizes = json.loads(subprocess.check_output([python, "-c", SIZES], text=True))
    text = render(times, sizes, max(loads))
    print(text)
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size:8.1f} MB  {name}")
    if options.write:
        PAGE.write_text(replace_section(PAGE.read_text(), "fresh", text))
    return 0


def follow(installer: str, wheels: Path, folder: Path) -> Times:
    """Return the seconds on the clock and of processor time of each step."""
    home = folder / "venv"
    python, train = (str(home / "bin" / name) for name in ("python", "engine-train"))
    for file, text in FILE.findall((ROOT / "docs" / "first-hour.md").read_text()):
        (folder / file).write_text(text)
    times = [
        measure(folder, create(installer, home)),
        measure(folder, install(installer, python, wheels)),
        measure(folder, [train, "recipes", "copy", "quickstart"]),
        measure(folder, [python, "recipes/quickstart/prepare.py", "model"]),
    ]
    # A user has data already: the time of making some does not count.
    measure(folder, [python, "make_data.py"])
    return [*times, measure(folder, [train, "sft", "sft.yaml"])]


def create(installer: str, home: Path) -> list[str]:
    """Return the command that creates an environment."""
    if installer == "uv":
        return ["uv", "venv", "--quiet", "--python", sys.executable, str(home)]
    return [sys.executable, "-m", "venv", str(home)]


def install(installer: str, python: str, wheels: Path) -> list[str]:
    """Return the command that installs Enginehouse with the tested versions."""
    constraints = str(ROOT / environment(load(), "cpu").constraints)
    wanted = ["--find-links", str(wheels), "-c", constraints, "enginehouse[gym]"]
    if installer == "uv":
        # The option takes the place of the variable, which names the folder of torch's CPU wheel.
        for given in filter(None, os.environ.get("UV_FIND_LINKS", "").split(",")):
            wanted += ["--find-links", given]
        return ["uv", "pip", "install", "--quiet", "--python", python, *wanted]
    return [python, "-m", "pip", "install", "--quiet", *wanted]


def measure(folder: Path, command: Sequence[str]) -> tuple[float, float]:
    """Run a command in a folder, and return its seconds on the clock and of processor time."""
    # Nothing of the tree is imported, torch is that for a CPU, and bytecode is as users have it.
    ours = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "UV_COMPILE_BYTECODE")
    variables = {name: text for name, text in os.environ.items() if name not in ours}
    variables |= environment(load(), "cpu").variables() | {"OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    subprocess.run(command, cwd=folder, env=variables, check=True)
    seconds = time.monotonic() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def render(times: Mapping[str, Times], sizes: Mapping[str, float], most: float) -> str:
    """Return the text of the page between its marks; ``most`` is the machine's highest load."""
    rows = [
        (step, *(f"{times[one][at][0]:.1f}, {times[one][at][1]:.1f}" for one in times))
        for at, step in enumerate(STEPS)
    ]
    rows.append(("in all", *(f"**{sum(clock for clock, _ in times[one]):.0f}**" for one in times)))
    largest = sorted(sizes, key=lambda name: -sizes[name])[:NAMED]
    named = ", ".join(f"{name} {sizes[name]:.0f}" for name in largest)
    machine = f"load up to {most:.0f}, {len(os.sched_getaffinity(0))} cores"
    rest = f", and {len(sizes) - NAMED} more the rest" if len(sizes) > NAMED else ""
    return (
        f"Measured on {datetime.now(UTC):%Y-%m-%d} ({machine}), by `nox -s fresh -- --write`:\n\n"
        f"{table(('step', *times), rows)}\n"
        f"The packages have {sum(sizes.values()):,.0f} MB: {named}{rest}.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
