"""Kill replicas of an elastic run, and measure the seconds until others serve in their places.

``python tools/elastic.py`` trains a small random model on a Ray cluster of this machine
(``ray.elastic: true``), kills the process of a replica by SIGKILL again and again, each time when
all of them serve, and prints a row for each kill: the seconds until the run has noticed it, and
until its successor has the current weights. The engines' processes must be the same all the time,
and the run must end by itself. It ends with 0 where all of this held.

On a machine with GPUs: ``python tools/elastic.py --rollout vllm --shape 0.6b --device cuda``. It
takes a GPU for each replica and one for the engine. Other settings are those of the configuration,
as ``engine-train rl`` takes them: ``rollout.quantization=fp8``, ``overlap.mode=full``.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kills import QUIET, make_text

# This variable is in the environment of every worker of the run.
MARK = "ENGINE_ELASTIC_RUN"
LOOK_S = 0.02
# A run without a kill in so long a time has a defect.
PATIENCE_S = 900.0
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
    },
}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill, with the seconds from it."""

    steps: int
    """Steps that ended from the kill until the successor served."""
    noticed_s: float
    serving_s: float


class Told(logging.Handler):
    """The times at which the run said that a replica was lost, and that another one serves."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[float] = []
        self.served: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note the time of a message."""
        text = record.getMessage()
        if " is lost, and another one is started" in text:
            self.lost.append(time.monotonic())
        elif " serves again, " in text:
            self.served.append(time.monotonic())


class Killer(threading.Thread):
    """A thread that kills replicas, one after the other.

    Args:
        count: number of kills.
        sign: the signal that kills.
        mark: value of ``MARK`` in the run's workers.
    """

    def __init__(self, count: int, sign: int, mark: str, rows: Path, seed: int) -> None:
        super().__init__(name="kill replicas", daemon=True)
        self.kills: list[Kill] = []
        self.engines: set[int] = set()
        self.problem = ""
        self.told = Told()
        self._count = count
        self._sign = sign
        self._mark = f"{MARK}={mark}".encode()
        self._rows = rows
        self._random = random.Random(seed)

    def run(self) -> None:
        """Kill, and wait until the successor serves."""
        logging.getLogger("engine_trainer").addHandler(self.told)
        for _ in range(self._count):
            step = self._step()
            if not self._until(lambda step=step: self._step() > step):
                self.problem = "no step ended"
                return
            time.sleep(self._random.uniform(0.0, 2.0))
            self.engines |= set(self._workers("EngineWorker"))
            victims = self._workers("RolloutWorker")
            if not victims:
                self.problem = "no replica runs"
                return
            noticed = len(self.told.lost)
            served = len(self.told.served)
            step = self._step()
            begin = time.monotonic()
            os.kill(self._random.choice(victims), self._sign)
            if not self._until(lambda served=served: len(self.told.served) > served):
                self.problem = "no replica joined in the place of the killed one"
                return
            self.kills.append(
                Kill(
                    steps=self._step() - step,
                    noticed_s=self.told.lost[noticed] - begin,
                    serving_s=self.told.served[served] - begin,
                )
            )
        self.engines |= set(self._workers("EngineWorker"))

    def _until(self, holds: Callable[[], bool]) -> bool:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_S)
        return True

    def _step(self) -> int:
        return self._rows.read_text().count("\n") if self._rows.is_file() else 0

    def _workers(self, kind: str) -> list[int]:
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                name = (folder / "cmdline").read_bytes()
                if name.startswith(f"ray::{kind}".encode()) and (
                    self._mark in (folder / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(folder.name))
            except OSError:  # it has ended meanwhile
                continue
        return sorted(found)


def configuration(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Return the configuration of the run, before the settings of the command line."""
    rollout: dict[str, Any] = {"name": options.rollout, "n": 8, "max_new_tokens": options.tokens}
    if options.rollout == "vllm" and options.device == "cpu":
        rollout["options"] = {"kv_cache_bytes": 1 << 26}
    return {
        "engine": {
            "model": {"path": str(root / "model"), "init": "random"},
            "device": options.device,
            "optimizer": {"lr": 1e-5},
        },
        "data": {"source": str(root / "rl.jsonl")},
        "reward": {"name": "exact"},
        "rollout": rollout,
        "algorithm": {"prompts_per_step": 16, "correction": {"weight": "token"}},
        "launcher": "ray",
        "ray": {
            "engines": 1,
            "rollouts": options.replicas,
            "elastic": True,
            # Workers of a machine with few cores take turns.
            "cpus_per_worker": min(1.0, (os.cpu_count() or 1) / (1 + options.replicas)),
            "start_timeout_s": 300.0,
        },
        "run": {
            "output_dir": str(root / "out"),
            "steps": 1_000_000,
            "save_every": 0,
            "save_last": False,
            "save_hf": False,
            "seed": 3,
            **QUIET,
        },
    }


def shape(root: Path, name: str) -> None:
    """Give the model of ``make_text`` another shape."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(root / "model", **SHAPES[name])
    config.save_pretrained(root / "model")


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="elastic.py", description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument(
        "--signal", choices=["KILL", "STOP"], default="KILL", help="STOP: lost at ray.timeout_s"
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rollout", default="local")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, default=32, help="longest completion")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("settings", nargs="*", help="key=value of the configuration")
    return parser.parse_args()


def measure(options: argparse.Namespace, root: Path) -> int:
    """Train, kill, print the table, and return the exit status."""
    from engine_trainer.cli import main

    make_text(root)
    shape(root, options.shape)
    file = root / "rl.yaml"
    file.write_text(yaml.safe_dump(configuration(options, root)))
    mark = os.environ[MARK] = uuid.uuid4().hex
    sign = signal.Signals[f"SIG{options.signal}"]
    killer = Killer(options.kills, sign, mark, root / "out" / "metrics.jsonl", options.seed)
    killer.start()

    def end() -> None:
        killer.join()
        os.kill(os.getpid(), signal.SIGINT)

    # The run ends as by Ctrl-C, after the step of the last kill.
    threading.Thread(target=end, daemon=True).start()
    status = main(["rl", str(file), *options.settings])
    print(f"\n{options.replicas} replicas ({options.rollout}, {options.device}, {options.shape})\n")
    print("| kill | noticed after (s) | served again after (s) | steps meanwhile |")
    print("|---|---|---|---|")
    for number, kill in enumerate(killer.kills, 1):
        print(f"| {number} | {kill.noticed_s:.1f} | {kill.serving_s:.1f} | {kill.steps} |")
    problems = [killer.problem] if killer.problem else []
    if len(killer.engines) != 1:
        problems.append(f"expected one process of the engine, saw {sorted(killer.engines)}")
    if len(killer.kills) != options.kills:
        problems.append(f"expected {options.kills} kills with a successor")
    print("\n" + ("; ".join(problems) or f"engine's process {killer.engines} all the time"))
    print(f"the run ended with {status}")
    return 1 if problems else 0


def main() -> int:
    """Measure in a temporary folder, and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        return measure(parse(), Path(folder))


if __name__ == "__main__":
    sys.exit(main())
