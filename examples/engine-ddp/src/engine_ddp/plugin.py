"""The plug-in's descriptor, whose module imports no torch."""

from engine_api.capabilities import Capability
from engine_api.devices import probe_torch
from engine_api.plugin import EnginePlugin, Row

LANGUAGE = Row(backends=("ddp",), devices=("cuda", "cpu"), target="engine_ddp.engine:DdpEngine")
VALUE = Row(
    backends=("ddp",),
    devices=("cuda", "cpu"),
    target="engine_ddp.engine:DdpValueEngine",
    model_types=("value_model",),
)
PLUGIN = EnginePlugin(
    name="engine-ddp",
    contract="1.4",
    rows=(LANGUAGE, VALUE),
    capabilities=frozenset({Capability.DP, Capability.PORTABLE_CHECKPOINT, Capability.VALUE_HEAD}),
    families=("llama", "qwen2", "qwen3"),
    probe=probe_torch,
)
