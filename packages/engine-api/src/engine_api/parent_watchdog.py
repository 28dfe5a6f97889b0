"""Watchdogs that end a process together with the process that started it, even if both are busy."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

# The value that Linux's prctl.h gives this option.
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make the kernel send SIGKILL to this process as soon as its parent ends for any reason.

    Does nothing on systems other than Linux. A parent that ended before the call is not noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_group_with(pipe: int) -> None:
    """Kill this process's whole group as soon as no process holds the other end of ``pipe``.

    Nothing is written into the pipe. The caller has a process group of its own
    (``start_new_session``). On Linux the kernel sends the SIGKILL: a waiting thread would need the
    interpreter, which C code may hold for hours, and would not run while the process is stopped.
    On other systems a thread waits and sends it.
    """
    if sys.platform != "linux":
        threading.Thread(target=_kill_group_at_end, args=(pipe,), daemon=True).start()
        return
    import fcntl

    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    closed_before = select.select([pipe], [], [], 0)[0]
    if closed_before:
        os.killpg(0, signal.SIGKILL)


def _kill_group_at_end(pipe: int) -> None:
    """Block until ``pipe`` is closed, then kill this process's group."""
    while os.read(pipe, 1):
        pass
    os.killpg(0, signal.SIGKILL)
