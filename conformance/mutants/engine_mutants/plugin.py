"""Descriptors of all mutants, one attribute each, as ``MUTANT_GRADIENTS_AVERAGED``.

Loading them imports torch.
"""

from __future__ import annotations

from dataclasses import replace

from engine_api.plugin import EnginePlugin, Row
from engine_loopback.plugin import PLUGIN as LOOPBACK
from engine_mutants import load_mutants
from engine_mutants.mutant import PARTNER, Mutant

__all__ = ["attribute"]


def attribute(name: str) -> str:
    """Return the attribute of this module that holds a mutant's descriptor."""
    return name.upper().replace("-", "_")


def _descriptor(mutant: Mutant) -> EnginePlugin:
    rows = tuple(
        Row(model_types=(kind,), backends=(mutant.name,), devices=("cpu", "cuda"), target=target)
        for kind, target in mutant.targets.items()
    )
    return EnginePlugin(
        name=mutant.name,
        contract=LOOPBACK.contract,
        rows=rows,
        capabilities=LOOPBACK.capabilities - mutant.hides,
        options=LOOPBACK.options,
        variants=LOOPBACK.variants,
        probe=LOOPBACK.probe,
    )


_ROWS = tuple(replace(row, backends=(PARTNER,)) for row in LOOPBACK.rows)
SECOND = replace(LOOPBACK, name=PARTNER, rows=_ROWS)

globals().update({attribute(name): _descriptor(mutant) for name, mutant in load_mutants().items()})
