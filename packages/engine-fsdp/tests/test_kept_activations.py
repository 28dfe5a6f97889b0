"""Blocks that recompute within their compiled code, and the activations that they keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import ignore_reads_of_compile
from tested_device import DEVICE, NEAR
from tested_ranks import open_pools
from tiny_models import tiny_model
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    LoraConfig,
    Memory,
    ModelSource,
    OptimizerConfig,
    sft_loss,
)
from engine_api.errors import ConfigError
from engine_torch import attention

pytestmark = [
    ignore_reads_of_compile,
    # Inductor warns of both on a GPU, in code that it compiles for float32.
    pytest.mark.filterwarnings(r"ignore:\s*TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning"),
]

Folder = Callable[[str], Path]
FULL = Memory(max_tokens=64, recompute="full", compile=True)
# Families of dense blocks with norms, windows, biases and gates of their own.
DENSE = ["qwen3", "gemma3_text", "glm4"]
# Weights in float32 that move far lose few digits of their gradient.
RATE = 64.0
SGD = OptimizerConfig(name="torch.optim.SGD", lr=RATE, clip_norm=None)
LAYERS = 4
PRODUCTS = ("aten::mm", "aten::addmm")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    def save(name: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"kept-{name}"
        if not folder.exists():
            tiny_model(name).save_pretrained(folder)
        return folder

    return save


@pytest.fixture(autouse=True)
def forget_compiled() -> None:
    """Forget the code of earlier tests: torch compiles a function a few times only."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def make(folder: Path, **changes: Any) -> Any:
    options = {"verify_model": False, **changes.pop("options", {})}
    device = changes.pop("device", DEVICE)
    settings = {"optimizer": OptimizerConfig(lr=1e-2), "memory": FULL} | changes
    engine = EngineRegistry.create(
        model_type="language_model",
        backend="fsdp2",
        device=device,
        config=EngineConfig(model=ModelSource(path=str(folder)), options=options, **settings),
    )
    engine.initialize()
    return engine


