"""The entry point of ``engine-train`` and of ``python -m engine_trainer``.

The command line is imported inside the handlers, so that Ctrl-C during the imports, and a reader of
the output that ends early (``engine-train … | head``), show no traceback.
"""

from __future__ import annotations

import os
import sys

ABORTED = 130  # the status that a shell reports for SIGINT
BROKEN_PIPE = 141  # the same for SIGPIPE


def main() -> int:
    """Run the command of ``sys.argv`` and return its exit status."""
    try:
        from engine_trainer.cli import main as run_command

        status = run_command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("aborted\n")
        return ABORTED
    except BrokenPipeError:
        # The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


if __name__ == "__main__":
    sys.exit(main())
