"""The checkpoints of a run: saving, choosing the one to continue from, and removing old ones."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine_api.checkpoint import LATEST, locate, repair
from engine_api.comm import Comm, together
from engine_api.errors import CheckpointMismatch, CheckpointMissing, ConfigError
from engine_api.folders import remove, write_text
from engine_api.manifest import MANIFEST, read_manifest
from engine_api.results import CheckpointHandle
from engine_trainer.config.loading import flatten, to_plain
from engine_trainer.config.secrets import ReferenceText
from engine_trainer.placement.groups import EngineGroup

# The file in the folder of checkpoints with the name of the best one.
BEST = "best"
_STEP = re.compile(r"step-(\d{6,})$")
# Settings that a resumed run may not change. Every other setting may change, and a change is
# named unless the key begins with one of FREE.
FIXED = (
    "kind",
    "run.seed",
    "batch_size",
    "engine.model",
    "engine.model_type",
    "engine.lora",
    "data",
    "algorithm.critic.model",
    "algorithm.critic.lora",
)
# What the processor makes of them is compared where it is loaded (``ImageProcessor.require``).
ELSEWHERE = ("data.processor_kwargs",)
FREE = ("run.", "engine.memory", "engine.parallelism", "engine.checkpoint", "engine.device", "eval")


class Checkpoints:
    """The folder ``output_dir/checkpoints`` with ``step-000120`` folders and ``latest``.

    It keeps the newest ``keep`` checkpoints; 0 keeps all. In addition it keeps the one of the step
    ``best``, which the file ``best`` names. Engines other than the policy have
    checkpoints in folders of their names, such as ``critic/step-000120``. These are complete
    before the policy's checkpoint begins, so that a step is complete when the policy's folder is.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.saved: int | None = None  # newest step that was saved or loaded
        self._handle: CheckpointHandle | None = None
        self.best: int | None = None
        self._since = time.monotonic()  # when the newest save began, or the run

    def start_clock(self) -> None:
        """Begin to measure the time to the next save."""
        self._since = time.monotonic()

    def is_older_than(self, minutes: float) -> bool:
        """Return whether the newest save began ``minutes`` ago or earlier.

        False for 0 minutes.
        """
        return 0 < 60 * minutes <= time.monotonic() - self._since

    def steps(self) -> dict[int, Path]:
        """Return the complete checkpoints by step, oldest first."""
        found = {
            int(m[1]): path for path in self.folder.glob("step-*") if (m := _STEP.search(path.name))
        }
        return {step: found[step] for step in sorted(found) if (found[step] / MANIFEST).is_file()}

    def find(self, resume: str) -> Path | None:
        """Return the checkpoint to continue from, or None to start from the beginning.

        Raises ``ConfigError`` when that would mix two runs.
        """
        own = self.steps()
        if resume == "auto":
            # A kill between the rename and the replacement of `latest` leaves a complete folder
            # that is newer than `latest`.
            return max(own.items())[1] if own else None
        if resume == "never":
            if own:
                raise ConfigError(
                    "run.resume",
                    "run.output_dir already holds a run",
                    why=f"{max(own.items())[1]} is there",
                    remedy="use run.resume=auto to continue it, or another run.output_dir",
                )
            return None
        return self._find_named(Path(resume), own)

    def save(
        self,
        policy: EngineGroup,
        comm: Comm,
        step: int,
        extra: Mapping[str, Any],
        companions: Mapping[str, EngineGroup],
    ) -> None:
        """Save a checkpoint after ``step``, unless it was saved already.

        Raises the errors of this save and of the previous one.
        """
        if step == self.saved:
            return
        self.wait(comm)
        self.start_clock()
        together(
            comm, lambda: self.folder.mkdir(parents=True, exist_ok=True) if comm.rank == 0 else None
        )
        name = f"step-{step:06d}"
        for key, group in companions.items():
            group.save_checkpoint(self.folder / key / name, extra={}).result()
        self._handle = policy.save_checkpoint(self.folder / name, extra=extra)
        self.saved = step
        # A save in the background may be complete on some ranks only.
        if all(comm.all_gather(self._handle.done())):
            self.wait(comm)

    def wait(self, comm: Comm) -> None:
        """Wait for a save that still runs, then remove checkpoints that are no longer kept."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.result()
            together(comm, lambda: self.prune() if comm.rank == 0 else None)

    @staticmethod
    def companion(path: Path, name: str) -> Path:
        """Return the checkpoint of the engine ``name`` that belongs to the policy's checkpoint.

        Raises ``CheckpointMissing`` if there is none.
        """
        path = locate(path)
        if not (path.parent / name / path.name / MANIFEST).is_file():
            raise CheckpointMissing(
                f"the checkpoint has no {name}",
                where=str(path),
                why="it was saved by a run without one",
                remedy="start a new run in another run.output_dir; engine.model.path may be an "
                "export of this one",
            )
        return path.parent / name / path.name

    def clean(self) -> None:
        """Finish a save or removal that was killed.

        Incomplete checkpoints are removed, ``latest`` names the newest complete one, and
        checkpoints that are no longer kept are removed.
        """
        whole = {path.name for path in self.steps().values()}
        halves = [path for path in self.folder.glob("*/step-*") if path.name not in whole]
        (self.folder / f"{LATEST}.partial").unlink(missing_ok=True)
        (self.folder / f"{BEST}.partial").unlink(missing_ok=True)
        for path in [*self.folder.glob("step-*.partial"), *halves]:
            shutil.rmtree(path)
        for folder in {self.folder, *(path.parent for path in self.folder.glob("*/step-*"))}:
            repair(folder)
        self.prune()

    def prune(self) -> None:
        """Write ``best``, and remove checkpoints that are no longer kept."""
        steps = list(self.steps().items())
        if self.best in dict(steps):
            write_text(self.folder / BEST, dict(steps)[self.best].name)
        old = steps[: -self.keep] if self.keep else []
        for path in (path for step, path in old if step != self.best):
            # The policy's folder goes first: the rest of a killed removal is then no checkpoint.
            for part in (path, *self.folder.glob(f"*/{path.name}")):
                remove(part)
        assert not steps or (self.folder / LATEST).is_file()

    def _find_named(self, path: Path, own: Mapping[int, Path]) -> Path:
        if not path.is_dir():
            raise ConfigError(
                "run.resume",
                f"expected auto, never or a checkpoint folder, got {str(path)!r}",
                remedy="correct the path",
            )
        path = locate(path)
        step = read_manifest(path).step
        later = [p.name for s, p in own.items() if s > step]
        if later:
            raise ConfigError(
                "run.resume",
                f"run.output_dir holds later checkpoints than step {step}",
                why=f"the run would write {', '.join(later)} again",
                remedy="use another run.output_dir, or remove them",
            )
        return path


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that ``path`` names.

    Args:
        path: a checkpoint, a folder of checkpoints or a run's folder, whose latest checkpoint is
            meant, or the file ``checkpoints/best``.

    Raises ``CheckpointMissing`` if there is none.
    """
    if path.name == BEST and path.is_file():
        path = path.parent / Path(path.read_text(encoding="utf-8").strip()).name
    elif (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    found = locate(path)
    if not (found / MANIFEST).is_file():
        raise CheckpointMissing(
            "there is no checkpoint",
            where=str(path),
            remedy="name a run's folder, or one of its checkpoints/step-…",
        )
    return found


def read_extra(path: Path) -> Mapping[str, Any]:
    """Return the extra state that ``Run`` saved with a checkpoint.

    Raises ``CheckpointMismatch`` when no run saved the checkpoint.
    """
    extra = read_manifest(path).extra
    if "loop" not in extra or "config" not in extra:
        raise CheckpointMismatch(
            "the checkpoint was not saved by engine-train",
            where=str(path),
            why="it has no state of the training loop",
            remedy="export it with save_hf, and name that as engine.model.path",
        )
    return extra


def fingerprint(config: Any) -> dict[str, Any]:
    """Return the values of a configuration that a checkpoint keeps, by dotted key, without secrets.

    For a value that must not change and that comes from elsewhere (``${oc.env:DATA}``), the
    checkpoint keeps the reference and eight digits of the value's SHA-256. They are enough to
    see a change, and too few to find the value.
    """
    found = flatten(to_plain(config))
    for key, value in flatten(asdict(config)).items():
        values = value if isinstance(value, list | tuple) else [value]
        if _below(key, FIXED) and any(isinstance(one, ReferenceText) for one in values):
            digest = sha256(json.dumps([str(one) for one in values]).encode()).hexdigest()
            found[key] = f"{found[key]} (SHA-256 {digest[:8]}…)"
    return found


def list_defaults(config: Any) -> dict[str, Any]:
    """Return the defaults of a configuration's sections by dotted key, of those that it has."""
    found: dict[str, Any] = {}
    for one in fields(config):
        value = getattr(config, one.name)
        # A section that is none by default may be newer itself.
        if is_dataclass(value) and one.default is not None:
            found |= {f"{one.name}.{key}": v for key, v in list_defaults(value).items()}
        elif one.default_factory is not MISSING:
            found |= flatten(one.default_factory(), one.name)
        elif one.default is not MISSING:
            found[one.name] = one.default
    return found


def compare(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    where: str,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Return one line for each setting that changed since the checkpoint and may change.

    Args:
        then: the checkpoint's values by dotted key.
        now: the run's values.
        where: the checkpoint.
        defaults: values of keys that the checkpoint does not have, because they are newer than
            it. A key below one that it has (``engine.lora``, which was null) is not newer.

    Raises:
        ConfigError: it names the first changed key that may not change (model, data, batch size).
    """
    newer = {key: v for key, v in defaults.items() if not _is_known(key, then)}
    then = newer | dict(then)
    changed = [
        key
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key) and not _below(key, ELSEWHERE)
    ]
    if then.get("kind") != now.get("kind"):
        raise ConfigError(
            "run.output_dir",
            f"expected a run of {now.get('kind')}, got one of {then.get('kind')}",
            why=f"run.resume would continue from {where}",
            remedy="name another run.output_dir; engine.model.path=FOLDER/hf starts from the model "
            "of the other run",
        )
    fixed = [key for key in changed if _below(key, FIXED)]
    if fixed:
        key = fixed[0]
        got = _as_yaml(now.get(key))
        also = fixed[1:]
        if section := _empty_above(key, then):
            own = [name for name in fixed if _below(name, (section,)) and name in now]
            key, got = section, ", ".join(f"{name}: {_as_yaml(now[name])}" for name in own)
            also = [name for name in fixed if not _below(name, (section,))]
        raise ConfigError(
            key,
            f"expected {_as_yaml(then.get(key))} as in the checkpoint, got {got}",
            why=f"run.resume would continue from {where}"
            + (f"; also: {', '.join(also)}" if also else ""),
            remedy="restore the value, or start a new run in another run.output_dir",
        )
    # A new length of the run is named because the learning-rate schedule ends with the run.
    named = [
        key for key in changed if key in ("run.steps", "run.epochs") or not key.startswith(FREE)
    ]
    return [f"{key}: {then.get(key)!r} -> {now.get(key)!r}" for key in named]


def _as_yaml(value: Any) -> str:
    """Return a value as it is shown beside a key of the configuration."""
    return "null" if value is None else repr(value)


def _empty_above(key: str, values: Mapping[str, Any]) -> str:
    """Return the section above a key that is null in ``values``, or nothing."""
    above = _list_prefixes(key)[:-1]
    return next((name for name in above if name in values and values[name] is None), "")


def _is_known(key: str, then: Mapping[str, Any]) -> bool:
    """Return True if ``then`` has a key, or one above it as a value of its own."""
    return any(name in then for name in _list_prefixes(key))


def _list_prefixes(key: str) -> list[str]:
    """Return the sections above a dotted key, outermost first, and the key itself."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _below(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == s or key.startswith(f"{s}.") for s in sections)
