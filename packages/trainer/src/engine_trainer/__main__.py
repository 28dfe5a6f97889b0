"""The entry point of ``python -m engine_trainer``."""

from __future__ import annotations

import sys

from engine_trainer.cli import main

sys.exit(main())
