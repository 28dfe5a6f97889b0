"""A pipeline computes what one rank computes, and leaves no rank waiting."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tested_ranks import NEAR, Pools, open_pools
from torchao_marks import NEEDS_TORCHAO

from engine_conformance.fixtures import TinyModel, write_checkpoint

# Ranks import their functions from here.
sys.path.append(str(Path(__file__).parent))

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WIDE: dict[str, Any] = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "num_experts": 8}
TWO: list[dict[str, Any]] = [
    {"sizes": {"pp": 2}},
    # One micro-batch, which is fewer than there are stages.
    {"sizes": {"pp": 2}, "max_tokens": 1000},
    {"sizes": {"pp": 2}, "recompute": "full", "clip_norm": 0.5},
    {"sizes": {"pp": 2}, "offload_params": True, "offload_optimizer": True},
    {"sizes": {"pp": 2}, "options": {"reduce_each_micro_batch": True, "prefetch_blocks": 1}},
]
FOUR: list[dict[str, Any]] = [
    {"sizes": {"pp": 4}},
    {"sizes": {"pp": 4}, "max_tokens": 1000},
    {"sizes": {"pp": 2}},
    {"sizes": {"pp": 2}, "alone": True},
    {"sizes": {"pp": 2, "dp_replicate": 2}, "clip_norm": 0.5},
    {"sizes": {"pp": 2, "cp": 2}},
    {"sizes": {"pp": 2, "tp": 2}, "clip_norm": 0.5},
    {"sizes": {"pp": 2, "tp": 2}, "options": {"sequence_parallel": False}},
]
EXPERTS: list[dict[str, Any]] = [
    {"sizes": {"pp": 2, "ep": 2}},
    {"sizes": {"pp": 2, "tp": 2, "ep": 2}},
    {"sizes": {"pp": 2, "tp": 2}, "options": {"sequence_parallel": False}},
]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with open_pools() as opened:
        yield opened


def compare(
    pools: Pools,
    path: str,
    ranks: int,
    settings: dict[str, Any],
    near: float = NEAR,
) -> None:
    """Compare a layout's outputs and gradients with those of one rank."""
    shared = ("max_tokens", "clip_norm", "compute", *(["options"] if "compute" in settings else []))
    same = {name: settings[name] for name in shared if name in settings}
    (want,) = pools[1].run("pipeline_ranks:compute", path=path, sizes={}, **same)
    rows = pools[ranks].run("pipeline_ranks:compute", path=path, **settings)
    assert set().union(*(row["outputs"] for row in rows)) == set(want["outputs"])
    for rank, got in enumerate(rows):
        about = f"rank {rank} of {settings}"
        for kind in ("outputs", "states"):
            for document, values in got[kind].items():
                torch.testing.assert_close(
                    values, want[kind][document], rtol=NEAR, atol=NEAR, msg=f"{kind}, {about}"
                )
        assert torch.equal(got["head"], want["head"]), about
        assert list(got["gradients"]) == list(want["gradients"]), about
        for name, gradient in want["gradients"].items():
            largest = float(gradient.abs().max())
            off = float((got["gradients"][name] - gradient).abs().max())
            assert off <= near * max(largest, 1.0), f"{name} is off by {off}, {about}"
        assert got["loss"] == pytest.approx(want["loss"], rel=NEAR), about
        assert got["metrics"] == pytest.approx(want["metrics"], rel=NEAR), about
        assert got["norm"] == pytest.approx(want["norm"], rel=near), about
        assert (got["loss"], got["norm"]) == (rows[0]["loss"], rows[0]["norm"]), about
        if "max_tokens" not in settings and "dp_replicate" not in settings["sizes"]:
            assert got["micro_batches"] > 1, about


@pytest.mark.parametrize("tied", [False, True])
def test_two_stages_compute_what_one_rank_computes(
    tmp_path: Path, pools: Pools, tied: bool
) -> None:
    folder = str(write_checkpoint(tmp_path / "model", TinyModel(tied=tied, **WIDE)))
    for settings in TWO:
        compare(pools, folder, 2, settings)


