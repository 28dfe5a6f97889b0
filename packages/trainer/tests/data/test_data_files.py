from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_trainer.config.sections import ColumnsSection
from engine_trainer.data.layouts import to_examples
from engine_trainer.data.readers import read_rows
from engine_trainer.errors import DataError


@pytest.fixture
def jsonl(tmp_path):
    def write(*lines, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return str(path)

    return write


def examples(path, need="response", **columns):
    return to_examples(read_rows(path), ColumnsSection(**columns), need)


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize(
    ("row", "messages", "answer"),
    [
        ({"messages": CHAT}, CHAT, None),
        ({"prompt": "hi", "response": "ho"}, CHAT, None),
        ({"prompt": CHAT[:1], "completion": "ho"}, CHAT, None),
        (
            {"question": "hi", "answer": "so\n#### 1,000"},
            [CHAT[0], {"role": "assistant", "content": "so\n#### 1,000"}],
            "1,000",
        ),
        ({"problem": "hi", "solution": "ho", "answer": 7}, CHAT, "7"),
        (
            {"instruction": "Add.", "input": "1, 2", "output": "3"},
            [{"role": "user", "content": "Add.\n\n1, 2"}, {"role": "assistant", "content": "3"}],
            None,
        ),
        ({"instruction": "hi", "input": "", "output": "ho"}, CHAT, None),
        ({"instruction": "hi", "input": None, "output": "ho"}, CHAT, None),
    ],
)
def test_the_usual_layouts_for_sft(jsonl, row, messages, answer):
    (example,) = examples(jsonl(row))
    assert (example.messages, example.answer) == (messages, answer)


def test_the_usual_layouts_for_rl(tmp_path, jsonl):
    row = {
        "data_source": "math_dapo",
        "prompt": CHAT[:1],
        "reward_model": {"ground_truth": "34", "style": "rule"},
        "extra_info": {"index": 5},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "dapo.parquet")
    (verl,) = examples(str(tmp_path / "dapo.parquet"), "prompt")
    assert (verl.messages, verl.answer) == (CHAT[:1], "34")
    assert verl.metadata == {"data_source": "math_dapo", "extra_info": {"index": 5}}
    (aime,) = examples(jsonl({"ID": "2024-I-1", "Problem": "hi", "Answer": 204}), "prompt")
    assert (aime.messages, aime.answer, aime.metadata) == (CHAT[:1], "204", {"ID": "2024-I-1"})
    (gsm8k,) = examples(jsonl({"question": "hi", "answer": "x #### 5"}), "prompt")
    assert (gsm8k.messages, gsm8k.answer) == (CHAT[:1], "5")


def test_the_input_of_an_instruction_is_part_of_what_is_asked(jsonl):
    path = jsonl({"instruction": "Add.", "input": "1, 2", "output": "3", "id": 7})
    for columns in ({}, {"prompt": "instruction"}):
        (asked,) = examples(path, "prompt", **columns)
        assert asked.messages == [{"role": "user", "content": "Add.\n\n1, 2"}]
        assert asked.metadata == {"output": "3", "id": 7}
    with pytest.raises(DataError, match="list, not text") as caught:
        examples(jsonl({"instruction": "Add.", "input": [1, 2], "output": "3"}))
    assert caught.value.column == "input"


def test_a_completion_of_messages_follows_the_prompt_which_is_given(jsonl):
    path = jsonl(
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"prompt": "hi", "completion": CHAT[1:]},
        {"prompt": [*CHAT, CHAT[0]], "completion": "ho"},
    )
    first, second, third = examples(path)
    assert first.messages == second.messages == CHAT
    assert (first.given, second.given) == (1, 1)
    assert (third.messages, third.given) == ([*CHAT, *CHAT], 3)


@pytest.mark.parametrize("completion", [CHAT, [], 3, ["ho"]])
def test_a_completion_that_does_not_follow_the_prompt_is_refused(jsonl, completion):
    with pytest.raises(DataError) as caught:
        examples(jsonl({"prompt": CHAT[:1], "completion": completion}))
    assert caught.value.column == "completion"


