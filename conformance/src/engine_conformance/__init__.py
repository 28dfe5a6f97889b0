"""Conformance suite that proves, for any engine, that it computes what the engine contract says.

This module imports no torch; the parts are imported by name:

- ``engine_conformance.oracle``: the independent float64 reference
- ``engine_conformance.fixtures``: tiny checkpoints and batches from seeds
- ``engine_conformance.ranks``: a pool of processes that share a process group
- ``engine_conformance.tolerances`` and ``engine_conformance.compare``: the meaning of "equal"
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
