"""DPO and reward models from end to end, with a tiny model on the real engine.

They are compared with float64 and with each other.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import preference_runs
import pytest
import torch
import yaml
from preference_runs import first_rows, rows_of, weights_of, write_parts
from rank_runs import run_on_ranks

from engine_api.errors import ConfigError
from engine_trainer.cli import main
from engine_trainer.config import DPOConfig, RewardModelConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.errors import DataError
from engine_trainer.preferences import pairs as pairs_module
from engine_trainer.preferences.dpo import train_dpo
from engine_trainer.preferences.reward_model import train_reward_model
from engine_trainer.run.run import Run

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SCORES = ("chosen", "rejected")
SGD = {"name": "torch.optim.SGD", "lr": 0.2, "clip_norm": None}
TRAIN = {"dpo": (DPOConfig, train_dpo), "rm": (RewardModelConfig, train_reward_model)}
TYPES = {"dpo": "language_model", "rm": "value_model"}


@pytest.fixture(scope="session")
def pairs(sums_model, tmp_path_factory) -> Path:
    """Sums: right answers are chosen, long wrong ones rejected."""
    folder, dice = tmp_path_factory.mktemp("pairs"), random.Random(4)
    rows = [
        {
            "prompt": f"{a}+{b}=",
            "chosen": str((a + b) % 10),
            "rejected": str((a + b + dice.randint(1, 9)) % 10) * dice.randint(2, 4),
        }
        for a in range(10)
        for b in range(10)
    ]
    dice.shuffle(rows)
    write_parts(folder, rows)
    return folder


@pytest.fixture(scope="session")
def models(sums_model, tmp_path_factory) -> dict[str, Path]:
    """The model of each command; the value model's head is not small."""
    from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer

    path = tmp_path_factory.mktemp("value") / "model"
    config = AutoConfig.from_pretrained(sums_model)
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(5)
        AutoModelForTokenClassification.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(sums_model).save_pretrained(path)
    return {"dpo": sums_model, "rm": path}


def tree(kind: str, models, pairs: Path, out: Path, **sections) -> dict:
    sections["engine"] = {"model_type": TYPES[kind]} | sections.get("engine", {})
    return preference_runs.tree(models[kind], pairs, out, **sections)


def train(kind: str, config: dict) -> list[dict]:
    cls, function = TRAIN[kind]
    function(from_tree(cls, config))
    return rows_of(Path(config["run"]["output_dir"]))


def encode(tokenizer, row: dict, name: str) -> tuple[list[int], int]:
    """Ids of the document, and how many of them are the prompt's."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    return [*prompt, *tokenizer(row[name])["input_ids"], tokenizer.eos_token_id], len(prompt)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo"])
@pytest.mark.parametrize("reference", ["precomputed", "engine"])
def test_two_steps_of_dpo_are_the_textbooks(models, pairs, tmp_path, loss, reference):
    """Match plain SGD in float64 over whole pairs, with micro-batches that split pairs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = tree(
        "dpo",
        models,
        pairs,
        tmp_path / "out",
        run={"steps": 2},
        dpo={"beta": 0.5, "loss": loss, "reference": reference},
    )
    config["engine"] |= {"optimizer": SGD, "memory": {"max_tokens": 20}}
    rows = train("dpo", config)
    assert rows[0]["train/micro_batches"] > 5

    tokenizer = AutoTokenizer.from_pretrained(models["dpo"])
    policy, ref = (
        AutoModelForCausalLM.from_pretrained(
            models["dpo"], dtype=torch.float64, attn_implementation="eager"
        )
        for _ in range(2)
    )

    def score(model, row, name):
        ids, start = encode(tokenizer, row, name)
        logs = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
        return logs.gather(-1, torch.tensor(ids[start:])[:, None]).sum()

    batch = first_rows(pairs, 20)
    for step, part in enumerate((batch[:10], batch[10:])):
        total = torch.zeros((), dtype=torch.float64)
        for row in part:
            own = {
                n: score(policy, row, n) - score(ref, row, n).detach()
                for n in ("chosen", "rejected")
            }
            margin = own["chosen"] - own["rejected"]
            terms = {
                "sigmoid": -torch.nn.functional.logsigmoid(0.5 * margin),
                "hinge": (1 - 0.5 * margin).clamp(min=0),
                "ipo": (margin - 1).square(),
            }
            total = total + terms[loss] / 10
        policy.zero_grad()
        total.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in policy.parameters()))
        assert rows[step]["train/loss"] == pytest.approx(total.item(), rel=1e-4)
        assert rows[step]["train/grad_norm"] == pytest.approx(norm, rel=1e-3)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.sub_(0.2 * parameter.grad)
    updated = weights_of(tmp_path / "out")
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(updated[name].double(), parameter.detach(), atol=2e-5, rtol=0)


