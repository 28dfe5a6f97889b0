"""Expert parallelism: each token and each weight against float64 on one process, by layout.

The tests with the mark ``gpu`` need two GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from balance_reference import DOCUMENTS, assert_gradients, expect, read, subtract
from experts_ranks import Found
from tested_ranks import Pools, open_pools
from tiny_models import log_probs, oracle, tiny_model, tiny_pictured_model
from torch import Tensor

from engine_api import LoraConfig, OptimizerConfig, Precision
from engine_conformance.ranks import RankPool

# Experts of each family by the key of their number. Some have biases, shared experts, groups,
# sigmoids, layers without experts, or matrices in another order.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_local_experts": 8},
    "qwen2_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "glm4_moe": {"n_routed_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "minimax_m2": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
}
QWEN = "qwen3_moe"
LAYERS = 3
FOUR: dict[str, dict[str, int]] = {
    "ep 2 of 4": {"ep": 2},
    "ep 4": {"ep": 4},
    "copies": {"dp_replicate": 2, "ep": 2},
    "ulysses": {"ulysses": 2, "ep": 2},
    "ulysses within ep": {"ulysses": 2, "ep": 4},
    "ulysses and copies": {"dp_replicate": 2, "ulysses": 2, "ep": 2},
}
# Some of the layouts, where the others are for `nox -s nightly`.
SOME = ("ep 2 of 4", "ulysses and copies")
MOST_NIGHTLY = [
    pytest.param(layout, id=name, marks=() if name in SOME else pytest.mark.nightly)
    for name, layout in FOUR.items()
]
# Other types of models with experts that this engine takes.
MORE = """
afmoe aria_text axk1 axk2 cohere2_moe deepseek_v2 deepseek_v32 dots1 ernie4_5_moe exaone_moe
flex_olmo glm4_moe_lite glm_moe_dsa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
hunyuan_v1_moe hy_v3 jamba laguna mellum mimo_v2_flash minimax minimax_m3_vl_text nemotron_h
qwen3_5_moe_text qwen3_next solar_open zaya
"""
Folder = Callable[..., str]
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made: dict[str, str] = {}

    def find(name: str, **changes: Any) -> str:
        key = f"{name} {sorted(changes.items())}"
        if key not in made:
            path = tmp_path_factory.mktemp("model")
            sizes = {"num_hidden_layers": LAYERS} | FAMILIES.get(name, {}) | changes
            tiny_model(name, **sizes).save_pretrained(path)
            made[key] = str(path)
        return made[key]

    return find


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with open_pools() as opened:
        yield opened


def exact_log_probs(path: str) -> list[Tensor]:
    model = oracle(path)
    return [log_probs(model, torch.tensor(ids)) for ids in DOCUMENTS]


def exact_gradients(path: str) -> tuple[dict[str, Tensor], float]:
    """Return the gradients by name of the saved weight, and the loss, by transformers in float64.

    One document is computed at a time.
    """
    model = oracle(path)
    loss = torch.zeros((), dtype=torch.float64)
    for document in DOCUMENTS:
        ids = torch.tensor(document)
        scores = model(input_ids=ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        loss = loss - scores[1:-1].gather(-1, ids[2:, None]).sum()
    loss = loss / sum(len(ids) - 2 for ids in DOCUMENTS)
    return descend(model, loss, path), float(loss.detach())


def descend(model: Any, loss: Tensor, path: str) -> dict[str, Tensor]:
    """Return how far a step of plain gradient descent moves each saved weight."""
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    # transformers saves experts that it holds as one tensor under names of their own.
    after = Path(path) / "after"
    model.save_pretrained(after)
    return subtract(read(path), read(after))


def assert_found(
    ranks: Sequence[Found],
    gradients: Mapping[str, Tensor],
    loss: float,
    scores: Sequence[Tensor],
    near: float = 1e-5,
) -> None:
    seen: set[int] = set()
    norm = math.sqrt(sum(float(one.square().sum()) for one in gradients.values()))
    for found in ranks:
        for number, got in found.log_probs.items():
            seen.add(number)
            torch.testing.assert_close(got, scores[number], rtol=0, atol=near)
        assert found.gradients.keys() == gradients.keys()
        for name, exact in gradients.items():
            worst = float((found.gradients[name] - exact).abs().max())
            assert worst <= near * float(exact.abs().max()), f"{name}: {worst}"
        assert found.loss == pytest.approx(loss, rel=near)
        assert found.norm == pytest.approx(norm, rel=near)
    assert seen == set(range(len(DOCUMENTS)))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_and_weight_of_a_family_is_right(
    pools: Pools, folder: Folder, name: str
) -> None:
    path = folder(name)
    ranks = pools[2].run("experts_ranks:step", path=path, layout={"ep": 2})
    assert_found(ranks, *exact_gradients(path), exact_log_probs(path))
    for found in ranks:
        assert found.kept
        assert {shape[0] for shape in found.kept.values()} == {4}


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.parametrize("name", MORE.split())
def test_experts_of_other_types_are_computed_as_without(
    pools: Pools, tmp_path: Path, name: str
) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    config: dict[str, Any] = {"path": str(tmp_path)}
    want = pools[2].run("experts_ranks:step", layout={}, **config)
    ranks = pools[2].run("experts_ranks:step", layout={"ep": 2}, **config)
    for found, plain in zip(ranks, want, strict=True):
        assert found.kept
        for number, scores in found.log_probs.items():
            torch.testing.assert_close(scores, plain.log_probs[number], rtol=0, atol=1e-4)
        for weight, exact in plain.gradients.items():
            near = 1e-3 * float(exact.abs().max())
            torch.testing.assert_close(found.gradients[weight], exact, rtol=0, atol=near)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", MOST_NIGHTLY)
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_four_ranks_compute_biases_and_groups(
    pools: Pools, folder: Folder, name: str, layout: dict[str, int]
) -> None:
    path = folder(name)
    ranks = pools[4].run("experts_ranks:step", path=path, layout=layout)
    assert_found(ranks, *exact_gradients(path), exact_log_probs(path))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", FOUR.values(), ids=FOUR)
def test_every_layout_of_four_ranks_is_right(
    pools: Pools, folder: Folder, layout: dict[str, int]
) -> None:
    path = folder(QWEN)
    ranks = pools[4].run(
        "experts_ranks:step",
        path=path,
        layout=layout,
        order=[2, 0, 3, 1],
        memory={"max_tokens": 24, "recompute": "full"},
    )
    assert_found(ranks, *exact_gradients(path), exact_log_probs(path))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_keeps_a_part_of_its_experts_that_is_not_even(pools: Pools, folder: Folder) -> None:
    path = folder(QWEN, num_local_experts=6)
    ranks = pools[4].run("experts_ranks:step", path=path, layout={"ep": 2})
    assert_found(ranks, *exact_gradients(path), exact_log_probs(path))
    assert [next(iter(found.kept.values()))[0] for found in ranks] == [2, 2, 1, 1]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("experts", [2, 4])
def test_ranks_that_are_more_than_a_ranks_experts_are_right(
    pools: Pools, folder: Folder, experts: int
) -> None:
    """Two experts on two of four ranks leave some ranks nothing of any expert."""
    path = folder(QWEN, num_local_experts=experts)
    ranks = pools[4].run("experts_ranks:step", path=path, layout={"ep": 2})
    assert_found(ranks, *exact_gradients(path), exact_log_probs(path))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "config",
    [
        {"memory": {"max_tokens": 24, "pad_to_multiple": 16}},
        {"memory": {"recompute": "full", "reshard_after_forward": False}},
        {"memory": {"max_tokens": 24, "offload_params": True}},
        {"memory": {"offload_optimizer": True}},
        {"memory": {"max_tokens": 24}, "options": {"reduce_each_micro_batch": True}},
        {"options": {"prefetch_blocks": 0}},
        {"options": {"prefetch_blocks": 2}},
        {"memory": {"max_tokens": 24, "share_prefixes": True}},
        {"router_replay": True},
    ],
    ids=str,
)
def test_settings_of_memory_change_nothing(
    pools: Pools, folder: Folder, config: dict[str, Any]
) -> None:
    path = folder(QWEN)
    ranks = pools[2].run("experts_ranks:step", path=path, layout={"ep": 2}, **config)
    assert_found(ranks, *exact_gradients(path), exact_log_probs(path))


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [{"ep": 2}, {"ulysses": 2, "ep": 2}], ids=str)
def test_a_rank_without_documents_takes_part(
    pools: Pools, folder: Folder, layout: dict[str, int]
) -> None:
    """Other ranks' tokens are computed on it, and its own are none or padding."""
    path = folder(QWEN)
    ranks = pools[2].run(
        "experts_ranks:step", path=path, layout=layout, first_alone=True, memory={"max_tokens": 24}
    )
    assert_found(ranks, *exact_gradients(path), exact_log_probs(path))


