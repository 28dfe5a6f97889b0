"""Small server's model with fused parameters and its own loaders, under tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCAB = 256, 384, 4, 2, 128, 300


# Of config.json: Hugging Face's model of these names and shapes.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
}


def checkpoint_shapes(layers: int = 2, experts: int = 0) -> dict[str, tuple[int, ...]]:
    """Return names and shapes as Hugging Face has them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
        }
        for mlp in (
            [f"{at}.mlp"] if not experts else [f"{at}.mlp.experts.{e}" for e in range(experts)]
        ):
            shapes |= {
                f"{mlp}.gate_proj.weight": (INNER, HIDDEN),
                f"{mlp}.up_proj.weight": (INNER, HIDDEN),
                f"{mlp}.down_proj.weight": (HIDDEN, INNER),
            }
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def checkpoint(seed: int, dtype: torch.dtype = torch.float32, **kwargs: int) -> dict[str, Tensor]:
    """Return random weights of those names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in checkpoint_shapes(**kwargs).items()
    }


class ServedModel(nn.Module):
    """Model whose ``load_weights`` keeps this tensor-parallel rank's part of checkpoint tensors.

    It does so like vLLM and SGLang.

    ``fp8``: projections are e4m3 with block scales. ``packs``: a rank's own order of gate and up,
    as some kernels want.
    """

    def __init__(
        self,
        *,
        tp: int = 1,
        rank: int = 0,
        fp8: bool = False,
        dtype: torch.dtype = torch.float32,
        layers: int = 2,
        packs: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.rank, self.fp8, self.dtype, self.packs = tp, rank, fp8, dtype, packs
        self.names: dict[str, nn.Parameter] = {}
        padded = -(-VOCAB // 64) * 64
        self._add("model.embed_tokens.weight", (padded, HIDDEN))
        for i in range(layers):
            at = f"model.layers.{i}"
            self._linear(f"{at}.self_attn.qkv_proj", (HEADS + 2 * KV_HEADS) * HEAD // tp, HIDDEN)
            self._linear(f"{at}.self_attn.o_proj", HIDDEN, HEADS * HEAD // tp)
            self._linear(f"{at}.mlp.gate_up_proj", 2 * INNER // tp, HIDDEN)
            self._linear(f"{at}.mlp.down_proj", HIDDEN, INNER // tp)
            self._add(f"{at}.input_layernorm.weight", (HIDDEN,))
            self._add(f"{at}.post_attention_layernorm.weight", (HIDDEN,))
        self._add("model.norm.weight", (HIDDEN,))
        self._add("lm_head.weight", (padded, HIDDEN))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load checkpoint tensors as the server does."""
        for name, tensor in weights:
            self._load(name, tensor)
        if self.packs:
            for name, parameter in self.names.items():
                if "gate_up_proj" in name:
                    half = len(parameter) // 2
                    parameter.data.copy_(parameter.data.roll(half, 0))

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype or self.dtype), requires_grad=False)
        self.names[name] = parameter
        module: nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, parameter)

    def _linear(self, name: str, rows: int, columns: int) -> None:
        self._add(f"{name}.weight", (rows, columns), torch.float8_e4m3fn if self.fp8 else None)
        if self.fp8:
            self._add(
                f"{name}.weight_scale_inv", (-(-rows // 128), -(-columns // 128)), torch.float32
            )

    def _load(self, name: str, tensor: Tensor) -> None:
        fused = {
            "q_proj": ("qkv_proj", 0),
            "k_proj": ("qkv_proj", HEADS),
            "v_proj": ("qkv_proj", HEADS + KV_HEADS),
            "gate_proj": ("gate_up_proj", 0),
            "up_proj": ("gate_up_proj", 1),
        }
        layer = name.split(".")[-2]
        if layer in fused:
            into, place = fused[layer]
            target = self.names[name.replace(layer, into)]
            part = tensor.chunk(self.tp, 0)[self.rank]
            start = place * (
                len(target) // 2
                if into == "gate_up_proj"
                else len(target) // (HEADS + 2 * KV_HEADS)
            )
            target.data.narrow(0, start, len(part)).copy_(part)
        elif layer in ("o_proj", "down_proj"):
            self.names[name].data.copy_(tensor.chunk(self.tp, 1)[self.rank])
        else:
            self.names[name].data[: len(tensor)].copy_(tensor)
