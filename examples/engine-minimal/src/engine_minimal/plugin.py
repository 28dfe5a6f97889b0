"""The plug-in's descriptor, whose module imports no torch."""

from engine_api.capabilities import Capability
from engine_api.devices import probe_torch
from engine_api.plugin import EnginePlugin, Row

ROW = Row(
    backends=("minimal",), devices=("cuda", "cpu"), target="engine_minimal.engine:MinimalEngine"
)
PLUGIN = EnginePlugin(
    name="engine-minimal",
    contract="1.3",
    rows=(ROW,),
    capabilities=frozenset({Capability.DP, Capability.PORTABLE_CHECKPOINT}),
    probe=probe_torch,
)
