"""A process that ends with the one that started it, whatever both are busy with."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # of Linux' prctl.h


def end_with_parent() -> None:
    """Have the kernel send SIGKILL to this process as soon as its parent has ended, however that ended.

    On Linux; elsewhere nothing is done. A parent that has ended before is not noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_group_with(pipe: int) -> None:
    """SIGKILL for this process's whole group as soon as nobody holds the other end of ``pipe``, into which nothing is written.

    The caller has a group of its own (``start_new_session``). On Linux the kernel sends it: a thread that waits would need
    the interpreter, which code in C may hold for hours, and a process that is not stopped. Elsewhere a thread does.
    """
    if sys.platform != "linux":
        threading.Thread(target=_wait, args=(pipe,), daemon=True).start()
        return
    import fcntl

    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it was closed before
        os.killpg(0, signal.SIGKILL)


def _wait(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.killpg(0, signal.SIGKILL)
