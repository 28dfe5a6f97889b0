"""Layers that mix tokens outside of attention, computed one document after another.

Linear attention, state spaces and short convolutions (Qwen3-Next, Nemotron-H, LFM2) carry a state
from each token to the next. transformers' implementations in PyTorch run over the whole pack and
drop the bounds of the documents without a word, so the state of one document would reach the next.
Here every such layer is called for each document alone, which is exact with any implementation.

Under Ulysses each rank gathers the tokens of its group, computes the layer on all of them, and
keeps its own.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine_api.errors import UnsupportedCapability

__all__ = ["Documents", "divide_mixers", "find_mixers", "refuse_without_kernels"]

# Linear attention without a convolution and a decay of that name.
_BY_NAME = ("LightningAttention",)

# Packages whose kernels transformers uses on CUDA, by the parameter that tells the kind of layer.
_KERNELS = {"dt_proj": ("mamba_ssm", "causal_conv1d"), "D": ("mamba_ssm", "causal_conv1d")}
_DELTA_KERNELS = ("fla", "causal_conv1d")
_CONVOLUTION_KERNELS = ("causal_conv1d",)
_INSTALL = {
    "fla": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d",
    "mamba_ssm": "mamba-ssm",
}


class Documents:
    """The documents of the micro-batch that the model computes, for layers that are not told."""

    def __init__(self) -> None:
        self.lengths: list[int] | None = None
        """Tokens of each document, or None for a model's own forward pass of one document."""

    def set(self, packing: Any) -> None:
        """Take the documents of a micro-batch, or of none (None)."""
        self.lengths = None if packing is None else packing.bounds.diff().tolist()


def find_mixers(lm: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that carry a state from token to token, by name.

    They own a causal convolution or a decay (``A_log``), or are known by the name of their class.
    """
    return {name: module for name, module in lm.named_modules() if _is_mixer(module)}


def _is_mixer(module: nn.Module) -> bool:
    convolves = any(isinstance(m, nn.Conv1d) and m.kernel_size[0] > 1 for m in module.children())
    return convolves or hasattr(module, "A_log") or type(module).__name__.endswith(_BY_NAME)


def refuse_without_kernels(lm: nn.Module, device_type: str, engine: str) -> None:
    """Raise ``UnsupportedCapability`` for a device of CUDA without the kernels of such layers."""
    if device_type != "cuda":
        return
    needed = {name for m in find_mixers(lm).values() for name in _list_kernels(m)}
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        raise UnsupportedCapability(
            "linear_attention",
            where=f"{engine} with {type(lm).__name__} on {device_type}",
            why=f"{', '.join(missing)} not installed, whose kernels it needs there",
            remedy=f"pip install {' '.join(_INSTALL[name] for name in missing)}",
        )


def _list_kernels(mixer: nn.Module) -> tuple[str, ...]:
    for owned, packages in _KERNELS.items():
        if hasattr(mixer, owned):
            return packages
    if hasattr(mixer, "A_log"):
        return _DELTA_KERNELS
    if any(isinstance(m, nn.Conv1d) for m in mixer.children()):
        return _CONVOLUTION_KERNELS
    return ()


def divide_mixers(lm: nn.Module, group: Any) -> Documents:
    """Let each mixer compute one document after another, and return where it finds them.

    Args:
        lm: the model.
        group: process group of Ulysses, or None.
    """
    documents = Documents()
    for module in find_mixers(lm).values():
        # An instance's own forward, because FSDP replaces the classes of some modules.
        module.forward = _divided(module, module.forward, documents, group)  # type: ignore[method-assign]
    return documents


def _divided(module: nn.Module, forward: Any, documents: Documents, group: Any) -> Any:
    """Return a forward pass of ``module`` by document, made of its own."""

    @torch.compiler.disable
    def divided(hidden_states: Tensor, *rest: Any, **options: Any) -> Any:
        if documents.lengths is None:
            return forward(hidden_states, *rest, **options)
        _refuse_masks(module, rest, options)
        own = {key: None if isinstance(x, Tensor) else x for key, x in options.items()}
        own.pop("packing", None)
        whole = hidden_states if group is None else _gather(hidden_states, group)
        results = [forward(part, **own) for part in whole.split(documents.lengths, dim=1)]
        bare = isinstance(results[0], Tensor)
        mixed = torch.cat([result if bare else result[0] for result in results], dim=1)
        if group is not None:
            mixed = mixed.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]
        return mixed if bare else (mixed, *results[0][1:])

    return divided


def _refuse_masks(module: nn.Module, rest: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise ``UnsupportedCapability`` for arguments that would have to be divided, too."""
    per_token = sorted(
        key
        for key, value in options.items()
        if isinstance(value, Tensor) and key not in ("position_ids", "cache_position")
    )
    if rest or per_token:
        raise UnsupportedCapability(
            "linear_attention",
            where=type(module).__name__,
            why=f"it takes {', '.join(per_token) or 'positional arguments'} for each token",
            remedy="report the model family",
        )


class _Gather(torch.autograd.Function):
    """The all-gather of ``[1, T/n, d]`` to ``[1, T, d]``.

    Every rank uses all of it for tokens of its own, so the gradient is the sum of all ranks'.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        size = dist.get_world_size(ctx.group)
        return total.chunk(size, dim=1)[dist.get_rank(ctx.group)].contiguous(), None


def _gather(x: Tensor, group: Any) -> Tensor:
    result: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return result