def test_a_step_of_a_reward_model_is_the_textbooks(models, pairs, tmp_path):
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    config = tree("rm", models, pairs, tmp_path / "out", run={"steps": 1})
    config["engine"] |= {"optimizer": SGD, "memory": {"max_tokens": 20}}
    rows = train("rm", config)
    tokenizer = AutoTokenizer.from_pretrained(models["rm"])
    model = AutoModelForTokenClassification.from_pretrained(
        models["rm"], dtype=torch.float64, attn_implementation="eager"
    )

    def reward(row, name):
        ids, _ = encode(tokenizer, row, name)
        # The last token ends the response.
        return model(input_ids=torch.tensor([ids])).logits[0, -1, 0]

    part = first_rows(pairs, 10)
    margins = torch.stack([reward(row, "chosen") - reward(row, "rejected") for row in part])
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    loss.backward()
    assert rows[0]["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert rows[0]["train/accuracy"] == pytest.approx(float((margins > 0).double().mean()))
    assert rows[0]["train/margin"] == pytest.approx(margins.detach().mean().item(), rel=1e-4)
    updated = weights_of(tmp_path / "out")
    expected = {n: p.detach() - 0.2 * p.grad for n, p in model.named_parameters()}
    # A constant cancels in the loss, and a sequence classifier has none.
    torch.testing.assert_close(expected.pop("score.bias"), torch.zeros(1).double())
    assert expected.keys() == updated.keys()
    for name, value in expected.items():
        torch.testing.assert_close(updated[name].double(), value, atol=2e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "rm"])
def test_it_learns_and_what_it_exports_can_be_read(models, pairs, tmp_path, kind):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    out = tmp_path / "out"
    rows = train(
        kind,
        tree(
            kind,
            models,
            pairs,
            out,
            run={"steps": 60},
            batch_size=20,
            eval={"source": str(pairs / "test.jsonl"), "every": 20},
        ),
    )
    evaluated = [r for r in rows if "eval/accuracy" in r]
    assert [r["step"] for r in evaluated] == [0, 20, 40, 60]
    assert evaluated[-1]["eval/loss"] < evaluated[0]["eval/loss"]
    assert evaluated[-1]["eval/accuracy"] > 0.7
    assert rows[-1]["train/accuracy"] > 0.9
    if kind == "dpo":  # of the reference against itself
        assert evaluated[0]["eval/loss"] == pytest.approx(math.log(2), rel=1e-6)
        assert evaluated[0]["eval/accuracy"] == 0.5
    auto = AutoModelForCausalLM if kind == "dpo" else AutoModelForSequenceClassification
    assert auto.from_pretrained(out / "hf").num_parameters() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reference"), [("dpo", "precomputed"), ("dpo", "engine"), ("rm", None)]
)
def test_a_run_that_failed_and_is_resumed_ends_bit_for_bit_as_one_left_alone(
    models, pairs, tmp_path, monkeypatch, kind, reference
):
    extra = {"dpo": {"reference": reference}} if reference else {}
    outs = [tmp_path / "alone", tmp_path / "broken"]
    trees = [
        tree(
            kind,
            models,
            pairs,
            o,
            run={"steps": 12, "save_every": 3},
            eval={"source": str(pairs / "test.jsonl"), "every": 5},
            **extra,
        )
        for o in outs
    ]
    train(kind, trees[0])
    with monkeypatch.context() as patch:
        end = Run.end_step

        def failing(self, step, *args, **kwargs):
            if step == 8:
                raise OSError("the disk is away")
            end(self, step, *args, **kwargs)

        patch.setattr(Run, "end_step", failing)
        with pytest.raises(OSError, match="the disk is away"):
            train(kind, trees[1])
    train(kind, trees[1])
    assert rows_of(outs[0]) == rows_of(outs[1])
    left, right = map(weights_of, outs)
    assert left
    assert all(torch.equal(left[n], right[n]) for n in left)


