"""A step of an RL run as the run recorded it: configuration, checkpoint before it, and groups.

The files of ``run.rollouts`` have all that a step's update was computed from, except for the
weights. These are in the checkpoint of the step before, or follow from an earlier one and the steps
between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from engine_api.checkpoint import steps as checkpoints_of
from engine_api.errors import CheckpointMissing, ConfigError
from engine_trainer.config import RLConfig
from engine_trainer.config.loading import flatten, load_config
from engine_trainer.data import Prompt
from engine_trainer.errors import DataError
from engine_trainer.placement.automatic import fill_earlier
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rewards import Score
from engine_trainer.rl.credit import CompletionIndex
from engine_trainer.run.checkpoints import read_extra
from engine_trainer.run.configurations import config_file
from engine_trainer.telemetry.logs import METRICS, last_step
from engine_trainer.telemetry.rollouts import (
    EXPERTS,
    EXPERTS_KEY,
    FOLDER,
    LEARNED_KEY,
    RUN_KEY,
    files_of,
    path_of,
    read_rollouts,
)

if TYPE_CHECKING:
    import torch

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """The recorded completions of one step.

    Attributes:
        step: number of the step, from 1.
        file: the Parquet file.
        rows: rows of the file (``engine_trainer.telemetry.rollouts.SCHEMA``), in its order, with
            the experts ``[tokens, L, k]`` as a tensor, or None.
        groups: the groups that the step learned from, in the learner's order. Groups of which not
            all completions were kept have the kept ones.
        indices: for each row the place of its completion in ``groups``, as the learner counts; None
            for a completion that the step did not learn from.
        learned: number of completions that the step learned from, kept or not; None in a file of an
            earlier release.
        run: id of the run (``Run.id``); None in a file of an earlier release.
    """

    step: int
    file: Path
    rows: Sequence[Mapping[str, Any]]
    groups: Sequence[Group]
    indices: Sequence[CompletionIndex | None]
    learned: int | None
    run: str | None

    @property
    def kept(self) -> int:
        """Number of completions in ``groups``."""
        return sum(len(group.completions) for group in self.groups)

    def require_whole(self) -> None:
        """Raise ``DataError`` unless all completions were kept that the step learned from."""
        if self.learned == self.kept:
            return
        known = "an unknown number" if self.learned is None else str(self.learned)
        raise DataError(
            f"expected all completions that step {self.step} learned from, got {self.kept} of "
            f"{known}",
            file=str(self.file),
            why="an update is computed from all of them; run.rollouts keeps 64 by default"
            if self.learned is not None
            else "the file is of an earlier release, which did not note how many there were",
            remedy="record a run with run.rollouts: all",
        )

    def require_text(self) -> None:
        """Raise ``DataError`` if a prompt of the step had images, which are not recorded."""
        for row in self.rows:
            # Files of earlier releases have no such column.
            if row.get("images"):
                raise DataError(
                    f"expected prompts of text alone in step {self.step}, got one with the images "
                    f"{', '.join(row['images'])}",
                    file=str(self.file),
                    why="a recording names images and does not hold them",
                    remedy="name a step without images",
                )

    def require_experts(self) -> None:
        """Raise ``DataError`` unless the experts of the step's completions were kept."""
        given = [c.routed_experts is not None for group in self.groups for c in group.completions]
        if not given or any(given):
            return
        raise DataError(
            f"expected the experts that served the tokens of step {self.step}, got none",
            file=str(self.file),
            why="rollout.routed_experts of the run is replay, so that its update took the experts "
            "of the rollout; run.record_experts was false, or the run is of an earlier release",
            remedy="record a run with run.rollouts: all and run.record_experts: true, or replay "
            "with rollout.routed_experts=off: the engine's routers choose again, and the step "
            "differs wherever they choose other experts",
        )


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Recorded steps of one run, with the weights that they begin from.

    Attributes:
        folder: the run's ``run.output_dir``.
        config: the configuration of the last step of ``steps``, with overrides.
        checkpoint: the newest checkpoint before the step that was asked for; None for the model as
            the run began.
        state: the loop's state in the checkpoint (``Run.end_step``); ``{"step": 0}`` without one.
        steps: the steps after the checkpoint, up to the one that was asked for.
    """

    folder: Path
    config: RLConfig
    checkpoint: Path | None
    state: Mapping[str, Any]
    steps: Sequence[RecordedStep]


def read_recorded_run(folder: Path, step: int, overrides: Sequence[str] = ()) -> RecordedRun:
    """Return what is needed to make ``step`` of a run again.

    Args:
        folder: the run's ``run.output_dir``.
        step: number of the step, from 1.
        overrides: ``key.sub=value`` for the configuration of the step.

    Raises ``ConfigError`` for a folder without an RL run and for a step that the run never made or
    recorded; ``DataError`` for a file that is gone, damaged, incomplete, in a different schema, or
    of a different run; ``CheckpointMissing`` where neither a checkpoint nor the recorded steps
    before lead to the step.
    """
    last = read_step(folder, step)
    config = load_recorded_config(folder, step, overrides)
    checkpoint = find_checkpoint_before(folder, step)
    state: Mapping[str, Any] = {"step": 0}
    if checkpoint is not None:
        extra = read_extra(checkpoint)
        state = extra["loop"]
        check_same_run(last, extra.get("run"), checkpoint)
    between = [_read_before(folder, step, k) for k in range(int(state["step"]) + 1, step)]
    found = [*between, last]
    for one in found:
        one.require_text()
        one.require_whole()
        if config.rollout.routed_experts == "replay":
            one.require_experts()
        check_same_run(one, last.run, last.file)
    return RecordedRun(
        folder=folder, config=config, checkpoint=checkpoint, state=state, steps=found
    )


def read_step(folder: Path, step: int) -> RecordedStep:
    """Return the recorded completions of one step of the run in ``folder``.

    Raises ``ConfigError`` for a step that the run never made or recorded, and ``DataError`` for a
    file that is gone, damaged or in a different schema.
    """
    path = path_of(folder / FOLDER, step)
    if not path.is_file():
        raise _missing(folder, step, path)
    table = read_rollouts(path)
    rows = table.to_pylist(maps_as_pydicts="strict")
    metadata: Mapping[bytes, bytes] = table.schema.metadata
    experts = _experts(path, metadata)
    numbers = sorted({row["group"] for row in rows if row["learned"]})
    places = {number: place for place, number in enumerate(numbers)}
    completions: list[list[ScoredCompletion]] = [[] for _ in numbers]
    prompts: list[Prompt | None] = [None for _ in numbers]
    indices: list[CompletionIndex | None] = []
    for at, row in enumerate(rows):
        row[EXPERTS] = experts[at] if experts else None
        if not row["learned"]:
            indices.append(None)
            continue
        place = places[row["group"]]
        indices.append((place, len(completions[place])))
        completions[place].append(_completion(row))
        prompts[place] = prompts[place] or _prompt(row)
    groups = [
        Group(prompt=prompt, completions=own)
        for prompt, own in zip(prompts, completions, strict=True)
        if prompt is not None
    ]
    return RecordedStep(
        step=step,
        file=path,
        rows=rows,
        groups=groups,
        indices=indices,
        learned=int(metadata[LEARNED_KEY]) if LEARNED_KEY in metadata else None,
        run=metadata[RUN_KEY].decode() if RUN_KEY in metadata else None,
    )


def load_recorded_config(folder: Path, step: int, overrides: Sequence[str] = ()) -> RLConfig:
    """Return the configuration that a step of the run in ``folder`` was made with.

    Raises ``ConfigError`` for a folder without a run, or with one of another task.
    """
    file = config_file(folder, step)
    config = load_config(RLConfig, file, overrides)
    given = flatten(OmegaConf.to_container(OmegaConf.load(file)))
    earlier = [f"{k}={v}" for k, v in fill_earlier(given).items() if k not in given]
    return load_config(RLConfig, file, [*earlier, *overrides]) if earlier else config


def find_checkpoint_before(folder: Path, step: int) -> Path | None:
    """Return the newest checkpoint of the run before ``step``, None where there is none."""
    found = {k: path for k, path in checkpoints_of(folder / CHECKPOINTS).items() if 0 < k < step}
    return found[max(found)] if found else None


def check_same_run(recorded: RecordedStep, run: str | None, where: Path) -> None:
    """Raise ``DataError`` where a recording and the file ``where`` are of different runs.

    Files of earlier releases have no id, and are not compared.
    """
    if recorded.run is None or run is None or recorded.run == run:
        return
    raise DataError(
        f"expected a recording of run {run:.8}, got one of run {recorded.run:.8}",
        file=str(recorded.file),
        why=f"{where} is of another run",
        remedy="restore the run's own files, whose checkpoints and rollouts have the same id",
    )


def _read_before(folder: Path, step: int, before: int) -> RecordedStep:
    """Return a step between the checkpoint and ``step``. Raises ``CheckpointMissing``."""
    if path_of(folder / FOLDER, before).is_file():
        return read_step(folder, before)
    found = find_checkpoint_before(folder, step)
    begins = "no checkpoint" if found is None else f"{found.name}, the newest checkpoint before"
    raise CheckpointMissing(
        f"nothing has the weights that step {step} began with",
        where=str(folder / CHECKPOINTS),
        why=f"there is {begins}, and no recording of step {before} to make it from",
        remedy="name an earlier step, or record a run with run.keep: 0 and run.save_every: 1",
    )


def _missing(folder: Path, step: int, path: Path) -> ConfigError | DataError:
    """Return the error for a step without a recording."""
    config = load_recorded_config(folder, max(step, 1))
    last = last_step(folder / METRICS)
    if not 1 <= step <= last:
        return ConfigError(
            "--step",
            f"expected one of the run's {last} steps, got {step}",
            why=f"{folder / METRICS} has no such step",
            remedy=f"give a number from 1 to {last}" if last else "name a run that has made steps",
        )
    if config.run.rollouts == "none":
        return ConfigError(
            "--step",
            f"step {step} was never recorded",
            why="run.rollouts of the run is none",
            remedy="record a run with run.rollouts: all",
        )
    others = [file.name for file in files_of(folder / FOLDER)]
    return DataError(
        f"the recording of step {step} is gone",
        file=str(path),
        why=f"the folder has {len(others)} other steps" if others else "the folder has no step",
        remedy="restore the file; a run itself removes one only where it makes the step again",
    )


def _prompt(row: Mapping[str, Any]) -> Prompt:
    file, _, number = row["problem"].rpartition(":")
    return Prompt(
        tokens=row["prompt_tokens"],
        rendered=row["prompt"],
        text=row["question"],
        answer=row["answer"],
        file=file,
        number=int(number),
        # A column that files of earlier releases do not have.
        teacher_tokens=row.get("teacher_prompt_tokens"),
    )


def _experts(path: Path, metadata: Mapping[bytes, bytes]) -> list[torch.Tensor | None]:
    """Return the experts ``[tokens, L, k]`` of each row, empty where the file has none."""
    if EXPERTS_KEY not in metadata:
        return []
    import torch

    layers, each, dtype = metadata[EXPERTS_KEY].decode().split()
    found: list[torch.Tensor | None] = []
    for cell in read_rollouts(path, [EXPERTS])[EXPERTS]:
        # Millions of numbers: no list of Python's integers is made of them.
        flat = None if cell.values is None else cell.values.to_numpy(zero_copy_only=False)
        found.append(
            None
            if flat is None
            else torch.from_numpy(flat.copy())
            .to(getattr(torch, dtype))
            .reshape(-1, int(layers), int(each))
        )
    return found


def _completion(row: Mapping[str, Any]) -> ScoredCompletion:
    """Return a completion, whose numbers are those that the learner had."""
    weights = None
    if row["tool_calls"]:
        weights = [1.0] * len(row["tokens"])
        for call in row["tool_calls"]:
            weights[call["start"] : call["end"]] = [0.0] * (call["end"] - call["start"])
    return ScoredCompletion(
        tokens=row["tokens"],
        log_probs=row["rollout_log_probs"],
        text=row["text"],
        finished=row["finish_reason"] == "stop",
        score=Score(
            total=row["reward"],
            parts=row["reward_parts"],
            correct=row["correct"],
            answer=row["found_answer"],
        ),
        weight_versions=row["weight_versions"],
        loss_weights=weights,
        problem=row["error"],
        routed_experts=row[EXPERTS],
        finish_reason=row["finish_reason"],
    )
