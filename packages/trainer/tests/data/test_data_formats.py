"""ShareGPT's rows, OpenAI's content parts, and the files that hold rows: JSON, CSV and gzip."""

from __future__ import annotations

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_trainer.config.sections import ColumnsSection, DataSection
from engine_trainer.data import ChatTokenizer
from engine_trainer.data.layouts import SHAREGPT_ROLES, have_responses, to_examples
from engine_trainer.data.preferences import PairDataset
from engine_trainer.data.readers import read_rows
from engine_trainer.errors import DataError

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
]
SHAREGPT = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "hi"},
    {"from": "gpt", "value": "ho"},
]
PARTS = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
ROWS = [{"prompt": "a, b", "response": 'say "c"\nd'}, {"prompt": "e", "response": "ü"}]


def written(folder, *rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def examples(path, need="response", **columns):
    return to_examples(read_rows(path), ColumnsSection(**columns), need)


# --- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["conversations", "conversation"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_sharegpt_is_read_as_the_same_chat(tmp_path, column, kind):
    row = {"id": "x", column: SHAREGPT}
    if kind == "jsonl":
        path = written(tmp_path, row)
    else:
        path = str(tmp_path / "rows.parquet")
        pq.write_table(pa.Table.from_pylist([row]), path)
    (example,) = examples(path)
    assert example.messages == CHAT
    assert example.metadata == {"id": "x"}
    (asked,) = examples(path, "prompt")
    assert asked.prompt == CHAT[:2]


def test_the_system_column_of_sharegpt_begins_the_conversation(tmp_path):
    path = written(
        tmp_path,
        {"system": "be brief", "conversations": SHAREGPT[1:]},
        {"system": "", "conversations": SHAREGPT[1:]},
        {"system": None, "conversations": SHAREGPT},
    )
    found = examples(path)
    assert [e.messages for e in found] == [CHAT, CHAT[1:], CHAT]
    assert not any(e.metadata for e in found)
    both = written(tmp_path, {"system": "no", "conversations": SHAREGPT}, name="both.jsonl")
    with pytest.raises(DataError, match=r"both\.jsonl:1, column 'system': a system message in add"):
        examples(both)


@pytest.mark.parametrize(("speaker", "role"), SHAREGPT_ROLES.items())
def test_every_speaker_has_a_role(tmp_path, speaker, role):
    turns = [{"from": "human", "value": "hi"}, {"from": speaker, "value": "ho"}]
    (example,) = examples(written(tmp_path, {"conversations": turns}))
    assert example.messages[1] == {"role": role, "content": "ho"}


@pytest.mark.parametrize("speaker", ["narrator", 3, ["gpt"], "GPT "])
def test_an_unknown_speaker_is_named_with_row_and_column(tmp_path, speaker):
    bad = [{"from": "human", "value": "hi"}, {"from": speaker, "value": "ho"}]
    path = written(tmp_path, {"conversations": SHAREGPT}, {"conversations": bad})
    with pytest.raises(DataError, match="is no known role") as caught:
        examples(path)
    assert (caught.value.row, caught.value.column) == (2, "conversations")
    assert "known: human, user, gpt" in str(caught.value)


def test_sharegpt_in_a_messages_column_and_chat_in_conversations(tmp_path):
    assert examples(written(tmp_path, {"messages": SHAREGPT}))[0].messages == CHAT
    assert examples(written(tmp_path, {"conversations": CHAT}))[0].messages == CHAT


def test_a_prompt_column_counts_before_conversations(tmp_path):
    path = written(tmp_path, {"prompt": "hi", "response": "ho", "conversations": SHAREGPT})
    assert examples(path)[0].messages == CHAT[1:]


def test_a_message_of_sharegpt_without_text_is_refused(tmp_path):
    path = written(tmp_path, {"conversations": [{"from": "human"}]})
    with pytest.raises(DataError, match="a message without text") as caught:
        examples(path)
    assert (caught.value.row, caught.value.column) == (1, "conversations")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_texts_of_content_parts_are_joined(tmp_path, kind):
    turns = [
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": [{"type": "text", "text": "ho"}]},
    ]
    path = str(tmp_path / f"rows.{kind}")
    if kind == "jsonl":
        written(tmp_path, {"messages": turns})
    else:  # parquet gives every part the keys of all
        turns[1]["content"][0]["image_url"] = None
        pq.write_table(pa.Table.from_pylist([{"messages": turns}]), path)
    assert examples(path)[0].messages == CHAT[1:]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            [PARTS[0], {"type": "image_url", "image_url": {"url": "x"}}],
            "a part of type 'image_url'",
        ),
        ([{"type": "input_audio"}], "a part of type 'input_audio', expected text"),
        (["hi"], "a part of type 'str'"),
        ([{"text": "hi"}], "a part of type None"),
        ([{"type": "text", "text": 3}], "a part without text"),
        ([{"type": "text"}], "a part without text"),
        ([], "a message without parts"),
    ],
)
@pytest.mark.parametrize("column", ["messages", "chosen"])
def test_other_parts_are_refused_with_row_and_column(tmp_path, tokenizer, parts, said, column):
    turns = [{"role": "user", "content": parts}, CHAT[2]]
    good, bad = CHAT[1:], turns
    path = written(tmp_path, {column: good, "rejected": good}, {column: bad, "rejected": good})
    section = DataSection(source=path)
    chat = ChatTokenizer(tokenizer, section)
    read = {
        "messages": lambda: examples(path),
        "chosen": lambda: PairDataset.read(path, None, chat, section),
    }
    with pytest.raises(DataError, match=said) as caught:
        read[column]()
    assert (caught.value.row, caught.value.column) == (2, column)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHAREGPT[:2], "chosen": SHAREGPT[2], "rejected": {**SHAREGPT[2]}},
        {"conversations": SHAREGPT[:2], "chosen": [SHAREGPT[2]], "rejected": "ho"},
        {"system": "be brief", "conversations": SHAREGPT[1:2], "chosen": "ho", "rejected": "ho"},
        {"chosen": SHAREGPT, "rejected": CHAT},
        {"prompt": CHAT[:2], "chosen": CHAT[2], "rejected": CHAT[2]},
    ],
)
def test_pairs_of_sharegpt_are_the_documents_of_the_chat(tmp_path, tokenizer, row):
    section = DataSection(source=written(tmp_path, row))
    (pair,) = PairDataset.read(
        section.source, None, ChatTokenizer(tokenizer, section), section
    ).pairs
    for document in pair.documents:
        text = tokenizer.decode(document.input_ids)
        assert text == "<|bos|><|system|>be brief<|user|>hi<|assistant|>ho<|eos|>"
        assert document.loss_weight.sum() == 3


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "response": "b"}, True),
        ({"prompt": "a", "answer": "b"}, True),
        ({"prompt": "a", "reward_model": {"ground_truth": "b"}}, False),
        ({"messages": CHAT}, True),
        ({"messages": CHAT[:2]}, False),
        ({"conversations": SHAREGPT}, True),
    ],
)
def test_rows_with_responses_are_told_from_those_without(tmp_path, row, expected):
    rows = read_rows(written(tmp_path, row))
    assert have_responses(rows, ColumnsSection()) is expected


