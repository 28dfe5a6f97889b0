"""Servers with unusual loaders and layouts: learning, installing and refusing."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from served_model import ServedModel, checkpoint
from sync_parts import CPU, InProcess, expected, stream_of

from engine_api.errors import RolloutError
from engine_api.weights import ShardSpec
from rollout_fp8.export import exporter
from rollout_fp8.export.plan import Source, make_plan
from rollout_fp8.install.copies import kept_copies
from rollout_fp8.install.receiver import Receiver
from rollout_fp8.install.session import SyncSession
from rollout_fp8.phases import Phases
from rollout_fp8.wire.checksum import checksum


def test_a_bucket_of_which_a_worker_serves_nothing_passes_it_by() -> None:
    """Check a bucket that a worker serves nothing of.

    Rank 0 of the engine holds nearly all: the last bucket is its upper half of a weight, and the
    worker has the lower half.
    """
    weights = checkpoint(3)
    last = "model.layers.1.mlp.gate_proj.weight"
    weights[last] = weights.pop(last)

    def boxes(name: str, shape: tuple[int, ...]) -> tuple[ShardSpec, ShardSpec]:
        if name != last:
            return ShardSpec.whole(shape), ShardSpec.nothing(shape)
        half = shape[0] // 2, *shape[1:]
        upper, lower = (
            ShardSpec(global_shape=shape, offset=(at, *[0] * (len(shape) - 1)), shape=half)
            for at in (0, half[0])
        )
        return upper, lower

    sources = [
        Source(
            name=name, boxes=boxes(name, tuple(tensor.shape)), stored=tensor.dtype, quantized=False
        )
        for name, tensor in weights.items()
    ]
    plan = make_plan(sources, dtype=torch.float32, bucket_bytes=500_000).wire
    assert [wire_slice.box.offset for wire_slice in plan.buckets[-1].slices] == [(0, 0)]

    class Made:
        audit = True

        def __init__(self) -> None:
            self.plan = plan

        def buckets(self):
            for bucket in plan.buckets:
                buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
                for wire_slice in bucket.slices:
                    wire_slice.view(buffer).copy_(
                        weights[wire_slice.tensor.name][wire_slice.box.slices]
                    )
                yield bucket, buffer

    for rank in range(2):
        model: Any = ServedModel(tp=2, rank=rank)
        stream: Any = Made()
        Receiver(model, plan, model.load_weights).sync(stream, Phases(CPU))
        want = expected(weights, ServedModel(tp=2, rank=rank), fp8=False)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, want[name]), name


def test_a_server_that_copies_one_half_twice_does_not_hide_that_the_other_is_missing() -> None:
    class Twice(ServedModel):
        def load_weights(self, weights):
            for name, tensor in weights:
                super().load_weights([(name, tensor), (name, tensor)])

    SyncSession(InProcess([Twice()])).run(stream_of(checkpoint(0), fp8=False), 0)
    weights = checkpoint(0)
    weights.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(
        RolloutError,
        match=r"gate_up_proj\.weight gets only model\.layers\.1\.mlp\.gate_proj\.weight",
    ):
        SyncSession(InProcess([Twice()])).run(stream_of(weights, fp8=False), 0)


@pytest.mark.parametrize("audit", [True, False], ids=["audited", "not audited"])
def test_a_server_that_does_not_take_a_stream_to_its_end_has_not_served_it(
    monkeypatch, audit
) -> None:
    class Stops(InProcess):
        def sync(self, stream):
            next(stream.buckets())
            return [([], {})]

    monkeypatch.setattr(exporter, "BUCKET_BYTES", 300_000)
    with pytest.raises(RolloutError, match="not read to its end"):
        SyncSession(Stops([ServedModel()])).run(stream_of(checkpoint(0), fp8=False, audit=audit), 0)


def test_a_server_whose_loader_keeps_tensors_is_not_left_with_later_buckets_in_them(
    monkeypatch,
) -> None:
    class Keeps(ServedModel):
        """Server that loads its tensors again when all have come, like vLLM's reload by layer."""

        def load_weights(self, weights):
            kept = []
            for name, tensor in weights:
                super().load_weights([(name, tensor)])
                kept.append((name, tensor))
            super().load_weights(kept)

    monkeypatch.setattr(exporter, "BUCKET_BYTES", 300_000)
    model, stream = (
        Keeps(dtype=torch.bfloat16),
        stream_of(checkpoint(0), fp8=False, dtype=torch.bfloat16),
    )
    assert len(stream.plan.buckets) > 2 * len(stream.plan.slots)
    receiver = Receiver(model, stream.plan, model.load_weights, read=model.get_parameter)
    receiver.sync(stream, Phases(CPU))
    want = expected(checkpoint(0), ServedModel(dtype=torch.bfloat16), fp8=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, want[name]), name


