"""A recorded step of RL made again from its checkpoint and its recorded groups."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine_api.comm import together
from engine_api.errors import ConfigError
from engine_api.folders import write_text
from engine_trainer.config import OverlapSection, RLConfig
from engine_trainer.placement import loopback
from engine_trainer.placement.spmd import Spmd
from engine_trainer.replay.compare import (
    FigureDifference,
    StateDifference,
    TokenDifference,
    compare_figures,
    compare_states,
    compare_surroundings,
    compare_tokens,
)
from engine_trainer.replay.overridden import check_engine
from engine_trainer.rl.critic import check_critic
from engine_trainer.rl.learner import Learner
from engine_trainer.rl.recorded import CHECKPOINTS, RecordedRun, read_recorded_run
from engine_trainer.run.run import Run, world_size
from engine_trainer.telemetry.environment import Start, read_starts
from engine_trainer.telemetry.logs import METRICS, read_metrics

FOLDER = "replay"
RESULT = "replay.json"


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The result of a replay: what differs from the recording."""

    folder: str
    """The run's folder."""
    step: int
    checkpoint: str | None
    """Name of the checkpoint that the replay began from, None for the model as the run began."""
    steps: Sequence[int]
    """Steps that were made again, ``step`` the last of them."""
    surroundings: Mapping[str, tuple[str, str]]
    """Things that may change bits and are no longer as they were, by name: (recorded, now)."""
    unknown: bool
    """True if the run did not record its surroundings."""
    tokens: Sequence[TokenDifference]
    figures: Sequence[FigureDifference]
    states: Sequence[StateDifference]
    """Weights and optimizer state after ``step``; empty where the run has no checkpoint of it."""
    uncompared: str
    """Reason for which weights were not compared; empty where they were."""

    @property
    def same_bits(self) -> bool:
        """True if nothing that was compared differs."""
        numbers = (*self.tokens, *self.states)
        return not any(one.different for one in numbers) and all(f.same for f in self.figures)


def replay_step(folder: Path, step: int, overrides: Sequence[str] = ()) -> Replayed:
    """Make a recorded step again and compare it with the recording.

    The replay begins at the newest checkpoint before the step, or at the model as the run began,
    and makes all steps from there on. It reads no data and generates nothing: groups and rewards
    are the recorded ones. Its files go to ``RUN/replay/step-N``, or to ``run.output_dir`` where
    ``overrides`` name it; the weights it makes are removed at the end. Called on all ranks
    together.

    Args:
        folder: the run's ``run.output_dir``.
        step: number of the step, from 1.
        overrides: ``key.sub=value`` for the configuration, such as ``engine.backend=megatron``.

    Raises the errors of ``read_recorded_run``; ``ConfigError`` for overrides that would make it
    another run (data, model, seed) and for a folder of the result that holds other files.
    """
    recorded = read_recorded_run(folder, step, overrides)
    check_engine(recorded.config)
    starts = [start for start in read_starts(folder) if start.after < step]
    total = _total_steps(recorded.config, starts, folder)
    named = any(override.startswith("run.output_dir=") for override in overrides)
    default = folder / FOLDER / f"step-{step:06d}"
    output = Path(recorded.config.run.output_dir) if named else default
    config = _without_outputs(recorded, output)
    loopback.stay()
    launcher = Spmd(timeout_s=config.run.timeout_s)
    run = Run(config, kind="rl", total_steps=total, launcher=launcher, saves=False)
    together(run.comm, lambda: _clear(output, ours=not named) if run.is_main else None)
    with run:
        return _replay(run, recorded, starts[-1] if starts else None)


