"""CUDA simulated on the CPU: what it answers, that it ends, and that a report says so."""

from __future__ import annotations

import os

import pytest
import torch

from engine_api.devices import SIMULATED_CUDA, cuda_is_simulated
from engine_conformance.cli import main
from engine_conformance.environment import SHIMMED, environment
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
    assert (torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda, torch.cuda.Stream) == before
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


def test_a_report_says_that_the_device_was_shimmed() -> None:
    assert environment().get("accelerator") != SHIMMED
    with shimmed():
        assert environment()["accelerator"] == SHIMMED


def test_the_option_is_for_the_cpu_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "loopback", "--shim", "--device", "cuda"]) == 2
    assert "--shim" in capsys.readouterr().err
    assert main(["run", "nonesuch", "--shim"]) == 3
    assert SIMULATED_CUDA not in os.environ
