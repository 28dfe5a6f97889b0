"""Descriptor of the loopback engine, which imports no torch."""

from __future__ import annotations

from engine_api.capabilities import MECHANISMS, Capability
from engine_api.devices import probe_torch
from engine_api.plugin import EnginePlugin, Row, Variant

_DEVICES = ("cpu", "cuda")

_ABSENT = MECHANISMS | {Capability.FP16, Capability.FP8, Capability.VISION, Capability.VIDEO}
CAPABILITIES = frozenset(Capability) - _ABSENT

PLUGIN = EnginePlugin(
    name="loopback",
    contract="1.4",
    rows=(
        Row(
            model_types=("language_model",),
            backends=("loopback",),
            devices=_DEVICES,
            target="engine_loopback.engine:LoopbackEngineWithLMHead",
        ),
        Row(
            model_types=("value_model",),
            backends=("loopback",),
            devices=_DEVICES,
            target="engine_loopback.engine:LoopbackEngineWithValueHead",
        ),
    ),
    capabilities=CAPABILITIES,
    options="engine_loopback.options:LoopbackOptions",
    variants=(Variant(options={"flat_norm": True}),),
    probe=probe_torch,
)
