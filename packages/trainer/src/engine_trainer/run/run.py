"""A run with its folder, its engine, its ranks and its position.

::

    output_dir/
      config.yaml             what ran, defaults included; config-until-000120.yaml before a change
      environment.json        versions, hardware, commit and command of each start
      metrics.jsonl           one row a step
      tensorboard/
      checkpoints/            step-000120, latest; critic/step-000120
      rollouts/               completions of RL, step-000120.parquet
      eval/                   completions to the held-out problems
      evaluation/             those of engine-train eval; evaluation.json
      report.html             at the end
      hf/                     the trained model, for transformers
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from engine_api.batch import Batch
from engine_api.capabilities import Capability, unsupported
from engine_api.comm import Comm, together
from engine_api.config import EngineConfig
from engine_api.contract import Engine
from engine_api.errors import ConfigError, EngineError
from engine_api.generators import seed_all
from engine_trainer.config import Config, RLConfig
from engine_trainer.config.loading import to_plain, to_yaml
from engine_trainer.data.datasets import Document, make_fields
from engine_trainer.errors import DataError
from engine_trainer.placement import automatic, loopback
from engine_trainer.placement.groups import EngineGroup, Launcher, divide
from engine_trainer.placement.spmd import Spmd, SpmdEngines
from engine_trainer.run.best import BestStep
from engine_trainer.run.checkpoints import (
    BEST,
    Checkpoints,
    compare,
    find_checkpoint,
    fingerprint,
    list_defaults,
    read_extra,
)
from engine_trainer.run.configurations import keep_config
from engine_trainer.run.hub import create_repository, push_folder
from engine_trainer.run.interrupt import Interrupt
from engine_trainer.run.lock import FolderLock
from engine_trainer.run.model_folder import SavesPretrained, export_dtype, write_model
from engine_trainer.telemetry.environment import Start, describe_start, record
from engine_trainer.telemetry.learning import LearningWatch
from engine_trainer.telemetry.logs import METRICS, RunLog, Timers, last_step
from engine_trainer.telemetry.pages.evaluations import forget_evaluations
from engine_trainer.telemetry.report import write_report

log = logging.getLogger("engine_trainer")
EVALUATION = "evaluation.json"


def world_size() -> int:
    """Return the number of ranks of this run: torchrun's ``WORLD_SIZE``, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def global_rank() -> int:
    """Return the rank of this process: torchrun's ``RANK``, 0 without it."""
    return int(os.environ.get("RANK", "0"))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The folder and the last step of a run.

    ``step`` is below ``total_steps`` after an interruption.

    ``report`` is the new report.html, None where none was written.
    """

    folder: Path
    step: int
    total_steps: int
    report: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The model that ``engine-train eval`` measures.

    Attributes:
        model: ``engine.model.path``.
        checkpoint: the checkpoint whose weights were loaded; None for the model as it is.
        step: number of optimizer updates behind the weights.
        state: the loop's state in the checkpoint; empty for the model as it is.
    """

    model: str
    checkpoint: Path | None
    step: int
    state: Mapping[str, Any]


def keep_evaluation(folder: Path) -> None:
    """Rename an earlier ``evaluation.json`` and its completions to names with the next number."""
    if not (folder / EVALUATION).is_file():
        return
    stem = Path(EVALUATION).stem
    number = next(n for n in count(1) if not (folder / f"{stem}-{n}.json").exists())
    if (folder / stem).is_dir():
        (folder / stem).rename(folder / f"{stem}-{number}")
    (folder / EVALUATION).rename(folder / f"{stem}-{number}.json")
    log.info("the earlier %s is now %s-%d.json", EVALUATION, stem, number)


