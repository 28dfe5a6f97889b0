"""The device that tests of engines run on: a CPU, or the one that ``ENGINE_TEST_DEVICE`` names.

Ranks import this module, so that it imports nothing that only tests need.
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("ENGINE_TEST_DEVICE", "cpu")
# Largest difference relative to the largest element, for float32 sums in two orders. A GPU's
# kernels add up in orders of their own.
NEAR = 2e-5 if DEVICE == "cpu" else 1e-4