def test_a_step_whose_numbers_are_lost_changes_nothing(models, pairs, tmp_path, monkeypatch):
    real, steps = pairs_module.document_sums, []

    def spoilt(outputs, batch):
        steps.append(1)
        sums = real(outputs, batch)
        return sums * math.nan if len(steps) == 2 else sums

    monkeypatch.setattr(pairs_module, "document_sums", spoilt)
    rows = train("rm", tree("rm", models, pairs, tmp_path / "out", run={"steps": 3}))
    assert [r["train/skipped"] for r in rows] == [0, 1, 0]
    monkeypatch.undo()
    alone = train("rm", tree("rm", models, pairs, tmp_path / "alone", run={"steps": 1}))
    assert alone[0] == rows[0]


def test_held_out_pairs_are_judged_by_their_own_reference(models, pairs, tmp_path):
    """Find reference log-probs beforehand or by an engine, and evaluate held-out pairs twice."""
    rows = {}
    for reference in ("precomputed", "engine"):
        config = tree(
            "dpo",
            models,
            pairs,
            tmp_path / reference,
            dpo={"reference": reference},
            eval={"source": str(pairs / "test.jsonl"), "every": 2},
        )
        rows[reference] = train("dpo", config)
    for a, b in zip(rows["precomputed"], rows["engine"], strict=True):
        # At first all margins are 0 but for rounding, whose sign is no accuracy.
        known = [{k: v for k, v in row.items() if not k.endswith("/accuracy")} for row in (a, b)]
        assert known[0] == pytest.approx(known[1], rel=1e-5, abs=1e-6)
    margins = [row["eval/margin"] for row in rows["engine"] if "eval/margin" in row]
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert len({round(margin, 4) for margin in margins}) == 3


