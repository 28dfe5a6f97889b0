"""Definition of a mutant: the loopback engine with one defect, and the case that must catch it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine_api.capabilities import Capability
from engine_api.config import Parallelism
from engine_api.registry import EngineRegistry
from engine_conformance.cases import Target
from engine_loopback.engine import (
    LoopbackEngine,
    LoopbackEngineWithLMHead,
    LoopbackEngineWithValueHead,
)

__all__ = ["MUTANTS", "PARTNER", "Mutant", "install", "mutant"]

HEADS: Mapping[str, type[LoopbackEngine]] = {
    "language_model": LoopbackEngineWithLMHead,
    "value_model": LoopbackEngineWithValueHead,
}
# The engine's attribute that names the class of each part.
PARTS = {
    "model": "model_type",
    "partition": "partition_type",
    "layout": "layout_type",
    "optimizer": "adamw",
}
# A second name of the engine without a defect, for cases about what two engines owe each other.
PARTNER = "loopback-partner"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One defect.

    Attributes:
        name: its backend's name, ``mutant-…``.
        group: the part of the contract that it breaks: a capability, or the group of a core case.
        defect: one sentence, the first line of its class's docstring.
        case: the case that must fail.
        world, dtype, model_type, layout, options: the setting in which the case must fail.
        seen_in: issues and pull requests of other projects that report the defect.
        capabilities: capabilities of the loopback engine without those in ``hides``.
        deadline: factor on the case's deadlines, small for a mutant that stalls.
        targets: ``module:Class`` by model type.
    """

    name: str
    group: str
    defect: str
    case: str
    world: int
    dtype: str
    model_type: str
    seen_in: str
    hides: frozenset[Capability]
    deadline: float
    layout: Mapping[str, int]
    options: Mapping[str, Any]
    targets: Mapping[str, str] = field(repr=False)

    def target(self, root: Path) -> Target:
        """Return the setting in which the mutant must be caught."""
        return Target(
            backend=self.name,
            root=root,
            world=self.world,
            dtype=self.dtype,
            model_type=self.model_type,
            layout=Parallelism(**self.layout),
            options=self.options,
            partner=PARTNER,
            patience=self.deadline,
        )


MUTANTS: dict[str, Mutant] = {}


def mutant(
    case: str,
    *,
    group: str,
    part: str = "engine",
    world: int = 1,
    dtype: str = "float32",
    model_type: str = "language_model",
    seen_in: str = "",
    hides: tuple[Capability, ...] = (),
    deadline: float = 1.0,
    layout: Mapping[str, int] = MappingProxyType({}),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[[type], type]:
    """Return a class decorator that registers a mixin as a mutant.

    The mixin precedes a class of the loopback engine and has one defect, described by the first
    line of its docstring. ``part`` is the class that it changes: ``engine``, or one of `PARTS`,
    which the engine makes.
    """

    def register(mixin: type) -> type:
        letters = (f"-{c.lower()}" if c.isupper() else c for c in mixin.__name__)
        name = f"mutant{''.join(letters)}"
        assert name not in MUTANTS, f"two mutants are called {name}"
        module = sys.modules[mixin.__module__]
        targets: dict[str, str] = {}
        for kind, head in HEADS.items():
            made = _made(mixin, head, part)
            # Ranks import the class by its name.
            setattr(module, made.__name__, made)
            targets[kind] = f"{mixin.__module__}:{made.__name__}"
        MUTANTS[name] = Mutant(
            name=name,
            group=group,
            defect=inspect.cleandoc(mixin.__doc__ or "").splitlines()[0],
            case=case,
            world=world,
            dtype=dtype,
            model_type=model_type,
            seen_in=seen_in,
            hides=frozenset(hides),
            deadline=deadline,
            layout=dict(layout),
            options=dict(options),
            targets=targets,
        )
        return mixin

    return register


def _made(mixin: type, head: type[LoopbackEngine], part: str) -> type:
    about = {"__module__": mixin.__module__}
    name = f"{mixin.__name__}{head.__name__}"
    if part == "engine":
        return type(name, (mixin, head), about)
    inner = type(mixin.__name__, (mixin, getattr(head, PARTS[part])), about)
    return type(name, (head,), about | {PARTS[part]: inner})


def install(folder: Path) -> None:
    """Offer the loopback engine and all mutants to this process and to the ranks it starts.

    They are found by entry points in ``folder``, which is added to ``sys.path``.
    """
    from engine_mutants.plugin import attribute

    entries = {"loopback": "engine_loopback.plugin:PLUGIN", PARTNER: "engine_mutants.plugin:SECOND"}
    entries |= {name: f"engine_mutants.plugin:{attribute(name)}" for name in MUTANTS}
    info = folder / "engine_mutants-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-mutants\nVersion: 0\n")
    lines = "".join(f"{key} = {value}\n" for key, value in entries.items())
    (info / "entry_points.txt").write_text(f"[engine_api.engines]\n{lines}")
    sys.path.append(str(folder))
    EngineRegistry.refresh()
