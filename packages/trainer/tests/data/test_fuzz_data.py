"""Fuzz tests of data.

Rows and examples keep their promises, or a ``DataError`` names file, row and column.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import fuzz
from hypothesis import example, given
from hypothesis import strategies as st

from engine_trainer.config.sections import ColumnsSection, DataSection
from engine_trainer.data import ChatTokenizer, PromptDataset, SFTDataset
from engine_trainer.data.labelled import LabelledDataset
from engine_trainer.data.layouts import ROLES, SHAREGPT_ROLES, to_examples
from engine_trainer.data.preferences import PairDataset
from engine_trainer.data.readers import read_rows
from engine_trainer.errors import DataError, ImageError

SURROGATE = '"\\ud800"'
texts = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["", " ", "hi", "#### 4", "####", "<|eos|>", "\u2028", "{}", "\ud83d\ude00"]),
)
scalars = st.one_of(
    texts,
    st.integers(-3, 3),
    st.floats(),
    st.booleans(),
    st.none(),
    st.sampled_from([10**400, -(2**63), 1e308, 2**53 + 1]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
calls = st.one_of(
    values,
    st.just([{"function": {"name": "f", "arguments": {}}}]),
    st.just('[{"function": {"name": "f"}}]'),
)
parts = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"type": st.one_of(st.sampled_from(["text", "text", "image", "image_url"]), values)},
            optional={"text": st.one_of(texts, values), "image_url": values, "image": values},
        ),
        values,
    ),
    max_size=3,
)
openai = st.fixed_dictionaries(
    {"role": st.one_of(st.sampled_from(ROLES), st.sampled_from(["user", "assistant"]), values)},
    optional={
        "content": st.one_of(texts, texts, texts, parts, values),
        "tool_calls": calls,
        "name": values,
    },
)
sharegpt = st.fixed_dictionaries(
    {"from": st.one_of(st.sampled_from(sorted(SHAREGPT_ROLES)), st.just("gpt"), values)},
    optional={"value": st.one_of(texts, texts, parts, values), "role": values, "weight": scalars},
)
messages = st.one_of(openai, openai, sharegpt)
conversations = st.one_of(
    st.just([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]),
    st.just([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]),
    st.lists(st.one_of(messages, messages, messages, values), max_size=4),
    values,
)
COLUMNS = {
    "messages": conversations,
    "conversations": conversations,
    "conversation": conversations,
    "system": st.one_of(texts, values),
    "prompt": st.one_of(texts, conversations),
    "response": st.one_of(texts, conversations),
    "question": texts,
    "answer": scalars,
    "solution": values,
    "reward_model": values,
    "tools": calls,
    "input": values,
    "instruction": values,
    "chosen": st.one_of(conversations, messages),
    "rejected": st.one_of(conversations, messages),
    "data_source": values,
    "label": st.one_of(st.booleans(), st.booleans(), scalars, values),
    "output": values,
    "images": values,
}
rows = st.lists(st.fixed_dictionaries({}, optional=COLUMNS), min_size=1, max_size=3)
named = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ["prompt", "response", "answer"], st.sampled_from([*COLUMNS, "a.b", ""])
    ),
)


def outcome(call):
    """Return the result of a call, or the ``DataError`` that it raises.

    Any other exception fails the test.
    """
    try:
        return call()
    except DataError as error:
        return error


def assert_placed(error: DataError, path: Path | str) -> None:
    assert str(path) in error.file
    assert str(path) in str(error)
    assert error.row is None or error.row >= 1
    str(error).encode("utf-8", "backslashreplace")


def read(name: str, content: bytes):
    """The rows of a file with this content, or its error, which names the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        found = outcome(lambda: read_rows(str(path)))
        if isinstance(found, DataError):
            assert_placed(found, path)
        return found


PIECES = [
    b"\xef\xbb\xbf",
    b"\r\n",
    b"\n",
    b"\n\n",
    b" ",
    b"\r",
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'{"prompt": "a", "response": "b"}',
    b'{"a": 1, "a": 2}',
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": [{"b": 1, "b": 1}]}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": ' + b"9" * 400 + b"}",
    b'{"a": ' + SURROGATE.encode() + b"}",
    b'{"\\udfff": 1}',
    b'{"a": "\\ud83d\\ude00"}',
    b'{"a": ' + b"[" * 99 + b"]" * 99 + b"}",
    b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a": "' + b"[" * 5000 + b'"}',
    b"null",
    b"3",
    b"[]",
    b"\\",
    b"\xff\xfe{\x00}\x00",
]
lines = st.lists(
    st.one_of(st.integers(0, len(PIECES) - 1).map(PIECES.__getitem__), st.binary(max_size=4)),
    max_size=6,
).map(b"".join)


