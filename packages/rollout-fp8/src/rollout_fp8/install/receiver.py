"""Server's side of a sync: learn the server's layout, then copy slices into the live parameters.

Learning runs the server's own loader, including its processing after loading, on marked tensors,
and compares the parameters with the marks afterwards. So it is known, not assumed, that the served
weights lie in memory as they come over the wire. A stream of this process may then write them there
itself (``PlacingStream``), and the audit reads them in any case. Where a server keeps its weights
in packed form (vLLM on a CPU), every sync goes through its loader instead. A parameter that such a
loader leaves as it was is found by that: it is neither the mark nor anything else than before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine_api.errors import EngineError, RolloutError
from engine_api.weights import ShardSpec
from rollout_fp8.failures import describe_error
from rollout_fp8.install.copies import kept_copies
from rollout_fp8.install.places import Places, list_saved, raw_bytes
from rollout_fp8.install.trace import WHERE, LoaderTrace, Region, misfits, uncovered
from rollout_fp8.kernels.cast import BoundCast, CastPlan
from rollout_fp8.kernels.table import has_rows, layouts
from rollout_fp8.phases import Phases
from rollout_fp8.wire.audit import Boxes
from rollout_fp8.wire.checksum import BoundChecksum, ChecksumPlan
from rollout_fp8.wire.format import (
    BucketPlan,
    PlacingStream,
    WirePlan,
    WireSlice,
    WireStream,
    WireTensor,
    intersection,
)

SYNC = "weight sync"
Load = Callable[[Iterable[tuple[str, Tensor]]], object]
Read = Callable[[str], Tensor]
# Each receiver has its own marks: parameters that an earlier one marked must change.
_seeds = count()


class _Copies(NamedTuple):
    """Copies of a bucket's slices into place."""

    bucket: BucketPlan
    sources: list[Tensor]
    bound: BoundCast | None
    """Copies of ``sources``, None if there are none."""
    strided: list[tuple[Region, Tensor, Tensor]]
    """Sources and targets of what the server holds transposed, or computed."""


class _Transposed(NamedTuple):
    """A matrix that the server holds transposed, and its checksum, for which it is copied.

    One copy exists at a time: the experts of a model may be most of its weights.
    """

    region: Region
    checksums: ChecksumPlan


