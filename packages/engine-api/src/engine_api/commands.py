"""The part that entry points of commands share: an end without a traceback for a closed pipe.

It imports little, so that an entry point can import it before anything slow.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

BROKEN_PIPE = 141  # the status that a shell reports for SIGPIPE


def run_command(command: Callable[[], int]) -> int:
    """Return a command's exit status, or 141 if the reader of its output ended early.

    A reader ends early in ``command | head``. A ``BrokenPipeError`` of any other pipe is an error
    of the command, and is raised.
    """
    try:
        try:
            return command()
        finally:
            # Output may still be buffered here, also when argparse ends the command after a help.
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        # The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _is_reader_gone() -> bool:
    """Return whether standard output is a pipe or a socket that nothing reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
