"""Sync from an engine's shards to a server's parameters: every byte, for any fusion and layout."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator

import pytest
import torch
from exporter_ranks import Shards, exporter
from served_model import CONFIG, ServedModel, checkpoint
from sync_parts import CPU, InProcess, expected, stream_of
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from engine_api.config import ModelSource
from engine_api.errors import RolloutError
from engine_api.weights import ShardSpec
from rollout_fp8.export.exporter import collect_export
from rollout_fp8.export.fill import Filler
from rollout_fp8.install.receiver import Receiver
from rollout_fp8.install.session import SyncSession
from rollout_fp8.phases import Phases
from rollout_fp8.sglang.loader import ServedWeights
from rollout_fp8.wire.expected import Expected


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_every_byte_is_what_the_servers_own_loader_makes_of_it_and_later_syncs_do_not_use_it(
    fp8,
) -> None:
    model = ServedModel(fp8=fp8, dtype=torch.bfloat16)
    workers = InProcess([model])
    session = SyncSession(workers)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    loads = []
    for version in range(3):
        weights = checkpoint(version)
        result = session.run(stream_of(weights, fp8=fp8, dtype=torch.bfloat16), version)
        want = expected(weights, ServedModel(fp8=fp8, dtype=torch.bfloat16), fp8=fp8)
        for name, parameter in model.named_parameters():
            assert torch.equal(raw(parameter), raw(want[name])), name
        assert addresses == {name: p.data_ptr() for name, p in model.named_parameters()}
        assert result.audited and result.version == version and result.num_tensors == len(weights)
        assert result.num_quantized == (14 if fp8 else 0)
        loads.append(result)
        model.load_weights = None  # type: ignore[assignment,method-assign] - nobody may call it again
    assert loads[0].num_bytes == loads[2].num_bytes


def test_a_tensor_parallel_server_gets_each_ranks_part() -> None:
    weights = checkpoint(3)
    models = [ServedModel(tp=2, rank=rank, dtype=torch.bfloat16) for rank in range(2)]
    receivers = []
    for model in models:
        stream = stream_of(weights, fp8=False, dtype=torch.bfloat16)
        receivers.append(Receiver(model, stream.plan, model.load_weights))
        receivers[-1].sync(stream, Phases(CPU))
        want = expected(
            weights, ServedModel(tp=2, rank=model.rank, dtype=torch.bfloat16), fp8=False
        )
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, want[name]), name
    from rollout_fp8.wire.audit import Audit

    audit = Audit(stream.plan, [receiver.boxes for receiver in receivers])
    audit.check(stream.checksums(), [receiver.served().tolist() for receiver in receivers])
    models[1].get_parameter("model.layers.1.mlp.down_proj.weight").data[3, 5] += 1
    with pytest.raises(
        RolloutError, match=r"1 of 21 tensors differ: model.layers.1.mlp.down_proj.weight"
    ):
        audit.check(stream.checksums(), [receiver.served().tolist() for receiver in receivers])


def test_copies_on_two_workers_that_differ_fail_the_audit() -> None:
    weights = checkpoint(3)
    receivers, models = [], [ServedModel(tp=2, rank=rank) for rank in range(2)]
    for model in models:
        stream = stream_of(weights, fp8=False)
        receivers.append(Receiver(model, stream.plan, model.load_weights))
        receivers[-1].sync(stream, Phases(CPU))
    from rollout_fp8.wire.audit import Audit

    audit = Audit(stream.plan, [receiver.boxes for receiver in receivers])
    models[1].get_parameter("model.norm.weight").data[0] += 1
    with pytest.raises(RolloutError, match=r"model\.norm\.weight"):
        audit.check(stream.checksums(), [receiver.served().tolist() for receiver in receivers])


@pytest.mark.parametrize("packs", [True, False], ids=["packs weights", "has them in place"])
def test_a_server_may_keep_some_weights_wider_but_only_what_was_sent(packs) -> None:
    """Vectors, and a matrix such as a router's."""
    model = ServedModel(dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name == "model.layers.1.mlp.down_proj.weight":
            parameter.data = parameter.float()
    read = model.get_parameter if packs else None
    receiver = None
    for seed in range(2):
        stream = stream_of(checkpoint(seed), fp8=False, dtype=torch.bfloat16)
        if receiver is None:
            receiver = Receiver(model, stream.plan, model.load_weights, read=read)
        receiver.sync(stream, Phases(CPU))
        sums = receiver.served().tolist()
        for (name, _), found in zip(receiver.boxes, sums, strict=True):
            assert found % (1 << 64) == stream.checksums()[name], name
    assert receiver is not None
    model.get_parameter("model.norm.weight").data[3] *= 1 + 2**-20
    with pytest.raises(RolloutError, match=r"model\.norm\.weight holds values that were not sent"):
        receiver.served()


def test_a_server_that_packs_weights_is_not_given_those_of_another_dtype() -> None:
    """Check the refusal: rounded weights would be served as float32, and the audit would pass."""
    model, stream = (
        ServedModel(dtype=torch.float32),
        stream_of(checkpoint(0), fp8=False, dtype=torch.bfloat16),
    )
    with pytest.raises(
        RolloutError, match=r"is sent as torch\.bfloat16, .* is served as torch\.float32"
    ):
        Receiver(model, stream.plan, model.load_weights, read=model.get_parameter)


@pytest.mark.parametrize("audit", [True, False], ids=["audited", "not audited"])
def test_a_server_that_moves_its_weights_is_not_fed_where_they_were(audit) -> None:
    model = ServedModel()
    session = SyncSession(InProcess([model]))
    session.run(stream_of(checkpoint(0), fp8=False, audit=audit), 0)
    norm = model.get_parameter("model.norm.weight")
    norm.data = norm.data.clone()
    with pytest.raises(
        RolloutError, match=r"moved its weights.*\n.*1 parameters, model\.norm\.weight"
    ):
        session.run(stream_of(checkpoint(1), fp8=False, audit=audit), 1)


@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "parameters of SGLang's"])
def test_a_server_that_replaces_a_parameter_is_not_fed_the_one_before(wrapped) -> None:
    """Check the refusal: syncs and audits would both be of the parameter that nothing serves."""
    model = ServedModel()
    stream = stream_of(checkpoint(0), fp8=False)
    receiver = Receiver(ServedWeights(model) if wrapped else model, stream.plan, model.load_weights)
    receiver.sync(stream, Phases(CPU))
    served = model.get_submodule("model.norm")
    former = served.weight
    served.weight = torch.nn.Parameter(former.detach().clone())
    for use in (lambda: receiver.sync(stream, Phases(CPU)), receiver.served):
        with pytest.raises(RolloutError, match=r"moved its weights"):
            use()


