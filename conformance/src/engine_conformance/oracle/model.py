"""The oracle: a decoder in float64, document by document, from a Hugging Face folder.

The oracle packs nothing and batches nothing, so that the outputs of one document cannot
depend on another. It shares no code with transformers or with any engine.

Alignment: a per-token value at position t is about predicting token t from its own
document before t. The first token of a document has none, and carries zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_conformance.oracle.config import ModelConfig, read_config
from engine_conformance.oracle.layers import (
    attention_block,
    cap,
    feed_forward_block,
    keys_values,
    linear,
    norm,
    routing_gap,
)
from engine_conformance.oracle.weights import Adapter, load_adapter, read_params

__all__ = ["OracleModel", "OracleOutputs", "load_oracle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleOutputs:
    """Per-token outputs of a language model, float64 ``[T]``, in nats.

    They are zero at first tokens.
    """

    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleModel:
    """A checkpoint and its float64 forward pass.

    ``params`` holds every parameter under its exact Hugging Face name (a tied head is
    absent); with an ``adapter``, the forward pass uses the merged weights and only the
    adapter trains.
    """

    config: ModelConfig
    params: dict[str, Tensor]
    adapter: Adapter | None = None

    @property
    def trainable(self) -> dict[str, Tensor]:
        """Tensors that an optimizer updates: the adapter's if there is one, else all parameters."""
        return self.params if self.adapter is None else self.adapter.params

    def effective_params(self) -> dict[str, Tensor]:
        """Return the weights of the forward pass: ``params``, with the adapter merged in."""
        return self.params if self.adapter is None else self.adapter.merge(self.params)

    def copy(self, *, requires_grad: bool = False) -> OracleModel:
        """Return a copy whose trainable tensors are leaves.

        No other tensor needs gradients.
        """
        train_base = requires_grad and self.adapter is None
        params = {n: p.detach().clone().requires_grad_(train_base) for n, p in self.params.items()}
        if self.adapter is None:
            return replace(self, params=params)
        leaves = {
            n: p.detach().clone().requires_grad_(requires_grad)
            for n, p in self.adapter.params.items()
        }
        return replace(self, params=params, adapter=replace(self.adapter, params=leaves))

    def hidden(self, ids: Any, routed_experts: Any = None) -> Tensor:
        """Return hidden states ``[L, C]`` after the last norm, of one document ``ids [L]``.

        ``routed_experts`` is as in `token_outputs`, of this document.
        """
        return _hidden(self.effective_params(), self.config, _ids(ids), _experts(routed_experts))

    def layers(self, ids: Any, routed_experts: Any = None) -> list[Tensor]:
        """Return the hidden states ``[L, C]`` after the embedding and after each layer.

        ``ids [L]`` is one document, ``routed_experts`` as in `token_outputs`.
        """
        params, config = self.effective_params(), self.config
        found = [config.embedding_scale * params["model.embed_tokens.weight"][_ids(ids)]]
        replayed = _experts(routed_experts)
        for index in range(config.num_layers):
            own = None if replayed is None else replayed[:, index]
            found.append(_layer(params, config, index, found[-1], own))
        return found

    def logits(self, ids: Any, routed_experts: Any = None) -> Tensor:
        """Return the logits ``[L, V]`` of one document, where row i is about token i + 1.

        ``routed_experts`` is as in `token_outputs`, of this document.

        Raises:
            ValueError: if this is a value model.
        """
        return _logits(self.effective_params(), self.config, _ids(ids), _experts(routed_experts))

    def logits_over(self, old: OracleModel, ids: Any, kept: int) -> Tensor:
        """Return the logits ``[L - kept, V]`` over keys and values of another model's weights.

        ``ids [L]`` is one document, and row i is about token ``kept`` + i + 1. The keys and values
        of the first ``kept`` tokens are those of ``old``, whose ``config.json`` is the same.

        Raises:
            ValueError: if a layer keeps something other than keys and values.
        """
        params, config = self.effective_params(), self.config
        if config.mixers or config.latent is not None:
            raise ValueError("logits_over() needs a model whose layers all keep keys and values")
        seen = old.layers(_ids(ids)[:kept])
        x = config.embedding_scale * params["model.embed_tokens.weight"][_ids(ids)]
        for index in range(config.num_layers):
            before = keys_values(old.effective_params(), config, index, seen[index])
            x = attention_block(params, config, index, x, before)
            x = feed_forward_block(params, config, index, x)
        last = norm(params, config, f"model.{config.names.final_norm}", x[kept:])
        return _head(params, config, last)

    def token_outputs(
        self,
        input_ids: Any,
        cu_seqlens: Any,
        temperature: float = 1.0,
        routed_experts: Any = None,
    ) -> OracleOutputs:
        """Return every token's log-probability, and the entropy of the distribution it came from.

        Args:
            input_ids: ``[T]`` integers, documents one after another.
            cu_seqlens: ``[D + 1]`` integers, the documents' bounds: 0, ..., T.
            temperature: divides the logits before both.
            routed_experts: ``[T, layers, k]`` integers, by layer the experts that serve each token
                in place of the router's top k, -1 where these do; None is -1 everywhere. Their
                weights are the router's in any case.

        Raises:
            ValueError: if this is a value model, or ``cu_seqlens`` does not cover ``input_ids``.
        """
        params = self.effective_params()
        bounds = pairwise(_ids(cu_seqlens).tolist())
        replayed = _experts(routed_experts)

        def outputs(ids: Tensor) -> Tensor:
            start, stop = next(bounds)
            own = None if replayed is None else replayed[start:stop]
            # The last row predicts a token that the document does not have.
            log_p = (_logits(params, self.config, ids, own)[:-1] / temperature).log_softmax(dim=-1)
            chosen = log_p.gather(-1, ids[1:, None]).squeeze(-1)
            return torch.stack((chosen, -(log_p.exp() * log_p).sum(dim=-1)), dim=-1)

        both = _per_document(_ids(input_ids), cu_seqlens, outputs, width=2)
        return OracleOutputs(log_probs=both[:, 0], entropy=both[:, 1])

    def unshifted_log_probs(
        self, input_ids: Any, cu_seqlens: Any, *, temperature: float = 1.0
    ) -> Tensor:
        """Return the wrong log-probs ``[T]`` of an engine that does not shift its logits.

        At t it is the log-prob of token t by the logits that come after it.
        """
        params = self.effective_params()
        log_probs = [
            (_logits(params, self.config, ids) / temperature)
            .log_softmax(dim=-1)
            .gather(-1, ids[:, None])
            for ids in _documents(_ids(input_ids), cu_seqlens)
        ]
        return torch.cat(log_probs).squeeze(-1)

    def values(self, input_ids: Any, cu_seqlens: Any) -> Tensor:
        """Return values ``[T]``: at t, the head on the hidden state at t - 1.

        First tokens have zero.

        Raises:
            ValueError: if this is no value model, or ``cu_seqlens`` does not cover ``input_ids``.
        """
        if not self.config.value_model:
            raise ValueError("values() needs a *ForTokenClassification checkpoint with one label")
        params = self.effective_params()

        def outputs(ids: Tensor) -> Tensor:
            return linear(params, "score", _hidden(params, self.config, ids)[:-1])

        return _per_document(_ids(input_ids), cu_seqlens, outputs, width=1).squeeze(-1)

    def routing_margin(self, input_ids: Any, cu_seqlens: Any, routed_experts: Any = None) -> Tensor:
        """Return each value's distance ``[T]`` from another choice of experts, in router logits.

        At t it is the smallest gap between the last chosen expert and the next, over
        all layers and all tokens of the document before t; infinite for a dense model.
        Where an engine's router logits are off by more than half of it, the engine may
        rightly choose different experts, and its values at t are not comparable. Where
        ``routed_experts`` (see `token_outputs`) selects, there is no other choice.
        """
        params = self.effective_params()
        config = self.config
        bounds = pairwise(_ids(cu_seqlens).tolist())
        replayed = _experts(routed_experts)

        def outputs(ids: Tensor) -> Tensor:
            start, stop = next(bounds)
            own = None if replayed is None else replayed[start:stop]
            return _routing_gaps(params, config, ids, own)[:-1].cummin(dim=0).values.unsqueeze(-1)

        margin = _per_document(_ids(input_ids), cu_seqlens, outputs, width=1).squeeze(-1)
        # First tokens carry no value.
        margin[_ids(cu_seqlens)[:-1]] = math.inf
        return margin


