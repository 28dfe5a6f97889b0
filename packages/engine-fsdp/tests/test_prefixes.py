"""Documents that share their beginnings: the same numbers, and the models that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    LoraConfig,
    Memory,
    ModelSource,
    OptimizerConfig,
    Parallelism,
    Precision,
)
from engine_api.errors import ConfigError, EngineError, UnsupportedCapability
from engine_api.results import LossOutput, TokenOutputs
from engine_conformance.fixtures import TinyModel, write_checkpoint

PROMPT = [7, 3, 9, 4, 1, 12, 5]
# A whole answer that another one begins with, two that begin alike, a prompt alone, and two equal.
ANSWERS = [[2, 8], [2, 8, 6, 11], [2, 5, 5], [13], [], [13]]
OTHERS = [[7, 3, 1, 1], [20, 21, 22]]


def batch() -> Batch:
    documents = [[*PROMPT, *answer] for answer in ANSWERS] + OTHERS
    rows: list[dict[str, Any]] = []
    for i in (3, 6, 0, 5, 2, 7, 1, 4):
        weights = [0.0, *(0.3 + ((i + j) % 5) / 4 for j in range(len(documents[i]) - 1))]
        rows.append({"input_ids": documents[i], "loss_weight": weights})
    return Batch.pack(rows)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyModel], Path]:
    def write(model: TinyModel) -> Path:
        return Path(write_checkpoint(tmp_path_factory.mktemp("model"), model))

    return write


def make(folder: Path, kind: str = "language_model", **config: Any) -> Any:
    config = {"optimizer": OptimizerConfig(name="torch.optim.SGD", lr=1.0, clip_norm=None)} | config
    engine = EngineRegistry.create(
        backend="fsdp2",
        model_type=kind,
        device="cpu",
        config=EngineConfig(model=ModelSource(path=str(folder)), **config),
    )
    engine.initialize()
    return engine


def weighted(outputs: TokenOutputs, batch: Batch) -> LossOutput:
    """Weigh each token's output and the square of it, so that no coefficient is known."""
    (values, *_) = outputs.tensors()
    return LossOutput(loss=(batch.loss_weight * (values + values.square())).sum(), metrics={})


class Linear:
    """A loss whose derivative is known before the forward pass."""

    needs = ("log_probs",)

    def coefficients(self, batch: Batch) -> torch.Tensor:
        return -batch.loss_weight

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        assert outputs.log_probs is not None
        return LossOutput(loss=-(batch.loss_weight * outputs.log_probs).sum(), metrics={})


class Values:
    needs = ("values",)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        return weighted(outputs, batch)


class LogProbs(Values):
    needs = ("log_probs",)


def results(engine: Any, loss: Any) -> dict[str, torch.Tensor]:
    """Return outputs, loss and norm, and the weights after one step of plain descent."""
    kind = engine.gives[0]
    found = engine.infer_batch(batch(), temperature=0.7)
    trained = engine.train_batch(batch(), loss, denominator=50.0, temperature=0.7)
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    engine.close()
    return {
        "outputs": getattr(found, kind),
        "loss": torch.tensor(trained.loss),
        "norm": torch.tensor(trained.grad_norm),
        **weights,
    }


@pytest.mark.parametrize(
    ("kind", "loss", "memory", "model"),
    [
        ("language_model", LogProbs(), {}, TinyModel()),
        ("language_model", Linear(), {"logit_chunk": 4, "pad_to_multiple": 8}, TinyModel()),
        ("language_model", LogProbs(), {"max_tokens": 13, "recompute": "full"}, TinyModel()),
        ("value_model", Values(), {"max_tokens": 17}, TinyModel(value_model=True)),
    ],
    ids=["log-probs", "known coefficients", "micro-batches", "values"],
)
def test_a_shared_beginning_changes_no_number(
    folders: Callable[[TinyModel], Path], kind: str, loss: Any, memory: Any, model: TinyModel
) -> None:
    folder = folders(model)
    got, want = (
        results(make(folder, kind, memory=Memory(share_prefixes=shared, **memory)), loss)
        for shared in (True, False)
    )
    # Plain descent at a rate of 1: weights differ by what the gradient differs.
    close = 1e-6 * max(1.0, float(want["norm"]))
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, atol=close, rtol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_shared_beginning_changes_no_state(folders: Callable[[TinyModel], Path]) -> None:
    """The state that predicts an answer's first token is the one after the prompt."""
    folder = folders(TinyModel())
    got, want = (
        make(folder, memory=Memory(share_prefixes=shared, max_tokens=17)).infer_states(batch())
        for shared in (True, False)
    )
    assert want.abs().max() > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
FULL = {"layer_types": ["full_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("model", "config", "error", "words"),
    [
        (TinyModel(family="mistral", keys=WINDOW), {}, UnsupportedCapability, "a sliding window"),
        (TinyModel(family="gemma2", keys=FULL), {}, UnsupportedCapability, "softcap"),
        (TinyModel(), {"lora": LoraConfig(rank=2, dropout=0.1)}, ConfigError, "lora.dropout"),
        (TinyModel(), {"parallelism": Parallelism(ulysses=2)}, EngineError, "ulysses"),
    ],
    ids=["window", "softcap", "dropout", "ulysses"],
)
def test_what_no_tree_of_documents_is_computed_with(
    folders: Callable[[TinyModel], Path],
    model: TinyModel,
    config: Any,
    error: type[EngineError],
    words: str,
) -> None:
    with pytest.raises(error, match=words) as caught:
        make(folders(model), memory=Memory(share_prefixes=True), **config)
    assert caught.value.remedy


def test_half_precision_adds_up_what_documents_share(
    folders: Callable[[TinyModel], Path],
) -> None:
    precision = Precision(compute="bfloat16")
    folder = folders(TinyModel())
    half = results(make(folder, memory=Memory(share_prefixes=True), precision=precision), Linear())
    whole = results(make(folder, memory=Memory()), Linear())
    assert float(half["norm"]) == pytest.approx(float(whole["norm"]), rel=0.05)
