"""Adapters without a server: names, folder, times at which the base weights are sent, refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from exporter_ranks import RESOLUTION, Lora, share_adapter
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from engine_api.config import LoraConfig, ModelSource
from engine_api.errors import ConfigError, RolloutError, UnsupportedCapability
from engine_api.rollout import SyncResult
from rollout_fp8.export.exporter import Exporter
from rollout_fp8.install import adapter as adapters
from rollout_fp8.install.adapter import (
    PREFIX,
    Adapter,
    ExpectedAdapter,
    folder_of,
    read_folder,
    whole_checksum,
)
from rollout_fp8.install.adapter_session import AdapterSession, LoadedAdapter
from rollout_fp8.remote.client import RemoteRollout
from rollout_fp8.remote.server import Server, Service
from rollout_fp8.wire.audit import Boxes

LORA = LoraConfig(rank=2, alpha=3.0, target_modules=("q_proj", "down_proj"))
CONFIG = Qwen3Config(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=False,
    architectures=["Qwen3ForCausalLM"],
)
# peft 0.21 asks a model by a name that transformers 5.23 replaced.
peft_asks_by_the_earlier_name = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
Q, DOWN = f"{PREFIX}model.layers.0.self_attn.q_proj", f"{PREFIX}model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(folder)
    return ModelSource(path=str(folder))


@pytest.fixture(scope="module")
def expected(model: ModelSource) -> ExpectedAdapter:
    return ExpectedAdapter.of(model, LORA)


def adapter(expected: ExpectedAdapter, seed: int = 0, **changed: Tensor) -> Adapter:
    """Return random tensors of the expected names and shapes.

    ``changed`` replaces tensors by the end of their names.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in expected.shapes.items()
    }
    return Adapter(lora=LORA, tensors=tensors | changed)


@peft_asks_by_the_earlier_name
@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (("q_proj", "down_proj"), {"q_proj", "down_proj"}),
        ("all-linear", {*"qkvo", "gate", "up", "down"}),
        (r".*\.1\.mlp\..*_proj", {"gate", "up", "down"}),
        (("layers.0.self_attn.k_proj",), {"k"}),
    ],
    ids=str,
)
def test_names_and_shapes_are_pefts_own(model: ModelSource, targets: Any, layers: set[str]) -> None:
    peft = pytest.importorskip("peft")
    lora = replace(LORA, target_modules=targets)
    whole = peft.get_peft_model(
        AutoModelForCausalLM.from_config(CONFIG), peft.LoraConfig(**_peft(lora))
    )
    want = {
        name: tuple(tensor.shape) for name, tensor in peft.get_peft_model_state_dict(whole).items()
    }
    found = ExpectedAdapter.of(model, lora)
    assert found.shapes == want
    assert set(found.layers) == {layer if "_" in layer else f"{layer}_proj" for layer in layers}


def _peft(lora: LoraConfig) -> dict[str, Any]:
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": lora.target_modules,
        "task_type": "CAUSAL_LM",
    }


def test_targets_that_fit_nothing_are_refused(model: ModelSource) -> None:
    with pytest.raises(ConfigError, match="q_prj") as caught:
        ExpectedAdapter.of(model, replace(LORA, target_modules=("q_prj", "lm_head")))
    assert caught.value.field == "engine.lora.target_modules"


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (f"{Q}.lora_A.weight", torch.zeros(2, 31), r"expected shape \[2, 32\], got \[2, 31\]"),
        (f"{DOWN}.lora_B.weight", torch.full((32, 2), float("inf")), "not finite"),
        (f"{Q}.lora_A.wieght", torch.zeros(2, 32), "no such layer"),
        (f"{Q}.lora_B.weight", None, "missing"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    expected: ExpectedAdapter, name: str, tensor: Tensor | None, said: str
) -> None:
    given = dict(adapter(expected).tensors)
    given |= {} if tensor is None else {name: tensor}
    if tensor is None:
        del given[name]
    expected.check(adapter(expected))
    with pytest.raises(RolloutError, match=rf"(?s){name}: .*{said}"):
        expected.check(Adapter(lora=LORA, tensors=given))


