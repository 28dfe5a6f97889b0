"""A pipeline of stages, which send hidden states and their gradients to their neighbours.

The schedule is 1F1B (arXiv:2104.04473). ``torch.distributed.pipelining`` is not used, because its
stages agree on one shape of all messages, and its loss takes one output and one target of a
micro-batch. Here each micro-batch has its own number of tokens, which every stage knows from its
documents, and a loss is any function of the documents and of several outputs for each token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from engine_api.errors import ConfigError
from engine_api.hf_names import Piece
from engine_api.weights import WeightExport
from engine_torch.boxes import Box, local_of
from engine_torch.inputs import PackedInputs
from engine_torch.model import Kind
from engine_torch.weights import ShardedParam
from engine_torchtitan.model import EMBEDDING, HEAD, PackedTorchTitan
from engine_torchtitan.parallel import Layout

__all__ = [
    "PackedStage",
    "Pipeline",
    "complete_table",
    "export_stages",
    "find_stage",
    "list_layers",
    "list_work",
    "remove_other_stages",
]

Work = tuple[Literal["forward", "backward"], int]


def list_layers(stage: int, stages: int, layers: int) -> range:
    """Return the layers of a stage, whose number differs by at most one between stages."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def find_stage(name: str, stages: int, layers: int) -> int:
    """Return the stage that a parameter is exported from, by its name in the whole model."""
    if found := re.match(r"layers\.(\d+)\.", name):
        layer = int(found[1])
        return next(stage for stage in range(stages) if layer in list_layers(stage, stages, layers))
    return 0 if name == EMBEDDING else stages - 1


def remove_other_stages(lm: Any, layout: Layout) -> None:
    """Remove the parts of a model that other stages hold.

    The first stage holds the embedding, and the last one the norm and the head. Both hold a copy of
    a weight that embedding and head share.

    Raises:
        ConfigError: there are more stages than layers.
    """
    count = len(lm.layers)
    if layout.pp > count:
        raise ConfigError(
            "parallelism.pp",
            f"expected at most {count}, got {layout.pp}",
            why=f"the model has {count} layers, and each stage computes at least one",
            remedy=f"set parallelism.pp to at most {count}",
        )
    own = list_layers(layout.stage, layout.pp, count)
    for index in range(count):
        if index not in own:
            del lm.layers[str(index)]
    # torchtitan's decoder passes by what is None.
    if not layout.is_first:
        lm.tok_embeddings = None
    if not layout.is_last:
        lm.norm = None
        lm.lm_head = None


def complete_table(
    table: Sequence[ShardedParam],
    pieces: Mapping[str, list[Piece]],
    whole: Mapping[str, Tensor],
    ranks: int,
) -> list[ShardedParam]:
    """Return the parameters of the whole model in its order, with empty boxes of other stages'.

    A head that is tied to the embedding becomes a further copy of it.

    Args:
        table: the parameters and saved buffers of this stage.
        pieces: saved tensors by parameter and saved buffer of the whole model, in its order.
        whole: the parameters and buffers of the whole model, without values.
        ranks: number of ranks of a stage.
    """
    own = {entry.name: entry for entry in table}
    for entry in table:
        if entry.owner is not None:
            # The table counts its copies over all ranks, and other stages have none.
            own[entry.name] = replace(entry, replica=entry.replica % ranks, _specs=None)
    device = table[0].param.device
    tied = is_tied(pieces)
    if tied and HEAD in own:
        own[EMBEDDING] = _as_further_copy(own[HEAD])
    return [
        own[name] if name in own else _make_absent(name, parts, whole[name], device)
        for name, parts in pieces.items()
        if not (tied and name == HEAD)
    ]


def is_tied(pieces: Mapping[str, list[Piece]]) -> bool:
    """Return whether embedding and head are one saved tensor."""
    return pieces[HEAD] == pieces[EMBEDDING]


def _as_further_copy(head: ShardedParam) -> ShardedParam:
    """Return the entry of a tied head, with the embedding's name and a number after its copies."""
    param: Any = head.param
    copies = 1
    if isinstance(param, DTensor):
        places = zip(param.device_mesh.shape, param.placements, strict=True)
        copies = math.prod(size for size, one in places if one.is_replicate())
    return ShardedParam(
        name=EMBEDDING,
        pieces=head.pieces,
        param=param,
        box=head.box,
        replica=head.replica + copies,
        trainable=head.trainable,
        copy=head.copy,
    )


