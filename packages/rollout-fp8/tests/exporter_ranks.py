"""Functions that the ranks of test_exporter.py run, in a module that spawned processes import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from served_model import checkpoint
from torch import Tensor

from engine_api.capabilities import Capability
from engine_api.config import LoraConfig, ModelSource
from engine_api.errors import RankFailure, RolloutError
from engine_api.registry import Resolution
from engine_api.weights import ShardSpec
from rollout_fp8.export.exporter import Exporter
from rollout_fp8.fp8.quantize import quantize
from rollout_fp8.wire.checksum import checksum

Layout = Literal["rows", "copies", "experts"]
CONFIG = '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}'
RESOLUTION = Resolution(plugin=None, row=None, device="cpu", source="", trace=())  # type: ignore[arg-type] - only the device is read


class Shards:
    """Engine that holds rows of every weight, whole copies, or each weight on one rank."""

    capabilities = frozenset({Capability.EXPORT_SHARDS})

    def __init__(
        self, weights: dict[str, Tensor], rank: int, world: int, layout: Layout = "rows"
    ) -> None:
        self.weights, self.rank, self.world, self.layout = weights, rank, world, layout

    def get_per_tensor_param_shard(self) -> Iterator[tuple[str, Tensor, ShardSpec]]:
        for index, (name, whole) in enumerate(self.weights.items()):
            if self.layout == "copies":
                yield name, whole, ShardSpec.whole(whole.shape, replica=self.rank)
                continue
            if self.layout == "experts":
                # The first half on rank 0, and so on: each rank reads far ahead of the others.
                holder = index * self.world // len(self.weights)
                empty = whole.new_empty((0, *whole.shape[1:])), ShardSpec.nothing(whole.shape)
                yield (
                    name,
                    *((whole, ShardSpec.whole(whole.shape)) if holder == self.rank else empty),
                )
                continue
            size = -(-len(whole) // self.world)
            rows = whole[self.rank * size : (self.rank + 1) * size]
            offset = (
                min(self.rank * size, len(whole)) if len(rows) else 0,
                *[0] * (whole.dim() - 1),
            )
            yield (
                name,
                rows,
                ShardSpec(global_shape=tuple(whole.shape), offset=offset, shape=tuple(rows.shape)),
            )


def exporter(folder: Path, quantization: str, **kwargs) -> Exporter:
    (folder / "config.json").write_text(CONFIG)
    return Exporter(
        resolution=RESOLUTION,
        model=ModelSource(path=str(folder)),
        dtype="bfloat16",
        quantization=quantization,
        **kwargs,
    )


def run(rank: int, world: int, folder: str, settings: list[tuple[str, Layout, str]]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    home = Path(folder, str(rank))
    home.mkdir()
    for quantization, layout, scales in settings:
        compare(rank, world, home, quantization, layout, scales)
    dist.destroy_process_group()


def compare(
    rank: int, world: int, home: Path, quantization: str, layout: Layout, scales: str
) -> None:
    export = exporter(home, quantization, bucket_bytes=200_000, options={"scales": scales})
    for version in range(2):
        weights = checkpoint(version)
        # Five elements on each of two ranks are no whole number of 32-bit words in bfloat16.
        if quantization == "none":
            weights["model.norm.bias"] = torch.arange(10.0) + version
        stream = export.export(Shards(weights, rank, world, layout))
        got = {name: tensor.clone() for name, tensor in stream}
        want: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if quantization == "fp8" and "_proj" in name:
                want[name], want[name + "_scale_inv"] = quantize(tensor, scales=scales)
            else:
                want[name] = tensor.bfloat16()
        assert got.keys() == want.keys() == stream.plan.tensors.keys()
        sums = stream.checksums()
        for name, tensor in want.items():
            assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), (
                rank,
                version,
                name,
            )
            assert sums[name] == checksum(tensor, ShardSpec.whole(tensor.shape)) % (1 << 64), name
    if quantization == "fp8" and layout == "rows":
        # 384 rows on two ranks end in the middle of a block, 256 and 512 do not.
        late = {name for name in stream.plan.notes if "down_proj" not in name}
        assert late == (
            {n for n in weights if "gate_proj" in n or "up_proj" in n} if world == 2 else late
        )
        assert not any("o_proj" in name for name in stream.plan.notes) or world != 2


def poisoned(rank: int, world: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    home = Path(folder, str(rank))
    home.mkdir()
    weights = checkpoint(0)
    if rank == 1:
        # The NaN is in this rank's rows only.
        weights["model.layers.1.self_attn.o_proj.weight"][200, 3] = float("nan")
    stream = exporter(home, "fp8").export(Shards(weights, rank, world))
    for _ in stream:
        pass
    with pytest.raises(
        RolloutError, match=r"not finite: model\.layers\.1\.self_attn\.o_proj\.weight"
    ):
        stream.checksums()
    dist.destroy_process_group()


class Lora:
    """Engine of an adapter over base weights on every rank, which records the exports begun."""

    capabilities = frozenset({Capability.EXPORT_SHARDS, Capability.LORA})

    def __init__(
        self, base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], rank: int = 0
    ) -> None:
        self.base, self.adapter, self.rank = dict(base), dict(adapter), rank
        self.asked: list[str] = []

    def get_per_tensor_param(
        self, *, dtype: torch.dtype, adapter: str
    ) -> Iterator[tuple[str, Tensor]]:
        self.asked.append(adapter)
        for name, tensor in self.adapter.items():
            if dist.is_initialized():
                dist.barrier()  # whole tensors are gathered
            yield name, tensor.to(dtype)

    def get_per_tensor_param_shard(
        self, *, adapter: str
    ) -> Iterator[tuple[str, Tensor, ShardSpec]]:
        self.asked.append(adapter)
        for name, tensor in self.base.items():
            yield name, tensor, ShardSpec.whole(tensor.shape, replica=self.rank)


def share_adapter(rank: int, world: int, folder: str) -> None:
    """Run rank 0 as a server and the other without one.

    With the base weights, without them, and after an adapter that was read in part.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    home = Path(folder, str(rank))
    home.mkdir()
    engine = Lora(
        {"model.norm.weight": torch.ones(4)}, {"a": torch.ones(2), "b": torch.ones(3)}, rank
    )
    export = exporter(home, "none", lora=LoraConfig(rank=1))
    for needed, half in ((True, False), (False, False), (False, True)):
        stream = export.export(engine)
        before = len(engine.asked)
        if rank == 0 and half:
            next(iter(stream))
        elif rank == 0:
            assert list(stream.adapter().tensors) == ["a", "b"]
            base = stream.base(needed=needed)
            assert (base is None) != needed
        left = [name for name, _ in stream]
        assert ("model.norm.weight" in left) == needed
        assert engine.asked[before:] == ["only", *(["base", "base"] if needed else [])]
    dist.destroy_process_group()


