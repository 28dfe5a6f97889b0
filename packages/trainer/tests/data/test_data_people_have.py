"""The layouts of widely used data sets, row by row as their files have them, and file sources."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_trainer.config.sections import ColumnsSection
from engine_trainer.data.layouts import to_examples
from engine_trainer.data.readers import read_rows
from engine_trainer.errors import DataError
from engine_trainer.rewards import Sample, create

# Columns, types and texts as in the parquet files on the hub.
GSM8K = {
    "question": "Natalia sold clips to 48 of her friends in April, "
    "and then she sold half as many clips in May. How many?",
    "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72",
}
MATH = {  # EleutherAI/hendrycks_math: no answer of its own, the solution boxes it
    "problem": "Compute $\\dbinom{5}{3}$.",
    "level": "Level 1",
    "type": "Counting & Probability",
    "solution": "$\\dbinom{5}{3}=\\dfrac{5\\times 4}{2\\times 1}=\\boxed{10}.$",
}
MATH_500 = {
    "problem": "Convert $(0,3)$ to polar coordinates.",
    "solution": "… is $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.$",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}
DAPO = {  # BytedTsinghua-SIA/DAPO-Math-17k
    "data_source": "math_dapo",
    "prompt": [
        {
            "content": "Solve the following math problem step by step. "
            "The last line … Answer: $Answer …\n\nIn triangle…",
            "role": "user",
        }
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
AIME_VERL = {  # BytedTsinghua-SIA/AIME-2024
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve … Every morning Aya goes for a walk…", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "204", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": 0, "raw_problem": "Every morning Aya…", "split": None},
}
AIME_H4 = {  # HuggingFaceH4/aime_2024
    "id": 60,
    "problem": "Every morning Aya goes for a walk…",
    "solution": "9 - t(s+2.4)… \\boxed{204}",
    "answer": "204",
    "url": "https://artofproblemsolving.com/wiki/index.php/2024_AIME_I_Problems/Problem_1",
    "year": "2024",
}
AIME_JIA = {
    "ID": "2024-II-4",
    "Problem": "Let $x,y$ and $z$ be…",
    "Solution": "Denote … 25 + 8 = 033",
    "Answer": 33,
}
# math-ai/aime25
AIME_2025 = {"problem": "Find the sum of all integer bases $b>9$…", "answer": "70", "id": "0"}
GSM8K_VERL = {  # what verl's examples make of it
    "data_source": "openai/gsm8k",
    "prompt": [{"content": "Natalia… Let's think step by step.", "role": "user"}],
    "ability": "math",
    "reward_model": {"ground_truth": "72", "style": "rule"},
    "extra_info": {
        "answer": GSM8K["answer"],
        "index": 0,
        "question": GSM8K["question"],
        "split": "train",
    },
}


@pytest.mark.parametrize(
    ("row", "answer", "reward", "right"),
    [
        pytest.param(GSM8K, "72", "gsm8k", "so\n#### 72", id="gsm8k"),
        pytest.param(MATH, MATH["solution"], "math", r"\boxed{10}", id="math"),
        pytest.param(MATH_500, MATH_500["answer"], "math", r"\boxed{(3, \pi/2)}", id="math-500"),
        pytest.param(DAPO, "34", "math", "Answer: 34", id="dapo"),
        pytest.param(AIME_VERL, "204", "math", r"$\boxed{204}$", id="aime-verl"),
        pytest.param(AIME_H4, "204", "math", r"\boxed{204}", id="aime-h4"),
        pytest.param(AIME_JIA, "33", "math", r"\boxed{033}", id="aime-jia"),
        pytest.param(AIME_2025, "70", "math", r"\boxed{70}", id="aime-2025"),
        pytest.param(GSM8K_VERL, "72", "gsm8k", "#### 72", id="gsm8k-verl"),
    ],
)
def test_a_prompt_its_answer_and_a_reward_that_knows_it(tmp_path, row, answer, reward, right):
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "rows.parquet")
    example, _ = to_examples(read_rows(str(tmp_path / "rows.parquet")), ColumnsSection(), "prompt")
    (turn,) = example.messages
    question = next(
        row[name] for name in ("prompt", "question", "problem", "Problem") if name in row
    )
    assert turn == {
        "role": "user",
        "content": question if isinstance(question, str) else question[0]["content"],
    }
    assert example.answer == answer
    judge = create(reward)
    assert judge(Sample(prompt="", completion=right, answer=example.answer)) == 1.0
    assert (
        judge(
            Sample(
                prompt="",
                completion=right.replace("2", "1").replace("3", "5").replace("0", "6"),
                answer=example.answer,
            )
        )
        == 0.0
    )


@pytest.mark.parametrize(
    ("row", "response"),
    [
        (GSM8K, GSM8K["answer"]),
        (MATH, MATH["solution"]),
        (MATH_500, MATH_500["solution"]),
        (AIME_JIA, AIME_JIA["Solution"]),
    ],
)
def test_what_sft_learns_of_them(tmp_path, row, response):
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (example,) = to_examples(
        read_rows(str(tmp_path / "rows.parquet")), ColumnsSection(), "response"
    )
    assert example.messages[1] == {"role": "assistant", "content": response}


def save_to_disk(folder, rows, shards=1, **state):
    """Save as datasets 5.2 does, with one arrow stream per shard and their names in state.json."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    for i, name in enumerate(names):
        table = pa.Table.from_pylist(rows[i * len(rows) // shards : (i + 1) * len(rows) // shards])
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=2)
    whole = {
        "_data_files": [{"filename": n} for n in names],
        "_fingerprint": "21d172953f08c34d",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(whole | state))
    (folder / "dataset_info.json").write_text("{}")


ROWS = [{"prompt": f"p{i}", "reward_model": {"ground_truth": str(i)}} for i in range(7)]


def prompts(path, split=None):
    return [row.values["prompt"] for row in read_rows(str(path), split)]


def test_a_folder_of_save_to_disk(tmp_path):
    save_to_disk(tmp_path / "d", ROWS, shards=2)
    assert prompts(tmp_path / "d") == [f"p{i}" for i in range(7)]
    rows = read_rows(str(tmp_path / "d"))
    assert rows[4].values["reward_model"]["ground_truth"] == "4"
    assert (rows[4].file.rpartition("/")[2], rows[4].number) == ("data-00001-of-00002.arrow", 2)
    with pytest.raises(DataError, match="no split 'test'"):
        read_rows(str(tmp_path / "d"), "test")


def test_a_saved_dict_of_splits(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    save_to_disk(tmp_path / "d" / "train", ROWS, _split="train")
    save_to_disk(tmp_path / "d" / "test", ROWS[:2], _split="test")
    assert len(prompts(tmp_path / "d", "train")) == 7
    assert (
        prompts(tmp_path / "d", "test") == prompts(tmp_path / "d" / "test", "test") == ["p0", "p1"]
    )
    with pytest.raises(DataError, match="several splits"):
        read_rows(str(tmp_path / "d"))
    with pytest.raises(DataError, match=r"no split 'dev'\n.*it has train, test"):
        read_rows(str(tmp_path / "d"), "dev")


def test_a_saved_folder_that_is_not_whole(tmp_path):
    save_to_disk(tmp_path / "d", ROWS, shards=2)
    (tmp_path / "d" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"missing\n.*data-00001"):
        read_rows(str(tmp_path / "d"))
    first = tmp_path / "d" / "data-00000-of-00002.arrow"
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(DataError, match="not readable arrow"):
        read_rows(str(first))
    save_to_disk(tmp_path / "old", ROWS, _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match="index file"):
        read_rows(str(tmp_path / "old"))


def cached(root, repo, files):
    """A data set as huggingface_hub's cache keeps it after a download."""
    commit = "0" * 40
    folder = root / f"datasets--{repo.replace('/', '--')}"
    for name, rows in files.items():
        path = folder / "snapshots" / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: real(*a, **k, cache_dir=tmp_path)
    )
    return tmp_path


def test_a_name_on_the_hub_is_read_from_the_cache(offline):
    cached(
        offline,
        "openai/gsm8k",
        {
            "main/train-0.jsonl": ROWS,
            "main/test-0.jsonl": ROWS[:1],
            "socratic/train-0.jsonl": ROWS[:3],
        },
    )
    assert len(prompts("hf://datasets/openai/gsm8k/main", "train")) == 7
    assert len(prompts("hf://datasets/openai/gsm8k@main/main/test-0.jsonl")) == 1


def test_a_name_that_is_not_in_the_cache_says_how_to_get_it(offline):
    with pytest.raises(DataError, match=r"hf download openai/nothing --repo-type dataset"):
        read_rows("hf://datasets/openai/nothing")
    with pytest.raises(DataError, match="not a name"):
        read_rows("hf://openai")


def test_a_bare_hub_name_is_told_how_to_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"hf://datasets/openai/gsm8k"):
        read_rows("openai/gsm8k")