def replayed(first: int) -> list[Tensor]:
    """Return experts of each document: two of the four from ``first`` on, for every token."""
    made: list[Tensor] = []
    for ids in DOCUMENTS:
        tokens = torch.arange(len(ids))[:, None, None]
        layers = torch.arange(LAYERS)[None, :, None]
        which = torch.arange(2)[None, None]
        made.append((first + (tokens + layers + which) % 4).to(torch.int8))
    return made


def exact_replay(path: str, experts: Sequence[Tensor]) -> tuple[dict[str, Tensor], float]:
    """Return what ``exact_gradients`` does, with the experts of each token given."""
    from engine_api.hf_routers import Routers

    model = oracle(path)
    routers = Routers(model, where="a test")
    loss = torch.zeros((), dtype=torch.float64)
    for document, given in zip(DOCUMENTS, experts, strict=True):
        ids = torch.tensor(document)
        routers.replay(given)
        scores = model(input_ids=ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        loss = loss - scores[1:-1].gather(-1, ids[2:, None]).sum()
    loss = loss / sum(len(ids) - 2 for ids in DOCUMENTS)
    return descend(model, loss, path), float(loss.detach())


@pytest.mark.distributed
@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_whose_experts_serve_no_token_takes_part(
    pools: Pools, folder: Folder, first: int, ranks: int
) -> None:
    """All tokens go to the first or the last half of the experts, as their replay says."""
    path = folder(QWEN)
    experts = replayed(first)
    found = pools[ranks].run(
        "experts_ranks:step", path=path, layout={"ep": ranks}, router_replay=True, experts=experts
    )
    gradients, loss = exact_replay(path, experts)
    served = [one for name, one in gradients.items() if f".experts.{first}." in name]
    spared = [one for name, one in gradients.items() if f".experts.{4 - first}." in name]
    assert served
    assert all(one.any() for one in served)
    assert not any(one.any() for one in spared)
    for one in found:
        assert_gradients(one.gradients, gradients)
        assert one.loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("name", [QWEN, "deepseek_v3"])
@pytest.mark.parametrize("layout", [{"ep": 2}, {"ulysses": 2, "ep": 2}], ids=str)
def test_a_balance_loss_is_added_as_without(
    pools: Pools, folder: Folder, name: str, layout: dict[str, int]
) -> None:
    path = folder(name)
    exact = expect(path, 0.5, sigmoid=name == "deepseek_v3")
    for found in pools[2].run(
        "experts_ranks:step",
        path=path,
        layout=layout,
        options={"balance_loss": 0.5},
        memory={"max_tokens": 24, "recompute": "full"},
    ):
        assert_gradients(found.gradients, exact.gradients)
        assert found.metrics["balance_loss"] == pytest.approx(exact.balance, rel=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_below_a_tower_are_spread(pools: Pools, tmp_path: Path, name: str) -> None:
    ids = {"image_token_id": 55, "video_token_id": 56, "vision_start_token_id": 57}
    tiny_pictured_model(name, **ids).save_pretrained(tmp_path)
    want, *_ = pools[2].run("experts_ranks:step", path=str(tmp_path), layout={})
    for found in pools[2].run("experts_ranks:step", path=str(tmp_path), layout={"ep": 2}):
        assert {shape[0] for shape in found.kept.values()} == {2}
        assert found.norm == pytest.approx(want.norm, rel=1e-5)
        for weight, exact in want.gradients.items():
            near = 1e-4 * float(exact.abs().max())
            torch.testing.assert_close(found.gradients[weight], exact, rtol=0, atol=near)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", MOST_NIGHTLY)
def test_adapters_learn_as_without(pools: Pools, folder: Folder, layout: dict[str, int]) -> None:
    """The experts are frozen, and gradients pass through them."""
    path = folder(QWEN)
    lora = LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj", "v_proj"))
    (want,) = pools[1].run("experts_ranks:step", path=path, layout={}, lora=lora)
    assert any(one.any() for one in want.gradients.values())
    ranks = pools[4].run(
        "experts_ranks:step", path=path, layout=layout, lora=lora, memory={"recompute": "full"}
    )
    for found in ranks:
        assert found.norm == pytest.approx(want.norm, rel=1e-5)
        for name, exact in want.gradients.items():
            # Merged weights are rounded to float32, and the adapters' moves are divided by 64.
            torch.testing.assert_close(found.gradients[name], exact, rtol=1e-4, atol=1e-7)


@pytest.mark.distributed
@pytest.mark.parametrize("name", [QWEN, "gpt_oss"])
def test_values_and_their_gradients_are_right(pools: Pools, folder: Folder, name: str) -> None:
    path = folder(name)
    (want,) = pools[1].run("experts_ranks:step", path=path, layout={}, model_type="value_model")
    ranks = pools[2].run(
        "experts_ranks:step", path=path, layout={"ep": 2}, model_type="value_model"
    )
    for found in ranks:
        assert_gradients(found.gradients, want.gradients)
        assert found.norm == pytest.approx(want.norm, rel=1e-5)
        for number, values in found.log_probs.items():
            torch.testing.assert_close(values, want.log_probs[number], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", MOST_NIGHTLY)
def test_the_norm_that_clips_counts_each_weight_once(
    pools: Pools, folder: Folder, layout: dict[str, int]
) -> None:
    path = folder(QWEN)
    gradients, _ = exact_gradients(path)
    norm = math.sqrt(sum(float(one.square().sum()) for one in gradients.values()))
    optimizer = OptimizerConfig(name="torch.optim.SGD", lr=64.0, clip_norm=norm / 4)
    for found in pools[4].run("experts_ranks:step", path=path, layout=layout, optimizer=optimizer):
        assert found.norm == pytest.approx(norm, rel=1e-5)
        assert_gradients(found.gradients, {name: one / 4 for name, one in gradients.items()})


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_are_rounded_to_bfloat16_as_without(
    pools: Pools, folder: Folder, name: str
) -> None:
    """Log-probs are the same numbers, because each row is computed and added alike."""
    config = {"precision": Precision(compute="bfloat16"), "order": [0, 1, 2, 3]}
    want = pools[2].run("experts_ranks:step", path=folder(name), layout={}, **config)
    ranks = pools[2].run("experts_ranks:step", path=folder(name), layout={"ep": 2}, **config)
    exact, _ = exact_gradients(folder(name))
    for found, plain in zip(ranks, want, strict=True):
        for number, scores in found.log_probs.items():
            assert torch.equal(scores, plain.log_probs[number])
        for weight, gradient in exact.items():
            if ".experts." not in weight or not gradient.any():
                continue
            error = (found.gradients[weight] - gradient).norm()
            # A rank rounds the sum over all of its tokens once, and less often than without.
            assert error <= 1.1 * (plain.gradients[weight] - gradient).norm() + 1e-4


# Stages of training, of one step each.
JOURNEYS: dict[str, list[dict[str, int]]] = {
    "into ep": [{}, {"ep": 2}, {"ep": 4}],
    "out of ep": [{"ep": 4}, {"dp_replicate": 2, "ep": 2}, {}],
    "through ulysses": [{"ulysses": 2, "ep": 4}, {"dp_replicate": 4}, {"ep": 2}],
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stages", JOURNEYS.values(), ids=JOURNEYS)
@pytest.mark.parametrize("name", [QWEN, "gpt_oss"])
def test_a_checkpoint_goes_from_layout_to_layout(
    pools: Pools, folder: Folder, tmp_path: Path, name: str, stages: list[dict[str, int]]
) -> None:
    """Losses and weights are those of one rank, which goes through checkpoints as well."""
    path = folder(name)
    alone, several = tmp_path / "alone", tmp_path / "several"
    ((losses, weights),) = pools[1].run(
        "experts_ranks:journey", path=path, stages=[{}] * 3, folder=str(alone)
    )
    ranks = pools[4].run(
        "experts_ranks:journey", path=path, stages=stages, folder=str(several), moves=True
    )
    for found, after in ranks:
        assert found == pytest.approx(losses, rel=1e-5)
        for one, exact in weights.items():
            # Adam divides by the root of squares, of which the smallest have few digits.
            torch.testing.assert_close(after[one], exact, rtol=0, atol=2e-4)
    saved = read(several / "hf")
    assert saved.keys() == weights.keys()
    for one, after in ranks[0][1].items():
        assert torch.equal(saved[one], after.double())


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, int], str, str]] = {
    "no experts": ("qwen3", {}, {"ep": 2}, "parallelism.ep", "model without experts, got 2"),
    "too few ranks": (QWEN, {}, {"ep": 4}, "parallelism.ep", "dp_shard x ulysses = 2, got 4"),
    "a part of the ranks": (
        QWEN,
        {},
        {"dp_replicate": 2, "ep": 2},
        "parallelism.ep",
        "dp_shard x ulysses = 1, got 2",
    ),
    "odd experts": (
        QWEN,
        {"num_local_experts": 5},
        {"ep": 2},
        "parallelism.ep",
        "num_experts 5 cannot be divided over 2 ranks",
    ),
    "experts in two modules": (
        "jetmoe",
        {},
        {"ep": 2},
        "engine-fsdp with JetMoeParallelExperts",
        "code of its own",
    ),
    "experts without weights": (
        "longcat_flash",
        {},
        {"ep": 2},
        "engine-fsdp with LongcatFlashExperts",
        "code of its own",
    ),
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "sizes", "layout", "subject", "why"), REFUSED.values(), ids=REFUSED
)
def test_experts_that_ranks_cannot_share_are_refused_by_name_on_every_rank(
    pools: Pools,
    folder: Folder,
    name: str,
    sizes: dict[str, int],
    layout: dict[str, int],
    subject: str,
    why: str,
) -> None:
    found = pools[2].run("experts_ranks:refuse", path=folder(name, **sizes), layout=layout)
    for kind, named, text in found:
        is_setting = subject == "parallelism.ep"
        assert kind == ("ConfigError" if is_setting else "UnsupportedCapability")
        assert named == subject
        assert why in text


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_compute_the_same(pools: Pools, folder: Folder, recompute: str) -> None:
    path = folder(QWEN)
    ranks = pools[2].run(
        "experts_ranks:step",
        path=path,
        layout={"ep": 2},
        memory={"max_tokens": 24, "compile": True, "recompute": recompute},
    )
    assert_found(ranks, *exact_gradients(path), exact_log_probs(path))


