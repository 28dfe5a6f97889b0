"""VeOmni's vision-language models, against transformers in float64, document by document."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from balance_reference import read, subtract
from picture_ranks import RATE, Step, create, draw_documents, read_weights, step
from tested_ranks import Pools, open_pools
from tiny_models import tiny_pictured_model
from torch import Tensor

from engine_api import Memory, OptimizerConfig, sft_loss
from engine_api.errors import EngineError
from engine_conformance.fixtures.pictures import PictureOracle, picture_batch
from engine_veomni import library

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# Differences of float32 from float64: of log-probs in nats, and of a gradient from its norm.
NEAR = 1e-4
NEAR_GRADIENT = 1e-3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a tiny model of each family."""
    found: dict[str, Path] = {}
    for name in FAMILIES:
        found[name] = tmp_path_factory.mktemp(name)
        tiny_pictured_model(name).save_pretrained(found[name])
    return found


@dataclass(frozen=True)
class Exact:
    """Results of transformers in float64, one document at a time."""

    log_probs: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]
    """Gradients by name of the saved weight, of zeros where no document reaches it."""


@pytest.fixture(scope="module")
def exact(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exact]:
    return {
        name: compute(folder, tmp_path_factory.mktemp("after")) for name, folder in folders.items()
    }


def compute(folder: Path, after: Path) -> Exact:
    """Return the numbers of all documents. ``after`` is an empty folder."""
    oracle = PictureOracle(folder)
    oracle.model.set_experts_implementation("eager")
    with torch.no_grad():
        log_probs = [oracle.log_probs(one) for one in draw_documents()]
    loss, gradients = oracle.gradients(draw_documents())
    with torch.no_grad():
        # Gradients have saved names, which in some families are not those of the parameters.
        for parameter, gradient in zip(oracle.model.parameters(), gradients.values(), strict=True):
            if gradient is not None:
                parameter.sub_(gradient)
    oracle.model.save_pretrained(after)
    return Exact(log_probs, loss, subtract(read(folder), read(after)))


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with open_pools() as opened:
        yield opened


