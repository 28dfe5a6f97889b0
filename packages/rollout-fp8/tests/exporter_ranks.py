"""What the ranks of test_exporter.py run: a module of its own, which a spawned process can import."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from served_model import checkpoint
from torch import Tensor

from engine_api.capabilities import Capability
from engine_api.config import ModelSource
from engine_api.errors import RolloutError
from engine_api.registry import Resolution
from engine_api.weights import ShardSpec
from rollout_fp8.checksum import checksum
from rollout_fp8.exporter import Exporter
from rollout_fp8.quantize import quantize

CONFIG = '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}'
RESOLUTION = Resolution(plugin=None, row=None, device="cpu", source="", trace=())  # type: ignore[arg-type] - only the device is read


class Shards:
    """An engine that holds rows of every weight, or whole copies on every second rank."""

    capabilities = frozenset({Capability.EXPORT_SHARDS})

    def __init__(self, weights: dict[str, Tensor], rank: int, world: int, *, copies: bool = False) -> None:
        self.weights, self.rank, self.world, self.copies = weights, rank, world, copies

    def get_per_tensor_param_shard(self) -> Iterator[tuple[str, Tensor, ShardSpec]]:
        for name, whole in self.weights.items():
            if self.copies:
                yield name, whole, ShardSpec.whole(whole.shape, replica=self.rank)
                continue
            size = -(-len(whole) // self.world)
            rows = whole[self.rank * size : (self.rank + 1) * size]
            offset = (min(self.rank * size, len(whole)) if len(rows) else 0, *[0] * (whole.dim() - 1))
            yield name, rows, ShardSpec(global_shape=tuple(whole.shape), offset=offset, shape=tuple(rows.shape))


def exporter(folder: Path, quantization: str, **kwargs) -> Exporter:
    (folder / "config.json").write_text(CONFIG)
    return Exporter(
        resolution=RESOLUTION,
        model=ModelSource(path=str(folder)),
        dtype="bfloat16",
        quantization=quantization,
        **kwargs,
    )


def run(rank: int, world: int, folder: str, settings: list[tuple[str, bool, str]]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    home = Path(folder, str(rank))
    home.mkdir()
    for quantization, copies, scales in settings:
        compare(rank, world, home, quantization, copies, scales)
    dist.destroy_process_group()


def compare(rank: int, world: int, home: Path, quantization: str, copies: bool, scales: str) -> None:
    export = exporter(home, quantization, bucket_bytes=200_000, options={"scales": scales})
    for version in range(2):
        weights = checkpoint(version)
        stream = export.export(Shards(weights, rank, world, copies=copies))
        got = {name: tensor.clone() for name, tensor in stream}
        want: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if quantization == "fp8" and "_proj" in name:
                want[name], want[name + "_scale_inv"] = quantize(tensor, scales=scales)
            else:
                want[name] = tensor.bfloat16()
        assert list(got) == list(stream.plan.tensors)
        assert got.keys() == want.keys()
        sums = stream.checksums()
        for name, tensor in want.items():
            assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), (rank, version, name)
            assert sums[name] == checksum(tensor, ShardSpec.whole(tensor.shape)) % (1 << 64), name
    if quantization == "fp8" and not copies:
        # 384 rows on two ranks end in the middle of a block, 256 and 512 do not.
        late = {name for name in stream.plan.notes if "down_proj" not in name}
        assert late == ({n for n in weights if "gate_proj" in n or "up_proj" in n} if world == 2 else late)
        assert not any("o_proj" in name for name in stream.plan.notes) or world != 2


def poisoned(rank: int, world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    home = Path(folder, str(rank))
    home.mkdir()
    weights = checkpoint(0)
    if rank == 1:
        weights["model.layers.1.self_attn.o_proj.weight"][200, 3] = float("nan")  # in this rank's rows only
    stream = exporter(home, "fp8").export(Shards(weights, rank, world))
    for _ in stream:
        pass
    with pytest.raises(RolloutError, match=r"not finite: model\.layers\.1\.self_attn\.o_proj\.weight"):
        stream.checksums()
    dist.destroy_process_group()
