"""torchtitan as a library of models and meshes: its import, its names, and its global variables.

Only this module imports torchtitan. Its trainer is never imported, nor is anything called that sets
up logging, process groups or autograd for the whole process.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import fsdp

__all__ = [
    "SPMD_BACKEND",
    "AllToAllTokenDispatcher",
    "BaseAttention",
    "CosSinRoPE",
    "Decoder",
    "DeepSeekV3Model",
    "DeepSeekV3StateDictAdapter",
    "DeepSeekV3TransformerBlock",
    "Embedding",
    "FeedForward",
    "GptOssAttention",
    "GptOssGroupedExperts",
    "GptOssModel",
    "GptOssStateDictAdapter",
    "GptOssTransformerBlock",
    "GroupedExperts",
    "Hold",
    "LatentAttention",
    "Linear",
    "Llama3Model",
    "Llama3StateDictAdapter",
    "Llama3TransformerBlock",
    "MoE",
    "Module",
    "ParallelDims",
    "QKVLinear",
    "Qwen3Model",
    "Qwen3StateDictAdapter",
    "Qwen3TransformerBlock",
    "RMSNorm",
    "RoPE",
    "RoutedExperts",
    "ScaleBiasForward",
    "ShardingConfig",
    "StateDictAdapter",
    "TokenChoiceTopKRouter",
    "TransformerBlock",
    "building_meshes_for",
    "load_float8_linear",
    "make_ffn_config",
    "make_gqa_config",
    "rowwise_config",
    "set_deepseek_v3_sharding_config",
    "set_gpt_oss_sharding_config",
    "set_llama3_sharding_config",
    "set_qwen3_sharding_config",
]

_MESH_DIMS = "DataParallelMeshDims"
_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
_KERNEL_NAMES = (
    "copy_full_counts_to_peers_kernel",
    "copy_rows_to_peers_kernel",
    "expand_topk_grad_kernel",
    "fill_combine_metadata_kernel",
    "fill_dispatch_metadata_kernel",
    "invert_flat_indices_kernel",
    "reduce_topk_slots_kernel",
    "topk_scores_grad_kernel",
)


def _refuse_kernel(*_: Any, **__: Any) -> None:
    """Raise ``ModuleNotFoundError``, in the place of a kernel that is written in Triton."""
    raise ModuleNotFoundError("this exchange of experts needs triton", name="triton")


@contextmanager
def _without_triton() -> Iterator[None]:
    """Let torchtitan be imported inside the block where Triton is not installed.

    All of its models import one exchange of experts between GPUs that is written in Triton, which
    torch for a CPU does not bring. This engine does not use it.
    """
    if importlib.util.find_spec("triton") is not None or _KERNELS in sys.modules:
        yield
        return
    stand_in = types.ModuleType(_KERNELS)
    vars(stand_in).update(dict.fromkeys(_KERNEL_NAMES, _refuse_kernel))
    sys.modules[_KERNELS] = stand_in
    try:
        yield
    finally:
        # Whoever imports it later shall learn that Triton is absent.
        del sys.modules[_KERNELS]


class _AbsentMeshDims:
    """A class that torch has from 2.13 on, in whose place it is imported beside an older one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError(
            "torch.distributed.fsdp.DataParallelMeshDims, which this backend of torchtitan uses, "
            "came with torch 2.13"
        )


@contextmanager
def _without_mesh_dims() -> Iterator[None]:
    """Let torchtitan be imported inside the block beside a torch before 2.13.

    All of its models import the class with which its other SPMD backends name the dimensions of a
    mesh to ``fully_shard``. ``partial_dtensor`` makes no such object.
    """
    if hasattr(fsdp, _MESH_DIMS):
        yield
        return
    setattr(fsdp, _MESH_DIMS, _AbsentMeshDims)
    try:
        yield
    finally:
        # Other libraries ask by this name whether torch has the class.
        delattr(fsdp, _MESH_DIMS)


@contextmanager
def _contain_patches() -> Iterator[None]:
    """Undo what torchtitan changes in torch when it is imported inside the block.

    It keeps dynamo from tracing a constructor, which its own compilation of whole models needs.
    """
    mode: Any = FakeTensorMode
    constructor = mode.__init__
    try:
        yield
    finally:
        mode.__init__ = constructor


with _without_triton(), _without_mesh_dims(), _contain_patches():
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import BaseAttention, QKVLinear
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.common.decoder import Decoder, TransformerBlock
    from torchtitan.models.common.decoder_sharding import rowwise_config
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.moe import (
        GroupedExperts,
        MoE,
        RoutedExperts,
        TokenChoiceTopKRouter,
    )
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.rope import RoPE
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
    from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
    from torchtitan.models.deepseek_v3.model import DeepSeekV3Model, DeepSeekV3TransformerBlock
    from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config
    from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
    from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
    from torchtitan.models.gpt_oss.model import GptOssModel, GptOssTransformerBlock
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward
    from torchtitan.models.gpt_oss.sharding import set_gpt_oss_sharding_config
    from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
    from torchtitan.protocols.module import Module
    from torchtitan.protocols.sharding import ShardingConfig
    from torchtitan.protocols.state_dict_adapter import StateDictAdapter

# torchtitan's default, spmd_types, fails in fully_shard of torch 2.13. Its full_dtensor loses the
# gradient of keys and values under context parallelism, because local_map of torch 2.13 drops the
# gradient of a DTensor that was redistributed with async_op=True.
SPMD_BACKEND = "partial_dtensor"


class Hold:
    """The use of torchtitan by one engine, from its start to its end.

    torchtitan keeps the name of its SPMD backend in a global variable, which its modules read while
    they run. The first engine of a process sets it, and the last one restores it. Everything else
    that depends on a layout is in objects of the engine, so that engines of different layouts can
    live in one process.
    """

    _count = 0
    _before = ""

    def __init__(self) -> None:
        if not Hold._count:
            Hold._before = get_spmd_backend()
            set_spmd_backend(SPMD_BACKEND)
        Hold._count += 1
        self._open = True

    def release(self) -> None:
        """End the use.

        A second call does nothing.
        """
        if not self._open:
            return
        self._open = False
        Hold._count -= 1
        if not Hold._count:
            set_spmd_backend(Hold._before)


@contextmanager
def building_meshes_for(device_type: str) -> Iterator[None]:
    """Let torchtitan build meshes of a kind of device inside the block.

    It takes the first kind that the process finds, and ``cuda`` where there is none.
    """
    before = parallel_dims.device_type
    parallel_dims.device_type = device_type
    try:
        yield
    finally:
        parallel_dims.device_type = before


def load_float8_linear() -> Any:
    """Return torchtitan's linear layer in FP8, which needs torchao."""
    from torchtitan.components.quantization.float8 import Float8Linear

    if Float8Linear is None:
        raise ModuleNotFoundError("torchtitan's linear layer in FP8 needs torchao", name="torchao")
    return Float8Linear