def test_an_answer_that_is_a_number_is_written_without_its_type(tmp_path):
    """What JSON or pandas makes a float of, for a null in its column, is still a whole number."""
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": [42.0, -0.5]}), tmp_path / "a.parquet")
    assert [e.answer for e in examples(str(tmp_path / "a.parquet"), "prompt")] == ["42", "-0.5"]


@pytest.mark.parametrize("answer", ["NaN", "Infinity"])
def test_an_answer_that_is_no_number_is_refused(jsonl, answer):
    path = jsonl({"prompt": "a", "answer": 1.5}, f'{{"prompt": "a", "answer": {answer}}}')
    with pytest.raises(DataError, match="is not an answer") as caught:
        examples(path, "prompt")
    assert (caught.value.row, caught.value.column) == (2, "answer")


def test_a_prompt_that_ends_with_an_answer_is_refused_where_it_would_be_left_out(jsonl):
    path = jsonl({"prompt": CHAT, "answer": "7"})
    with pytest.raises(
        DataError, match=r"(?s)ends with the assistant.*data.columns.messages=prompt"
    ) as caught:
        examples(path, "prompt")
    assert (caught.value.row, caught.value.column) == (1, "prompt")
    (asked,) = examples(path, "prompt", messages="prompt")
    assert asked.prompt == CHAT[:1]


def test_columns_can_be_named_and_nested(jsonl):
    (example,) = examples(
        jsonl({"in": "hi", "out": "ho", "meta": {"gold": "9"}}),
        prompt="in",
        response="out",
        answer="meta.gold",
    )
    assert (example.messages, example.answer) == (CHAT, "9")


def test_nulls_that_parquet_adds_to_messages_are_dropped(tmp_path):
    turns = [
        {"role": "user", "content": "hi", "name": None},
        {"role": "assistant", "content": "ho", "name": "a"},
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": turns}]), tmp_path / "a.parquet")
    (example,) = examples(str(tmp_path / "a.parquet"))
    assert example.messages[0] == CHAT[0]


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
}