def test_a_packed_server_that_keeps_a_weight_is_refused_by_its_name() -> None:
    class Keeps(ServedModel):
        """Server that puts an old tensor back, like vLLM's reload after a copy past its loaders."""

        def load_weights(self, weights):
            old = self.get_parameter("model.norm.weight").clone()
            super().load_weights(weights)
            self.get_parameter("model.norm.weight").data.copy_(old)

    model, stream = Keeps(), stream_of(checkpoint(0), fp8=False)
    for _ in range(2):
        with pytest.raises(RolloutError, match=r"before it loaded model\.norm\.weight"):
            Receiver(model, stream.plan, model.load_weights, read=model.get_parameter)


def test_a_packed_server_that_holds_a_weight_in_another_form_is_learnt_again_and_again() -> None:
    class Rearranges(ServedModel):
        def load_weights(self, weights):
            super().load_weights(weights)
            norm = self.get_parameter("model.norm.weight").data
            norm.copy_(norm.flip(0).clone())

    model, stream = Rearranges(), stream_of(checkpoint(0), fp8=False)
    for _ in range(2):
        receiver = Receiver(model, stream.plan, model.load_weights, read=model.get_parameter)
        assert receiver.boxes[-1] == ("model.norm.weight", None)


def test_a_single_number_is_a_weight_too() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

        def load_weights(self, weights):
            for _, tensor in weights:
                self.scale.data.copy_(tensor)

    model: Any = Scaled()
    assert (
        SyncSession(InProcess([model]))
        .run(stream_of({"scale": torch.tensor(2.5)}, fp8=False), 0)
        .audited
    )
    assert model.scale == 2.5
    model.scale.data, model.load_weights = (
        torch.zeros(4),
        lambda pairs: [model.scale.data[:3].copy_(t) for _, t in pairs],
    )
    with pytest.raises(RolloutError, match="scale gets only scale"):
        SyncSession(InProcess([model])).run(stream_of({"scale": torch.ones(3)}, fp8=False), 1)


def test_a_server_that_cuts_within_a_word_of_the_audit_is_refused_by_name_of_the_reason() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(
                torch.zeros(4, 3, dtype=torch.bfloat16), requires_grad=False
            )

        def load_weights(self, weights):
            for _, tensor in weights:
                self.weight.data.copy_(tensor[:, 3:])

    model, stream = Odd(), stream_of({"weight": torch.randn(4, 6)}, fp8=False, dtype=torch.bfloat16)
    with pytest.raises(
        RolloutError, match=r"cannot compare[^$]*columns? 3 [^$]*to do: .*tensor_parallel_size"
    ):
        Receiver(model, stream.plan, model.load_weights)


class _Derives(ServedModel):
    """Server with a weight that it computes from another one after loading."""

    def __init__(self) -> None:
        super().__init__()
        self.derived = torch.nn.Parameter(torch.zeros(256), requires_grad=False)

    def load_weights(self, weights):
        super().load_weights(weights)
        self.derive()

    def derive(self) -> None:
        with torch.no_grad():
            self.derived.copy_(2 * self.get_parameter("model.norm.weight"))


