"""Tests of CUDA simulated on the CPU: its answers, its end, and the mention in a report."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from engine_api.devices import SIMULATED_CUDA, cuda_is_simulated
from engine_conformance.cli import main
from engine_conformance.environment import SHIMMED, environment
from engine_conformance.ranks import RankPool
from engine_conformance.shim import shimmed


def test_cuda_means_the_cpu_inside_and_nothing_stays_behind() -> None:
    before = (torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda, torch.cuda.Stream)
    with shimmed():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.ones(1).cuda().device.type == "cpu"
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        assert cuda_is_simulated()
        assert not torch.cuda.is_available()
    assert (
        torch.cuda.current_device,
        torch.Tensor.type,
        torch.Tensor.cuda,
        torch.cuda.Stream,
    ) == before
    assert not cuda_is_simulated()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_it_ends_when_the_body_raises() -> None:
    with pytest.raises(KeyError), shimmed():
        raise KeyError
    assert not cuda_is_simulated()


def test_only_megatron_is_told_that_tensors_are_of_cuda() -> None:
    asks = {"__name__": "megatron.core.optimizer", "torch": torch}
    with shimmed():
        assert torch.zeros(1).type() == "torch.FloatTensor"
        assert eval("torch.zeros(1).type()", asks) == "torch.cuda.FloatTensor"
        assert eval("torch.zeros(1).type(torch.int64)", asks).dtype == torch.int64


def test_generators_are_the_cpus() -> None:
    with shimmed():
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("lengths", [[3, 1], [1, 3], [2, 2]])
def test_tensors_of_several_lengths_are_gathered_and_summed(
    pool: RankPool, lengths: list[int]
) -> None:
    rows = [10 * rank + torch.arange(2.0 * n).reshape(n, 2) for rank, n in enumerate(lengths)]
    for rank, (gathered, part) in enumerate(
        pool.run("rank_functions:gather_unevenly", lengths=lengths)
    ):
        assert all(torch.equal(got, want) for got, want in zip(gathered, rows, strict=True))
        assert torch.equal(part, 3 * rows[rank])  # once and twice


@pytest.mark.distributed
@pytest.mark.parametrize("function", ["all_gather", "reduce_scatter"])
def test_several_lengths_are_refused_where_nobody_waits(pool: RankPool, function: str) -> None:
    said = pool.run("rank_functions:gather_unevenly_later", called=function, lengths=[3, 1])
    assert all(function in text and "async_op" in text for text in said), said


def test_a_report_says_that_the_device_was_shimmed() -> None:
    assert environment().get("accelerator") != SHIMMED
    with shimmed():
        assert environment()["accelerator"] == SHIMMED


@pytest.mark.slow
def test_the_option_is_for_the_cpu_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "loopback", "--shim", "--device", "cuda"]) == 2
    assert "--shim" in capsys.readouterr().err
    assert main(["run", "nonesuch", "--shim"]) == 3
    assert SIMULATED_CUDA not in os.environ
