"""What uv would install on another host, and what matrix.toml and the constraints say of it."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from layout import ROOT

MATRIX = tomllib.loads((ROOT / "matrix.toml").read_text())
ENVIRONMENTS: Mapping[str, Any] = MATRIX["environments"]
# uv's texts where the package index cannot be reached.
UNREACHABLE = re.compile("error sending request|dns error|tcp connect error|Request failed")


@dataclass(frozen=True)
class Question:
    """An installation on one kind of host, for uv."""

    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    wanted: frozenset[str]

    def covers(self, other: Question) -> bool:
        """Return whether an answer to this question answers the other one, which asks for less."""
        same = (self.arguments, self.variables) == (other.arguments, other.variables)
        return same and all(any(is_part(one, mine) for mine in self.wanted) for one in other.wanted)

    def answer(self) -> dict[str, str]:
        """Return the versions that uv would install.

        uv's cache may have all that it takes to say so. If not, the package index is asked.

        Raises ``ValueError`` with uv's reason if there are none.
        """
        command = ["uv", "pip", "compile", "-q", "--no-annotate", "--no-header", *self.arguments]
        for cached in (["--offline"], []):
            done = subprocess.run(
                [*command, *cached, "-"],
                input="\n".join(sorted(self.wanted)),
                capture_output=True,
                text=True,
                check=False,
                cwd=ROOT,
                env=os.environ | dict(self.variables),
            )
            if done.returncode == 0:
                break
        if done.returncode:
            raise ValueError(done.stderr)
        pins = [line.split(" ;")[0].split("==") for line in done.stdout.splitlines()]
        return {one[0].replace("_", "-"): one[1] for one in pins if len(one) == 2}


def is_part(one: str, other: str) -> bool:
    """Return whether a requirement is another one, or that with fewer extras."""
    names = [text.partition("[")[0] for text in (one, other)]
    extras = [set(text.partition("[")[2].rstrip("]").split(",")) - {""} for text in (one, other)]
    return names[0] == names[1] and extras[0] <= extras[1]


def questions_for(
    arguments: Iterable[str], wanted: Iterable[str], variables: Mapping[str, str]
) -> Iterator[Question]:
    """Yield an installation for each kind of host that is meant for its constraints."""
    given = tuple(arguments)
    constraints = given[given.index("-c") + 1]
    hosts = {
        (one["python"], platform)
        for one in ENVIRONMENTS.values()
        if one["constraints"] == constraints
        for platform in one["platforms"]
    }
    for python, platform in sorted(hosts) or [("3.11", "x86_64-manylinux_2_28")]:
        # Some packages exclude the first patch releases of a Python.
        host = ("--python-version", f"{python}.9", "--python-platform", platform)
        yield Question((*host, *given), tuple(sorted(variables.items())), frozenset(wanted))


# uv waits for the package index nearly all of the time that an answer takes.
_POOL = ThreadPoolExecutor(6)
_ASKED: dict[Question, Future[dict[str, str]]] = {}


def ask(questions: Iterable[Question]) -> dict[Question, Future[dict[str, str]]]:
    """Return uv's answers, which it works out side by side.

    A question for a part of another one's requirements has the same answer.
    """
    for question in sorted(questions, key=lambda one: -len(one.wanted)):
        known = next((one for one in _ASKED if one.covers(question)), None)
        _ASKED[question] = _ASKED[known] if known else _POOL.submit(question.answer)
    return _ASKED


def versions_of(answer: Future[dict[str, str]]) -> dict[str, str]:
    try:
        return answer.result()
    except ValueError as error:
        if UNREACHABLE.search(str(error)):
            pytest.skip("the package index cannot be reached")
        raise


def public(version: str) -> str:
    """Return a version without the tag of its build."""
    return version.partition("+")[0]


def pins_of(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