def test_a_server_that_rearranges_weights_after_loading_is_refused_and_not_fed_wrong_ones() -> None:
    model = ServedModel(packs=True)
    with pytest.raises(RolloutError, match="rearranges weights after loading") as caught:
        SyncSession(InProcess([model])).run(stream_of(checkpoint(0), fp8=False), 0)
    assert "model.layers.0.mlp.gate_proj.weight" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("model.layers.1.self_attn.k_proj.weight"),
            "model.layers.1.self_attn.qkv_proj.weight gets only",
        ),
        (
            lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
            "model.layers.1.mlp.gate_up_proj.weight gets only",
        ),
        (
            lambda w: w.pop("model.layers.1.mlp.gate_proj.weight"),
            "model.layers.1.mlp.gate_up_proj.weight gets only",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.o_proj.weight": torch.zeros(100, 512)}),
            "o_proj.weight",
        ),
        (lambda w: w.pop("model.norm.weight"), "no weight is sent for model.norm.weight"),
        (
            lambda w: w.update({"model.layers.0.input_layernorm.weight": torch.zeros(7)}),
            "input_layernorm.weight gets only",
        ),
    ],
    ids=["part missing", "second half missing", "first half missing", "short", "missing", "shape"],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_an_export_that_is_not_the_servers_model_is_refused(change, message, fp8) -> None:
    weights = checkpoint(0)
    change(weights)
    with pytest.raises(RolloutError, match=message):
        SyncSession(InProcess([ServedModel(fp8=fp8)])).run(stream_of(weights, fp8=fp8), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
            "model.layers.1.mlp.up_proj.weight: missing",
        ),
        (
            lambda w: w.update({"model.embed_tokens.weight": torch.zeros(50, 256)}),
            r"model.embed_tokens.weight: expected shape \[300, 256\], got \[50, 256\]",
        ),
        (
            lambda w: w.update({"model.layers.1.mlp.upproj.weight": torch.zeros(2, 2)}),
            "no such weight .*up_proj",
        ),
    ],
    ids=["missing", "short vocabulary", "unknown"],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_stream_that_is_not_the_model_of_the_configuration_never_reaches_the_servers_loader(
    tmp_path, change, message, fp8
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights, model = checkpoint(0), ServedModel(fp8=fp8)
    session = SyncSession(InProcess([model]), Expected.read(ModelSource(path=str(tmp_path))))
    assert session.run(stream_of(weights, fp8=fp8), 0).audited
    change(weights)
    model.load_weights = None  # type: ignore[assignment,method-assign]
    stream = stream_of(weights, fp8=False)  # the table of FP8 layers knows no other names
    with pytest.raises(RolloutError, match=message):
        session.run(stream, 1)


def test_a_dtype_that_the_server_does_not_serve_is_refused() -> None:
    with pytest.raises(
        RolloutError, match=r"is sent as torch.bfloat16, .* is served as torch.float32"
    ):
        SyncSession(InProcess([ServedModel()])).run(
            stream_of(checkpoint(0), fp8=False, dtype=torch.bfloat16), 0
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("audit", [True, False])
def test_weights_that_are_not_finite_fail_the_sync_with_their_name(bad, name, audit) -> None:
    weights = checkpoint(0)
    weights[name].view(-1)[-3] = bad
    with pytest.raises(RolloutError, match=f"not finite: {name}"):
        SyncSession(InProcess([ServedModel(fp8=True)])).run(
            stream_of(weights, fp8=True, audit=audit), 0
        )


def test_weights_that_float16_does_not_hold_are_not_called_broken() -> None:
    weights = checkpoint(0)
    weights["model.norm.weight"][3] = 1e5
    workers = InProcess([ServedModel(dtype=torch.float16)])
    with pytest.raises(RolloutError, match=r"1 .* in float16, .* 65504[^$]*dtype=bfloat16"):
        SyncSession(workers).run(stream_of(weights, fp8=False, dtype=torch.float16), 0)
    # With inf nothing was cut off.
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float16)
    with pytest.raises(RolloutError, match=r"hold NaN or infinity\n[^$]*weights are broken"):
        SyncSession(workers).run(stream_of(weights, fp8=False, dtype=torch.float16), 0)


def test_an_audit_finds_a_single_flipped_bit_in_what_is_served() -> None:
    class Flips(InProcess):
        def sync(self, stream):
            rows = []
            for receiver in self.receivers:
                receiver.sync(stream, Phases(CPU))
                flipped = (
                    self.models[0]
                    .get_parameter("model.layers.0.self_attn.qkv_proj.weight")
                    .data.view(torch.uint8)
                )
                flipped[200, 17] ^= 4
                rows.append((receiver.served().tolist(), {}))
            return rows

    with pytest.raises(
        RolloutError, match="the served weights differ from the exported ones"
    ) as caught:
        SyncSession(Flips([ServedModel(fp8=True)])).run(stream_of(checkpoint(0), fp8=True), 0)
    assert "1 of 35 tensors differ: model.layers.0.self_attn.q_proj.weight" in str(caught.value)


def test_a_plain_export_with_a_name_twice_or_of_integers_or_empty_is_refused() -> None:
    def twice() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(2)
        yield "a", torch.zeros(2)

    for export, message in [
        (twice(), "it is exported twice"),
        (iter([("a", torch.zeros(2, dtype=torch.int32))]), "torch.int32"),
        (iter([("a", torch.zeros(2, dtype=torch.float64))]), "torch.float64"),
        (iter(()), "the export is empty"),
    ]:
        with pytest.raises(RolloutError, match=message):
            collect_export(
                export,
                device=CPU,
                dtype=torch.float32,
                architecture=None,
                scales="fp32",
                audit=True,
            )


def test_a_tensor_of_a_plain_export_may_lie_in_memory_as_it_likes() -> None:
    weights = {name: tensor.t().contiguous().t() for name, tensor in checkpoint(0).items()}
    model = ServedModel()
    SyncSession(InProcess([model])).run(stream_of(weights, fp8=False), 0)
    want = expected(checkpoint(0), ServedModel(), fp8=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, want[name]), name


def test_a_box_is_found_in_every_dimension() -> None:
    from rollout_fp8.install.receiver import intersection

    a = ShardSpec(global_shape=(8, 8), offset=(0, 2), shape=(4, 4))
    b = ShardSpec(global_shape=(8, 8), offset=(2, 0), shape=(4, 4))
    shared = intersection(a, b)
    assert shared is not None
    assert (shared.offset, shared.shape) == ((2, 2), (2, 2))
    assert intersection(a, ShardSpec(global_shape=(8, 8), offset=(4, 0), shape=(4, 8))) is None


class Seen(InProcess):
    """Workers that note which slices come in buckets."""

    def __init__(self, models: list[ServedModel]) -> None:
        super().__init__(models)
        self.slices: list[str] = []

    def sync(self, stream):
        made = stream.buckets

        def buckets():
            for bucket, buffer in made():
                self.slices += [wire_slice.tensor.name for wire_slice in bucket.slices]
                yield bucket, buffer

        stream.buckets = buckets
        return super().sync(stream)


@pytest.mark.parametrize("audit", [True, False], ids=["audited", "not audited"])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_weights_are_written_where_they_are_served_and_later_syncs_follow_them(
    tmp_path, monkeypatch, quantization, audit
) -> None:
    """Checksums of what is written there are its own; all others come through buckets."""
    monkeypatch.setattr(Filler, "can_place", True)
    fp8 = quantization == "fp8"
    export = exporter(tmp_path, quantization, options={"audit": audit})
    for model in (ServedModel(fp8=fp8, dtype=torch.bfloat16) for _ in range(2)):
        workers = Seen([model])
        session = SyncSession(workers)
        for version in range(3):
            weights = checkpoint(version)
            workers.slices = []
            result = session.run(export.export(Shards(weights, 0, 1)), version)
            want = expected(weights, ServedModel(fp8=fp8, dtype=torch.bfloat16), fp8=fp8)
            for name, parameter in model.named_parameters():
                assert torch.equal(raw(parameter), raw(want[name])), name
            assert result.audited == audit
            matrices = [name for name in workers.slices if name.endswith("_proj.weight")]
            assert matrices == []
            assert bool([name for name in workers.slices if name.endswith("norm.weight")]) == audit
    # A stream that is given no places brings everything.
    whole = {name: tensor.clone() for name, tensor in export.export(Shards(checkpoint(0), 0, 1))}
    assert whole.keys() >= checkpoint(0).keys()


def test_a_weight_that_changes_after_it_was_written_in_place_fails_the_audit(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(Filler, "can_place", True)
    export = exporter(tmp_path, "fp8")
    model = ServedModel(fp8=True, dtype=torch.bfloat16)
    workers = Seen([model])
    session = SyncSession(workers)
    session.run(export.export(Shards(checkpoint(0), 0, 1)), 0)
    served = workers.receivers[0].served

    def spoil() -> Tensor:
        model.get_parameter("model.layers.1.mlp.down_proj.weight").data.view(torch.uint8)[3, 5] ^= 1
        return served()

    workers.receivers[0].served = spoil
    with pytest.raises(RolloutError, match=r"1 of \d+ tensors differ: model.layers.1.mlp.down_pr"):
        session.run(export.export(Shards(checkpoint(1), 0, 1)), 1)


def test_a_server_that_is_closed_is_freed_while_its_exporter_lives(tmp_path, monkeypatch) -> None:
    """Check it after a sync that was written in place, and after one that failed half-way."""
    monkeypatch.setattr(Filler, "can_place", True)
    export = exporter(tmp_path, "fp8", bucket_bytes=200_000)
    for fails in (False, True):
        workers = InProcess([ServedModel(fp8=True, dtype=torch.bfloat16)])
        session = SyncSession(workers)
        stream = export.export(Shards(checkpoint(0), 0, 1))
        session.run(stream, 0)
        if fails:
            weights = checkpoint(1)
            weights["model.layers.1.mlp.down_proj.weight"] = torch.zeros(3, 3)
            stream = export.export(Shards(weights, 0, 1))
            with pytest.raises(RolloutError, match="has changed since the first sync"):
                session.run(stream, 1)
        model = weakref.ref(workers.models[0])
        served = workers.models[0].get_parameter("model.layers.0.mlp.down_proj.weight")
        memory = StorageWeakRef(served.untyped_storage())
        del workers, session, served
        gc.collect()
        assert model() is None
        assert memory.expired()


def test_two_servers_of_one_exporter_keep_what_was_prepared_for_each(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Filler, "can_place", True)
    export = exporter(tmp_path, "fp8", bucket_bytes=200_000)
    servers = [InProcess([ServedModel(fp8=True, dtype=torch.bfloat16)]) for _ in range(2)]
    sessions = [SyncSession(workers) for workers in servers]
    sizes: list[list[int]] = []
    for version in range(3):
        weights = checkpoint(version)
        want = expected(weights, ServedModel(fp8=True, dtype=torch.bfloat16), fp8=True)
        for workers, session in zip(servers, sessions, strict=True):
            session.run(export.export(Shards(weights, 0, 1)), version)
            for name, parameter in workers.models[0].named_parameters():
                assert torch.equal(raw(parameter), raw(want[name])), name
        sizes.append([len(workers.receivers[0]._copies) for workers in servers])
    assert sizes[0] == sizes[1] == sizes[2]
    # A stream that is given no places still brings everything, as for another process.
    whole = {name: tensor.clone() for name, tensor in export.export(Shards(checkpoint(0), 0, 1))}
    assert whole.keys() >= checkpoint(0).keys()


def test_an_export_laid_out_differently_for_another_server_is_not_taken_for_the_first_one(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(Filler, "can_place", True)
    export = exporter(tmp_path, "none")
    apart = {
        name: torch.cat([w, w], dim=-1)[..., : w.shape[-1]] for name, w in checkpoint(0).items()
    }
    turned = {name: w.t().contiguous().t() for name, w in checkpoint(1).items()}
    servers = [SyncSession(InProcess([ServedModel(dtype=torch.bfloat16)])) for _ in range(2)]
    servers[0].run(export.export(Shards(apart, 0, 1)), 0)
    servers[1].run(export.export(Shards(turned, 0, 1)), 0)
    with pytest.raises(RolloutError, match="another layout than at the first sync"):
        servers[1].run(export.export(Shards(apart, 0, 1)), 1)
    assert servers[0].run(export.export(Shards(apart, 0, 1)), 1).audited


class Tied(ServedModel):
    """Model that loads its embedding into its head, too, and keeps a projection in float32."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.bfloat16)
        wide = self.get_parameter("model.layers.1.mlp.down_proj.weight")
        wide.data = wide.float()

    def _load(self, name: str, tensor: Tensor) -> None:
        super()._load(name, tensor)
        if name == "model.embed_tokens.weight":
            super()._load("lm_head.weight", tensor)


def test_weights_served_twice_or_in_a_wider_dtype_come_through_buckets(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(Filler, "can_place", True)
    export = exporter(tmp_path, "none")
    workers = Seen([Tied()])
    session = SyncSession(workers)
    for version in range(2):
        weights = checkpoint(version)
        del weights["lm_head.weight"]
        workers.slices = []
        assert session.run(export.export(Shards(weights, 0, 1)), version).audited
        want = expected(weights, Tied(), fp8=False)
        for name, parameter in workers.models[0].named_parameters():
            assert torch.equal(raw(parameter), raw(want[name])), name
        assert [name for name in workers.slices if not name.endswith("norm.weight")] == [
            "model.embed_tokens.weight",
            "model.layers.1.mlp.down_proj.weight",
        ]


def test_a_sync_that_fails_while_it_writes_in_place_is_an_error_and_the_next_one_is_whole(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(Filler, "can_place", True)
    export = exporter(tmp_path, "fp8", bucket_bytes=200_000)
    model = ServedModel(fp8=True, dtype=torch.bfloat16)
    session = SyncSession(InProcess([model]))
    session.run(export.export(Shards(checkpoint(0), 0, 1)), 0)
    short = checkpoint(1)
    del short["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(RolloutError, match="has changed since the first sync"):
        session.run(export.export(Shards(short, 0, 1)), 1)
    broken = checkpoint(2)
    broken["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    with pytest.raises(RolloutError, match=r"not finite: model\.layers\.1\.mlp\.up_proj\.weight"):
        session.run(export.export(Shards(broken, 0, 1)), 2)
    weights = checkpoint(3)
    assert session.run(export.export(Shards(weights, 0, 1)), 3).audited
    want = expected(weights, ServedModel(fp8=True, dtype=torch.bfloat16), fp8=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(raw(parameter), raw(want[name])), name
