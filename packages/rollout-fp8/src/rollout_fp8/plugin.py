"""Descriptors of the ``vllm`` and ``sglang`` rollouts. Loading them imports no torch."""

from __future__ import annotations

from functools import partial

from engine_api.capabilities import Capability
from engine_api.devices import probe_torch
from engine_api.plugin import CONTRACT, EnginePlugin, ProbeResult, Row
from rollout_fp8 import versions

EXPORTER = "rollout_fp8.export.exporter:Exporter"
WIRE = "rollout_fp8.transports.weight_wire:Wire"


def probe_server(server: str, device: str) -> ProbeResult:
    """Return whether the server and a torch for ``device`` are installed.

    The server's version is checked when a rollout is made, because an option may allow an untested
    one.
    """
    line = versions.tested(server, device)
    if line is None:
        devices = " or ".join(t.device for t in versions.TABLE if t.server == server)
        return ProbeResult(
            ok=False, reason=f"{server} is not served on {device}", remedy=f"use {devices}"
        )
    if versions.installed(line) is None:
        return ProbeResult(
            ok=False,
            reason=f"{line.distribution} is not installed",
            remedy=versions.install_line(line),
        )
    return probe_torch(device)


VLLM = EnginePlugin(
    name="vllm",
    contract=CONTRACT,
    # LORA is rollout.lora: adapter, ROUTER_REPLAY is rollout.routed_experts: replay.
    capabilities=frozenset({Capability.LORA, Capability.ROUTER_REPLAY, Capability.VISION}),
    rows=(
        Row(
            backends=("vllm",),
            devices=("cuda", "cpu"),
            target="rollout_fp8.vllm.rollout:VllmRollout",
        ),
        Row(
            backends=("vllm-server",),
            devices=("cuda", "cpu"),
            target="rollout_fp8.remote.client:VllmServer",
        ),
    ),
    options="rollout_fp8.options:VllmOptions",
    exporter=EXPORTER,
    wire=WIRE,
    probe=partial(probe_server, "vllm"),
)
SGLANG = EnginePlugin(
    name="sglang",
    contract=CONTRACT,
    rows=(
        Row(
            backends=("sglang",),
            devices=("cuda",),
            target="rollout_fp8.sglang.rollout:SglangRollout",
        ),
        Row(
            backends=("sglang-server",),
            devices=("cuda",),
            target="rollout_fp8.remote.client:SglangServer",
        ),
    ),
    options="rollout_fp8.sglang.options:SglangOptions",
    exporter=EXPORTER,
    wire=WIRE,
    probe=partial(probe_server, "sglang"),
)
