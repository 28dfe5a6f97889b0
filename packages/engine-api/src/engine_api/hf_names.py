"""Hugging Face checkpoint names of the parameters of a transformers model.

transformers 5 keeps the experts of most MoE families fused in memory
(``experts.gate_up_proj [E, 2I, H]``) and splits them when it saves
(``experts.3.gate_proj.weight [I, H]``). Exports, checkpoints and rollouts use the saved names; only
this module maps them to the parameters in memory. The table is transformers' own conversion
mapping, read backwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from engine_api.errors import ConfigError
from engine_api.weights import ShardSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One saved tensor, with the part of an in-memory parameter that it is.

    If ``expert`` is None it is the whole parameter, or ``parameter[rows[0]:rows[1]]`` where
    ``rows`` are given. If not, it is ``parameter[expert, rows[0]:rows[1]]``. A ``transposed`` piece
    is the whole parameter with its last two dimensions exchanged.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: tuple[int, int] = (0, 0)
    transposed: bool = False

    def view(self, tensor: torch.Tensor, offset: Sequence[int] = ()) -> torch.Tensor:
        """Return the piece as a view of ``tensor``, a box of the parameter.

        The box begins at ``offset`` (empty: at the parameter's first element). The result has a
        zero in its shape where ``tensor`` holds nothing of the piece.
        """
        start = tuple(offset) or (0,) * tensor.dim()
        if self.expert is None:
            if self.transposed:
                return tensor.transpose(-1, -2)
            if not self.rows[1]:
                return tensor
            rows = _overlap(self.rows, start[0], tensor.shape[0])
            return tensor[rows.start - start[0] : rows.stop - start[0]] if rows else tensor[:0]
        if not self.is_in(start, tensor.shape):
            return tensor.new_empty((0, *self.shape[1:]))
        rows = _overlap(self.rows, start[1], tensor.shape[1])
        return tensor[self.expert - start[0], rows.start - start[1] : rows.stop - start[1]]

    def spec(self, offset: Sequence[int], shape: Sequence[int], replica: int) -> ShardSpec:
        """Return the box of ``view`` in the saved tensor.

        The rank holds the box of the parameter that begins at ``offset`` and has this shape.
        """
        if self.expert is None:
            if not self.rows[1]:
                return ShardSpec(
                    global_shape=self.shape,
                    offset=_exchange(offset) if self.transposed else tuple(offset),
                    shape=_exchange(shape) if self.transposed else tuple(shape),
                    replica=replica,
                )
            rows = _overlap(self.rows, offset[0], shape[0])
            if not rows:
                return ShardSpec.nothing(self.shape)
            return ShardSpec(
                global_shape=self.shape,
                offset=(rows.start - self.rows[0], *offset[1:]),
                shape=(len(rows), *shape[1:]),
                replica=replica,
            )
        if not self.is_in(offset, shape):
            return ShardSpec.nothing(self.shape)
        rows = _overlap(self.rows, offset[1], shape[1])
        return ShardSpec(
            global_shape=self.shape,
            offset=(rows.start - self.rows[0], *offset[2:]),
            shape=(len(rows), *shape[2:]),
            replica=replica,
        )

    def is_in(self, offset: Sequence[int], shape: Sequence[int]) -> bool:
        """Return whether a box of the parameter has rows of this piece."""
        if self.expert is None:
            return True
        has_expert = offset[0] <= self.expert < offset[0] + shape[0]
        return has_expert and len(_overlap(self.rows, offset[1], shape[1])) > 0


def _exchange(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return sizes with the last two exchanged."""
    return (*sizes[:-2], sizes[-1], sizes[-2])


def _overlap(rows: tuple[int, int], first: int, count: int) -> range:
    """Return the rows of a parameter that are in ``rows`` and in ``[first, first + count)``."""
    return range(max(rows[0], first), min(rows[1], first + count))


class Views:
    """A box's part of each piece of a parameter, as views of any tensor of the box's elements.

    The part of each is computed once, and the views of all experts are made at once, because a
    model has thousands of them.

    Args:
        pieces: the pieces, in the order of the views.
        offset: where the box begins in the parameter; empty: at its first element.
        shape: shape of the box.
    """

    def __init__(
        self, pieces: Sequence[Piece], offset: Sequence[int], shape: Sequence[int]
    ) -> None:
        self._start = tuple(offset) or (0,) * len(shape)
        # The rows of each kind of experts' pieces, and the first view of each kind among all views.
        self._kinds: dict[tuple[int, int], slice] = {}
        firsts: dict[tuple[int, int], int] = {}
        # The other pieces, each beside its place.
        self._others: list[tuple[int, Piece]] = []
        self._places: list[int] = []
        for place, piece in enumerate(pieces):
            if piece.expert is None or not piece.is_in(self._start, shape):
                self._others.append((place, piece))
                continue
            if piece.rows not in firsts:
                rows = _overlap(piece.rows, self._start[1], shape[1])
                begin = rows.start - self._start[1]
                self._kinds[piece.rows] = slice(begin, begin + len(rows))
                firsts[piece.rows] = len(firsts) * shape[0]
            self._places.append(firsts[piece.rows] + piece.expert - self._start[0])

    def of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return ``Piece.view(tensor, offset)`` of each piece."""
        every = [view for rows in self._kinds.values() for view in tensor[:, rows].unbind()]
        found = [every[place] for place in self._places]
        for place, piece in self._others:
            found.insert(place, piece.view(tensor, self._start))
        return found


def saved_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a model saves and that are no parameters, by name, in order.

    They are a router's bias (DeepSeek-V3), a layer's scale (Gemma 4) and the like. RoPE's
    frequencies, which some models save, are left out because they are computed again.
    """
    saved = set(model.state_dict(keep_vars=True))
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in saved and not name.endswith("inv_freq")
    }