class Run:
    """One run, used as a context manager.

    The order of calls is ``start``, ``resume``, then ``steps`` with ``complete`` and ``end_step``
    in each step. An error that leaves the context manager saves the last complete step, where the
    weights are still those of that step and all ranks can take part.

    Args:
        config: the configuration.
        kind: the task, or ``eval``.
        total_steps: number of steps of the run.
        launcher: the launcher that runs the engines; None is this process or torchrun's ranks.
        saves: False for a run that saves nothing, such as an evaluation.

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
        id: a random text that is in the run's checkpoints and recordings, and in those of no other
            run; set by ``resume``.
        before_save: called on all processes of the loop together before a checkpoint is saved, to
            complete files of its steps that are still being written.
    """

    policy: EngineGroup
    engine_config: EngineConfig
    device: str
    id: str

    def __init__(
        self,
        config: Config,
        *,
        kind: str,
        total_steps: int,
        launcher: Launcher | None = None,
        saves: bool = True,
    ) -> None:
        self.config, self.kind, self.total_steps = config, kind, total_steps
        self._is_settled = False
        self.folder = Path(config.run.output_dir).absolute()  # the same in every process
        self.is_main = global_rank() == 0
        self.log = RunLog(
            self.folder,
            config.run,
            active=self.is_main,
            total_steps=total_steps,
            config=to_plain(config),
        )
        self.timers = Timers(self.log.show_phase)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep=config.run.keep)
        self._reached = 0  # the last step that is complete
        # The loop's state after that step, and its figures until they are logged.
        self._position: dict[str, Any] | None = None
        self._unlogged: Mapping[str, float] | None = None
        self._versions: list[int] = []  # of the engines' weights, after that step
        self._watch = LearningWatch()
        self._best = BestStep(config.run.keep_best, config.run.patience)
        if launcher is None:
            loopback.stay(rollout=getattr(config, "rollout", None))  # not every task generates
        self.launcher = launcher or Spmd(
            config if isinstance(config, RLConfig) else None, config.run.timeout_s
        )
        self.companions: dict[str, EngineGroup] = {}
        self.interrupted = False
        self.before_save: list[Callable[[], None]] = []
        self._interrupt = Interrupt(self._describe_interrupt if self.is_main else None)
        self._lock = FolderLock(self.folder)
        self._saves = saves

    def __enter__(self) -> Self:
        # Without anything to save a signal ends the run at once.
        if self._saves:
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
            if error is None:
                self.checkpoints.wait(self.comm)
            elif isinstance(error, Exception) and self._position is not None:
                self._rescue(error)

    @property
    def comm(self) -> Comm:
        """Communicator between all processes of the loop."""
        return self.launcher.comm

    @property
    def engine(self) -> Engine:
        """Engine of this rank, for a loop that every rank runs."""
        assert isinstance(self.policy, SpmdEngines), "a controller holds no engine"
        return self.policy.engine

    def settle(self) -> Config:
        """Replace each ``auto`` of the configuration by a choice for the device, and log them.

        A run that continues from a checkpoint keeps what was chosen before. Returns the
        configuration of the run, which is also that of ``config.yaml``. ``start`` calls it, for a
        loop that has not.

        Raises ``PluginError``; ``ConfigError``, also where an earlier choice is no longer possible.
        """
        if not self._is_settled:
            before, where = together(self.comm, self._read_before)[0]
            self.config, kept = automatic.keep(self.config, before, where)
            automatic.check_kept(self.config, kept, self.launcher)
            self.config, choices = automatic.settle(self.config, self.launcher)
            choices = [*kept, *choices]
            self._is_settled = True
            self.log.describe(to_plain(self.config))
            if choices and self.is_main:
                log.info("chosen: %s", ", ".join(map(str, choices)))
        return self.config

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
        section = self.settle().engine
        updates = schedule_steps or self.total_steps
        self.engine_config = replace(
            section.build(seed=self.config.run.seed, total_steps=updates),
            router_replay=self.kind == "rl"
            and isinstance(self.config, RLConfig)
            and self.config.rollout.routed_experts == "replay",
        )
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
        if self.config.run.keep_best is not None and self.config.eval is None:
            raise ConfigError(
                "run.keep_best",
                f"{self.config.run.keep_best!r}, but the run has no evaluation",
                remedy="set eval.source and eval.every, or run.keep_best: null",
            )
        self.device, capabilities = self.launcher.resolve(section)
        if section.memory.share_prefixes and Capability.SHARED_PREFIXES not in capabilities:
            raise unsupported(
                Capability.SHARED_PREFIXES,
                section.backend,
                capabilities,
                off="set engine.memory.share_prefixes=false",
            )
        if self.config.run.save_hf and Capability.SAVE_HF not in capabilities:
            raise unsupported(
                Capability.SAVE_HF, section.backend, capabilities, off="set run.save_hf=false"
            )
        if (name := self.config.run.push_to_hub) is not None:
            together(self.comm, lambda: create_repository(name) if self.is_main else None)
        self.policy = self.launcher.engines(section, self.engine_config, self.device)
        # On all ranks, since those of an engine on Ray are asked together.
        self._resolved = self.policy.resolved()
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
        self.id = together(self.comm, lambda: self._identify(found))[0]
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
            self._best.restore(state.get("best", {}))
            self.checkpoints.best = self._best.step
            self.log.say(f"resumed from {found} after step {state['step']}")
            if self._reached >= self.total_steps:
                self.log.say(
                    f"nothing is left to train: the run has {self.total_steps} steps, and "
                    f"{found.name} is there; give it more (run.steps or run.epochs), or start a "
                    "new run in another run.output_dir"
                )
        together(self.comm, lambda: self._open(int(state["step"])) if self.is_main else None)
        self.checkpoints.start_clock()
        return state

    def log_start(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the figures from before the first step, or those of an evaluation that was missing.

        ``step`` is the number of steps done.
        """
        self.log.write(step, metrics)
        self._best.check(metrics)
        if step and self._best.note(step, metrics):
            self.checkpoints.best = step
            # The step was saved before it was measured, and may be the last one.
            together(self.comm, lambda: self.checkpoints.prune() if self.is_main else None)

    def complete(self, step: int, metrics: Mapping[str, float], state: Mapping[str, Any]) -> None:
        """Note that the update of ``step`` is done.

        A run that fails from here on loses nothing of this step. The arguments are those of
        ``end_step``, without the figures of an evaluation that follows. When this evaluation
        fails, the resumed run finds ``metrics`` as ``unmeasured`` in its state.
        """
        self._reached = step
        self._position = {**state, "step": step, "best": self._best.state}
        self._unlogged = metrics
        self._versions = self._weight_versions()
        # A step that fails may draw random numbers first. The step that takes its place must draw
        # the same ones.
        self.policy.keep_generators()

    def load_evaluated(self) -> Evaluated:
        """Load the checkpoint that ``run.resume`` names, for a run that only measures.

        ``auto`` and ``never`` leave the model as it is in ``engine.model``. A former
        ``evaluation.json`` and its completions get a number of their own.

        Raises ``CheckpointError`` for a checkpoint that is missing or does not fit the model.
        """
        found = None
        state: Mapping[str, Any] = {}
        resume = self.config.run.resume
        if resume not in ("auto", "never"):
            found = together(self.comm, lambda: find_checkpoint(Path(resume)))[0]
            state = self.policy.load_checkpoint(found).extra.get("loop", {})
        model = self.config.engine.model.path
        self.log.say(
            f"measuring the checkpoint {found}" if found else f"measuring {model} as it is"
        )
        together(self.comm, lambda: keep_evaluation(self.folder) if self.is_main else None)
        return Evaluated(
            model=model, checkpoint=found, step=self.policy.weight_version, state=state
        )

    def steps(self, done: int) -> Iterator[int]:
        """Yield the step numbers from ``done + 1`` to ``total_steps``.

        After a signal the iteration ends early, on all ranks together.
        """
        for step in range(done + 1, self.total_steps + 1):
            if self.interrupted or self._best.is_over:
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

        A checkpoint is due every ``run.save_every`` steps, ``run.save_minutes`` after the last one,
        at the end with ``run.save_last``, and when a signal came on any rank.

        Args:
            step: the step that is complete.
            metrics: the step's figures; the phase times are added.
            state: the position of the loop as JSON, the same on all ranks; ``resume`` returns it.
            show: the metrics that are shown next to the progress bar.
        """
        run = self.config.run
        self.complete(step, metrics, state)
        if is_best := self._best.note(step, metrics):
            self.checkpoints.best = step
        assert self._position is not None
        self._position["best"] = self._best.state
        last = step == self.total_steps or self._best.is_over
        signs = self.comm.all_gather(
            (self._interrupt.requested, self.checkpoints.is_older_than(run.save_minutes))
        )
        self.interrupted = any(requested for requested, _ in signs)
        # An evaluation is too costly for its figures not to be logged.
        measured = any(name.startswith("eval/") for name in metrics)
        if step % run.log_every == 0 or measured or last or self.interrupted:
            self.log.write(step, {**metrics, **self.timers.take(), **self.launcher.figures()})
        for line in self._watch.note(step, metrics):
            self.log.say(line)
        self._unlogged = None
        self.log.progress(step, metrics, show)
        if (
            (last and run.save_last)
            or self.interrupted
            or any(old for _, old in signs)
            or is_best
            or (run.save_every and step % run.save_every == 0)
        ):
            for complete in self.before_save:
                complete()
            self._save()
        if last and self.checkpoints.saved != step:
            self.log.say("no checkpoint of the last step: run.save_last is false")
        if self._best.is_over:
            self.log.say(
                f"stopped after step {step}: {run.patience} evaluations in a row were not better "
                f"than {self._best}"
            )
        elif self.interrupted and not last:
            self.log.say(
                f"stopped after step {step} of {self.total_steps}, saved; the same command "
                "continues from there"
            )

    def finish(
        self, tokenizer: SavesPretrained, convert: Callable[[Path], None] | None = None
    ) -> Outcome:
        """Wait for the last save, then write the model and the report.

        The model and the tokenizer go to ``output_dir/hf``, only if ``run.save_hf`` is true and
        the run is not interrupted. ``run.push_to_hub`` receives that folder. ``convert`` changes
        the folder before it takes that name.
        """
        self.checkpoints.wait(self.comm)
        step = self._reached
        if self._best.step is not None:
            best = self.folder / "checkpoints" / BEST
            self.log.say(f"best {self._best}; engine-train export {best} DIR writes its model")
        is_over = step == self.total_steps or self._best.is_over
        if is_over and self.config.run.save_hf:
            dtype = export_dtype(self.config.run.hf_dtype, self.config.engine.precision)
            write_model(
                self.policy,
                self.comm,
                self.folder / "hf",
                tokenizer,
                dtype=dtype,
                convert=convert,
            )
        self.log.close()
        report = self._write_report() if self.is_main and self.config.run.report else None
        # This comes last: it may fail, and everything else is written then.
        if is_over and (name := self.config.run.push_to_hub) is not None:
            together(self.comm, lambda: self._push(name, step) if self.is_main else None)
        return Outcome(folder=self.folder, step=step, total_steps=self.total_steps, report=report)

    def pack_local(self, documents: Sequence[Document]) -> Batch:
        """Return this data-parallel rank's part of ``documents`` as a packed batch.

        ``documents`` is the same list on all ranks. The parts have about equal numbers of tokens.
        A document whose images cannot be decoded is left out with ``data.on_bad_image: drop``.

        Raises ``ImageError`` for such a document otherwise (``RankFailure`` on other ranks).
        """
        (mine,) = divide([len(d) for d in documents], self.policy)
        own = [documents[i] for i in mine]
        drop = self.config.data.on_bad_image == "drop"
        if all(document.images is None for document in documents):
            return Batch.pack(make_fields(own, drop=drop))
        packed: list[Batch] = []
        # Only the rank that has a document decodes its images.
        together(self.comm, lambda: packed.append(Batch.pack(make_fields(own, drop=drop))))
        return packed[0]

    # --- inside ---------------------------------------------------------------------------------

    def _save(self) -> None:
        """Save the last complete step."""
        with self.timers.phase("save"):
            extra = {
                "kind": self.kind,
                "run": self.id,
                "config": self._fingerprint(),
                "loop": self._position,
            }
            self.checkpoints.save(self.policy, self.comm, self._reached, extra, self.companions)

    def _rescue(self, error: Exception) -> None:
        """Save the last complete step after an error, and say what is kept and what is lost."""
        why = None
        if self.checkpoints.saved != self._reached:
            why = self._why_unsavable(error)
        if why is None:
            try:
                self._save_after_error()
            # The error that ended the run is raised in any case. This one is only logged.
            except (EngineError, OSError) as second:
                why = str(second)
        if self.is_main:
            self.log.say(self._describe_failure(why))

    def _why_unsavable(self, error: Exception) -> str | None:
        """Return why the last complete step cannot be saved after ``error``, or None if it can."""
        if (why := self.launcher.why_unusable(error)) is not None:
            return why
        if self._weight_versions() != self._versions:
            return f"step {self._reached + 1} has updated the weights in part"
        return None

    def _save_after_error(self) -> None:
        assert self._position is not None
        self.policy.restore_generators()
        if self._unlogged is not None:
            finite = {k: v for k, v in self._unlogged.items() if math.isfinite(v)}
            self._position["unmeasured"] = finite
        self._save()
        self.checkpoints.wait(self.comm)

    def _describe_failure(self, why: str | None) -> str:
        reached = self._reached
        during = "in the evaluation after" if self._unlogged is not None else "after"
        newest = max(self.checkpoints.steps(), default=0)
        if newest == reached:
            return (
                f"failed {during} step {reached}, which is saved; once the cause is removed, the "
                "same command continues from there"
            )
        lost = f"{reached - newest} step{'s' if reached - newest > 1 else ''} will be trained again"
        saved = f"the newest checkpoint is of step {newest}" if newest else "there is no checkpoint"
        return f"failed {during} step {reached}, which could not be saved ({why}); {saved}: {lost}"

    def _push(self, name: str, step: int) -> None:
        address = push_folder(self.folder / "hf", name, f"{self.kind}, step {step}")
        log.info("the model is pushed: %s", address)

    def _describe_interrupt(self) -> str:
        if self._reached >= self.total_steps:
            return "finishing the run; again to abort"
        return f"finishing step {self._reached + 1}, then saving; again to abort"

    def _weight_versions(self) -> list[int]:
        return [group.weight_version for group in (self.policy, *self.companions.values())]

    def _write_report(self) -> Path | None:
        # The model is trained and saved: a damaged file of the run is reported, and is no failure.
        try:
            return write_report(self.folder, self.kind)
        except DataError as error:
            log.warning("there is no new report: %s", error)
            return None

    def _read_before(self) -> tuple[Mapping[str, Any], str]:
        """Return the configuration that a checkpoint was made with, by dotted key, and its name.

        It is empty for a new run, and for a run that saves nothing: a replay chooses again where
        it asks for ``auto``.
        """
        resume = self.config.run.resume
        if not (self.is_main and self._saves) or resume == "never":
            return {}, ""
        found = self.checkpoints.find(resume)
        if found is None:
            return {}, ""
        return automatic.fill_earlier(read_extra(found)["config"]), found.name

    def _find(self) -> Path | None:
        if not self.is_main:
            return None
        found = self.checkpoints.find(self.config.run.resume)
        if found is not None:
            then = automatic.fill_earlier(read_extra(found)["config"])
            now = self._fingerprint()
            changes = compare(then, now, str(found), list_defaults(self.config))
            for change in changes:
                log.warning("changed since the checkpoint: %s", change)
        return found

    def _identify(self, found: Path | None) -> str:
        """Return the run's id, which is that of a checkpoint in its own folder."""
        if found is None or found.parent.resolve() != self.checkpoints.folder.resolve():
            return uuid4().hex
        # Checkpoints of earlier releases have no id.
        return str(read_extra(found).get("run") or uuid4().hex)

    def _open(self, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints.clean()
        keep_config(self.folder, step, to_yaml(self.config))
        logged = last_step(self.folder / METRICS)
        if logged > step:
            from_where = f"the checkpoint is of step {step}" if step else "there is no checkpoint"
            self.log.say(
                f"{self.folder} has figures up to step {logged}, but {from_where}: steps "
                f"{step + 1} to {logged} are trained again"
            )
        self.log.open(step)
        forget_evaluations(self.folder, step)
        record(self.folder, self._describe_start(step))

    def _describe_start(self, step: int) -> Start:
        config = self.config
        ray = config.ray if isinstance(config, RLConfig) and config.launcher == "ray" else None
        return describe_start(
            task=self.kind,
            after=step,
            steps=self.total_steps,
            ranks=world_size() if ray is None else ray.engines,
            launcher="none" if ray is None else "ray",
            backend=config.engine.backend,
            device=self.device,
            model=config.engine.model.path,
            resolved=self._resolved,
        )

    def _fingerprint(self) -> dict[str, Any]:
        return {"kind": self.kind, **fingerprint(self.config)}