def _replay(run: Run, recorded: RecordedRun, start: Start | None) -> Replayed:
    check_critic(recorded.config, run.launcher, world_size())
    # An override may have brought an auto back.
    settled = run.settle()
    assert isinstance(settled, RLConfig)
    # The learner's configuration has the overlap of the run, which decides about old tokens.
    config = replace(recorded.config, engine=settled.engine, algorithm=settled.algorithm)
    algorithm = config.algorithm
    run.start(schedule_steps=run.total_steps * algorithm.mini_batches * algorithm.epochs)
    learner = Learner(run, config)
    state = run.resume(int(recorded.state.get("rows", 0)))
    learner.restore(state.get("learner", {}))
    learner.offload_idle_engines()

    logged = _figures_of(recorded.folder)
    tokens: list[TokenDifference] = []
    figures: list[FigureDifference] = []
    for one in recorded.steps:
        made = learner.learn(one.groups, [index for index in one.indices if index is not None])
        run.log.write(one.step, made)
        if one.groups:
            tokens += compare_tokens(one, learner.kept)
        figures += compare_figures(one.step, logged.get(one.step, {}), made)
    states, uncompared = _compare_weights(run, recorded)
    learner.close()

    surroundings: dict[str, tuple[str, str]] = {}
    if start is not None and run.is_main:
        surroundings = compare_surroundings(start, read_starts(run.folder)[-1])
    surroundings = together(run.comm, lambda: surroundings)[0]
    result = Replayed(
        folder=str(recorded.folder),
        step=recorded.steps[-1].step,
        checkpoint=None if recorded.checkpoint is None else recorded.checkpoint.name,
        steps=[one.step for one in recorded.steps],
        surroundings=surroundings,
        unknown=start is None,
        tokens=tokens,
        figures=figures,
        states=states,
        uncompared=uncompared,
    )
    together(run.comm, lambda: _write(run.folder, result) if run.is_main else None)
    return result


def _compare_weights(run: Run, recorded: RecordedRun) -> tuple[list[StateDifference], str]:
    """Return the differences of the engines' states after the last step.

    The second value says why nothing was compared.
    """
    step = recorded.steps[-1].step
    name = f"step-{step:06d}"
    saved = recorded.folder / CHECKPOINTS
    if not (saved / name).is_dir():
        return [], f"the run has no checkpoint of step {step}"
    made = run.folder / CHECKPOINTS
    engines = {"policy": ("", run.policy)}
    engines |= {key: (key, group) for key, group in run.companions.items()}
    found: list[StateDifference] = []
    try:
        for key, (place, group) in engines.items():
            group.save_checkpoint(made / place / name, extra={}).result()
            before = recorded.checkpoint
            if before is not None and place:
                before = run.checkpoints.companion(before, place)
            compared = compare_states(
                key, saved / place / name, made / place / name, before, run.comm
            )
            if compared is None:
                return [], f"a checkpoint of the {key} is in an engine's own format"
            found += compared
    finally:
        together(run.comm, lambda: shutil.rmtree(made, ignore_errors=True) if run.is_main else None)
    return found, ""


def _figures_of(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Return the logged figures of each step."""
    path = folder / METRICS
    rows = read_metrics(path) if path.is_file() else []
    return {int(row["step"]): row for row in rows}


def _total_steps(config: RLConfig, starts: Sequence[Start], folder: Path) -> int:
    """Return the number of steps of the run, which the learning rate depends on."""
    if config.run.steps is not None:
        return config.run.steps
    if starts:
        return starts[-1].steps
    raise ConfigError(
        "run.steps",
        "expected the number of steps of the run, got null",
        why=f"{folder} has no environment.json, which says how many steps run.epochs are",
        remedy="give run.steps=N and run.epochs=null",
    )


def _without_outputs(recorded: RecordedRun, output: Path) -> RLConfig:
    """Return the configuration with the replay's own folder and nothing to send, show or save."""
    config = recorded.config
    checkpoint = recorded.checkpoint
    return replace(
        config,
        launcher="none",
        overlap=OverlapSection(),
        run=replace(
            config.run,
            output_dir=str(output),
            resume="never" if checkpoint is None else str(checkpoint),
            rollouts="none",
            save_hf=False,
            push_to_hub=None,
            keep_best=None,
            patience=None,
            tensorboard=False,
            wandb=None,
            trackio=None,
            progress=False,
            report=False,
        ),
    )


def _clear(output: Path, *, ours: bool) -> None:
    """Remove the files of an earlier replay. Raises ``ConfigError`` for those of anything else."""
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not ours and not (output / RESULT).is_file():
        raise ConfigError(
            "run.output_dir",
            f"{output} holds files that are not of a replay",
            remedy="name a new folder",
        )
    shutil.rmtree(output)


def _write(folder: Path, result: Replayed) -> None:
    text = json.dumps(_finite(asdict(result)) | {"same_bits": result.same_bits}, indent=1)
    write_text(folder / RESULT, text + "\n")


def _finite(value: Any) -> Any:
    """Return a plain tree in which numbers that are not finite are texts, as JSON has none."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
