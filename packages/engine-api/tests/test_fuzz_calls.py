"""Fuzz tests of an engine's members.

Arbitrary arguments give a result that keeps the contract, or a typed error and no change.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import fuzz
from hypothesis import example, given
from hypothesis import strategies as st

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    LossOutput,
    ModelSource,
    OptimizerConfig,
    sft_loss,
)
from engine_api.errors import BatchError, ConfigError, EngineError, EngineStateError

VOCABULARY = 17
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 8,
    "tie_word_embeddings": True,
}


class MadeUpError(Exception):
    """An error of a user's own loss."""


def raises(outputs, batch):
    raise MadeUpError


def returns(value) -> Callable[..., Any]:
    return lambda outputs, batch: value


def with_metrics(metrics) -> Callable[..., Any]:
    return lambda outputs, batch: LossOutput(loss=outputs.log_probs.sum(), metrics=metrics)


def with_needs(needs) -> Callable[..., Any]:
    def loss(outputs, batch):
        return LossOutput(loss=outputs.log_probs.sum())

    loss.needs = needs
    return loss


class WithCoefficients:
    """A loss that states its gradient in advance, correctly or not."""

    def __init__(self, coefficients) -> None:
        self.coefficients = coefficients

    def __call__(self, outputs, batch):
        return LossOutput(loss=-(batch.loss_weight * outputs.log_probs).sum())


LOSSES: dict[str, Any] = {
    "sft": sft_loss,
    "raises": raises,
    "none": returns(None),
    "number": returns(1.0),
    "tensor": returns(torch.ones(())),
    "constant": lambda outputs, batch: LossOutput(loss=torch.ones(())),
    "vector": lambda outputs, batch: LossOutput(loss=outputs.log_probs),
    "integer": lambda outputs, batch: LossOutput(loss=outputs.log_probs.long().sum()),
    "text": lambda outputs, batch: LossOutput(loss="1"),  # type: ignore[arg-type]
    "nan": lambda outputs, batch: LossOutput(loss=outputs.log_probs.sum() * math.nan),
    "metrics are a list": with_metrics([1]),
    "metrics are text": with_metrics({"a": "1"}),
    "metrics are a vector": with_metrics({"a": torch.ones(2)}),
    "metrics are complex": with_metrics({"a": torch.ones((), dtype=torch.complex64)}),
    "metrics have the loss's name": with_metrics({"loss": 1.0}),
    "metrics have no name": with_metrics({None: 1.0}),
    "needs text": with_needs("log_probs"),
    "needs a number": with_needs(3),
    "needs numbers": with_needs((3,)),
    "needs the unknown": with_needs(("logits",)),
    "coefficients are no function": WithCoefficients(3),
    "coefficients are a list": WithCoefficients(lambda batch: [0.0] * batch.num_tokens),
    "coefficients are short": WithCoefficients(lambda batch: -batch.loss_weight[1:]),
}
NUMBERS: list[Any] = [
    1.0,
    2,
    0.5,
    "1",
    [],
    None,
    True,
    False,
    math.nan,
    math.inf,
    -1.0,
    0,
    0.0,
    1e-300,
    1e300,
    10**400,
    Fraction(1, 2),
    1j,
    np.float32(0.5),
    np.int64(2),
    torch.tensor(1.0),
    torch.ones(2),
    {},
    b"1",
    object,
]
SWITCHES: list[Any] = [True, False, "yes", "", 1, 0, None, [], torch.tensor(True), np.bool_(True)]
PATHS: list[Any] = ["\0", "a" * 5000, "", None, 3, [], b"x", True]


def good_batch() -> Batch:
    return Batch.pack(
        [
            {"input_ids": [1, 2, 3], "loss_weight": [0.0, 1.0, 1.0]},
            {"input_ids": [4, 5], "loss_weight": [0.0, 1.0]},
        ]
    )


