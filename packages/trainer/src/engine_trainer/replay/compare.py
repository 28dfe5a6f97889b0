"""Comparison of a step that was made again with what the run recorded of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_api.checkpoint import read
from engine_api.comm import Comm, SingleComm, together
from engine_api.manifest import PORTABLE, Entry, field_of, read_manifest
from engine_api.weights import ShardSpec
from engine_trainer.rl.kept_tokens import LEARNED, KeptTokens
from engine_trainer.rl.recorded import RecordedStep
from engine_trainer.telemetry.environment import Start

NUMBERS = ("loss_mask", *LEARNED)
"""Columns of a recorded step that the learner computes, one number for each token."""


@dataclass(frozen=True, kw_only=True)
class TokenDifference:
    """The difference of one number over the tokens of a step."""

    step: int
    name: str
    tokens: int
    """Number of tokens that have the number in the recording or now."""
    different: int
    """Number of tokens with different bits."""
    largest: float
    """Largest absolute difference; infinite where only one of the two has a number."""
    where: str
    """Completion and token of the largest difference; empty without one."""


@dataclass(frozen=True, kw_only=True)
class FigureDifference:
    """A figure of ``metrics.jsonl`` then and now. None is a value that was not finite."""

    step: int
    name: str
    recorded: float | None
    now: float | None

    @property
    def same(self) -> bool:
        """True if both are the same number."""
        return self.recorded == self.now

    @property
    def difference(self) -> float:
        """The absolute difference; infinite where only one of them is finite."""
        if self.recorded is None or self.now is None:
            return 0.0 if self.same else math.inf
        return abs(self.recorded - self.now)


@dataclass(frozen=True, kw_only=True)
class StateDifference:
    """The difference of one kind of tensors between two checkpoints of the step."""

    engine: str
    """``policy`` or the name of another engine that learns."""
    kind: str
    """``weights``, or a field of the optimizer's state such as ``exp_avg``."""
    numbers: int
    different: int
    """Number of elements with different bits; all of a tensor that only one checkpoint has."""
    largest: float
    """Largest absolute difference; infinite where a tensor is in one checkpoint only."""
    change: float
    """Norm of the difference over the norm of the change since the checkpoint before; NaN without
    such a checkpoint, or without a change."""
    where: str
    """Key of the tensor with the largest difference; empty without one."""


def compare_tokens(recorded: RecordedStep, kept: KeptTokens) -> list[TokenDifference]:
    """Compare the numbers of the recorded tokens with those that the learner has used now.

    The comparison is of bits: the recording has float32, as the learner does.
    """
    found: list[TokenDifference] = []
    for name in NUMBERS:
        tokens = different = 0
        largest, where = 0.0, ""
        for row, index in zip(recorded.rows, recorded.indices, strict=True):
            if index is None or not row["tokens"]:
                continue
            # Files of earlier releases lack columns that came later.
            then = _floats(row.get(name), len(row["tokens"]))
            now = kept.numbers(index)[name].float()
            counted = ~(then.isnan() & now.isnan())
            off = (then.view(torch.int32) != now.view(torch.int32)) & counted
            tokens += int(counted.sum())
            different += int(off.sum())
            gap = (then - now).abs().nan_to_num(math.inf).where(off, torch.zeros(()))
            if float(gap.max()) > largest:
                place = int(gap.argmax())
                largest = float(gap.max())
                text = row["token_texts"][place]
                where = f"{row['problem']}, sample {row['sample']}, token {place} {text!r}"
        if tokens:
            found.append(
                TokenDifference(
                    step=recorded.step,
                    name=name,
                    tokens=tokens,
                    different=different,
                    largest=largest,
                    where=where,
                )
            )
    return found


def compare_figures(
    step: int, recorded: Mapping[str, Any], now: Mapping[str, float]
) -> list[FigureDifference]:
    """Compare the figures that both have, by name."""
    return [
        FigureDifference(
            step=step,
            name=name,
            recorded=recorded[name],
            now=value if math.isfinite(value) else None,
        )
        for name, value in sorted(now.items())
        if name in recorded
    ]


