"""Former name of ``rollout_fp8.remote.server``, kept for commands and imports that use it."""

from __future__ import annotations

import logging
import sys
import warnings

from rollout_fp8.remote.server import Server, Service, main

__all__ = ["Server", "Service", "main"]

warnings.warn(
    "rollout_fp8.server is deprecated: use rollout_fp8.remote.server",
    DeprecationWarning,
    # Python shows a DeprecationWarning only where it belongs to __main__.
    stacklevel=1 if __name__ == "__main__" else 2,
)

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(main())
