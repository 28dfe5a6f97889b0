"""The stages of ``engine-train rehearse`` and their report on standard output."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from engine_api.errors import ConfigError, EngineError
from engine_trainer.config import Config, RLConfig
from engine_trainer.placement.memory import count_parameters
from engine_trainer.rehearsal import parts
from engine_trainer.rehearsal.checks import check_data, check_engine, check_folder
from engine_trainer.rehearsal.estimate import checkpoint_bytes, describe_real_run
from engine_trainer.rehearsal.plan import Plan, make_plan
from engine_trainer.rehearsal.shrink import require_model, write_small_model
from engine_trainer.utils.cores import count_cores
from engine_trainer.utils.terminal import escape

RANKS = 2
NODE = 8
T = TypeVar("T")
# Figures of the last step that are shown, where the task has them.
_SHOWN = (
    "train/loss",
    "train/grad_norm",
    "train/reward",
    "rollout/response_length",
    "reward/failures",
    "reward/timeouts",
    "eval/loss",
    "eval/accuracy",
)


@dataclass(kw_only=True)
class Report:
    """The stages that are done, printed as they end."""

    failures: list[EngineError] = field(default_factory=list[EngineError])

    def run(self, name: str, stage: Callable[[], tuple[T, str]]) -> T | None:
        """Run a stage, print its line, and return its result; None where it failed."""
        started = time.monotonic()
        try:
            found, line = stage()
        except EngineError as error:
            self.failures.append(error)
            _print("FAILED", name, str(error).replace("\n", "\n" + " " * 9), started)
            return None
        _print("ok", name, line, started)
        return found


def rehearse(
    config: Config,
    task: str,
    path: Path,
    overrides: list[str],
    *,
    ranks: int | None = None,
    gpus: int | None = None,
    folder: Path | None = None,
    model: Path | None = None,
) -> bool:
    """Rehearse the run of a configuration on this machine, and print a report.

    A stage that fails does not keep later ones from running, where they do not need it.

    Args:
        config: the configuration.
        task: its task, ``sft``, ``rl``, ``dpo``, ``kto`` or ``rm``.
        path: its file.
        overrides: the overrides of its values.
        ranks: number of gloo ranks; None takes two, or one on a machine with one core.
        gpus: number of GPUs of the real run; None is what the configuration says, else one node.
        folder: new folder for the rehearsal's files, which are kept; None takes a temporary one.
        model: folder of a small model to train; None makes one of the configuration's family.

    Returns whether nothing was found. Raises ``ConfigError`` for a wrong argument.
    """
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "WORLD_SIZE",
            "expected one process, but torchrun has started this one",
            remedy="run engine-train rehearse alone: it starts its ranks itself",
        )
    if ranks is not None and ranks < 1:
        raise ConfigError("--ranks", f"expected 1 or more, got {ranks}", remedy="give 2")
    if gpus is not None and gpus < 1:
        raise ConfigError("--gpus", f"expected 1 or more, got {gpus}", remedy="give 8")
    count = ranks or min(RANKS, count_cores())
    with _scratch(folder) as (place, keep):
        print(f"rehearsal of {escape(str(path))} ({task}) in {place}\n", flush=True)
        report = Report()
        _rehearse(report, config, task, path, overrides, place, count, gpus, model)
        if report.failures:
            keep()
            print(f"\n{len(report.failures)} of the stages failed; the files are in {place}")
    return not report.failures


def _rehearse(
    report: Report,
    config: Config,
    task: str,
    path: Path,
    overrides: list[str],
    folder: Path,
    ranks: int,
    gpus: int | None,
    given: Path | None,
) -> None:
    real = gpus or _gpus_of(config)
    report.run("engine", lambda: (True, check_engine(config, gpus)))
    model = report.run("model", lambda: _shrink(config, folder, given))
    output = Path(config.run.output_dir)
    size = 0 if model is None else checkpoint_bytes(config)
    report.run("output folder", lambda: (True, check_folder(output, size, config.run.keep)))
    preview = report.run("data", lambda: check_data(config, task, folder))
    if model is None or preview is None:
        print("\nnot exercised: training, because the model or the data cannot be read")
        return
    plan = report.run("plan", lambda: _plan(config, task, path, overrides, folder, ranks))
    if plan is None:
        return
    _train(report, plan, folder)
    print("\nsmaller here   " + "\n               ".join([*plan.changes, model]))
    left_out = [*plan.missing, *_never_exercised(config)]
    print("not exercised  " + "\n               ".join(left_out))
    print(f"\nthe real run on {real} H200, calculated (docs/scaling.md):")
    for line in describe_real_run(config, preview, real):
        print(f"  {line}")


def _train(report: Report, plan: Plan, folder: Path) -> None:
    first = report.run("first step", lambda: (True, parts.train_until_killed(plan, folder)))
    if first is None:
        return
    figures = report.run("resume", lambda: _swap(parts.resume(plan, folder)))
    if figures is None:
        return
    shown = {name: figures[name] for name in _SHOWN if name in figures}
    print(" " * 8 + ", ".join(f"{name} {value:.3g}" for name, value in shown.items()), flush=True)
    report.run("switch", lambda: (True, _switch(plan, folder)))


def _switch(plan: Plan, folder: Path) -> str:
    try:
        return parts.switch(plan, folder)
    except parts.PartFailed as error:
        # An engine that the configuration does not name may refuse what it asks for.
        if plan.other == plan.backend:
            raise
        plan.missing.append(f"a switch to {plan.other}, which refused it")
        return f"{plan.other} refused it, which the run does not need: {error.where}"


def _swap(found: tuple[str, dict[str, float]]) -> tuple[dict[str, float], str]:
    line, figures = found
    return figures, line


def _plan(
    config: Config, task: str, path: Path, overrides: list[str], folder: Path, ranks: int
) -> tuple[Plan, str]:
    plan = make_plan(config, task, path, overrides, folder, ranks)
    plan.write(folder / parts.FILE)
    arguments = " ".join(parts.command_of(plan, folder / parts.FILE, plan.ranks))
    return plan, f"engine-train {arguments}"


def _shrink(config: Config, folder: Path, given: Path | None) -> tuple[str, str]:
    source = config.engine.model
    if given is not None:
        require_model(given)
        (folder / "model").symlink_to(given.absolute())
        return f"the model: {given}", f"{given} takes the place of {source.path}"
    changed = write_small_model(source, folder / "model")
    sizes = ", ".join(
        f"{key} {large} -> {small}"
        for key, (large, small) in changed.items()
        if isinstance(large, int)
    )
    parameters = count_parameters(source)
    line = f"{parameters / 1e9:.3g} B parameters; a small one of the same modules is made"
    return f"the model: {sizes}", line


def _gpus_of(config: Config) -> int:
    """Return the number of GPUs that a configuration asks for, else one node."""
    if isinstance(config, RLConfig) and config.launcher == "ray":
        return config.ray.engines
    sizes = config.engine.parallelism
    product = sizes.tp * sizes.pp * sizes.cp * sizes.ulysses * sizes.dp_replicate
    return product * sizes.dp_shard if sizes.dp_shard > 0 else max(NODE, product)


def _never_exercised(config: Config) -> Iterator[str]:
    yield "the large model's weights, memory and speed; NCCL and other devices than the CPU"
    if config.run.steps is None or config.run.steps > parts.STEPS:
        yield "whether the model learns"


@contextmanager
def _scratch(folder: Path | None) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield the rehearsal's folder, and a function that keeps a temporary one."""
    if folder is not None and folder.exists():
        raise ConfigError(
            "--folder", f"{folder} exists already", remedy="name a folder that does not exist"
        )
    kept = folder is not None
    try:
        if folder is not None:
            folder.mkdir(parents=True)
        place = Path(tempfile.mkdtemp(prefix="rehearsal-")) if folder is None else folder
    except OSError as error:
        raise ConfigError(
            "--folder", "the folder cannot be made", why=str(error), remedy="name another"
        ) from error

    def keep() -> None:
        nonlocal kept
        kept = True

    try:
        yield place.absolute(), keep
    finally:
        if not kept:
            shutil.rmtree(place)


def _print(status: str, name: str, line: str, started: float) -> None:
    seconds = time.monotonic() - started
    print(f"{status:<7} {name:<14} {escape(line)} ({seconds:.0f} s)", flush=True)
