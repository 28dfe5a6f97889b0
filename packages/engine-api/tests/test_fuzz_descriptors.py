"""Fuzz tests of descriptors, probes and metadata.

Whatever a plug-in has there, every other plug-in is still listed.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import io
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from engine_api import __main__ as command_line
from engine_api.capabilities import Capability
from engine_api.errors import EngineError
from engine_api.plugin import CONTRACT, EnginePlugin, ProbeResult, Row, Variant
from engine_api.registry import EngineRegistry, RolloutRegistry


class Odd(BaseException):
    """An error that ``except Exception`` does not catch."""


class Hostile:
    """A value that raises at each access while ``armed`` is true, as hypothesis accesses it too."""

    armed = False

    @property
    def __class__(self) -> Any:
        if Hostile.armed:
            raise Odd("__class__")
        return Hostile

    def __repr__(self) -> str:
        if Hostile.armed:
            raise Odd("repr")
        return "Hostile()"


WORDS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", " ", "a\nb", "\ud800", "\x00", "good", "cpu", "fsdp2", "a:b", "1.0"]),
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        WORDS,
        st.binary(max_size=4),
        st.just(Hostile()),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.frozensets(WORDS, max_size=2),
        st.dictionaries(WORDS, inner, max_size=2),
    ),
    max_leaves=4,
)
NAMES = st.lists(
    st.sampled_from(["good", "odd", "cpu", "cuda", "npu", "language_model"]), min_size=1, max_size=3
).map(tuple)
ERRORS = st.sampled_from(
    [
        Odd("odd\ud800"),
        SystemExit(3),
        GeneratorExit(),
        ValueError("\ud800"),
        RecursionError(),
        StopIteration(),
    ]
)


def maybe(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(usual, usual, VALUES)


ROWS = st.builds(
    Row,
    backends=maybe(NAMES),
    devices=maybe(NAMES),
    target=maybe(st.just("engine:Engine")),
    model_types=maybe(NAMES),
)
ANSWERS = maybe(
    st.builds(ProbeResult, ok=maybe(st.booleans()), reason=maybe(WORDS), remedy=maybe(WORDS))
)


@st.composite
def probes(draw: st.DrawFn) -> Any:
    answer, error = draw(ANSWERS), draw(st.none() | ERRORS)

    def probe(device: str) -> Any:
        if error is not None:
            raise error
        return answer

    return probe


VARIANTS = st.builds(Variant, options=VALUES, parallelism=VALUES)
DESCRIPTORS = st.builds(
    EnginePlugin,
    name=maybe(WORDS),
    contract=maybe(st.sampled_from([CONTRACT, "1.0", "9.9", "x"])),
    rows=maybe(st.lists(st.one_of(ROWS, ROWS, VALUES), max_size=3).map(tuple)),
    capabilities=maybe(st.frozensets(st.sampled_from(list(Capability)), max_size=2)),
    options=maybe(st.none()),
    exporter=maybe(st.none()),
    wire=maybe(st.none()),
    families=maybe(st.lists(WORDS, max_size=2).map(tuple)),
    one_layout=maybe(st.booleans()),
    variants=maybe(st.lists(st.one_of(VARIANTS, VALUES), max_size=2).map(tuple)),
    probe=maybe(probes()),
)


class Text(importlib.metadata.Distribution):
    """A distribution with given metadata."""

    def __init__(self, metadata: str, entries: str) -> None:
        self._texts = {"METADATA": metadata, "entry_points.txt": entries}

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise NotImplementedError


class Finder(importlib.metadata.DistributionFinder):
    """A finder that the import system asks for installed distributions."""

    def __init__(self) -> None:
        self.found: list[Text] = []

    def find_spec(self, *_: Any) -> None:
        """Return None, because nothing is imported through this finder."""

    def find_distributions(self, context: Any = None) -> Iterator[Text]:
        return iter(self.found)


class Raising(ModuleType):
    """A loader of a module whose import raises."""

    error: BaseException

    def __getattr__(self, name: str) -> Any:
        raise self.error


@pytest.fixture(scope="module")
def finder() -> Iterator[Finder]:
    """Put the plug-in in front of a good one, and hide the plug-ins that are installed here."""
    good = ModuleType("fuzzed_good")
    good.PLUGIN = EnginePlugin(
        name="good",
        contract=CONTRACT,
        rows=(Row(backends=("only-good",), devices=("cpu",), target="good_engine:Engine"),),
    )
    made = Finder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", [made, *sys.meta_path])
        patch.setattr(importlib.machinery.PathFinder, "find_distributions", lambda *_: iter(()))
        patch.setitem(sys.modules, "fuzzed_good", good)
        # The preflight loads plug-ins in another process, where these are unknown. Its tests are in
        # test_cli.py.
        patch.setattr(command_line, "offenders", lambda groups: {})
        yield made
    EngineRegistry.refresh()
    RolloutRegistry.refresh()


def metadata(name: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


def outputs() -> dict[str, str]:
    """Return the output of each command, after a check that it can be written as UTF-8."""
    found = {}
    for command in (["list"], ["explain", "only-good"], ["explain", "odd"], ["doctor"]):
        with contextlib.redirect_stdout(io.StringIO()) as told:
            code = command_line.main(command)
        assert code in (0, 1)
        found[" ".join(command)] = told.getvalue()
        assert told.getvalue().encode()
    return found


def check_good(found: dict[str, str]) -> None:
    assert ["language_model", "only-good", "cpu", "yes", "good==1.0"] in [
        line.split() for line in found["list"].splitlines()
    ]
    assert "-> good_engine:Engine on cpu" in found["explain only-good"]
    assert (
        "language_model by only-good on cpu (good==1.0 (fuzzed_good:PLUGIN)): ok" in found["doctor"]
    )


@pytest.mark.slow
@fuzz()
@given(
    descriptor=st.one_of(DESCRIPTORS, DESCRIPTORS, VALUES),
    error=st.none() | st.none() | ERRORS,
    name=WORDS,
)
def test_whatever_a_descriptor_holds_or_its_import_raises(
    finder: Finder, descriptor: Any, error: Any, name: str
) -> None:
    module = ModuleType("fuzzed_odd") if error is None else Raising("fuzzed_odd")
    if error is None:
        module.PLUGIN = descriptor
    else:
        module.error = error
    finder.found = [
        Text(metadata("odd"), f"[engine_api.engines]\nodd{name.strip()} = fuzzed_odd:PLUGIN\n"),
        Text(metadata("good"), "[engine_api.engines]\ngood = fuzzed_good:PLUGIN\n"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fuzzed_odd", module)
        patch.setattr(Hostile, "armed", True)
        found = outputs()
        check_good(found)
        assert "odd==1.0" in found["list"] + found["doctor"] or "odd" not in str(
            EngineRegistry.found()
        )
        for device in ("auto", "cpu", "cuda", "npu"):
            for backend in ("odd", "good"):
                with contextlib.suppress(EngineError):
                    assert (
                        EngineRegistry.resolve(backend=backend, device=device).plugin is descriptor
                    )


@pytest.mark.slow
@fuzz()
@given(text=st.text(alphabet="[]=:\n abc.\ud800é#", max_size=40), name=WORDS)
def test_whatever_a_distributions_metadata_hold(finder: Finder, text: str, name: str) -> None:
    finder.found = [
        Text(metadata(f"x{name}"), "[engine_api.engines]\n" + text),
        Text("", text),
        Text(metadata("good"), "[engine_api.engines]\ngood = fuzzed_good:PLUGIN\n"),
    ]
    check_good(outputs())