# --- files --------------------------------------------------------------------------------------


def write_file(path, rows=ROWS):
    """Write ``rows`` in the format that the name says."""
    suffixes = path.suffixes
    if suffixes[0] == ".jsonl":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    elif suffixes[0] == ".json":
        text = json.dumps(rows, indent=1)
    else:
        import io

        buffer = io.StringIO(newline="")
        out = csv.DictWriter(buffer, list(rows[0]))
        out.writeheader()
        out.writerows(rows)
        text = buffer.getvalue()
    data = text.encode()
    path.write_bytes(gzip.compress(data) if suffixes[-1] == ".gz" else data)
    return str(path)


FILES = ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz", "a.json.gz", "a.csv.gz"]


@pytest.mark.parametrize("name", FILES)
def test_every_file_gives_the_same_rows(tmp_path, name):
    path = write_file(tmp_path / name)
    rows = read_rows(path)
    assert [dict(row.values) for row in rows] == ROWS
    assert [(row.file, row.number) for row in rows] == [(path, 1), (path, 2)]
    (first, _) = examples(path)
    assert first.messages[1]["content"] == 'say "c"\nd'
    assert [dict(row.values) for row in read_rows(str(tmp_path))] == ROWS


@pytest.mark.parametrize("name", FILES)
def test_an_empty_file_is_named(tmp_path, name):
    data = {".json": b"[]", ".csv": b"prompt,response\r\n"}.get("." + name.split(".")[1], b"\n")
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(DataError, match="the file is empty"):
        read_rows(str(path))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
