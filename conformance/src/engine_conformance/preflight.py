"""Check that the descriptors of this environment can be loaded, made in a child process.

A descriptor is a third party's module: loading it may end the process or never return.
Here that ends a child and is reported; afterwards the suite's own process loads the
same descriptors. Imports no torch.
"""

from __future__ import annotations

import subprocess
import sys

from engine_conformance.errors import CannotRun

__all__ = ["preflight"]

_SECONDS = 120.0
_CODE = """
import sys
sys.path[:0] = {path!r}
from engine_api.registry import EngineRegistry, RolloutRegistry
for registry in (EngineRegistry, RolloutRegistry):
    registry.found()
    [found.plugin.probe({device!r}) for found, row in registry.rows() if {name!r} in row.backends]
"""


def preflight(name: str, device: str) -> None:
    """Load all descriptors and call the named one's probe, in a child process.

    Raises:
        CannotRun: if the child does not return in time, or is ended by a module that it loads.
    """
    command = [sys.executable, "-c", _CODE.format(path=sys.path, device=device, name=name)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CannotRun(
            f"loading the descriptors of this environment took longer than {_SECONDS:.0f} s\n"
            "  to do: find the entry point of group engine_api.engines whose module does not "
            f"return\n{_end(error.stderr)}"
        ) from error
    if done.returncode != 0:
        raise CannotRun(
            "loading the descriptors of this environment ended the process "
            f"(exit code {done.returncode})\n"
            f"  to do: a descriptor's module, or the probe of {name!r}, must neither exit nor "
            f"raise\n{_end(done.stderr)}"
        )


def _end(text: str | bytes | None) -> str:
    decoded = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
    lines = decoded.rstrip().splitlines()
    return "\n".join(lines[-15:])