# --- on two GPUs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    # Ranks that start from here on read the variable when they import `tested_device`. This process
    # has imported it before, and makes no engine.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINE_TEST_DEVICE", "cuda")
        with RankPool(2, device="cuda", deadline=280.0) as pool:
            yield pool


@needs_two_gpus
@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.parametrize("name", FAMILIES)
def test_two_gpus_compute_each_token_and_weight(gpus: RankPool, folder: Folder, name: str) -> None:
    path = folder(name)
    ranks = gpus.run("experts_ranks:step", path=path, layout={"ep": 2})
    assert_found(ranks, *exact_gradients(path), exact_log_probs(path), near=1e-4)


@needs_two_gpus
@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.parametrize(
    "config",
    [
        {"layout": {"ulysses": 2, "ep": 2}},
        {"layout": {"ep": 2}, "first_alone": True},
        {"layout": {"ep": 2}, "memory": {"max_tokens": 24, "recompute": "full"}},
        {"layout": {"ep": 2}, "memory": {"max_tokens": 24, "offload_params": True}},
        {"layout": {"ep": 2}, "memory": {"compile": True}},
    ],
    ids=str,
)
def test_two_gpus_compute_the_same_in_every_setting(
    gpus: RankPool, folder: Folder, config: dict[str, Any]
) -> None:
    path = folder(QWEN)
    ranks = gpus.run("experts_ranks:step", path=path, **config)
    assert_found(ranks, *exact_gradients(path), exact_log_probs(path), near=1e-4)