def test_the_reference_of_lora_is_the_adapter_off(models, pairs, tmp_path):
    rows = {}
    for reference in ("precomputed", "engine"):
        config = tree("dpo", models, pairs, tmp_path / reference, dpo={"reference": reference})
        config["engine"] |= {"lora": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 0.01}}
        rows[reference] = train("dpo", config)
    for a, b in zip(rows["precomputed"], rows["engine"], strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    assert rows["engine"][0]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert rows["engine"][-1]["train/margin"] != 0


@pytest.mark.parametrize(
    ("kind", "sections", "field"),
    [
        ("rm", {"engine": {"model_type": "language_model"}}, "engine.model_type"),
        ("dpo", {"engine": {"model_type": "value_model"}}, "engine.model_type"),
        ("dpo", {"engine": {"lora": {"rank": 2, "dropout": 0.1}}}, "engine.lora.dropout"),
        ("dpo", {"dpo": {"beta": 0}}, "dpo.beta"),
        ("dpo", {"dpo": {"loss": "kto"}}, "dpo.loss"),
        ("rm", {"data": {"columns": {"response": "chosen"}}}, "data.columns.response"),
        ("rm", {"data": {"source": None, "reasoning_gym": {"datasets": []}}}, "data.reasoning_gym"),
        ("rm", {"batch_size": 0}, "batch_size"),
        ("rm", {"eval": {"source": "x", "max_pairs": 0}}, "eval.max_pairs"),
        ("rm", {"dpo": {"beta": 1}}, "dpo"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(models, pairs, tmp_path, kind, sections, field):
    with pytest.raises(ConfigError) as caught:
        from_tree(TRAIN[kind][0], tree(kind, models, pairs, tmp_path, **sections))
    assert caught.value.field == field


@pytest.mark.parametrize("kind", ["dpo", "rm"])
@pytest.mark.parametrize(
    "rates",
    [{"attention_dropout": 0.1}, {"resid_pdrop": 0.2}, {"router_jitter_noise": 0.01}],
    ids=str,
)
def test_a_model_that_drops_out_is_refused(models, pairs, tmp_path, kind, rates):
    """The slopes are of another forward pass than the one that is trained on."""
    config = tree(
        kind, {kind: with_config(models[kind], tmp_path / "model", rates)}, pairs, tmp_path / "out"
    )
    with pytest.raises(ConfigError, match=next(iter(rates))) as caught:
        train(kind, config)
    assert caught.value.field == "engine.model.config_overrides"
    assert f"{{{next(iter(rates))}: 0.0}}" in str(caught.value)
    config["engine"]["model"]["config_overrides"] = dict.fromkeys(rates, 0.0)
    assert len(train(kind, config)) == 4


def test_dropout_before_a_head_that_no_engine_has_is_none(models, pairs, tmp_path):
    model = with_config(models["rm"], tmp_path / "model", {"classifier_dropout": 0.1})
    assert len(train("rm", tree("rm", {"rm": model}, pairs, tmp_path / "out"))) == 4


def with_config(model: Path, folder: Path, changes: dict) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_the_commands(models, pairs, tmp_path, capsys):
    for kind in ("dpo", "rm"):
        file = tmp_path / f"{kind}.yaml"
        file.write_text(yaml.safe_dump(tree(kind, models, pairs, tmp_path / kind)))
        assert main([kind, str(file), "run.steps=1"]) == 0
        assert (tmp_path / kind / "hf" / "model.safetensors").is_file()
        assert "train/loss" in rows_of(tmp_path / kind)[0]
    assert "rm: 1 steps" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["dpo", pytest.param("rm", marks=pytest.mark.nightly)])
def test_two_ranks_agree_with_one(models, pairs, tmp_path, kind):
    """Three pairs a step on two ranks, and one: a rank may have none."""
    for ranks in (1, 2):
        out, file = tmp_path / str(ranks), tmp_path / f"{ranks}.yaml"
        config = tree(
            kind,
            models,
            pairs,
            out,
            batch_size=3,
            run={"steps": 6},
            eval={"source": str(pairs / "test.jsonl"), "max_pairs": 1},
        )
        file.write_text(yaml.safe_dump(config))
        run_on_ranks(ranks, "-m", "engine_trainer", kind, str(file))
    for a, b in zip(rows_of(tmp_path / "1"), rows_of(tmp_path / "2"), strict=True):
        apart = {"train/micro_batches"}
        if kind == "dpo" and a["step"] == 1:
            # Policy and reference are the same: rounding decides which of two answers is better.
            apart.add("train/accuracy")
        if kind == "rm":
            # Pairs determine scores up to a constant: the bias of the head has no gradient but
            # rounding, which Adam turns into steps. The saved head has no bias.
            scores = [f"{part}/{name}" for part in ("train", "eval") for name in SCORES]
            for one, other in zip(scores[::2], scores[1::2], strict=True):
                if one in a:
                    margins = [row[one] - row[other] for row in (a, b)]
                    assert margins[0] == pytest.approx(margins[1], rel=1e-3, abs=1e-5)
            apart |= set(scores)
        for key in set(a) - apart:
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), (a["step"], key)
    left, right = weights_of(tmp_path / "1"), weights_of(tmp_path / "2")
    for name in left:
        torch.testing.assert_close(right[name], left[name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["dpo", "rm"])
@pytest.mark.parametrize("held", [False, True])
def test_pairs_longer_than_the_models_context_are_named_before_the_run(
    models, pairs, tmp_path, kind, held
):
    """The model has 64 positions."""
    (tmp_path / "long.jsonl").write_text(
        json.dumps({"prompt": "1+1=", "chosen": "2" * 80, "rejected": "3"}) + "\n"
    )
    config = tree(kind, models, pairs, tmp_path / "out", data={"on_too_long": "error"})
    config["eval" if held else "data"] = {
        **config.get("eval", {}),
        **(config["data"] if not held else {}),
        "source": str(tmp_path / "long.jsonl"),
    }
    said = "1 of 1 pairs of eval" if held else "1 of 1 pairs are"
    with pytest.raises(
        DataError, match=rf"(?s)long\.jsonl:1.*8\d tokens in the longer.*the context has 64.*{said}"
    ):
        train(kind, config)


@pytest.mark.parametrize("kind", ["dpo", "rm"])
def test_held_out_pairs_that_are_too_long_are_dropped_as_those_of_training_are(
    models, pairs, tmp_path, kind, caplog
):
    rows = (pairs / "test.jsonl").read_text() + json.dumps(
        {"prompt": "1+1=", "chosen": "2" * 80, "rejected": "3"}
    )
    (tmp_path / "held.jsonl").write_text(rows + "\n")
    config = tree(
        kind,
        models,
        pairs,
        tmp_path / "out",
        data={"on_too_long": "drop"},
        run={"steps": 1},
        eval={"source": str(tmp_path / "held.jsonl")},
    )
    train(kind, config)
    assert (
        f"1 of {len(rows.splitlines())} pairs of eval are too long and were dropped: "
        "the context has 64" in caplog.text
    )


# --- losses other than DPO's ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "more"),
    [
        ("simpo", {"beta": 2.0, "loss_options": {"gamma": 1.0}}),
        ("orpo", {}),
        ("sigmoid", {"sft_coefficient": 0.5, "loss_options": {"label_smoothing": 0.1}}),
    ],
)
def test_a_loss_of_two_numbers_learns_whatever_the_micro_batches(
    models, pairs, tmp_path, loss, more
):
    rows = {}
    for size in (16, 4096):
        config = tree(
            "dpo", models, pairs, tmp_path / f"{size}", dpo={"loss": loss, **more}, run={"steps": 8}
        )
        config["engine"] |= {"optimizer": SGD, "memory": {"max_tokens": size}}
        rows[size] = train("dpo", config)
    for name, value in weights_of(tmp_path / "16").items():
        torch.testing.assert_close(value, weights_of(tmp_path / "4096")[name], atol=1e-5, rtol=0)
    losses = [row["train/loss"] for row in rows[16] if "train/loss" in row]
    assert losses[-1] < losses[0]
    # Without a reference no model is asked for its log-probs before the first step.
    timed = (tmp_path / "16" / "metrics.jsonl").read_text()
    assert ("time/reference" in timed) is (loss == "sigmoid")


def test_a_margin_and_the_centre_of_a_reward_model(models, pairs, tmp_path, caplog):
    source = tmp_path / "margins.jsonl"
    rows = [json.loads(line) for line in (pairs / "train.jsonl").read_text().splitlines()]
    source.write_text("".join(json.dumps({**row, "far": 3}) + "\n" for row in rows))
    data = {"source": str(source)}
    first = {}
    for name, section in {
        "plain": {},
        "margin": {"margin": "far"},
        "centre": {"center": 0.5},
    }.items():
        config = tree("rm", models, pairs, tmp_path / name, data=data, rm=section, batch_size=80)
        first[name] = next(row for row in train("rm", config) if "train/loss" in row)
    # Every pair's loss is at most 3 larger, and the figures of the scores are the same.
    assert 0 < first["margin"]["train/loss"] - first["plain"]["train/loss"] < 3
    assert first["margin"]["train/margin"] == first["plain"]["train/margin"]
    mean_of_squares = 2 * (first["centre"]["train/loss"] - first["plain"]["train/loss"])
    mean = first["plain"]["train/chosen"] + first["plain"]["train/rejected"]
    assert mean_of_squares >= mean**2
    assert "lower than in training" in caplog.text
    source.write_text(json.dumps({**rows[0], "far": "much"}) + "\n")
    config = tree("rm", models, pairs, tmp_path / "wrong", data=data, rm={"margin": "far"})
    with pytest.raises(DataError, match="expected a finite number, got 'much'") as caught:
        train("rm", config)
    assert "rm.margin" in caught.value.why
