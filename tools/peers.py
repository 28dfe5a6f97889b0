"""Compare steps of GRPO, DPO, KTO and reward models with those of TRL's own trainers.

Both sides start from the same tiny weights in float32 on a CPU, learn from the same tokens with
plain SGD, and make two updates: in the second one the policy is no longer the one that sampled, and
no longer the reference. The table has the largest difference of any weight, and for scale the
largest change. ``--write`` puts it into docs/peers.md. The session `nox -s peers` has the
environment.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from matrix import ROOT, table
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from engine_trainer.config import DPOConfig as OwnDPOConfig
from engine_trainer.config import KTOConfig as OwnKTOConfig
from engine_trainer.config import RewardModelConfig, RLConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.preferences.dpo import train_dpo
from engine_trainer.preferences.kto import train_kto
from engine_trainer.preferences.reward_model import train_reward_model
from engine_trainer.rewards import Score, register
from engine_trainer.rl.learner import Learner
from engine_trainer.run.run import Run

PAGE = ROOT / "docs" / "peers.md"
LIMIT = 1e-6
"""Largest difference of a weight that passes."""
CHARACTERS = ["<pad>", "<eos>", "+", "=", "#", " ", *"0123456789"]
EOS = 1
PROMPTS = ("12+34=", "5+6=", "70+1=", "8+99=")
COMPLETIONS = 4
LENGTH = 7
RATE = 0.5
UPDATES = 2

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One comparison: TRL's settings as text, those of this package, and both weights."""

    task: str
    theirs: str
    ours: str
    run: Callable[[Path], tuple[Weights, Weights, Weights]]
    """Returns the weights of TRL, those of this package, and those at the beginning."""


# --- models and data ------------------------------------------------------------------------------


def make_models(folder: Path) -> None:
    """Write a language model and a value model with the same tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    vocabulary = {character: i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<eos>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    config = Qwen3Config(
        vocab_size=len(CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "language")
    config.num_labels = 1
    AutoModelForTokenClassification.from_config(config).save_pretrained(folder / "value")
    for name in ("language", "value"):
        fast.save_pretrained(folder / name)


def read_weights(folder: Path) -> Weights:
    """Return the weights of an export."""
    from safetensors.torch import load_file

    return {
        k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()
    }


def weights_of(model: torch.nn.Module) -> Weights:
    """Return the weights of a model in memory."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def own_tree(folder: Path, model: str, **sections: Any) -> dict[str, Any]:
    """Return a configuration of this package."""
    types = {"language": "language_model", "value": "value_model"}
    tree = {
        "engine": {
            "model": {"path": str(folder / model)},
            "model_type": types[model],
            "device": "cpu",
            "optimizer": {"name": "torch.optim.SGD", "lr": RATE, "clip_norm": None},
        },
        "run": {
            "output_dir": str(folder / "own"),
            "steps": UPDATES,
            "progress": False,
            "report": False,
            "tensorboard": False,
        },
    }
    for name, value in sections.items():
        tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
    return tree


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    """Return arguments that all of TRL's trainers have."""
    return {
        "output_dir": str(folder / "trl"),
        "max_steps": UPDATES,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        **more,
    }


