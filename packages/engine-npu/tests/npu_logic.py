"""A descriptor for tests, with which the classes of the NPU rows shard on a CPU mesh."""

from __future__ import annotations

from dataclasses import replace

from engine_api.devices import probe_torch
from engine_npu.plugin import FSDP

PLUGIN = replace(
    FSDP,
    name="npu-logic",
    probe=probe_torch,
    rows=tuple(replace(row, backends=("npu-logic",), devices=("cpu",)) for row in FSDP.rows),
)