class Receiver:
    """Receiver of weights for one worker's model.

    Args:
        model: the server's module; its parameters keep their memory for as long as CUDA graphs may
            read it.
        plan: the plan of the syncs that will come.
        load: the server's own loader of checkpoint tensors, with its processing after loading.
        read: returns a parameter by name, unpacked, for a server that packs weights; every sync
            then goes through ``load``.
        derived: names of the parameters that the server computes from loaded ones, and that no
            tensor is sent for.
        derive: computes them again, in their memory, after a sync has copied into place.

    Raises:
        RolloutError: names that the model does not have or that are missing, other shapes or
            dtypes, or a layout in memory that is not the checkpoint's.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: WirePlan,
        load: Load,
        read: Read | None = None,
        *,
        derived: Collection[str] = (),
        derive: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._plan = plan
        self._load = load
        self._packed = read is not None
        self._device = next(model.parameters()).device
        self._read = read or list_saved(model).__getitem__
        self._seed = next(_seeds)
        self._derived = frozenset(derived)
        self._derive = derive
        self._former = _digests(model, None if self._packed else self._derived)
        self.regions = self._learn(model)
        # Of the marks; None once a sync has replaced them.
        self._stale: dict[str, bytes] | None = self._check_derived(self._former, "loading")
        self._of = _grouped(self.regions)
        written = {} if self._packed else {region.parameter: None for region in self.regions}
        self._places = Places(model, {name: self._read(name) for name in written})
        self._copies: dict[tuple[int, int], _Copies] = {}
        # The plan whose buckets the copies are bound to.
        self._bound: WirePlan | None = None
        unlike = self._unlike_marks()
        if not self._packed:
            self._check_copies(written)
        unread = unlike | {region.name for region in self.regions if region.functions}
        self._readable = [region for region in self.regions if region.name not in unread]
        in_rows = [self._lies_in_rows(region) for region in self._readable]
        numbers = [number for number, is_straight in enumerate(in_rows) if is_straight]
        self._straight = [self._readable[number] for number in numbers]
        boxes = [region.box for region in self._straight]
        views = self._views()
        try:
            self._checksums = ChecksumPlan(layouts(views), boxes, numbers) if views else None
            self._transposed = [
                transposed
                for number, region in enumerate(self._readable)
                if not in_rows[number]
                for transposed in self._plan_transposed(region, number)
            ]
        except ValueError as error:
            raise RolloutError(
                "cannot compare the served weights with the sent ones",
                where=WHERE,
                why=str(error),
                remedy="use another tensor_parallel_size, or rollout.name=local",
            ) from error
        # Unpacked copies, and those in the dtype of the wire, are made for each audit.
        copied = any(
            self._read(region.parameter).dtype != plan.tensors[region.name].dtype
            for region in self._straight
        )
        self._live: BoundChecksum | None = None
        if self._checksums is not None and not self._packed and not copied:
            self._live = self._checksums.bind(views)

    @property
    def boxes(self) -> Boxes:
        """The boxes that this worker serves, followed by the tensors that it cannot read back."""
        readable = [(region.name, region.box) for region in self._readable]
        unread = {region.name for region in self.regions} - {name for name, _ in readable}
        return [*readable, *((name, None) for name in sorted(unread))]

    def sync(self, stream: WireStream, phases: Phases) -> None:
        """Install a whole stream, queued on the device's current stream, as the phase ``install``.

        Raises:
            RolloutError: the server has moved its weights. CUDA graphs read the place to which
                syncs write.
        """
        with torch.no_grad():
            if self._packed:
                with phases.phase("install"):
                    self._reload(stream)
                return
            self._check_places()
            if stream.plan is not self._bound:
                # Views into an earlier stream's buffers would keep them alive.
                self._copies = {}
                self._bound = stream.plan
            if isinstance(stream, PlacingStream):
                stream.place(self)
            for bucket, buffer in stream.buckets():
                with phases.phase("install"):
                    self._install(bucket, buffer)
            if self._derived:
                with phases.phase("install"):
                    self._derive()
                if self._stale is not None:
                    self._check_derived(self._stale, "a sync")
                    self._stale = None

    def served(self) -> Tensor:
        """Return checksums, int64, of the weights in memory at each of the readable ``boxes``.

        They are queued on the current stream.
        """
        sums = torch.zeros(len(self._readable), dtype=torch.int64, device=self._device)
        if self._live is None:
            if not self._packed:
                self._check_places()
            if self._checksums is not None:
                self._checksums.run(self._views(), sums)
        else:
            # The kernels read tensors that are kept, and were in their places at the sync before,
            # while the host looks where the server's are.
            self._live.run(sums)
            self._check_places()
        for name, parts in groupby(self._transposed, lambda one: one.region.parameter):
            parameter = self._read(name)
            for region, checksums in parts:
                checksums.run([self._sent(region, parameter).contiguous()], sums)
        return sums

    def find(self, wire_slice: WireSlice) -> Tensor | None:
        """Return the region of a live parameter that a slice fills alone, or None if none is so."""
        found = [
            # Its holder keeps the memory, and not the parameter and what refers to it.
            region.view(self._read(region.parameter).detach())[_relative_slices(shared, region.box)]
            for region in self._of[wire_slice.tensor.name]
            if (shared := intersection(wire_slice.box, region.box)) is not None
        ]
        is_computed = any(region.functions for region in self._of[wire_slice.tensor.name])
        if len(found) != 1 or found[0].shape != wire_slice.box.shape or is_computed:
            return None
        return found[0]

    def _reload(self, stream: WireStream) -> None:
        # Clones: a loader may keep a tensor until a layer is whole (vLLM's does), and these tensors
        # lie in buffers that later buckets are filled into.
        try:
            self._load((name, tensor.clone()) for name, tensor in stream)
        except EngineError:
            raise
        # A server's loader may raise anything.
        except Exception as error:
            raise RolloutError(
                "a weight sync ended half-way",
                where=SYNC,
                why=describe_error(error),
                remedy="nothing is generated until a sync succeeds: sync again, or restart the "
                "rollout",
            ) from error

    def _views(self) -> list[Tensor]:
        parameters = {
            name: self._read(name) for name in dict.fromkeys(r.parameter for r in self._straight)
        }
        return [self._sent(region, parameters[region.parameter]) for region in self._straight]

    def _lies_in_rows(self, region: Region) -> bool:
        dtype = self._plan.tensors[region.name].dtype
        return has_rows((region.box.shape, region.stride, dtype, self._device))

    def _plan_transposed(self, region: Region, number: int) -> Iterator[_Transposed]:
        """Yield the matrices of a region, which may have an axis of experts."""
        dtype = self._plan.tensors[region.name].dtype
        box = region.box
        first, *rest = box.shape
        matrices = first if len(rest) > 1 else 1
        shape = (first // matrices, *rest)
        stride = torch.empty(shape, device="meta").stride()
        for index in range(matrices):
            part = replace(
                region,
                box=replace(box, offset=(box.offset[0] + index, *box.offset[1:]), shape=shape),
                offset=region.offset + index * region.stride[0],
            )
            plan = ChecksumPlan([(shape, stride, dtype, self._device)], [part.box], [number])
            yield _Transposed(part, plan)

    def _sent(self, region: Region, parameter: Tensor) -> Tensor:
        """Return the tensor at a region, in the dtype in which it came.

        Servers keep some tensors in a wider dtype (biases, routers, decays).
        """
        part = region.view(parameter)
        dtype = self._plan.tensors[region.name].dtype
        if part.dtype == dtype:
            return part
        narrow = part.to(dtype)
        if not torch.equal(narrow.to(part.dtype), part):
            raise RolloutError(
                f"{region.parameter} holds values that were not sent",
                where=WHERE,
                why=f"{region.name} was sent as {dtype}, and the server holds {part.dtype} "
                "values beyond its precision",
                remedy="nothing is generated until a sync succeeds: sync again, or restart the "
                "rollout",
            )
        return narrow

    def _check_places(self) -> None:
        moved = self._places.moved()
        if moved:
            raise RolloutError(
                "the server has moved its weights since the first sync",
                where=WHERE,
                why=f"{len(moved)} parameters, {moved[0]} among them",
                remedy="close this rollout and create another one",
            )

    def _install(self, bucket: BucketPlan, buffer: Tensor) -> None:
        # The buffers and the parameters stay the same from sync to sync.
        key = (id(bucket), buffer.data_ptr())
        copies = self._copies.get(key)
        if copies is None or copies.bucket is not bucket:
            plain: list[tuple[Region, Tensor, Tensor]] = []
            strided: list[tuple[Region, Tensor, Tensor]] = []
            for wire_slice in bucket.slices:
                part = wire_slice.view(buffer)
                for one in self._pairs(wire_slice.tensor.name, wire_slice.box, part):
                    region, *ends = one
                    is_plain = all(map(has_rows, layouts(ends))) and not region.functions
                    (plain if is_plain else strided).append(one)
            sources = [source for _, source, _ in plain]
            targets = [target for _, _, target in plain]
            # Under tensor parallelism a bucket may hold nothing that this worker serves.
            bound: BoundCast | None = None
            if sources:
                bound = CastPlan(layouts(sources), layouts(targets)).bind(targets)
            copies = self._copies[key] = _Copies(bucket, sources, bound, strided)
        if copies.bound is not None:
            copies.bound.run(copies.sources)
        for region, source, target in copies.strided:
            target.copy_(region.compute(source))

    def _pairs(
        self, name: str, box: ShardSpec, part: Tensor
    ) -> Iterator[tuple[Region, Tensor, Tensor]]:
        for region in self._of[name]:
            shared = intersection(box, region.box)
            if shared is not None:
                target = region.view(self._read(region.parameter))
                yield (
                    region,
                    part[_relative_slices(shared, box)],
                    target[_relative_slices(shared, region.box)],
                )

    # --- learning -----------------------------------------------------------------------------

    def _learn(self, model: nn.Module) -> list[Region]:
        live = {name: (p.shape, p.stride(), p.dtype) for name, p in list_saved(model).items()}
        trace = LoaderTrace(lambda: list_saved(model))
        try:
            with torch.no_grad(), trace:
                self._load(trace.watch(marks(self._plan, self._device, self._seed)))
        except EngineError:
            raise
        # A server's loader may raise anything.
        except Exception as error:
            raise RolloutError(
                "the server cannot load the trained model",
                where=f"{WHERE}, at {trace.at}",
                why=describe_error(error),
                remedy="give rollout and engine the same model, and a server from the tested table",
            ) from error
        known = {region.name for region in trace.regions}
        problems = [
            f"the server has no parameter for {name}"
            for name in self._plan.tensors
            if name not in known
        ]
        # Buffers may be missing from a checkpoint, and parameters may not.
        every = [name for name, _ in model.named_parameters() if name not in self._derived]
        problems += uncovered(trace, every)
        problems += misfits(trace, self._plan.tensors, {} if self._packed else live)
        if problems:
            shown = problems[:5]
            if len(problems) > 5:
                shown.append(f"and {len(problems) - 5} more")
            raise RolloutError(
                "the served model differs from the trained model",
                where=WHERE,
                why="; ".join(shown),
                remedy="give rollout and engine the same model, and a server from the tested table",
            )
        return trace.regions

    def _unlike_marks(self) -> set[str]:
        """Return the tensors that lie in memory differently than they came.

        Where syncs copy into place there may be none.

        Raises:
            RolloutError: the server rearranges weights after loading, and syncs copy into place; or
                its loader leaves parameters as they were.
        """
        unlike: set[str] = set()
        for name, mark in marks(self._plan, self._device, self._seed):
            regions = self._of[name]
            parameters = [self._read(region.parameter) for region in regions]
            same = [
                self._holds(region, parameter, mark[region.box.slices])
                for region, parameter in zip(regions, parameters, strict=True)
            ]
            if not all(same):
                unlike.add(name)
        self._check_loaded(unlike)
        if unlike and not self._packed:
            shown = ", ".join(sorted(unlike)[:5])
            raise RolloutError(
                "the server rearranges weights after loading",
                where=WHERE,
                why=f"{len(unlike)} tensors lie in memory differently than in a checkpoint: "
                f"{shown}",
                remedy="choose another kernel for these layers in the server's options",
            )
        return unlike

    def _holds(self, region: Region, parameter: Tensor, mark: Tensor) -> bool:
        """Return whether a parameter holds what was sent, or what is computed of it."""
        if not region.functions:
            return torch.equal(raw_bytes(self._sent(region, parameter)), raw_bytes(mark))
        part = region.view(parameter)
        return torch.equal(part, region.compute(mark).to(part.dtype))

    def _check_copies(self, written: Iterable[str]) -> None:
        """Raise ``RolloutError`` where the server keeps copies of weights, which now are marks.

        Parameters that are computed are left out: their values may be equal by chance.
        """
        computed = {region.parameter for region in self.regions if region.functions}
        marked = {name: self._read(name) for name in written if name not in computed}
        kept = [*kept_copies(self._model, marked)]
        if kept:
            shown = ", ".join(f"{name} (in {at or 'the model'})" for at, name in kept[:5])
            raise RolloutError(
                "the server keeps copies of its weights",
                where=WHERE,
                why=f"a sync into place would not reach {len(kept)} of them: {shown}",
                remedy="choose another kernel for these layers in the server's options",
            )

    def _check_derived(self, former: Mapping[str, bytes], after: str) -> dict[str, bytes]:
        """Return digests of the derived parameters, all of which must differ from the former."""
        now = _digests(self._model, self._derived)
        kept = [name for name, digest in now.items() if digest == former[name]]
        if kept:
            raise RolloutError(
                f"the server does not derive its weights again after {after}",
                where=WHERE,
                why=f"{len(kept)} parameters that it computes from others are what they were, "
                f"{kept[0]} among them",
                remedy="this model family cannot be synced into this server; use "
                "rollout.name=local",
            )
        return now

    def _check_loaded(self, unlike: Container[str]) -> None:
        """Raise ``RolloutError`` that names parameters that a packed server's loader leaves."""
        now = _digests(self._model) if self._packed and unlike else {}
        kept = {
            region.parameter: region.name
            for region in self.regions
            if region.name in unlike
            and region.parameter in now
            and now[region.parameter] == self._former.get(region.parameter)
        }
        if kept:
            shown = ", ".join(f"{name} ({parameter})" for parameter, name in [*kept.items()][:5])
            raise RolloutError(
                "the server's loader does not replace every weight",
                where=WHERE,
                why=f"{len(kept)} parameters are what they were before it loaded {shown}",
                remedy="this model family cannot be synced into this server; use "
                "rollout.name=local",
            )


