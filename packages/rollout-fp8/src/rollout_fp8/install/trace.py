"""Regions of a server's parameters that its own loader fills, learnt by watching it copy.

A loader slices a checkpoint's tensor (for tensor parallelism, for fused projections, for experts)
and copies the slices into parameters. Each such copy is a *region*: a box of the source and the
place in a parameter where it lands. On the way it may turn a matrix, or compute each value, as the
decay of a state from its logarithm. All regions together are all that later syncs need, for any
architecture that the server can load, without a table in this package.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# The documented way to watch calls; it has no public name.
from torch.utils._python_dispatch import TorchDispatchMode

from engine_api.errors import RolloutError
from engine_api.weights import ShardSpec
from rollout_fp8.wire.format import WireTensor

WHERE = "learning the server's layout"
# Layers with one row for each token, as Hugging Face's model families call them.
VOCABULARIES = frozenset(
    {
        "embed_tokens",
        "embed_in",
        "embed_out",
        "lm_head",
        "output",
        "tok_embeddings",
        "word_embeddings",
        "wte",
    }
)
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
# A loader that reorders heads copies a few boxes for each head, and one that reorders elements as
# many boxes as elements.
_MOST_BOXES = 1024


class Cast(NamedTuple):
    """Function that returns a tensor in a dtype."""

    dtype: torch.dtype

    def __call__(self, values: Tensor) -> Tensor:
        """Return the values in the dtype."""
        return values.to(self.dtype)


Function = Callable[[Tensor], Tensor]
# Functions of one value that are followed, by the operator's name.
_FUNCTIONS: dict[str, Function] = {"aten::exp": torch.exp, "aten::neg": torch.neg}


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Box of a wire tensor, and its place in a parameter.

    The place is in elements, as ``torch.as_strided`` takes it. The parameter holds what
    ``functions`` make of the box, one after another.
    """

    name: str
    box: ShardSpec
    parameter: str
    offset: int
    stride: tuple[int, ...]
    functions: tuple[Function, ...] = ()

    def compute(self, values: Tensor) -> Tensor:
        """Return what the parameter holds of values that were sent."""
        for function in self.functions:
            values = function(values)
        return values

    def view(self, parameter: Tensor) -> Tensor:
        """Return the box inside the parameter, in the box's shape."""
        return parameter.as_strided(
            self.box.shape, self.stride, parameter.storage_offset() + self.offset
        )


