"""Forward pass over a packed micro-batch: pad, slice, embed, layers, head, gather, align."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine_api.batch import (
    ROUTED_EXPERTS,
    TEACHER_STATES,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOG_PROBS,
    Batch,
)
from engine_api.config import EngineConfig
from engine_api.distillation import OutputHead, Teaching
from engine_api.results import TokenOutputs
from engine_loopback import pipeline
from engine_loopback.layers import Layers, PackedInputs, Params
from engine_loopback.lora import PREFIX
from engine_loopback.parallel import DTYPES, Collectives, Layout
from engine_loopback.shape import Shape
from engine_loopback.weights import Weight


@dataclass(frozen=True, kw_only=True, eq=False)
class Taught:
    """The teacher's part of a micro-batch: what is asked for, its head, and rows by token."""

    teaching: Teaching
    head: OutputHead | None
    rows: list[Tensor]

    @staticmethod
    def of(batch: Batch, teaching: Teaching, head: OutputHead | None) -> Taught:
        """Return the teacher's part of ``batch``.

        An empty batch may come without fields.
        """
        if teaching.top:
            names = {TEACHER_TOP_IDS: 0, TEACHER_TOP_LOG_PROBS: 1}
        else:
            assert head is not None
            names = {TEACHER_STATES: head.weight.shape[1]}
        rows = [batch.fields.get(name, torch.empty(0, width)) for name, width in names.items()]
        return Taught(teaching=teaching, head=head, rows=rows)


