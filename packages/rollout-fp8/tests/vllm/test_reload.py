"""Reloads in which a model copies into its parameters itself, or makes kernels of experts."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from engine_api.errors import RolloutError
from rollout_fp8.export.exporter import collect_export
from rollout_fp8.install.receiver import Receiver
from rollout_fp8.phases import Phases
from rollout_fp8.vllm import private
from rollout_fp8.vllm.private import ReloadByCopies, name_loaders
from rollout_fp8.vllm.worker import SyncExtension


class Layer(torch.nn.Module):
    """A layer with a parameter that a loader fills, and a parameter and a buffer without one."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.copied = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.register_buffer("scale", torch.zeros(1))


def reload(model: Any, load: Any) -> None:
    """Let ``load`` fill a model while it is reloaded."""
    with torch.no_grad(), ReloadByCopies(model):
        layerwise.initialize_layerwise_reload(model)
        load(model)
        config: Any = SimpleNamespace(dtype=torch.float32)
        layerwise.finalize_layerwise_processing(model, config)


@pytest.fixture
def model() -> Any:
    made = torch.nn.Sequential(Layer())
    layerwise.record_metadata_for_reloading(made)
    return made


def test_copies_without_a_loader_are_in_the_parameters_afterwards(model: Any) -> None:
    def load(model: Any) -> None:
        layer = model[0]
        layer.loaded.weight_loader(layer.loaded, torch.arange(3.0))
        layer.copied.data.copy_(torch.arange(16.0).view(4, 4))
        layer.scale.copy_(torch.tensor([2.5]))

    before = model[0].copied
    for _ in range(2):
        reload(model, load)
        assert torch.equal(model[0].loaded, torch.arange(3.0))
        assert torch.equal(model[0].copied, torch.arange(16.0).view(4, 4))
        assert model[0].scale == 2.5
        assert model[0].copied.data_ptr() == before.data_ptr()


@pytest.mark.parametrize(
    "part", [lambda weight: weight.t(), lambda weight: weight[:2]], ids=["transposed", "rows"]
)
def test_a_copy_into_a_part_is_refused_by_name(model: Any, part: Any) -> None:
    def load(model: Any) -> None:
        target = part(model[0].copied.data)
        target.copy_(torch.ones(target.shape))

    with pytest.raises(RolloutError, match="Layer copies into a part of its copied"):
        reload(model, load)


def test_partial_functions_among_the_loaders_have_a_name(model: Any) -> None:
    model[0].loaded.weight_loader = functools.partial(default_weight_loader)
    layerwise.record_metadata_for_reloading(model)
    name_loaders(model)
    reload(model, lambda model: model[0].loaded.weight_loader(model[0].loaded, torch.ones(3)))
    assert torch.equal(model[0].loaded, torch.ones(3))


EXPERTS, WIDTH, INNER = 2, 256, 128
PARTS = {"gate_proj": ("w13", 0), "up_proj": ("w13", 1), "down_proj": ("w2", 0)}


class Experts(torch.nn.Module):
    """Experts with vLLM's own parameters, scales and kernel for blockwise FP8."""

    w13_weight_scale_inv: Tensor
    w2_weight_scale_inv: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.moe_config = SimpleNamespace(has_bias=False, w13_num_shards=2)
        config = fp8.Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])
        method: Any = fp8.Fp8MoEMethod(config, cast("Any", self))
        method.create_weights(self, EXPERTS, WIDTH, INNER, torch.float32, weight_loader=self.load)
        self.quant_method = method

    def _expert_routing_tables(self) -> None:
        return None

    def load(self, param: Any, tensor: Tensor, part: str, expert: int) -> None:
        """Load a part of an expert, or its scales."""
        target = param.data[expert]
        if PARTS[part][0] == "w13":
            target = target.chunk(2)[PARTS[part][1]]
        target.copy_(tensor)


