"""A process that renders chat templates, started by ``templates``.

Usage: ``python -P template_worker.py SECONDS BYTES CHARACTERS``.

A template is a program written by the publisher of the model. It may loop, recurse and multiply,
and nothing in Python can stop a single operation in C. The kernel can: it limits the processor time
and the memory of a rendering. Requests and replies are lines of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys


def main(seconds: float, memory: int, longest: int) -> None:
    """Serve until standard input closes.

    Args:
        seconds: processor time of one rendering.
        memory: bytes of the process's data segment.
        longest: characters that one rendering may produce.
    """
    # A terminal's Ctrl-C reaches this process too, but its parent decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    # Prints of a library go to standard error, so that they do not mix with the replies.
    os.dup2(2, 1)

    from transformers.utils.chat_template_utils import render_jinja_template

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard),
    )
    for line in sys.stdin:
        # The timer counts processor time, because a busy machine is not the template's fault. Its
        # signal ends this process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
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
        except Exception as error:  # noqa: BLE001 - a template may raise anything; the parent reports it with the row
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
