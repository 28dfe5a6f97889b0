"""The entry point of ``engine-train`` and of ``python -m engine_trainer``.

Everything is imported inside the handler, so that Ctrl-C during the imports shows no traceback.
"""

from __future__ import annotations

import os
import sys

ABORTED = 130  # the status that a shell reports for SIGINT


def main() -> int:
    """Run the command of ``sys.argv`` and return its exit status."""
    try:
        from engine_api.commands import run_command
        from engine_trainer.cli import main as run

        return run_command(run)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("aborted\n")
        return ABORTED


if __name__ == "__main__":
    sys.exit(main())