@fuzz()
@given(lines)
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"a": ' + SURROGATE.encode() + b"}")
@example(b'{"prompt": "a", "prompt": "b"}')
def test_lines_are_rows_or_refused_by_number(content):
    found = read("rows.jsonl", content)
    if isinstance(found, DataError):
        of_the_file = found.what == "the file is empty" or "got UTF-" in found.what
        assert found.row is not None or of_the_file
        return
    for row in found:
        line = content.split(b"\n")[row.number - 1]
        assert line.strip()
        text = json.dumps(row.values, ensure_ascii=False)
        text.encode("utf-8")  # no half of a surrogate pair
        assert json.loads(text).keys() == row.values.keys()


@pytest.mark.slow
@fuzz()
@given(lines, st.booleans())
@example(b"[" * 100_000, False)
@example(b'[{"a": 1}, {"a": ' + SURROGATE.encode() + b"}]", True)
@example(b'[{"a": 1, "a": 2}]', False)
def test_a_list_of_rows_is_read_or_refused(content, is_list):
    content = b"[" + content + b"]" if is_list else content
    found = read("rows.json", content)
    if isinstance(found, DataError):
        return
    assert [row.number for row in found] == list(range(1, len(found) + 1))
    whole = json.loads(content.decode("utf-8-sig"))
    for row, values in zip(found, whole, strict=True):
        text = json.dumps(row.values, ensure_ascii=False)
        text.encode("utf-8")  # no half of a surrogate pair
        assert row.values.keys() == values.keys()


CELLS = [
    b"a",
    b"b",
    b",",
    b",",
    b'"',
    b'""',
    b"\n",
    b"\r\n",
    b"\r",
    b"\x00",
    b"\xff",
    b" ",
    b"x" * 9,
]
table_text = st.lists(
    st.one_of(st.integers(0, len(CELLS) - 1).map(CELLS.__getitem__), st.binary(max_size=3)),
    max_size=16,
).map(b"".join)


@fuzz()
@given(table_text, st.booleans())
def test_a_csv_file_is_rows_of_text_or_refused(content, has_header):
    content = b"a,b\n" + content if has_header else content
    before = csv.field_size_limit()
    found = read("rows.csv", content)
    assert csv.field_size_limit() == before
    if isinstance(found, DataError):
        return
    assert [row.number for row in found] == list(range(1, len(found) + 1))
    for row in found:
        assert row.values.keys() == found[0].values.keys()
        assert all(cell is None or (isinstance(cell, str) and cell) for cell in row.values.values())


cells = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=6), st.sampled_from(['"', ",\r\n"])
)


@fuzz()
@given(st.lists(st.fixed_dictionaries(dict.fromkeys("abc", cells)), min_size=1, max_size=4))
def test_what_pythons_writer_writes_is_read_as_it_was(table):
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, ["a", "b", "c"])
    writer.writeheader()
    writer.writerows(table)
    found = read("rows.csv", buffer.getvalue().encode("utf-8"))
    assert [dict(row.values) for row in found] == [
        {name: row[name] or None for name in ("a", "b", "c")} for row in table
    ]


@fuzz()
@given(
    st.sampled_from(["jsonl", "json", "csv"]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=3),
    st.floats(0, 1),
)
def test_a_damaged_gzip_file_is_read_or_named(kind, changes, kept):
    text = {"jsonl": '{"a": 1}\n{"a": 2}\n', "json": '[{"a": 1}, {"a": 2}]', "csv": "a\n1\n2\n"}
    content = bytearray(gzip.compress(text[kind].encode(), mtime=0))
    for place, byte in changes:
        content[int(place * len(content))] = byte
    found = read(
        f"rows.{kind}.gz", bytes(content[: int(kept * len(content))] if kept < 0.5 else content)
    )
    assert isinstance(found, DataError) or [row.number for row in found] == [1, 2]


