"""Chat templates rendered within limits of time, memory and size, in one process beside this one (``template_worker``)."""

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

SECONDS = 10.0  # of processor time, a rendering
MEMORY = 1 << 30  # bytes, of the process
LONGEST = 20_000_000  # characters that one rendering makes
_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateError(Exception):
    """A template could not be rendered within its limits; the text says why."""


class Renderer:
    """A process that renders, started at the first template and again after one that had to be ended."""

    def __init__(
        self, seconds: float = SECONDS, memory: int = MEMORY, longest: int = LONGEST
    ) -> None:
        self._seconds = seconds
        self._limits = [str(seconds), str(memory), str(longest)]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # an agent's trajectories render side by side

    def render(
        self, template: str, messages: list[dict[str, Any]], *, ask: bool, given: Mapping[str, Any]
    ) -> str:
        """Return the text of a conversation. Raises ``TemplateError``, also for what is no JSON.

        Args:
            template: Jinja text.
            messages: the conversation.
            ask: whether the assistant's turn is begun at the end.
            given: other variables of the template, ``tools`` and special tokens among them.
        """
        asked = {
            **given,
            "conversations": [messages],
            "chat_template": template,
            "add_generation_prompt": ask,
        }
        try:
            request = (
                json.dumps(asked, default=str).encode("ascii") + b"\n"
            )  # tokens of their own class have a text
        except (TypeError, ValueError) as error:
            raise TemplateError(f"a value cannot be given to a template: {error}") from error
        with self._lock:
            answer = self._ask(request)
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # of a request that it did not read
                        pipe.close()

    def _ask(self, request: bytes) -> dict[str, str]:
        if self._process is None:
            command = [
                sys.executable,
                "-P",
                str(_WORKER),
                *self._limits,
            ]  # -P: files beside it are no modules of their own
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
            pass  # it has ended: told by its status
        except (
            BaseException
        ):  # Ctrl-C too: an answer that comes later must not be taken for the next one's
            self.close()
            raise
        if line.endswith(b"\n"):
            return json.loads(line)
        status = process.wait()
        self.close()
        if status == -signal.SIGPROF:
            return {"error": f"it takes more than {self._seconds} s of processor time"}
        return {
            "error": f"the process that renders ended with status {status}; its last words are above"
        }


@cache
def _renderer_of(pid: int) -> Renderer:
    # By process: one that was forked must not speak into its parent's pipes.
    renderer = Renderer()
    atexit.register(lambda: renderer.close() if os.getpid() == pid else None)
    return renderer


def renderer() -> Renderer:
    """Return this process's renderer."""
    return _renderer_of(os.getpid())
