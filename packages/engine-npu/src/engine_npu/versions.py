"""The versions that belong together, according to their publishers' documentation.

None of them was run by this project. Sources: torch_npu with CANN from ``COMPATIBILITY.md`` of
gitcode.com/Ascend/pytorch (read 2026-11), torch_npu with torch from the wheels' metadata
(``Requires-Dist``), MindSpeed with Megatron-core from the README of its branch ``core_r0.16.0``.
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
    """A release of torch_npu on PyPI, with the versions it belongs to."""

    version: str
    """Version of torch_npu."""

    torch: str
    """Version of torch."""

    cann: str | None
    """Version of CANN, or None where torch_npu's documentation names none yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MindSpeed:
    """A branch of MindSpeed, with the versions that its README names."""

    version: str
    """Version of the distribution that its setup.py builds."""

    branch: str
    """Name of the branch."""

    megatron_core: str
    """Version of Megatron-core."""

    cann: str
    """Version of CANN."""

    torch: str
    """Version of torch."""


# The table begins with torch 2.11, which engine-fsdp and engine-megatron need.
TORCH_NPU = (
    TorchNpu(version="2.13.0", torch="2.13.0", cann=None),
    TorchNpu(version="2.12.0.post2", torch="2.12.0", cann="9.1"),
    TorchNpu(version="2.12.0", torch="2.12.0", cann="9.1"),
    TorchNpu(version="2.11.0.post2", torch="2.11.0", cann="9.1"),
    TorchNpu(version="2.11.0", torch="2.11.0", cann="9.1"),
)

# Its README names torch 2.7.1, which is older than engine-megatron needs. No publisher recommends
# the combination used here.
MINDSPEED = MindSpeed(
    version="0.16.0", branch="core_r0.16.0", megatron_core="0.16", cann="9.0", torch="2.7.1"
)


def torch_npu_line(version: str) -> TorchNpu | None:
    """Return the table's entry for a version of torch_npu, or None."""
    return next((line for line in TORCH_NPU if line.version == version), None)


def torch_npu_table() -> str:
    """Return the table of torch_npu as text."""
    return ", ".join(
        f"torch_npu {line.version} with torch {line.torch} and CANN {line.cann or '(unstated)'}"
        for line in TORCH_NPU
    )


def mindspeed_table() -> str:
    """Return the entry of MindSpeed as text."""
    return (
        f"MindSpeed {MINDSPEED.version} (branch {MINDSPEED.branch}) "
        f"with megatron-core {MINDSPEED.megatron_core}"
    )
