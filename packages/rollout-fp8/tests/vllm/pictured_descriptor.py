"""The descriptor of ``PicturedVllm``, which imports no torch."""

from __future__ import annotations

from dataclasses import replace

from engine_api.plugin import Row
from rollout_fp8.plugin import VLLM

NAME = "vllm-pictured"
PLUGIN = replace(
    VLLM,
    name=NAME,
    rows=(Row(backends=(NAME,), devices=("cuda", "cpu"), target="pictured_rollout:PicturedVllm"),),
)
