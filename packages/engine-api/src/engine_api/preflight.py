"""Plug-ins that end their process, or do not return, found from outside. Imports no torch.

Loading a descriptor runs a stranger's module, and so does its probe: it may call ``os._exit``, wait for ever, or raise
what looks like the user's Ctrl-C. A child process loads and probes all of them first and says which one it is at; where
it ends early or falls silent, that one is the offender, and another child goes on without it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from engine_api.discovery import discover, printable, probe

SILENCE_S = 60.0  # a descriptor takes milliseconds; one that imports torch takes long on a busy machine, and returns
_LOOK_S = 0.02
_CODE = "import sys; sys.path[:] = {path!a}; from engine_api.preflight import look; look({to!a}, {groups!a}, {known!a})"
Source = tuple[str, str]  # group, and the plug-in's source as ``Found`` has it


def offenders(groups: Sequence[str]) -> dict[Source, str]:
    """Return the plug-ins that cannot be loaded or probed in this process without harm, each with the reason."""
    found: dict[Source, str] = {}
    while (offender := _first_offender(groups, found)) is not None:
        source, problem = offender
        found[source] = problem
    return found


def look(to: str, groups: Sequence[str], known: Collection[Source]) -> None:
    """Load and probe the plug-ins of ``groups`` but the ``known`` ones, and write to ``to`` what is begun. For the child."""
    with Path(to).open("a", encoding="ascii") as file:

        def tell(group: str, source: str, doing: str) -> None:
            print(json.dumps([group, source, doing]), file=file, flush=True)

        def before(group: str, source: str) -> str:
            if (group, source) in known:
                return "known"
            tell(group, source, "its import")
            return ""

        for group in groups:
            for found in discover(group, before):
                devices = (
                    {d for row in found.plugin.rows for d in row.devices}
                    if found.plugin
                    else set[str]()
                )
                for device in sorted(devices) if not found.problem else ():
                    tell(group, found.source, f"its probe of {device!a}")
                    probe(found, device)
        tell("", "", "")


def _first_offender(groups: Sequence[str], known: Collection[Source]) -> tuple[Source, str] | None:
    with tempfile.TemporaryDirectory(prefix="engine-api-") as folder:
        told, said = Path(folder, "told"), Path(folder, "said")
        told.touch()
        code = _CODE.format(path=sys.path, to=str(told), groups=tuple(groups), known=tuple(known))
        with said.open("wb") as errors:
            # A session of its own: the terminal's Ctrl-C is for this process, and what a plug-in starts ends with it.
            child = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        try:
            silent = _wait(child, told)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
        lines = told.read_text("ascii").splitlines()
        group, source, doing = json.loads(lines[-1]) if lines else ("", "", "")
        # The end; or a child that never came to a plug-in, for a reason that loading them here will show.
        if not source:
            return None
        last = said.read_text(errors="backslashreplace").strip().rpartition("\n")[2]
    how = (
        f"did not return within {SILENCE_S:g} s"
        if silent
        else f"ended the process (exit code {code})"
    )
    return (group, source), f"{doing} {how}" + (
        f": {printable(last)}" if last and not silent else ""
    )


def _wait(child: subprocess.Popen[bytes], told: Path) -> bool:
    """Wait for the end of the child; return whether it fell silent before."""
    size, since = 0, time.monotonic()
    while child.poll() is None:
        now = told.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > SILENCE_S:
            return True
        time.sleep(_LOOK_S)
    return False
