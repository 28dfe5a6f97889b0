"""The descriptors of all mutants, one attribute each, as ``MUTANT_GRADIENTS_AVERAGED``. Loading them imports torch."""

from __future__ import annotations

from dataclasses import replace

from engine_api.plugin import EnginePlugin, Row
from engine_loopback.plugin import PLUGIN as LOOPBACK
from engine_mutants import load_mutants
from engine_mutants.mutant import PARTNER, Mutant

__all__ = ["attribute"]


def attribute(name: str) -> str:
    """Under which attribute of this module the descriptor of a mutant stands."""
    return name.upper().replace("-", "_")


def _descriptor(one: Mutant) -> EnginePlugin:
    rows = tuple(
        Row(model_types=(kind,), backends=(one.name,), devices=("cpu", "cuda"), target=target)
        for kind, target in one.targets.items()
    )
    return EnginePlugin(
        name=one.name,
        contract=LOOPBACK.contract,
        rows=rows,
        capabilities=LOOPBACK.capabilities - one.hides,
        options=LOOPBACK.options,
        probe=LOOPBACK.probe,
    )


_ROWS = tuple(replace(row, backends=(PARTNER,)) for row in LOOPBACK.rows)
SECOND = replace(LOOPBACK, name=PARTNER, rows=_ROWS)

globals().update({attribute(name): _descriptor(one) for name, one in load_mutants().items()})
