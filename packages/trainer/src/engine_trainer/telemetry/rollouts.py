"""The rollouts of a run: one Parquet file per step in ``output_dir/rollouts``, and its schema.

``docs/rollouts.md`` explains the columns. A file is written under a partial name, synchronized to
the disk and renamed, so that a kill leaves either the whole file or none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine_api.errors import EngineError
from engine_api.folders import sync
from engine_trainer.errors import DataError

FOLDER = "rollouts"
VERSION = 1
"""Version of the schema. A column that is added does not change it; any other change does."""
VERSION_KEY = b"engine_trainer.rollouts.version"
RUN_KEY = b"engine_trainer.rollouts.run"
"""Key of the metadata with the id of the run."""
LEARNED_KEY = b"engine_trainer.rollouts.learned"
"""Key of the metadata with the number of completions that the step learned from, kept or not."""
EXPERTS = "routed_experts"
"""Column with the experts that served the tokens of prompt and completion: ``L × k`` integers a
token, one behind the other, where ``rollout.routed_experts`` is ``replay``.
"""
EXPERTS_KEY = b"engine_trainer.rollouts.experts"
"""Key of the metadata with L, k and the dtype of the experts in memory, separated by blanks."""

_NUMBERS = pa.map_(pa.string(), pa.float64())
_IDS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())
TOOL_CALL = pa.struct(
    [
        pa.field("call", pa.string(), nullable=False),
        pa.field("result", pa.string(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("time", pa.float64(), nullable=False),
        pa.field("problem", pa.string(), nullable=False),
        pa.field("question", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("prompt_tokens", _IDS, nullable=False),
        pa.field("teacher_prompt_tokens", _IDS),
        pa.field("answer", pa.string()),
        pa.field("images", pa.list_(pa.string())),
        pa.field("text", pa.string(), nullable=False),
        pa.field("tokens", _IDS, nullable=False),
        pa.field("token_texts", pa.list_(pa.string()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("rollout_log_probs", _FLOATS, nullable=False),
        pa.field("old_log_probs", _FLOATS),
        pa.field("ref_log_probs", _FLOATS),
        pa.field("teacher_log_probs", _FLOATS),
        pa.field("entropy", _FLOATS),
        pa.field("advantages", _FLOATS),
        pa.field("weight_versions", _IDS, nullable=False),
        pa.field(EXPERTS, pa.list_(pa.int16())),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("shaped_reward", pa.float64(), nullable=False),
        pa.field("reward_parts", _NUMBERS, nullable=False),
        pa.field("correct", pa.bool_(), nullable=False),
        pa.field("found_answer", pa.string()),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("tool_calls", pa.list_(TOOL_CALL), nullable=False),
        pa.field("error", pa.string(), nullable=False),
        pa.field("learned", pa.bool_(), nullable=False),
        pa.field("seconds", _NUMBERS, nullable=False),
    ],
    metadata={VERSION_KEY: str(VERSION).encode()},
)
_NAME = re.compile(r"step-(\d+)\.parquet")


class RolloutFiles:
    """The files of a run that is running.

    A file is written in a thread of its own while the loop goes on. One file at a time is under
    way.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._writing: Future[None] | None = None

    def open(self, step: int) -> None:
        """Prepare to continue after ``step``, and remove the files of later steps.

        A new run (``step == 0``) removes all of them.
        """
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            found = _NAME.match(path.name)
            if found and (int(found[1]) > step or path.name.endswith(".partial")):
                path.unlink()

    def write(self, step: int, build: Callable[[], pa.Table]) -> None:
        """Write the table that ``build`` returns as the file of ``step``, in the thread.

        The former file is complete when this call returns. Raises ``EngineError`` where it could
        not be written.
        """
        self.wait()
        self._writing = self._thread.submit(self._write, step, build)

    def wait(self) -> None:
        """Wait until the last file is on the disk.

        Raises ``EngineError`` where it could not be written.
        """
        writing = self._writing
        self._writing = None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            raise EngineError(
                "the completions of a step cannot be written",
                where=str(self.folder),
                why=str(error),
                remedy="give the folder free space, or set run.rollouts=none",
            ) from error

    def close(self) -> None:
        """Wait for the last file, whose error is not raised, and end the thread (idempotent)."""
        self._thread.shutdown()

    def _write(self, step: int, build: Callable[[], pa.Table]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = path_of(self.folder, step)
        partial = path.with_name(path.name + ".partial")
        pq.write_table(build(), partial, compression="zstd")
        sync(partial)
        partial.replace(path)
        sync(self.folder)


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the file of ``step``."""
    return folder / f"step-{step:06d}.parquet"


def files_of(folder: Path) -> list[Path]:
    """Return the complete files of a folder of rollouts, by step."""
    found = (
        [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    )
    return sorted(found, key=lambda path: int(path.name[5:-8]))


def describe(run: str, learned: int, experts: str = "") -> dict[bytes, bytes]:
    """Return the metadata of a step's file.

    Args:
        run: id of the run.
        learned: number of completions that the step learned from, kept or not.
        experts: the value at ``EXPERTS_KEY``, empty where no experts are kept.
    """
    found = {
        VERSION_KEY: str(VERSION).encode(),
        RUN_KEY: run.encode(),
        LEARNED_KEY: str(learned).encode(),
    }
    return found | ({EXPERTS_KEY: experts.encode()} if experts else {})


def read_rollouts(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of one file, or only some of their columns.

    Without ``columns`` they are all except ``EXPERTS``, which is far larger than the others.

    Raises ``DataError`` for a file that is not one of rollouts, or has a different version.
    """
    try:
        if columns is None:
            columns = [name for name in pq.read_schema(path).names if name != EXPERTS]
        table = pq.read_table(path, columns=list(columns))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            "it is not a Parquet file of rollouts",
            file=str(path),
            why=str(error),
            remedy="remove it: a run never leaves a file that is cut off",
        ) from error
    version = (table.schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    if version != str(VERSION):
        raise DataError(
            f"expected version {VERSION} of the schema of rollouts, got {version}",
            file=str(path),
            remedy="use the version of engine-trainer that wrote it",
        )
    return table


def column(name: str, values: Sequence[Any]) -> pa.Array:
    """Return the column ``name`` of the schema.

    NaN is null in lists of floats, which are arrays. A text may hold characters that UTF-8 has not
    (half of a surrogate pair), and gets a question mark in their place.
    """
    field = SCHEMA.field(name)
    if field.type == pa.string():
        values = [None if text is None else _encodable(text) for text in values]
    return pa.array(values, type=field.type, from_pandas=True)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
