"""Exporter on several ranks: it gathers bit for bit the result of quantizing the whole weights."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from exporter_ranks import RESOLUTION, Shards, different, exporter, failing, poisoned, run
from served_model import checkpoint

from engine_api.config import ModelSource
from engine_api.errors import ConfigError, RolloutError, UnsupportedCapability
from rollout_fp8.export.exporter import Exporter

EVERY = [
    ("fp8", "rows", "fp32"),
    ("fp8", "rows", "pow2"),
    ("none", "rows", "fp32"),
    ("fp8", "copies", "fp32"),
    ("fp8", "experts", "fp32"),
]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "settings"),
    [(2, EVERY), (3, [*EVERY[:2], EVERY[-1]])],
    ids=["two ranks", "three ranks"],
)
def test_gathered_shards_are_the_whole_weights_bit_for_bit(world, settings, tmp_path) -> None:
    """Check it for ``settings`` of quantization, distribution over ranks, and scales."""
    mp.spawn(run, args=(world, str(tmp_path), settings), nprocs=world)


@pytest.mark.slow
@pytest.mark.distributed
def test_one_ranks_nan_is_every_ranks_error(tmp_path) -> None:
    mp.spawn(poisoned, args=(2, str(tmp_path)), nprocs=2)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_do_not_export_the_same_are_told_so_on_every_rank(tmp_path) -> None:
    mp.spawn(different, args=(2, str(tmp_path)), nprocs=2)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_fails_in_a_sync_leaves_no_other_in_a_gather(tmp_path) -> None:
    mp.spawn(failing, args=(2, str(tmp_path)), nprocs=2)


def test_an_engine_without_shards_is_refused(tmp_path) -> None:
    engine = Shards(checkpoint(0), 0, 1)
    engine.capabilities = frozenset()
    with pytest.raises(UnsupportedCapability, match="export_shards"):
        exporter(tmp_path, "none").export(engine)


def test_a_stream_that_somebody_left_is_run_to_its_end_and_the_next_sync_is_whole(tmp_path) -> None:
    weights = checkpoint(0)
    export = exporter(tmp_path, "fp8", bucket_bytes=100_000)
    left = export.export(Shards(weights, 0, 1))
    next(iter(left.buckets()))
    assert list(left) == []  # drained
    again = {name: tensor.clone() for name, tensor in export.export(Shards(weights, 0, 1))}
    assert again.keys() == left.plan.tensors.keys()


def test_an_export_that_changed_its_layout_is_refused(tmp_path) -> None:
    export = exporter(tmp_path, "none")
    list(export.export(Shards(checkpoint(0), 0, 1)))
    other = checkpoint(0)
    other["model.norm.weight"] = other["model.norm.weight"][:100]
    with pytest.raises(RolloutError, match="export has changed"):
        list(export.export(Shards(other, 0, 1)))


def test_an_export_may_lie_elsewhere_at_each_sync_but_not_in_other_strides(tmp_path) -> None:
    """Rows at another distance are another table for the kernels."""
    export = exporter(tmp_path, "fp8")
    for seed in (0, 1, 0):
        weights = checkpoint(seed)
        got = {name: tensor.clone() for name, tensor in export.export(Shards(weights, 0, 1))}
        for name, tensor in exporter(tmp_path, "fp8").export(Shards(weights, 0, 1)):
            assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name
    # What kernels cannot read is copied, as at the first sync.
    turned = {name: tensor.t().contiguous().t() for name, tensor in checkpoint(0).items()}
    again = {name: tensor.clone() for name, tensor in export.export(Shards(turned, 0, 1))}
    assert all(torch.equal(again[n].view(torch.uint8), got[n].view(torch.uint8)) for n in got)
    wide = {name: torch.cat([t, t], -1)[..., : t.shape[-1]] for name, t in checkpoint(0).items()}
    for _ in range(2):
        with pytest.raises(RolloutError, match=r"another layout than at .*\n.*expected torch"):
            list(export.export(Shards(wide, 0, 1)))


def test_a_model_that_the_layer_table_does_not_know_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}'
    )
    model = ModelSource(path=str(tmp_path))
    export = Exporter(resolution=RESOLUTION, model=model, dtype="bfloat16", quantization="fp8")
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        export.export(Shards(checkpoint(0), 0, 1))
    with pytest.raises(ConfigError, match=r"expected one of .*, got 'int8'"):
        Exporter(resolution=RESOLUTION, model=model, dtype="int8")
    with pytest.raises(
        ConfigError, match=r"rollout\.quantization: expected one of none, fp8, got 'int4'"
    ):
        Exporter(resolution=RESOLUTION, model=model, dtype="bfloat16", quantization="int4")


def test_shards_may_lie_in_memory_as_they_like(tmp_path) -> None:
    export = exporter(tmp_path, "fp8")
    weights = {name: tensor.t().contiguous().t() for name, tensor in checkpoint(0).items()}
    got = {name: tensor.clone() for name, tensor in export.export(Shards(weights, 0, 1))}
    for name, tensor in exporter(tmp_path, "fp8").export(Shards(checkpoint(0), 0, 1)):
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_shards_that_cannot_be_sent_as_they_are_cut_are_refused(tmp_path) -> None:
    weights = {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 128, 128)}
    with pytest.raises(
        RolloutError, match=r"cannot be sent in their present slices[^$]*two dimensions"
    ):
        list(exporter(tmp_path, "fp8").export(Shards(weights, 0, 1)))
