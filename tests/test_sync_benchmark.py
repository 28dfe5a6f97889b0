"""benchmarks/sync.py and its steps in benchmarks/suite.py, as far as a CPU shows them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
from layout import ROOT

from engine_api.capabilities import Capability
from engine_api.config import Parallelism
from engine_api.devices import SIMULATED_CUDA
from engine_api.registry import EngineRegistry
from engine_conformance.ranks import RankPool

# The module of the library that an engine wraps, by backend.
LIBRARIES = {
    "fsdp2": "engine_fsdp",
    "veomni": "veomni",
    "automodel": "nemo_automodel",
    "torchtitan": "torchtitan",
    "megatron": "megatron",
}
SIZES = {"tp": Capability.TP, "pp": Capability.PP, "cp": Capability.CP, "ep": Capability.EP}


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.suite")


@pytest.fixture
def mfu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.mfu")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    """Two ranks, where CUDA is simulated because Megatron-core knows nothing else."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv(SIMULATED_CUDA, "1")
    pool = RankPool(2, deadline=280.0)
    yield pool
    pool.close()


def backends_of(suite: ModuleType, name: str) -> str:
    command = suite.STEPS[name].command
    return command[command.index("--backend") + 1] if "--backend" in command else "fsdp2"


def test_a_group_names_steps_of_every_engine(suite: ModuleType, mfu: ModuleType) -> None:
    assert set(suite.GROUPS["sync-engines"]) <= set(suite.STEPS)
    for name in suite.GROUPS["sync-engines"]:
        found = {entry.backend for entry in mfu.entries(backends_of(suite, name))}
        assert found == set(LIBRARIES), name


def test_the_engines_of_a_step_declare_its_layouts(suite: ModuleType, mfu: ModuleType) -> None:
    """Check each size above 1 of each step that sends weights, and that its product fits."""
    declared = {
        backend: found.plugin.capabilities
        for found, row in EngineRegistry.rows()
        if "cuda" in row.devices
        for backend in row.backends
    }
    for name, step in suite.STEPS.items():
        if "benchmarks.sync" not in step.command:
            continue
        for entry in mfu.entries(backends_of(suite, name)):
            sizes = {size: value for size, value in asdict(entry.layout).items() if size in SIZES}
            for size, value in sizes.items():
                assert value == asdict(Parallelism())[size] or (
                    SIZES[size] in declared[entry.backend] and step.gpus % value == 0
                ), (name, entry)


def test_a_row_is_short_on_the_screen_and_says_which_engine_is_missing(suite: ModuleType) -> None:
    row = {
        "backend": "torchtitan",
        "layout": "ep=2",
        "quantization": "fp8",
        "audit": True,
        "audited": True,
        "ms": 40.0,
        "min_ms": 39.0,
        "max_ms": 41.0,
        "phases_ms": {"gather": 20.0},
        "tensors": 9,
        "quantized": 7,
        "wire_gb_s": 120.0,
        "digest": "ab12",
    }
    line = suite.brief(row)
    assert "torchtitan:ep=2" in line
    assert "audited" in line
    assert "not audited" not in line
    assert "ab12" in line
    missing = {"backend": "veomni", "layout": "", "unavailable": "why\n  to do: pip install it"}
    assert suite.brief(missing).startswith("veomni ")
    assert suite.brief(missing).endswith("not available: to do: pip install it")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_every_engine_of_the_steps_sends_the_same_bits_to_one_replica(
    shape: str, suite: ModuleType, mfu: ModuleType, pool: RankPool, tmp_path: Path
) -> None:
    """Run the command on two ranks, with the backends and layouts of the steps on two GPUs."""
    (step,) = (n for n in suite.GROUPS["sync-engines"] if ("moe" in n) == ("moe" in shape))
    present = [
        word
        for word, entry in zip(
            backends_of(suite, step).split(","),
            mfu.entries(backends_of(suite, step)),
            strict=True,
        )
        if importlib.util.find_spec(LIBRARIES[entry.backend])
    ]
    importlib.import_module("benchmarks.shapes")._write(tmp_path, shape, None)
    arguments = ["--device", "cpu", "--shape", shape, "--quantization", "fp8"]
    arguments += ["--repeats", "1", "--warmup", "0", "--backend", ",".join(present)]
    for rows in pool.run("sync_replica:rows", arguments=arguments, folder=str(tmp_path)):
        assert [f"{row['backend']}:{row['layout']}".rstrip(":") for row in rows[::2]] == present
        assert [row["audited"] for row in rows] == [True, False] * len(present)
        assert all(row["quantized"] > 0 for row in rows)
        assert len({row["digest"] for row in rows[::2]}) == 1
