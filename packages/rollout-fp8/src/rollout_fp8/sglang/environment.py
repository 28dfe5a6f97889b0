"""What SGLang does to the process that starts it, beside starting its own. All of it is set right here."""

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
# What torchrun tells a rank. SGLang's processes would look for its store in place of their own, and
# wait for it.
LAUNCHER = "TORCHELASTIC_"
ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"
# Variables of this process, where the trainer's NCCL and Triton read them.
_OWN = ("NCCL_", "CUDA_", LAUNCHER, LONGER, VARIABLE)


def require_tempered_log_probs() -> None:
    """Raise ``RolloutError`` where the user has SGLang tell log-probs of another distribution than the one that it draws from."""
    if os.environ.get(ORIGINAL, "").lower() not in ("", "0", "false", "no", "n"):
        raise RolloutError(
            f"{ORIGINAL}={os.environ[ORIGINAL]}",
            where="rollout 'sglang'",
            why="SGLang would report log-probs without the temperature, and training would take them for those of its draws",
            remedy=f"unset {ORIGINAL}",
        )


@contextmanager
def kept(dtype: str) -> Iterator[None]:
    """While SGLang is started to compute in ``dtype``; its processes inherit what it sets, this one is afterwards as it was."""
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
    """SGLang takes the root logger (``logging.basicConfig(force=True)``), which closes the handlers that it finds."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)
        logging.getLogger("sglang").setLevel(logging.ERROR)