@pytest.mark.parametrize("given", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_tools_may_be_json_texts(tmp_path, jsonl, given):
    row = {"messages": CHAT, "tools": given}
    (example,) = examples(jsonl(row))
    assert example.tools == [TOOL]
    pq.write_table(
        pa.Table.from_pylist([row, {"messages": CHAT, "tools": None}]), tmp_path / "t.parquet"
    )
    with_tool, without = examples(str(tmp_path / "t.parquet"))
    assert (with_tool.tools, without.tools) == ([TOOL], [])


@pytest.mark.parametrize("given", ["", "[]", "null", [], None])
def test_no_tools_are_written_in_many_ways(jsonl, given):
    (example,) = examples(jsonl({"prompt": "hi", "tools": given, "response": "ho"}))
    assert example.tools == []


@pytest.mark.parametrize("given", ["hammer", '[{"type": "fun', '"add"', [3], {"add": 1}, '["add"]'])
def test_malformed_tools_are_refused_by_row(jsonl, given):
    path = jsonl({"messages": CHAT}, {"messages": CHAT, "tools": given})
    with pytest.raises(DataError) as caught:
        examples(path)
    assert (caught.value.file, caught.value.row, caught.value.column) == (path, 2, "tools")


def test_nulls_that_parquet_adds_within_tools_and_calls_are_dropped(tmp_path, jsonl):
    calls = [
        {"function": {"name": n, "arguments": a}}
        for n, a in (("add", {"a": 1}), ("say", {"text": "hi"}))
    ]
    turns = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": calls}]
    tools = [
        TOOL,
        {"type": "function", "function": {"name": "say", "parameters": {"required": ["text"]}}},
    ]
    pq.write_table(
        pa.Table.from_pylist([{"messages": turns, "tools": tools}]), tmp_path / "a.parquet"
    )
    (example,) = examples(str(tmp_path / "a.parquet"))
    assert (example.messages, example.tools) == (turns, tools)
    calls[0]["function"]["arguments"]["a"] = (
        None  # nobody has filled JSONL up: what is null there was meant
    )
    (example,) = examples(jsonl({"messages": turns}))
    assert example.messages == turns


@pytest.mark.parametrize(
    ("second", "column", "said"),
    [
        ('{"prompt": "a", "resp', None, "not JSON"),
        ("[1]", None, "not an object"),
        ({"prompt": "a"}, "response", "missing or null"),
        ({"prompt": "a", "response": None}, "response", "missing or null"),
        ({"prompt": 3, "response": "b"}, "prompt", "int, not text"),
        ({"prompt": [{"role": "wizard", "content": "a"}], "response": "b"}, "prompt", "known role"),
        ({"prompt": [{"role": "user"}], "response": "b"}, "prompt", "without text"),
    ],
)
def test_a_broken_row_is_named_with_file_line_and_column(jsonl, second, column, said):
    path = jsonl({"prompt": "a", "response": "b"}, "", second)  # the blank line counts
    with pytest.raises(DataError, match=said) as caught:
        examples(path)
    assert (caught.value.file, caught.value.row, caught.value.column) == (path, 3, column)


def test_a_null_in_the_first_row_does_not_choose_other_columns(jsonl):
    path = jsonl(
        {"problem": "hi", "solution": "so it is", "answer": None},
        {"problem": "hi", "solution": "ho", "answer": "7"},
    )
    # The answers were taken from `solution`.
    with pytest.raises(DataError, match="missing or null") as caught:
        examples(path, "prompt")
    assert (caught.value.row, caught.value.column) == (1, "answer")
    first, second = examples(path)  # SFT reads no answer
    assert (first.answer, second.answer) == (None, "7")
    assert first.messages[1]["content"] == "so it is"


def test_a_column_that_is_null_throughout_is_not_there(tmp_path):
    rows = [{"messages": None, "prompt": "hi", "response": "ho", "answer": None}] * 2
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [(e.messages, e.answer) for e in examples(str(tmp_path / "a.parquet"))] == [
        (CHAT, None)
    ] * 2


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize(
    ("odd", "column"),
    [
        ({"messages": CHAT}, "question"),
        ({"prompt": "hi", "response": "ho"}, "question"),
        ({"question": "hi", "response": "ho"}, "answer"),
        ({"question": None, "answer": "ho", "messages": CHAT}, "question"),
    ],
)
def test_an_odd_row_is_blamed_itself(jsonl, at, odd, column):
    rows = [{"question": "hi", "answer": "ho"} for _ in range(5)]
    rows.insert(at, odd)
    with pytest.raises(DataError, match="missing or null") as caught:
        examples(jsonl(*rows))
    assert (caught.value.row, caught.value.column) == (at + 1, column)
    filled = ", ".join(name for name, value in odd.items() if value is not None)
    assert caught.value.why == f"this row has: {filled}"
    rows = [{"messages": CHAT} for _ in range(5)]
    rows.insert(at, {"prompt": "hi", "response": "ho"})
    with pytest.raises(DataError, match="missing or null") as caught:
        examples(jsonl(*rows))
    assert (caught.value.row, caught.value.column) == (at + 1, "messages")


def test_a_column_that_is_named_is_not_doubted_for_its_few_rows(jsonl):
    path = jsonl({"question": "hi", "response": "ho"}, *[{"messages": CHAT}] * 2)
    with pytest.raises(DataError, match="missing or null") as caught:
        examples(path, prompt="question", response="response")
    assert (caught.value.row, caught.value.column) == (2, "question")


def test_a_missing_column_is_named_with_those_that_are_there(jsonl):
    with pytest.raises(DataError, match="columns: text, label") as caught:
        examples(jsonl({"text": "a", "label": 1}))
    assert caught.value.column == "prompt"
    assert "data.columns.prompt" in caught.value.remedy


def test_files_that_are_absent_empty_foreign_or_cut_short(tmp_path, jsonl):
    for path, said in [
        (str(tmp_path / "no.jsonl"), "no such file"),
        (jsonl(name="e.jsonl"), "empty"),
        (jsonl("a", name="a.txt"), "suffix"),
    ]:
        with pytest.raises(DataError, match=said):
            read_rows(path)
    whole = tmp_path / "w.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 1000}), whole)
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(DataError, match="not readable parquet"):
        read_rows(str(tmp_path / "cut.parquet"))


def test_bad_utf8_is_a_broken_line(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(DataError, match="not UTF-8") as caught:
        read_rows(str(tmp_path / "x.jsonl"))
    assert caught.value.row == 1


TEXTS = {
    "jsonl": '{"prompt": "ä", "response": "b"}\n',
    "json": '[{"prompt": "ä", "response": "b"}]',
    "csv": "prompt,response\nä,b\n",
}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "jsonl.gz"])
@pytest.mark.parametrize(
    ("codec", "name"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-32", "UTF-32"),
        ("utf-32-le", "UTF-32LE"),
        ("latin-1", "LATIN1"),
    ],
)
def test_a_file_in_another_encoding_is_converted_by_the_command_of_its_error(
    tmp_path, suffix, codec, name
):
    # A shell would take the name for two.
    path = tmp_path / f"my rows.{suffix}"
    opened = gzip.open if suffix.endswith(".gz") else open
    with opened(path, "wb") as file:
        file.write(TEXTS[suffix.removesuffix(".gz")].encode(codec))
    with pytest.raises(DataError) as caught:
        read_rows(str(path))
    assert (f"got {name}" in caught.value.what) == (codec != "latin-1")
    command = re.search(r"(gzip|iconv) .*", caught.value.remedy)[0]
    assert f"-f {name} -t UTF-8" in command
    if shutil.which("iconv"):
        subprocess.run(["/bin/sh", "-c", command], check=True)
        (row,) = read_rows(str(tmp_path / f"my rows-utf8.{suffix.removesuffix('.gz')}"))
        assert row.values == {"prompt": "ä", "response": "b"}