def float32_buffers(model: Any) -> set[str]:
    """Return the names of saved buffers that transformers keeps in float32 in every dtype.

    A router's bias is one, because a rounded one sends tokens to other experts.
    """
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    kept = [re.compile(rf"(^|\.){re.escape(part)}($|\.)") for part in parts]
    return {name for name in saved_buffers(model) if any(one.search(name) for one in kept)}


def keep_float32(model: Any) -> None:
    """Make the buffers of ``float32_buffers`` float32, in a model of any dtype on any device."""
    for name in float32_buffers(model):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        module.register_buffer(leaf, module.get_buffer(leaf).float())


def pieces_of(model: Any, folder: SavedTensors | None = None) -> dict[str, list[Piece]]:
    """Return the saved tensors of each in-memory parameter by its name, in order.

    Tied parameters come once. Saved buffers follow the parameters.

    Args:
        model: a transformers ``PreTrainedModel``, on any device (meta included), not yet wrapped.
        folder: the tensors of the model's folder, or None where they are not known. Some families
            are saved with a prefix for the language model if they were part of a larger model, and
            without it if not (Qwen3.5). Others are saved in parts whose sizes no table tells
            (OLMo-Hybrid).

    Raises:
        ConfigError: transformers converts a parameter in a way that is not a split into experts.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    # Loading applies the transforms in order. Saving undoes them from the last to the first, with
    # converters before renamings.
    transforms = [
        t.reverse_transform() for t in get_model_conversion_mapping(model, add_legacy=False)
    ]
    transforms.sort(key=lambda t: not hasattr(t, "operations"))
    saved = {**dict(model.named_parameters()), **saved_buffers(model)}
    shapes = {name: tuple(one.shape) for name, one in saved.items()}
    pieces = {name: _pieces(name, shape, transforms, folder) for name, shape in shapes.items()}
    plain = [t for t in transforms if not isinstance(t, PrefixChange)]
    if folder is None or len(plain) == len(transforms) or _are_in(pieces, folder):
        return pieces
    bare = {name: _pieces(name, shape, plain, folder) for name, shape in shapes.items()}
    return bare if _are_in(bare, folder) else pieces


class SavedTensors(Protocol):
    """The tensors of a folder, by name."""

    def __contains__(self, name: object) -> bool:
        """Return whether the folder has a tensor."""
        ...

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that the folder has."""
        ...


