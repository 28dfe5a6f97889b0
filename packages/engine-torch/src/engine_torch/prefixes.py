"""Documents that begin alike, as a tree in which each common beginning is computed once.

The tokens of a tree stand in depth-first order. A token attends to itself and to its ancestors, and
these are the earlier tokens whose subtree it is in: ``key <= query < ends[key]``. Documents that
have nothing in common are trees of one branch each, for which that is the usual block mask.

What is predicted is a token from the hidden state of its parent, so that the first tokens of
several completions are predicted from the one last token of their prompt. Autograd adds up the
gradients that the documents give to the tokens that they share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_api.batch import Batch
from engine_api.config import EngineConfig
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.prefixes import order_by_prefix

__all__ = ["PrefixTree", "build_tree", "mask_of", "refuse_unshared", "refuse_with", "take_rows"]

FLEX = "flex"
"""Name of the kernel of trees on CUDA in half precision, ``engine_torch.flex``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixTree:
    """The tokens of some documents, with each common beginning once.

    T is the number of tokens of the documents and S that of the tree.

    Attributes:
        tokens: ``[S]`` int64 on the CPU, a token of the documents for each token of the tree.
        parents: ``[S]`` int64, the token before each in its documents; for a first token itself.
        positions: ``[S]`` int64, each token's position in its documents.
        ends: ``[S]`` int64, the index behind the last token that may attend to each token.
        rows: ``[T]`` int64, the token of the tree for each token of the documents.
    """

    tokens: Tensor
    parents: Tensor
    positions: Tensor
    ends: Tensor
    rows: Tensor


def build_tree(batch: Batch) -> PrefixTree:
    """Build the tree of a batch's documents."""
    order = order_by_prefix(batch)
    bounds = batch.boundaries
    rows = torch.empty(batch.num_tokens, dtype=torch.int64)
    path = rows.new_empty(0)
    tokens, parents, positions = ([rows.new_empty(0)] for _ in range(3))
    ends = torch.empty(batch.num_tokens, dtype=torch.int64)
    size = 0
    for index, shared, length in zip(order.documents, order.shared, order.lengths, strict=True):
        # Nothing after this document's beginning can attend to the rest of the one before.
        ends[path[shared:]] = size
        new = torch.arange(size, size + length - shared)
        path = torch.cat([path[:shared], new])
        size += len(new)
        rows[bounds[index] : bounds[index + 1]] = path
        tokens.append(torch.arange(bounds[index] + shared, bounds[index + 1]))
        before = torch.cat([path[:1], path[:-1]])
        parents.append(before[shared:])
        positions.append(torch.arange(shared, length))
    ends[path] = size
    return PrefixTree(
        tokens=torch.cat(tokens),
        parents=torch.cat(parents),
        positions=torch.cat(positions),
        ends=ends[:size].clone(),
        rows=rows,
    )


def mask_of(ends: Tensor) -> Tensor:
    """Return the mask ``[1, 1, S, S]`` bool, true where a query (row) attends to a key (column).

    ``ends`` is ``[S]``, as in ``PrefixTree``.
    """
    index = torch.arange(len(ends), device=ends.device)
    query, key = index[:, None], index[None, :]
    return ((key <= query) & (query < ends[key]))[None, None]


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return rows ``[N, …]`` of ``values``, whose gradients are added up in a fixed order.

    Args:
        values: ``[S]`` or ``[S, d]``.
        index: ``[N]`` int64, in which a row may occur several times.
    """
    # Indexing adds up on CUDA in an order that differs from run to run.
    if values.dim() == 1:
        return F.embedding(index, values[:, None])[:, 0]
    return F.embedding(index, values)


def refuse_with(config: EngineConfig, kernel: str, registered: bool) -> None:
    """Raise an error for a setting with which trees cannot be computed.

    Args:
        config: the engine's configuration.
        kernel: name of the kernel that ``model.attention`` selects without trees.
        registered: true where that is the kernel of a plug-in.

    Raises:
        ConfigError: two settings exclude each other.
        UnsupportedCapability: the device's kernel computes no trees.
    """
    if config.parallelism.ulysses > 1:
        raise ConfigError(
            "memory.share_prefixes",
            f"true, but parallelism.ulysses is {config.parallelism.ulysses}",
            why="a rank predicts its tokens from hidden states that other ranks would have",
            remedy="set parallelism.ulysses: 1, or memory.share_prefixes: false",
        )
    if config.lora is not None and config.lora.dropout:
        raise ConfigError(
            "memory.share_prefixes",
            f"true, but lora.dropout is {config.lora.dropout}",
            why="the documents that share a beginning would share what is dropped there",
            remedy="set lora.dropout: 0, or memory.share_prefixes: false",
        )
    asked = config.model.attention
    if registered:
        raise UnsupportedCapability(
            "shared-prefixes",
            where=f"model.attention: {kernel}",
            why="the device's kernel takes documents, and no tree of them",
            remedy="set memory.share_prefixes: false, or model.attention: sdpa",
        )
    if asked not in ("auto", "sdpa"):
        raise ConfigError(
            "model.attention",
            f"{asked}, but memory.share_prefixes is true",
            why=f"{asked} takes documents, and no tree of them",
            remedy="set model.attention: auto, or memory.share_prefixes: false",
        )


def refuse_unshared(module: nn.Module, asked: dict[str, Any]) -> None:
    """Raise ``UnsupportedCapability`` for a layer that cannot be computed on a tree.

    Args:
        module: the layer, named in errors.
        asked: what the layer asks for beyond plain attention, by name; None and False count as
            nothing.
    """
    for name, value in asked.items():
        if value is not None and value is not False:
            raise UnsupportedCapability(
                "shared-prefixes",
                where=f"{type(module).__name__} with {name}",
                why="it is not computed on documents that share their beginning",
                remedy="set memory.share_prefixes: false for this model",
            )