def test_derived_weights_are_computed_after_each_sync_that_copies_into_place() -> None:
    model: Any = _Derives()
    at = model.derived.data_ptr()
    receiver = None
    for seed in range(2):
        stream = stream_of(checkpoint(seed), fp8=False)
        if receiver is None:
            receiver = Receiver(
                model,
                stream.plan,
                model.load_weights,
                derived=["derived"],
                derive=model.derive,
            )
        receiver.sync(stream, Phases(CPU))
        assert torch.equal(model.derived, 2 * checkpoint(seed)["model.norm.weight"])
    assert model.derived.data_ptr() == at


def test_derived_weights_that_a_sync_leaves_are_refused_by_name() -> None:
    model, stream = _Derives(), stream_of(checkpoint(0), fp8=False)
    arguments = (model, stream.plan, model.load_weights)
    with pytest.raises(RolloutError, match="no weight is sent for derived"):
        Receiver(*arguments)
    receiver = Receiver(*arguments, derived=["derived"])
    with pytest.raises(RolloutError, match="does not derive its weights again after a sync"):
        receiver.sync(stream, Phases(CPU))
    model.derive = lambda: None  # type: ignore[method-assign]
    with pytest.raises(RolloutError, match="does not derive its weights again after loading"):
        Receiver(*arguments, derived=["derived"])


@dataclass
class _Scales:
    """Object of which a kernel is made."""

    scale: torch.Tensor


class _KeepsScales(ServedModel):
    """Server that makes a kernel at each loading, as vLLM does of FP8 experts."""

    def __init__(self, copy: Any) -> None:
        super().__init__(fp8=True)
        self.copy = copy

    def load_weights(self, weights):
        super().load_weights(weights)
        name = next(name for name, _ in self.named_parameters() if name.endswith("scale_inv"))
        self.kernel = SimpleNamespace(parts=[{"up": _Scales(self.copy(self.get_parameter(name)))}])
        self.kernel.itself = self.kernel


def test_a_server_whose_kernel_keeps_a_copy_of_scales_is_refused_by_name() -> None:
    stream = stream_of(checkpoint(0), fp8=True)
    served: Any = _KeepsScales(lambda scale: scale.data)
    Receiver(served, stream.plan, served.load_weights).sync(stream, Phases(CPU))
    stale: Any = _KeepsScales(lambda scale: scale.detach().clone())
    with pytest.raises(RolloutError, match=r"(?s)keeps copies of its weights.*scale_inv"):
        Receiver(stale, stream.plan, stale.load_weights)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape)


def _computed(tensor: torch.Tensor) -> torch.Tensor:
    return -torch.exp(tensor)


@pytest.mark.parametrize("keep", [_zeros, _computed])
def test_tensors_that_are_no_copies_of_marks_may_be_equal(keep: Any) -> None:
    """Nothing is sent for a buffer of zeros, and computed values may be equal by chance."""

    class Keeps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay = torch.nn.Parameter(torch.zeros(16), requires_grad=False)
            self.register_buffer("scratch", torch.zeros(16))

        def load_weights(self, weights):
            for _, tensor in weights:
                self.decay.data.copy_(-torch.exp(tensor))
                self.kernel = SimpleNamespace(workspace=keep(tensor))

    model: Any = Keeps()
    weights = {"log": torch.randn(16)}
    stream = stream_of(weights, fp8=False, dtype=torch.float32)
    Receiver(model, stream.plan, model.load_weights).sync(stream, Phases(CPU))
    assert torch.equal(model.decay, -torch.exp(weights["log"]))


class _Slots:
    """Kernel without a dictionary of its attributes."""

    __slots__ = ("scale", "unset")

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale

    def run(self) -> torch.Tensor:
        return self.scale


