"""The shards of every engine in FP8: quantized where they are, gathered, installed and audited."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file
from served_model import CONFIG, checkpoint

from engine_api.devices import SIMULATED_CUDA
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_conformance.ranks import RankPool

# The module of the library that an engine wraps, and its layouts of two ranks, by backend.
ENGINES: dict[str, tuple[str, list[dict[str, int]]]] = {
    "fsdp2": ("engine_fsdp", [{}]),
    "megatron": ("megatron", [{}, {"tp": 2}, {"pp": 2}]),
    "veomni": ("veomni", [{}]),
    "torchtitan": ("torchtitan", [{}, {"tp": 2}, {"pp": 2}]),
    "automodel": ("nemo_automodel", [{}, {"tp": 2}]),
}
# Projections of the two layers: queries, keys, values, output, and three of the MLP.
QUANTIZED = 14


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks, where CUDA is simulated because Megatron-core knows nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIMULATED_CUDA, "1")
        pool = RankPool(2, deadline=280.0)
        yield pool
        pool.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose rows on two ranks end within a block of some tensors."""
    path = tmp_path_factory.mktemp("llama")
    (path / "config.json").write_text(
        json.dumps(CONFIG | {"tie_word_embeddings": False, "rms_norm_eps": 1e-6})
    )
    save_file(checkpoint(0), path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("backend", ENGINES)
def test_every_engines_shards_are_served_as_its_whole_weights_quantized_by_the_server(
    backend: str, folder: Path, pool: RankPool
) -> None:
    """Check a sync of the loaded weights and one after an update, each with its audit."""
    library, layouts = ENGINES[backend]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    for layout in layouts:
        for rows in pool.run("engine_sync:serve", path=str(folder), backend=backend, layout=layout):
            assert rows == [(True, QUANTIZED, [])] * 2, layout


# Layouts that spread experts over two ranks, by backend.
SPREAD: dict[str, tuple[str, dict[str, int]]] = {
    "fsdp2": ("engine_fsdp", {"ep": 2}),
    "veomni": ("veomni", {"ep": 2}),
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("backend", SPREAD)
def test_experts_that_are_spread_over_ranks_are_quantized_where_they_are(
    backend: str, tmp_path: Path, pool: RankPool
) -> None:
    library, layout = SPREAD[backend]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    path = write_checkpoint(tmp_path / "model", TinyModel(family="qwen3_moe", num_experts=4))
    found = pool.run("engine_sync:gather", path=str(path), backend=backend, layout=layout)
    assert found == [[], []]
