from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_trainer.config.sections import ColumnsSection, DataSection
from engine_trainer.data import ChatTokenizer
from engine_trainer.data.labelled import LabelledDataset
from engine_trainer.errors import DataError

USER, GOOD = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"})
LAYOUTS = {
    "texts": {"prompt": "hi", "completion": "yes", "label": True},
    "question": {"question": "hi", "response": "yes", "label": True},
    "messages": {"prompt": [USER], "completion": [GOOD], "label": True},
    "mixed": {"prompt": [USER], "completion": "yes", "label": True},
    "conversation": {"messages": [USER, GOOD], "label": True},
    "numbers": {"prompt": "hi", "completion": "yes", "label": 1},
    "words": {"prompt": "hi", "completion": "yes", "label": "True"},
}


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(source: str, tokenizer, *, context=None, label="label", **section) -> LabelledDataset:
    given = DataSection(source=source, **section)
    return LabelledDataset.read(
        source, None, ChatTokenizer(tokenizer, given), given, label=label, context=context
    )


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_layout_gives_the_same_document(tmp_path, tokenizer, name, kind):
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        write(path, LAYOUTS[name])
    else:
        pq.write_table(pa.Table.from_pylist([LAYOUTS[name]]), path)
    (row,) = read(str(path), tokenizer).rows
    # bos, <|user|>, h, i, <|assistant|>, then three letters and the end of the turn
    assert tokenizer.decode(row.document.input_ids[5:8]) == "yes"
    assert row.document.loss_weight.tolist() == [0.0] * 5 + [1.0] * 4
    assert (row.split, row.desirable) == (5, True)


def test_a_table_without_booleans(tmp_path, tokenizer):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion,label\nhi,yes,true\nhi,no,FALSE\nhi,ho,0\n")
    dataset = read(str(path), tokenizer)
    assert [row.desirable for row in dataset.rows] == [True, False, False]
    assert dataset.counts == (1, 2)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"label": None}, r"the label is missing or null(?s:.)*kto\.label"),
        ({"label": "good"}, r"expected true or false, got 'good'"),
        ({"label": 0.5}, r"expected true or false, got 0\.5(?s:.)*threshold"),
        ({"label": -1}, r"expected true or false, got -1"),
        ({"label": [True]}, r"expected true or false, got \[True\]"),
        ({"completion": None}, r"column 'completion'"),
        ({"prompt": None}, r"column 'prompt'"),
        ({"completion": [USER]}, r"begins with a turn of the user"),
    ],
)
def test_a_row_that_lacks_something_is_named(tmp_path, tokenizer, row, text):
    good = {"prompt": "hi", "completion": "yes", "label": False}
    source = write(tmp_path / "rows.jsonl", good, good | row)
    with pytest.raises(DataError, match=text) as caught:
        read(source, tokenizer)
    assert (caught.value.file, caught.value.row) == (source, 2)


def test_another_column_may_have_the_label(tmp_path, tokenizer):
    row = {"prompt": "hi", "completion": "yes", "liked": False, "label": "any text"}
    source = write(tmp_path / "rows.jsonl", row)
    assert not read(source, tokenizer, label="liked").rows[0].desirable
    columns = ColumnsSection(prompt="completion", response="prompt")
    (turned,) = read(source, tokenizer, label="liked", columns=columns).rows
    assert tokenizer.decode(turned.document.input_ids[turned.split : -1]) == "hi"
    with pytest.raises(DataError, match="column 'thumb'"):
        read(source, tokenizer, label="thumb")


def test_to_say_nothing_may_be_undesirable(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", {"prompt": "hi", "completion": "", "label": False})
    (row,) = read(source, tokenizer).rows
    assert row.document.loss_weight.sum() == 1  # the token that ends the turn


def test_a_prompt_with_the_completion_of_another_row(tmp_path, tokenizer):
    long = [{"role": "user", "content": "hello"}, GOOD, {"role": "user", "content": "you"}]
    source = write(
        tmp_path / "a.jsonl",
        {"prompt": "hi", "completion": "yes", "label": True},
        {"prompt": long, "completion": "nothing", "label": False},
    )
    first, second = read(source, tokenizer).rows
    mixed = first.with_completion_of(second, None)
    assert mixed.input_ids[:5].tolist() == first.document.input_ids[:5].tolist()
    assert tokenizer.decode(mixed.input_ids[5:-1]) == "nothing"
    assert mixed.loss_weight.tolist() == [0.0] * 5 + [1.0] * 8
    # A turn of the assistant in the prompt carries no loss in either.
    other = second.with_completion_of(first, None)
    assert other.loss_weight.sum() == 4
    assert other.input_ids[: second.split].tolist() == second.document.input_ids[:-8].tolist()
    own = second.with_completion_of(second, len(second))
    assert own.input_ids.tolist() == second.document.input_ids.tolist()
    short = first.with_completion_of(second, 7)
    assert (len(short), short.loss_weight.sum()) == (7, 2)


def test_rows_that_are_too_long(tmp_path, tokenizer, caplog):
    good = {"prompt": "hi", "completion": "yes", "label": True}
    source = write(tmp_path / "a.jsonl", good, good | {"completion": "yes" * 9}, good)
    with pytest.raises(DataError, match=r"33 tokens in the document, but the context has 20") as e:
        read(source, tokenizer, context=20)
    assert e.value.row == 2
    with pytest.raises(DataError, match="33 tokens in the document"):
        read(source, tokenizer, context=20, on_too_long="truncate")
    dataset = read(source, tokenizer, context=20, on_too_long="drop")
    assert (len(dataset), dataset.dropped, dataset.limit) == (2, 1, 20)
    assert "1 of 3 rows are too long and were dropped" in caplog.text
