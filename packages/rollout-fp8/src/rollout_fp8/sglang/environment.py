"""Corrections of everything that SGLang changes in the process that starts it."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager

from engine_api.errors import RolloutError
from rollout_fp8.kernels.float32 import VARIABLE, exact_float32

# SGLang's public switch for a context_length above the model's; requests stay below the model's own
# (see options.SPARE).
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
# Prefix of the variables that torchrun gives a rank. SGLang's processes would look for torchrun's
# store instead of their own, and wait for it.
LAUNCHER = "TORCHELASTIC_"
ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"
# Variables of this process, from which the trainer's NCCL and Triton read.
_OWN = ("NCCL_", "CUDA_", LAUNCHER, LONGER, VARIABLE)


def require_tempered_log_probs() -> None:
    """Raise ``RolloutError`` where SGLang is set to report log-probs without the temperature.

    They would be of another distribution than the one that it draws from.
    """
    if os.environ.get(ORIGINAL, "").lower() not in ("", "0", "false", "no", "n"):
        raise RolloutError(
            f"{ORIGINAL}={os.environ[ORIGINAL]}",
            where="rollout 'sglang'",
            why="SGLang would report log-probs without the temperature, and training would use "
            "them as the log-probs of the draws",
            remedy=f"unset {ORIGINAL}",
        )


@contextmanager
def kept(dtype: str) -> Iterator[None]:
    """Restore the environment after the context, in which SGLang is started for ``dtype``.

    SGLang's processes inherit the variables that are set inside.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith(_OWN)}
    method = multiprocessing.get_start_method(allow_none=True)
    try:
        for name in [name for name in before if name.startswith(LAUNCHER)]:
            del os.environ[name]
        os.environ[LONGER] = "1"
        exact_float32("cuda", dtype)
        with _own_logging():
            yield
    finally:
        for name in [name for name in os.environ if name.startswith(_OWN)]:
            del os.environ[name]
        os.environ.update(before)
        multiprocessing.set_start_method(method, force=True)


@contextmanager
def _own_logging() -> Iterator[None]:
    """Hide this process's log handlers while SGLang starts.

    SGLang calls ``logging.basicConfig(force=True)``, which closes the root logger's handlers.
    """
    root = logging.getLogger()
    handlers = root.handlers
    level = root.level
    root.handlers = []
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)
        logging.getLogger("sglang").setLevel(logging.ERROR)