def test_zeros_that_a_crash_leaves_are_no_encoding(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\0" * 64)
    with pytest.raises(DataError, match="not JSON"):
        read_rows(str(tmp_path / "x.jsonl"))


@pytest.mark.parametrize(
    ("name", "text", "column"),
    [
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": "a\\ud800"}\n', "prompt"),
        ("x.jsonl", '{"prompt": "a"}\n{"a": [{"b": "\\uDC00"}]}\n', "a"),
        ("x.json", '[{"prompt": "a"}, {"prompt": "a\\ud800"}]', "prompt"),
        ("x.json", '[{"prompt": "a"}, {"\\ud800": "a"}]', None),
        ("x.jsonl", '{"prompt": "a"}\n["\\ud800"]\n', None),
    ],
)
def test_half_of_a_surrogate_pair_is_named_with_its_row_and_column(tmp_path, name, text, column):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="half of a character") as caught:
        read_rows(str(tmp_path / name))
    assert (caught.value.file, caught.value.row) == (str(tmp_path / name), 2)
    assert caught.value.column == column
    str(caught.value).encode("utf-8")


def test_a_whole_surrogate_pair_is_a_character(jsonl):
    (row,) = read_rows(jsonl({"prompt": "\N{GRINNING FACE}"}))
    assert row.values["prompt"] == "\N{GRINNING FACE}"


def test_a_folder_of_several_splits_needs_one_named(tmp_path, jsonl):
    (tmp_path / "main").mkdir()
    for name in ("main/train-0.jsonl", "main/train-1.jsonl", "main/test-0.jsonl"):
        jsonl({"prompt": name, "response": "b"}, name=name)
    assert [r.values["prompt"] for r in read_rows(str(tmp_path), "train")] == [
        "main/train-0.jsonl",
        "main/train-1.jsonl",
    ]
    with pytest.raises(DataError, match="several splits"):
        read_rows(str(tmp_path))
    with pytest.raises(DataError, match="no data file of split 'dev'"):
        read_rows(str(tmp_path), "dev")


def names(folder, split=None):
    return [Path(row.file).relative_to(folder).as_posix() for row in read_rows(str(folder), split)]


def test_a_split_is_its_own_files_and_not_those_whose_names_begin_like_it(tmp_path, jsonl):
    for name in ("train.jsonl", "train_small.jsonl", "test.jsonl", "testing-notes.jsonl"):
        jsonl({"prompt": name, "response": "b"}, name=name)
    assert names(tmp_path, "train") == ["train.jsonl"]
    assert names(tmp_path, "train_small") == ["train_small.jsonl"]
    assert names(tmp_path, "test") == ["test.jsonl"]


