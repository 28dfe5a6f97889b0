"""The content of a run's page, read from its rollouts and its evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from engine_trainer.errors import DataError
from engine_trainer.telemetry.pages.evaluations import FOLDER as EVALUATIONS
from engine_trainer.telemetry.pages.evaluations import Problem, evaluation_files, read_problems
from engine_trainer.telemetry.rollouts import FOLDER, files_of, read_rollouts
from engine_trainer.telemetry.samples import spread

MOST_ROWS = 10_000
"""Largest number of completions on a page."""
MOST_TOKENS = 4_000_000
"""Largest number of their tokens, which make a page of about 200 MB."""
_DIGITS = 4
_PER_TOKEN = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "entropy", "advantages")


@dataclass(frozen=True, kw_only=True)
class Overview:
    """Step, reward and number of tokens of all completions of a run, in arrays of one length."""

    steps: NDArray[np.int64]
    rewards: NDArray[np.float64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a page."""

    overview: Overview
    chosen: dict[Path, list[int]]
    """The groups that the page has, by file."""
    rows: int
    """Number of completions in these groups."""
    evaluations: dict[str, list[Problem]]
    """The problems of each held-out set by the set's name, which is empty for the unnamed one."""

    def steps(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield each step with its groups as JSON for the page's script."""
        for path, numbers in self.chosen.items():
            table = read_rollouts(path)
            table = table.filter(pa.array(np.isin(_column(table["group"], np.int64), numbers)))
            groups = _groups(table)
            yield table["step"][0].as_py(), groups


def read_content(run: Path, rows: int = MOST_ROWS, tokens: int = MOST_TOKENS) -> Content:
    """Return the content of the page of ``run``.

    With more than ``rows`` completions or ``tokens`` tokens only some groups, in equal distances
    over all steps, are on the page; the overview has all of them.

    Raises ``DataError`` where the folder has neither rollouts nor evaluations, or one of its files
    cannot be read.
    """
    files = files_of(run / FOLDER)
    evaluations = {name: read_problems(of_set) for name, of_set in evaluation_files(run).items()}
    if not files and not evaluations:
        raise DataError(
            f"expected {FOLDER}/ or {EVALUATIONS}/ with files of a run, got neither",
            file=str(run),
            remedy="name the output_dir of a run of rl with run.rollouts other than none, or with "
            "an evaluation",
        )
    parts = [_overview(path) for path in files]
    groups = [numbers for _, numbers in parts]
    overviews = [overview for overview, _ in parts]
    chosen = _choose(groups, [overview.lengths for overview in overviews], rows, tokens)
    return Content(
        overview=_join(overviews),
        chosen={files[f]: numbers for f, numbers in chosen.items()},
        rows=sum(int(np.isin(groups[f], numbers).sum()) for f, numbers in chosen.items()),
        evaluations=evaluations,
    )


def read_overview(run: Path) -> Overview:
    """Return the overview of the completions that ``run`` has kept.

    It is empty where the run kept none.

    Raises ``DataError`` where one of its files cannot be read.
    """
    return _join([_overview(path)[0] for path in files_of(run / FOLDER)])


def _overview(path: Path) -> tuple[Overview, NDArray[np.int64]]:
    """Return the overview of one file, and the number of the group of each of its completions.

    The tokens themselves are dropped: those of a long run may not fit into memory.
    """
    table = read_rollouts(path, ["step", "group", "reward", "tokens"])
    overview = Overview(
        steps=_column(table["step"], np.int64),
        rewards=_column(table["reward"], np.float64),
        lengths=_column(pc.call_function("list_value_length", [table["tokens"]]), np.int64),
    )
    return overview, _column(table["group"], np.int64)


def _join(overviews: Sequence[Overview]) -> Overview:
    return Overview(
        steps=_joined([overview.steps for overview in overviews], np.int64),
        rewards=_joined([overview.rewards for overview in overviews], np.float64),
        lengths=_joined([overview.lengths for overview in overviews], np.int64),
    )


def _choose(
    groups: Sequence[NDArray[Any]], lengths: Sequence[NDArray[Any]], rows: int, tokens: int
) -> dict[int, list[int]]:
    """Return numbers of groups by the index of their file, within both limits."""
    sizes = [
        (f, int(number), int(mine.sum()), int(lengths[f][mine].sum()))
        for f, column in enumerate(groups)
        for number in np.unique(column)
        for mine in [column == number]
    ]
    count = len(sizes)
    chosen = sizes
    while count > 1 and (
        sum(size for _, _, size, _ in chosen) > rows
        or sum(length for _, _, _, length in chosen) > tokens
    ):
        count = count * 19 // 20
        chosen = [sizes[i] for i in spread(len(sizes), count)]
    found: dict[int, list[int]] = {}
    for f, number, _, _ in chosen:
        found.setdefault(f, []).append(number)
    return found


def _groups(table: pa.Table) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for index in range(table.num_rows):
        row = {name: table[name][index] for name in table.column_names}
        number = row["group"].as_py()
        group = groups.setdefault(
            number,
            {name: row[name].as_py() for name in ("group", "problem", "prompt", "answer")}
            | {"rows": []},
        )
        group["rows"].append(_row(row))
    return list(groups.values())


def _row(row: dict[str, Any]) -> dict[str, Any]:
    plain = (
        "sample",
        "text",
        "reward",
        "shaped_reward",
        "correct",
        "found_answer",
        "finish_reason",
        "tool_calls",
        "error",
        "learned",
    )
    found = {name: row[name].as_py() for name in plain}
    found["parts"] = dict(row["reward_parts"].as_py())
    found["texts"] = row["token_texts"].as_py()
    found["versions"] = _short(row["weight_versions"].as_py())
    found["mask"] = "".join("1" if counts else "0" for counts in row["loss_mask"].as_py())
    for name in _PER_TOKEN:
        found[name] = _numbers(row[name])
    return found


def _numbers(values: pa.Scalar) -> Any:
    """Return a token's numbers, rounded.

    One number stands for all where they are equal. Unknown numbers are None.
    """
    if not values.is_valid:
        return None
    array = np.asarray(values.values.to_numpy(zero_copy_only=False), dtype=np.float64)
    return _short([x if np.isfinite(x) else None for x in array.round(_DIGITS).tolist()])


def _short(values: list[Any]) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else values


def _column(column: Any, dtype: Any) -> NDArray[Any]:
    return np.asarray(column.to_numpy(), dtype=dtype)


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *arrays])