def load_oracle(
    folder: str | Path, *, adapter: str | Path | None = None, requires_grad: bool = False
) -> OracleModel:
    """Load a Hugging Face folder (``config.json``, ``*.safetensors``) as a float64 oracle.

    Args:
        folder: the checkpoint, whole or sharded with an index.
        adapter: a PEFT LoRA folder to put on top; then only the adapter trains.
        requires_grad: make the trainable tensors leaves that gather gradients.

    Raises:
        UnsupportedModel: if the checkpoint asks for something that the oracle does not compute.
        WeightMismatch: if names or shapes are not those of ``config.json``.
    """
    config = read_config(folder)
    loaded = None if adapter is None else load_adapter(adapter)
    model = OracleModel(config=config, params=read_params(folder, config), adapter=loaded)
    return model.copy(requires_grad=requires_grad)


def _hidden(
    params: dict[str, Tensor], config: ModelConfig, ids: Tensor, replayed: Tensor | None = None
) -> Tensor:
    x = config.embedding_scale * params["model.embed_tokens.weight"][ids]
    for index in range(config.num_layers):
        x = _layer(params, config, index, x, None if replayed is None else replayed[:, index])
    return norm(params, config, f"model.{config.names.final_norm}", x)


def _layer(
    params: dict[str, Tensor],
    config: ModelConfig,
    index: int,
    x: Tensor,
    replayed: Tensor | None = None,
) -> Tensor:
    mixed = attention_block(params, config, index, x)
    return feed_forward_block(params, config, index, mixed, replayed)