def check(found: Step, exact: Exact, *, frozen: bool = False) -> None:
    """Compare each token's log-prob, the loss, and the gradient of every weight."""
    want = torch.cat([exact.log_probs[i] for i in found.order])
    torch.testing.assert_close(found.log_probs.double(), want, atol=NEAR, rtol=0)
    assert found.loss == pytest.approx(exact.loss, abs=NEAR)
    assert found.gradients.keys() == exact.gradients.keys()
    trained = {n: g for n, g in exact.gradients.items() if not (frozen and "visual." in n)}
    whole = torch.stack([one.norm() for one in trained.values()]).norm()
    for name, got in found.gradients.items():
        true = trained.get(name, torch.zeros(()))
        if not true.any():
            assert not got.any(), name
            continue
        apart = (got - true).norm() / max(true.norm(), 1e-3 * whole)
        assert apart < NEAR_GRADIENT, (name, float(apart))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_pack_is_computed_as_each_document_alone(
    folders: dict[str, Path], exact: dict[str, Exact], family: str
) -> None:
    """Each token's log-prob and the gradient of every weight, the tower's too."""
    found = step(str(folders[family]), [0, 1, 2, 3])
    assert found.micro_batches > 1
    check(found, exact[family])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("order", "parallelism", "recompute"),
    [([0, 1, 2, 3], {}, "none"), ([1, 0, 3, 2], {"ulysses": 2}, "full")],
    ids=["images on one rank", "ulysses, recomputed"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_the_gradients_of_one(
    pools: Pools,
    folders: dict[str, Path],
    exact: dict[str, Exact],
    family: str,
    order: list[int],
    parallelism: dict[str, int],
    recompute: str,
) -> None:
    """The second rank has no image, or both have the same documents."""
    call: dict[str, Any] = {
        "path": str(folders[family]),
        # Ranks take documents in turn, so that the first one has all images of [0, 1, 2, 3].
        "order": order,
        "parallelism": parallelism,
        "memory": Memory(max_tokens=24, recompute=recompute),
    }
    for found in pools[2].run("picture_ranks:step", **call):
        check(found, exact[family])


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_stays_as_it_was_on_each_rank(
    pools: Pools, folders: dict[str, Path], exact: dict[str, Exact], family: str
) -> None:
    path = str(folders[family])
    for found in pools[2].run(
        "picture_ranks:step", path=path, order=[0, 1, 2, 3], freeze=["vision"]
    ):
        check(found, exact[family], frozen=True)


def test_three_tokens_are_not_taken_for_three_dimensions(
    folders: dict[str, Path], exact: dict[str, Exact]
) -> None:
    """VeOmni's Qwen2-VL exchanges the axes of positions whose second axis has three."""
    for family in FAMILIES:
        found = step(str(folders[family]), [3])
        want = exact[family].log_probs[3]
        torch.testing.assert_close(found.log_probs.double(), want, atol=NEAR, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_goes_on_in_engine_fsdp_and_back(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """The optimizer is AdamW, whose moments are in the checkpoint, too."""
    batch = picture_batch(draw_documents(), "cpu")
    ends: list[dict[str, Tensor]] = []
    for backends in (("veomni", "fsdp2", "veomni"), ("fsdp2", "fsdp2", "fsdp2")):
        saved = dict[str, Tensor]()
        place = tmp_path / "-".join(backends)
        for number, backend in enumerate(backends):
            settings = {"optimizer": OptimizerConfig(lr=1e-2)}
            engine = create(str(folders[family]), backend, **settings)
            engine.initialize()
            if saved:
                engine.load_checkpoint(place)
                loaded = read_weights(engine)
                assert loaded.keys() == saved.keys()
                assert all(torch.equal(loaded[name], one) for name, one in saved.items())
            engine.train_batch(batch, sft_loss)
            engine.save_checkpoint(place / f"step-{number:06d}").result()
            saved = read_weights(engine)
            engine.close()
        ends.append(saved)
    mixed, plain = (torch.cat([one.flatten() for one in end.values()]) for end in ends)
    start = torch.cat([read(folders[family])[name].flatten() for name in ends[0]])
    # AdamW's steps along faint gradients differ in float32.
    assert (mixed - plain).norm() < 0.01 * (plain - start).norm()


def test_experts_behind_images_are_balanced_as_by_engine_fsdp(folders: dict[str, Path]) -> None:
    batch = picture_batch(draw_documents(), "cpu")
    found: list[dict[str, Tensor]] = []
    for backend, options in (("veomni", {"balance_loss": 0.5}), ("fsdp2", {"balance_loss": 0.5})):
        engine = create(str(folders["qwen3_vl_moe"]), backend, options=options)
        engine.initialize()
        output = engine.train_batch(batch, sft_loss)
        assert output.metrics["balance_loss"] > 0
        found.append(read_weights(engine))
        engine.close()
    for name, one in found[1].items():
        torch.testing.assert_close(found[0][name], one, atol=1e-4 * RATE, rtol=0, msg=name)


@pytest.mark.slow
def test_the_saved_model_is_read_by_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    for family in FAMILIES:
        engine = create(str(folders[family]), optimizer=OptimizerConfig(lr=1e-2))
        engine.initialize()
        engine.train_batch(picture_batch(draw_documents(), "cpu"), sft_loss)
        engine.save_hf(tmp_path / family)
        got = engine.infer_batch(picture_batch(draw_documents(), "cpu")).log_probs.cpu()
        engine.close()
        want = torch.cat(compute(tmp_path / family, tmp_path / f"{family}-after").log_probs)
        torch.testing.assert_close(got.double(), want, atol=NEAR, rtol=0)
        assert read(tmp_path / family).keys() == read(folders[family]).keys()


def test_the_parallel_state_is_veomnis_own_again_after_the_last_engine(
    folders: dict[str, Path],
) -> None:
    module = sys.modules[library.find_class("qwen3_vl", "ForConditionalGeneration").__module__]
    before = module.get_parallel_state
    first, second = create(str(folders["qwen3_vl"])), create(str(folders["qwen3_vl"]))
    first.initialize()
    second.initialize()
    assert module.get_parallel_state is not before
    first.close()
    assert module.get_parallel_state is not before
    second.close()
    assert module.get_parallel_state is before


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("qwen3_5", "linear_attention"),
        ("qwen3_5_moe", "linear_attention"),
        ("gemma3", "VeOmni has no language_model of type 'gemma3'"),
        ("internvl", "VeOmni has no language_model of type 'internvl'"),
    ],
)
def test_a_family_that_it_does_not_compute_is_refused_by_name(
    tmp_path: Path, family: str, named: str
) -> None:
    tiny_pictured_model(family).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=named) as caught:
        create(str(tmp_path)).initialize()
    assert "fsdp2" in caught.value.remedy