class Worker(SyncExtension):
    """Worker of a model of experts, whose reload is vLLM's."""

    def __init__(self, model: Any) -> None:
        self.model = model
        # The weights are on the CPU, and are served as on a GPU.
        self.device = torch.device("cuda")
        self.load = self._rollout_fp8_load
        self._rollout_fp8_aliases = {}

    def get_model(self) -> Any:
        return self.model

    def reload_weights(self, weights_iterator: Any) -> None:
        layerwise.initialize_layerwise_reload(self.model)
        for name, tensor in weights_iterator:
            *_, expert, part, leaf = name.split(".")
            (layer,) = self.model
            parameter = getattr(layer, f"{PARTS[part][0]}_{leaf}")
            parameter.weight_loader(parameter, tensor, part, int(expert))
        config: Any = SimpleNamespace(dtype=torch.float32)
        layerwise.finalize_layerwise_processing(self.model, config)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make_kernel(**arguments: Any) -> Any:
        experts = SimpleNamespace(quant_config=arguments["moe_quant_config"])
        return SimpleNamespace(fused_experts=experts)

    # Kernels that only a GPU runs.
    chosen = Fp8MoeBackend.TRITON, object
    monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda **_: chosen)
    monkeypatch.setattr(fp8, "make_fp8_moe_kernel", make_kernel)
    # Since 0.32.
    resolve = "resolve_fp8_moe_weight_block_shape"
    monkeypatch.setattr(fp8, resolve, lambda moe, shape, *_: (shape, None), raising=False)
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0))
    made = torch.nn.Sequential(Experts())
    layerwise.record_metadata_for_reloading(made)
    made[0].quant_method.process_weights_after_loading(made[0])
    return made


def draw_experts(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
    weights = {
        f"model.layers.0.mlp.experts.{expert}.{part}.weight": torch.randn(
            shape, generator=generator
        )
        for expert in range(EXPERTS)
        for part, shape in shapes.items()
    }
    return collect_export(
        iter(weights.items()),
        device=torch.device("cpu"),
        dtype=torch.float32,
        architecture="Qwen3MoeForCausalLM",
        scales="fp32",
        audit=True,
    )


def test_the_kernel_of_experts_reads_the_scales_of_each_sync(served: Any) -> None:
    (experts,) = served
    first = draw_experts(0)
    receiver = Receiver(served, first.plan, Worker(served).load)
    for stream in (first, draw_experts(1)):
        before = experts.w13_weight_scale_inv.clone(), experts.w2_weight_scale_inv.clone()
        receiver.sync(stream, Phases(torch.device("cpu")))
        method = experts.quant_method
        for config in (method.moe_quant_config, method.moe_kernel.fused_experts.quant_config):
            assert config.w1_scale.data_ptr() == experts.w13_weight_scale_inv.data_ptr()
            assert config.w2_scale.data_ptr() == experts.w2_weight_scale_inv.data_ptr()
            assert not torch.equal(config.w1_scale, before[0])
            assert not torch.equal(config.w2_scale, before[1])


def test_a_kernel_with_scales_of_its_own_is_refused_by_name(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "kept_expert_kernels", lambda model: nullcontext())
    stream = draw_experts(0)
    refusal = r"(?s)keeps copies of its weights.*w13_weight_scale_inv"
    with pytest.raises(RolloutError, match=refusal):
        Receiver(served, stream.plan, Worker(served).load)


def test_a_reload_that_fails_leaves_the_kernels_of_experts(served: Any) -> None:
    (experts,) = served
    kernel = experts.quant_method.moe_kernel
    with pytest.raises(KeyError):
        Worker(served).load(
            [
                *((name, tensor.clone()) for name, tensor in draw_experts(0)),
                ("model.layers.0.mlp.experts.0.other_proj.weight", torch.zeros(1)),
            ]
        )
    assert experts.quant_method.moe_kernel is kernel
    assert kernel.fused_experts.quant_config.w1_scale is experts.w13_weight_scale_inv
