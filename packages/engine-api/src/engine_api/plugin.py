"""The light descriptor that a plug-in's entry point names. Loading it imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine_api.capabilities import Capability

CONTRACT = "1.2"  # MAJOR.MINOR of the contract, apart from package versions

ENGINE_GROUP = "engine_api.engines"
ROLLOUT_GROUP = "engine_api.rollouts"

# The distribution to install for a name that nobody offers here.
KNOWN_DISTRIBUTIONS = {
    "engine": {
        "fsdp": "engine-fsdp",
        "fsdp2": "engine-fsdp",
        "megatron": "engine-megatron",
        "mindspeed_megatron": "engine-npu",
    },
    "rollout": {
        "local": "engine-trainer",
        "vllm": "rollout-fp8[vllm]",
        "vllm-server": "rollout-fp8[vllm]",
        "sglang": "rollout-fp8[sglang]",
        "sglang-server": "rollout-fp8[sglang]",
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Which class serves which (model type, backend, device) triples."""

    backends: tuple[str, ...]
    devices: tuple[str, ...]
    target: str  # "module:Class", imported when an engine is created
    model_types: tuple[str, ...] = ("language_model",)

    def serves(self, model_type: str, backend: str, device: str) -> bool:
        """Whether this row offers the triple."""
        return model_type in self.model_types and backend in self.backends and device in self.devices


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """Whether a plug-in can run on a device of this machine, and if not, why and what to do."""

    ok: bool
    reason: str = ""
    remedy: str = ""


def always_available(device: str) -> ProbeResult:
    """The probe of a plug-in that needs nothing special."""
    del device
    return ProbeResult(ok=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlugin:
    """What a plug-in offers.

    Attributes:
        capabilities: of an engine, what it can do; of a rollout, ``lora`` where it takes an adapter beside the base weights
            (argument ``lora`` of the rollout and of its exporter).
        options: ``"module:Class"`` of its own options dataclass.
        exporter: of a rollout, ``"module:Class"`` of its ``WeightExporter``.
        wire: of a rollout, ``"module:Class"`` of its ``WeightWire`` (since contract 1.2).
        one_layout: whether its engines of one process must have the same ``Parallelism`` sizes, or the second one is refused.
    """

    name: str
    contract: str
    rows: tuple[Row, ...]
    capabilities: frozenset[Capability] = frozenset()
    options: str | None = None
    exporter: str | None = None
    wire: str | None = None
    one_layout: bool = False
    probe: Callable[[str], ProbeResult] = always_available


def is_older(contract: str, since: str) -> bool:
    """Whether a plug-in that states ``contract`` was written before ``since``; False for what is no version."""
    try:
        stated, wanted = (tuple(int(part) for part in version.split(".")) for version in (contract, since))
    except ValueError:
        return False
    return stated < wanted


def contract_problem(contract: str, ours: str = CONTRACT) -> str | None:
    """Why a plug-in written for ``contract`` cannot be used, or None: same major, minor not above ours."""
    try:
        major, minor = (int(part) for part in contract.split("."))
    except ValueError:
        return f"{contract!r} is not a contract version (MAJOR.MINOR)"
    our_major, our_minor = (int(part) for part in ours.split("."))
    if major != our_major:
        return f"written for contract {contract}, engine-api serves {ours}"
    return f"written for contract {contract}, newer than engine-api's {ours}" if minor > our_minor else None
