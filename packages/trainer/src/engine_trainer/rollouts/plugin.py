"""The descriptor of the ``local`` rollout, which imports no torch when it is loaded."""

from __future__ import annotations

from engine_api.capabilities import Capability
from engine_api.devices import DEVICES, probe_device
from engine_api.plugin import CONTRACT, EnginePlugin, Row

PLUGIN = EnginePlugin(
    name="local",
    contract=CONTRACT,
    # For rollout.routed_experts: replay, and for prompts with images.
    capabilities=frozenset({Capability.ROUTER_REPLAY, Capability.VISION, Capability.VIDEO}),
    rows=(
        Row(
            backends=("local",),
            devices=DEVICES,
            target="engine_trainer.rollouts.local:LocalRollout",
        ),
    ),
    probe=probe_device,
)
