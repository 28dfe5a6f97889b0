"""The box of a tensor that a rank holds, for any placements of a DTensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from engine_api.errors import UnsupportedCapability

__all__ = ["Box", "find_box", "find_replica", "find_row_group", "local_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A box of a tensor, as its first index and its size in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as slices into the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))


def local_of(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor (live memory), or the tensor itself."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # A weight that is gathered in FP8 is torchao's wrapper around the live memory.
    plain: Tensor = getattr(local, "_tensor", local)
    return plain


def find_box(tensor: Tensor) -> Box:
    """Return the box that this rank holds, which is all of a tensor that is no DTensor.

    Raises:
        UnsupportedCapability: the elements that the rank holds are not one box of the tensor.
    """
    if not isinstance(tensor, DTensor):
        return Box(offset=(0,) * tensor.dim(), shape=tuple(tensor.shape))
    # torch's own checkpoints call this method, which knows every placement.
    chunks: Any = tensor.__create_chunk_list__()
    local = tuple(tensor.to_local().shape)
    found = [Box(offset=tuple(one.offsets), shape=tuple(one.sizes)) for one in chunks]
    if [box.shape for box in found] != [local] or not _holds_one_range(tensor):
        raise UnsupportedCapability(
            f"placements {tensor.placements} on a mesh {tuple(tensor.device_mesh.shape)}",
            where=f"a tensor of shape {tuple(tensor.shape)}",
            why=f"expected one box of it in each rank, got elements {local} of several places",
            remedy="choose sizes of the layout that divide the tensor's",
        )
    return found[0]


def _holds_one_range(tensor: DTensor) -> bool:
    """Return whether a rank holds one range of indices in each dimension.

    ``_StridedShard`` cuts a dimension into ``split_factor`` parts and gives a rank a piece of each.
    The placements to its right must then leave one of these pieces to each rank.
    """
    sizes = tensor.device_mesh.shape
    for index, placement in enumerate(tensor.placements):
        factor = getattr(placement, "split_factor", 1)
        later = zip(sizes[index + 1 :], tensor.placements[index + 1 :], strict=True)
        ranks = [
            size for size, other in later if _get_dimension(other) == _get_dimension(placement)
        ]
        if factor not in (1, math.prod(ranks)):
            return False
    return True


def _get_dimension(placement: Any) -> int | None:
    """Return the dimension of the tensor that a placement cuts, or None."""
    dimension: int | None = getattr(placement, "dim", None)
    return dimension


def find_replica(tensor: Tensor) -> int:
    """Return the number of this rank's copy, among the ranks that hold the same box."""
    if not isinstance(tensor, DTensor):
        return 0
    index = 0
    coordinate = tensor.device_mesh.get_coordinate() or ()
    places = zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True)
    for size, place, placement in places:
        if placement.is_replicate():
            index = index * size + place
    return index


def find_row_group(tensor: Tensor) -> Any:
    """Return the process group that shares the rows of a tensor, or None.

    It is None for a tensor that ranks hold whole, and for one that is cut in another dimension or
    over several dimensions of the mesh.
    """
    if not isinstance(tensor, DTensor):
        return None
    cuts = [(i, one) for i, one in enumerate(tensor.placements) if not one.is_replicate()]
    # A strided placement is no Shard, but may be of a class that is derived from it.
    if len(cuts) != 1 or type(cuts[0][1]) is not Shard or cuts[0][1].dim != 0:
        return None
    return tensor.device_mesh.get_group(cuts[0][0])
