"""The balance loss of mixtures of experts, in every layout, against float64 by document."""

from __future__ import annotations

from typing import Any

import pytest
from balance_ranks import COEFFICIENT, create
from balance_reference import Expected, assert_gradients, assert_step, expect
from tiny_models import tiny_model

from engine_api.errors import ConfigError
from engine_conformance.ranks import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# A softmax, and sigmoids with a bias of the selection and groups.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "glm4_moe": {"n_routed_experts": 8, "use_qk_norm": True, "n_group": 2, "topk_group": 1},
}
SPLIT = {"sequence_parallel": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, keys in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        tiny_model(name, **keys).save_pretrained(folder)
        found[name] = str(folder)
    return found


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str, Expected]:
    return {
        name: expect(folder, COEFFICIENT, sigmoid=name == "glm4_moe")
        for name, folder in folders.items()
    }


@pytest.mark.parametrize(
    "memory", [{}, {"max_tokens": 24, "pad_to_multiple": 8, "recompute": "full"}], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_every_weight_has_the_gradient_of_the_loss_by_document(
    one: RankPool,
    folders: dict[str, str],
    expected: dict[str, Expected],
    name: str,
    memory: dict[str, Any],
) -> None:
    (found,) = one.run("balance_ranks:step", path=folders[name], backend="megatron", memory=memory)
    assert_step(found, expected[name])


@pytest.mark.parametrize(
    ("parallelism", "options", "given"),
    [
        ({}, {}, {}),
        ({"ep": 2}, {}, {"first_alone": True}),
        ({"cp": 2}, {}, {}),
        ({"tp": 2}, SPLIT, {}),
        ({"tp": 2, "ep": 2}, SPLIT | {"expert_tensor_parallel": 1}, {}),
        ({"pp": 2}, {}, {}),
        # An empty micro-batch completes the group of one.
        ({"pp": 2}, {"virtual_stages": 2}, {"memory": {"max_tokens": 64}}),
    ],
    ids=str,
)
def test_two_ranks_compute_the_gradient_of_one(
    pool: RankPool,
    folders: dict[str, str],
    expected: dict[str, Expected],
    parallelism: dict[str, int],
    options: dict[str, Any],
    given: dict[str, Any],
) -> None:
    memory = {"memory": {"max_tokens": 24, "recompute": "full"}}
    for found in pool.run(
        "balance_ranks:step",
        path=folders["qwen3_moe"],
        backend="megatron",
        parallelism=parallelism,
        order=[2, 0, 3, 1],
        **(memory | given),
        options=options | {"balance_loss": COEFFICIENT},
    ):
        assert_step(found, expected["qwen3_moe"])


def test_it_adds_nothing_without_the_option_and_leaves_log_probs_alone(
    one: RankPool, folders: dict[str, str]
) -> None:
    given = {"path": folders["qwen3_moe"], "backend": "megatron"}
    ((found, output, plain),) = one.run("balance_ranks:step", **given, options={})
    assert "balance_loss" not in output.metrics
    assert_gradients(found, expect(folders["qwen3_moe"], 0.0).gradients)
    ((_, _, balanced),) = one.run("balance_ranks:step", **given)
    assert plain.equal(balanced)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"options": {"balance_loss": -1.0}}, "at least 0, got -1.0"),
        ({"router_replay": True}, "expected 0 with router_replay"),
    ],
)
def test_what_a_balance_loss_excludes_is_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        create("no folder", "megatron", **config)


def test_a_model_without_experts_is_refused(tmp_path: Any) -> None:
    tiny_model("qwen3", num_hidden_layers=2).save_pretrained(tmp_path)
    engine = create(str(tmp_path), "megatron")
    with pytest.raises(ConfigError, match="has no experts"):
        engine.initialize()
