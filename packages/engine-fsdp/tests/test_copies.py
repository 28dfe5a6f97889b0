"""One rank in mixed precision, which computes with a copy of its weights.

The numbers are those of ``fully_shard``, bit for bit.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_pictured_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    LoraConfig,
    Memory,
    ModelSource,
    OptimizerConfig,
    Precision,
    sft_loss,
)
from engine_api.devices import Device
from engine_api.errors import ConfigError
from engine_api.hf_vision import Vision, draw_image
from engine_api.results import LossOutput, TokenOutputs
from engine_torch.boxes import find_box
from engine_torch.copies import add_gradients, keep_copies
from engine_torch.fsdp_modules import LateGradients
from engine_torch.parallel import keeps_copies
from engine_torch.weights import ShardedParam

HALF = Precision(compute="bfloat16")
FAMILIES = ["qwen3", "gemma2", "deepseek_v3", "qwen3_moe", "qwen3_next", "falcon_h1"]
MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: tiny_model(name) for name in FAMILIES},
    "tied": lambda: tiny_model("qwen3", tie_word_embeddings=True),
    "qwen2_5_vl": lambda: tiny_pictured_model("qwen2_5_vl"),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def save(name: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"copied-{name}"
        if not folder.exists():
            MODELS[name]().save_pretrained(folder)
        return folder

    return save


def make(folder: Path, *, cast: bool | None, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "optimizer": OptimizerConfig(lr=1e-2),
        "memory": Memory(max_tokens=24),
        "precision": HALF,
    } | changes
    kind = settings.pop("model_type", "language_model")
    options = {"verify_model": False, **settings.pop("options", {})}
    if cast is not None:
        options["cast_each_pass"] = cast
    engine = EngineRegistry.create(
        model_type=kind,
        backend="fsdp2",
        device="cpu",
        config=EngineConfig(model=ModelSource(path=str(folder)), options=options, **settings),
    )
    engine.initialize()
    return engine


class Squares:
    """The squared distance of values from 1."""

    needs = ("values",)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        assert outputs.values is not None
        return LossOutput(loss=((outputs.values - 1.0).square() * batch.loss_weight).sum())


def texts() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    lengths = (9, 14, 5, 20)
    return [
        {
            "input_ids": torch.randint(3, 60, (length,), generator=generator),
            "loss_weight": torch.tensor([0.0] + [1.0] * (length - 1)),
        }
        for length in lengths
    ]


def pictures(vision: Vision) -> list[dict[str, Any]]:
    """Return documents without an image and with one."""
    generator = torch.Generator().manual_seed(1)
    media = draw_image(vision, generator)
    image = torch.full((vision.count_features(media.grid[0].tolist()),), vision.image_token)
    ids = torch.cat([torch.arange(3, 9), image, torch.arange(9, 14)])
    weight = torch.ones(len(ids))
    weight[0] = 0.0
    shown = {"input_ids": ids, "loss_weight": weight}
    return [*texts(), shown | {"media": {"pixels": media.pixels, "grid": media.grid}}]


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, (tensor, _) in engine.state_shards().items()}


def train(folder: Path, given: list[dict[str, Any]], **changes: Any) -> tuple[Any, ...]:
    """Return log-probs, results of the steps, and the whole state of an engine that trained."""
    engine = make(folder, **changes)
    sharded = isinstance(engine.module, FSDPModule)
    batch = Batch.pack(given)
    losses = [engine.train_batch(batch, sft_loss) for _ in range(3)]
    assert losses[0].num_micro_batches > 1
    after = engine.infer_batch(batch).log_probs
    found = state_of(engine)
    engine.close()
    return sharded, after, [(step.loss, step.grad_norm) for step in losses], found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_copies_compute_the_bits_of_weights_that_are_cast_in_each_pass(
    folder_of: Callable[[str], Path], name: str
) -> None:
    folder = folder_of(name)
    given = texts()
    if name == "qwen2_5_vl":
        probe = make(folder, cast=False)
        vision: Vision = probe.vision
        probe.close()
        given = pictures(vision)
    sharded, *expected = train(folder, given, cast=True)
    plain, *found = train(folder, given, cast=False)
    assert sharded
    assert not plain
    check_equal(found, expected)


def check_equal(found: list[Any], expected: list[Any]) -> None:
    (after, steps, state), (former, known, wanted) = found, expected
    assert steps == known
    assert torch.equal(after, former)
    assert state.keys() == wanted.keys()
    assert [key for key in state if state[key].dtype != wanted[key].dtype] == []
    assert [key for key in state if not torch.equal(state[key], wanted[key])] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": LoraConfig(rank=4, target_modules=["q_proj", "up_proj"])},
        {"memory": Memory(max_tokens=24, recompute="full")},
        {"memory": Memory(max_tokens=24, offload_optimizer=True)},
    ],
    ids=["lora", "recompute", "offload_optimizer"],
)
def test_settings_keep_the_bits(folder_of: Callable[[str], Path], changes: dict[str, Any]) -> None:
    folder = folder_of("qwen3")
    _, *expected = train(folder, texts(), cast=True, **changes)
    plain, *found = train(folder, texts(), cast=False, **changes)
    assert not plain
    check_equal(found, expected)


def test_a_value_model_keeps_the_bits(folder_of: Callable[[str], Path]) -> None:
    batch = Batch.pack(texts())
    results = []
    for cast in (True, False):
        engine = make(folder_of("qwen3"), cast=cast, model_type="value_model")
        engine.train_batch(batch, Squares())
        results.append((engine.infer_batch(batch).values, state_of(engine)))
        engine.close()
    (values, state), (former, wanted) = results
    assert torch.equal(values, former)
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)


def test_a_checkpoint_of_masters_goes_into_the_copies(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    batch = Batch.pack(texts())
    first = make(folder_of("tied"), cast=False)
    first.train_batch(batch, sft_loss)
    first.save_checkpoint(tmp_path / "step-1").result()
    expected = first.infer_batch(batch).log_probs
    first.close()
    engine = make(folder_of("tied"), cast=False)
    engine.train_batch(batch, sft_loss)
    engine.train_batch(batch, sft_loss)
    engine.load_checkpoint(tmp_path / "step-1")
    assert torch.equal(engine.infer_batch(batch).log_probs, expected)
    engine.close()


class Selecting(nn.Module):
    """Scores that select and get no gradient, as an indexer's."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 4)
        self.values = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(x).gather(-1, self.scores(x).topk(2, -1).indices)


