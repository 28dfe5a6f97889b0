"""What the actors share. Every method is reached through ``call``, which measures it."""

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
from engine_trainer.placement import memory
from engine_trainer.placement.ray.calls import Reply
from engine_trainer.telemetry.logs import Timers
from engine_trainer.telemetry.profiling import Trace


class Worker:
    """What both kinds share.

    Args:
        name: as the controller's errors and figures call it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.timers = Timers()
        self._wire: WeightWire | None = (
            None  # the engine's end or a rollout's, where they are apart
        )
        self._trace = Trace(name)

    def setup(
        self, folder: str, path: Sequence[str], imports: Sequence[str], seed: tuple[int, int]
    ) -> None:
        """Make this process ready; the first call.

        Args:
            folder: the controller's working directory: relative paths mean the same here, where it exists.
            path: where the controller finds modules; they are looked for there after this process's own places.
            imports: modules that register engines, rollouts or rewards in process.
            seed: the run's, and this worker's number among all of them.
        """
        seed_all(seed[0], rank=seed[1])
        with suppress(
            FileNotFoundError
        ):  # on another node a path must be absolute, as with torchrun
            os.chdir(folder)
        sys.path += [place for place in path if place not in sys.path]
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
        """The method's value, and how long it took."""
        begin = time.perf_counter()
        value = getattr(self, method)(*arguments)
        phases = {
            name.removeprefix("time/"): seconds for name, seconds in self.timers.take().items()
        }
        return Reply(value=value, seconds=time.perf_counter() - begin, phases=phases)

    def profile(self, folder: Path | None) -> None:
        """See ``Launcher.profile``."""
        self._trace.end() if folder is None else self._trace.begin(folder)

    def room(self, device: str) -> memory.Room:
        """The memory that this worker may use."""
        return memory.room(device)

    def close(self) -> None:
        """Give everything back; idempotent."""
        if self._wire is not None:
            self._wire.close()


def address() -> str:
    """Of this node, as the others reach it."""
    return str(ray.util.get_node_ip_address())
