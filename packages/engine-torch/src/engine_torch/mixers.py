"""Layers that mix tokens outside of attention, computed on a batch of documents.

Linear attention, state spaces and short convolutions (Qwen3-Next, Nemotron-H, LFM2) carry a state
from each token to the next. transformers' implementations in PyTorch run over the whole pack and
drop the bounds of the documents without a word, so the state of one document would reach the next.
Here every such layer gets each document as a row of a batch, which is exact with any
implementation. Rows are documents of about the same length, since all but the longest end with
padding. A state goes only forward: what comes after a document does not reach it, and gets no
gradient.

Under Ulysses each rank gathers the tokens of its group, computes the layer on all of them, and
keeps its own.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from engine_api.devices import device_of
from engine_api.errors import UnsupportedCapability
from engine_torch.prefixes import refuse_unshared

__all__ = [
    "DOCUMENTS",
    "Documents",
    "divide_mixers",
    "find_mixers",
    "group_by_length",
    "refuse_without_kernels",
    "refuse_wrong_gradients",
]

DOCUMENTS = "_engine_documents"
"""Attribute of each module that holds the documents of the current micro-batch."""

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


# The shortest document of a batch, as a part of its longest: a third more tokens at most.
_SHORTEST = 0.75
# Arguments that are made for each document, or that no such layer reads.
_INDEPENDENT = {"position_ids", "cache_position"}


class Documents:
    """The documents of the micro-batch that the model computes, for layers that are not told."""

    def __init__(self) -> None:
        self.packing: Any = None
        """The packing, or None for a model's own forward pass of one document."""
        self.lengths: list[int] = []
        """Tokens of each document."""
        self.groups: list[list[int]] = []
        """Numbers of the documents that are computed together, the longest first."""

    def set(self, packing: Any) -> None:
        """Take the documents of a micro-batch, or of none (None)."""
        self.packing = packing
        self.lengths = [] if packing is None else packing.bounds.diff().tolist()
        self.groups = group_by_length(self.lengths)


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Return the numbers of documents in groups, each with its longest first."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if groups and lengths[number] >= _SHORTEST * lengths[groups[-1][0]]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def find_mixers(lm: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that carry a state from token to token, by name.

    They own a causal convolution or a decay (``A_log``), or are known by the name of their class.
    """
    return {name: module for name, module in lm.named_modules() if _is_mixer(module)}


def _is_mixer(module: nn.Module) -> bool:
    convolves = any(isinstance(m, nn.Conv1d) and m.kernel_size[0] > 1 for m in module.children())
    return convolves or hasattr(module, "A_log") or type(module).__name__.endswith(_BY_NAME)


def refuse_without_kernels(lm: nn.Module, device_type: str, engine: str) -> None:
    """Raise ``UnsupportedCapability`` for a device without its kernels of such layers."""
    if not device_of(device_type).mixer_kernels:
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


def refuse_wrong_gradients(lm: nn.Module, device_type: str, engine: str) -> None:
    """Raise ``UnsupportedCapability`` where Triton miscompiles fla's backward pass.

    On Hopper GPUs Triton 3.4 to 3.7.0 gives wrong gradients of linear attention with a decay (fla's
    issue 640). fla takes TileLang's kernel where that is installed.
    """
    if not device_of(device_type).mixer_kernels:
        return
    kernels = {name for m in find_mixers(lm).values() for name in _list_kernels(m)}
    if "fla" not in kernels or importlib.util.find_spec("tilelang") is not None:
        return
    major, _ = torch.get_device_module(device_type).get_device_capability()
    triton = version("triton")
    if major == 9 and Version("3.4.0") <= Version(triton) < Version("3.7.1"):
        raise UnsupportedCapability(
            "linear_attention",
            where=f"{engine} with {type(lm).__name__} on {device_type}",
            why=f"Triton {triton} computes its gradients wrongly on this GPU (fla's issue 640)",
            remedy="pip install tilelang, whose kernel is used instead, or Triton 3.7.1",
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
    """Let each mixer compute the documents as rows of a batch, and return where it finds them.

    Every layer has them under ``DOCUMENTS``, too, for attention in families whose layers do not
    pass the packing on.

    Args:
        lm: the model.
        group: process group of Ulysses, or None.
    """
    documents = Documents()
    for module in lm.modules():
        module.__dict__[DOCUMENTS] = documents
    for module in find_mixers(lm).values():
        # An instance's own forward, because FSDP replaces the classes of some modules.
        module.forward = _divided(module, module.forward, documents, group)  # type: ignore[method-assign]
    return documents


def _divided(module: nn.Module, forward: Any, documents: Documents, group: Any) -> Any:
    """Return a forward pass of ``module`` over batches of documents, made of its own."""

    @torch.compiler.disable
    def divided(hidden_states: Tensor, *rest: Any, **options: Any) -> Any:
        if documents.packing is None:
            return forward(hidden_states, *rest, **options)
        refuse_unshared(module, {"a state from token to token": documents.packing.ends})
        if any(one is not None for one in rest):
            _refuse_arguments(module, "positional arguments")
        per_token = {k for k, v in options.items() if isinstance(v, Tensor)} - _INDEPENDENT
        if per_token:
            _refuse_arguments(module, ", ".join(sorted(per_token)))
        own = {key: None if isinstance(x, Tensor) else x for key, x in options.items()}
        own.pop("packing", None)
        whole = hidden_states if group is None else _gather(hidden_states, group)
        parts = whole[0].split(documents.lengths)
        results: list[Any] = [None] * len(parts)
        for numbers in documents.groups:
            rows = pad_sequence([parts[number] for number in numbers], batch_first=True)
            if options.get("position_ids") is not None:
                positions = torch.arange(rows.shape[1], device=rows.device)
                own["position_ids"] = positions.expand(len(numbers), -1)
            output = forward(rows, *rest, **own)
            for row, number in enumerate(numbers):
                results[number] = _take_row(output, row, documents.lengths[number])
        if isinstance(results[0], Tensor):
            return _own_part(torch.cat(results)[None], group)
        # Further outputs are of each token, or none.
        return tuple(
            _own_part(torch.cat(parts)[None], group) if isinstance(parts[0], Tensor) else None
            for parts in zip(*results, strict=True)
        )

    return divided


def _take_row(output: Any, row: int, length: int) -> Any:
    """Return the outputs ``[length, …]`` of a document that is a row of a batch."""
    if isinstance(output, Tensor):
        return output[row, :length]
    return tuple(one[row, :length] if isinstance(one, Tensor) else None for one in output)


def _own_part(whole: Tensor, group: Any) -> Tensor:
    """Return the tokens of this rank of the Ulysses group."""
    if group is None:
        return whole
    return whole.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]


def _refuse_arguments(module: nn.Module, names: str) -> None:
    """Raise ``UnsupportedCapability`` for arguments that would have to be divided, too."""
    raise UnsupportedCapability(
        "linear_attention",
        where=type(module).__name__,
        why=f"it takes {names} for each token",
        remedy="use another backend for this model family",
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