def _as_module(weight: torch.Tensor) -> torch.nn.Module:
    kernel = torch.nn.Module()
    kernel.inner = torch.nn.ParameterList([torch.nn.Parameter(weight, requires_grad=False)])
    return kernel


_HOLDERS: dict[str, Any] = {
    "attribute": _Scales,
    "slot": _Slots,
    "bound method": lambda weight: _Slots(weight).run,
    "bound method of a partial": lambda weight: partial(_Slots(weight).run),
    "module outside of the model": lambda weight: {"kernel": _as_module(weight)},
    "method of the tensor": lambda weight: weight.matmul,
}


def _model_of(**weights: torch.Tensor) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a model that has a layer with the weights, and these by name."""
    model = torch.nn.Module()
    model.layer = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(one, requires_grad=False) for name, one in weights.items()}
    )
    return model, {f"layer.{name}": model.layer[name] for name in weights}


@pytest.mark.parametrize("kind", _HOLDERS)
def test_copies_are_found_in_what_a_server_refers_to(kind: str) -> None:
    # Two weights, the samples of which are equal.
    other = torch.rand(64, 64)
    weight = other.clone()
    weight[32] = 2.0
    model, saved = _model_of(other=other, weight=weight)
    layer: Any = model.layer
    layer.kernel = _HOLDERS[kind](weight.data)
    layer.back = SimpleNamespace(model=model, run=model.forward)
    assert not [*kept_copies(model, saved)]
    layer.kernel = _HOLDERS[kind](weight.t().contiguous().t())
    assert [*kept_copies(model, saved)] == [("layer", "layer.weight")]


class _Imports(dict[str, Any]):
    """Mapping that does something else when it is read."""

    def values(self):
        raise AssertionError("nothing may run")


def test_objects_of_a_server_are_not_run_and_may_be_gone() -> None:
    weight = torch.rand(4, 4)
    model, saved = _model_of(weight=weight)
    gone = torch.nn.Module()
    layer: Any = model.layer
    layer.kernel = SimpleNamespace(owner=weakref.proxy(gone))
    layer.lazy = {"weight": torch.nn.UninitializedParameter()}
    layer.mapping = _Imports(copy=torch.rand(4, 4))
    layer.variables = globals() | {"copy": weight.clone()}
    del gone
    assert not [*kept_copies(model, saved)]
    layer.mapping["copy"] = weight.clone()
    assert [*kept_copies(model, saved)] == [("layer", "layer.weight")]


def test_a_buffer_that_is_not_saved_is_found_as_a_copy() -> None:
    weight = torch.rand(4, 4)
    model, saved = _model_of(weight=weight)
    model.register_buffer("view", weight.data, persistent=False)
    assert not [*kept_copies(model, saved)]
    model.register_buffer("copy", weight.clone(), persistent=False)
    assert [*kept_copies(model, saved)] == [("", "layer.weight")]


def test_copies_are_looked_for_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison of each weight with each tensor would be a synchronization each on a GPU."""
    compared: list[torch.Tensor] = []

    def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        compared.append(one)
        return bool((one == other).all())

    monkeypatch.setattr(torch, "equal", equal)
    experts = {f"expert{number}": torch.rand(8, 8) for number in range(50)}
    model, saved = _model_of(**experts)
    model.kernels = [_Scales(torch.zeros(8, 8)) for _ in range(50)]
    assert not [*kept_copies(model, saved)]
    assert not compared
    model.kernels[7].scale = experts["expert3"].clone()
    assert [*kept_copies(model, saved)] == [("", "layer.expert3")]
    assert len(compared) == 1