@pytest.mark.parametrize("tied", [False, True])
def test_four_ranks_compute_what_one_rank_computes(
    tmp_path: Path, pools: Pools, tied: bool
) -> None:
    folder = str(write_checkpoint(tmp_path / "model", TinyModel(tied=tied, **WIDE)))
    for settings in FOUR:
        compare(pools, folder, 4, settings)


def test_experts_in_stages_compute_what_one_rank_computes(tmp_path: Path, pools: Pools) -> None:
    model = TinyModel(family="qwen3_moe", **WIDE)
    folder = str(write_checkpoint(tmp_path / "model", model))
    for settings in EXPERTS:
        compare(pools, folder, 4, settings)


def test_layers_that_stages_do_not_divide_are_computed(tmp_path: Path, pools: Pools) -> None:
    folder = str(write_checkpoint(tmp_path / "model", TinyModel(tied=True, num_layers=3)))
    compare(pools, folder, 2, {"sizes": {"pp": 2}})


@pytest.mark.parametrize(
    "settings",
    [
        {"compute": "bfloat16"},
        pytest.param(
            {"compute": "float8", "options": {"float8_emulate": True}},
            marks=NEEDS_TORCHAO,
        ),
    ],
)
def test_stages_in_fewer_bits_compute_what_one_rank_computes(
    tmp_path: Path, pools: Pools, settings: dict[str, Any]
) -> None:
    folder = str(write_checkpoint(tmp_path / "model", TinyModel(tied=True, num_layers=4)))
    # Outputs are the same. One rank rounds the gradient of each micro-batch, FSDP adds in float32.
    compare(pools, folder, 2, {"sizes": {"pp": 2}, **settings}, near=5e-3)


@pytest.mark.nightly
def test_compiled_blocks_in_stages_compute_what_one_rank_computes(
    tmp_path: Path, pools: Pools
) -> None:
    folder = str(write_checkpoint(tmp_path / "model", TinyModel(tied=True, **WIDE)))
    compare(pools, folder, 2, {"sizes": {"pp": 2}, "compile": True})


def test_a_loss_that_raises_on_the_last_stage_leaves_no_stage_waiting(
    tmp_path: Path, pools: Pools
) -> None:
    folder = str(write_checkpoint(tmp_path / "model", TinyModel(tied=True, **WIDE)))
    ((_, norm),) = pools[1].run("pipeline_ranks:train_after_an_error", path=folder, sizes={})
    found = pools[4].run("pipeline_ranks:train_after_an_error", path=folder, sizes={"pp": 4})
    assert [raised for raised, _ in found] == ["RankFailure"] * 3 + ["KeyError"]
    assert all(got == pytest.approx(norm, rel=NEAR) for _, got in found)


@pytest.mark.parametrize("call", ["train_batch", "infer_batch"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_fails_leaves_no_stage_waiting(tmp_path: Path, rank: int, call: str) -> None:
    folder = str(write_checkpoint(tmp_path / "model", TinyModel(**WIDE)))
    # The failure closes connections, which the ranks of other tests need.
    with open_pools() as own:
        found = own[2].run(
            "pipeline_ranks:fail_in_a_block", path=folder, sizes={"pp": 2}, rank=rank, call=call
        )
    assert found == [("MemoryError" if one == rank else "RankFailure") for one in range(2)]


def test_more_stages_than_layers_are_refused_on_every_rank(tmp_path: Path, pools: Pools) -> None:
    folder = str(write_checkpoint(tmp_path / "model", TinyModel(num_layers=1)))
    for field, text in pools[2].run("pipeline_ranks:refuse", path=folder, sizes={"pp": 2}):
        assert field == "parallelism.pp"
        assert "expected at most 1, got 2" in text
        assert "set parallelism.pp to at most 1" in text


def test_a_closed_stage_keeps_no_tensor(tmp_path: Path, pools: Pools) -> None:
    folder = str(write_checkpoint(tmp_path / "model", TinyModel(tied=True, **WIDE)))
    assert pools[2].run("pipeline_ranks:count_kept", path=folder, sizes={"pp": 2}) == [0, 0]