def test_a_byte_order_mark_and_line_ends_of_windows_are_no_part_of_a_row():
    found = read("rows.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}')
    assert [(row.values, row.number) for row in found] == [({"a": 1}, 1), ({"a": 2}, 3)]


@pytest.fixture(scope="module")
def tokenizers(tokenizer_of):
    """By whether it has a chat template."""
    return {True: tokenizer_of(), False: tokenizer_of(None)}


@pytest.mark.slow
@fuzz(cost=2)
@given(
    rows,
    named,
    st.sampled_from(["sft", "rl", "pairs", "labelled"]),
    st.booleans(),
    st.sampled_from(["all", "last"]),
)
def test_rows_become_tokens_or_are_refused_by_row(
    tokenizers, given_rows, columns, task, has_template, train_on
):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in given_rows))
        section = DataSection(
            source=str(path), columns=ColumnsSection(**columns), train_on=train_on
        )
        tokenizer = ChatTokenizer(tokenizers[has_template], section)
        found = outcome(lambda: _dataset(task, tokenizer, section))
        if isinstance(found, DataError):
            assert_placed(found, path)
            assert found.row is not None
            assert found.row <= len(given_rows)
            return
    assert len(found) == len(given_rows)
    for index in range(len(found)):
        if task == "rl":
            assert found[index].tokens
            assert found[index].number == index + 1
            continue
        whole = task in ("pairs", "labelled")
        documents = list(found[index].documents) if whole else [found[index]]
        if task == "labelled":
            mixed = found[index].with_completion_of(found[index - 1], None)
            own = found[index].with_completion_of(found[index], None)
            assert own.input_ids.tolist() == documents[0].input_ids.tolist()
            documents.append(mixed)
        for document in documents:
            assert document.loss_weight.any()
            assert document.loss_weight[0] == 0
            assert len(document.input_ids) == len(document.loss_weight)


def _dataset(task, tokenizer, section):
    if task == "pairs":
        return PairDataset.read(section.source, None, tokenizer, section)
    if task == "labelled":
        return LabelledDataset.read(section.source, None, tokenizer, section, label="label")
    examples = to_examples(
        read_rows(section.source), section.columns, "response" if task == "sft" else "prompt"
    )
    rows = read_rows(section.source) if task == "sft" else []
    pictured = outcome(lambda: to_examples(rows, section.columns, "response", images=True))
    for one in [] if isinstance(pictured, DataError) else pictured:
        for source in one.images:
            size = outcome(source.read_size)
            assert isinstance(size, ImageError), "no file has an image"
            assert_placed(size, source.file)
    for one in examples:
        assert all(turn["role"] in ROLES for turn in one.messages)
        assert one.answer is None or isinstance(one.answer, str)
    return (SFTDataset if task == "sft" else PromptDataset).build(examples, tokenizer, section)


KINDS = {
    "ts_ns": (pa.timestamp("ns"), [0, 1, 2**62, -(2**63)]),
    "ts_s": (pa.timestamp("s"), [0, 2**40, -(2**55)]),
    "ts_zone": (pa.timestamp("us", tz="Europe/Berlin"), [0, 1]),
    "ts_no_zone": (pa.timestamp("us", tz="Nowhere/City"), [0, 1]),
    "date32": (pa.date32(), [0, 2**30, -(2**31)]),
    "date64": (pa.date64(), [0, 86400000 * 2**30]),
    "time": (pa.time64("ns"), [0, 1, 86399999999999]),
    "duration": (pa.duration("us"), [0, 2**62, -(2**62)]),
    "duration_ns": (pa.duration("ns"), [1, 2**62]),
    "interval": (pa.month_day_nano_interval(), [(1, 2, 3)]),
    "decimal": (pa.decimal128(38, 2), [decimal.Decimal("1.50"), decimal.Decimal("-9e30")]),
    "binary": (pa.binary(), [b"", b"\xff"]),
    "half": (pa.float16(), [1.5, float("nan")]),
    "uint64": (pa.uint64(), [2**64 - 1]),
    "text": (pa.string(), ["a", ""]),
    "large_text": (pa.large_string(), ["a"]),
    "null": (pa.null(), [None]),
    "bool": (pa.bool_(), [True]),
    "list": (pa.list_(pa.timestamp("ns")), [[1], [], None]),
    "struct": (pa.struct({"a": pa.duration("ns")}), [{"a": 1}, None]),
    "fixed": (pa.list_(pa.date32(), 2), [[0, 2**30]]),
    "map": (pa.map_(pa.string(), pa.timestamp("ns")), [[("a", 1), ("a", 2)], []]),
    "nested": (
        pa.list_(pa.struct({"a": pa.list_(pa.timestamp("s", tz="Nowhere/City"))})),
        [[{"a": [2**50]}]],
    ),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), ["a", "b"]),
}