class _Transposes(torch.nn.Module):
    """Server of experts that are saved as one tensor, and that it holds transposed."""

    def __init__(self, *, tp: int = 1, rank: int = 0) -> None:
        super().__init__()
        self.rows = 6 // tp
        self.rank = rank
        self.experts = torch.nn.Parameter(torch.zeros(4, self.rows, 8), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(8), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
                continue
            for expert in range(4):
                part = tensor[expert].narrow(1, self.rank * self.rows, self.rows)
                self.experts.data[expert].copy_(part.t().contiguous())


def test_matrices_that_a_server_transposes_are_served_and_audited_at_each_sync() -> None:
    weights = {"experts": torch.randn(4, 8, 6), "norm": torch.randn(8)}
    model: Any = _Transposes()
    session = SyncSession(InProcess([model]))
    for version in range(2):
        weights = {name: tensor + version for name, tensor in weights.items()}
        assert session.run(stream_of(weights, fp8=False), version).audited
        assert torch.equal(model.experts, weights["experts"].transpose(1, 2))
        assert torch.equal(model.norm, weights["norm"])


def test_the_checksums_of_transposed_matrices_add_up_to_those_of_the_saved_tensor() -> None:
    weights = {"experts": torch.randn(4, 8, 6), "norm": torch.randn(8)}
    total = 0
    for rank in range(2):
        model: Any = _Transposes(tp=2, rank=rank)
        stream = stream_of(weights, fp8=False)
        receiver = Receiver(model, stream.plan, model.load_weights)
        receiver.sync(stream, Phases(CPU))
        own = weights["experts"][:, :, 3 * rank : 3 * (rank + 1)]
        assert torch.equal(model.experts, own.transpose(1, 2))
        names = [name for name, _ in receiver.boxes]
        sums = receiver.served().tolist()
        total += sum(one for name, one in zip(names, sums, strict=True) if name == "experts")
        with torch.no_grad():
            model.experts[2, 1, 3] += 1
        changed = [one != now for one, now in zip(sums, receiver.served().tolist(), strict=True)]
        assert [name for name, is_other in zip(names, changed, strict=True) if is_other] == [
            "experts"
        ]
    whole = checksum(weights["experts"], ShardSpec.whole((4, 8, 6)))
    assert (total - whole) % 2**64 == 0


@pytest.mark.parametrize(
    "cut",
    [
        lambda tensor: tensor.reshape(-1)[:6].view(2, 3),
        lambda tensor: tensor.t().contiguous().view(-1)[:6].view(2, 3),
    ],
    ids=["elements of several rows", "elements of several columns"],
)
def test_parts_that_are_not_cut_along_axes_are_refused(cut: Any) -> None:
    class Server(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)

        def load_weights(self, weights):
            for _, tensor in weights:
                self.weight.data.copy_(cut(tensor)[:2, :3])

    model: Any = Server()
    stream = stream_of({"weight": torch.randn(4, 5)}, fp8=False)
    with pytest.raises(RolloutError, match="cannot follow how the server loads weight"):
        Receiver(model, stream.plan, model.load_weights)


class _Computes(torch.nn.Module):
    """Server that computes the decay of a state from its logarithm, as Mamba's do."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.decay = torch.nn.Parameter(torch.zeros(6), requires_grad=False)
        self.register_buffer("scale", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "scale":
                self.scale.copy_(tensor)
            elif self.in_place:
                self.decay.data.copy_(tensor)
                self.decay.data.copy_(-torch.exp(self.decay.data.float()))
            else:
                self.decay.data.copy_(-torch.exp(tensor.float()))


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_server_computes_of_a_weight_is_computed_at_each_sync(in_place: bool) -> None:
    """A saved buffer is served, too."""
    weights = {"log": torch.randn(6).bfloat16().float(), "scale": torch.randn(1)}
    model: Any = _Computes(in_place=in_place)
    session = SyncSession(InProcess([model]))
    for version in range(3):
        weights = {name: tensor + version for name, tensor in weights.items()}
        stream = stream_of(weights, fp8=False, dtype=torch.float32)
        # What is computed cannot be compared with what was sent.
        assert not session.run(stream, version).audited
        assert torch.equal(model.decay, -torch.exp(weights["log"]))
        assert torch.equal(model.scale, weights["scale"])
        assert not model.cache.any()


def test_a_change_that_the_trace_does_not_follow_is_refused() -> None:
    class Adds(_Computes):
        def load_weights(self, weights):
            super().load_weights(weights)
            self.decay.data.add_(1.0)

    model: Any = Adds(in_place=False)
    stream = stream_of({"log": torch.randn(6), "scale": torch.randn(1)}, fp8=False)
    with pytest.raises(RolloutError, match="the server rearranges weights after loading"):
        Receiver(model, stream.plan, model.load_weights)


def test_a_buffer_that_is_a_view_of_a_parameter_is_not_taken_for_it() -> None:
    class Viewed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
            self.register_buffer("again", self.weight.data[:2])

        def load_weights(self, weights):
            for _, tensor in weights:
                self.weight.data.copy_(tensor)

    model: Any = Viewed()
    weight = torch.randn(4, 6)
    assert SyncSession(InProcess([model])).run(stream_of({"weight": weight}, fp8=False), 0).audited
    assert torch.equal(model.weight, weight)


class _Copies(torch.nn.Module):
    """Server of one weight that a function copies."""

    def __init__(self, copy: Any, *shape: int) -> None:
        super().__init__()
        self.copy = copy
        self.weight = torch.nn.Parameter(torch.zeros(*shape), requires_grad=False)

    def load_weights(self, weights):
        for _, tensor in weights:
            self.copy(self.weight.data, tensor)


def serve(model: Any, weight: torch.Tensor) -> bool:
    """Sync a weight twice, and return whether both syncs were audited."""
    session = SyncSession(InProcess([model]))
    results = [session.run(stream_of({"weight": weight}, fp8=False), one) for one in range(2)]
    return all(result.audited for result in results)


def test_a_model_of_transposed_weights_alone_is_audited() -> None:
    model = _Copies(lambda to, tensor: to.copy_(tensor.t()), 5, 5)
    weight = torch.randn(5, 5)
    assert serve(model, weight)
    assert torch.equal(model.weight, weight.t())


def test_halves_of_every_expert_are_served_apart() -> None:
    """Their rows are at no one distance in the sent tensor."""

    def copy(to: torch.Tensor, tensor: torch.Tensor) -> None:
        to[0].copy_(tensor[:, :3])
        to[1].copy_(tensor[:, 3:])

    model = _Copies(copy, 2, 3, 3, 8)
    weight = torch.randn(3, 6, 8)
    assert serve(model, weight)
    assert torch.equal(model.weight, torch.stack([weight[:, :3], weight[:, 3:]]))


def test_a_weight_of_which_a_part_is_computed_is_served_and_not_read_back() -> None:
    def copy(to: torch.Tensor, tensor: torch.Tensor) -> None:
        to[:2].copy_(tensor[:2])
        to[2:].copy_(-torch.exp(tensor[2:]))

    model = _Copies(copy, 4, 6)
    weight = torch.randn(4, 6)
    assert not serve(model, weight)
    assert torch.equal(model.weight, torch.cat([weight[:2], -torch.exp(weight[2:])]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensor: tensor.clone().abs_(), "aten::abs_"),
        (lambda tensor: tensor.clone().clamp_(min=0.0), "aten::clamp_"),
        (lambda tensor: tensor.to(torch.float64).relu_(), "aten::relu_"),
        (lambda tensor: tensor.zero_(), "aten::zero_"),
    ],
    ids=["abs", "clamp", "relu of a cast", "zero"],
)
def test_a_change_on_the_way_that_the_marks_do_not_show_is_refused(change: Any, named: str) -> None:
    model: Any = _Copies(lambda to, tensor: to.copy_(change(tensor)), 4, 6)
    stream = stream_of({"weight": torch.randn(4, 6)}, fp8=False)
    with pytest.raises(RolloutError, match=f"{named} changes it on the way"):
        Receiver(model, stream.plan, model.load_weights)
