"""Build an image of containers/ and try it, with whichever builder answers on this host."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence

from matrix import ROOT

# The command that answers only if the builder works. Docker's client is often there without a
# daemon.
BUILDERS = {
    "docker": ("docker", "version", "--format", "{{.Server.Version}}"),
    "podman": ("podman", "info"),
    "buildah": ("buildah", "info"),
}
IMAGES = sorted(path.stem for path in ROOT.glob("containers/*.Dockerfile"))
# What an image must be able to do. The last of the CPU's is its one command.
TRIAL = ("engine-train --version", "python -m engine_api doctor")
# torchrun's ranks look each other up by the host's name, which nothing resolves without a network.
HOST = ("--hostname", "localhost")
QUICKSTART = "engine-train recipes copy quickstart && python recipes/quickstart/run.py"


def find_builder() -> str:
    """Return the first builder that works here.

    Raises ``LookupError`` with the reason for each of them if none does.
    """
    reasons = []
    for name, question in BUILDERS.items():
        if shutil.which(name) is None:
            reasons.append(f"{name}: not installed")
            continue
        done = subprocess.run(question, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return name
        said = (done.stderr or done.stdout).strip().splitlines()
        reasons.append(f"{name}: {said[-1] if said else f'exit code {done.returncode}'}")
    raise LookupError(
        f"expected a builder of container images, got none that works ({'; '.join(reasons)}): "
        "install podman or buildah, or start Docker's daemon"
    )


def build_command(builder: str, image: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that builds an image, with further arguments of the builder."""
    file = f"containers/{image}.Dockerfile"
    return [builder, "build", "-f", file, "-t", f"enginehouse:{image}", *arguments, "."]


def trial_commands(builder: str, image: str) -> list[list[str]]:
    """Return the commands that try an image: versions, and for the CPU's a recipe."""
    trials = [*TRIAL, *([QUICKSTART] if image == "cpu" else [])]
    name = f"enginehouse:{image}"
    if builder == "buildah":
        # buildah runs a command in a working container, which it makes from the image.
        container = f"enginehouse-{image}-trial"
        run = (builder, "run", *HOST, container, "--", "sh", "-c")
        runs = [[*run, trial] for trial in trials]
        return [
            [builder, "from", "--name", container, f"localhost/{name}"],
            *runs,
            [builder, "rm", container],
        ]
    once = (builder, "run", "--rm", "--network", "none", *HOST, "--shm-size", "1g", name)
    return [[*once, "sh", "-c", trial] for trial in trials]


def main() -> int:
    """Build and try an image, and return the exit code: 3 without a builder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", nargs="?", default="cpu", choices=IMAGES)
    parser.add_argument("arguments", nargs="*", help="further ones of the builder, after --")
    options = parser.parse_args()
    try:
        builder = find_builder()
    except LookupError as error:
        print(f"containers: {error}", file=sys.stderr)
        return 3
    for command in [
        build_command(builder, options.image, options.arguments),
        *trial_commands(builder, options.image),
    ]:
        print(" ".join(command), flush=True)
        done = subprocess.run(command, check=False, cwd=ROOT)
        if done.returncode:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
