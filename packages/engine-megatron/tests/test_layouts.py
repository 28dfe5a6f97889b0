"""Options of this engine and its global state on several ranks.

The conformance suite does not know them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_ranks import ROWS
from safetensors.torch import load_file
from tiny_models import models_of

from engine_api import OptimizerConfig
from engine_api.config import Memory, Precision
from engine_api.weights import assemble
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_conformance.ranks import RankPool
from engine_megatron.shape import FAMILIES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_the_matrix_names_the_families_that_are_compared_here() -> None:
    assert models_of("megatron", "cpu_shimmed") == set(FAMILIES)


@pytest.fixture(scope="module")
def four(_cuda: None) -> Iterator[RankPool]:
    with RankPool(4, deadline=280.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("experts")
    model = TinyModel(
        family="qwen3_moe", vocab_size=251, tied=False, num_experts=8, num_heads=8, num_kv_heads=4
    )
    return str(write_checkpoint(Path(path), model))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return str(write_checkpoint(Path(path), TinyModel(vocab_size=251, tied=True)))


SPLIT = {"sequence_parallel": True}
WHOLE = {"sequence_parallel": True, "expert_tensor_parallel": 1}
DENSE = [
    ({"tp": 2}, {}),
    ({"tp": 2}, SPLIT),
    ({"tp": 2}, {"vocabulary_multiple": 32}),
    ({"pp": 2}, {}),
    ({"dp_shard": 2}, {}),
]
# The experts of a stage are spread over its data-parallel ranks, split over its tensor-parallel
# ranks, or whole on ranks of both kinds.
EXPERTS = [
    ({"ep": 2}, {}),
    ({"ep": 4}, {}),
    ({"ep": 2, "pp": 2}, {}),
    ({"tp": 2}, SPLIT),
    ({"tp": 2, "ep": 2}, SPLIT),
    ({"tp": 2, "ep": 4}, WHOLE),
    ({"tp": 2}, WHOLE),
    ({"tp": 4, "ep": 2}, SPLIT | {"expert_tensor_parallel": 2}),
    ({"tp": 2, "pp": 2, "ep": 2}, WHOLE),
]


# Virtual stages of a model with four layers: on two ranks, and on four with experts or with split
# matrices.
CHUNKS = ({"pp": 2}, {"virtual_stages": 2})
CHUNKS_OF_FOUR = [
    ({"pp": 2, "ep": 2}, {"virtual_stages": 2}),
    ({"pp": 2, "tp": 2}, {"virtual_stages": 2} | SPLIT),
    ({"pp": 4}, {"virtual_stages": 2}),
]
DEEP = {"num_layers": 4, "vocab_size": 251, "num_heads": 8, "num_kv_heads": 4}

# With the usual eps of 1e-8, rounding would decide the direction in which a weight with a nearly
# vanishing gradient moves.
ADAMW = OptimizerConfig(lr=1e-2, clip_norm=1.0, eps=1e-5)
SGD = OptimizerConfig(name="torch.optim.SGD", lr=1e-2, clip_norm=1.0)
OPTIMIZERS = [
    pytest.param(ADAMW, id="adamw"),
    pytest.param(SGD, id="sgd", marks=pytest.mark.nightly),
]


def assert_as_one_rank(
    results: Any, want: list[float], exact: dict[str, torch.Tensor], about: str
) -> None:
    for figures, weights in results:
        torch.testing.assert_close(
            figures, want[: len(figures)], atol=1e-4, rtol=1e-4, msg=lambda m: f"{about}: {m}"
        )
        assert list(weights) == list(exact)
        assert_same_weights(weights, exact, about)


def assert_same_weights(
    weights: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], about: str
) -> None:
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight, exact[name], atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{about} {n}: {m}"
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_options_and_layouts_do_not_change_an_update(
    pool: RankPool, one: RankPool, folder: str, optimizer: OptimizerConfig
) -> None:
    config = {"optimizer": optimizer}
    ((want, exact),) = one.run(
        "layout_ranks:train_two_steps", path=folder, parallelism={}, options={}, **config
    )
    for parallelism, options in DENSE:
        results = pool.run(
            "layout_ranks:train_two_steps",
            path=folder,
            parallelism=parallelism,
            options=options,
            **config,
        )
        assert_as_one_rank(results, want, exact, f"{parallelism} {options}")


@pytest.mark.parametrize(
    ("parallelism", "options"), [({"tp": 2, "cp": 2}, SPLIT), ({"pp": 2, "cp": 2}, {})]
)
def test_documents_spread_over_ranks_do_not_change_an_update(
    four: RankPool, one: RankPool, folder: str, parallelism: dict[str, int], options: dict[str, Any]
) -> None:
    config = {"optimizer": ADAMW}
    ((want, exact),) = one.run(
        "layout_ranks:train_two_steps", path=folder, parallelism={}, options={}, **config
    )
    results = four.run(
        "layout_ranks:train_two_steps",
        path=folder,
        parallelism=parallelism,
        options=options,
        **config,
    )
    assert_as_one_rank(results, want, exact, f"{parallelism} {options}")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_experts_anywhere_do_not_change_an_update(
    four: RankPool, one: RankPool, experts: str, optimizer: OptimizerConfig
) -> None:
    config = {"optimizer": optimizer}
    ((want, exact),) = one.run(
        "layout_ranks:train_two_steps", path=experts, parallelism={}, options={}, **config
    )
    for parallelism, options in [*EXPERTS, ({"ep": 2, "cp": 2}, {})]:
        results = four.run(
            "layout_ranks:train_two_steps",
            path=experts,
            parallelism=parallelism,
            options=options,
            **config,
        )
        assert_as_one_rank(results, want, exact, f"{parallelism} {options}")


@pytest.mark.parametrize(
    "model",
    [TinyModel(tied=True, **DEEP), TinyModel(family="qwen3_moe", num_experts=8, **DEEP)],
    ids=lambda model: model.family,
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_virtual_stages_do_not_change_an_update(
    pool: RankPool, one: RankPool, tmp_path: Path, model: TinyModel, optimizer: OptimizerConfig
) -> None:
    path = str(write_checkpoint(tmp_path / "model", model))
    # They make 2, 1 and 3 micro-batches, and odd numbers are filled up.
    for rows in (ROWS, ROWS[:1], [*ROWS, ROWS[0]]):
        check_as_one(pool, one, CHUNKS, path, rows=rows, optimizer=optimizer)


def test_a_closed_engine_leaves_no_group_behind(pool: RankPool, experts: str) -> None:
    for row in pool.run("layout_ranks:count_threads", path=experts, parallelism={"ep": 2}):
        assert row[0] == row[1] == row[2], row


def test_virtual_stages_go_with_other_layouts(
    four: RankPool, one: RankPool, tmp_path: Path
) -> None:
    model = TinyModel(family="qwen3_moe", num_experts=8, **DEEP | {"num_layers": 8})
    path = str(write_checkpoint(tmp_path / "model", model))
    for layout in CHUNKS_OF_FOUR:
        check_as_one(
            four,
            one,
            layout,
            path,
            optimizer=ADAMW,
            memory=Memory(max_tokens=8, recompute="full"),
        )


def test_virtual_stages_give_values(pool: RankPool, one: RankPool, tmp_path: Path) -> None:
    path = str(write_checkpoint(tmp_path / "model", TinyModel(value_model=True, **DEEP)))
    ((want, exact),) = one.run("layout_ranks:train_values", path=path, parallelism={}, options={})
    results = pool.run(
        "layout_ranks:train_values", path=path, parallelism=CHUNKS[0], options=CHUNKS[1]
    )
    assert_as_one_rank(results, want, exact, f"{CHUNKS}")


def test_virtual_stages_infer_without_an_optimizer(
    pool: RankPool, one: RankPool, tmp_path: Path
) -> None:
    path = str(write_checkpoint(tmp_path / "model", TinyModel(tied=True, **DEEP)))
    (want,) = one.run("layout_ranks:infer", path=path, parallelism={}, options={})
    for found in pool.run(
        "layout_ranks:infer", path=path, parallelism=CHUNKS[0], options=CHUNKS[1]
    ):
        torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("first", "second"), [(CHUNKS, ({"pp": 2}, {})), (({"pp": 2}, {}), CHUNKS)]
)
def test_checkpoints_go_to_and_from_virtual_stages(
    pool: RankPool, one: RankPool, tmp_path: Path, first: Any, second: Any
) -> None:
    path = str(write_checkpoint(tmp_path / "model", TinyModel(tied=True, **DEEP)))
    config = {"path": path, "optimizer": ADAMW}
    folder = str(tmp_path / "saved")
    ((want, exact),) = one.run("layout_ranks:train_two_steps", parallelism={}, options={}, **config)
    pool.run(
        "layout_ranks:train_and_save",
        parallelism=first[0],
        options=first[1],
        folder=folder,
        **config,
    )
    for norm, weights in pool.run(
        "layout_ranks:load_and_train",
        parallelism=second[0],
        options=second[1],
        folder=folder,
        **config,
    ):
        assert abs(norm - want[3]) < 1e-4 * want[3]
        assert_same_weights(weights, exact, f"{first} to {second}")


def check_as_one(ranks: RankPool, one: RankPool, layout: Any, path: str, **config: Any) -> None:
    ((want, exact),) = one.run(
        "layout_ranks:train_two_steps", path=path, parallelism={}, options={}, **config
    )
    results = ranks.run(
        "layout_ranks:train_two_steps",
        path=path,
        parallelism=layout[0],
        options=layout[1],
        **config,
    )
    assert_as_one_rank(results, want, exact, f"{layout}")


def test_checkpoints_go_between_layouts_of_experts(
    four: RankPool, one: RankPool, experts: str, tmp_path: Path
) -> None:
    config = {"optimizer": ADAMW}
    ((want, exact),) = one.run(
        "layout_ranks:train_two_steps", path=experts, parallelism={}, options={}, **config
    )
    for index, parts in enumerate(
        [(EXPERTS[2], EXPERTS[8]), (EXPERTS[4], EXPERTS[5]), (EXPERTS[6], EXPERTS[1])]
    ):
        (first, its), (second, others) = parts
        folder = str(tmp_path / f"{index}")
        four.run(
            "layout_ranks:train_and_save",
            path=experts,
            parallelism=first,
            options=its,
            folder=folder,
            **config,
        )
        found = four.run(
            "layout_ranks:load_and_train",
            path=experts,
            parallelism=second,
            options=others,
            folder=folder,
            **config,
        )
        for norm, weights in found:
            assert abs(norm - want[3]) < 1e-4 * want[3]
            assert_same_weights(weights, exact, f"{first} to {second}")


def test_a_gradient_that_is_not_finite_is_skipped_everywhere(four: RankPool, experts: str) -> None:
    for parallelism, options in (EXPERTS[0], EXPERTS[2], EXPERTS[5]):
        found = four.run(
            "layout_ranks:skip_a_step",
            path=experts,
            parallelism=parallelism,
            options=options,
        )
        assert all(
            "gradient norm" in skipped and same and norm > 0 for skipped, same, norm in found
        ), f"{parallelism}: {found}"


# Families of the suite's plain fixtures; test_families.py has all.
PLAIN = ("llama", "qwen2", "qwen3", "qwen3_moe")


@pytest.mark.parametrize(
    "compute", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param(family, tied, marks=() if tied == (index % 2 == 0) else pytest.mark.nightly)
        for index, family in enumerate(PLAIN)
        for tied in (True, False)
    ],
)
def test_a_folder_goes_in_and_out_bit_for_bit(
    pool: RankPool, four: RankPool, tmp_path: Path, family: str, tied: bool, compute: Any
) -> None:
    moe = family == "qwen3_moe"
    more = {"num_experts": 8} if moe else {}
    model = TinyModel(family=family, tied=tied, **DEEP, **more)
    path = str(write_checkpoint(tmp_path / "model", model))
    precision = Precision(compute=compute)
    for parallelism, options in [*EXPERTS, CHUNKS_OF_FOUR[0]] if moe else [*DENSE, CHUNKS]:
        arguments = {
            "path": path,
            "parallelism": parallelism,
            "options": options,
            "precision": precision,
        }
        check_exports(
            (four if moe else pool).run("layout_ranks:compare_exports", **arguments),
            path,
            f"{parallelism}",
        )


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_value_model_goes_in_and_out_bit_for_bit(
    pool: RankPool, four: RankPool, tmp_path: Path, family: str, compute: Any
) -> None:
    model = TinyModel(family=family, tied=False, value_model=True, **DEEP)
    path = str(write_checkpoint(tmp_path / "model", model))
    # Masters are whole without an optimizer, and in flat ranges with one.
    for optimizer in (None, OptimizerConfig()):
        arguments = {
            "path": path,
            "model_type": "value_model",
            "optimizer": optimizer,
            "precision": Precision(compute=compute),
        }
        for parallelism, options in EXPERTS[:3] if family == "qwen3_moe" else [*DENSE[3:], CHUNKS]:
            ranks = four if family == "qwen3_moe" else pool
            found = ranks.run(
                "layout_ranks:compare_exports",
                parallelism=parallelism,
                options=options,
                **arguments,
            )
            check_exports(found, path, f"{parallelism}")


def check_exports(found: Any, path: str, about: str) -> None:
    stored = load_file(f"{path}/model.safetensors")
    assert all(wrong == [] for wrong, _, _ in found), (
        f"{about}: {[wrong[:3] for wrong, _, _ in found]}"
    )
    assert all(
        [name for name, _, _ in shards] == [name for name, _, _ in found[0][2]]
        for _, _, shards in found
    )
    for row in zip(*(shards for _, _, shards in found), strict=True):
        assert torch.equal(assemble([(part, spec) for _, part, spec in row]), stored[row[0][0]]), (
            f"{about} {row[0][0]}"
        )


def test_a_loss_that_raises_on_the_last_stage_leaves_no_stage_waiting(
    pool: RankPool, one: RankPool, tmp_path: Path
) -> None:
    path = str(write_checkpoint(tmp_path / "model", TinyModel(tied=True, **DEEP)))
    ((_, norm),) = one.run(
        "layout_ranks:train_after_an_error", path=path, parallelism={}, options={}
    )
    for parallelism, options in (({"pp": 2}, {}), CHUNKS):
        results = pool.run(
            "layout_ranks:train_after_an_error", path=path, parallelism=parallelism, options=options
        )
        assert [raised for raised, _ in results] == ["RankFailure", "KeyError"]
        assert all(abs(got - norm) < 1e-3 * norm for _, got in results)


def test_a_loss_that_raises_on_one_tensor_parallel_rank_leaves_no_rank_waiting(
    four: RankPool, one: RankPool, folder: str
) -> None:
    ((_, norm),) = one.run(
        "layout_ranks:train_after_an_error", path=folder, parallelism={}, options={}
    )
    results = four.run(
        "layout_ranks:train_after_an_error",
        path=folder,
        parallelism={"tp": 2, "pp": 2},
        options={},
        alone=True,
    )
    assert [raised for raised, _ in results] == ["RankFailure"] * 3 + ["KeyError"]
    assert all(abs(got - norm) < 1e-3 * norm for _, got in results)


def test_two_layouts_at_once_are_refused(pool: RankPool, folder: str) -> None:
    for error, finite in pool.run("layout_ranks:build_two_layouts", path=folder):
        assert "global variables" in error
        assert finite


def test_a_dense_engine_shares_the_groups_of_one_with_experts(
    four: RankPool, folder: str, experts: str
) -> None:
    for parallelism, options in (EXPERTS[1], EXPERTS[5]):
        dense = {name: size for name, size in parallelism.items() if name != "ep"}
        found = four.run(
            "layout_ranks:train_dense_with_experts",
            path=experts,
            dense_path=folder,
            parallelism=parallelism,
            options=options,
            dense=dense,
        )
        for together, alone, error in found:
            assert together == alone
            assert "before the dense one" in error


def test_an_error_of_one_rank_reaches_all(pool: RankPool, folder: str) -> None:
    for what in ("build_model", "attach", "StageOptimizer"):
        results = pool.run("layout_ranks:fail_to_build", path=folder, what=what)
        assert results == ["RankFailure", "MemoryError"]
