"""A process that renders chat templates: ``python -P template_worker.py SECONDS BYTES CHARACTERS``, started by ``templates``.

A template is a program of whoever published the model: it may loop, recurse and multiply, and nothing in Python stops
one operation of C. Here the kernel does: a rendering has so much processor time and memory. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys


def main(seconds: float, memory: int, longest: int) -> None:
    """Serve until standard input closes."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's Ctrl-C reaches it too; its parent decides
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints is no answer

    from transformers.utils.chat_template_utils import render_jinja_template

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard),
    )
    for line in sys.stdin:
        signal.setitimer(
            signal.ITIMER_PROF, seconds
        )  # processor time: a busy machine is no defect. It ends the process.
        try:
            (text,), _ = render_jinja_template(**json.loads(line))
            text.encode("utf-8")
            answer = (
                {"text": text}
                if len(text) <= longest
                else {"error": f"it makes more than {longest} characters"}
            )
        except MemoryError:
            answer = {"error": f"it needs more than {memory >> 20} MiB of memory"}
        except Exception as error:  # noqa: BLE001 - a template may raise anything; the parent says it with the row
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