@needs_two_gpus
@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.parametrize("stages", [[{"ep": 2}, {}], [{}, {"ep": 2}]], ids=str)
def test_a_checkpoint_goes_from_layout_to_layout_on_two_gpus(
    gpus: RankPool, folder: Folder, tmp_path: Path, stages: list[dict[str, int]]
) -> None:
    """The engine moves off its GPU and back between a step and its checkpoint."""
    path = folder(QWEN)
    plain = gpus.run(
        "experts_ranks:journey", path=path, stages=[{}, {}], folder=str(tmp_path / "plain")
    )
    ranks = gpus.run(
        "experts_ranks:journey",
        path=path,
        stages=stages,
        folder=str(tmp_path / "spread"),
        moves=True,
    )
    for (found, after), (losses, weights) in zip(ranks, plain, strict=True):
        assert found == pytest.approx(losses, rel=1e-4)
        for name, exact in weights.items():
            torch.testing.assert_close(after[name], exact, rtol=0, atol=1e-3)


@needs_two_gpus
@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.parametrize("first", [0, 4])
def test_a_gpu_whose_experts_serve_no_token_takes_part(
    gpus: RankPool, folder: Folder, first: int
) -> None:
    path = folder(QWEN)
    experts = replayed(first)
    gradients, loss = exact_replay(path, experts)
    for found in gpus.run(
        "experts_ranks:step", path=path, layout={"ep": 2}, router_replay=True, experts=experts
    ):
        assert found.loss == pytest.approx(loss, rel=1e-4)
        for name, exact in gradients.items():
            worst = float((found.gradients[name] - exact).abs().max())
            assert worst <= 1e-4 * float(exact.abs().max()), name


@needs_two_gpus
@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.parametrize("name", FAMILIES)
def test_two_gpus_round_to_bfloat16_as_without(gpus: RankPool, folder: Folder, name: str) -> None:
    """The errors are no larger, where kernels may be others for other numbers of rows."""
    path = folder(name)
    config: dict[str, Any] = {"path": path, "precision": Precision(compute="bfloat16")}
    want = gpus.run("experts_ranks:step", layout={}, **config)
    ranks = gpus.run("experts_ranks:step", layout={"ep": 2}, **config)
    gradients, _ = exact_gradients(path)
    scores = exact_log_probs(path)
    for found, plain in zip(ranks, want, strict=True):
        errors, bounds = (
            torch.cat([one.log_probs[i] - scores[i] for i in one.log_probs]).norm()
            for one in (found, plain)
        )
        assert errors <= 1.5 * bounds + 1e-3
        for weight, exact in gradients.items():
            if exact.any():
                error = (found.gradients[weight] - exact).norm()
                assert error <= 1.5 * (plain.gradients[weight] - exact).norm() + 1e-4, weight