class LoaderTrace(TorchDispatchMode):
    """Watcher of one run of a loader.

    ``parameters`` is called at the first tensor: some servers replace parameters just before they
    load.
    """

    def __init__(self, parameters: Callable[[], Mapping[str, Tensor]]) -> None:
        super().__init__()
        # The last one for each box and place: a loader may compute with what it has copied.
        self._regions: dict[Region, Region] = {}
        self.layouts: dict[str, Layout] = {}
        self._ask = parameters
        self._owners: dict[int, tuple[str, Tensor]] = {}
        self._current = ""
        # Tensors that came, and contiguous copies of their parts, by their storage. A loader may
        # collect all of them before it copies any.
        self._origins: dict[int, _Origin] = {}

    @property
    def regions(self) -> list[Region]:
        """The regions, in the order of the first copies."""
        return list(self._regions.values())

    @property
    def at(self) -> str:
        """The name of the tensor that came last."""
        return self._current or "the end"

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``tensors`` to the loader, and note where they lie."""
        for name, tensor in tensors:
            if not self._owners:
                self._find_owners()
            self._current = name
            whole = _layout(tensor)
            origin = _Origin(
                name=name,
                whole=whole,
                held=whole,
                part=whole._replace(offset=0),
                memory=StorageWeakRef(tensor.untyped_storage()),
            )
            self._origins[_storage(tensor)] = origin
            yield name, tensor
            # Only the loader may keep it now.
            del tensor
        self._current = ""
        # What a server does with its parameters after loading is no loading.
        self._origins = {
            storage: origin
            for storage, origin in self._origins.items()
            if storage not in self._owners
        }

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.name()
        operator = name.partition(".")[0]
        if self._origins and operator.endswith("_") and not operator.endswith("__"):
            if operator == "aten::copy_":
                self._record(args[0], args[1])
            else:
                for target in _targets(args):
                    self._mark_changed(target, f"{operator} changes it on the way")
        result = func(*args, **(kwargs or {}))
        if self._origins and isinstance(result, Tensor):
            if name == "aten::clone":
                self._follow(args[0], result)
            elif name == "aten::_to_copy":
                is_cast = result.dtype != args[0].dtype
                self._follow(args[0], result, *([Cast(result.dtype)] if is_cast else []))
            elif name in _FUNCTIONS:
                self._follow(args[0], result, _FUNCTIONS[name])
        return result

    def _find_owners(self) -> None:
        parameters = self._ask()
        # The tensors are kept: a new storage at a freed one's address would be taken for the old
        # one.
        # Of several in one memory the first counts: a buffer may be another view of a parameter.
        self._owners = {}
        for name, tensor in parameters.items():
            self._owners.setdefault(_storage(tensor), (name, tensor))
        self.layouts = {name: (t.shape, t.stride(), t.dtype) for name, t in parameters.items()}

    def _follow(self, source: Tensor, copy: Tensor, *functions: Function) -> None:
        """Note where the elements of a contiguous copy come from: loaders transpose by copies."""
        storage = _storage(source)
        origin = self._origins.get(storage)
        if origin is None or not copy.is_contiguous() or not source.numel():
            return
        if origin.lost_by:
            # What it holds is not known, so that neither is what a part of it holds.
            self._origins[_storage(copy)] = replace(
                origin, held=_layout(copy), memory=StorageWeakRef(copy.untyped_storage())
            )
            return
        runs = origin.find_runs(source)
        lost = "" if runs is not None else f"a copy of {_describe(source, origin)}"
        if lost and storage in self._owners:
            return
        self._origins[_storage(copy)] = replace(
            origin,
            held=_layout(copy) if runs is None else _divide(_layout(copy), runs),
            part=origin.part if runs is None else origin.find(source, runs),
            functions=(*origin.functions, *functions),
            lost_by=lost,
            memory=StorageWeakRef(copy.untyped_storage()),
        )

    def _mark_changed(self, target: Tensor, why: str) -> None:
        """Note that a tensor no longer holds what came: the marks may not show it."""
        storage = _storage(target)
        if storage in self._origins:
            self._origins[storage] = replace(self._origins[storage], lost_by=why)

    def _record(self, target: Tensor, source: Tensor) -> None:
        owner = self._owners.get(_storage(target))
        origin = self._origins.get(_storage(source))
        if owner is None:
            self._mark_changed(target, "aten::copy_ changes it on the way")
            return
        if origin is None or not source.numel():
            return
        name, whole = origin.name, origin.whole
        if origin.lost_by:
            raise _unknown(name, origin.lost_by)
        parameter, tensor = owner
        runs = origin.find_runs(source)
        part = None if runs is None else origin.find(source, runs)
        moves = None if part is None else _find_runs(part, whole)
        if runs is None or part is None or moves is None:
            raise _unknown(name, _describe(source, origin))
        placed = _divide(_steps(target, source, name), runs)
        every_box = _find_boxes(part, moves, _divide(placed, moves), whole)
        boxes = list(itertools.islice(every_box, _MOST_BOXES + 1))
        if len(boxes) > _MOST_BOXES:
            why = f"{_describe(source, origin)} consists of more than {_MOST_BOXES} boxes"
            raise _unknown(name, why)
        start = int(target.storage_offset() - tensor.storage_offset())
        functions = _reduce(origin.functions, tensor.dtype)
        for box, stride, offset in boxes:
            region = Region(
                name=name, box=box, parameter=parameter, stride=stride, offset=start + offset
            )
            # A region counts once: a loader that copies something twice does not fill more by it.
            self._regions[region] = replace(region, functions=functions)
        is_whole = target.shape == tensor.shape == source.shape and tensor.is_contiguous()
        if self._current and is_whole and target.stride() == tensor.stride():
            cast = [] if source.dtype == tensor.dtype else [Cast(tensor.dtype)]
            self._origins[_storage(tensor)] = replace(
                origin,
                held=_divide(_layout(tensor), runs),
                part=part,
                functions=(*origin.functions, *cast),
                memory=StorageWeakRef(tensor.untyped_storage()),
            )


def _reduce(functions: tuple[Function, ...], dtype: torch.dtype) -> tuple[Function, ...]:
    """Return the functions, or none where they are casts that a copy into ``dtype`` does, too."""
    is_plain = all(one in (Cast(dtype), Cast(torch.float32)) for one in functions)
    return () if is_plain else functions


def _targets(args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that an operator changes: its first argument, or those of a list."""
    first = args[0] if args else None
    every: Sequence[Any] = first if isinstance(first, list | tuple) else [first]
    return [one for one in every if isinstance(one, Tensor)]


