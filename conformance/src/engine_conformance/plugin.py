"""The suite as pytest tests.

``pytest -p engine_conformance.plugin --engine NAME --pyargs engine_conformance.cases``
runs it. The plug-in is named on the command line and never loaded by itself: an
environment that has the suite installed runs its other tests as before. Each case in
each setting is one test; a case that does not run here is a skip with its reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import engine_conformance.cases
from engine_conformance.deviations import Deviation, DeviationError, read_deviations
from engine_conformance.errors import CannotRun, UsageError
from engine_conformance.messages import describe
from engine_conformance.plan import Item, Selection, make_plan
from engine_conformance.ranks import close_pools
from engine_conformance.results import BAD
from engine_conformance.session import run_item

__all__: list[str] = []

_CASES = Path(engine_conformance.cases.__file__).parent
_PLAN = pytest.StashKey["tuple[Selection, Sequence[Item], Sequence[Deviation]]"]()


class CaseFailed(Exception):
    """The failure of a case with its full description, without the traceback of the suite."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the settings that ``engine-conformance run`` has."""
    group = parser.getgroup("engine-conformance")
    group.addoption("--engine", help="the backend's name in the registry, or the rollout's")
    group.addoption("--engine-device", default="cpu")
    group.addoption("--engine-world", default="1,2", help="numbers of ranks, by commas")
    group.addoption("--engine-dtype", default="float32", help="by commas")
    group.addoption(
        "--engine-profile", default="", help="by commas; default: engine,rl (a rollout: rollout)"
    )
    group.addoption("--engine-partner", help="another engine, for what two share")
    group.addoption("--engine-quick", action="store_true", help="the quick tier only")
    group.addoption("--engine-deviations", type=Path, help="a conformance.toml")


def pytest_collection(session: pytest.Session) -> None:
    """Make the plan before anything is collected, so that a mistake is reported once."""
    session.config.stash[_PLAN] = _make_plan(session.config)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Return a collector for a module of cases, instead of a Python test file."""
    if file_path.parent != _CASES or file_path.suffix != ".py" or file_path.name.startswith("_"):
        return None
    collector: pytest.Collector = CaseFile.from_parent(parent, path=file_path)
    return collector


class CaseFile(pytest.File):
    """The cases of one module."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield one test per case and setting."""
        selection, items, deviations = self.config.stash[_PLAN]
        for item in items:
            if item.case.function.__module__.rpartition(".")[2] == self.path.stem:
                name = f"{item.case.id}[{str(item.setting).replace(', ', '-').replace(' ', '')}]"
                yield CaseItem.from_parent(self, name=name, story=(selection, item, deviations))


class CaseItem(pytest.Item):
    """One case in one setting."""

    def __init__(
        self, *, story: tuple[Selection, Item, Sequence[Deviation]], **arguments: object
    ) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self._selection, self._item, self._deviations = story

    def runtest(self) -> None:
        """Run the case, and report one that did not pass as the command line does."""
        row = run_item(self._item, self._selection, self._deviations)
        status = row.outcome.status
        self.user_properties += [("status", status), ("margin", row.outcome.margin)]
        if status == "not-run":
            pytest.skip(row.outcome.message)
        if status == "deviation":
            pytest.xfail(describe(row))
        if status in BAD or status == "suite-error":
            raise CaseFailed(describe(row))

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None
    ) -> str:
        """Return the description of the case, without a traceback."""
        if isinstance(excinfo.value, CaseFailed):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return the file and the line of the case."""
        return self.path, self._item.case.function.__code__.co_firstlineno - 1, self.name


def _make_plan(config: pytest.Config) -> tuple[Selection, Sequence[Item], Sequence[Deviation]]:
    options = config.option
    if not options.engine:
        raise pytest.UsageError(
            "name an engine: --engine NAME (`python -m engine_api list` shows what is installed)"
        )
    # As in `run_selection`.
    torch.set_num_threads(1)
    folder = tempfile.TemporaryDirectory(prefix="conformance-")
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(close_pools)  # no rank outlives the run
    try:
        selection = Selection(
            name=options.engine,
            device=options.engine_device,
            quick=options.engine_quick,
            worlds=tuple(int(word) for word in options.engine_world.split(",")),
            dtypes=tuple(options.engine_dtype.split(",")),
            partner=options.engine_partner,
            profiles=tuple(filter(None, options.engine_profile.split(","))),
        )
        deviations: Sequence[Deviation] = ()
        if options.engine_deviations:
            cases = engine_conformance.cases.load_cases()
            deviations = read_deviations(options.engine_deviations, known=cases)
        return selection, make_plan(selection, Path(folder.name)), deviations
    except (CannotRun, UsageError, DeviationError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error
