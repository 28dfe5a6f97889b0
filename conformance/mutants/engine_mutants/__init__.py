"""Wrong engines, one defect each, that the conformance suite must catch by a named case.

There is one module per group; `load_mutants` imports them all. They are not shipped.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_mutants.mutant import Mutant

__all__ = ["GROUPS", "load_mutants"]

GROUPS = (
    "forward",
    "models",
    "train",
    "steps",
    "orders",
    "checkpoint",
    "handover",
    "export",
    "refusal",
    "contract",
    "parallel",
    "adapters",
    "features",
    "distilling",
)


def load_mutants() -> dict[str, Mutant]:
    """Return every mutant by its backend's name."""
    for group in GROUPS:
        import_module(f"engine_mutants.{group}")
    return import_module("engine_mutants.mutant").MUTANTS
