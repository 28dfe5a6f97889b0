"""KTO from end to end, with a tiny model on the real engine, compared with float64."""

from __future__ import annotations

import logging
import math
import random
import re
from pathlib import Path

import pytest
import torch
import yaml
from preference_runs import first_rows, rows_of, tree, weights_of, write_parts
from rank_runs import run_on_ranks

from engine_api.errors import ConfigError
from engine_trainer.cli import main
from engine_trainer.config import KTOConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.errors import DataError
from engine_trainer.preferences.kto import train_kto
from engine_trainer.run.run import Run

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SGD = {"name": "torch.optim.SGD", "lr": 0.2, "clip_norm": None}


@pytest.fixture(scope="session")
def labelled(sums_model, tmp_path_factory) -> Path:
    """Sums: right results are desirable, long wrong ones are not, and are three times as many."""
    folder, dice = tmp_path_factory.mktemp("labelled"), random.Random(4)
    rows = []
    for number in range(100):
        a, b = dice.randrange(10), dice.randrange(10)
        good = number % 4 == 0
        wrong = str((a + b + dice.randint(1, 9)) % 10) * dice.randint(2, 4)
        completion = str((a + b) % 10) if good else wrong
        row = {"prompt": f"{a}+{b}=", "completion": completion, "label": good}
        rows.append(row | {"other": not good})
    dice.shuffle(rows)
    write_parts(folder, rows)
    return folder


def train(config: dict) -> list[dict]:
    train_kto(from_tree(KTOConfig, config))
    return rows_of(Path(config["run"]["output_dir"]))


def mismatched(rows: list[dict]) -> list[tuple[dict, str]]:
    """Return each row with the completion of the nearest row before it that differs in both."""
    found = []
    for k, row in enumerate(rows):
        before = [*rows[:k][::-1], *rows[k + 1 :][::-1]]
        others = [
            other["completion"]
            for other in before
            if other["prompt"] != row["prompt"] and other["completion"] != row["completion"]
        ]
        found.append((row, others[0]))
    return found