def _digests(model: nn.Module, names: Container[str] | None = None) -> dict[str, bytes]:
    """Return a digest of each parameter, or of those named, without those that are gone."""
    return {
        name: hashlib.blake2b(raw_bytes(parameter).cpu().numpy().data).digest()
        for name, parameter in list_saved(model).items()
        if parameter.numel() and (names is None or name in names)
    }


def marks(plan: WirePlan, device: torch.device, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield a random tensor for every name, the same on every call with a seed.

    The values are finite, and no two regions are alike.
    """
    for index, tensor in enumerate(plan.tensors.values()):
        yield tensor.name, _mark(tensor, index + 1_000_003 * seed, device)


def _mark(tensor: WireTensor, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    if tensor.dtype == torch.float8_e4m3fn:
        # 0x00 … 0x7e and 0x80 … 0xfe: all but the two NaN.
        codes = torch.randint(
            0, 254, tensor.shape, generator=generator, device=device, dtype=torch.uint8
        )
        return (codes + (codes >= 127)).view(torch.float8_e4m3fn)
    # In [1, 2): as scales they neither overflow nor vanish.
    return (1 + torch.rand(tensor.shape, generator=generator, device=device)).to(tensor.dtype)


def _relative_slices(box: ShardSpec, outer: ShardSpec) -> tuple[slice, ...]:
    return tuple(
        slice(o - p, o - p + s) for o, p, s in zip(box.offset, outer.offset, box.shape, strict=True)
    )


def _grouped(regions: Sequence[Region]) -> dict[str, list[Region]]:
    found: dict[str, list[Region]] = {}
    for region in regions:
        found.setdefault(region.name, []).append(region)
    return found