class Listed(Shards):
    """Engine of which one rank lists its tensors differently than the others."""

    def __init__(self, what: str, rank: int, world: int) -> None:
        super().__init__(checkpoint(0), rank, world)
        names = list(self.weights)
        if rank != 1:
            return
        if what == "missing":
            self.weights.pop(LAST)
        elif what == "extra":
            self.weights["extra.weight"] = torch.zeros(256, 256)
        elif what == "swapped":
            other = {KEYS: VALUES, VALUES: KEYS}
            self.weights = {other.get(name, name): self.weights[name] for name in names}
        elif what == "dtype":
            self.weights[KEYS] = self.weights[KEYS].bfloat16()
        elif what == "shape":
            self.weights[KEYS] = torch.zeros(
                2 * len(self.weights[KEYS]), self.weights[KEYS].shape[1]
            )
        else:
            self.weights[KEYS] = None  # type: ignore[assignment] - the engine's own failure


LAST = "lm_head.weight"
KEYS, VALUES = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "kv")
DIFFERENT = {  # what rank 1 does otherwise: what every rank's error says
    "missing": rf"rank 0 exports {LAST} .* where rank 1 exports nothing",
    "extra": r"rank 0 exports nothing where rank 1 exports extra\.weight",
    "swapped": f"rank 0 exports {KEYS} .* where rank 1 exports {VALUES}",
    "dtype": rf"rank 0 exports {KEYS} \(float32.* where rank 1 exports {KEYS} \(bfloat16",
    "shape": rf"rank 0 exports {KEYS} .* where rank 1 exports {KEYS}",
}


def different(rank: int, world: int, folder: str) -> None:
    """Check that every rank raises at once and that the next collective is whole again."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )
    home = Path(folder, str(rank))
    home.mkdir()
    for what, message in DIFFERENT.items():
        with pytest.raises(RolloutError, match=message):
            exporter(home, "none").export(Listed(what, rank, world))
    with pytest.raises(TypeError if rank == 1 else RankFailure, match="NoneType"):
        exporter(home, "none").export(Listed("failure", rank, world))
    assert len(list(exporter(home, "none").export(Shards(checkpoint(0), rank, world)))) == len(
        checkpoint(0)
    )
    dist.destroy_process_group()


class Failing(Shards):
    """Engine whose rank 1 exports one tensor wrongly, or raises there."""

    def __init__(self, what: str, name: str, rank: int, world: int) -> None:
        super().__init__(checkpoint(0), rank, world)
        self.what, self.name = what, name

    def get_per_tensor_param_shard(self) -> Iterator[tuple[str, Tensor, ShardSpec]]:
        for name, shard, spec in super().get_per_tensor_param_shard():
            if self.rank != 1 or name != self.name:
                yield name, shard, spec
            elif self.what == "dtype":
                yield name, shard.bfloat16(), spec
            elif self.what == "layout":
                # These rows lie apart.
                yield (
                    name,
                    torch.cat([shard, shard], 1)[:, : shard.shape[1]],
                    spec,
                )
            else:
                raise MemoryError("no memory on rank 1")


def failing(rank: int, world: int, folder: str) -> None:
    """Fail on one rank at three places of a sync.

    In its first data, in a later bucket, and in a tensor that is gathered before it is quantized.
    """
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )
    home = Path(folder, str(rank))
    home.mkdir()
    export = exporter(home, "fp8", bucket_bytes=200_000)
    # See `compare`: its rows on two ranks end within a block.
    late = "model.layers.1.mlp.up_proj.weight"
    good = {
        name: tensor.clone() for name, tensor in export.export(Shards(checkpoint(0), rank, world))
    }
    for what, name in (
        ("dtype", KEYS),
        ("dtype", late),
        ("layout", KEYS),
        ("raises", KEYS),
        ("raises", late),
    ):
        stream = export.export(Failing(what, name, rank, world))
        if rank == 1:
            with pytest.raises(
                MemoryError if what == "raises" else RolloutError, match=r"rank 1|first sync"
            ):
                list(stream)
        else:
            list(stream)
            with pytest.raises(RolloutError, match="failed on rank 1"):
                stream.checksums()
        again = export.export(Shards(checkpoint(0), rank, world))
        for key, tensor in again:
            assert torch.equal(tensor.view(torch.uint8), good[key].view(torch.uint8)), (what, key)
        again.checksums()
    dist.destroy_process_group()