def _are_in(pieces: Mapping[str, list[Piece]], folder: SavedTensors) -> bool:
    """Return whether a folder has the tensors of the pieces, but for a value head."""
    every = (piece.name for parts in pieces.values() for piece in parts)
    return all(name in folder for name in every if not name.startswith("score."))


def _pieces(
    name: str, shape: tuple[int, ...], transforms: list[Any], folder: SavedTensors | None
) -> list[Piece]:
    pieces = [Piece(name=name, shape=shape)]
    for transform in transforms:
        if hasattr(transform, "operations"):
            renamed, pattern = transform.rename_source_key(name)
            if pattern is not None:
                pieces = _split(name, renamed, shape, transform, folder)
        else:
            pieces = [replace(p, name=transform.rename_source_key(p.name)[0]) for p in pieces]
    return pieces


def _split(
    name: str,
    renamed: str,
    shape: tuple[int, ...],
    transform: Any,
    folder: SavedTensors | None,
) -> list[Piece]:
    operations = [repr(o) for o in transform.operations]
    targets = list(transform.target_patterns)
    if operations == ["Chunk(dim=0)"]:
        names = [renamed.replace(targets[0], target) for target in targets]
        return _split_rows(names, shape, folder)
    if [type(one).__name__ for one in transform.operations] == ["Transpose"] and len(shape) == 3:
        return [_transpose(renamed, shape, transform.operations[0], folder)]
    fused = operations == ["Chunk(dim=1)", "SplitModulelist(dim=0)"]
    if len(shape) != 3 or not (
        fused or (operations == ["SplitModulelist(dim=0)"] and len(targets) == 1)
    ):
        raise ConfigError(
            "model.path",
            f"no export for {name}: it is saved through {operations}",
            why="only splits into experts and into rows are known",
            remedy="report the model family",
        )
    experts, rows, columns = shape
    part = rows // len(targets)
    return [
        Piece(
            name=renamed.replace(targets[0], target).replace("*", str(expert)),
            shape=(part, columns),
            expert=expert,
            rows=(i * part, (i + 1) * part),
        )
        for expert in range(experts)
        for i, target in enumerate(targets)
    ]


def _transpose(
    name: str, shape: tuple[int, ...], operation: Any, folder: SavedTensors | None
) -> Piece:
    """Return the piece of a parameter that some folders hold with its dimensions exchanged.

    Where both are read, transformers writes the parameter as it is in memory (Qwen3-VL-MoE).

    Raises:
        ConfigError: other dimensions than the last two are exchanged.
    """
    if {operation.dim0, operation.dim1} != {1, 2}:
        raise ConfigError(
            "model.path",
            f"no export for {name}: dimensions {operation.dim0} and {operation.dim1} are exchanged",
            why="only the last two of three are known",
            remedy="report the model family",
        )
    other = _exchange(shape)
    transposed = not operation.check_dims
    if operation.check_dims and folder is not None and name in folder:
        transposed = shape != other == folder.shape_of(name)
    return Piece(name=name, shape=other if transposed else shape, transposed=transposed)


def _split_rows(
    names: list[str], shape: tuple[int, ...], folder: SavedTensors | None
) -> list[Piece]:
    """Return the pieces of a parameter that is saved in parts of its rows.

    The parts have the sizes that they have in the folder. Without it they are equal but for the
    last one, as transformers saves them.
    """
    if folder is not None and all(name in folder for name in names):
        sizes = [folder.shape_of(name)[0] for name in names]
    else:
        most = -(-shape[0] // len(names))
        sizes = [max(0, min(most, shape[0] - i * most)) for i in range(len(names))]
    ends = list(accumulate(sizes, initial=0))
    return [
        Piece(name=name, shape=(size, *shape[1:]), rows=(start, start + size))
        for name, size, start in zip(names, sizes, ends, strict=False)
    ]