@torch.no_grad()
def _routing_gaps(
    params: dict[str, Tensor], config: ModelConfig, ids: Tensor, replayed: Tensor | None
) -> Tensor:
    x = config.embedding_scale * params["model.embed_tokens.weight"][ids]
    gaps = [torch.full(ids.shape, math.inf, dtype=torch.float64)]
    for index in range(config.num_layers):
        x = attention_block(params, config, index, x)
        gap = routing_gap(params, config, index, x)
        own = None if replayed is None else replayed[:, index]
        if own is not None:
            gap = gap.masked_fill((own >= 0).all(-1), math.inf)
        gaps.append(gap)
        x = feed_forward_block(params, config, index, x, own)
    return torch.stack(gaps).amin(dim=0)


def _logits(
    params: dict[str, Tensor], config: ModelConfig, ids: Tensor, replayed: Tensor | None = None
) -> Tensor:
    if config.value_model:
        raise ValueError("a value model has no logits: use values()")
    return _head(params, config, _hidden(params, config, ids, replayed))


def _head(params: dict[str, Tensor], config: ModelConfig, hidden: Tensor) -> Tensor:
    head = params["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
    plain = hidden @ head.T
    if config.head_bias:
        plain = plain + params["lm_head.bias"]
    return cap(config.logit_scale * plain, config.logit_cap)


def _per_document(
    ids: Tensor, cu_seqlens: Any, outputs: Callable[[Tensor], Tensor], *, width: int
) -> Tensor:
    """Return ``outputs`` of each document alone, a zero row before each: ``[T, width]``."""
    first = torch.zeros(1, width, dtype=torch.float64)
    return torch.cat(
        [torch.cat((first, outputs(document))) for document in _documents(ids, cu_seqlens)]
    )


def _documents(ids: Tensor, cu_seqlens: Any) -> Iterator[Tensor]:
    bounds = _ids(cu_seqlens).tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != len(ids) or min(lengths, default=0) < 1:
        raise ValueError(f"cu_seqlens {bounds} must rise strictly from 0 to {len(ids)}")
    return iter(ids.split(lengths))


def _experts(given: Any) -> Tensor | None:
    return None if given is None else _ids(given)


def _ids(array: Any) -> Tensor:
    return torch.as_tensor(array).to(device="cpu", dtype=torch.int64)