@st.composite
def tables(draw):
    """A table of one to three columns, a wrong one among them at times, and the file's format."""
    size = draw(st.integers(1, 4))
    columns = {"prompt": pa.array(["a"] * size), "response": pa.array(["b"] * size)}
    bad = None
    for name in draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=3, unique=True)):
        kind, known = KINDS[name]
        picked = draw(st.lists(st.integers(0, len(known)), min_size=size, max_size=size))
        columns[name] = pa.array([(*known, None)[i] for i in picked], kind)
    if draw(st.booleans()):
        bad = draw(st.integers(0, size - 1))
        raw = [b"\xff\xfe" if i == bad else b"ok" for i in range(size)]
        columns["damaged"] = pa.array(raw, pa.binary()).view(pa.string())
    return pa.table(columns), bad


def written(table: pa.Table, path: Path) -> bool:
    """Write a table; whether pyarrow could."""
    try:
        if path.suffix == ".parquet":
            pq.write_table(table, path)
        else:
            with (
                pa.OSFile(str(path), "wb") as sink,
                pa.ipc.new_stream(sink, table.schema) as stream,
            ):
                stream.write_table(table)
    except pa.ArrowException:
        return False
    return True


@fuzz(cost=2)
@given(tables(), st.sampled_from([".parquet", ".arrow"]))
def test_a_column_of_any_type_is_read_or_named(given_table, suffix):
    table, bad = given_table
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"rows{suffix}")
        if not written(table, path):
            return
        found = outcome(lambda: read_rows(str(path)))
        if isinstance(found, DataError):
            assert_placed(found, path)
            assert (found.column, found.row) == ("damaged", None if bad is None else bad + 1)
            return
        assert bad is None
        assert [row.number for row in found] == list(range(1, table.num_rows + 1))
        assert all(list(row.values) == table.column_names for row in found)
        assert len(to_examples(found, ColumnsSection(), "response")) == table.num_rows
        moments = (datetime.date, datetime.time, datetime.timedelta)
        assert not [v for row in found for v in row.values.values() if isinstance(v, moments)], (
            "times are read as text"
        )


SAMPLE = pa.table(
    {
        "prompt": ["a", "b", None],
        "response": ["c", "d", "e"],
        "t": pa.array([1, None, 3], pa.timestamp("ns")),
    }
)


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    files = {suffix: folder / f"rows{suffix}" for suffix in (".parquet", ".arrow")}
    for path in files.values():
        assert written(SAMPLE, path)
    return {suffix: path.read_bytes() for suffix, path in files.items()}


@fuzz(cost=2)
@given(
    st.sampled_from([".parquet", ".arrow"]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    st.floats(0, 1),
)
def test_a_damaged_table_is_read_or_named(whole_files, suffix, changes, kept):
    content = bytearray(whole_files[suffix])
    for place, byte in changes:
        content[int(place * len(content))] = byte
    found = read(
        f"rows{suffix}", bytes(content[: int(kept * len(content))] if kept < 0.5 else content)
    )
    assert isinstance(found, DataError) or all(row.number >= 1 for row in found)


@fuzz(cost=2)
@given(
    st.one_of(values, st.just({"splits": ["train"]})),
    st.one_of(
        values,
        st.dictionaries(
            st.sampled_from(["_data_files", "_split", "_indices_data_files"]),
            st.one_of(
                values,
                st.lists(
                    st.fixed_dictionaries({"filename": st.one_of(values, st.just("d.arrow"))}),
                    max_size=2,
                ),
            ),
            max_size=2,
        ),
    ),
    st.booleans(),
    st.sampled_from([None, "train", "\0"]),
)
def test_a_saved_data_set_is_read_or_refused(of_splits, of_files, has_splits, split):
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "saved")
        (place / "train").mkdir(parents=True)
        if has_splits:
            (place / "dataset_dict.json").write_text(json.dumps(of_splits))
        inner = place / "train" if has_splits else place
        (inner / "state.json").write_text(json.dumps(of_files))
        written(SAMPLE, inner / "d.arrow")
        found = outcome(lambda: read_rows(str(place), split))
        if isinstance(found, DataError):
            assert_placed(found, place)
        else:
            assert len(found) % 3 == 0


@fuzz()
@given(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            [
                "\0",
                "a" * 5000 + ".jsonl",
                "a/" * 3000,
                "",
                ".",
                "hf://",
                "hf://datasets/a",
                "\ud800",
                "/dev/null",
            ]
        ),
    )
)
def test_a_source_that_is_not_there_is_named(source):
    with tempfile.TemporaryDirectory() as folder:
        asked = source if source.startswith("hf://") else f"{folder}/{source}"
        found = outcome(lambda: read_rows(asked))
        assert isinstance(found, DataError)
        assert found.file
