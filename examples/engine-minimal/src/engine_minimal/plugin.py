"""What this package offers. Imports no torch."""

from engine_api.capabilities import Capability
from engine_api.devices import probe_torch
from engine_api.plugin import EnginePlugin, Row

PLUGIN = EnginePlugin(
    name="engine-minimal",
    contract="1.0",
    rows=(
        Row(
            backends=("minimal",),
            devices=("cuda", "cpu"),
            target="engine_minimal.engine:MinimalEngine",
        ),
    ),
    capabilities=frozenset({Capability.DP, Capability.PORTABLE_CHECKPOINT}),
    probe=probe_torch,
)
