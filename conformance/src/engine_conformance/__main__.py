"""The command line as ``python -m engine_conformance``, for when the script is not on the path."""

from __future__ import annotations

import sys

from engine_conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
