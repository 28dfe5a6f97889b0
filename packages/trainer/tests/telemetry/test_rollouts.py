"""The files of rollouts: their schema, and kills while one is written."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_api.errors import EngineError
from engine_trainer.errors import DataError
from engine_trainer.telemetry.rollouts import (
    SCHEMA,
    VERSION,
    VERSION_KEY,
    RolloutFiles,
    column,
    files_of,
    path_of,
    read_rollouts,
)
from engine_trainer.telemetry.token_texts import TokenTexts


def table(step: int, rows: int = 1) -> pa.Table:
    empty = {pa.string(): "", pa.bool_(): False}
    values = {
        field.name: [None if field.nullable else empty.get(field.type, [])] * rows
        for field in SCHEMA
    }
    for name in ("group", "sample", "time", "reward", "shaped_reward"):
        values[name] = [0] * rows
    values["step"] = [step] * rows
    return pa.Table.from_arrays([column(n, values[n]) for n in SCHEMA.names], schema=SCHEMA)


def test_a_file_has_the_schema_and_its_version(tmp_path):
    files = RolloutFiles(tmp_path / "rollouts")
    files.write(3, lambda: table(3, 2))
    files.wait()
    (path,) = files_of(tmp_path / "rollouts")
    assert path.name == "step-000003.parquet"
    found = pq.read_schema(path)
    assert found.equals(SCHEMA, check_metadata=False)
    assert found.metadata[VERSION_KEY] == str(VERSION).encode()
    assert read_rollouts(path).column("step").to_pylist() == [3, 3]
    assert read_rollouts(path, ["reward"]).column_names == ["reward"]
    files.close()


def test_unknown_numbers_are_null_and_no_text_ends_a_run():
    some = np.array([1.5, np.nan], dtype=np.float32)
    assert column("entropy", [some, None]).to_pylist() == [[1.5, None], None]
    assert column("error", ["half of a pair: \ud800"]).to_pylist() == ["half of a pair: ?"]


def test_a_kill_while_a_file_is_written_leaves_the_former_ones_whole(tmp_path):
    """End the process at the moment before the new file gets its name."""
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_rollouts import RolloutFiles, table
from engine_trainer.telemetry import rollouts

files = RolloutFiles(Path({str(tmp_path)!r}))
files.write(1, lambda: table(1))
files.wait()
rollouts.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
files.write(2, lambda: table(2))
files.wait()
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert [path.name for path in files_of(tmp_path)] == ["step-000001.parquet"]
    assert read_rollouts(path_of(tmp_path, 1)).num_rows == 1
    assert (tmp_path / "step-000002.parquet.partial").is_file()
    RolloutFiles(tmp_path).open(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.parquet"]


def test_a_run_that_goes_on_removes_only_files_of_later_steps(tmp_path):
    for name in ("step-000002.parquet", "step-000003.parquet", "step-1000000.parquet", "notes"):
        (tmp_path / name).touch()
    RolloutFiles(tmp_path).open(2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-000002.parquet"]
    RolloutFiles(tmp_path).open(0)
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]
    RolloutFiles(tmp_path / "none").open(0)


def test_the_loop_goes_on_while_a_file_is_written(tmp_path):
    begun, may_end = threading.Event(), threading.Event()

    def slow() -> pa.Table:
        begun.set()
        may_end.wait()
        return table(1)

    files = RolloutFiles(tmp_path)
    files.write(1, slow)
    begun.wait()
    assert files_of(tmp_path) == []
    may_end.set()
    files.write(2, lambda: table(2))
    assert path_of(tmp_path, 1) in files_of(tmp_path)
    files.close()
    assert len(files_of(tmp_path)) == 2


def test_a_disk_that_takes_nothing_is_an_error_of_the_run(tmp_path):
    (tmp_path / "rollouts").write_text("a file is in the folder's place")
    files = RolloutFiles(tmp_path / "rollouts")
    files.write(1, lambda: table(1))
    with pytest.raises(EngineError, match=r"run\.rollouts=none") as caught:
        files.wait()
    assert caught.value.where == str(tmp_path / "rollouts")
    files.close()


def test_what_is_no_file_of_rollouts_is_refused_with_its_name(tmp_path):
    cut = tmp_path / "step-000001.parquet"
    cut.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="not a Parquet file") as caught:
        read_rollouts(cut)
    assert caught.value.file == str(cut)
    newer = table(1).replace_schema_metadata({VERSION_KEY: b"99"})
    pq.write_table(newer, cut)
    with pytest.raises(DataError, match=rf"expected version {VERSION}.*got 99"):
        read_rollouts(cut)


def byte_tokenizer():
    """Return a tokenizer with one token for each byte, and a special one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<eos>"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


def test_the_text_of_each_token_keeps_spaces_and_whole_characters():
    tokenizer = byte_tokenizer()
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode(" a é 🙂", add_special_tokens=False)
    eos = tokenizer.eos_token_id
    assert texts.texts_of_tokens([*tokens, eos]) == [
        " ",
        "a",
        " ",
        "é",
        "",
        " ",
        "🙂",
        "",
        "",
        "",
        "<eos>",
    ]
    # A character that is cut off stays one token's own problem.
    assert texts.texts_of_tokens(tokens[-2:]) == ["\ufffd", "\ufffd"]
    assert texts.decode([*tokens, eos]) == " a é 🙂"
