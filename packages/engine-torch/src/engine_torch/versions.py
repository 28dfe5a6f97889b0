"""The versions of libraries that engines over DTensor were tested with.

Descriptors of plug-ins import this module, which imports no torch.
"""

from __future__ import annotations

from engine_api.devices import find_version_problem

__all__ = ["TESTED_TORCHAO", "find_torchao_problem", "has_torchao"]

# torchao's linear layers in FP8 are not its public interface, and differ from release to release.
TESTED_TORCHAO = "0.17.0"


def find_torchao_problem() -> str:
    """Return why torchao cannot be used, or an empty text where the tested version is installed."""
    problem = find_version_problem("torchao", TESTED_TORCHAO, "")
    return "" if problem is None else problem.reason


def has_torchao() -> bool:
    """Return whether the tested torchao is installed."""
    return not find_torchao_problem()
