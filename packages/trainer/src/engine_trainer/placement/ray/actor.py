"""The base of all actors, whose methods are reached through ``call``, which measures them."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from engine_api.errors import ConfigError
from engine_api.generators import seed_all
from engine_api.rollout import WeightWire
from engine_trainer.config.sections import RolloutSection
from engine_trainer.placement import memory
from engine_trainer.placement.ray.calls import Reply
from engine_trainer.placement.replica import why_unusable
from engine_trainer.telemetry.logs import Timers
from engine_trainer.telemetry.profiling import Trace


class Worker:
    """The base class of both kinds of workers.

    Args:
        name: name in the controller's errors and figures.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.timers = Timers()
        # The engine's end or a rollout's, where they are in different processes.
        self._wire: WeightWire | None = None
        self._trace = Trace(name)

    def setup(
        self, folder: str, path: Sequence[str], imports: Sequence[str], seed: tuple[int, int]
    ) -> None:
        """Make this process ready, as the first call.

        Args:
            folder: the controller's working directory; relative paths mean the same here, where it
                exists.
            path: the controller's module search path; it is appended to this process's own.
            imports: modules that register engines, rollouts or rewards in process.
            seed: the run's seed, and this worker's number among all workers.
        """
        seed_all(seed[0], rank=seed[1])
        # On other nodes the folder may not exist; paths must be absolute there, as with torchrun.
        with suppress(FileNotFoundError):
            os.chdir(folder)
        sys.path += [entry for entry in path if entry not in sys.path]
        for module in imports:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(
                    "ray.imports",
                    f"{module!r} cannot be imported in a worker",
                    why=str(error),
                    remedy="install it on every node, or put its folder on PYTHONPATH",
                ) from error

    def call(self, method: str, *arguments: Any) -> Reply:
        """Return the value of a method, and the time it took."""
        begin = time.perf_counter()
        value = getattr(self, method)(*arguments)
        phases = {
            name.removeprefix("time/"): seconds for name, seconds in self.timers.take().items()
        }
        return Reply(value=value, seconds=time.perf_counter() - begin, phases=phases)

    def ping(self) -> None:
        """Do nothing, so that an ended process is noticed while it has no work."""

    def profile(self, folder: Path | None) -> None:
        """Begin or end a trace (see ``Launcher.profile``)."""
        if folder is None:
            self._trace.end()
        else:
            self._trace.begin(folder)

    def free_memory(self, device: str) -> memory.FreeMemory:
        """Return the memory that this worker may use."""
        return memory.free_memory(device)

    def why_unusable(self, section: RolloutSection, device: str) -> str:
        """Return why a rollout cannot be used in this worker (see ``replica.why_unusable``)."""
        return why_unusable(section, device)

    def close(self) -> None:
        """Close the wire (idempotent)."""
        if self._wire is not None:
            self._wire.close()


def address() -> str:
    """Return this node's address, as other nodes reach it."""
    return str(ray.util.get_node_ip_address())
