from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_trainer.config.sections import ColumnsSection, DataSection
from engine_trainer.data import ChatTokenizer
from engine_trainer.data.preferences import PairDataset
from engine_trainer.errors import DataError

USER, GOOD, BAD = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "assistant", "content": "no!"},
)
LAYOUTS = {
    "texts": {"prompt": "hi", "chosen": "yes", "rejected": "no!"},
    "question": {"question": "hi", "chosen": "yes", "rejected": "no!"},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "mixed": {"prompt": [USER], "chosen": "yes", "rejected": "no!"},
    "conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "ultrafeedback": {
        "prompt": "hi",
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
        "score_chosen": 8.5,
    },
}


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(source: str, tokenizer, *, context=None, **section) -> PairDataset:
    given = DataSection(source=source, **section)
    return PairDataset.read(source, None, ChatTokenizer(tokenizer, given), given, context=context)


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_layout_gives_the_same_documents(tmp_path, tokenizer, name, kind):
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        write(path, LAYOUTS[name])
    else:
        pq.write_table(pa.Table.from_pylist([LAYOUTS[name]]), path)
    (pair,) = read(str(path), tokenizer).pairs
    for document, text in ((pair.chosen, "yes"), (pair.rejected, "no!")):
        # bos, <|user|>, h, i, <|assistant|>, then three letters and the end of the turn
        assert tokenizer.decode(document.input_ids[5:8]) == text
        assert document.input_ids[-1] == tokenizer.eos_token_id
        assert document.loss_weight.tolist() == [0.0] * 5 + [1.0] * 4
    assert pair.chosen.input_ids[:5].tolist() == pair.rejected.input_ids[:5].tolist()
    assert len(pair) == 18


@pytest.mark.parametrize("name", ["texts", "messages", "conversations"])
def test_tools_reach_the_template_in_every_layout(tmp_path, tokenizer_of, name):
    template = (
        "{% for t in tools or [] %}{{ t['name'] }}{% endfor %}"
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|eos|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer, row = tokenizer_of(template), LAYOUTS[name] | {"tools": '[{"name": "add"}]'}
    (pair,) = read(write(tmp_path / "a.jsonl", row), tokenizer).pairs
    for document in pair.documents:
        assert tokenizer.decode(document.input_ids).startswith("add<|user|>hi")


def test_to_say_nothing_may_be_what_was_rejected(tmp_path, tokenizer):
    row = {"chosen": [USER, GOOD], "rejected": [USER, BAD | {"content": ""}]}
    (pair,) = read(write(tmp_path / "a.jsonl", row), tokenizer).pairs
    assert pair.rejected.loss_weight.sum() == 1  # the token that ends the turn


def test_without_a_template(tmp_path, tokenizer_of):
    (pair,) = read(write(tmp_path / "a.jsonl", LAYOUTS["texts"]), tokenizer_of(None)).pairs
    assert pair.chosen.loss_weight.tolist() == [0, 0, 1, 1, 1, 1]


def test_another_prompt_column(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", {"asked": "hi", "chosen": "yes", "rejected": "no!"})
    assert len(read(source, tokenizer, columns=ColumnsSection(prompt="asked"))) == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "hi", "chosen": "yes"}, "column 'rejected'"),
        ({"prompt": "hi", "chosen": "yes", "rejected": None}, "column 'rejected'"),
        ({"prompt": "hi", "chosen": 3, "rejected": "no"}, "neither a text nor a list of messages"),
        ({"prompt": "hi", "chosen": [], "rejected": "no"}, "neither a text nor a list of messages"),
        ({"chosen": "\n\nHuman: hi\n\nAssistant: yes", "rejected": "no"}, "no prompt column"),
        (
            {"chosen": [USER], "rejected": [USER, BAD]},
            "does not end with an answer|no assistant turn",
        ),
        (
            {"chosen": [USER, {"role": "helper", "content": "x"}], "rejected": [USER, BAD]},
            "known role",
        ),
    ],
)
def test_a_row_of_no_use_is_named(tmp_path, tokenizer, row, said):
    source = write(tmp_path / "a.jsonl", LAYOUTS["texts"], row)
    with pytest.raises(DataError, match=rf"(?s)a\.jsonl:2.*({said})|({said}).*a\.jsonl:2"):
        read(source, tokenizer)


def test_long_pairs(tmp_path, tokenizer, caplog):
    long = {"prompt": "hi", "chosen": "yes" * 5, "rejected": "no!"}
    source = write(tmp_path / "a.jsonl", LAYOUTS["texts"], long)
    with pytest.raises(DataError, match=r"21 tokens.*data.max_length is 10"):
        read(source, tokenizer, max_length=10)
    dropped = read(source, tokenizer, max_length=10, on_too_long="drop")
    assert (len(dropped), dropped.dropped) == (1, 1)
    assert "1 of 2 pairs are too long and were dropped: data.max_length is 10" in caplog.text
    with pytest.raises(DataError, match="all 2 pairs"):
        read(source, tokenizer, max_length=3, on_too_long="drop")


def test_pairs_longer_than_the_models_context(tmp_path, tokenizer):
    long = {"prompt": "hi", "chosen": "yes" * 5, "rejected": "no!"}
    source = write(tmp_path / "a.jsonl", LAYOUTS["texts"], long)
    with pytest.raises(DataError, match=r"(?s)a\.jsonl:2.*21 tokens.*the context has 10"):
        read(source, tokenizer, max_length=1000, context=10)
    assert read(source, tokenizer, context=10, on_too_long="drop").dropped == 1