def texts(*lengths: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch.pack(
        [
            {
                "input_ids": torch.randint(3, 60, (length,), generator=generator),
                "loss_weight": torch.tensor([0.0] + [1.0] * (length - 1)),
            }
            for length in lengths
        ]
    )


def find_gradients(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Return the gradient of packs whose numbers of tokens differ, by the key of the weight."""
    engine = make(folder, optimizer=SGD, **changes)
    before = {key: one.double() for key, (one, _) in engine.state_shards().items()}
    for lengths in ((9, 14, 5, 20), (7, 30, 22), (12, 12)):
        torch.manual_seed(5)
        engine.forward_backward(texts(*lengths), sft_loss)
    engine.optimizer_step()
    after = {key: one.double() for key, (one, _) in engine.state_shards().items()}
    engine.close()
    return {key: (one - after[key]) / RATE for key, one in before.items()}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, exact in expected.items():
        near = NEAR * float(exact.abs().max())
        torch.testing.assert_close(found[key], exact, rtol=0, atol=near, msg=key)
    assert any(one.any() for one in expected.values())


def measure(folder: Path, **changes: Any) -> tuple[int, int]:
    """Return bytes that are kept for a backward pass, and matrix products of a step."""
    engine = make(folder, **changes)
    assert len(engine._blocks) == LAYERS
    batch = texts(30, 30)
    engine.train_batch(batch, sft_loss)
    weights = {one.untyped_storage().data_ptr() for one in engine.module.parameters()}
    kept: dict[int, int] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(see, lambda tensor: tensor):
        engine.train_batch(batch, sft_loss)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        engine.train_batch(batch, sft_loss)
    engine.close()
    products = sum(one.count for one in recorded.key_averages() if one.key in PRODUCTS)
    return sum(kept.values()), products


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_what_is_kept_changes_no_gradient(folder_of: Folder, name: str) -> None:
    folder = folder_of(name)
    expected = find_gradients(folder, memory=Memory(max_tokens=64))
    for kept in (0.0, 0.4):
        check_equal(find_gradients(folder, options={"kept_activations": kept}), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_the_code_of_a_dense_block_is_compiled_as_a_whole(folder_of: Folder, name: str) -> None:
    """A divided block would recompute uncompiled."""
    engine = make(folder_of(name))
    engine.train_batch(texts(30, 30), sft_loss)
    assert engine.resolved()["memory.recompute"] == "full"
    engine.close()
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_kept_activations_save_products(folder_of: Folder) -> None:
    folder = folder_of("qwen3")
    _, plain = measure(folder, memory=Memory(max_tokens=64, compile=True))
    least, most = measure(folder)
    # Of the seven products of a block the backward pass reads the results of six.
    assert most - plain == 6 * LAYERS
    # The first number is compiled for as the others are.
    fewer = [measure(folder, options={"kept_activations": kept}) for kept in (0.1, 0.3, 0.6)]
    sizes = [least, *(size for size, _ in fewer)]
    counts = [most, *(count for _, count in fewer), plain]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)
    assert counts == sorted(counts, reverse=True)
    assert counts[1] < most


@pytest.mark.slow
def test_adapters_add_nothing_to_what_the_share_is_of(folder_of: Folder) -> None:
    """The trainer's estimate counts the results of the model's own layers."""
    block = tiny_model("qwen3").model.layers[0]
    columns = sum(one.out_features for one in block.modules() if isinstance(one, torch.nn.Linear))
    adapter = LoraConfig(rank=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    least, _ = measure(folder_of("qwen3"), lora=adapter)
    more, _ = measure(folder_of("qwen3"), lora=adapter, options={"kept_activations": 0.3})
    tokens, width = 60, 4
    assert 0 < more - least <= 0.3 * columns * tokens * width * LAYERS


def test_blocks_that_run_uncompiled_keep_no_more(
    folder_of: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile may meet too many kinds of calls, or be unable to compile the whole block."""
    folder = folder_of("qwen3")
    compiled, _ = measure(folder)
    with torch._dynamo.config.patch(disable=True):
        uncompiled, _ = measure(folder)
    torch.compiler.reset()
    disabled = torch.compiler.disable(attention._attend)
    monkeypatch.setattr(attention, "_attend", disabled)
    split, _ = measure(folder)
    assert max(uncompiled, split) <= compiled


@pytest.mark.slow
def test_engines_with_one_setting_share_their_code(folder_of: Folder) -> None:
    counts = []
    for kept in (0.3, 0.3, 0.1):
        measure(folder_of("qwen3"), options={"kept_activations": kept})
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # On CUDA other functions are compiled by the first one, too.
    assert [count - counts[0] for count in counts] == [0, 0, 1]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", [{}, {"ulysses": 2}], ids=["dp", "ulysses"])
def test_two_ranks_compute_the_same(folder_of: Folder, layout: dict[str, int]) -> None:
    path = str(folder_of("qwen3"))
    settings = (
        {"memory": {"max_tokens": 24}},
        {
            "memory": {"max_tokens": 24, "recompute": "full", "compile": True},
            "options": {"kept_activations": 0.3},
        },
    )
    with open_pools() as pools:
        plain, kept = (
            pools[2].run("experts_ranks:step", path=path, layout=layout, **one) for one in settings
        )
    for found, expected in zip(kept, plain, strict=True):
        check_equal(found.gradients, expected.gradients)


@pytest.mark.slow
def test_the_adapters_dropout_is_the_same_when_it_is_computed_again(folder_of: Folder) -> None:
    adapter = LoraConfig(rank=4, target_modules=["q_proj", "up_proj"], dropout=0.5)
    plain = Memory(max_tokens=64, compile=True)
    expected = find_gradients(folder_of("qwen3"), memory=plain, lora=adapter)
    check_equal(find_gradients(folder_of("qwen3"), lora=adapter), expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "gemma2", "dropout"])
def test_blocks_of_experts_states_and_dropout_recompute_as_a_whole(
    folder_of: Folder, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = LoraConfig(rank=4, target_modules=["q_proj"], dropout=0.5)
    changes: dict[str, Any] = {"lora": adapter} if name == "dropout" else {}
    # A GPU would need kernels for states.
    folder = folder_of("qwen3" if name == "dropout" else name)
    engine = make(folder, device="cpu", options={"kept_activations": 0.2}, **changes)
    assert all(block.gradient_checkpointing for block in engine._blocks)
    engine.close()
    assert "options.kept_activations is 0.2, but 4 of 4 blocks keep nothing" in caplog.text


@pytest.mark.parametrize(
    "memory", [Memory(), Memory(compile=True), Memory(recompute="full")], ids=str
)
def test_a_share_that_nothing_reads_is_refused(folder_of: Folder, memory: Memory) -> None:
    kept = {"kept_activations": 0.2}
    with pytest.raises(ConfigError, match=r"options.kept_activations: expected 0 .* got 0.2"):
        make(folder_of("qwen3"), memory=memory, options=kept)
    # Without a backward pass there is nothing to keep.
    make(folder_of("qwen3"), memory=memory, options=kept, optimizer=None).close()


@pytest.mark.parametrize("kept", [-0.1, 1.0, 2.0])
def test_a_value_that_is_no_share_is_refused(folder_of: Folder, kept: float) -> None:
    with pytest.raises(ConfigError, match="expected a share from 0 to below 1"):
        make(folder_of("qwen3"), options={"kept_activations": kept})
