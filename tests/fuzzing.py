"""Settings that every fuzzer of the repository shares.

A fuzzer is a hypothesis test in a file called ``test_fuzz_*.py``. CI runs ``DEFAULT_EXAMPLES`` of
each, always the same ones; ``nox -s fuzz -- --examples 20000`` runs as many as asked for, different
ones each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, settings

DEFAULT_EXAMPLES = 200
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", str(DEFAULT_EXAMPLES)))

Test = TypeVar("Test", bound=Callable[..., None])


def fuzz(*, cost: int = 1) -> Callable[[Test], Test]:
    """Return the decorator of a fuzzer: ``@fuzz()`` above ``@given(…)``.

    Args:
        cost: Divisor of the number of examples, for a fuzzer whose examples are slow (a process
            each).
    """
    return settings(
        max_examples=max(1, EXAMPLES // cost),
        # A deadline would fail on a busy machine without a defect.
        deadline=None,
        derandomize=EXAMPLES == DEFAULT_EXAMPLES,
        database=None,
        print_blob=True,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    )