@peft_asks_by_the_earlier_name
def test_the_folder_is_pefts_whole_and_gone_afterwards(
    expected: ExpectedAdapter, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(adapters, "SHARED_MEMORY", tmp_path)
    one = adapter(expected)
    with folder_of(one) as folder:
        assert folder.parent.parent == tmp_path
        assert {file.name for file in folder.iterdir()} == {
            "adapter_model.safetensors",
            "adapter_config.json",
        }
        # Nothing half-written is left.
        assert [child.name for child in folder.parent.iterdir()] == [folder.name]
        again = read_folder(folder, one.checksums())
        peft = pytest.importorskip("peft")
        loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_config(CONFIG), folder)
        found = peft.get_peft_model_state_dict(loaded)
    assert not list(tmp_path.iterdir())
    assert (again.lora.rank, again.lora.alpha, again.checksums()) == (
        LORA.rank,
        LORA.alpha,
        one.checksums(),
    )
    for name, tensor in one.tensors.items():
        assert torch.equal(again.tensors[name], tensor)
        assert torch.equal(found[name], tensor)
    with pytest.raises(ValueError, match="half way"), folder_of(one):
        raise ValueError("half way")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_or_read_is_a_typed_error(
    expected: ExpectedAdapter, tmp_path: Path, monkeypatch
) -> None:
    with pytest.raises(RolloutError, match="holds no adapter"):
        read_folder(tmp_path, {})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 1}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(RolloutError, match="holds no adapter"):
        read_folder(tmp_path, {})

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(adapters, "SHARED_MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(adapters, "save_file", full)
    with pytest.raises(RolloutError, match="no space left"), folder_of(adapter(expected)):
        raise AssertionError("there is no folder")
    assert not list((tmp_path / "memory").iterdir())


# --- syncs ---------------------------------------------------------------------------------------


class Keeper:
    """Workers that hold what they read, with defects on demand. Base weights are only counted."""

    def __init__(self) -> None:
        self.folders: list[bool] = []
        self.spoil: Callable[[dict[str, int]], LoadedAdapter] | None = None

    def learn(self, plan: Any) -> Sequence[Boxes]:
        return [[(name, None) for name in plan.tensors]]

    def sync(self, stream: Any) -> Sequence[tuple[Sequence[int], dict[str, float]]]:
        for _ in stream.buckets():
            pass
        return [([], {"install": 1.0})]

    def load_adapter(self, folder: Path, *, audit: bool) -> Sequence[LoadedAdapter]:
        read = read_folder(folder, {})
        self.folders.append(folder.exists())
        sums = Adapter(lora=read.lora, tensors=read.tensors).checksums() if audit else {}
        return [self.spoil(dict(sums)) if self.spoil else LoadedAdapter(sums=sums)]


@pytest.fixture
def engine(expected: ExpectedAdapter) -> Lora:
    return Lora({"model.norm.weight": torch.ones(32)}, adapter(expected).tensors)


@pytest.fixture
def exporter(model: ModelSource) -> Exporter:
    return Exporter(resolution=RESOLUTION, model=model, dtype="bfloat16", lora=LORA)


def test_base_weights_are_sent_once_and_after_they_were_lost(
    engine: Lora, exporter: Exporter, expected: ExpectedAdapter
) -> None:
    session = AdapterSession(Keeper(), expected, audit=True)
    own = sum(2 * tensor.numel() for tensor in engine.adapter.values())
    results = [session.run(exporter.export(engine), version) for version in range(2)]
    session.forget_weights()
    results.append(session.run(exporter.export(engine), 2))
    assert [r.num_bytes for r in results] == [64 + own, own, 64 + own]
    assert [r.num_tensors for r in results] == [9, 8, 9]
    assert results[1].audited
    assert {"gather", "transfer", "install", "audit"} <= results[1].seconds.keys()
    assert engine.asked == [
        *("only", "base", "base"),  # the plan, and the weights
        "only",
        *("only", "base"),
    ]


def test_a_bad_adapter_does_not_cost_the_base_weights(
    engine: Lora, exporter: Exporter, expected: ExpectedAdapter
) -> None:
    session, good = AdapterSession(Keeper(), expected, audit=True), dict(engine.adapter)
    session.run(exporter.export(engine), 0)
    engine.adapter = {name: tensor * float("nan") for name, tensor in good.items()}
    with pytest.raises(RolloutError, match="8 tensor"):
        session.run(exporter.export(engine), 1)
    engine.adapter = good
    assert session.run(exporter.export(engine), 2).num_tensors == 8


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda sums: LoadedAdapter(error="ValueError: rank 2 is too large"),
            "rank 2 is too large",
        ),
        (lambda sums: LoadedAdapter(sums=sums | {f"{Q}.lora_B.weight": 1}), f"{Q}.lora_B.weight"),
        (
            lambda sums: LoadedAdapter(sums={n: s for n, s in sums.items() if "down" not in n}),
            f"{PREFIX}model.layers.0.mlp.down_proj",
        ),
        (lambda sums: LoadedAdapter(sums=sums | {"another": 1}), "another"),
        (
            lambda sums: LoadedAdapter(sums=sums, wrong=["model.layers.0.self_attn.qkv_proj"]),
            "qkv_proj",
        ),
    ],
    ids=["error", "other", "absent", "more", "kernels"],
)
def test_what_workers_hold_otherwise_is_named(
    engine: Lora,
    exporter: Exporter,
    expected: ExpectedAdapter,
    spoil: Callable[[dict[str, int]], LoadedAdapter],
    said: str,
) -> None:
    keeper = Keeper()
    keeper.spoil = spoil
    with pytest.raises(RolloutError, match=said):
        AdapterSession(keeper, expected, audit=True).run(exporter.export(engine), 0)
    assert keeper.folders == [True]


