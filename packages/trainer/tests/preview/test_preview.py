"""``engine-train data``: rows as they are trained on, their lengths, and what is left out."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from itertools import pairwise

import pytest
import yaml

from engine_trainer.cli import main
from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import load_config
from engine_trainer.data import SFTDataset, load_tokenizer, read_examples
from engine_trainer.preview import collect
from engine_trainer.preview.show import bins
from engine_trainer.utils.terminal import columns

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def file(tmp_path, tokenizer):
    """Write a configuration whose model folder has a tokenizer and a config.json, no weights."""

    def write(*rows, name="sft.yaml", **sections):
        folder = tmp_path / "model"
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(
            json.dumps({"model_type": "qwen3", "max_position_embeddings": 60})
        )
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree = {
            "engine": {"model": {"path": str(folder)}},
            "data": {"source": str(tmp_path / "rows.jsonl")},
            "run": {"output_dir": str(tmp_path / "out"), "steps": 1},
        }
        for key, values in sections.items():
            tree[key] = {**tree.get(key, {}), **values}
        (tmp_path / name).write_text(yaml.safe_dump(tree))
        return str(tmp_path / name)

    return write


ROWS = [
    {"prompt": "2+2?", "response": "It is 4. \nYes."},
    {"prompt": "x", "response": ""},
    {"prompt": "y", "response": None},
    {"prompt": "long " * 20, "response": "z"},
    {"prompt": "3+3?", "response": "6"},
]


def test_rows_are_shown_with_the_mask_and_what_is_left_out(file, capsys):
    assert main(["data", file(*ROWS), "data.on_too_long=drop", "--rows", "1"]) == 2
    out = capsys.readouterr().out
    assert not ANSI.search(out)
    assert (
        "row 1   rows.jsonl:1   22 tokens, 15 learned\n"
        "  · <|bos|><|user|>2+2?<|assistant|>\n"
        "  + It is 4.␣⏎\n"
        "  + Yes.<|eos|>\n\n"
    ) in out
    assert "row 5" not in out
    summary = out[out.index("2 of 5 rows can be trained on: ") :]
    assert summary.splitlines()[0].endswith("31 tokens, 17 of them learned (54.8%)")
    assert "1 row dropped: longer than 60 tokens\n  row 4 (rows.jsonl:4)\n" in summary
    joined = " ".join(summary.split())
    assert "1 row would end the run before it begins: the response is empty" in joined
    assert "row 2 (rows.jsonl:2) to do: complete the row, or remove it" in joined
    assert (
        "missing or null, column 'response' row 3 (rows.jsonl:3) "
        "why: this row has: prompt to do: complete the row, or name another column"
    ) in joined


def test_a_row_in_full_and_a_row_that_is_refused(file, capsys):
    long = {"prompt": "q", "response": "word " * 1000}
    path = file(ROWS[0], long, ROWS[1])
    free = "engine.model.config_overrides={max_position_embeddings: 9000}"
    assert main(["data", path, free, "--row", "2"]) == 2
    out = capsys.readouterr().out
    assert out.count("word") == 1000
    assert "row 1 " not in out
    main(["data", path, free])
    out = capsys.readouterr().out
    assert 250 < out.count("word") < 320
    assert re.search(r"… 3,5\d\d more characters: --row shows all", out)
    main(["data", path, free, "--row", "3"])
    assert "refused: the response is empty, nothing to learn" in capsys.readouterr().out
    assert main(["data", path, free, "--rows", "-1"]) == 2
    assert "--rows: expected a number of at least 0, got -1" in capsys.readouterr().err
    assert main(["data", path, free, "--rows", "0"]) == 2
    assert "row 1 " not in capsys.readouterr().out
    assert main(["data", path, free, "--row", "4"]) == 2
    assert "--row: expected a number from 1 to 3, got 4" in capsys.readouterr().err


def test_the_whole_error_of_a_refused_row_is_shown(file, capsys):
    path = file({"messages": [{"role": "x", "content": "a"}]})
    assert main(["data", path, "--row", "1"]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert main(["sft", path]) == 2
    *_, what, why, remedy = capsys.readouterr().err.splitlines()
    assert "a message without a known role" in what
    assert shown.count(f"{why.strip()} {remedy.strip()}") == 2


def test_what_is_shown_is_what_sft_trains_on(file):
    path = file(*[ROWS[0], ROWS[3], ROWS[4]], data={"on_too_long": "truncate", "max_length": 40})
    config = load_config(SFTConfig, path)
    tokenizer = load_tokenizer(config.data, config.engine.model)
    trained = SFTDataset.build(read_examples(config.data, "response"), tokenizer, config.data, 60)
    rows = collect(config, "sft").rows
    assert [row.fate for row in rows] == ["kept", "dropped", "kept"]
    kept = [row.parts[0] for row in rows if row.fate != "dropped"]
    assert [list(part.tokens) for part in kept] == [d.input_ids.tolist() for d in trained.documents]
    assert [list(part.learned) for part in kept] == [
        (d.loss_weight > 0).tolist() for d in trained.documents
    ]


def test_prompts_of_rl_with_their_answers(file, capsys):
    rows = [
        {"prompt": "2+2?", "answer": "4"},
        {"prompt": "open"},
        {"prompt": "w" * 80, "answer": 1},
    ]
    path = file(*rows, reward={"name": "exact"}, rollout={"max_new_tokens": 20}, algorithm={})
    assert main(["data", path, "data.on_too_long=truncate", "data.columns.answer=null"]) == 2
    out = capsys.readouterr().out
    assert out.startswith("rl: 3 rows of ")
    assert "limit 40 tokens: the context minus rollout.max_new_tokens is 40" in out
    assert "  · <|bos|><|user|>2+2?<|assistant|>\nanswer: 4\n" in out
    assert "row 3   rows.jsonl:3   83 tokens\ncut: longer than 40 tokens\n" in out
    assert "column 'answer'" in " ".join(out.split())  # row 2 has a null


@pytest.mark.parametrize("task", ["dpo", "rm"])
def test_pairs_share_their_prompt_and_a_reward_model_scores_one_token(file, capsys, task):
    row = {"prompt": "hi", "chosen": "yes", "rejected": "no!"}
    sections = {"dpo": {"dpo": {"beta": 0.1}}, "rm": {"engine": {"model_type": "value_model"}}}
    path = file(row, **sections[task])
    assert main(["data", path]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{task}: 1 row of ")
    learned = {"dpo": "  + yes<|eos|>\n", "rm": "yes\n  + <|eos|>\n"}[task]
    assert f"<|assistant|>{'' if task == 'rm' else chr(10)}{learned}" in out
    # Each document has a size of its own: the longer one says nothing of what both learn.
    sizes = {
        "dpo": ["chosen   9 tokens, 4 learned", "rejected   9 tokens, 4 learned"],
        "rm": ["chosen   9 tokens", "rejected   9 tokens"],
    }
    assert [line for line in out.splitlines() if line.startswith(("chosen", "rejected"))] == sizes[
        task
    ]
    assert "\n… 5 tokens as above\n" in out
    if task == "rm":
        assert "the context has 60, of which 1 is for the score" in out


def test_special_characters_of_data_cannot_reach_the_terminal(tmp_path, tokenizer, file, capsys):
    evil = "\x1b[31mred\x1b]0;title\x07\u202e\x9b2J\r"
    tokenizer.add_tokens(sorted(set(evil) - set(map(chr, range(32, 127)))))
    row = {"prompt": evil, "response": evil, "answer": evil}
    path = file(row, {"prompt": [{"role": evil, "content": "x"}], "response": "y"})
    for arguments in ([path], [path, "--task", "rl", "reward.name=exact"], [path, "--row", "2"]):
        main(["data", *arguments])
        captured = capsys.readouterr()
        for text in captured:
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    main(["data", path, "--rows", "1"])
    assert "\\x1b[31mred\\x1b]0;title\\x07\\u202e\\x9b2J\\r" in capsys.readouterr().out
    # An error that ends the command quotes the data, too.
    (tmp_path / "rows.jsonl").write_text(json.dumps({evil: 1}) + "\n")
    assert main(["data", path]) == 2
    said = capsys.readouterr().err
    assert "\\x1b[31m" in said
    assert "\x1b" not in said


def test_lines_fit_into_80_columns_also_in_color(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = [{"prompt": f"{i} " * i, "response": "word, " * 30} for i in range(1, 60, 7)]
    path = file(*rows)
    free = "engine.model.config_overrides={max_position_embeddings: 300}"
    texts = {}
    for color in ("--color", "--no-color"):
        main(["data", path, free, "data.on_too_long=drop", color])
        texts[color] = capsys.readouterr().out
        assert max(columns(ANSI.sub("", line)) for line in texts[color].splitlines()) <= 80
    assert ANSI.sub("", texts["--color"]) == texts["--no-color"]
    assert "\x1b[32m  + word, " in texts["--color"]
    assert "\x1b[2m  · <|bos|>" in texts["--color"]


@pytest.mark.slow
def test_colors_are_for_terminals_alone(file, tmp_path):
    command = [sys.executable, "-m", "engine_trainer", "data", file(ROWS[0])]
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")}

    def printed(**variables):
        ours, theirs = pty.openpty()
        subprocess.run(
            command,
            stdout=theirs,
            env=environment | variables,
            check=True,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        text = b""
        try:
            while chunk := os.read(ours, 65536):
                text += chunk
        # Linux ends the stream of a closed terminal with an error.
        except OSError:
            pass
        os.close(ours)
        return text.decode()

    assert ANSI.search(printed(TERM="xterm"))
    assert not ANSI.search(printed(TERM="xterm", NO_COLOR="1"))
    piped = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert not ANSI.search(piped.stdout)


def test_it_needs_no_weights_and_not_even_a_model(file, tmp_path, capsys):
    path = file(ROWS[0])
    (tmp_path / "model" / "config.json").unlink()
    assert main(["data", path]) == 0
    assert "the model's context is not known: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lengths", "first", "last"),
    [
        ((5, 5, 5), (5, 6), (5, 6)),
        ((0, 99, 50), (0, 10), (90, 100)),
        ((3, 5000, 20), (2, 4), (4096, 8192)),
    ],
)
def test_bins_cover_every_length(lengths, first, last):
    edges = bins(*lengths)
    assert (edges[0], edges[-1]) == (first, last)
    assert edges[0][0] <= lengths[0] <= lengths[1] < edges[-1][1]
    assert all(a[1] == b[0] for a, b in pairwise(edges))
