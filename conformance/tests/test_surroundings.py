"""The parts of a process's state that the suite does not count as the engine's."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor.compile_worker.subproc_pool import SubprocPool

from engine_conformance.cases._surroundings import ImportedVariables, read_surroundings
from engine_conformance.cases.export import all_tensors, bytes_alive
from engine_loopback.engine import LoopbackEngine

VARIABLE = "SURROUNDINGS_TEST_VARIABLE"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a package that sets a variable when it is imported, as scikit-learn does.

    Afterwards the variable is gone.
    """
    name = "surroundings_test_library"
    (tmp_path / f"{name}.py").write_text(f"import os\nos.environ.setdefault({VARIABLE!r}, '1')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)
    os.environ.pop(VARIABLE, None)


def test_a_variable_that_a_library_sets_when_it_is_imported_is_not_the_engines(
    library: str,
) -> None:
    imported = ImportedVariables()
    importlib.import_module(library)
    assert VARIABLE in os.environ
    assert imported.set_by_others(LoopbackEngine) == {VARIABLE}


def test_a_variable_that_the_engine_changes_later_is_its_own(library: str) -> None:
    imported = ImportedVariables()
    importlib.import_module(library)
    os.environ[VARIABLE] = "2"
    assert imported.set_by_others(LoopbackEngine) == frozenset()


def test_a_variable_that_a_module_of_the_engine_sets_is_its_own(library: str) -> None:
    imported = ImportedVariables()
    importlib.import_module(library)
    engine = type("Engine", (LoopbackEngine,), {"__module__": f"{library}.engine"})
    assert imported.set_by_others(engine) == frozenset()


@pytest.mark.slow
def test_the_workers_of_the_compiler_are_no_children() -> None:
    before = read_surroundings("cpu", frozenset()).children
    pool = SubprocPool(1)
    try:
        assert pool.process.poll() is None
        assert read_surroundings("cpu", frozenset()).children == before
    finally:
        pool.shutdown()


def test_a_wrapper_of_torch_func_that_is_alive_has_no_storage_of_its_own() -> None:
    kept: list[torch.Tensor] = []

    def keep(row: torch.Tensor) -> torch.Tensor:
        kept.append(row)
        return row

    rows = torch.ones(3, 5)
    torch.func.vmap(keep)(rows)
    assert any(one is kept[0] for one in all_tensors())
    assert bytes_alive([rows, *kept]) == {rows.untyped_storage().data_ptr(): 3 * 5 * 4}
