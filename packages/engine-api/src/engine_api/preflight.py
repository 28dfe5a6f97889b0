"""Detection, from outside, of plug-ins that end their process or do not return.

Loading a descriptor runs a third party's module, and so does its probe: it may call ``os._exit``,
wait for ever, or raise KeyboardInterrupt as if the user had pressed Ctrl-C. A child process loads
and probes all plug-ins first and reports the current one. If the child ends early or falls silent,
the current plug-in is the offender, and another child goes on without it. The module imports no
torch.
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

# Seconds without a report after which a child counts as silent. A descriptor takes milliseconds;
# one that imports torch takes long on a busy machine, but returns.
SILENCE_S = 60.0
_LOOK_S = 0.02
_CODE = (
    "import sys; sys.path[:] = {path!a}; from engine_api.preflight import look; "
    "look({to!a}, {groups!a}, {known!a})"
)
# Group, and the plug-in's source as in ``Found``.
Source = tuple[str, str]


def offenders(groups: Sequence[str]) -> dict[Source, str]:
    """Return the plug-ins that would harm this process if loaded or probed, with the reason."""
    found: dict[Source, str] = {}
    while (offender := _first_offender(groups, found)) is not None:
        source, problem = offender
        found[source] = problem
    return found


def look(to: str, groups: Sequence[str], known: Collection[Source]) -> None:
    """Load and probe the plug-ins of ``groups``, and report each before it is loaded or probed.

    The child process calls it. The reports go to the file ``to``; the ``known`` plug-ins are left
    out.
    """
    with Path(to).open("a", encoding="ascii") as file:

        def report(group: str, source: str, doing: str) -> None:
            print(json.dumps([group, source, doing]), file=file, flush=True)

        def before(group: str, source: str) -> str:
            if (group, source) in known:
                return "known"
            report(group, source, "its import")
            return ""

        for group in groups:
            for found in discover(group, before):
                if found.plugin is None or found.problem:
                    continue
                for device in sorted({d for row in found.plugin.rows for d in row.devices}):
                    report(group, found.source, f"its probe of {device!a}")
                    probe(found, device)
        report("", "", "")


def _first_offender(groups: Sequence[str], known: Collection[Source]) -> tuple[Source, str] | None:
    with tempfile.TemporaryDirectory(prefix="engine-api-") as folder:
        reports = Path(folder, "reports")
        stderr = Path(folder, "stderr")
        reports.touch()
        code = _CODE.format(
            path=sys.path, to=str(reports), groups=tuple(groups), known=tuple(known)
        )
        with stderr.open("wb") as errors:
            # The child has a session of its own: the terminal's Ctrl-C is for this process, and
            # processes that a plug-in starts can be ended together with the child.
            child = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        try:
            silent = _wait(child, reports)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
        lines = reports.read_text("ascii").splitlines()
        group, source, doing = json.loads(lines[-1]) if lines else ("", "", "")
        # The child reached the end, or it never reached a plug-in. Loading the plug-ins here will
        # show the reason for that.
        if not source:
            return None
        last = stderr.read_text(errors="backslashreplace").strip().rpartition("\n")[2]
    if silent:
        return (group, source), f"{doing} did not return within {SILENCE_S:g} s"
    problem = f"{doing} ended the process (exit code {code})"
    return (group, source), f"{problem}: {printable(last)}" if last else problem


def _wait(child: subprocess.Popen[bytes], reports: Path) -> bool:
    """Wait for the end of the child, and return whether it fell silent before."""
    size = 0
    since = time.monotonic()
    while child.poll() is None:
        now = reports.stat().st_size
        if now != size:
            size = now
            since = time.monotonic()
        elif time.monotonic() - since > SILENCE_S:
            return True
        time.sleep(_LOOK_S)
    return False