def test_a_compiled_block_may_have_parameters_without_a_gradient() -> None:
    """The compiler's backward pass has None for them."""
    block = Selecting()
    table = [
        ShardedParam(name=name, pieces=[], param=parameter, box=find_box(parameter))
        for name, parameter in block.named_parameters()
    ]
    keep_copies(block, table, [block], torch.bfloat16)
    compiled = torch.compile(block, backend="aot_eager")
    compiled(torch.randn(3, 4)).sum().backward()
    add_gradients(table)
    has_gradient = {entry.name: entry.param.grad is not None for entry in table}
    assert has_gradient == {
        "scores.weight": False,
        "scores.bias": False,
        "values.weight": True,
        "values.bias": True,
    }


def test_copies_that_would_take_much_of_the_memory_are_cast_in_each_pass(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("qwen3")
    engine = make(folder, cast=None)
    assert engine.resolved()["options.cast_each_pass"] is False
    size = sum(entry.copy.nbytes for entry in engine.table)
    engine.close()
    for room, casts in ((16 * size, False), (16 * size - 1, True)):
        with monkeypatch.context() as patch:
            patch.setattr(Device, "room", lambda _, room=room: ("", room))
            engine = make(folder, cast=None, precision=HALF)
        assert engine.resolved()["options.cast_each_pass"] is casts
        engine.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"precision": Precision(compute="bfloat16", reduce="bfloat16")},
            "precision.reduce: bfloat16 and precision.master: float32",
        ),
        ({"memory": Memory(offload_params=True)}, "memory.offload_params: true"),
    ],
    ids=["reduce", "offload_params"],
)
def test_copies_that_cannot_be_kept_are_refused_by_name(
    folder_of: Callable[[str], Path], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        make(folder_of("qwen3"), cast=False, **changes)
    assert caught.value.field == "options.cast_each_pass"
    assert "leave out" in caught.value.remedy


@pytest.mark.parametrize(
    ("world", "gathers_float8", "reason"),
    [(2, False, "2 ranks"), (1, True, "gathered in FP8")],
)
def test_several_ranks_and_weights_gathered_in_fp8_keep_no_copies(
    world: int, gathers_float8: bool, reason: str
) -> None:
    config = EngineConfig(model=ModelSource(path="x"), precision=HALF)
    asked = (config, world, torch.nn.Linear(1, 1), "cpu")
    assert not keeps_copies(*asked, None, gathers_float8=gathers_float8)
    assert not keeps_copies(*asked, True, gathers_float8=gathers_float8)
    with pytest.raises(ConfigError, match=reason):
        keeps_copies(*asked, False, gathers_float8=gathers_float8)
    # Nothing is cast.
    one_dtype = EngineConfig(model=ModelSource(path="x"))
    assert not keeps_copies(one_dtype, *asked[1:], False, gathers_float8=gathers_float8)


def test_a_gradient_that_an_error_interrupts_is_dropped(
    folder_of: Callable[[str], Path],
) -> None:
    batch = Batch.pack(texts())
    engine = make(folder_of("qwen3"), cast=False)
    before = state_of(engine)

    def failing(*_: Any) -> Any:
        raise RuntimeError("a loss of the user's")

    with pytest.raises(RuntimeError, match="a loss of the user's"):
        engine.train_batch(batch, failing)
    expected = train(folder_of("qwen3"), texts(), cast=False)[2][0]
    step = engine.train_batch(batch, sft_loss)
    assert (step.loss, step.grad_norm) == expected
    assert not all(
        torch.equal(before[key], value) for key, value in state_of(engine).items() if key in before
    )
    engine.close()


@pytest.mark.parametrize("cast", [True, False])
def test_a_closed_engine_keeps_no_weight(folder_of: Callable[[str], Path], *, cast: bool) -> None:
    """Hooks of gradients once kept a cycle that the garbage collector does not see."""
    engine = make(folder_of("qwen3"), cast=cast)
    engine.train_batch(Batch.pack(texts()), sft_loss)
    live = [weakref.ref(entry.param) for entry in engine.table]
    engine.close()
    gc.collect()
    assert [reference for reference in live if reference() is not None] == []


@pytest.mark.parametrize("each", [False, True], ids=["once", "each_micro_batch"])
def test_gradients_that_are_reduced_in_each_micro_batch_stay_in_the_dtype_of_computation(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, each: bool
) -> None:
    late: list[bool] = []
    accumulate = LateGradients._accumulate

    def spied(self: LateGradients, param: Any, unsharded: torch.Tensor) -> None:
        late.append(self.is_late)
        accumulate(self, param, unsharded)

    monkeypatch.setattr(LateGradients, "_accumulate", spied)
    options = {"reduce_each_micro_batch": each}
    engine = make(folder_of("qwen3"), cast=True, options=options)
    for _ in range(2):
        assert engine.train_batch(Batch.pack(texts()), sft_loss).num_micro_batches > 1
    assert any(late) is not each
    engine.close()
