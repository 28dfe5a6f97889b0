"""Conformance cases, one module per group and one function per MUST.

`load_cases` imports all modules.
"""

from __future__ import annotations

from engine_conformance.cases._case import CASES, Case, SkipCase, load_cases, run_case
from engine_conformance.cases._target import Setup, Target

__all__ = ["CASES", "Case", "Setup", "SkipCase", "Target", "load_cases", "run_case"]
