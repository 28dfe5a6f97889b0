"""Forward pass over a packed micro-batch: pad, slice, embed, layers, head, gather, align."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine_api.batch import ROUTED_EXPERTS, Batch
from engine_api.config import EngineConfig
from engine_api.results import TokenOutputs
from engine_loopback import pipeline
from engine_loopback.layers import Layers, PackedInputs, Params
from engine_loopback.lora import PREFIX
from engine_loopback.parallel import DTYPES, Collectives, Layout
from engine_loopback.shape import Shape
from engine_loopback.weights import Weight


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

    def outputs(self, batch: Batch, needs: Sequence[str], temperature: float) -> TokenOutputs:
        """Return aligned float32 outputs ``[T]``, the same on all ranks that share the batch."""
        packed = self.pack_inputs(batch)
        experts = self.experts_of(batch)
        x = self.enter(packed)
        for index in self.own_layers():
            here = replace(packed, experts=experts[index])
            x = self.layer(self.layer_params(index), x, here)
        outputs = self.leave(x, packed, entropy="entropy" in needs, temperature=temperature)
        columns = outputs.unbind(-1)
        names = ("values",) if self.shape.kind == "value_model" else ("log_probs", "entropy")
        return TokenOutputs(**dict(zip(names, columns, strict=False)))

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
        self, x: Tensor, packed: PackedInputs, *, entropy: bool, temperature: float
    ) -> Tensor:
        """Return the last stage's outputs ``[T, k]`` on all stages."""
        if self.layout.is_last:
            outputs = self.head(x, packed, entropy, temperature)
            sent = torch.zeros((), device=self.device)
        else:
            columns = 2 if entropy else 1
            outputs = torch.empty(packed.size, columns, device=self.device)
            sent = pipeline.send(x, self.layout)
        if self.layout.stages == 1:
            return outputs
        return pipeline.from_last(outputs, sent, self.layout)

    def head(self, x: Tensor, packed: PackedInputs, entropy: bool, temperature: float) -> Tensor:
        """Apply last norm and head to this rank's tokens and return all tokens' aligned outputs."""
        hidden = self.norm(x, self.weight("model.norm.weight"))
        if packed.parents is not None:
            hidden = hidden[packed.parents]
        if self.shape.kind == "value_model":
            about_next = self.values(hidden)
        else:
            about_next = self.chunked(hidden, packed.targets, temperature)
        return self.align(self.collectives.gather_outputs(about_next[:, : 1 + entropy]), packed)

    def values(self, hidden: Tensor) -> Tensor:
        """Return values ``[n, 1]`` in float32."""
        params = {name: self.weight(name) for name in self.weights if name.startswith("score.")}
        return self.with_bias(params, "score", self.linear(params, "score", hidden)).float()

    def chunked(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Return log-probs and entropy ``[n, 2]``.

        Only the logits of ``logit_chunk`` tokens exist at a time, in backward too.
        """
        weight = self.weight("model.embed_tokens.weight" if self.shape.tied else "lm_head.weight")
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