class Model(Layers):
    """The decoder over a table of weights."""

    def __init__(
        self,
        config: EngineConfig,
        shape: Shape,
        weights: Mapping[str, Weight],
        layout: Layout,
        device: torch.device,
    ) -> None:
        super().__init__(shape, Collectives(layout), config.lora)
        self.memory = config.memory
        self.weights = weights
        self.layout = layout
        self.device = device
        self.dtype = DTYPES[config.precision.compute]
        self.adapter_on = True
        self.run_block = torch.compile(self.block) if self.memory.compile else self.block

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Run the base model inside the context, for a reference."""
        self.adapter_on = False
        try:
            yield
        finally:
            self.adapter_on = True

    # --- weights -------------------------------------------------------------------------------

    def weight(self, name: str) -> Tensor:
        """Return this rank's box on the device in the computation's dtype.

        Its gradient flows to the master weight.
        """
        return self.weights[name].held.to(device=self.device, dtype=self.dtype)

    def layer_params(self, index: int) -> Params:
        """Return a layer's weights by their names inside it, with adapters while they are on."""
        prefix = f"model.layers.{index}."
        mine = {
            name.removeprefix(PREFIX): name
            for name, weight in self.weights.items()
            if weight.param is not None and (self.adapter_on or not weight.adapter)
        }
        return {
            short.removeprefix(prefix): self.weight(name)
            for short, name in mine.items()
            if short.startswith(prefix)
        }

    # --- inputs --------------------------------------------------------------------------------

    def pack_inputs(self, batch: Batch) -> PackedInputs:
        """Pad with a document at the end, and take this sequence-parallel rank's slice."""
        if self.memory.share_prefixes:
            return self.pack_shared(batch)
        lengths = self.padded_lengths(batch)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        total = int(ends[-1])
        padding = torch.zeros(total - batch.num_tokens, dtype=torch.int64)
        ids = torch.cat([batch.input_ids.cpu(), padding])
        documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        positions = self.positions(documents, ends)
        own = self.layout.own_part(torch.arange(total), "sequence")
        return PackedInputs(
            ids=ids[own].to(self.device),
            positions=positions[own].to(self.device),
            targets=self.next_tokens(ids)[own].to(self.device),
            mask=self.document_mask(documents, own).to(self.device),
            first=(positions == 0).to(self.device),
            size=batch.num_tokens,
        )

    def pack_shared(self, batch: Batch) -> PackedInputs:
        """Compute each common beginning of documents once, as nodes of a tree, and no padding.

        An empty micro-batch is one node.
        """
        nodes: dict[tuple[int, int], int] = {}
        ids, parents, rows = list[int](), list[int](), list[int]()
        for begin, end in pairwise(batch.boundaries):
            node = -1
            for token in batch.input_ids[begin:end].tolist():
                before = node
                node = self.find_node(nodes, before, token, (begin, end))
                if node == len(ids):
                    ids.append(token)
                    parents.append(before)
                rows.append(node)
        above = torch.tensor(parents or [-1])
        ids_of_nodes = torch.tensor(ids or [0])
        return PackedInputs(
            ids=ids_of_nodes.to(self.device),
            positions=self.depths(above).to(self.device),
            targets=ids_of_nodes.to(self.device),
            mask=self.tree_mask(above).to(self.device),
            first=(above < 0).to(self.device),
            size=batch.num_tokens,
            parents=self.predicting(above).to(self.device),
            rows=torch.tensor(rows, dtype=torch.int64).to(self.device),
        )

    def find_node(
        self, nodes: dict[tuple[int, int], int], before: int, token: int, document: tuple[int, int]
    ) -> int:
        """Return the node of a token behind the node ``before``, a new one if there is none."""
        del document
        return nodes.setdefault((before, token), len(nodes))

    def depths(self, parents: Tensor) -> Tensor:
        """Return the position of each node in its documents, ``[T]``."""
        depths = torch.zeros_like(parents)
        for node, above in enumerate(parents.tolist()):
            if above >= 0:
                depths[node] = depths[above] + 1
        return depths

    def tree_mask(self, parents: Tensor) -> Tensor:
        """Return the nodes that each may attend to, itself and those above it, ``[T, T]`` bool."""
        mask = torch.eye(len(parents), dtype=torch.bool)
        for node, above in enumerate(parents.tolist()):
            if above >= 0:
                mask[node] |= mask[above]
        return mask

    def predicting(self, parents: Tensor) -> Tensor:
        """Return the node whose hidden state predicts each; a first token's is not used."""
        return parents.clamp(min=0)

    def experts_of(self, batch: Batch) -> list[Tensor | None]:
        """Return the experts ``[n, k]`` of this rank's tokens by layer, None where none are given.

        They are -1 at the padding.
        """
        if ROUTED_EXPERTS not in batch.fields:
            return [None] * self.shape.layers
        given = batch[ROUTED_EXPERTS].cpu().long()
        total = sum(self.padded_lengths(batch))
        padding = given.new_full((total - batch.num_tokens, *given.shape[1:]), -1)
        own = self.layout.own_part(torch.cat([given, padding]), "sequence")
        return list(own.to(self.device).unbind(1))

    def padded_lengths(self, batch: Batch) -> list[int]:
        """Return the documents' lengths and the padding's.

        An empty micro-batch consists of padding alone.
        """
        step = self.memory.pad_to_multiple * self.layout.sequence
        padding = -batch.num_tokens % step or (0 if batch.num_tokens else step)
        return [*batch.lengths, padding] if padding else batch.lengths

    def positions(self, documents: Tensor, ends: Tensor) -> Tensor:
        """Return each token's position in its document, ``[T]``."""
        return torch.arange(len(documents)) - ends[documents]

    def next_tokens(self, ids: Tensor) -> Tensor:
        """Return each token's target ``[T]``, before slicing.

        The last one's is not used.
        """
        return ids.roll(-1)

    # --- forward -------------------------------------------------------------------------------

    def outputs(
        self,
        batch: Batch,
        needs: Sequence[str],
        temperature: float,
        taught: Taught | None = None,
    ) -> TokenOutputs:
        """Return aligned float32 outputs ``[T]``, the same on all ranks that share the batch."""
        packed = self.pack_inputs(batch)
        x = self.decode(batch, packed)
        names = ["values"]
        if self.shape.kind == "language_model":
            names = ["log_probs", *(one for one in ("entropy", "divergence") if one in needs)]

        def head() -> Tensor:
            return self.head(x, packed, names, temperature, taught)

        columns = self.leave(x, packed, len(names), head).unbind(-1)
        return TokenOutputs(**dict(zip(names, columns, strict=True)))

    def decode(self, batch: Batch, packed: PackedInputs) -> Tensor:
        """Return the hidden states ``[n, C]`` after this stage's layers."""
        experts = self.experts_of(batch)
        x = self.enter(packed)
        for index in self.own_layers():
            here = replace(packed, experts=experts[index])
            x = self.layer(self.layer_params(index), x, here)
        return x

    def states(self, batch: Batch) -> Tensor:
        """Return the aligned input ``[T, C]`` of the head, the same on all ranks of the batch."""
        packed = self.pack_inputs(batch)
        x = self.decode(batch, packed)

        def last() -> Tensor:
            hidden = self.norm(x, self.weight("model.norm.weight"))
            if packed.parents is not None:
                hidden = hidden[packed.parents]
            return self.align(self.collectives.gather_outputs(hidden.float()), packed)

        # Stages exchange float32, which holds every value of the computation.
        return self.leave(x, packed, self.shape.hidden, last).to(self.dtype)

    def own_layers(self) -> range:
        """Return the layers of this pipeline stage."""
        count = self.shape.layers // self.layout.stages
        return range(self.layout.here.stage * count, (self.layout.here.stage + 1) * count)

    def enter(self, packed: PackedInputs) -> Tensor:
        """Return hidden states ``[n, C]``, embedded here or received from the previous stage."""
        if self.layout.is_first:
            return self.weight("model.embed_tokens.weight")[packed.ids]
        like = torch.empty(len(packed.ids), self.shape.hidden, dtype=self.dtype, device=self.device)
        return pipeline.receive(like, self.layout)

    def layer(self, params: Params, x: Tensor, packed: PackedInputs) -> Tensor:
        """Run one block, recomputed in backward if the configuration asks for it."""
        if self.memory.recompute == "full":
            result: Tensor = checkpoint(self.run_block, params, x, packed, use_reentrant=False)
            return result
        return self.run_block(params, x, packed)

    def leave(
        self, x: Tensor, packed: PackedInputs, columns: int, head: Callable[[], Tensor]
    ) -> Tensor:
        """Return the last stage's outputs ``[T, columns]``, those of ``head``, on all stages."""
        if self.layout.is_last:
            outputs = head()
            sent = torch.zeros((), device=self.device)
        else:
            outputs = torch.empty(packed.size, columns, device=self.device)
            sent = pipeline.send(x, self.layout)
        if self.layout.stages == 1:
            return outputs
        return pipeline.from_last(outputs, sent, self.layout)

    def head(
        self,
        x: Tensor,
        packed: PackedInputs,
        names: Sequence[str],
        temperature: float,
        taught: Taught | None,
    ) -> Tensor:
        """Apply last norm and head to this rank's tokens and return all tokens' aligned outputs."""
        hidden = self.norm(x, self.weight("model.norm.weight"))
        if packed.parents is not None:
            hidden = hidden[packed.parents]
        if self.shape.kind == "value_model":
            about_next = self.values(hidden)
        else:
            scores = self.chunked(hidden, packed.targets, temperature)
            about_next = scores[:, : 1 + ("entropy" in names)]
            if taught is not None:
                columns = [about_next, self.divergences(hidden, packed, taught, temperature)]
                about_next = torch.cat(columns, -1)
        return self.align(self.collectives.gather_outputs(about_next), packed)

    def values(self, hidden: Tensor) -> Tensor:
        """Return values ``[n, 1]`` in float32."""
        params = {name: self.weight(name) for name in self.weights if name.startswith("score.")}
        return self.with_bias(params, "score", self.linear(params, "score", hidden)).float()

    def chunked(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Return log-probs and entropy ``[n, 2]``.

        Only the logits of ``logit_chunk`` tokens exist at a time, in backward too.
        """
        weight = self.weight(self.head_name)
        size = self.memory.logit_chunk
        if len(targets) <= size:
            return self.log_probs(hidden, weight, targets, temperature)
        parts = zip(hidden.split(size), targets.split(size), strict=True)
        return torch.cat(
            [
                checkpoint(self.log_probs, h, weight, t, temperature, use_reentrant=False)
                for h, t in parts
            ]
        )

    def log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        """Return each target's log-probability and its distribution's entropy, in nats.

        The result is ``[n, 2]`` in float32.
        """
        log_p = (self.scaled_logits(hidden @ weight.T, temperature)).log_softmax(-1)
        chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
        return torch.stack((chosen, -(log_p.exp() * log_p).sum(-1)), dim=-1)

    @property
    def head_name(self) -> str:
        """The name of the output head's weight."""
        return "model.embed_tokens.weight" if self.shape.tied else "lm_head.weight"

    def divergences(
        self, hidden: Tensor, packed: PackedInputs, taught: Taught, temperature: float
    ) -> Tensor:
        """Return the divergence ``[n, 1]`` of each target's distribution to the teacher's.

        The logits of either model exist for ``logit_chunk`` tokens at a time, in backward too.
        """
        weight = self.weight(self.head_name)
        size = self.memory.logit_chunk
        padding = len(packed.first) - packed.size
        rows = [
            self.layout.own_part(self.next_rows(one, padding), "sequence").to(self.device)
            for one in taught.rows
        ]
        parts = zip(hidden.split(size), *(one.split(size) for one in rows), strict=True)
        found = [
            checkpoint(self.divergence, h, weight, taught, temperature, *chunk, use_reentrant=False)
            for h, *chunk in parts
        ]
        return torch.cat(found)[:, None]

    def next_rows(self, rows: Tensor, padding: int) -> Tensor:
        """Return the teacher's rows of each token's target ``[T', …]``, before slicing."""
        return torch.cat([rows.cpu(), rows.new_zeros(padding, rows.shape[1]).cpu()]).roll(-1, 0)

    def divergence(
        self,
        hidden: Tensor,
        weight: Tensor,
        taught: Taught,
        temperature: float,
        *rows: Tensor,
    ) -> Tensor:
        """Return the divergences ``[n]`` of a chunk's tokens, in nats."""
        log_p = self.counted(self.scaled_logits(hidden @ weight.T, temperature), taught)
        if taught.teaching.top:
            log_p = self.classes(log_p, rows[0].long())
            log_q = rows[1].float()
            missing = torch.cat([rows[0] < 0, torch.zeros_like(rows[0][:, :1]).bool()], -1)
            log_p = log_p.masked_fill(missing, 0.0)
            log_q = log_q.masked_fill(missing, 0.0)
        else:
            log_q = self.counted(self.teacher_logits(rows[0], taught, temperature), taught)
        return self.compare(log_p, log_q, taught.teaching)

    def counted(self, logits: Tensor, taught: Taught) -> Tensor:
        """Return the log-probs ``[n, vocabulary]`` over the token ids that count."""
        return logits[:, : taught.teaching.vocabulary].log_softmax(-1)

    def classes(self, log_p: Tensor, ids: Tensor) -> Tensor:
        """Return the log-probs ``[n, k + 1]`` of tokens, and of all other ones together."""
        own = torch.where(ids >= 0, ids, log_p.shape[1])
        named = torch.zeros(len(ids), log_p.shape[1] + 1, dtype=torch.bool, device=ids.device)
        named = named.scatter(-1, own, True)[:, :-1]
        rest = log_p.masked_fill(named, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([log_p.gather(-1, ids.clamp(min=0)), rest], -1)

    def teacher_logits(self, states: Tensor, taught: Taught, temperature: float) -> Tensor:
        """Return the teacher's logits ``[n, V]`` in float32, divided by the temperature."""
        head = taught.head
        assert head is not None
        plain = states.to(head.weight.dtype) @ head.weight.T
        plain = (plain if head.bias is None else plain + head.bias).float() * head.scale
        capped = plain if head.cap is None else head.cap * (plain / head.cap).tanh()
        return self.scaled_logits(capped, temperature)

    def compare(self, log_p: Tensor, log_q: Tensor, teaching: Teaching) -> Tensor:
        """Return the divergence of each row of log-probs to the teacher's."""
        p = log_p.exp()
        q = log_q.exp()
        if teaching.divergence == "reverse_kl":
            return (p * (log_p - log_q)).sum(-1)
        if teaching.divergence == "forward_kl":
            return (q * (log_q - log_p)).sum(-1)
        beta = teaching.beta
        log_m = (beta * q + (1 - beta) * p).log()
        return (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(-1)

    def scaled_logits(self, logits: Tensor, temperature: float) -> Tensor:
        """Return logits in float32, divided by the temperature."""
        return logits.float() / temperature

    def align(self, about_next: Tensor, packed: PackedInputs) -> Tensor:
        """Turn outputs ``[T', k]`` about the token after each into outputs ``[T, k]`` about each.

        First tokens are zero, and padding is cut off.
        """
        if packed.rows is not None:
            return about_next.masked_fill(packed.first[:, None], 0.0)[packed.rows]
        return about_next.roll(1, 0).masked_fill(packed.first[:, None], 0.0)[: packed.size]