def test_the_factor_is_multiplied_into_b_as_servers_do() -> None:
    a, b = torch.randn(2, 4).bfloat16(), torch.randn(6, 2).bfloat16()
    one = Adapter(lora=LORA, tensors={"x.lora_A.weight": a, "x.lora_B.weight": b})
    assert one.checksums() == {
        "x.lora_A.weight": whole_checksum(a),
        "x.lora_B.weight": whole_checksum(b * 1.5),
    }


def test_an_engine_without_adapters_is_refused(engine: Lora, exporter: Exporter) -> None:
    engine.capabilities = frozenset({"export-shards"})
    with pytest.raises(UnsupportedCapability, match="lora"):
        exporter.export(engine)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_agree_whether_base_weights_are_sent_and_all_take_part(tmp_path: Path) -> None:
    mp.spawn(share_adapter, args=(2, str(tmp_path)), nprocs=2)


# --- a server on this host -----------------------------------------------------------------------


class Hosted:
    """Rollout that serves an adapter, without a model."""

    weight_version = -1

    def __init__(self, expected: ExpectedAdapter) -> None:
        self.session = AdapterSession(Keeper(), expected, audit=True)

    def update_weights(self, export: Any, version: int) -> SyncResult:
        result = self.session.run(export, version)
        self.weight_version = version
        return result

    def sleep(self, **_: bool) -> None:
        self.session.forget_weights()

    def close(self) -> None:
        pass


@pytest.fixture
def remote(expected: ExpectedAdapter) -> Iterator[tuple[Hosted, RemoteRollout]]:
    hosted: Any = Hosted(expected)
    with Server(
        ("127.0.0.1", 0), Service(hosted, "cpu", name="hosted", arguments={"lora": asdict(LORA)})
    ) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        made = RemoteRollout(name="hosted", device="cpu", arguments={"lora": LORA}, url=server.url)
        yield hosted, made
        made.close()
        server.shutdown()
        thread.join()


@pytest.mark.distributed
def test_a_server_reads_the_folder_and_gets_base_weights_when_it_lacks_them(
    remote: tuple[Hosted, RemoteRollout], engine: Lora, exporter: Exporter
) -> None:
    hosted, made = remote
    said = [
        made.update_weights(exporter.export(engine), version).num_tensors for version in range(2)
    ]
    made.sleep()
    said.append(made.update_weights(exporter.export(engine), 2).num_tensors)
    assert said == [9, 8, 9]
    hosted.session.forget_weights()  # another client's doing
    with pytest.raises(RolloutError, match="no base weights"):
        made.update_weights(exporter.export(engine), 3)
    result = made.update_weights(exporter.export(engine), 3)
    assert (result.num_tensors, hosted.weight_version, made.weight_version) == (9, 3, 3)
    assert not list(adapters.SHARED_MEMORY.glob("rollout-adapter-*"))


@pytest.mark.distributed
def test_a_server_elsewhere_is_refused(
    remote: tuple[Hosted, RemoteRollout], engine: Lora, exporter: Exporter
) -> None:
    _, made = remote
    made._server.host = "10.0.0.1"
    with pytest.raises(ConfigError, match="another host"):
        made.update_weights(exporter.export(engine), 0)
