"""Chat templates rendered in a second process with limits on time, memory and size.

The second process runs ``template_worker``.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

# Processor time of one rendering, in seconds.
SECONDS = 10.0
# Memory of the rendering process, in bytes.
MEMORY = 1 << 30
# Largest number of characters that one rendering may produce.
LONGEST = 20_000_000
_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateError(Exception):
    """Failure to render a template within its limits, with the reason as its text."""


class Renderer:
    """A client of the rendering process.

    The process is started at the first rendering, and again after one during which it ended.
    """

    def __init__(
        self, seconds: float = SECONDS, memory: int = MEMORY, longest: int = LONGEST
    ) -> None:
        self._seconds = seconds
        self._limits = [str(seconds), str(memory), str(longest)]
        self._process: subprocess.Popen[bytes] | None = None
        # An agent's trajectories are rendered concurrently.
        self._lock = threading.Lock()

    def render(
        self, template: str, messages: list[dict[str, Any]], *, ask: bool, given: Mapping[str, Any]
    ) -> str:
        """Return the text of a conversation.

        Args:
            template: Jinja text.
            messages: the conversation.
            ask: whether the text ends with the opening of the assistant's turn.
            given: other variables of the template, including ``tools`` and special tokens.

        Raises:
            TemplateError: the template fails or exceeds a limit, or a value cannot be written as
                JSON.
        """
        asked = {
            **given,
            "conversations": [messages],
            "chat_template": template,
            "add_generation_prompt": ask,
        }
        try:
            # Special tokens may be objects of a class of their own; str gives their text.
            request = json.dumps(asked, default=str).encode("ascii") + b"\n"
        except (TypeError, ValueError) as error:
            raise TemplateError(f"a value cannot be given to a template: {error}") from error
        with self._lock:
            answer = self._ask(request)
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """End the process.

        The next rendering starts a new one.
        """
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    # Closing flushes a request that the process has not read.
                    with suppress(BrokenPipeError):
                        pipe.close()

    def _ask(self, request: bytes) -> dict[str, str]:
        if self._process is None:
            # With -P, the worker cannot import the other files of its folder as top-level modules.
            command = [sys.executable, "-P", str(_WORKER), *self._limits]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            # The process has ended; its status is reported below.
            pass
        # This includes Ctrl-C: a late reply must not be taken for the reply to the next request.
        except BaseException:
            self.close()
            raise
        if line.endswith(b"\n"):
            return json.loads(line)
        status = process.wait()
        self.close()
        if status == -signal.SIGPROF:
            return {"error": f"it takes more than {self._seconds} s of processor time"}
        return {
            "error": f"the process that renders ended with status {status}; "
            "its last words are above"
        }


@cache
def _renderer_of(pid: int) -> Renderer:
    # There is one renderer per process, because a forked process must not write to its parent's
    # pipes.
    renderer = Renderer()
    atexit.register(lambda: renderer.close() if os.getpid() == pid else None)
    return renderer


def renderer() -> Renderer:
    """Return this process's renderer."""
    return _renderer_of(os.getpid())
