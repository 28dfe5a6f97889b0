"""Checks of a configuration that need no training: engine, output folder, and data."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from engine_api.capabilities import refuse_undeclared
from engine_api.errors import ConfigError, EngineError
from engine_api.registry import EngineRegistry
from engine_trainer.config import Config
from engine_trainer.config.engine_keys import POLICY, named_below
from engine_trainer.data import ChatTokenizer
from engine_trainer.data.readers import read_rows
from engine_trainer.errors import DataError
from engine_trainer.preview.collect import Preview, PreviewRow, collect
from engine_trainer.utils.plugins import find_capabilities

ROWS = 8
"""Number of rows to train on, which two steps read."""
LONGEST = 2
"""Number of the longest rows among them."""
LONG_TOKENS = 1024
"""Number of tokens beyond which only one of the longest rows is taken."""


def check_engine(config: Config, gpus: int | None) -> str:
    """Check what the configuration asks of its own engine, which need not run here.

    Args:
        config: the configuration.
        gpus: number of ranks of the real run, None where it is not known.

    Returns a line about the engine. Raises ``ConfigError`` for an unknown option and for a layout
    that does not fit ``gpus``, and ``UnsupportedCapability`` for what the engine does not declare.
    """
    section = config.engine
    engine = section.build(seed=0, total_steps=1)
    found = [
        plugin
        for plugin, row in EngineRegistry.rows()
        if section.backend in row.backends and section.model_type in row.model_types
    ]
    sizes = section.parallelism
    product = sizes.tp * sizes.pp * sizes.cp * sizes.ulysses * sizes.dp_replicate
    if gpus is not None and gpus % product:
        raise ConfigError(
            "engine.parallelism",
            f"expected sizes whose product divides {gpus} ranks, got {product}",
            remedy="correct the sizes, or name the number of GPUs of the run with --gpus",
        )
    if not found or found[0].plugin is None:
        return f"{section.backend} is not installed: its options were not checked"
    plugin = found[0].plugin
    with named_below(POLICY):
        capabilities = find_capabilities(plugin, found[0].source, engine.options)
    refuse_undeclared(engine, capabilities, plugin.name)
    return f"{section.backend} declares all that is asked of it"


def check_folder(folder: Path, checkpoint_bytes: int, keep: int) -> str:
    """Write a file where the run will write its checkpoints, and compare the free space.

    Args:
        folder: ``run.output_dir``, which need not exist.
        checkpoint_bytes: size of a checkpoint of the real run, 0 where it is not known.
        keep: number of checkpoints that are kept, 0 for all.

    Returns a line about the folder. Raises ``ConfigError`` where nothing can be written.
    """
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        if not there.is_dir():
            raise NotADirectoryError(f"{there} is a file")
        with tempfile.TemporaryDirectory(dir=there, prefix=".rehearsal-") as scratch:
            (Path(scratch) / "file").write_bytes(b"x")
        free = shutil.disk_usage(there).free
    except OSError as error:
        raise ConfigError(
            "run.output_dir",
            f"nothing can be written to {there}",
            why=str(error),
            remedy="name a folder that you may write to: run.output_dir=…",
        ) from error
    if not checkpoint_bytes:
        return f"{there} can be written to"
    # One more is there while it is written.
    need = checkpoint_bytes * (max(keep, 1) + 1)
    line = (
        f"{there} can be written to; {keep or 'all'} checkpoints of "
        f"{checkpoint_bytes / 1e9:.3g} GB are kept, {free / 1e9:.3g} GB are free"
    )
    return f"{line}: too few for this machine's disk" if need > free else line


def check_data(config: Config, task: str, folder: Path) -> tuple[Preview, str]:
    """Tokenize all rows as the real run will, and write those of the rehearsal.

    Args:
        config: the user's configuration, with the context of the large model.
        task: its task.
        folder: the rehearsal's folder, which gets ``rows.jsonl`` and ``tokenizer``.

    Returns the rows, and a line about them. Raises ``ConfigError`` and ``DataError`` for rows that
    would end the run before its first step.
    """
    preview = collect(config, task)
    if preview.tokenizer.has_image_processor:
        raise DataError(
            "the rows have images, which a rehearsal does not copy",
            file=preview.rows[0].file,
            remedy="rehearse with rows of text alone; engine-train data decodes every image",
        )
    fates = Counter(row.fate for row in preview.rows)
    refused = next((row for row in preview.rows if row.error is not None), None)
    if refused is not None and refused.error is not None:
        counts = f"{fates['refused']} of {len(preview.rows)} rows are refused"
        if refused.length:
            counts += f"; this one has {refused.length} tokens"
        raise DataError(
            refused.error.what,
            file=refused.file,
            row=refused.number,
            column=refused.error.column,
            why="; ".join(filter(None, (refused.error.why, counts))),
            remedy=refused.error.remedy,
        )
    usable = [i for i, row in enumerate(preview.rows) if row.fate in ("kept", "cut")]
    if not usable:
        raise DataError(
            f"none of {len(preview.rows)} rows is left: all are longer than "
            f"{preview.bound.tokens} tokens",
            remedy=preview.bound.remedy,
        )
    if config.data.source is not None:
        _write_rows(config, _choose(preview.rows, usable), folder / "rows.jsonl")
    _save_tokenizer(preview.tokenizer, folder / "tokenizer")
    longest = max(row.length for row in preview.rows)
    counts = ", ".join(f"{count:,} {fate}" for fate, count in fates.items())
    return preview, f"{len(preview.rows):,} rows: {counts}; the longest has {longest:,} tokens"


def _choose(rows: list[PreviewRow], usable: list[int]) -> list[int]:
    """Return the numbers of the rows to train on: the first ones and the longest."""
    by_length = sorted(usable, key=lambda i: -rows[i].length)
    longest = by_length[:LONGEST]
    if rows[longest[0]].length > LONG_TOKENS:
        longest = longest[:1]
    first = [i for i in usable if i not in longest][: ROWS - len(longest)]
    return sorted([*longest, *first])


def _write_rows(config: Config, numbers: list[int], path: Path) -> None:
    assert config.data.source is not None
    rows = read_rows(config.data.source, config.data.split)
    values = [dict(rows[i].values) for i in numbers]
    # Fewer rows than a step reads would not make a batch.
    values = [values[i % len(values)] for i in range(max(len(values), ROWS))]
    try:
        path.write_text("".join(json.dumps(row) + "\n" for row in values), encoding="utf-8")
    except TypeError as error:
        raise DataError(
            "a column holds values that JSON does not have",
            file=rows[numbers[0]].file,
            row=rows[numbers[0]].number,
            why=str(error),
            remedy="write the columns that the run reads as text, numbers, lists and objects",
        ) from error


def _save_tokenizer(tokenizer: ChatTokenizer, folder: Path) -> None:
    saved: Any = tokenizer.tokenizer
    saved.save_pretrained(folder)


def describe_error(error: EngineError) -> str:
    """Return an error's text as lines to be shown under a stage."""
    return "\n".join(f"            {line}" for line in str(error).splitlines())
