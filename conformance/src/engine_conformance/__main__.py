"""``python -m engine_conformance``: the command line, where the script is not on the path."""

from __future__ import annotations

import sys

from engine_conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
