"""Mixtures of experts against transformers in float64, each token, gradient and saved tensor."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from balance_reference import DOCUMENTS, expect, read
from config_changes import YARN, change_keys
from folder_checks import create_on
from tested_device import NEAR
from tested_ranks import Pools, open_pools
from tiny_models import documents, log_probs, oracle, skip_unknown_gate, tiny_model

from engine_api import Batch
from engine_api.errors import EngineError
from engine_api.hf_names import saved_buffers
from engine_automodel.library import FAMILIES

GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
SCALED = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {**GROUPED, "v_head_dim": 12, "rope_parameters": SCALED}),
    "deepseek_v3 plain": (
        "deepseek_v3",
        {"q_lora_rank": None, "first_k_dense_replace": 0, "n_shared_experts": 2, "v_head_dim": 20},
    ),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss clamped": ("gpt_oss", {"swiglu_limit": 0.3, "rope_parameters": YARN}),
    "glm4_moe": ("glm4_moe", {**GROUPED, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **GROUPED,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "rope_parameters": SCALED,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
}
ALONE = [
    ({}, {}),
    ({}, {"memory": {"recompute": "full"}}),
    ({}, {"options": {"experts": "grouped"}}),
]
TWO: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {}),
    ({"ep": 2}, {"memory": {"recompute": "full", "max_tokens": 24}}),
    ({"cp": 2}, {}),
    ({"cp": 2, "ep": 2}, {}),
    ({"dp_replicate": 2}, {"memory": {"offload_params": True}}),
]
FOUR: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"ep": 2}, {}),
    ({"dp_replicate": 2, "ep": 2}, {}),
    ({"cp": 2, "ep": 4}, {}),
]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with open_pools() as opened:
        yield opened


def write(folder: Path, family: str, **keys: Any) -> str:
    """Write a tiny model whose routers have a bias, negative for most experts.

    The test is skipped where transformers does not know the model's gate.
    """
    skip_unknown_gate(keys)
    model = tiny_model(family, **keys)
    generator = torch.Generator().manual_seed(3)
    for buffer in saved_buffers(model).values():
        buffer.copy_(torch.randn(buffer.shape, generator=generator) - 1.0)
    model.save_pretrained(folder)
    return str(folder)


def assert_right(ranks: list[Any], path: str) -> None:
    """Compare each token, gradient and saved tensor, on all ranks."""
    want = expect(path, 0.0)
    exact = oracle(path)
    norm = math.sqrt(sum(float(one.square().sum()) for one in want.gradients.values()))
    seen: set[int] = set()
    for found in ranks:
        seen |= set(found.log_probs)
        for number, got in found.log_probs.items():
            scores = log_probs(exact, torch.tensor(DOCUMENTS[number]))
            assert float((got - scores).abs().max()) < NEAR
        assert found.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            worst = float((found.gradients[name] - gradient).abs().max())
            assert worst <= NEAR * float(gradient.abs().max()), f"{name}: {worst}"
        assert found.loss == pytest.approx(want.loss, rel=NEAR)
        assert found.norm == pytest.approx(norm, rel=NEAR)
    assert seen == set(range(len(DOCUMENTS)))


def _runs(layouts: dict[int, list[tuple[dict[str, int], dict[str, Any]]]]) -> list[Any]:
    return [
        pytest.param(name, ranks, *one, id=f"{name}-{ranks}-{one}")
        for name, (family, _) in MODELS.items()
        for ranks, every in layouts.items()
        for one in every
        if family != "gpt_oss" or "cp" not in one[0]
    ]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "layout", "config"), _runs({1: ALONE, 2: TWO}))
def test_every_token_and_weight_is_that_of_transformers(
    tmp_path: Path, pools: Pools, name: str, ranks: int, layout: dict[str, int], config: Any
) -> None:
    family, keys = MODELS[name]
    path = write(tmp_path, family, **keys)
    found = pools[ranks].run(
        "experts_ranks:step", path=path, layout=layout, backend="automodel", **config
    )
    if "ep" in layout:
        assert {shape[0] for one in found for shape in one.kept.values()}
    assert_right(found, path)


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "ranks", "layout", "config"), _runs({4: FOUR}))
def test_every_token_and_weight_is_that_of_transformers_on_four_ranks(
    tmp_path: Path, pools: Pools, name: str, ranks: int, layout: dict[str, int], config: Any
) -> None:
    family, keys = MODELS[name]
    path = write(tmp_path, family, **keys)
    found = pools[ranks].run(
        "experts_ranks:step", path=path, layout=layout, backend="automodel", **config
    )
    assert_right(found, path)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "glm4_moe", "minimax_m2"])
def test_a_training_goes_on_in_another_layout_and_engine(
    tmp_path: Path, pools: Pools, name: str
) -> None:
    family, keys = MODELS[name]
    path = write(tmp_path / "model", family, **keys)
    stages = [{"ep": 2}, {}, {"ep": 2}]
    given = {"path": path, "stages": stages, "moves": True}
    found = [
        pools[2].run("experts_ranks:journey", folder=str(tmp_path / first), **given, backends=one)
        for first, one in (
            ("reference", ["fsdp2"] * 3),
            ("automodel", ["automodel"] * 3),
            ("mixed", ["automodel", "fsdp2", "automodel"]),
        )
    ]
    start = read(path)
    (losses, weights), *others = [ranks[0] for ranks in found]
    for got, after in others:
        assert got == pytest.approx(losses, rel=NEAR)
        assert after.keys() == weights.keys()
        for key, one in after.items():
            # Adam moves each weight by its rate at most, and an update of a rounded zero is any.
            moved = float((one - start[key]).norm())
            assert float((one - weights[key]).norm()) <= 500 * NEAR * moved
    for folder, (_, after) in zip(("automodel", "mixed"), others, strict=True):
        saved = read(tmp_path / folder / "hf")
        assert saved.keys() == start.keys()
        assert all(torch.equal(saved[key], after[key].double()) for key in saved)
        biases = [key for key in saved if key.endswith("e_score_correction_bias")]
        assert bool(biases) == (family != "gpt_oss")
        assert all(torch.equal(saved[key], start[key]) for key in biases)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_exported_under_their_saved_names(tmp_path: Path, name: str) -> None:
    family, keys = MODELS[name]
    want = read(write(tmp_path, family, **keys))
    engine = create_on("automodel", tmp_path)
    engine.initialize()
    whole = {key: one.double() for key, one in engine.get_per_tensor_param()}
    shards = {key: one.double() for key, one, _ in engine.get_per_tensor_param_shard()}
    engine.close()
    for found in (whole, shards):
        assert found.keys() == want.keys()
        assert all(torch.equal(found[key], one) for key, one in want.items())


def _refusal(folder: Path) -> tuple[str, torch.Tensor | None]:
    """Return the refusal of a model, or its log-probs."""
    engine = create_on("automodel", folder)
    try:
        engine.initialize()
        rows = [
            {"input_ids": ids.tolist(), "loss_weight": [0.0] + [1.0] * (len(ids) - 1)}
            for ids in documents()
        ]
        return "", engine.infer_batch(Batch.pack(rows)).log_probs
    except EngineError as error:
        return str(error), None
    finally:
        engine.close()


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_key_of_a_configuration_is_followed_or_refused(tmp_path: Path, family: str) -> None:
    base = MODELS[family][1] if family in MODELS else {}
    wrong: list[str] = []
    for key, value in change_keys(family, base):
        try:
            exact = oracle(write(tmp_path / "model", family, **base | {key: value}))
            want = torch.cat([log_probs(exact, ids) for ids in documents()])
        # transformers refuses some values, each in its own way.
        except Exception:  # noqa: BLE001
            continue
        try:
            refused, got = _refusal(tmp_path / "model")
        except Exception as error:  # noqa: BLE001 - it is a result
            wrong.append(f"{key}={value!r}: {type(error).__name__}: {error}")
            continue
        if got is not None and not float((got.double() - want).abs().max()) < 1e-4:
            wrong.append(f"{key}={value!r}")
        print(family, key, value, refused or "right")
        shutil.rmtree(tmp_path / "model")
    assert not wrong
