"""The program of the ranks of test_boxes: ``torchrun … boxes_peers.py FOLDER``.

Each rank distributes tensors over a mesh of 2 x 2, compares exports and loaded boxes with them, and
writes its part and box of each saved tensor to FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from engine_api.config import LoraConfig
from engine_api.errors import UnsupportedCapability
from engine_api.hf_names import Piece
from engine_torch.boxes import find_box
from engine_torch.checkpoint import install, layout_of, state_of
from engine_torch.export import export_shards, export_whole
from engine_torch.weights import ShardedParam, parameter_table

EXPERTS = (3, 10, 5)
# Sizes that two and four do not divide, some smaller than the mesh.
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (7, 5),
    "wide": (3, 9),
    "short": (1, 6),
    "bias": (5,),
    "experts": EXPERTS,
}
PLACEMENTS: dict[str, list[Any]] = {
    "rows": [Replicate(), Shard(0)],
    "rows-twice": [Shard(0), Shard(0)],
    "grid": [Shard(0), Shard(-1)],
    "columns": [Replicate(), Shard(-1)],
    "copies": [Replicate(), Replicate()],
}


def values_of(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the values of a parameter, which are the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))


def pieces_of(whole: dict[str, Tensor]) -> dict[str, list[Piece]]:
    """Return the saved tensors of each parameter."""
    pieces = {name: [Piece(name=name, shape=tuple(w.shape))] for name, w in whole.items()}
    if "experts" in pieces:
        count, rows, columns = EXPERTS
        half = rows // 2
        pieces["experts"] = [
            Piece(name=f"{e}.{kind}", shape=(half, columns), expert=e, rows=part)
            for e in range(count)
            for kind, part in (("gate", (0, half)), ("up", (half, rows)))
        ]
    return pieces


def distribute(mesh: DeviceMesh, whole: dict[str, Tensor], placements: list[Any]) -> nn.Module:
    """Return a module of the tensors, whose negative dimensions count from the last one."""
    model = nn.Module()
    for name, tensor in whole.items():
        own = [Shard(p.dim % tensor.dim()) if isinstance(p, Shard) else p for p in placements]
        setattr(model, name, nn.Parameter(distribute_tensor(tensor, mesh, own)))
    return model


def make_tensor_parallel(mesh: DeviceMesh) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return linear layers under tensor parallelism and FSDP, which makes strided placements."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6, bias=False))
    whole = {name: values_of(name, tuple(p.shape)) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data.copy_(whole[name])
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    (weight, *_) = model.parameters()
    assert isinstance(weight, DTensor)
    assert hasattr(weight.placements[0], "split_factor"), weight.placements
    return model, whole


def check(model: nn.Module, whole: dict[str, Tensor]) -> dict[str, Any]:
    """Return this rank's boxes, after comparing exports and loaded boxes with the whole tensors."""
    table = parameter_table(model, pieces_of(whole))
    saved = {piece.name: piece.view(whole[e.name]) for e in table for piece in e.pieces}
    boxes = {
        name: (part.clone(), spec)
        for name, part, spec in export_shards(table, None, None, "merged")
    }
    for name, (part, spec) in boxes.items():
        assert torch.equal(saved[name][spec.slices], part), (name, spec)
    cpu = torch.device("cpu")
    for dtype in (None, torch.bfloat16):
        exported = dict(export_whole(table, None, dtype, "merged", 64, cpu))
        assert exported.keys() == saved.keys()
        for name, tensor in exported.items():
            assert torch.equal(tensor, saved[name] if dtype is None else saved[name].to(dtype)), (
                name
            )
    rank = dist.get_rank()
    before = {key: part.clone() for key, (part, _) in state_of(table, None, rank).items()}
    specs = {
        key.removeprefix("model."): spec for key, (spec, _) in layout_of(table, None, {}).items()
    }
    assert specs == {name: spec for name, (_, spec) in boxes.items()}
    for entry in table:
        entry.local.detach().zero_()
    install(table, None, before)
    assert all(torch.equal(state_of(table, None, rank)[k][0], part) for k, part in before.items())
    return {"whole": saved, "boxes": boxes}


def refuse_two_boxes(mesh: DeviceMesh) -> None:
    """Check that a strided placement without its counterpart is refused."""
    from torch.distributed.tensor.placement_types import _StridedShard

    local = torch.zeros(4, 2)
    odd = DTensor.from_local(
        local, mesh, [_StridedShard(0, split_factor=2), Replicate()], run_check=False
    )
    with pytest.raises(UnsupportedCapability, match="one box of it in each rank"):
        find_box(odd)


def check_adapters(mesh: DeviceMesh) -> None:
    """Check that an adapter is merged, whatever part of its weight a rank holds."""
    names = ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
    base, a, b = names
    whole = {base: values_of(base, (7, 5)), a: values_of(a, (2, 5)), b: values_of(b, (7, 2))}
    lora = LoraConfig(rank=2, alpha=3.0)

    def table(placements: list[Any]) -> list[ShardedParam]:
        model = nn.Module()
        layer = model.layer = nn.Module()
        for name, tensor in whole.items():
            *path, leaf = name.split(".")
            owner: nn.Module = layer
            for part in path:
                owner.add_module(
                    part, owner.get_submodule(part) if hasattr(owner, part) else nn.Module()
                )
                owner = owner.get_submodule(part)
            setattr(owner, leaf, nn.Parameter(distribute_tensor(tensor, mesh, placements)))
        return parameter_table(model, {"layer.weight": [Piece(name="w", shape=(7, 5))]})

    want = whole[base] + 1.5 * whole[b] @ whole[a]
    cpu = torch.device("cpu")
    for placements in PLACEMENTS.values():
        found = dict(export_whole(table(placements), lora, None, "merged", 64, cpu))
        torch.testing.assert_close(found, {"w": want})
    for name, part, spec in export_shards(table([Shard(0), Shard(1)]), lora, None, "merged"):
        assert name == "w"
        torch.testing.assert_close(part, want[spec.slices])


def main(folder: Path) -> None:
    """Check every placement, and tensor parallelism under FSDP."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = {name: values_of(name, shape) for name, shape in SHAPES.items()}
    found = {
        name: check(distribute(mesh, whole, placements), whole)
        for name, placements in PLACEMENTS.items()
    }
    found["tensor-parallel"] = check(*make_tensor_parallel(mesh))
    refuse_two_boxes(mesh)
    check_adapters(mesh)
    torch.save(found, folder / f"rank-{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