BATCHES: dict[str, Callable[[], Any]] = {
    "good": good_batch,
    "empty": lambda: Batch.pack([]),
    "no weight": lambda: Batch.pack([{"input_ids": [1, 2]}]),
    "weightless": lambda: Batch.pack([{"input_ids": [1, 2], "loss_weight": [0.0, 0.0]}]),
    "outside": lambda: Batch.pack([{"input_ids": [1, VOCABULARY], "loss_weight": [0.0, 1.0]}]),
    "negative": lambda: Batch.pack([{"input_ids": [1, -1], "loss_weight": [0.0, 1.0]}]),
    "too long": lambda: Batch.pack([{"input_ids": [1] * 40, "loss_weight": [0.0] * 40}]),
    "none": lambda: None,
    "tensor": lambda: torch.tensor([1, 2]),
    "mapping": lambda: {"input_ids": torch.tensor([1, 2])},
    "class": lambda: Batch,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Return a real engine with a tiny model of random weights, after one step."""
    if not any("fsdp2" in row.backends for _, row in EngineRegistry.rows()):
        pytest.skip("engine-fsdp is not installed")
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    from engine_api import Memory

    config = EngineConfig(
        model=ModelSource(path=str(folder), init="random"),
        optimizer=OptimizerConfig(lr=0.01),
        memory=Memory(max_tokens=32),
    )
    made = EngineRegistry.create(
        model_type="language_model", backend="fsdp2", device="cpu", config=config
    )
    made.initialize()
    made.train_batch(good_batch(), sft_loss)
    yield made
    made.close()


@dataclass(frozen=True)
class State:
    """The state that a call could change.

    It is weights and optimizer by key, version, generators and gradients.
    """

    tensors: dict[str, torch.Tensor]
    version: int
    generators: tuple[Any, ...]
    gradients: list[torch.Tensor | None]

    @staticmethod
    def of(engine) -> State:
        tensors = {key: tensor.clone() for key, (tensor, _) in engine.state_shards().items()}
        generators = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))  # noqa: NPY002 - the global one is what user code draws from
        gradients = [
            None if entry.param.grad is None else entry.param.grad.clone() for entry in engine.table
        ]
        return State(tensors, engine.weight_version, generators, gradients)

    def is_kept_by(self, other: State) -> bool:
        """Return whether weights, optimizer, version and generators are bitwise the same."""
        same = self.tensors.keys() == other.tensors.keys() and all(
            torch.equal(tensor, other.tensors[key]) for key, tensor in self.tensors.items()
        )
        return same and (self.version, self.generators) == (other.version, other.generators)

    def has_gradients_of(self, other: State) -> bool:
        return all(
            (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(self.gradients, other.gradients, strict=True)
        )


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the error of the contract or of the loss that it raises.

    Any other exception fails the test.
    """
    try:
        return call()
    except (EngineError, MadeUpError) as error:
        return error


def assert_usable(engine) -> None:
    """Check that a good call still works, and that inference returns the same values as before."""
    first, second = (engine.infer_batch(good_batch(), entropy=True) for _ in range(2))
    assert bool(first.log_probs.isfinite().all())
    assert torch.equal(first.log_probs, second.log_probs)


def assert_refused(error: EngineError | MadeUpError, before: State, after: State) -> None:
    assert before.is_kept_by(after), f"{error!r} has changed the state"
    if isinstance(error, MadeUpError) or getattr(error, "field", "").startswith(
        ("loss", "metrics")
    ):
        dropped = all(gradient is None for gradient in after.gradients)
        assert dropped or after.has_gradients_of(before), "half a gradient is left"
    else:
        assert after.has_gradients_of(before), f"{error!r} has changed gradients"
    if isinstance(error, ConfigError):
        assert error.field in str(error)
    elif isinstance(error, BatchError):
        assert f"batch.{error.field}" in str(error)


@pytest.mark.slow
@fuzz(cost=4)
@given(
    called=st.sampled_from(["train_batch", "forward_backward"]),
    batch=st.one_of(st.just("good"), st.sampled_from(sorted(BATCHES))),
    loss=st.one_of(st.just("sft"), st.sampled_from(sorted(LOSSES))),
    denominator=st.one_of(st.none(), st.integers(0, len(NUMBERS) - 1)),
    temperature=st.one_of(st.none(), st.integers(0, len(NUMBERS) - 1)),
    accumulated=st.booleans(),
)
@example(
    called="train_batch",
    batch="good",
    loss="sft",
    denominator=NUMBERS.index("1"),
    temperature=None,
    accumulated=True,
)
@example(
    called="forward_backward",
    batch="good",
    loss="sft",
    denominator=None,
    temperature=NUMBERS.index([]),
    accumulated=True,
)
@example(
    called="forward_backward",
    batch="good",
    loss="metrics are text",
    denominator=None,
    temperature=None,
    accumulated=True,
)
def test_a_call_that_trains_is_a_step_or_changes_nothing(
    engine, called, batch, loss, denominator, temperature, accumulated
):
    given_batch = BATCHES[batch]()
    given_loss = LOSSES[loss]
    arguments = {"denominator": denominator, "temperature": temperature}
    arguments = {name: NUMBERS[index] for name, index in arguments.items() if index is not None}
    if accumulated:
        engine.forward_backward(good_batch(), sft_loss)
    before = State.of(engine)
    result = outcome(lambda: getattr(engine, called)(given_batch, given_loss, **arguments))
    after = State.of(engine)
    if isinstance(result, EngineError | MadeUpError):
        assert_refused(result, before, after)
    elif called == "forward_backward" or result.skipped:
        assert before.is_kept_by(after)
    else:
        assert after.version == before.version + 1
        assert all(bool(t.isfinite().all()) for t in after.tensors.values())
        assert math.isfinite(result.loss)
        assert isinstance(result.denominator, float)
    if called == "forward_backward" and not isinstance(result, EngineError | MadeUpError):
        engine.optimizer_step()
    engine._drop_gradients()
    assert_usable(engine)
    with pytest.raises(EngineStateError, match="without a gradient"):
        engine.optimizer_step()


@fuzz(cost=2)
@given(
    batch=st.sampled_from(sorted(BATCHES)),
    temperature=st.integers(0, len(NUMBERS) - 1),
    entropy=st.integers(0, len(SWITCHES) - 1),
    adapter=st.integers(0, len(SWITCHES) - 1),
)
@example("good", NUMBERS.index(1.0), SWITCHES.index("yes"), 0)
@example("good", NUMBERS.index(1e-300), 0, 0)
def test_inference_is_finite_or_refused_and_changes_nothing(
    engine, batch, temperature, entropy, adapter
):
    given_batch = BATCHES[batch]()
    before = State.of(engine)
    result = outcome(
        lambda: engine.infer_batch(
            given_batch,
            temperature=NUMBERS[temperature],
            entropy=SWITCHES[entropy],
            adapter=SWITCHES[adapter],
        )
    )
    if isinstance(result, EngineError):
        assert_refused(result, before, State.of(engine))
        return
    assert before.is_kept_by(State.of(engine))
    assert result.log_probs.shape == given_batch.input_ids.shape
    assert bool(result.log_probs.isfinite().all())
    assert (result.entropy is not None) is SWITCHES[entropy]
    assert bool((result.log_probs <= 0).all())


EXPORTS: dict[str, list[Any]] = {
    "dtype": [
        None,
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.complex64,
        "float32",
        3,
        float,
        [],
    ],
    "adapter": ["merged", "only", "base", "both", None, 3, [], torch.ones(2)],
    "bucket_bytes": [1 << 20, 1, 0, -1, "1", None, 1.5, True, math.nan, [], 10**30],
}


@pytest.mark.slow
@fuzz(cost=2)
@given(st.data(), st.sampled_from(["get_per_tensor_param", "get_per_tensor_param_shard"]))
def test_an_export_is_whole_or_refused(engine, data, called):
    names = [name for name in EXPORTS if name != "bucket_bytes" or called == "get_per_tensor_param"]
    arguments = {
        name: EXPORTS[name][data.draw(st.integers(0, len(EXPORTS[name]) - 1), label=name)]
        for name in names
    }
    before = State.of(engine)
    result = outcome(lambda: [row[:2] for row in getattr(engine, called)(**arguments)])
    after = State.of(engine)
    assert before.is_kept_by(after)
    if isinstance(result, EngineError):
        assert_refused(result, before, after)
        return
    for name, tensor in result:
        stored = before.tensors[f"model.{name}"]
        assert torch.equal(tensor, stored.to(arguments["dtype"] or stored.dtype))


@pytest.mark.slow
@fuzz(cost=4)
@given(
    called=st.sampled_from(["save_checkpoint", "load_checkpoint", "save_hf"]),
    path=st.integers(0, len(PATHS) - 1),
    extra=st.sampled_from(["none", "set", "text", "number", "list", "key", "deep"]),
)
@example("save_checkpoint", 0, "none")
@example("load_checkpoint", 3, "none")
def test_what_is_no_folder_is_refused(engine, called, path, extra):
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    extras = {
        "none": None,
        "set": {"a": {1}},
        "text": "a",
        "number": 5,
        "list": [1],
        "key": {(1, 2): 3},
        "deep": {"a": deep},
    }
    arguments = {"extra": extras[extra]} if called == "save_checkpoint" else {}
    before = State.of(engine)
    result = outcome(lambda: getattr(engine, called)(PATHS[path], **arguments))
    assert isinstance(result, EngineError), f"{PATHS[path]!r:.40} is no folder"
    assert_refused(result, before, State.of(engine))


@pytest.mark.parametrize("extra", [{"a": {1}}, "a", 5, [1], {(1, 2): 3}])
def test_extra_that_is_no_mapping_of_json_is_refused_and_nothing_is_written(
    engine, tmp_path, extra
):
    assert isinstance(
        outcome(lambda: engine.save_checkpoint(tmp_path / "c", extra=extra)), ConfigError
    )
    assert not list(tmp_path.iterdir())


@fuzz(cost=2)
@given(
    device=st.sampled_from(["cpu", "cuda", "abacus", "", None, 3, True]),
    switches=st.lists(st.integers(0, len(SWITCHES) - 1), min_size=3, max_size=3),
)
def test_a_move_is_to_a_device_or_refused(engine, device, switches):
    before = State.of(engine)
    chosen = dict(zip(("model", "optimizer", "grad"), (SWITCHES[i] for i in switches), strict=True))
    result = outcome(lambda: engine.to(device, **chosen))
    assert before.is_kept_by(State.of(engine))
    good = device == "cpu" and all(isinstance(value, bool) for value in chosen.values())
    assert result is None if good else isinstance(result, EngineError)
