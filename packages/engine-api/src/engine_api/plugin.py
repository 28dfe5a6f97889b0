"""The light descriptor that a plug-in's entry point names.

Loading it imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from engine_api.capabilities import Capability
from engine_api.config import Parallelism

# MAJOR.MINOR of the contract, independent of package versions.
CONTRACT = "1.4"

ENGINE_GROUP = "engine_api.engines"
ROLLOUT_GROUP = "engine_api.rollouts"

# The distribution to install for a name that no installed plug-in offers.
KNOWN_DISTRIBUTIONS = {
    "engine": {
        "automodel": "engine-automodel",
        "fsdp": "engine-fsdp",
        "fsdp2": "engine-fsdp",
        "megatron": "engine-megatron",
        "torchtitan": "engine-torchtitan",
        "veomni": "engine-veomni",
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
    """A class with the (model type, backend, device) triples that it serves."""

    backends: tuple[str, ...]
    """Names of the backends that a caller may use for the class."""

    devices: tuple[str, ...]
    """Types of the devices that the class runs on."""

    target: str
    """The class as "module:Class", which is imported when an engine is created."""

    model_types: tuple[str, ...] = ("language_model",)
    """Types of the models that the class trains."""

    def serves(self, model_type: str, backend: str, device: str) -> bool:
        """Return whether this row offers the triple."""
        return (
            model_type in self.model_types and backend in self.backends and device in self.devices
        )

    def triples(self) -> list[tuple[str, str, str]]:
        """Return every (model type, backend, device) that this row offers."""
        return [(m, b, d) for m in self.model_types for b in self.backends for d in self.devices]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The answer of a plug-in on a device of this machine, with reason and remedy if it is no."""

    ok: bool
    reason: str = ""
    remedy: str = ""


def always_available(device: str) -> ProbeResult:
    """Return a positive answer.

    It is the probe of a plug-in that needs nothing special.
    """
    del device
    return ProbeResult(ok=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Values of an engine's own options that a certificate covers in addition to the defaults."""

    options: Mapping[str, Any] = field(hash=False)
    """Fields of the options dataclass with other values than their defaults."""

    parallelism: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    """Sizes of ``Parallelism`` that the options need, which are none for data parallelism."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlugin:
    """The descriptor of a plug-in.

    Attributes:
        name: name of the plug-in.
        contract: version of the contract that it was written for, MAJOR.MINOR.
        rows: its classes, with the triples that they serve.
        capabilities: for an engine, its optional abilities; for a rollout, ``lora`` if it takes an
            adapter in addition to the base weights (argument ``lora`` of the rollout and of its
            exporter), and ``router_replay`` if it records the experts of each token (argument
            ``routed_experts`` of the rollout, since contract 1.4).
        families: for an engine, the model families that it builds, by their ``model_type`` in
            config.json (since contract 1.3); empty means every family that the conformance suite
            computes. The suite makes no model of a family that is not declared.
        options: ``"module:Class"`` of its own options dataclass; None if it has none.
        exporter: for a rollout, ``"module:Class"`` of its ``WeightExporter``; None if it has none.
        wire: for a rollout, ``"module:Class"`` of its ``WeightWire`` (since contract 1.2); None if
            it has none.
        in_flight: for a rollout, True if it takes weights while submitted generations run (argument
            ``in_flight`` of the rollout, since contract 1.4; see ``InFlightRollout``).
        one_layout: True if its engines in one process must have the same ``Parallelism`` sizes, so
            that a second one with other sizes is refused.
        variants: for an engine, the values of its options that change what is computed or stored,
            which a certificate shall cover (since contract 1.3).
        probe: function from a device's name to the answer whether the plug-in can run on it here.
    """

    name: str
    contract: str
    rows: tuple[Row, ...]
    capabilities: frozenset[Capability] = frozenset()
    families: tuple[str, ...] = ()
    options: str | None = None
    exporter: str | None = None
    wire: str | None = None
    in_flight: bool = False
    one_layout: bool = False
    variants: tuple[Variant, ...] = ()
    probe: Callable[[str], ProbeResult] = always_available


def _is_text(value: Any) -> bool:
    # A text that cannot be printed (a line break, half of a surrogate pair) cannot be listed.
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()


def _items(value: Any, *kinds: type) -> list[Any]:
    """Return the items of a collection of one of the kinds, and nothing for anything else."""
    return list(value) if isinstance(value, kinds) else []


def _is_list_of_text(value: Any) -> bool:
    items = _items(value, tuple, list)
    return bool(items) and all(_is_text(item) for item in items)


def _is_list_of_rows(value: Any) -> bool:
    items = _items(value, tuple, list)
    return bool(items) and all(isinstance(item, Row) for item in items)


def _is_set_of_text(value: Any) -> bool:
    return isinstance(value, frozenset | set) and all(
        _is_text(item) for item in _items(value, frozenset, set)
    )


def _is_list_of_variants(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(item, Variant) for item in _items(value, tuple)
    )


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a mapping, and nothing for anything else."""
    return list(cast("Mapping[Any, Any]", value).items()) if isinstance(value, Mapping) else []


def _is_options(value: Any) -> bool:
    pairs = _pairs(value)
    return bool(pairs) and all(_is_text(name) for name, _ in pairs)


def _is_sizes(value: Any) -> bool:
    known = {one.name for one in fields(Parallelism)}
    return isinstance(value, Mapping) and all(
        _is_text(name) and name in known and type(size) is int and size > 0
        for name, size in _pairs(cast("Any", value))
    )


def _is_target(value: Any) -> bool:
    return _is_text(value) and re.fullmatch(r"[^\s:]+:[^\s:]+", value) is not None


def _is_target_or_none(value: Any) -> bool:
    return value is None or _is_target(value)


_NAMES = "a tuple of one or more names"
_TARGET = '"module:Class"'

# For each field of a descriptor, of its rows and of a probe's answer: the expected value in words,
# and its check.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("a name", _is_text),
    "contract": ("a version, MAJOR.MINOR", _is_text),
    "rows": ("a tuple of one or more Row", _is_list_of_rows),
    "capabilities": ("a frozenset of Capability", _is_set_of_text),
    "families": ("a tuple of names", lambda value: value == () or _is_list_of_text(value)),
    "options": (f"{_TARGET} or None", _is_target_or_none),
    "exporter": (f"{_TARGET} or None", _is_target_or_none),
    "wire": (f"{_TARGET} or None", _is_target_or_none),
    "in_flight": ("True or False", lambda value: isinstance(value, bool)),
    "one_layout": ("True or False", lambda value: isinstance(value, bool)),
    "variants": ("a tuple of Variant", _is_list_of_variants),
    "probe": ("a function of a device's name", callable),
}
_ROW_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "backends": (_NAMES, _is_list_of_text),
    "devices": (_NAMES, _is_list_of_text),
    "target": (_TARGET, _is_target),
    "model_types": (_NAMES, _is_list_of_text),
}
_VARIANT_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "options": ("one or more values by name", _is_options),
    "parallelism": ("sizes of 1 or more by field of Parallelism", _is_sizes),
}
_PROBE_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "ok": ("True or False", lambda value: isinstance(value, bool)),
    "reason": ("text", lambda value: isinstance(value, str)),
    "remedy": ("text", lambda value: isinstance(value, str)),
}