def compare_states(
    engine: str, then: Path, now: Path, before: Path | None, comm: Comm
) -> list[StateDifference] | None:
    """Compare two checkpoints of the same step, tensor by tensor, on all ranks together.

    Each rank holds its part of all tensors of the checkpoints in memory.

    Args:
        engine: name of the engine in the result.
        then: the checkpoint that the run saved.
        now: the one of the replay.
        before: a checkpoint before the step, if there is one.
        comm: the communicator of all ranks.

    Returns None where one of the two is in an engine's own format, which only that engine reads.
    Raises ``CheckpointError``.
    """
    manifests = [read_manifest(path) for path in (then, now)]
    if any(m.state != PORTABLE for m in manifests):
        return None
    keys = sorted({*manifests[0].tensors, *manifests[1].tensors})
    mine = keys[comm.rank :: comm.world_size]
    rows = together(comm, lambda: _compare_keys(mine, then, now, before))
    return _merge(engine, [row for part in rows for row in part])


_Row = tuple[str, str, int, int, float, float, float]
"""Kind, key, elements, different ones, largest difference, squares of difference and change."""


def _compare_keys(keys: Sequence[str], then: Path, now: Path, before: Path | None) -> list[_Row]:
    recorded = _read(then, keys)
    again = _read(now, keys)
    earlier = {} if before is None else _read(before, keys)
    rows: list[_Row] = []
    for key in keys:
        kept = field_of(key)
        kind = "weights" if kept is None else kept[1]
        a, b = recorded.get(key), again.get(key)
        if a is None or b is None or a.shape != b.shape:
            one = a if a is not None else b
            assert one is not None
            rows.append((kind, key, one.numel(), one.numel(), math.inf, math.inf, math.nan))
            continue
        off = _bits(a) != _bits(b) if a.dtype == b.dtype else a.double() != b.double()
        gap = (a.double() - b.double()).abs()
        start = earlier.get(key)
        moved = math.nan if start is None else float((a.double() - start.double()).square().sum())
        largest = float(gap.max()) if gap.numel() else 0.0
        rows.append(
            (kind, key, a.numel(), int(off.sum()), largest, float(gap.square().sum()), moved)
        )
    return rows


def _merge(engine: str, rows: Sequence[_Row]) -> list[StateDifference]:
    found: list[StateDifference] = []
    kinds = sorted({row[0] for row in rows}, key=lambda kind: (kind != "weights", kind))
    for kind in kinds:
        own = [row for row in rows if row[0] == kind]
        worst = max(own, key=lambda row: row[4])
        moved = math.fsum(row[6] for row in own)
        found.append(
            StateDifference(
                engine=engine,
                kind=kind,
                numbers=sum(row[2] for row in own),
                different=sum(row[3] for row in own),
                largest=worst[4],
                change=math.sqrt(math.fsum(row[5] for row in own) / moved)
                if moved > 0
                else math.nan,
                where=worst[1] if worst[4] else "",
            )
        )
    return found


def _read(folder: Path, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return whole tensors of a checkpoint, as far as it has them."""

    def boxes(entries: Mapping[str, Entry]) -> dict[str, tuple[ShardSpec, torch.dtype]]:
        # The reader wants a box for each key. That of a tensor which is not read is empty.
        return {
            key: (_box(entry.shape, whole=key in wanted), getattr(torch, entry.dtype))
            for key, entry in entries.items()
        }

    wanted = set(keys)
    found = read(folder, read_manifest(folder), comm=SingleComm(), layout=boxes)
    return {key: tensor for key, tensor in found.items() if key in wanted}


def _box(shape: tuple[int, ...], *, whole: bool) -> ShardSpec:
    zeros = (0,) * len(shape)
    return ShardSpec(global_shape=shape, offset=zeros, shape=shape if whole else zeros)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


def _floats(values: Sequence[float | bool | None] | None, length: int) -> torch.Tensor:
    """Return recorded numbers as ``[length]`` float32, with NaN where there are none."""
    if values is None:
        return torch.full((length,), math.nan)
    return torch.tensor(
        [math.nan if value is None else float(value) for value in values], dtype=torch.float32
    )


def compare_surroundings(then: Start, now: Start) -> dict[str, tuple[str, str]]:
    """Return what differs between two starts and may change bits: name → (then, now)."""
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(then, name), getattr(now, name))
        for name in ("backend", "device", "ranks", "hardware")
    }
    names = sorted({*then.versions, *now.versions})
    pairs |= {name: (then.versions.get(name), now.versions.get(name)) for name in names}
    sides = {**then.resolved}, {**now.resolved}
    for name in sorted({*sides[0], *sides[1]}):
        pairs[name] = (sides[0].get(name), sides[1].get(name))
    return {name: (_text(a), _text(b)) for name, (a, b) in pairs.items() if _text(a) != _text(b)}


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
