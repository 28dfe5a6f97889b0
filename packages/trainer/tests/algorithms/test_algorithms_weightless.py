"""Losses and sums over tokens, none of which reads tokens without weight.

None depends on the default dtype.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import engine_api
import engine_trainer
from engine_api.batch import Batch
from engine_api.losses import AGGREGATIONS, SFTLoss, coefficients_of, token_weights
from engine_api.results import LossOutput, TokenOutputs
from engine_trainer.algorithms import Completions
from engine_trainer.algorithms.advantages import group_advantages
from engine_trainer.algorithms.correction import correct, ratios
from engine_trainer.algorithms.losses import ESTIMATORS, PolicyLoss
from engine_trainer.algorithms.packed import document_of, sum_by_document
from engine_trainer.algorithms.preference import LinearLoss, pair_loss
from engine_trainer.algorithms.returns import Moments, gae, returns_to_go, token_rewards, whiten
from engine_trainer.algorithms.shaping import informative, overlong_penalty
from engine_trainer.algorithms.value_loss import ValueLoss
from engine_trainer.config import CorrectionSection
from engine_trainer.config.algorithm import AlgorithmSection, CriticSection, KLSection
from engine_trainer.extensions.built_in import LOSSES as POLICY_LOSSES
from engine_trainer.preferences.loop import document_sums
from engine_trainer.rl.credit import CreditAssignment
from engine_trainer.rl.kept_tokens import FIELD, TokenWatch
from engine_trainer.rl.mismatch import MismatchWatch
from engine_trainer.sft import heldout_loss

CU = torch.tensor([0, 5, 9, 11, 16])  # the third document has no token that counts
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0], dtype=torch.float32)
OUTPUTS = ("log_probs", "entropy", "values")
CORRECTION = CorrectionSection(
    weight="token", cap=1.2, reject="geometric", reject_low=0.5, reject_high=2.0
)
POISONS = (math.nan, math.inf, -math.inf)


def drawn() -> dict[str, torch.Tensor]:
    """Return per-token numbers of every name that a loss reads."""
    dice = torch.Generator().manual_seed(7)

    def draw(scale: float = 1.0) -> torch.Tensor:
        return torch.randn(len(MASK), generator=dice, dtype=torch.float32) * scale

    log_probs = -draw().abs() - 0.5
    return {
        "log_probs": log_probs,
        "entropy": draw().abs(),
        "values": draw(),
        "old_log_probs": log_probs + draw(0.2),
        "ref_log_probs": log_probs + draw(0.5),
        "rollout_log_probs": log_probs + draw(0.3),
        "advantages": draw(),
        "correction": draw().abs(),
        "coefficient": draw() * MASK,
        "returns": draw(),
        "old_values": draw(0.3),
    }


def batch_of(numbers: dict[str, torch.Tensor]) -> Batch:
    """Build a batch with all fields, unchecked like those that an engine or a loss computes."""
    batch = Batch(
        input_ids=torch.arange(len(MASK)),
        cu_seqlens=CU,
        fields={"mask": MASK, "loss_weight": MASK * 0.5},
    )
    return batch.with_computed(
        **{name: value for name, value in numbers.items() if name not in OUTPUTS},
        # Every second token with weight is kept.
        **{FIELD: torch.where((MASK > 0) & (torch.arange(len(MASK)) % 2 == 0), 0, -1)},
    )


LOSSES = {
    "sft": SFTLoss(),
    "value": ValueLoss(),
    "value, clipped": ValueLoss(clip=0.5),
    "pairs of log-probs": LinearLoss(),
    "pairs of values": LinearLoss(output="values"),
    "on policy": PolicyLoss(on_policy=True, corrected=True),
    "gspo on policy": PolicyLoss(kind="gspo", on_policy=True),
    "dual clip": PolicyLoss(dual_clip=1.5),
    "entropy": PolicyLoss(entropy_coef=0.1),
    "watched": MismatchWatch(PolicyLoss(on_policy=True, entropy=True)),
    "kept": TokenWatch(PolicyLoss(corrected=True)),
    "watched and corrected": MismatchWatch(PolicyLoss(corrected=True, kl_coef=0.1), CORRECTION),
    **{
        f"{kind} with all terms": PolicyLoss(
            kind=kind, kl_coef=0.1, entropy_coef=0.1, corrected=True
        )
        for kind in POLICY_LOSSES.built_in
    },
    **{
        f"{estimator}, {importance}": PolicyLoss(
            kl_coef=0.1, kl_estimator=estimator, kl_importance=importance
        )
        for estimator in ESTIMATORS
        for importance in (True, False)
    },
}


def everything_of(loss, numbers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the loss, its metrics, its coefficients and its gradients by the model's outputs."""
    leaves = {name: numbers[name].clone().requires_grad_() for name in OUTPUTS}
    batch = batch_of(numbers)
    result = loss(TokenOutputs(**leaves), batch)
    gradients = torch.autograd.grad(
        result.loss, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    known = coefficients_of(loss, batch)
    return {
        "loss": result.loss.detach(),
        **{f"metric {name}": torch.as_tensor(value) for name, value in result.metrics.items()},
        **{
            f"gradient of {name}": gradient
            for name, gradient in zip(leaves, gradients, strict=True)
        },
        **({} if known is None else {"coefficients": known}),
    }


def poisoned(numbers: dict[str, torch.Tensor], name: str, poison: float) -> dict[str, torch.Tensor]:
    return {**numbers, name: numbers[name].where(MASK > 0, poison)}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_does_not_read_tokens_without_weight(name):
    numbers = drawn()
    clean = everything_of(LOSSES[name], numbers)
    assert float(clean["loss"]) != 0
    for field in numbers:
        for poison in POISONS:
            found = everything_of(LOSSES[name], poisoned(numbers, field, poison))
            assert found.keys() == clean.keys()
            for part, value in clean.items():
                assert bool(value.isfinite().all()), part
                assert torch.equal(found[part], value), (field, poison, part)


def test_every_loss_of_the_packages_is_among_them():
    """Check that every class with a loss's signature is listed above."""
    found = set()
    for package in (engine_api, engine_trainer):
        for path in Path(str(package.__file__)).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and any(_is_loss(f) for f in node.body):
                    found.add(node.name)
    assert found - {"LossFn"} == {type(loss).__name__ for loss in LOSSES.values()}


def _is_loss(function: ast.stmt) -> bool:
    if not isinstance(function, ast.FunctionDef) or function.name != "__call__":
        return False
    return isinstance(function.returns, ast.Name) and function.returns.id == LossOutput.__name__


# --- functions of packed tokens -----------------------------------------------------------------


class AllRanks:
    """A policy whose dp shards are all local."""

    def gather(self, rows):
        return list(rows)


def credited(numbers: dict[str, torch.Tensor], **section) -> Iterator[torch.Tensor]:
    """Return advantages and returns as ``section`` says, with a KL in the reward."""
    kl = KLSection(coefficient=0.1, where="reward")
    algorithm = AlgorithmSection(kl=kl, **section)
    batch = batch_of(numbers)
    places = [[(0, 0), (0, 1), (1, 0), (1, 1)]]
    rewards = torch.tensor([[1.0, 0.0], [0.5, 2.0]], dtype=torch.float64)
    values = [numbers["values"]] if "critic" in section else []
    credit = CreditAssignment(algorithm, AllRanks()).assign(
        [batch], places, Completions(rewards=rewards), values
    )  # pyright: ignore[reportArgumentType]
    yield from (
        *credit.advantages,
        *credit.returns,
        torch.tensor(list(credit.figures.values()), dtype=torch.float64),
    )


def corrected(numbers: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return weights, kept tokens, and the sums for the figures."""
    result = correct(
        ratios(numbers["old_log_probs"], numbers["rollout_log_probs"], MASK, CU), CORRECTION
    )
    return [result.weights, result.kept, *result.sums.values()]


class Rows:
    """One document, whose fields are not read."""

    documents = (SimpleNamespace(fields=dict),)

    def __len__(self) -> int:
        return 1


def heldout(numbers: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of held-out documents."""
    batch = batch_of(numbers)
    engine = SimpleNamespace(
        infer_batch=lambda _: TokenOutputs(log_probs=numbers["log_probs"]),
        topology=SimpleNamespace(is_primary=True),
    )
    run = SimpleNamespace(
        engine=engine,
        pack_local=lambda _: batch,
        comm=SimpleNamespace(all_gather=lambda row: [row]),
    )
    figures = heldout_loss(run, Rows())  # pyright: ignore[reportArgumentType]
    return torch.tensor(list(figures.values()), dtype=torch.float64)


FUNCTIONS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    **{
        f"advantages of {name}": lambda n, s=section: list(credited(n, **s))
        for name, section in {
            "grpo": {"advantage": "grpo"},
            "reinforce_pp": {"advantage": "reinforce_pp"},
            "gae": {"advantage": "gae", "critic": CriticSection(), "lam": 0.9},
        }.items()
    },
    "correction": corrected,
    "sums of pairs": lambda n: document_sums(TokenOutputs(log_probs=n["log_probs"]), batch_of(n)),
    "held-out loss": heldout,
    "moments": lambda n: torch.tensor(
        astuple(Moments.of(n["advantages"], MASK)), dtype=torch.float64
    ),
    "whitened": lambda n: whiten(n["advantages"], MASK, Moments(count=9, mean=0.1, deviations=3.0)),
    "returns": lambda n: returns_to_go(
        token_rewards(
            torch.arange(4.0, dtype=torch.float64), MASK, CU, kl=n["entropy"], coefficient=0.1
        ),
        MASK,
        CU,
        0.9,
    ),
    "gae": lambda n: list(gae(n["advantages"], n["values"], MASK, CU, gamma=0.9, lam=0.8)),
}


def tensors_of(value: object) -> list[torch.Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_packed_tokens_does_not_read_those_without_weight(name):
    numbers = drawn()
    clean = tensors_of(FUNCTIONS[name](numbers))
    for field in numbers:
        for poison in POISONS:
            for found, value in zip(
                tensors_of(FUNCTIONS[name](poisoned(numbers, field, poison))), clean, strict=True
            ):
                assert bool(value.double().isfinite().all())
                assert torch.equal(found, value), (field, poison)


# --- the default dtype --------------------------------------------------------------------------

WITHOUT_TOKENS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    **{
        f"weights, {mode}": lambda _, mode=mode: token_weights(MASK, CU, mode)
        for mode in AGGREGATIONS
    },
    "weights of an integer mask": lambda _: token_weights(MASK.long(), CU, "seq-mean-token-mean"),
    "documents": lambda _: document_of(CU),
    "sums by document": lambda n: sum_by_document(n["values"], CU),
    "group advantages": lambda n: group_advantages(n["values"].view(4, 4), "grpo"),
    "informative": lambda n: informative(n["values"].view(4, 4)),
    "overlong": lambda _: overlong_penalty(
        torch.tensor([[7, 9], [10, 3]]), max_length=10, buffer=3, factor=0.7
    ),
    "pairs": lambda n: list(pair_loss(n["values"], 0.1, "sigmoid")),
    "packed": lambda _: list(
        Batch.pack(
            [
                {"input_ids": [1, 2], "loss_weight": [0.0, 0.1]},
                {"input_ids": [3], "loss_weight": [0.0]},
            ]
        ).fields.values()
    ),
    **{
        f"loss: {name}": lambda n, loss=loss: list(everything_of(loss, n).values())
        for name, loss in LOSSES.items()
    },
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS | WITHOUT_TOKENS)
def test_another_default_dtype_changes_no_number_and_no_dtype(name, dtype):
    function = (FUNCTIONS | WITHOUT_TOKENS)[name]
    numbers = drawn()
    expected = tensors_of(function(numbers))
    with default_dtype(dtype):
        found = tensors_of(function(numbers))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