class Oracle:
    """KTO's steps over whole documents in float64, with plain SGD."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.policy, self.reference = (
            AutoModelForCausalLM.from_pretrained(
                model, dtype=torch.float64, attn_implementation="eager"
            )
            for _ in range(2)
        )

    def log_ratio(self, prompt: str, completion: str) -> torch.Tensor:
        """Return log π / ref of a completion."""
        start = len(self.tokenizer(prompt)["input_ids"])
        ids = [
            *self.tokenizer(prompt)["input_ids"],
            *self.tokenizer(completion)["input_ids"],
            self.tokenizer.eos_token_id,
        ]
        sums = []
        for model in (self.policy, self.reference):
            logs = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
            sums.append(logs.gather(-1, torch.tensor(ids[start:])[:, None]).sum())
        return sums[0] - sums[1].detach()

    def step(
        self, rows: list[dict], *, beta: float, weights: tuple[float, float], baseline: bool = True
    ) -> dict[str, float]:
        """Update the policy by eq. 7 of the paper, and return the loss and the baseline."""
        with torch.no_grad():
            others = [self.log_ratio(row["prompt"], other) for row, other in mismatched(rows)]
        mean = float(torch.stack(others).mean())
        z = max(0.0, mean) if baseline else 0.0
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            reward = self.log_ratio(row["prompt"], row["completion"])
            value = torch.sigmoid(beta * (reward - z if row["label"] else z - reward))
            weight = weights[0] if row["label"] else weights[1]
            total = total + weight * (1 - value) / len(rows)
        self.policy.zero_grad()
        total.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in self.policy.parameters()))
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.sub_(SGD["lr"] * parameter.grad)
        return {"loss": total.item(), "baseline": mean, "grad_norm": norm}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "reference", "label"),
    [
        ("kto", "precomputed", "other"),
        ("kto", "engine", "label"),
        ("apo_zero_unpaired", "precomputed", "label"),
    ],
)
def test_three_steps_are_the_papers(sums_model, labelled, tmp_path, loss, reference, label):
    """Match plain SGD in float64 over whole rows, in micro-batches of few documents.

    From the second step on the policy is not the reference. The mean log-ratio of others'
    completions, most of which are wrong, is below 0 where they are undesirable, and above 0 with
    the other label.
    """
    kto = {
        "beta": 0.5,
        "loss": loss,
        "label": label,
        "desirable": 2.0,
        "undesirable": 0.5,
        "reference": reference,
    }
    config = tree(sums_model, labelled, tmp_path / "out", run={"steps": 3}, kto=kto)
    config["engine"] |= {"optimizer": SGD, "memory": {"max_tokens": 20}}
    rows = train(config)
    assert rows[0]["train/micro_batches"] > 2

    oracle = Oracle(sums_model)
    batch = first_rows(labelled, 30)
    baselines = []
    for step in range(3):
        part = batch[10 * step : 10 * step + 10]
        part = [row | {"label": row[label]} for row in part]
        expected = oracle.step(part, beta=0.5, weights=(2.0, 0.5), baseline=loss == "kto")
        baselines.append(expected["baseline"])
        assert rows[step]["train/loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert rows[step]["train/grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert rows[step]["train/desirable_share"] == sum(r["label"] for r in part) / 10
        if loss == "kto":
            assert rows[step]["train/baseline"] == pytest.approx(expected["baseline"], abs=1e-5)
    assert ("train/baseline" in rows[0]) is (loss == "kto")
    assert baselines[-1] > 0.1 if label == "other" else baselines[-1] < -0.1, baselines
    updated = weights_of(tmp_path / "out")
    for name, parameter in oracle.policy.named_parameters():
        torch.testing.assert_close(updated[name].double(), parameter.detach(), atol=5e-6, rtol=0)


@pytest.mark.slow
def test_micro_batches_and_adapters_change_nothing(sums_model, labelled, tmp_path):
    """Documents packed one by one or together; the adapter off is the reference."""
    rows = {}
    for name, size, reference in (("a", 16, "precomputed"), ("b", 4096, "engine")):
        config = tree(
            sums_model, labelled, tmp_path / name, kto={"reference": reference, "beta": 0.5}
        )
        config["engine"] |= {"optimizer": SGD, "memory": {"max_tokens": size}}
        config["engine"]["lora"] = {"rank": 4, "alpha": 8}
        rows[name] = train(config)
    for a, b in zip(rows["a"], rows["b"], strict=True):
        apart = {"train/micro_batches", "train/accuracy"}
        assert {k: v for k, v in a.items() if k not in apart} == pytest.approx(
            {k: v for k, v in b.items() if k not in apart}, rel=1e-4, abs=1e-6
        )
    assert rows["a"][0]["train/loss"] == pytest.approx(0.5, rel=1e-6)
    assert rows["a"][-1]["train/margin"] != 0
    for name, value in weights_of(tmp_path / "a").items():
        torch.testing.assert_close(value, weights_of(tmp_path / "b")[name], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["precomputed", "engine"])
def test_a_run_that_failed_and_is_resumed_ends_bit_for_bit_as_one_left_alone(
    sums_model, labelled, tmp_path, monkeypatch, reference
):
    """Over the end of an epoch, so that rows have other neighbours then."""
    outs = [tmp_path / "alone", tmp_path / "broken"]
    trees = [
        tree(
            sums_model,
            labelled,
            out,
            batch_size=30,
            run={"steps": 6, "save_every": 2},
            eval={"source": str(labelled / "test.jsonl"), "every": 3},
            kto={"reference": reference},
        )
        for out in outs
    ]
    train(trees[0])
    with monkeypatch.context() as patch:
        end = Run.end_step

        def failing(self, step, *args, **kwargs):
            if step == 5:
                raise OSError("the disk is away")
            end(self, step, *args, **kwargs)

        patch.setattr(Run, "end_step", failing)
        with pytest.raises(OSError, match="the disk is away"):
            train(trees[1])
    train(trees[1])
    assert rows_of(outs[0]) == rows_of(outs[1])
    left, right = map(weights_of, outs)
    assert left
    assert all(torch.equal(left[n], right[n]) for n in left)
    evaluated = [row for row in rows_of(outs[0]) if "eval/loss" in row]
    # Of the reference against itself.
    assert evaluated[0]["eval/loss"] == pytest.approx(0.5, rel=1e-6)
    assert evaluated[-1]["eval/margin"] > 0
    assert {"eval/baseline", "eval/desirable", "eval/undesirable"} <= set(evaluated[0])


def test_the_figures_of_an_evaluation_do_not_depend_on_its_calls(
    sums_model, labelled, tmp_path, monkeypatch
):
    """The baseline is that of all held-out rows, whatever is inferred together."""
    from engine_trainer.preferences import loop

    rows = []
    for size in (loop.EVAL_ROWS, 3):
        monkeypatch.setattr(loop, "EVAL_ROWS", size)
        config = tree(
            sums_model,
            labelled,
            tmp_path / str(size),
            run={"steps": 1},
            eval={"source": str(labelled / "test.jsonl")},
        )
        rows.append(train(config))
    for a, b in zip(*rows, strict=True):
        # At first all margins are 0 but for rounding, whose sign is no accuracy.
        known = [{k: v for k, v in row.items() if k != "eval/accuracy"} for row in (a, b)]
        assert known[0] == pytest.approx(known[1], rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_agree_with_one_whichever_labels_they_have(sums_model, labelled, tmp_path):
    """Two rows a step: on two ranks each has one row, of one label."""
    for ranks in (1, 2):
        file = tmp_path / f"{ranks}.yaml"
        config = tree(
            sums_model,
            labelled,
            tmp_path / str(ranks),
            batch_size=2,
            run={"steps": 6},
            kto={"beta": 0.5},
            eval={"source": str(labelled / "test.jsonl"), "max_rows": 3},
        )
        config["engine"]["optimizer"] = SGD
        file.write_text(yaml.safe_dump(config))
        run_on_ranks(ranks, "-m", "engine_trainer", "kto", str(file))
    one, two = rows_of(tmp_path / "1"), rows_of(tmp_path / "2")
    shares = {row["train/desirable_share"] for row in one if "train/loss" in row}
    assert len(shares) > 1, "steps of one label and of both"
    assert any("train/margin" not in row for row in one if "train/loss" in row)
    for a, b in zip(one, two, strict=True):
        assert set(a) == set(b)
        for key in set(a) - {"train/micro_batches"}:
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), (a["step"], key)
    left, right = weights_of(tmp_path / "1"), weights_of(tmp_path / "2")
    for name in left:
        torch.testing.assert_close(right[name], left[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("sections", "field", "said"),
    [
        ({"engine": {"model_type": "value_model"}}, "engine.model_type", "language_model"),
        ({"engine": {"lora": {"rank": 2, "dropout": 0.1}}}, "engine.lora.dropout", "expected 0"),
        ({"kto": {"beta": 0}}, "kto.beta", "above 0"),
        ({"kto": {"loss": "sigmoid"}}, "kto.loss", "built in or installed"),
        ({"kto": {"loss": "kto", "loss_options": {"gamma": 1}}}, "kto.loss_options.gamma", "no"),
        ({"kto": {"loss_options": {"beta": 1}}}, "kto.loss_options.beta", "kto.beta"),
        ({"kto": {"desirable": -1}}, "kto.desirable", "at least 0"),
        ({"kto": {"desirable": 0, "undesirable": 0}}, "kto.desirable", "every loss"),
        ({"data": {"columns": {"answer": "x"}}}, "data.columns.answer", "nothing reads it"),
        ({"data": {"on_bad_image": "drop"}}, "data.on_bad_image", "no images are read"),
        ({"data": {"processor_kwargs": {"size": 1}}}, "data.processor_kwargs", "no images are"),
        ({"data": {"source": None, "reasoning_gym": {"datasets": []}}}, "data.reasoning_gym", ""),
        ({"batch_size": 1}, "batch_size", "at least 2 with loss kto"),
        ({"eval": {"source": "x", "max_rows": 1}}, "eval.max_rows", "at least 2"),
        ({"dpo": {"beta": 1}}, "dpo", "unknown"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    sums_model, labelled, tmp_path, sections, field, said
):
    with pytest.raises(ConfigError) as caught:
        from_tree(KTOConfig, tree(sums_model, labelled, tmp_path, **sections))
    assert caught.value.field == field
    assert said in str(caught.value)
    one_row = {"batch_size": 1, "kto": {"loss": "apo_zero_unpaired"}}
    from_tree(KTOConfig, tree(sums_model, labelled, tmp_path, **one_row))


def test_rows_that_no_other_row_mismatches_are_refused(sums_model, tmp_path):
    row = {"prompt": "1+1=", "completion": "2", "label": True}
    for rows in ([row], [row, row], [row, row | {"prompt": "2+0="}], [row, row | {"label": False}]):
        write_parts(tmp_path, rows)
        config = tree(sums_model, tmp_path, tmp_path / "out", batch_size=2)
        said = rf"none of the other {len(rows) - 1} rows has both(?s:.)*apo_zero_unpaired"
        with pytest.raises(DataError, match=said) as caught:
            train(config)
        assert (caught.value.file, caught.value.row) == (str(tmp_path / "train.jsonl"), 1)


def test_rows_that_no_micro_batch_takes_are_found_as_they_are_read(sums_model, tmp_path):
    """The rows fit, and a prompt with another row's completion is cut until it fits, too."""
    rows = [
        {"prompt": "1+1=", "completion": "2" * 9, "label": True},
        {"prompt": "1+1+1+1+1=", "completion": "5", "label": True},
    ]
    write_parts(tmp_path, rows)
    config = tree(sums_model, tmp_path, tmp_path / "out", batch_size=2)
    config["kto"] = {"reference": "engine"}
    config["engine"]["memory"] = {"max_tokens": 14}
    assert train(config)[-1]["step"] == 4
    config["engine"]["memory"] = {"max_tokens": 13}
    said = r"14 tokens(?s:.)*raise engine\.memory\.max_tokens"
    with pytest.raises(DataError, match=said) as caught:
        train(config)
    assert (caught.value.file, caught.value.row) == (str(tmp_path / "train.jsonl"), 1)