def test_splits_whose_names_begin_alike_are_told_apart(tmp_path, jsonl):
    shards = [
        f"{name}-0000{i}-of-00002{mark}"
        for name, mark in (("train_prefs", "-a09b74b3ef9c3b56"), ("train_sft", ""))
        for i in range(2)
    ]
    for name in shards:
        jsonl({"prompt": name, "response": "b"}, name=f"{name}.jsonl")
    with pytest.raises(DataError, match=r"(?s)several.*train_prefs.*train_sft.*data.split"):
        read_rows(str(tmp_path), "train")
    assert names(tmp_path, "train_prefs") == [f"{name}.jsonl" for name in shards[:2]]


def test_a_split_of_a_single_file_is_said_to_do_nothing(jsonl, caplog):
    path = jsonl({"prompt": "a", "response": "b"}, name="train.jsonl")
    assert len(read_rows(path, "test")) == 1
    assert f"split 'test' has no effect: {path} is a single file" in caplog.text
    caplog.clear()
    read_rows(path, "train")
    read_rows(path)
    assert not caplog.text


@pytest.mark.parametrize("name", ["trian.jsonl", "train.json", "train"])
def test_a_misspelt_file_is_told_its_near_matches(tmp_path, jsonl, name):
    jsonl({"prompt": "a", "response": "b"}, name="train.jsonl")
    with pytest.raises(DataError, match=r"did you mean .*train\.jsonl") as caught:
        read_rows(str(tmp_path / name))
    assert "no such file" in caught.value.what


def test_a_split_may_be_a_folder(tmp_path, jsonl):
    for name in ("train/0.jsonl", "train/1.jsonl", "validation/0.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        jsonl({"prompt": name, "response": "b"}, name=name)
    assert names(tmp_path, "train") == ["train/0.jsonl", "train/1.jsonl"]
    with pytest.raises(DataError, match="several splits"):
        read_rows(str(tmp_path))


def test_calls_of_tools_may_be_json_texts(jsonl):
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    for given in ([call], json.dumps([call]), [json.dumps(call)]):
        turns = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": given}]
        (example,) = examples(jsonl({"messages": turns}))
        assert example.messages[-1]["tool_calls"] == [call]
    with pytest.raises(DataError, match="tool_calls"):
        examples(
            jsonl(
                {"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": "[1]"}]}
            )
        )


def test_data_sets_side_by_side_are_not_mixed(tmp_path, jsonl):
    for name in ("main/train-0.jsonl", "socratic/train-0.jsonl"):
        (tmp_path / name).parent.mkdir()
        jsonl({"prompt": name, "response": "b"}, name=name)
    with pytest.raises(DataError, match=r"(?s)several data sets.*main.*socratic.*name one"):
        read_rows(str(tmp_path), "train")
    assert len(read_rows([str(tmp_path / "main"), str(tmp_path / "socratic")], "train")) == 2


def test_one_data_set_in_two_formats_is_not_read_twice(tmp_path, jsonl):
    jsonl({"prompt": "a", "response": "b"}, name="rows.jsonl")
    pq.write_table(pa.table({"prompt": ["a"], "response": ["b"]}), tmp_path / "rows.parquet")
    with pytest.raises(
        DataError, match=r"(?s)more than one format.*rows.jsonl.*rows.parquet.*name one"
    ):
        read_rows(str(tmp_path))


@pytest.mark.parametrize("other", ["held_out.jsonl", "heldout-0.jsonl", "dev.jsonl"])
def test_what_is_held_out_is_not_trained_on(tmp_path, jsonl, other):
    for name in ("rows.jsonl", other):
        jsonl({"prompt": name, "response": "b"}, name=name)
    with pytest.raises(DataError, match=f"(?s)several splits.*{other}.*as the source"):
        read_rows(str(tmp_path))


def test_files_of_other_layouts_are_not_mixed(tmp_path, jsonl):
    jsonl({"question": "hi", "answer": "ho"}, name="a.jsonl")
    jsonl({"question": "hi", "answer": "7", "solution": "ho"}, name="b.jsonl")
    with pytest.raises(
        DataError,
        match=r"(?s)columns of the file differ.*a.jsonl: prompt question"
        r".*b.jsonl: prompt question.*name one",
    ) as caught:
        examples(str(tmp_path))
    assert caught.value.file.endswith("b.jsonl")
    jsonl({"question": "hi", "answer": "ho", "more": 1}, name="b.jsonl")
    assert [e.messages for e in examples(str(tmp_path))] == [CHAT, CHAT]
