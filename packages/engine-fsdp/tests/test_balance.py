"""The balance loss of mixtures of experts: its gradient against float64, and what it excludes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from balance_ranks import COEFFICIENT, RATE, create, step
from balance_reference import (
    DOCUMENTS,
    Expected,
    assert_gradients,
    assert_step,
    expect,
    pack,
    rows_of,
)
from tested_ranks import Pools, open_pools
from tiny_models import tiny_model

from engine_api import Batch, LoraConfig, Memory, sft_loss
from engine_api.batch import ROUTED_EXPERTS
from engine_api.errors import BatchError, ConfigError

# A softmax, and sigmoids with a bias of the selection and groups.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, keys in MODELS.items():
        model = tiny_model(name, num_hidden_layers=3, **keys)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2, generator=torch.Generator().manual_seed(3))
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        found[name] = str(folder)
    return found


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str, Expected]:
    return {
        name: expect(folder, COEFFICIENT, sigmoid=name == "deepseek_v3")
        for name, folder in folders.items()
    }


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with open_pools() as opened:
        yield opened


@pytest.mark.parametrize(
    ("order", "memory"),
    [
        ((0, 1, 2, 3), {}),
        ((3, 1, 0, 2), {"max_tokens": 24, "pad_to_multiple": 16}),
        ((0, 1, 2, 3), {"recompute": "full", "max_tokens": 24}),
    ],
    ids=["one pack", "other packs", "recomputed"],
)
@pytest.mark.parametrize("name", MODELS)
def test_every_weight_has_the_gradient_of_the_loss_by_document(
    folders: dict[str, str],
    expected: dict[str, Expected],
    name: str,
    order: tuple[int, ...],
    memory: dict[str, Any],
) -> None:
    assert_step(step(folders[name], "fsdp2", order=order, memory=memory), expected[name])


def test_each_call_adds_the_mean_over_its_own_documents(folders: dict[str, str]) -> None:
    folder = folders["qwen3_moe"]
    halves = DOCUMENTS[:2], DOCUMENTS[2:]
    first, second = (expect(folder, COEFFICIENT, documents=half).gradients for half in halves)
    engine = create(folder, "fsdp2")
    engine.initialize()
    before = {name: one.double() for name, one in engine.get_per_tensor_param()}
    for half in halves:
        engine.forward_backward(pack(half), sft_loss)
    engine.optimizer_step()
    after = {name: one.double() for name, one in engine.get_per_tensor_param()}
    engine.close()
    found = {name: (one - after[name]) / RATE for name, one in before.items()}
    assert_gradients(found, {name: one + second[name] for name, one in first.items()})


def test_experts_of_a_rollout_are_refused_as_without_it(folders: dict[str, str]) -> None:
    rows = [
        row | {ROUTED_EXPERTS: torch.zeros(len(row["input_ids"]), 3, 2, dtype=torch.int8)}
        for row in rows_of()
    ]
    batch = Batch.pack(rows)
    engine = create(folders["qwen3_moe"], "fsdp2")
    engine.initialize()
    calls = [lambda: engine.infer_batch(batch), lambda: engine.train_batch(batch, sft_loss)]
    for call in calls:
        with pytest.raises(BatchError, match="this engine would not replay it"):
            call()
    engine.close()


def test_without_the_option_nothing_is_added(
    folders: dict[str, str], expected: dict[str, Expected]
) -> None:
    found, output, plain = step(folders["qwen3_moe"], "fsdp2", options={})
    assert "balance_loss" not in output.metrics
    exact = expect(folders["qwen3_moe"], 0.0)
    assert_gradients(found, exact.gradients)
    name = "model.layers.0.mlp.gate.weight"
    share = (expected["qwen3_moe"].gradients[name] - found[name]).abs().max()
    assert share > 0.05 * found[name].abs().max()
    # Log-probs are the same with it.
    _, _, balanced = step(folders["qwen3_moe"], "fsdp2")
    assert torch.equal(plain, balanced)


def test_adapters_below_a_frozen_router_learn_from_it(folders: dict[str, str]) -> None:
    """The first step is linear in the factor, because one matrix of each adapter begins at 0."""
    moved: list[dict[str, torch.Tensor]] = []
    for coefficient in (0.0, 1.0, 2.0):
        gradients, _, _ = step(
            folders["qwen3_moe"],
            "fsdp2",
            lora=LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj", "v_proj")),
            options={"balance_loss": coefficient},
        )
        moved.append(gradients)
    none, once, twice = moved
    assert not none["model.layers.0.mlp.gate.weight"].any()
    adapted = [name for name, one in none.items() if one.any()]
    assert adapted
    for name in adapted:
        share = once[name] - none[name]
        torch.testing.assert_close(twice[name] - none[name], 2 * share, rtol=1e-3, atol=1e-6)
    name = "model.layers.0.self_attn.v_proj.weight"
    assert (once[name] - none[name]).abs().max() > 0.05 * none[name].abs().max()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_add_the_same(
    folders: dict[str, str], expected: dict[str, Expected]
) -> None:
    found = step(folders["qwen3_moe"], "fsdp2", memory={"compile": True, "recompute": "full"})
    assert_step(found, expected["qwen3_moe"])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("parallelism", "first_alone"),
    [({}, False), ({}, True), ({"dp_replicate": 2}, False), ({"ulysses": 2}, False)],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_compute_the_gradient_of_one(
    pools: Pools,
    folders: dict[str, str],
    expected: dict[str, Expected],
    name: str,
    parallelism: dict[str, int],
    first_alone: bool,
) -> None:
    """Some documents are on each rank, or none is on the second, or each is on both."""
    for found in pools[2].run(
        "balance_ranks:step",
        path=folders[name],
        backend="fsdp2",
        parallelism=parallelism,
        order=[2, 0, 3, 1],
        memory={"max_tokens": 24, "recompute": "full"},
        first_alone=first_alone,
    ):
        assert_step(found, expected[name])


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"options": {"balance_loss": -0.1}}, "at least 0, got -0.1"),
        ({"options": {"balance_loss": float("nan")}}, "at least 0, got nan"),
        ({"options": {"balance_loss": float("inf")}}, "at least 0, got inf"),
        ({"router_replay": True}, "expected 0 with router_replay"),
        ({"memory": Memory(share_prefixes=True)}, "expected 0 with memory.share_prefixes"),
    ],
)
def test_what_a_balance_loss_excludes_is_refused(
    folders: dict[str, str], config: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        create(folders["qwen3_moe"], "fsdp2", **config)
    assert "balance_loss" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3", "no router of experts was found"),
        # Its router returns no logits by token.
        ("jetmoe", "JetMoeTopKGating"),
    ],
)
def test_a_model_whose_experts_cannot_be_balanced_is_refused(
    tmp_path: Path, name: str, why: str
) -> None:
    tiny_model(name, num_hidden_layers=2).save_pretrained(tmp_path)
    engine = create(str(tmp_path), "fsdp2")
    with pytest.raises(ConfigError, match=r"options\.balance_loss") as caught:
        engine.initialize()
    assert why in caught.value.why
