"""The balance loss as the paper writes it, in float64 and one document at a time.

DeepSeek-V3, arXiv:2412.19437, equations 17 to 20.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import oracle
from torch import Tensor

from engine_api import Batch

DOCUMENTS = (
    (5, 9, 7, 8, 3, 21, 40, 5, 13, 33, 2),
    (11, 2, 60),
    (4, 4, 50, 31, 8, 63, 1, 17, 29, 44, 6, 51, 51, 12, 38, 3, 9, 22, 7),
    (19, 8, 27, 27, 3),
)


def rows_of(documents: Sequence[Sequence[int]] = DOCUMENTS) -> list[dict[str, Any]]:
    """Return the documents, whose first two tokens are prompts."""
    return [
        {"input_ids": list(ids), "loss_weight": [0.0, 0.0, *[1.0] * (len(ids) - 2)]}
        for ids in documents
    ]


def pack(documents: Sequence[Sequence[int]] = DOCUMENTS) -> Batch:
    """Return the documents as a batch."""
    return Batch.pack(rows_of(documents))


@dataclass(frozen=True)
class Expected:
    """The gradients of a step by name of the saved weight, and its losses."""

    gradients: dict[str, Tensor]
    loss: float
    balance: float


def expect(
    folder: str,
    coefficient: float,
    *,
    sigmoid: bool = False,
    documents: Sequence[Sequence[int]] = DOCUMENTS,
) -> Expected:
    """Return the gradients of one call on documents, by transformers in float64.

    The routers return their logits first and the experts of each token last.
    """
    model = oracle(folder)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    seen: list[tuple[Tensor, Tensor]] = []
    for module in model.modules():
        if re.search(r"Router$", type(module).__name__):
            module.register_forward_hook(lambda _, __, out: seen.append((out[0], out[2])))
    total = sum(map(len, documents))
    learned = sum(len(ids) - 2 for ids in documents)
    nll = torch.zeros((), dtype=torch.float64)
    balance = torch.zeros((), dtype=torch.float64)
    for document in documents:
        ids = torch.tensor(document)
        seen.clear()
        scores = model(input_ids=ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        nll = nll - scores[1:-1].gather(-1, ids[2:, None]).sum()
        assert seen, "the model has routers"
        for logits, chosen in seen:
            layer = _balance(logits.double(), chosen, sigmoid=sigmoid)
            balance = balance + layer * len(document) / total
    (nll / learned + coefficient * balance).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    # transformers saves experts that it holds as one tensor under names of their own.
    with tempfile.TemporaryDirectory() as after:
        model.save_pretrained(after)
        gradients = subtract(read(folder), read(after))
    return Expected(gradients, float(nll.detach()) / learned, float(balance.detach()))


def read(folder: Path | str) -> dict[str, Tensor]:
    """Return the weights of a model's folder in float64."""
    files = Path(folder).glob("*.safetensors")
    return {name: one.double() for file in files for name, one in load_file(file).items()}


def subtract(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return how far each weight has moved."""
    assert before.keys() == after.keys()
    return {name: before[name].double() - after[name].double() for name in before}


def _balance(logits: Tensor, chosen: Tensor, *, sigmoid: bool) -> Tensor:
    """Return the loss of one layer and one document, expert by expert."""
    tokens, experts = logits.shape
    scores = logits.sigmoid() if sigmoid else logits.exp()
    scores = scores / scores.sum(-1, keepdim=True)
    loss = logits.new_zeros(())
    for expert in range(experts):
        served = sum(int(expert in row.tolist()) for row in chosen)
        share = served * experts / (chosen.shape[1] * tokens)
        loss = loss + share * scores[:, expert].mean()
    return loss


def assert_step(found: tuple[dict[str, Tensor], Any, Any], expected: Expected) -> None:
    """Assert that a step has the expected gradients, loss and metric (``balance_ranks.step``)."""
    gradients, output, _ = found
    assert_gradients(gradients, expected.gradients)
    assert output.loss == pytest.approx(expected.loss, rel=1e-5)
    assert output.metrics["balance_loss"] == pytest.approx(expected.balance, rel=1e-5)


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that gradients in float32 are those expected, to 1e-5 of each weight's largest."""
    assert found.keys() == expected.keys()
    for name, exact in expected.items():
        worst = float((found[name] - exact).abs().max())
        largest = float(exact.abs().max())
        assert worst <= 1e-5 * largest, f"{name}: {worst} of {largest}"
