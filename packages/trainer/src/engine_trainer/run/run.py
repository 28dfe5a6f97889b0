"""A run with its folder, its engine, its ranks and its position.

::

    output_dir/
      config.yaml             what ran, defaults included
      metrics.jsonl           one row a step
      tensorboard/
      checkpoints/            step-000120, latest; critic/step-000120
      rollouts/               completions of RL, step-000120.parquet
      eval/                   completions to the held-out problems
      evaluation/             those of engine-train eval; evaluation.json
      report.html  plots/     at the end
      hf/                     the trained model, for transformers
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine_api.batch import Batch
from engine_api.capabilities import Capability, unsupported
from engine_api.comm import Comm, together
from engine_api.config import EngineConfig
from engine_api.contract import Engine
from engine_api.errors import ConfigError
from engine_api.folders import replace_folder, restore, write_text
from engine_api.generators import seed_all
from engine_api.hf_folder import WEIGHT_FILES
from engine_trainer.config import Config, RLConfig
from engine_trainer.config.loading import to_plain, to_yaml
from engine_trainer.placement import loopback
from engine_trainer.placement.groups import EngineGroup, Launcher, divide
from engine_trainer.placement.spmd import Spmd, SpmdEngines
from engine_trainer.run.checkpoints import Checkpoints, compare, fingerprint, read_extra
from engine_trainer.run.interrupt import Interrupt
from engine_trainer.run.lock import FolderLock
from engine_trainer.telemetry.logs import RunLog, Timers
from engine_trainer.telemetry.report import write_report

log = logging.getLogger("engine_trainer")


def world_size() -> int:
    """Return the number of ranks of this run: torchrun's ``WORLD_SIZE``, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def global_rank() -> int:
    """Return the rank of this process: torchrun's ``RANK``, 0 without it."""
    return int(os.environ.get("RANK", "0"))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The folder and the last step of a run; ``step < total_steps`` after an interruption."""

    folder: Path
    step: int
    total_steps: int


class Run:
    """One run, used as a context manager.

    The order of calls is ``start``, ``resume``, then ``steps`` with ``end_step`` in each step.

    Attributes:
        launcher: the launcher that runs the engines and rollouts.
        policy: the engine that learns, on all of its ranks; set by ``start``.
        companions: other engines that learn (the critic), by name; saved and loaded with the
            policy. They must be known before ``resume``.
        log: the log of the run.
        timers: the clocks of the run's phases.
        checkpoints: the checkpoints of the run.
        device: the device type that was chosen.
        interrupted: whether a signal ended the loop.
        before_save: called on all processes of the loop together before a checkpoint is saved, to
            complete files of its steps that are still being written.
    """

    policy: EngineGroup
    engine_config: EngineConfig
    device: str

    def __init__(
        self, config: Config, *, kind: str, total_steps: int, launcher: Launcher | None = None
    ) -> None:
        self.config, self.kind, self.total_steps = config, kind, total_steps
        self.folder = Path(config.run.output_dir).absolute()  # the same in every process
        self.is_main = global_rank() == 0
        self.timers = Timers()
        self.log = RunLog(
            self.folder,
            config.run,
            active=self.is_main,
            total_steps=total_steps,
            config=to_plain(config),
        )
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep=config.run.keep)
        self._reached = 0  # the last step that is complete
        if launcher is None:
            loopback.stay(rollout=getattr(config, "rollout", None))  # not every task generates
        self.launcher = launcher or Spmd(
            config if isinstance(config, RLConfig) else None, config.run.timeout_s
        )
        self.companions: dict[str, EngineGroup] = {}
        self.interrupted = False
        self.before_save: list[Callable[[], None]] = []
        self._interrupt = Interrupt()
        self._lock = FolderLock(self.folder)

    def __enter__(self) -> Self:
        self._interrupt.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The stack makes every call, whatever another call raises, and the last one first.
        with ExitStack() as stack:
            stack.callback(self._interrupt.__exit__, kind, error, trace)
            stack.callback(self._lock.release)
            stack.callback(self.launcher.close)
            stack.callback(self.log.close)
            # After an error other ranks may be anywhere in the code, so that nothing that needs
            # all ranks may be called.
            if error is None:
                self.checkpoints.wait(self.comm)

    @property
    def comm(self) -> Comm:
        """Communicator between all processes of the loop."""
        return self.launcher.comm

    @property
    def engine(self) -> Engine:
        """Engine of this rank, for a loop that every rank runs."""
        assert isinstance(self.policy, SpmdEngines), "a controller holds no engine"
        return self.policy.engine

    def start(self, *, schedule_steps: int | None = None) -> EngineGroup:
        """Create and initialize the policy.

        ``schedule_steps`` is the length of the learning-rate schedule; by default it is the
        number of steps of the run.

        Raises ``ConfigError`` in all processes together, before anything is made, where another
        run writes to the folder.
        """
        together(self.comm, lambda: self._lock.acquire() if self.is_main else None)
        # This seed is for code other than the engine: rewards, agents, plug-ins. An engine seeds
        # its process again when it is created.
        seed_all(self.config.run.seed, rank=global_rank())
        section = self.config.engine
        updates = schedule_steps or self.total_steps
        self.engine_config = section.build(seed=self.config.run.seed, total_steps=updates)
        if (
            self.is_main
            and section.optimizer is not None
            and section.schedule.warmup_steps >= updates
        ):
            log.warning(
                "engine.schedule.warmup_steps is %d, but the run has %d steps of the optimizer: "
                "the learning rate never reaches engine.optimizer.lr",
                section.schedule.warmup_steps,
                updates,
            )
        self.device, capabilities = self.launcher.resolve(section)
        if self.config.run.save_hf and Capability.SAVE_HF not in capabilities:
            raise unsupported(Capability.SAVE_HF, section.backend, capabilities)
        self.policy = self.launcher.engines(section, self.engine_config, self.device)
        return self.policy

    def resume(self, rows: int) -> dict[str, Any]:
        """Load the checkpoint to continue from, and open the logs.

        Args:
            rows: the current number of rows of training data. The order of rows is a function of
                their number: with a different number the run would continue at a different
                place, and meet rows twice or never.

        Returns the loop's own state as ``end_step`` received it, with the number of steps done as
        ``step``; for a new run only ``{"step": 0}``. Raises ``ConfigError`` when the configuration
        or the data no longer fit.
        """
        found = together(self.comm, self._find)[0]
        state: dict[str, Any] = {"step": 0}
        if found is not None:
            for name, group in self.companions.items():
                group.load_checkpoint(
                    together(self.comm, lambda n=name: self.checkpoints.companion(found, n))[0]
                )
            # The policy is loaded last, so that the random generators have the states that were
            # saved with it.
            state = dict(self.policy.load_checkpoint(found).extra["loop"])
            if state.get("rows", rows) != rows:
                raise ConfigError(
                    "data",
                    f"expected {state['rows']} rows as in {found.name}, got {rows}",
                    why="the data has changed since then",
                    remedy="use the data of the first run, or run.resume=never",
                )
            self.checkpoints.saved = self._reached = int(state["step"])
            self.log.say(f"resumed from {found} after step {state['step']}")
            if self._reached >= self.total_steps:
                self.log.say(
                    f"nothing is left to train: the run has {self.total_steps} steps, and "
                    f"{found.name} is there; give it more (run.steps or run.epochs), or start a "
                    "new run in another run.output_dir"
                )
        together(self.comm, lambda: self._open(int(state["step"])) if self.is_main else None)
        return state

    def steps(self, done: int) -> Iterator[int]:
        """Yield the step numbers from ``done + 1`` to ``total_steps``.

        After a signal the iteration ends early, on all ranks together.
        """
        for step in range(done + 1, self.total_steps + 1):
            if self.interrupted:
                return
            profiled = step in self.config.run.profile_steps
            if profiled:
                self.launcher.profile(self.folder / "profile" / f"step-{step:06d}")
            yield step
            if profiled:
                self.launcher.profile(None)

    def end_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        state: Mapping[str, Any],
        *,
        show: Sequence[str] = (),
    ) -> None:
        """Log a step, and save a checkpoint when one is due.

        A checkpoint is due every ``run.save_every`` steps, at the end with ``run.save_last``, and
        when a signal came on any rank.

        Args:
            step: the step that is complete.
            metrics: the step's figures; the phase times are added.
            state: the position of the loop as JSON, the same on all ranks; ``resume`` returns it.
            show: the metrics that are shown next to the progress bar.
        """
        run, last = self.config.run, step == self.total_steps
        self.interrupted = any(self.comm.all_gather(self._interrupt.requested))
        # An evaluation is too costly for its figures not to be logged.
        measured = any(name.startswith("eval/") for name in metrics)
        if step % run.log_every == 0 or measured or last or self.interrupted:
            self.log.write(step, {**metrics, **self.timers.take(), **self.launcher.figures()})
        self.log.progress(step, metrics, show)
        self._reached = step
        if (
            (last and run.save_last)
            or self.interrupted
            or (run.save_every and step % run.save_every == 0)
        ):
            with self.timers.phase("save"):
                for complete in self.before_save:
                    complete()
                extra = {
                    "kind": self.kind,
                    "config": self._fingerprint(),
                    "loop": {**state, "step": step},
                }
                self.checkpoints.save(self.policy, self.comm, step, extra, self.companions)
        if last and self.checkpoints.saved != step:
            self.log.say("no checkpoint of the last step: run.save_last is false")
        if self.interrupted and not last:
            self.log.say(
                f"stopped after step {step} of {self.total_steps}, saved; the same command "
                "continues from there"
            )

    def finish(self, tokenizer: Any) -> Outcome:
        """Wait for the last save, then write the model and the report.

        The model and the tokenizer go to ``output_dir/hf``, only if ``run.save_hf`` is true and
        the last step is complete.
        """
        self.checkpoints.wait(self.comm)
        step = self._reached
        if step == self.total_steps and self.config.run.save_hf:
            self._save_model(tokenizer)
        self.log.close()
        if self.is_main and self.config.run.report:
            write_report(self.folder)
        return Outcome(folder=self.folder, step=step, total_steps=self.total_steps)

    def pack_local(self, documents: Sequence[Mapping[str, Any]]) -> Batch:
        """Return this data-parallel rank's part of ``documents`` as a packed batch.

        ``documents`` is the same list on all ranks. Each document is a mapping as ``Batch.pack``
        takes it. The parts have about equal numbers of tokens.
        """
        (mine,) = divide([len(d["input_ids"]) for d in documents], self.policy)
        return Batch.pack([documents[i] for i in mine])

    # --- inside ---------------------------------------------------------------------------------

    def _save_model(self, tokenizer: Any) -> None:
        """Write the model and the tokenizer to a new folder, then replace ``hf`` by it.

        A kill leaves the former folder or the new one, whole.
        """
        final = self.folder / "hf"
        new = self.folder / "hf.new"

        def prepare() -> None:
            restore(final)
            shutil.rmtree(new, ignore_errors=True)  # a killed save's remains

        def replace() -> None:
            tokenizer.save_pretrained(new)
            replace_folder(new, final, stale=WEIGHT_FILES)

        together(self.comm, lambda: prepare() if self.is_main else None)
        self.policy.save_hf(new)
        together(self.comm, lambda: replace() if self.is_main else None)

    def _find(self) -> Path | None:
        if not self.is_main:
            return None
        found = self.checkpoints.find(self.config.run.resume)
        if found is not None:
            changes = compare(read_extra(found)["config"], self._fingerprint(), str(found))
            for change in changes:
                log.warning("changed since the checkpoint: %s", change)
        return found

    def _open(self, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints.clean()
        write_text(self.folder / "config.yaml", to_yaml(self.config))
        self.log.open(step)

    def _fingerprint(self) -> dict[str, Any]:
        return {"kind": self.kind, **fingerprint(self.config)}
