"""Ctrl-C and SIGTERM as a request to finish the step, save and end.

A second signal aborts the run.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

# A terminal's Ctrl-C reaches a worker of torchrun twice: from the terminal and from its launcher.
SAME_PRESS_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """A context manager whose ``requested`` becomes true at the first signal.

    Outside the main thread it does nothing.

    Args:
        describe: function that returns the answer to the first signal, for the terminal; None for
            no answer.
    """

    def __init__(self, describe: Callable[[], str] | None = None) -> None:
        self.requested = False
        self._describe = describe
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        now = time.monotonic()
        if self.requested and now - self._since > SAME_PRESS_S:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._since = True, now
            if self._describe is not None:
                # Not print: the signal may have interrupted one, and a buffer is not reentrant.
                os.write(2, f"\n{self._describe()}\n".encode())
