"""One forward over a packed micro-batch: pad, slice, embed, layers, head, gather, align."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine_api.batch import Batch
from engine_api.config import EngineConfig
from engine_api.results import TokenOutputs
from engine_loopback import pipeline
from engine_loopback.layers import Layers, Packed, Params
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
        self.memory, self.weights, self.layout, self.device = config.memory, weights, layout, device
        self.dtype = DTYPES[config.precision.compute]
        self.adapter_on = True
        self.run_block = torch.compile(self.block) if self.memory.compile else self.block

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The base model, for a reference."""
        self.adapter_on = False
        try:
            yield
        finally:
            self.adapter_on = True

    # --- weights -------------------------------------------------------------------------------

    def weight(self, name: str) -> Tensor:
        """This rank's box on the device in the computation's dtype; the gradient finds its way to the master."""
        return self.weights[name].held.to(device=self.device, dtype=self.dtype)

    def layer_params(self, index: int) -> Params:
        """A layer's weights by their names inside it, adapters included while they are on."""
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

    def pack(self, batch: Batch) -> Packed:
        """Pad with a document of its own at the end, and take this sequence-parallel rank's slice."""
        lengths = self.padded_lengths(batch)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        total = int(ends[-1])
        ids = torch.cat(
            [batch.input_ids.cpu(), torch.zeros(total - batch.num_tokens, dtype=torch.int64)]
        )
        documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        positions = self.positions(documents, ends)
        own = self.layout.own_part(torch.arange(total), "sequence")
        parts = (
            ids[own],
            positions[own],
            self.next_tokens(ids)[own],
            self.document_mask(documents, own),
            positions == 0,
        )
        on_device = [part.to(self.device) for part in parts]
        return Packed(
            ids=on_device[0],
            positions=on_device[1],
            targets=on_device[2],
            mask=on_device[3],
            first=on_device[4],
            size=batch.num_tokens,
        )

    def padded_lengths(self, batch: Batch) -> list[int]:
        """The documents' lengths and the padding's, which also stands for an empty micro-batch."""
        step = self.memory.pad_to_multiple * self.layout.sequence
        padding = -batch.num_tokens % step or (0 if batch.num_tokens else step)
        return [*batch.lengths, padding] if padding else batch.lengths

    def positions(self, documents: Tensor, ends: Tensor) -> Tensor:
        """``[T]``: each token's place in its document."""
        return torch.arange(len(documents)) - ends[documents]

    def next_tokens(self, ids: Tensor) -> Tensor:
        """``[T]``: what each token is to predict, of the whole before it is sliced; the last one's is not used."""
        return ids.roll(-1)

    # --- forward -------------------------------------------------------------------------------

    def outputs(self, batch: Batch, needs: Sequence[str], temperature: float) -> TokenOutputs:
        """``[T]`` float32 outputs, aligned, the same on all ranks that share the batch."""
        packed = self.pack(batch)
        x = self.enter(packed)
        for index in self.own_layers():
            x = self.layer(self.layer_params(index), x, packed)
        columns = self.leave(x, packed, entropy="entropy" in needs, temperature=temperature).unbind(
            -1
        )
        names = ("values",) if self.shape.kind == "value_model" else ("log_probs", "entropy")
        return TokenOutputs(**dict(zip(names, columns, strict=False)))

    def own_layers(self) -> range:
        """The layers of this pipeline stage."""
        count = self.shape.layers // self.layout.stages
        return range(self.layout.here.stage * count, (self.layout.here.stage + 1) * count)

    def enter(self, packed: Packed) -> Tensor:
        """Hidden states ``[n, C]``: embedded here, or received from the previous stage."""
        if self.layout.is_first:
            return self.weight("model.embed_tokens.weight")[packed.ids]
        like = torch.empty(len(packed.ids), self.shape.hidden, dtype=self.dtype, device=self.device)
        return pipeline.receive(like, self.layout)

    def layer(self, params: Params, x: Tensor, packed: Packed) -> Tensor:
        """One block, computed again in backward when memory is to be saved."""
        if self.memory.recompute == "full":
            result: Tensor = checkpoint(self.run_block, params, x, packed, use_reentrant=False)
            return result
        return self.run_block(params, x, packed)

    def leave(self, x: Tensor, packed: Packed, *, entropy: bool, temperature: float) -> Tensor:
        """``[T, k]`` outputs of the last stage, on all stages."""
        if self.layout.is_last:
            outputs, sent = (
                self.head(x, packed, entropy, temperature),
                torch.zeros((), device=self.device),
            )
        else:
            columns = 2 if entropy else 1
            outputs, sent = (
                torch.empty(packed.size, columns, device=self.device),
                pipeline.send(x, self.layout),
            )
        return (
            outputs if self.layout.stages == 1 else pipeline.from_last(outputs, sent, self.layout)
        )

    def head(self, x: Tensor, packed: Packed, entropy: bool, temperature: float) -> Tensor:
        """Last norm and head of this rank's tokens; then all tokens' outputs, each where it belongs."""
        hidden = self.norm(x, self.weight("model.norm.weight"))
        if self.shape.kind == "value_model":
            about_next = self.values(hidden)
        else:
            about_next = self.chunked(hidden, packed.targets, temperature)
        return self.align(self.collectives.gather_outputs(about_next[:, : 1 + entropy]), packed)

    def values(self, hidden: Tensor) -> Tensor:
        """``[n, 1]`` float32."""
        params = {name: self.weight(name) for name in self.weights if name.startswith("score.")}
        return self.with_bias(params, "score", self.linear(params, "score", hidden)).float()

    def chunked(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Log-probs and entropy ``[n, 2]``, with the logits of ``logit_chunk`` tokens at a time, in backward too."""
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
        """``[n, 2]`` float32: log-probability of each target and entropy of its distribution, in nats."""
        log_p = (self.scaled_logits(hidden @ weight.T, temperature)).log_softmax(-1)
        chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
        return torch.stack((chosen, -(log_p.exp() * log_p).sum(-1)), dim=-1)

    def scaled_logits(self, logits: Tensor, temperature: float) -> Tensor:
        """Logits in float32 at a temperature."""
        return logits.float() / temperature

    def align(self, about_next: Tensor, packed: Packed) -> Tensor:
        """``[T', k]`` about the token after each → ``[T, k]`` about each; zero at first tokens, padding cut off."""
        return about_next.roll(1, 0).masked_fill(packed.first[:, None], 0.0)[: packed.size]
