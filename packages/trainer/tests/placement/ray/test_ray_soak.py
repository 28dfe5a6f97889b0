"""Random deaths, one after the other, during a run.

The run ends as an uninterrupted one does, and leaves no process.

``RAY_SOAK_KILLS`` sets the number of deaths (3). On two quiet cores a kill costs about ten seconds.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from ray_runs import local_cluster, on_ray, result_of

pytest.importorskip("ray", reason="the extra ray")
pytest.importorskip("engine_fsdp", reason="the loop needs an engine")

from engine_trainer.rl.on_ray import train_on_ray

KILLS = int(os.environ.get("RAY_SOAK_KILLS", "3"))
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(1200 + 240 * KILLS),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
STEPS = 8 + 8 * KILLS  # about five in two seconds


class Reaper(threading.Thread):
    """A thread that kills a random worker after each new checkpoint, ``KILLS`` times.

    The moment is random too.
    """

    def __init__(self, checkpoints: Path, marker: str) -> None:
        super().__init__(daemon=True)
        self._checkpoints = checkpoints
        self._marker = marker
        self._random = random.Random(0)
        self.killed: list[str] = []
        self.done = threading.Event()

    def run(self) -> None:
        since = 0.0
        while len(self.killed) < KILLS and not self.done.is_set():
            newest = max(
                (p.stat().st_mtime for p in self._checkpoints.glob("step-*/manifest.json")),
                default=0.0,
            )
            victims = self._workers()
            if newest > since and len(victims) == 3:
                # The kill hits generation, update, sync, save, or the start of the workers.
                time.sleep(self._random.uniform(0.0, 2.0))
                pid, name = self._random.choice(victims)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.killed.append(name)
                since = newest
            time.sleep(0.05)

    def _workers(self) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                name = (folder / "cmdline").read_bytes().decode(errors="replace").strip("\0")
                if (
                    name.startswith(("ray::EngineWorker", "ray::RolloutWorker"))
                    and self._marker.encode() in (folder / "environ").read_bytes()
                ):
                    found.append((int(folder.name), name))
            except OSError:  # it ended meanwhile
                continue
        return sorted(found)


@pytest.mark.nightly
def test_random_kills(sums_model, tmp_path):
    workers = {"engines": 2, "rollouts": 1, "restarts": KILLS}
    with local_cluster(4, tmp_path / "none"):
        train_on_ray(on_ray(sums_model, tmp_path / "alone", ray=workers, run={"steps": STEPS}))
        reaper = Reaper(tmp_path / "out" / "checkpoints", str(tmp_path))
        reaper.start()
        train_on_ray(on_ray(sums_model, tmp_path / "out", ray=workers, run={"steps": STEPS}))
        reaper.done.set()
        reaper.join()
    print(f"killed: {reaper.killed}")
    assert len(reaper.killed) == KILLS
    assert result_of(tmp_path / "out") == result_of(tmp_path / "alone")
