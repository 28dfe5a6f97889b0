"""Devices without kernels of FP8 are refused, with what they lack."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_api.errors import RolloutError
from rollout_fp8.kernels import capability

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def ask(device: torch.device, *flags: str, cpu: str = "") -> None:
    capability.require_fp8(
        device, "no FP8", kernels="kernels", where="here", remedy="bf16", flags=flags, cpu=cpu
    )


@pytest.mark.parametrize("older", [(7, 5), (8, 0), (8, 6)])
def test_an_older_gpu_is_refused_with_its_capability(
    monkeypatch: pytest.MonkeyPatch, older: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: older)
    with pytest.raises(RolloutError, match=rf"8\.9, cuda:0 has {older[0]}\.{older[1]}"):
        ask(GPU, cpu="not for a GPU")


@pytest.mark.parametrize("newer", [(8, 9), (9, 0), (10, 0)])
def test_a_newer_gpu_is_accepted(monkeypatch: pytest.MonkeyPatch, newer: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: newer)
    ask(GPU)


def test_a_cpu_needs_one_of_the_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(capability, "_CPU_INFO", info)
    info.write_text("flags\t\t: fpu avx512f avx512_vnni\n")
    ask(CPU, "amx_tile", "avx512f")
    # A part of a flag's name is no flag.
    with pytest.raises(RolloutError, match="needs AVX-512"):
        ask(CPU, "avx512", cpu="it needs AVX-512")
    info.unlink()
    with pytest.raises(RolloutError, match="needs AVX-512"):
        ask(CPU, "avx512f", cpu="it needs AVX-512")


def test_a_cpu_fits_no_server_that_names_no_flags() -> None:
    with pytest.raises(RolloutError, match=r"kernels need compute capability 8\.9, cpu has none"):
        ask(CPU)