def sgd(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
    """Return the optimizer of both sides, for TRL."""
    return torch.optim.SGD(model.parameters(), lr=RATE), None


# --- GRPO -----------------------------------------------------------------------------------------


def draw_completions(model: Any) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Return completions for each prompt, with the log-probs of a rollout that is a little off."""
    dice = random.Random(3)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found: dict[str, list[tuple[list[int], list[float]]]] = {}
    for prompt in PROMPTS:
        rows = []
        for number in range(COMPLETIONS):
            tokens = [
                dice.randrange(2, len(CHARACTERS)) for _ in range(dice.randint(2, LENGTH - 1))
            ]
            # The last completion is cut.
            tokens = [*tokens, EOS] if number < COMPLETIONS - 1 else (tokens * LENGTH)[:LENGTH]
            whole = tokenizer(prompt).input_ids + tokens
            with torch.no_grad():
                logits = network(torch.tensor([whole])).logits[0].log_softmax(-1)
            begin = len(whole) - len(tokens)
            exact = [float(logits[begin + t - 1, token]) for t, token in enumerate(tokens)]
            rows.append((tokens, [x + dice.gauss(0.0, 0.4) for x in exact]))
        found[prompt] = rows
    return found


def rewards_of(tokens: Sequence[int]) -> dict[str, float]:
    """Return two rewards of a completion."""
    return {"sum": sum(tokens) / 10.0, "digits": float(sum(t > 10 for t in tokens)) - 0.3}


def grpo(
    theirs: dict[str, Any],
    ours: dict[str, Any],
    *,
    weights: dict[str, float] | None = None,
    trainer: Any = GRPOTrainer,
    config: Any = GRPOConfig,
) -> Callable[[Path], tuple[Weights, Weights, Weights]]:
    """Return the comparison of a GRPO step of two updates."""
    factors = weights or {"sum": 1.0}

    def compare(folder: Path) -> tuple[Weights, Weights, Weights]:
        completions = draw_completions(folder / "language")
        return (
            their_grpo(folder, completions, theirs, factors, trainer, config),
            our_grpo(folder, completions, ours, factors),
            read_weights(folder / "language"),
        )

    return compare


def their_grpo(
    folder: Path,
    completions: dict[str, list[tuple[list[int], list[float]]]],
    settings: dict[str, Any],
    factors: dict[str, float],
    trainer_class: Any,
    config_class: Any,
) -> Weights:
    """Return the weights after TRL's step."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "language", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder / "language", dtype=torch.float32)

    def roll_out(prompts: list[str], _: Any) -> dict[str, Any]:
        seen: dict[str, int] = {}
        rows = []
        for prompt in prompts:
            rows.append(completions[prompt][seen.get(prompt, 0)])
            seen[prompt] = seen.get(prompt, 0) + 1
        return {
            "prompt_ids": [tokenizer(prompt).input_ids for prompt in prompts],
            "completion_ids": [tokens for tokens, _ in rows],
            "logprobs": [log_probs for _, log_probs in rows],
        }

    def reward(name: str) -> Callable[..., list[float]]:
        def score(completion_ids: list[list[int]], **_: Any) -> list[float]:
            return [rewards_of(tokens)[name] for tokens in completion_ids]

        score.__name__ = name
        return score

    count = len(PROMPTS) * COMPLETIONS
    args = config_class(
        **arguments(
            folder,
            per_device_train_batch_size=count,
            num_generations=COMPLETIONS,
            num_iterations=UPDATES,
            max_completion_length=LENGTH,
            shuffle_dataset=False,
            reward_weights=[factors[name] for name in factors],
            **settings,
        )
    )
    trainer = trainer_class(
        model=model,
        reward_funcs=[reward(name) for name in factors],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=tokenizer,
        optimizers=sgd(model),
        rollout_func=roll_out,
    )
    trainer.train()
    return weights_of(model)


def our_grpo(
    folder: Path,
    completions: dict[str, list[tuple[list[int], list[float]]]],
    settings: dict[str, Any],
    factors: dict[str, float],
) -> Weights:
    """Return the weights after this package's step."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "language")
    groups = [
        Group(
            prompt=Prompt(
                tokens=tokenizer(prompt).input_ids, rendered=prompt, text=prompt, answer=None
            ),
            completions=[_scored(tokens, log_probs, factors) for tokens, log_probs in rows],
        )
        for prompt, rows in completions.items()
    ]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    for name in factors:
        register(name)(lambda: lambda _: 0.0)
    rewards = [{"name": name, "weight": weight} for name, weight in factors.items()]
    config = from_tree(
        RLConfig,
        own_tree(
            folder,
            "language",
            data={"source": str(data)},
            reward={"name": "combine", "kwargs": {"rewards": rewards}},
            rollout={"n": COMPLETIONS, "max_new_tokens": LENGTH},
            algorithm={
                "prompts_per_step": len(PROMPTS),
                "epochs": UPDATES,
                "advantage_options": {"eps": 1e-4},
                **settings,
            },
        ),
    )
    with Run(config, kind="rl", total_steps=1) as run:
        run.start(schedule_steps=UPDATES)
        learner = Learner(run, config)
        learner.learn(groups)
        learner.close()
        run.engine.save_hf(folder / "export")
    return read_weights(folder / "export")


def _scored(
    tokens: list[int], log_probs: list[float], factors: dict[str, float]
) -> ScoredCompletion:
    parts = {name: rewards_of(tokens)[name] for name in factors}
    return ScoredCompletion(
        tokens=tokens,
        log_probs=log_probs,
        text="",
        finished=tokens[-1] == EOS,
        score=Score(
            total=sum(factors[name] * value for name, value in parts.items()),
            parts=parts,
            correct=False,
        ),
        weight_versions=[0] * len(tokens),
    )


# --- pairs ----------------------------------------------------------------------------------------


def draw_pairs() -> list[dict[str, Any]]:
    """Return pairs with responses of different lengths, and a margin."""
    dice = random.Random(5)
    rows = []
    for number in range(10):
        a, b = dice.randrange(10), dice.randrange(10)
        rows.append(
            {
                "prompt": f"{a}+{b}=",
                "chosen": str(a + b),
                "rejected": str(dice.randrange(10)) * dice.randint(1, 4),
                "margin": number / 5.0,
            }
        )
    return rows


def draw_short_pairs() -> list[dict[str, Any]]:
    """Return pairs whose prompts have one token, and whose chosen responses have one length.

    TRL's term of supervised fine-tuning is a mean over all tokens of a batch, those of the prompts
    included (ORPO). With these pairs it is the mean of the responses' own means.
    """
    dice = random.Random(6)
    return [
        {
            "prompt": str(dice.randrange(10)),
            "chosen": str(dice.randrange(10)),
            "rejected": str(dice.randrange(10)) * dice.randint(1, 4),
        }
        for _ in range(10)
    ]


def draw_labelled() -> list[dict[str, Any]]:
    """Return labelled completions, two thirds of them desirable."""
    return [
        {
            "prompt": row["prompt"],
            "completion": row["rejected" if number % 3 == 0 else "chosen"],
            "label": number % 3 != 0,
        }
        for number, row in enumerate(draw_pairs())
    ]


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows for this package."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dpo(
    theirs: dict[str, Any],
    ours: dict[str, Any],
    trainer: Any = DPOTrainer,
    config: Any = DPOConfig,
    draw: Callable[[], list[dict[str, Any]]] = draw_pairs,
) -> Callable[[Path], tuple[Weights, Weights, Weights]]:
    """Return the comparison of two updates of DPO."""

    def compare(folder: Path) -> tuple[Weights, Weights, Weights]:
        tokenizer = AutoTokenizer.from_pretrained(folder / "language")
        model = AutoModelForCausalLM.from_pretrained(folder / "language", dtype=torch.float32)
        rows = [{k: v for k, v in row.items() if k != "margin"} for row in draw()]
        settings = {"per_device_train_batch_size": len(rows), "max_length": 64, **theirs}
        trainer(
            model=model,
            args=config(**arguments(folder, **settings)),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            optimizers=sgd(model),
        ).train()
        tree = own_tree(
            folder,
            "language",
            data={"source": str(write_rows(folder, draw()))},
            batch_size=len(rows),
            dpo=ours,
        )
        train_dpo(from_tree(OwnDPOConfig, tree))
        own = read_weights(folder / "own" / "hf")
        return weights_of(model), own, read_weights(folder / "language")

    return compare


def kto(
    theirs: dict[str, Any], ours: dict[str, Any]
) -> Callable[[Path], tuple[Weights, Weights, Weights]]:
    """Return the comparison of two updates of KTO, in which both sides keep the rows' order."""

    def compare(folder: Path) -> tuple[Weights, Weights, Weights]:
        tokenizer = AutoTokenizer.from_pretrained(folder / "language")
        model = AutoModelForCausalLM.from_pretrained(folder / "language", dtype=torch.float32)
        rows = draw_labelled()
        KTOTrainer(
            model=model,
            args=KTOConfig(
                **arguments(folder, per_device_train_batch_size=len(rows), max_length=64, **theirs)
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            optimizers=sgd(model),
        ).train()
        tree = own_tree(
            folder,
            "language",
            data={"source": str(write_rows(folder, rows)), "shuffle": False},
            batch_size=len(rows),
            kto=ours,
        )
        train_kto(from_tree(OwnKTOConfig, tree))
        own = read_weights(folder / "own" / "hf")
        return weights_of(model), own, read_weights(folder / "language")

    return compare


def reward_model(
    theirs: dict[str, Any], ours: dict[str, Any], updates: int = UPDATES
) -> Callable[[Path], tuple[Weights, Weights, Weights]]:
    """Return the comparison of updates of a reward model."""

    def compare(folder: Path) -> tuple[Weights, Weights, Weights]:
        tokenizer = AutoTokenizer.from_pretrained(folder / "value")
        start = read_weights(folder / "value")
        model = AutoModelForSequenceClassification.from_pretrained(
            folder / "value", num_labels=1, dtype=torch.float32
        )
        rows = [
            {
                **{k: row["prompt"] + row[k] for k in ("chosen", "rejected")},
                **({"margin": row["margin"]} if ours.get("margin") else {}),
            }
            for row in draw_pairs()
        ]
        RewardTrainer(
            model=model,
            args=RewardConfig(
                **arguments(
                    folder,
                    per_device_train_batch_size=len(rows),
                    max_length=64,
                    **{"max_steps": updates, **theirs},
                )
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            optimizers=sgd(model),
        ).train()
        tree = own_tree(
            folder,
            "value",
            data={"source": str(write_rows(folder, draw_pairs()))},
            batch_size=len(rows),
            rm=ours,
            run={"steps": updates},
        )
        train_reward_model(from_tree(RewardModelConfig, tree))
        start.pop("score.bias", None)
        return weights_of(model), read_weights(folder / "own" / "hf"), start

    return compare


# --- the table ------------------------------------------------------------------------------------

SEQUENCES = {"aggregation": "seq-mean-token-mean"}


def cases() -> Iterator[Case]:
    """Yield all comparisons."""
    both = {"sum": 1.0, "digits": 0.5}
    kl = {"kl": {"coefficient": 0.2, "bound": None}}
    no_bias = {"kl": {"coefficient": 0.2, "importance": False, "bound": None}}
    gdpo = {"multi_objective_aggregation": "normalize_then_sum"}
    for theirs, ours, more in (
        ({"loss_type": "dapo"}, {}, {}),
        (
            {"loss_type": "dapo", "epsilon": 0.05, "epsilon_high": 0.1},
            {"clip_low": 0.05, "clip_high": 0.1},
            {},
        ),
        ({"loss_type": "grpo"}, SEQUENCES, {}),
        (
            {"loss_type": "dr_grpo", "scale_rewards": "none"},
            {"advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm"},
            {},
        ),
        ({"loss_type": "dapo", "beta": 0.2}, kl, {}),
        ({"loss_type": "dapo", "beta": 0.2, "use_bias_correction_kl": False}, no_bias, {}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02},
            {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.02, **SEQUENCES},
            {},
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 1.02},
            {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.02},
            {},
        ),
        ({"loss_type": "sapo"}, {"loss": "sapo", **SEQUENCES}, {}),
        ({"loss_type": "dapo", "off_policy_mask_threshold": 0.05}, {"sequence_mask": 0.05}, {}),
        ({"loss_type": "dapo", "scale_rewards": "batch"}, {"advantage": "grpo_batch"}, {}),
        ({"loss_type": "dapo", **gdpo}, {"advantage": "gdpo"}, {"weights": both}),
    ):
        yield Case("GRPO", _said(theirs), _said(ours), grpo(theirs, _advantage(ours), **more))
    ours = {"loss": "gmpo", **SEQUENCES}
    yield Case(
        "GRPO",
        "GMPOTrainer",
        _said(ours),
        grpo({}, _advantage(ours), trainer=GMPOTrainer, config=GMPOConfig),
    )
    for theirs, ours in (
        ({"loss_type": "sigmoid"}, {}),
        ({"loss_type": "hinge"}, {"loss": "hinge"}),
        (
            {"loss_type": "ipo", "beta": 2.0},
            {"loss": "ipo", "beta": 2.0, "loss_options": {"per_token": True}},
        ),
        ({"loss_type": "robust", "label_smoothing": 0.1}, {"loss": "robust"}),
        ({"loss_type": "sigmoid_norm"}, {"loss": "sigmoid_norm"}),
        # With one pair in a micro-batch AOT sorts nothing, and is DPO with label smoothing.
        (
            {
                "loss_type": "aot",
                "label_smoothing": 0.1,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 10,
            },
            {"loss_options": {"label_smoothing": 0.1}},
        ),
    ):
        yield Case("DPO", _said(theirs), _said(ours), dpo(theirs, ours))
    simpo = {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5}
    ours = {"loss": "simpo", "loss_options": {"gamma": 0.5}}
    yield Case(
        "DPO", f"CPOTrainer, {_said(simpo)}", _said(ours), dpo(simpo, ours, CPOTrainer, CPOConfig)
    )
    rpo = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    ours = {"sft_coefficient": 0.5}
    yield Case("DPO", _said(rpo), _said(ours), dpo(rpo, ours, draw=draw_short_pairs))
    orpo, ours = {"beta": 0.5}, {"loss": "orpo", "beta": 0.5}
    yield Case(
        "DPO",
        f"ORPOTrainer, {_said(orpo)}",
        _said(ours),
        dpo(orpo, ours, ORPOTrainer, ORPOConfig, draw=draw_short_pairs),
    )
    # In the second update the baseline is above 0 with the first two, and held to 0 with the third.
    for theirs, ours in (
        ({}, {}),
        (
            {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 0.1},
            {"beta": 0.5, "desirable": 2.0, "undesirable": 0.1},
        ),
        (
            {"beta": 0.5, "desirable_weight": 0.5, "undesirable_weight": 1.5},
            {"beta": 0.5, "desirable": 0.5, "undesirable": 1.5},
        ),
        ({"loss_type": "apo_zero_unpaired"}, {"loss": "apo_zero_unpaired"}),
    ):
        yield Case("KTO", _said(theirs), _said(ours), kto(theirs, ours))
    center = {"center_rewards_coefficient": 0.01}
    for theirs, ours, updates in (
        ({}, {}, UPDATES),
        ({}, {"margin": "margin"}, UPDATES),
        # Its head has no bias, and here the bias begins to move with the first update.
        (center, {"center": 0.01}, 1),
    ):
        said = _said(theirs) or ("column margin" if ours else "")
        said += ", one update" * (updates == 1)
        yield Case("reward model", said, _said(ours), reward_model(theirs, ours, updates))


def _advantage(ours: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the option of grpo's advantages where they have none."""
    return {**ours, "advantage_options": {}} if ours.get("advantage") == "dr_grpo" else ours


def _said(settings: dict[str, Any]) -> str:
    return ", ".join(f"{k}={json.dumps(v).replace(chr(34), '')}" for k, v in settings.items())


def measure(case: Case) -> tuple[float, float]:
    """Return the largest difference of a weight, and the largest change of one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder)
        theirs, ours, start = case.run(folder)
    shared = [key for key in start if key in theirs and key in ours]
    missing = set(start) ^ set(shared)
    if missing:
        sys.exit(f"{case.theirs}: weights that only one side has: {', '.join(sorted(missing))}")
    difference = max(float((theirs[k] - ours[k]).abs().max()) for k in shared)
    change = max(float((theirs[k] - start[k]).abs().max()) for k in shared)
    return difference, change


def render(rows: Sequence[tuple[Case, float, float]]) -> str:
    """Return the page."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("trl", "transformers", "torch")
    )
    cells = [
        (
            case.task,
            f"`{case.theirs}`" if case.theirs else "defaults",
            f"`{case.ours}`" if case.ours else "defaults",
            f"{difference:.1e}",
            f"{change:.1e}",
        )
        for case, difference, change in rows
    ]
    date = datetime.datetime.now(tz=datetime.UTC).date()
    head = ("task", "TRL", "here", "largest difference", "largest change")
    return f"""\
# The same step as TRL's

<!-- Generated by tools/peers.py: run `nox -s peers -- --write`. -->

Steps of this trainer beside those of [TRL](https://github.com/huggingface/trl)'s own trainers: the
same tiny Qwen3, the same tokens and rewards, float32 on a CPU, plain SGD with a rate of {RATE}, and
{UPDATES} updates. Before the second update the policy has moved away from its old log-probs and
from the reference. A weight may differ by {LIMIT:.0e} at most; the last column is the largest
change of a weight.

{table(head, cells)}
Measured on {date} with {versions}.
`nox -s peers` measures it again.
"""


def main() -> int:
    """Measure all cases, print the table, and return 1 if a difference is too large."""
    chosen = [a for a in sys.argv[1:] if not a.startswith("-")]
    rows: list[tuple[Case, float, float]] = []
    for case in cases():
        label = f"{case.task}: {case.theirs or 'defaults'} | {case.ours or 'defaults'}"
        if chosen and not any(word in label for word in chosen):
            continue
        difference, change = measure(case)
        verdict = "ok" if difference <= LIMIT else "TOO FAR"
        print(f"{verdict:8}{difference:9.1e} of {change:8.1e}  {label}", flush=True)
        rows.append((case, difference, change))
    if "--write" in sys.argv and not chosen:
        PAGE.write_text(render(rows))
    return int(any(difference > LIMIT for _, difference, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
