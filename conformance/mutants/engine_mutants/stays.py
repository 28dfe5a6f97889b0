"""Why a case stays that catches no mutant alone."""

from __future__ import annotations

__all__ = ["STAYS"]

STAYS: dict[str, str] = {}