def _storage(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata


def _layout(tensor: Tensor) -> _Part:
    return _Part(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _describe(view: Tensor, origin: _Origin) -> str:
    whole = list(origin.held.shape)
    return f"a view {list(view.shape)} with strides {view.stride()} of {whole}"


class _Part(NamedTuple):
    """Elements of a tensor or of its memory, as ``torch.as_strided`` takes them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Run(NamedTuple):
    """Elements along one axis of a tensor, every ``step``-th one. One element is along none."""

    size: int
    axis: int | None
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Origin:
    """A contiguous tensor, and the elements of a wire tensor that it holds."""

    name: str
    """The wire tensor's name."""

    whole: _Part
    """Its layout. It is contiguous."""

    held: _Part
    """Layout of the tensor."""

    part: _Part
    """The elements that it holds, with an offset from the wire tensor's first one."""

    memory: StorageWeakRef
    """The tensor's memory, which is not kept. No other one has its address while this exists."""

    functions: tuple[Function, ...] = ()
    """Functions by which it was computed from them, in their order."""

    lost_by: str = ""
    """Why it holds something else by now."""

    def find_runs(self, view: Tensor) -> list[list[_Run]] | None:
        """Return the runs along the tensor's axes of which each axis of a view consists.

        None: the view is not cut along axes of the tensor.
        """
        shape, stride, start = _layout(view)
        return _find_runs(_Part(shape, stride, start - self.held.offset), self.held)

    def find(self, view: Tensor, runs: Sequence[Sequence[_Run]]) -> _Part:
        """Return the wire tensor's elements in a view, with an axis for each of its runs."""
        index = _locate(int(view.storage_offset()) - self.held.offset, self.held)
        moved = sum(at * step for at, step in zip(index, self.part.stride, strict=True))
        every = [run for axis in runs for run in axis]
        return _Part(
            shape=tuple(run.size for run in every),
            stride=tuple(
                1 if run.axis is None else run.step * self.part.stride[run.axis] for run in every
            ),
            offset=self.part.offset + moved,
        )


def _find_runs(view: _Part, whole: _Part) -> list[list[_Run]] | None:
    """Return the runs along axes of ``whole`` (contiguous) of which each axis of a view consists.

    Those of one axis go from the outermost to the innermost. The view's offset counts from the
    first element of ``whole``. The result is None where the view is not cut along axes.
    """
    index = _locate(view.offset, whole)
    left = [size - 1 - at for size, at in zip(whole.shape, index, strict=True)]
    found: list[list[_Run]] = []
    for size, stride in zip(view.shape, view.stride, strict=True):
        runs: list[_Run] = []
        done = 1
        while done < size:
            axis = _find_axis(stride * done, whole)
            if axis is None:
                return None
            step = stride * done // whole.stride[axis]
            count = size // done
            if (count - 1) * step > left[axis]:
                # The view goes on along the axis before, if it has this one to its end.
                count = whole.shape[axis] // step
                if count < 2 or whole.shape[axis] % step:
                    return None
            left[axis] -= (count - 1) * step
            if left[axis] < 0 or size % (done * count):
                return None
            runs.insert(0, _Run(count, axis, step))
            done *= count
        found.append(runs or [_Run(size, None, 1)])
    return found


def _find_axis(stride: int, whole: _Part) -> int | None:
    """Return the axis of ``whole`` (contiguous) along which a stride leads, or None."""
    for axis, (size, step) in enumerate(zip(whole.shape, whole.stride, strict=True)):
        if size > 1 and step <= stride < step * size and stride % step == 0:
            return axis
    return None


def _divide(layout: _Part, runs: Sequence[Sequence[_Run]]) -> _Part:
    """Return a layout with an axis for each run of its axes."""
    shape: list[int] = []
    strides: list[int] = []
    for stride, axis in zip(layout.stride, runs, strict=True):
        sizes = [run.size for run in axis]
        shape += sizes
        strides += [stride * math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    return _Part(tuple(shape), tuple(strides), layout.offset)


def _find_boxes(
    part: _Part, runs: Sequence[Sequence[_Run]], placed: _Part, whole: _Part
) -> Iterator[tuple[ShardSpec, tuple[int, ...], int]]:
    """Yield the boxes of ``whole`` of which a part consists, with the place of each.

    Args:
        part: elements of ``whole``.
        runs: runs of its axes along those of ``whole``.
        placed: where these runs land in a parameter.
        whole: layout of the wire tensor, which is contiguous.

    Yields:
        The box, the strides in the parameter by axis of ``whole``, and the offset there.
    """
    sources = (run for axis in runs for run in axis)
    moves = _merge(zip(sources, placed.stride, strict=True))
    inner = {run.axis: (run.size, place) for run, place in moves if run.step == 1}
    outer = [(run, place) for run, place in moves if run.step > 1]
    axes = range(len(whole.shape))
    first = _locate(part.offset, whole)
    for chosen in itertools.product(*(range(run.size) for run, _ in outer)):
        offset = list(first)
        place = placed.offset
        for at, (run, step) in zip(chosen, outer, strict=True):
            assert run.axis is not None, "a run of one element has the step 1"
            offset[run.axis] += at * run.step
            place += at * step
        box = ShardSpec(
            global_shape=whole.shape,
            offset=tuple(offset),
            shape=tuple(inner.get(axis, (1, 1))[0] for axis in axes),
        )
        yield box, tuple(inner.get(axis, (1, 1))[1] for axis in axes), place


def _merge(moves: Iterable[tuple[_Run, int]]) -> list[tuple[_Run, int]]:
    """Return runs with the strides at which they land, neighbours on both sides as one run."""
    merged: list[tuple[_Run, int]] = []
    along = [(run, place) for run, place in moves if run.axis is not None]
    for run, place in sorted(along, key=lambda move: (move[0].axis, move[0].step)):
        before, start = merged[-1] if merged else (run, place)
        is_next = before.axis == run.axis and run.step == before.step * before.size
        if is_next and place == start * before.size:
            merged[-1] = (before._replace(size=before.size * run.size), start)
        else:
            merged.append((run, place))
    return merged


def _locate(start: int, whole: _Part) -> tuple[int, ...]:
    """Return the index of an element of ``whole`` (contiguous) by its number."""
    index: list[int] = []
    for size, step in zip(whole.shape, whole.stride, strict=True):
        index.append(start // step if size > 1 else 0)
        start -= index[-1] * step
    return tuple(index)


def _steps(target: Tensor, source: Tensor, name: str) -> _Part:
    """Return the source's dimensions with the target's strides, and no offset.

    The loader may have dropped or added dimensions of size one.
    """
    sizes = [
        (size, step) for size, step in zip(target.shape, target.stride(), strict=True) if size != 1
    ]
    if [size for size, _ in sizes] != [size for size in source.shape if size != 1]:
        raise _unknown(name, f"{list(source.shape)} is copied into {list(target.shape)}")
    steps = iter(sizes)
    stride = tuple(next(steps)[1] if size != 1 else 1 for size in source.shape)
    return _Part(tuple(source.shape), stride, 0)


def _unknown(name: str, why: str) -> RolloutError:
    return RolloutError(
        f"cannot follow how the server loads {name}",
        where=WHERE,
        why=why,
        remedy="this model family cannot be synced into this server; use rollout.name=local",
    )


def uncovered(trace: LoaderTrace, parameters: Iterable[str]) -> Iterator[str]:
    """Yield a message for each parameter that the tensors do not fill, or fill only in part.

    Rows behind those of an embedding or a head are no gap: servers pad vocabularies.
    """
    regions: dict[str, list[Region]] = {}
    for region in trace.regions:
        regions.setdefault(region.parameter, []).append(region)
    for name in parameters:
        if name not in regions:
            yield f"no weight is sent for {name}"
        elif not (
            _fills(regions[name], trace.layouts[name][0].numel()) or _is_padded(regions[name])
        ):
            yield f"{name} gets only {', '.join(sorted({region.name for region in regions[name]}))}"


def _fills(regions: Sequence[Region], size: int) -> bool:
    return sum(torch.Size(region.box.shape).numel() for region in regions) >= size


def _is_padded(regions: Sequence[Region]) -> bool:
    layer = regions[0].name.rpartition(".")[0].rpartition(".")[2]
    return len(regions) == 1 and regions[0].offset == 0 and layer in VOCABULARIES


def misfits(
    trace: LoaderTrace, tensors: Mapping[str, WireTensor], live: Mapping[str, Layout]
) -> Iterator[str]:
    """Yield a message for each parameter served differently than loaded, and for each wrong dtype.

    Parameters are compared with those in ``live``, which is empty where nothing is copied into
    place. A parameter may be served in a dtype that holds every value of its tensor, as biases are,
    and as the weights of some routers are. But a server whose matrices are all so wide was made for
    that dtype: it would serve rounded weights.
    """
    wide = [
        _holds(trace.layouts[region.parameter][2], tensors[region.name].dtype)
        for region in trace.regions
        if len(tensors[region.name].shape) > 1 and tensors[region.name].dtype.itemsize > 1
    ]
    made_wide = all(wide)
    for name in dict.fromkeys(region.parameter for region in trace.regions):
        if live and live.get(name) != trace.layouts[name]:
            yield (
                f"{name} is served as {live.get(name)}, but its checkpoint has "
                f"{trace.layouts[name]}"
            )
    for region in trace.regions:
        tensor = tensors[region.name]
        dtype = trace.layouts[region.parameter][2]
        wire = tensor.dtype
        fits = _holds(dtype, wire) and not (made_wide and len(tensor.shape) > 1)
        if wire != dtype and not fits:
            yield f"{region.name} is sent as {wire}, but {region.parameter} is served as {dtype}"


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    return wide == torch.float32 and narrow in (torch.bfloat16, torch.float16)
