"""Weight syncs of the ``sglang`` rollout: every byte, and errors that the next sync repairs."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import sglang_fakes
import torch
from served_model import ServedModel, checkpoint
from sglang_fakes import GREEDY, Engine, export, same, served
from waiting import DEADLINE_S

from engine_api.errors import RankFailure, RolloutError
from engine_api.weights import ShardSpec
from rollout_fp8.export import exporter
from rollout_fp8.export.exporter import collect_export
from rollout_fp8.install.session import SyncSession
from rollout_fp8.sglang import loader
from rollout_fp8.sglang.host import Host
from rollout_fp8.sglang.sync import Schedulers
from rollout_fp8.transports import sender

engine, folder, make = sglang_fakes.engine, sglang_fakes.folder, sglang_fakes.make  # fixtures
CPU = torch.device("cpu")


@pytest.fixture
def started(folder) -> Any:
    """Return an engine that serves a given model, and its syncs."""
    things: list[Any] = []

    def start(model: ServedModel) -> tuple[Engine, SyncSession]:
        server = Engine(model_path=str(folder), tp_size=1, context_length=64)
        server.model = model
        things.append(host := Host(lambda: server))
        host.open()
        things.append(workers := Schedulers(host, 1, CPU))
        return server, SyncSession(workers)

    yield start
    for thing in things:
        thing.close()


def stream_of(seed: int, fp8: bool = False) -> exporter.EngineStream:
    return collect_export(
        export(seed),
        device=CPU,
        dtype=torch.float32,
        architecture="Qwen3ForCausalLM" if fp8 else None,
        scales="fp32",
        audit=True,
    )


@pytest.mark.parametrize("fp8", [False, True])
def test_a_sync_serves_every_byte(started, monkeypatch, fp8):
    monkeypatch.setattr(exporter, "BUCKET_BYTES", 1 << 18)  # several buckets a slot
    server, session = started(ServedModel(fp8=fp8))
    for version, seed in enumerate((0, 11, 0)):
        stream = stream_of(seed, fp8)
        assert len(stream.plan.buckets) > 1
        result = session.run(stream, version)
        assert same(server.model, served(seed, fp8=fp8)), f"sync {version}"
        assert result.audited
        assert result.num_tensors == len(checkpoint(0))
        assert result.num_quantized == (14 if fp8 else 0)
        assert {"install", "audit", "transfer", "quantize"} <= result.seconds.keys()


def test_the_first_sync_corrects_the_kernel_of_experts(started, monkeypatch):
    corrected: list[Any] = []
    monkeypatch.setattr(loader.private, "keep_float32_of_experts", corrected.append)
    server, session = started(ServedModel())
    for version, seed in enumerate((0, 11)):
        session.run(stream_of(seed), version)
    assert corrected == [server.model]


def test_connections_and_buffers_are_made_at_the_first_sync_alone(started, monkeypatch):
    monkeypatch.setattr(exporter, "BUCKET_BYTES", 1 << 18)
    opened: list[str] = []
    real = sender.Sender._accept
    monkeypatch.setattr(
        sender.Sender,
        "_accept",
        lambda self, watch: opened.append(self.address) or real(self, watch),
    )
    server, session = started(ServedModel())

    def shards(seed: int) -> Any:
        return (
            (name, tensor, ShardSpec.whole(tensor.shape))
            for name, tensor in checkpoint(seed).items()
        )

    for version, (one, seed) in enumerate(
        (one, seed) for one in (stream_of(0), stream_of(0)) for seed in (1, 2, 3)
    ):
        session.run(exporter.EngineStream(one._plan, one._filler, partial(shards, seed)), version)
        assert same(server.model, served(seed)), f"sync {version}"
    assert len(opened) == 2  # to learn, and for the first weights


def test_what_a_model_derives_from_its_weights_is_derived_after_every_sync(started):
    class Derives(ServedModel):
        def post_load_weights(self) -> None:
            self.derived = self.names["model.norm.weight"].clone() * 2

    server, session = started(Derives())
    for version in (1, 2):
        session.run(stream_of(version), version)
        assert torch.equal(server.model.derived, checkpoint(version)["model.norm.weight"] * 2)


def test_scales_of_an_fp8_cache_are_1_after_every_sync(started):
    class Quantized(ServedModel):
        """Has scales at which SGLang starts without a checkpoint."""

        def __init__(self) -> None:
            super().__init__()
            layer = self.get_submodule("model.layers.0.self_attn")
            for name in ("k_scale", "v_scale"):
                scale = torch.nn.Parameter(torch.tensor(3e-4), requires_grad=False)
                scale._skip_weight_check = True
                layer.register_parameter(name, scale)
            self.layer = (layer,)

    server, session = started(Quantized())
    (layer,) = server.model.layer
    before = layer.k_scale.data_ptr()
    for version in (1, 2):
        session.run(stream_of(version), version)
        assert (float(layer.k_scale), float(layer.v_scale)) == (1.0, 1.0)
        assert (layer.k_scale_float, layer.v_scale_float) == (1.0, 1.0)
        layer.k_scale.data.fill_(2.0)
    assert layer.k_scale.data_ptr() == before


def test_a_scheduler_that_hangs_up_in_the_middle_is_an_error(make, monkeypatch):
    rollout = make()
    rollout.update_weights(export(), 1)
    real = loader.Receiver.sync

    def broken(self, stream, phases):
        next(stream.buckets())
        stream._channel.close()
        raise KeyError("no such thing")

    monkeypatch.setattr(loader.Receiver, "sync", broken)
    with pytest.raises(RolloutError, match="closed the channel"):
        rollout.update_weights(export(1), 2)
    with pytest.raises(RolloutError, match="sync failed"):
        rollout.generate([[1]], GREEDY)
    monkeypatch.setattr(loader.Receiver, "sync", real)
    rollout.update_weights(export(1), 2)
    assert same(Engine.made[0].model, served(1))


def test_a_trainer_that_is_interrupted_leaves_a_server_that_can_be_synced(make):
    rollout = make()
    rollout.update_weights(export(), 1)

    def interrupted() -> Any:
        raise KeyboardInterrupt

    stream = stream_of(1)
    stream.checksums = interrupted
    with pytest.raises(KeyboardInterrupt):
        rollout.update_weights(stream, 2)
    with pytest.raises(RolloutError, match="sync failed"):
        rollout.generate([[1]], GREEDY)
    rollout.update_weights(export(2), 2)
    assert same(Engine.made[0].model, served(2))


def test_a_loader_that_does_not_come_is_an_error_long_before_the_timeout(make):
    rollout = make()
    Engine.made[0].load = lambda model, named: None
    with pytest.raises(RolloutError, match="returned without the weights"):
        rollout.update_weights(export(), 1)


def test_a_server_that_never_runs_the_loader_is_an_error(make, monkeypatch):
    rollout = make()
    monkeypatch.setattr(
        Engine, "_update", lambda self, named: asyncio.sleep(0, (False, "unknown load_format"))
    )
    with pytest.raises(RolloutError, match="unknown load_format"):
        rollout.update_weights(export(), 1)


def test_the_audit_finds_what_was_changed_behind_its_back(make, monkeypatch):
    rollout = make()
    rollout.update_weights(export(), 1)
    real = loader.Receiver.served

    def spoilt(self):
        Engine.made[0].model.get_parameter("model.norm.weight").data[3] += 1
        return real(self)

    monkeypatch.setattr(loader.Receiver, "served", spoilt)
    with pytest.raises(RolloutError, match=r"model\.norm\.weight"):
        rollout.update_weights(export(1), 2)
    with pytest.raises(RolloutError, match="sync failed"):
        rollout.generate([[1]], GREEDY)
    monkeypatch.setattr(loader.Receiver, "served", real)
    assert rollout.update_weights(export(1), 2).audited
    assert make(audit=False).update_weights(export(), 1).audited is False


def spoilt(how: str) -> Any:
    for place, (name, tensor) in enumerate(checkpoint(5).items()):
        if how == "raises" and place == 3:
            raise RankFailure({1: "the export ended in the middle"})
        if how == "missing" and "q_proj" in name:
            continue
        yield name, tensor[..., :-1].clone() if how == "shape" and "q_proj" in name else tensor
        if how == "twice" and place == 3:
            yield name, tensor
    if how == "unknown":
        yield "model.layers.0.no_such.weight", torch.zeros(3)


@pytest.mark.parametrize("how", ["missing", "unknown", "shape", "twice", "raises"])
def test_an_export_that_does_not_fit_fails_the_sync_and_the_server_lives_on(make, how):
    rollout = make()
    rollout.update_weights(export(), 1)
    with pytest.raises(RankFailure if how == "raises" else RolloutError):
        rollout.update_weights(spoilt(how), 2)
    assert rollout.weight_version == 1
    with pytest.raises(RolloutError, match="sync failed"):
        rollout.generate([[1]], GREEDY)
    rollout.update_weights(export(3), 2)
    assert same(Engine.made[0].model, served(3))
    assert rollout.generate([[1]], GREEDY)[0].weight_versions == [2] * 4


def test_an_export_is_run_to_its_end_when_the_sync_fails(make, monkeypatch):
    rollout = make()
    weights = list(checkpoint(0).items())
    left = iter(weights)
    monkeypatch.setattr(rollout, "_stream", lambda _: (_ for _ in ()).throw(RolloutError("no")))
    with pytest.raises(RolloutError, match="no"):
        rollout.update_weights(left, 1)
    assert next(left, None) is None


def test_a_stale_version_is_refused(make):
    rollout = make()
    rollout.update_weights(export(), 5)
    rollout.update_weights(export(), 5)
    with pytest.raises(RolloutError, match="stale"):
        rollout.update_weights(export(), 4)
    with pytest.raises(RolloutError):
        rollout.generate([[1]], GREEDY)


def test_a_scheduler_that_dies_in_a_sync_is_an_error_and_nothing_hangs(make):
    rollout = make()
    rollout.update_weights(export(), 1)

    def dies(model: Any, named: Any) -> None:
        raise MemoryError

    Engine.made[0].load = dies
    with pytest.raises(RolloutError, match="ended"):
        rollout.update_weights(export(1), 2)
    with pytest.raises(RolloutError):
        rollout.generate([[1]], GREEDY)
    rollout.close()


def test_no_sync_and_no_sleep_during_generation_and_the_other_way_round(make):
    rollout = make()
    rollout.update_weights(export(), 1)
    server = Engine.made[0]
    server.hold = asyncio.Event()
    running = rollout.submit([3], GREEDY)
    for call in (lambda: rollout.update_weights(export(), 2), rollout.sleep, rollout.wake_up):
        with pytest.raises(RolloutError, match="generating"):
            call()
    server.loop.call_soon_threadsafe(server.hold.set)
    assert running.result(DEADLINE_S)[0].weight_versions == [1] * 4
    caught: list[RolloutError] = []

    def meanwhile() -> Any:
        for place, row in enumerate(checkpoint(1).items()):
            if place == 2:
                for call in (
                    lambda: rollout.generate([[1]], GREEDY),
                    lambda: rollout.update_weights(iter(()), 9),
                ):
                    with pytest.raises(RolloutError) as error:
                        call()
                    caught.append(error.value)
            yield row

    rollout.update_weights(meanwhile(), 2)
    assert len(caught) == 2
    assert all("sync is running" in error.why for error in caught)
    assert rollout.generate([[1]], GREEDY)[0].weight_versions == [2] * 4


def test_caches_are_flushed_once_the_server_is_idle_and_only_after_generation(make):
    rollout = make()
    server = Engine.made[0]
    rollout.update_weights(export(), 1)
    assert server.calls == []
    rollout.generate([[1]], GREEDY)
    server.idle_after = 2
    rollout.update_weights(export(), 2)
    assert server.calls == ["flush"] * 3
    rollout.update_weights(export(), 3)
    assert server.calls == ["flush"] * 3
