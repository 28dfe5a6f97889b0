"""The process that has imported torch, transformers and the suite, and forks itself into ranks.

Importing them takes seconds of computation, and a rank is new after each failure. A copy of this
process has all of them at once, and is as new otherwise: no engine has lived in it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping

from engine_api.devices import cuda_is_simulated, npu_is_simulated
from engine_conformance._rank_worker import main as run_rank

__all__ = ["FORK", "REAP", "main", "serve"]

# A request is one of these bytes and its argument: a JSON object with the rank's ``folder`` and
# variables of its ``environment``, or a process id.
FORK, REAP = b"f", b"r"
_LONGEST = 1 << 16


def main(descriptor: int) -> None:
    """Import what every rank needs, and serve requests at the socket ``descriptor``."""
    import torch.distributed  # noqa: F401 - ranks find it loaded

    # A stand-in for a device replaces parts of torch, which later imports must find replaced.
    if not (cuda_is_simulated() or npu_is_simulated()):
        from engine_conformance.cases import load_cases

        load_cases()
        # Most engines build their models from it. The names are what makes it load its modules.
        if importlib.util.find_spec("transformers") is not None:
            from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401
    serve(descriptor, run_rank)


def serve(descriptor: int, run: Callable[[int], None]) -> None:
    """Fork ranks until the other end of the socket ``descriptor`` is closed.

    A request to fork comes with two descriptors, those of the rank's pipe and of the file for its
    output. The answer is the process id. A request to reap names a rank that has ended, and the
    answer is its exit code, negative for a signal. A rank calls ``run`` with its pipe and then
    leaves as a process of its own does.
    """
    # Ctrl-C is for the parent to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is not looked at by the collector stays shared with the ranks.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as connection:
        while True:
            message, descriptors, _, _ = socket.recv_fds(connection, _LONGEST, 2)
            kind, argument = message[:1], message[1:]
            if not kind:
                return
            if kind == REAP:
                _, status = os.waitpid(int(argument), 0)
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
                continue
            pid = os.fork()
            if pid == 0:
                break
            for number in descriptors:
                os.close(number)
            connection.send(str(pid).encode())
    pipe, log = descriptors
    _become_rank(log, **json.loads(argument))
    run(pipe)


def _become_rank(log: int, folder: str, environment: Mapping[str, str]) -> None:
    """Give this copy the output, folder, environment and random numbers of a new process."""
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    # A folder of a test that has ended may be gone: a new process could not start there either.
    with contextlib.suppress(FileNotFoundError):
        os.chdir(folder)
    os.environ.update(environment)
    # Files may have come since the template listed the folders of its modules.
    importlib.invalidate_caches()
    # Python seeds its own generator in every copy; NumPy does not.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