@pytest.mark.parametrize("damage", ["cut", "plain", "flipped"])
def test_a_damaged_gzip_file_is_named(tmp_path, name, damage):
    path = tmp_path / name
    write_file(path)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[:-12]
    elif damage == "plain":
        data = bytearray(gzip.decompress(bytes(data)))
    else:
        data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(DataError) as caught:
        read_rows(str(path))
    assert caught.value.file == str(path)


@pytest.mark.parametrize(
    ("text", "row", "said"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"}\n', None, r"(?s)not JSON.*Extra data.*called \.jsonl"),
        ('{"data": []}', None, r"(?s)is a dict, not a list.*its keys: data"),
        ('[{"prompt": "a"}, 3]', 2, "the row is a int, not an object"),
        ('[{"prompt": "a", "prompt": "b"}]', None, "the key 'prompt' twice"),
        ('[{"prompt": "a"}', None, "the file is not JSON"),
        ('"a"', None, "is a str, not a list"),
        ('"\\ud800"', None, "half of a character"),
        ('{"a": "\\ud800"}', None, "half of a character"),
    ],
)
def test_a_json_file_that_is_no_list_of_rows(tmp_path, text, row, said):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=said) as caught:
        read_rows(str(path))
    assert (caught.value.file, caught.value.row) == (str(path), row)


@pytest.mark.parametrize(
    ("data", "row", "said"),
    [
        (b"prompt,response\na,b\nc\n", 2, "(?s)expected 2 values, got 1.*prompt, response"),
        (b"prompt,response\na,b,c\n", 1, "expected 2 values, got 3"),
        (b'prompt,response\n"a"b,c\n', 1, "the row is not CSV"),
        (b'prompt,response\na,"b\n', 1, "the row is not CSV"),
        (b"prompt,response\na,b\n\xff,c\n", 2, "the row is not UTF-8"),
        (b"\xff\n", None, "the header is not UTF-8"),
        (b"prompt,response\ra,b\r", None, "(?s)the header is not CSV.*with a line feed"),
    ],
)
def test_a_broken_row_of_csv_is_named(tmp_path, data, row, said):
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    with pytest.raises(DataError, match=said) as caught:
        read_rows(str(path))
    assert (caught.value.file, caught.value.row) == (str(path), row)


def test_two_columns_of_one_name_are_refused_in_csv(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,prompt\na,b\n")
    with pytest.raises(DataError, match="two columns of this name") as caught:
        read_rows(str(tmp_path / "a.csv"))
    assert caught.value.column == "prompt"


def test_csv_of_a_spreadsheet_with_long_texts_and_empty_cells(tmp_path):
    """A byte order mark, line ends of Windows, blank lines, and a text above Python's own limit."""
    text = "x" * 200_000
    data = f'prompt,answer\r\n"a\nb",\r\n\r\n{text},7\r\n'
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + data.encode())
    before = csv.field_size_limit()
    rows = read_rows(str(tmp_path / "a.csv"))
    assert csv.field_size_limit() == before
    assert [dict(row.values) for row in rows] == [
        {"prompt": "a\nb", "answer": None},
        {"prompt": text, "answer": "7"},
    ]
    assert [row.number for row in rows] == [1, 2]


def test_nulls_that_the_author_wrote_in_json_stay(tmp_path):
    path = tmp_path / "a.json"
    tool = {"name": "f", "default": None}
    path.write_text(json.dumps([{"messages": CHAT, "tools": [tool]}]))
    assert examples(str(path))[0].tools == [tool]


def test_in_a_folder_json_counts_only_where_there_is_no_other_data(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    written(tmp_path, {"prompt": "a"}, name="train.jsonl")
    assert len(read_rows(str(tmp_path))) == 1
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "config.json").unlink()
    (tmp_path / "dataset_infos.json").write_text("{}")
    write_file(tmp_path / "train.json.gz")
    write_file(tmp_path / "test.json.gz", ROWS[:1])
    assert len(read_rows(str(tmp_path), "train")) == 2
    with pytest.raises(DataError, match="several splits"):
        read_rows(str(tmp_path))


def test_an_unknown_compressed_file_is_refused_with_what_is_known(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"(?s)\.txt\.gz suffix.*\.jsonl\.gz.*\.csv\.gz"):
        read_rows(str(tmp_path / "a.txt.gz"))