def test_weights_that_do_not_fit_the_labels_are_named(sums_model, labelled, tmp_path, caplog):
    from engine_trainer.config import KTOSection
    from engine_trainer.preferences.kto import warn_of_weights

    with caplog.at_level(logging.WARNING):
        train(tree(sums_model, labelled, tmp_path / "out", run={"steps": 1}))
    (said,) = [r.getMessage() for r in caplog.records if "desirable rows" in r.getMessage()]
    assert "1 to 1.33, as with kto.desirable=" in said
    assert not warn_of_weights((20, 60), KTOSection(desirable=3.0))
    assert not warn_of_weights((20, 60), KTOSection(desirable=4.0))
    assert "kto.undesirable=3" in warn_of_weights((60, 20), KTOSection())
    assert "all 7 rows are desirable" in warn_of_weights((7, 0), KTOSection())
    assert "all 7 rows are undesirable" in warn_of_weights((0, 7), KTOSection())
    assert not warn_of_weights((20, 60), KTOSection(undesirable=0.0))


def test_the_commands(sums_model, labelled, tmp_path, capsys):
    file = tmp_path / "kto.yaml"
    sections = {"kto": {"beta": 0.1}, "run": {"report": True}}
    file.write_text(yaml.safe_dump(tree(sums_model, labelled, tmp_path / "out", **sections)))
    assert main(["kto", str(file), "run.steps=1"]) == 0
    assert (tmp_path / "out" / "hf" / "model.safetensors").is_file()
    assert "Kahneman-Tversky" in (tmp_path / "out" / "report.html").read_text()
    assert "out: 1 steps" in capsys.readouterr().out
    assert main(["data", str(file), "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("kto: 80 rows of")
    assert re.search(r"label: (un)?desirable", shown)
    assert re.search(r"80 of 80 rows can be trained on: \d+ tokens, \d+ of them learned", shown)
