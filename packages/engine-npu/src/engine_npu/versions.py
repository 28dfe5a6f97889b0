"""Which versions belong together, by their publishers' documentation. None of them was run by this project.

Sources: torch_npu with CANN from ``COMPATIBILITY.md`` of gitcode.com/Ascend/pytorch (read 2026-11), torch_npu with torch from
the wheels' metadata (``Requires-Dist``), MindSpeed with Megatron-core from the README of its branch ``core_r0.16.0``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "MINDSPEED",
    "TORCH_NPU",
    "MindSpeed",
    "TorchNpu",
    "mindspeed_table",
    "torch_npu_line",
    "torch_npu_table",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchNpu:
    """A torch_npu of PyPI; ``cann`` is None where its documentation names none yet."""

    version: str
    torch: str
    cann: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MindSpeed:
    """A MindSpeed branch, and what its own README pairs it with."""

    version: str  # of the distribution that its setup.py makes
    branch: str
    megatron_core: str
    cann: str
    torch: str


# From torch 2.11 on, which engine-fsdp and engine-megatron need.
TORCH_NPU = (
    TorchNpu(version="2.13.0", torch="2.13.0", cann=None),
    TorchNpu(version="2.12.0.post2", torch="2.12.0", cann="9.1"),
    TorchNpu(version="2.12.0", torch="2.12.0", cann="9.1"),
    TorchNpu(version="2.11.0.post2", torch="2.11.0", cann="9.1"),
    TorchNpu(version="2.11.0", torch="2.11.0", cann="9.1"),
)

# Its README pairs it with torch 2.7.1, older than what engine-megatron needs: the pair here is nobody's recommendation.
MINDSPEED = MindSpeed(
    version="0.16.0", branch="core_r0.16.0", megatron_core="0.16", cann="9.0", torch="2.7.1"
)


def torch_npu_line(version: str) -> TorchNpu | None:
    """The line of a torch_npu, or None."""
    return next((line for line in TORCH_NPU if line.version == version), None)


def torch_npu_table() -> str:
    """The lines as text."""
    return ", ".join(
        f"torch_npu {x.version} with torch {x.torch} and CANN {x.cann or '(unstated)'}"
        for x in TORCH_NPU
    )


def mindspeed_table() -> str:
    """The line as text."""
    return f"MindSpeed {MINDSPEED.version} (branch {MINDSPEED.branch}) with megatron-core {MINDSPEED.megatron_core}"