def _make_absent(
    name: str, pieces: list[Piece], whole: Tensor, device: torch.device
) -> ShardedParam:
    """Return an entry for a parameter or a saved buffer of which this rank holds nothing."""
    empty = torch.empty(0, *whole.shape[1:], dtype=whole.dtype, device=device)
    trainable = isinstance(whole, nn.Parameter)
    return ShardedParam(
        name=name,
        pieces=pieces,
        param=nn.Parameter(empty) if trainable else empty,
        box=Box(offset=(0,) * empty.dim(), shape=tuple(empty.shape)),
        trainable=trainable,
    )


def list_work(stage: int, stages: int, count: int) -> Iterator[Work]:
    """Yield the passes of a stage over ``count`` micro-batches in the order of 1F1B.

    A stage holds the activations of at most ``stages - stage`` micro-batches.
    """
    ahead = min(stages - 1 - stage, count)
    for index in range(ahead):
        yield "forward", index
    for index in range(count):
        if index + ahead < count:
            yield "forward", index + ahead
        yield "backward", index


class PackedStage(PackedTorchTitan):
    """The FSDP root of one stage.

    Every stage but the last returns its hidden states in the place of outputs.
    """

    def __init__(
        self,
        lm: Any,
        *,
        kind: Kind,
        logit_chunk: int,
        layout: Layout,
        sequence_parallel: bool,
    ) -> None:
        super().__init__(lm, kind=kind, logit_chunk=logit_chunk, layout=layout)
        self.tp_mesh = layout.dims.get_mesh("tp") if layout.tp > 1 else None
        self.divides_tokens = sequence_parallel and layout.tp > 1

    def forward(
        self,
        inputs: Any,
        needs: Sequence[str],
        temperature: float,
        received: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute the stage of a micro-batch (see ``PackedModel.forward``).

        ``received`` are the hidden states of the stage before it.
        """
        assert isinstance(inputs, PackedInputs)
        if received is not None:
            # torchtitan's decoder takes hidden states in the place of tokens.
            inputs = replace(inputs, input_ids=self._as_divided(received))
        if self.lm.lm_head is not None:
            return super().forward(inputs, needs, temperature)
        return (local_of(self.decode(inputs)),)

    def _as_divided(self, states: Tensor) -> Tensor:
        """Return hidden states as torchtitan's blocks divide them over tensor-parallel ranks."""
        if self.tp_mesh is None:
            return states
        place = Shard(1) if self.divides_tokens else Replicate()
        return DTensor.from_local(states, self.tp_mesh, [place], run_check=False)

    def shape_of_states(self, inputs: PackedInputs) -> tuple[int, int, int]:
        """Return the shape of the hidden states that this rank receives for a micro-batch."""
        tokens = inputs.input_ids.shape[-1]
        if self.divides_tokens:
            assert self.tp_mesh is not None
            tokens //= self.tp_mesh.size()
        return 1, tokens, self.lm.config.dim


class Pipeline:
    """This rank's stage, with its messages to and from other stages.

    Messages do not wait for the rank that takes them, once ``parallel.connect_stages`` has been
    called. Each route has a group of its own (``Layout.message_groups``): messages of both
    directions in one group would wait for each other on a GPU.

    Args:
        module: the stage, wrapped by ``fully_shard``.
        layout: the meshes, and this rank's place in them.
        device: the device of messages.
        dtype: dtype of the computation, which hidden states have.
    """

    def __init__(
        self, module: PackedStage, layout: Layout, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.module = module
        self.layout = layout
        self.device = device
        self.dtype = dtype

    def run(
        self, inputs: PackedInputs, needs: Sequence[str], temperature: float
    ) -> tuple[Tensor, ...]:
        """Compute one micro-batch without a gradient, and return its outputs on the last stage.

        The other stages return nothing.
        """
        outputs, sent = self._forward(inputs, needs, temperature, None)
        _wait([sent])
        return outputs if self.layout.is_last else ()

    def train(
        self,
        count: int,
        pack: Callable[[int], PackedInputs],
        needs: Sequence[str],
        temperature: float,
        *,
        loss_of: Callable[[int, tuple[Tensor, ...]], Tensor],
        accumulating: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """Run forward and backward over the micro-batches.

        Args:
            count: number of micro-batches, the same on all ranks.
            pack: function that returns the inputs of a micro-batch.
            needs: names of the outputs.
            temperature: divisor of the logits.
            loss_of: function of a micro-batch's outputs on the last stage, which returns a scalar
                to differentiate. It must not raise, because other stages wait for this one.
            accumulating: context of a micro-batch's backward pass.
        """
        held: dict[int, tuple[Tensor | None, Tensor]] = {}
        sent: list[tuple[Any, Tensor] | None] = []
        for kind, index in list_work(self.layout.stage, self.layout.pp, count):
            sent = [one for one in sent if one is not None and not one[0].is_completed()]
            if kind == "forward":
                inputs = pack(index)
                received = self._receive_states(inputs, requires_grad=True)
                outputs, message = self._forward(inputs, needs, temperature, received)
                sent.append(message)
                last = self.layout.is_last
                held[index] = received, loss_of(index, outputs) if last else outputs[0]
                continue
            received, result = held.pop(index)
            gradient = None if self.layout.is_last else self._receive_gradient(result)
            with accumulating(index):
                torch.autograd.backward(result, gradient)
            if received is not None:
                assert received.grad is not None, "the states are the input of every block"
                sent.append(self._send(self.layout.stage - 1, received.grad))
        _wait(sent)

    def _forward(
        self,
        inputs: PackedInputs,
        needs: Sequence[str],
        temperature: float,
        received: Tensor | None,
    ) -> tuple[tuple[Tensor, ...], tuple[Any, Tensor] | None]:
        """Compute a micro-batch, and return its outputs and the message with hidden states."""
        if received is None:
            received = self._receive_states(inputs, requires_grad=False)
        outputs = self.module(inputs, needs, temperature, received)
        if self.layout.is_last:
            return outputs, None
        return outputs, self._send(self.layout.stage + 1, outputs[0].detach())

    def _receive_states(self, inputs: PackedInputs, *, requires_grad: bool) -> Tensor | None:
        """Return the hidden states that the stage before has sent, or None on the first stage."""
        if self.layout.is_first:
            return None
        shape = self.module.shape_of_states(inputs)
        states = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._receive(self.layout.stage - 1, states)
        return states.requires_grad_(requires_grad)

    def _receive_gradient(self, states: Tensor) -> Tensor:
        """Return the gradient of hidden states, which the stage behind has sent."""
        gradient = torch.empty_like(states, requires_grad=False).contiguous()
        self._receive(self.layout.stage + 1, gradient)
        return gradient

    def _send(self, stage: int, values: Tensor) -> tuple[Any, Tensor]:
        """Begin to send values to a stage, and return the work with what it reads."""
        values = values.contiguous()
        group = self.layout.message_groups[self.layout.stage, stage]
        return dist.isend(values, self.layout.rank_of(stage), group), values

    def _receive(self, stage: int, values: Tensor) -> None:
        group = self.layout.message_groups[stage, self.layout.stage]
        dist.recv(values, self.layout.rank_of(stage), group)

    def spread(self, values: Tensor) -> Tensor:
        """Give every stage the values that the last stage has, in place."""
        dist.broadcast(values, self.layout.rank_of(self.layout.pp - 1), self.layout.pp_group)
        return values

    def sum_over_ends(self, gradient: Tensor) -> None:
        """Add the gradients of a weight that the first and the last stage hold, in place.

        Both of them call it. A sum of two has the same bits on both.
        """
        own = gradient.to(self.device).contiguous()
        other = torch.empty_like(own)
        # Both ranks come to the two messages in one order, as NCCL wants it.
        if self.layout.is_first:
            work = self._send(self.layout.pp - 1, own)
            self._receive(self.layout.pp - 1, other)
        else:
            self._receive(0, other)
            work = self._send(0, own)
        _wait([work])
        gradient.copy_(own + other)


def _wait(sent: Sequence[tuple[Any, Tensor] | None]) -> None:
    """Wait until messages are sent."""
    for message in sent:
        if message is not None:
            message[0].wait()


def export_stages(
    own: WeightExport,
    table: Sequence[ShardedParam],
    layout: Layout,
    layers: int,
    dtype: torch.dtype | None,
    device: torch.device,
) -> WeightExport:
    """Yield (name, whole tensor) of all stages in the model's order.

    The tensors of one parameter exist at a time, in addition to those that ``own`` gathers.

    Args:
        own: the tensors of this stage.
        table: the parameters of the whole model.
        layout: the meshes, and this rank's place in them.
        layers: number of layers of the whole model.
        dtype: dtype of the tensors, or None for that of the masters.
        device: the device of the tensors.
    """
    for entry in table:
        stage = find_stage(entry.name, layout.pp, layers)
        sizes = [math.prod(piece.shape) for piece in entry.pieces]
        if stage == layout.stage:
            # Experts are many small tensors of one parameter, and travel together.
            flat = torch.cat([next(own)[1].flatten() for _ in entry.pieces])
        else:
            flat = torch.empty(sum(sizes), dtype=dtype or entry.param.dtype, device=device)
        dist.broadcast(flat, layout.rank_of(stage), layout.pp_group)
        for piece, part in zip(entry.pieces, flat.split(sizes), strict=True):
            yield piece.name, part.view(piece.shape)