def _misfit(
    value: Any, fields: dict[str, tuple[str, Callable[[Any], bool]]], where: str
) -> str | None:
    for name, (expected, fits) in fields.items():
        given = getattr(value, name)
        if not fits(given):
            return f"{where}{name}: expected {expected}, got {given!a:.100}"
    return None


def descriptor_problem(plugin: EnginePlugin) -> str | None:
    """Return the first problem of a descriptor's fields with the field's name, or None."""
    if problem := _misfit(plugin, _FIELDS, ""):
        return problem
    for place, variant in enumerate(plugin.variants):
        if problem := _misfit(variant, _VARIANT_FIELDS, f"variants[{place}]."):
            return problem
    claimed: dict[tuple[str, str, str], int] = {}
    for place, row in enumerate(plugin.rows):
        if problem := _misfit(row, _ROW_FIELDS, f"rows[{place}]."):
            return problem
        for triple in row.triples():
            if claimed.setdefault(triple, place) != place:
                model_type, backend, device = triple
                return (
                    f"rows[{claimed[triple]}] and rows[{place}] both serve {model_type} by "
                    f"{backend} on {device}"
                )
    return None


def probe_problem(result: Any) -> str | None:
    """Return the problem of a probe's answer, or None."""
    if not isinstance(result, ProbeResult):
        return f"expected a ProbeResult, got {result!a:.100}"
    return _misfit(result, _PROBE_FIELDS, "")


def is_older(contract: str, since: str) -> bool:
    """Return whether a plug-in that states ``contract`` was written before ``since``.

    The result is False for a text that is not a version.
    """
    try:
        stated, wanted = (
            tuple(int(part) for part in version.split(".")) for version in (contract, since)
        )
    except ValueError:
        return False
    return stated < wanted


def contract_problem(contract: str, ours: str = CONTRACT) -> str | None:
    """Return the reason why a plug-in written for ``contract`` cannot be used, or None.

    It can be used if it has the same major as ours, and a minor that is not above ours.
    """
    try:
        major, minor = (int(part) for part in contract.split("."))
    except ValueError:
        return f"{contract!r} is not a contract version (MAJOR.MINOR)"
    our_major, our_minor = (int(part) for part in ours.split("."))
    if major != our_major:
        return f"written for contract {contract}, engine-api serves {ours}"
    if minor > our_minor:
        return f"written for contract {contract}, newer than engine-api's {ours}"
    return None
