"""The torchtitan engine: its models and tensor parallelism, over packed documents."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine_api.arguments import check_export
from engine_api.batch import Batch
from engine_api.comm import together
from engine_api.contract import Adapter
from engine_api.distillation import DIVERGENCE, OutputHead, teaching_of
from engine_api.heartbeat import watched_each
from engine_api.hf_names import Piece
from engine_api.losses import LossFn, coefficients_of, needs_of
from engine_api.results import LossOutput, TokenOutputs
from engine_api.weights import ShardSpec, WeightExport
from engine_torch import checkpoint, export
from engine_torch.boxes import local_of
from engine_torch.decoder import BuiltDecoder, DecoderEngine
from engine_torch.inputs import PackedInputs
from engine_torch.model import DTYPES
from engine_torch.optimizer import measure_gradients, scale_gradients
from engine_torch.options import DTensorOptions
from engine_torch.weights import ShardedParam, strip
from engine_torchtitan.float8 import quantize_blocks
from engine_torchtitan.library import Hold
from engine_torchtitan.model import (
    EMBEDDING,
    HEAD,
    PackedTorchTitan,
    build_decoder,
    fill_buffers,
    tie,
)
from engine_torchtitan.options import TorchTitanOptions
from engine_torchtitan.parallel import Layout, build_layout, connect_stages, limit_groups
from engine_torchtitan.pipeline import (
    PackedStage,
    Pipeline,
    complete_table,
    export_stages,
    is_tied,
    remove_other_stages,
)

__all__ = ["TorchTitanEngine", "TorchTitanEngineWithLMHead", "TorchTitanEngineWithValueHead"]


class TorchTitanEngine(DecoderEngine):
    """The common part of the language-model and value-model engines.

    Its table has the parameters of the whole model, and empty boxes of those that other stages of a
    pipeline hold.
    """

    options_class: ClassVar[type[DTensorOptions]] = TorchTitanOptions

    float8_install = "pip install 'engine-torchtitan[core,float8]'"
    uncompiled_tp = (
        "torchtitan hands each block a tensor that is still being gathered, which torch.compile "
        "does not take"
    )

    layout: Layout

    pipeline: Pipeline | None = None
    """This rank's stage, or None without a pipeline."""

    _hold: Hold | None = None
    # The embedding where the first and the last stage hold it, on these two stages.
    _tied: ShardedParam | None = None
    # The parameters that other stages hold.
    _absent: Collection[ShardedParam] = ()
    # The saved tensors of each parameter and buffer of the whole model, and it without its values.
    _pieces: Mapping[str, list[Piece]]
    _whole: Mapping[str, Tensor]

    # --- building ------------------------------------------------------------------------------

    def _build(self) -> None:
        self._hold = Hold()
        try:
            super()._build()
        # Ctrl-C included: an engine that was not built holds nothing.
        except BaseException:
            self._let_go()
            raise

    def _build_layout(self) -> None:
        self.layout = build_layout(self.config.parallelism, self.device_type)
        limit_groups(self.layout, self.device_type, self.options.timeout_s)
        connect_stages(self.layout, self.device)
        self.topology = self.layout.topology

    def _build_model(self) -> None:
        super()._build_model()
        self.pipeline = self._build_pipeline()

    def _build_decoder(self) -> BuiltDecoder:
        built = build_decoder(
            self.config,
            self.kind,
            self.layout,
            sequence_parallel=self.options.sequence_parallel,
            quantize=self._quantize if self._float8 else None,
            cut=self._remove_other_stages if self.layout.pp > 1 else None,
        )
        self._pieces = built.pieces
        return built

    def _remove_other_stages(self, lm: Any) -> None:
        whole = [*lm.named_parameters(), *lm.named_buffers()]
        self._whole = {strip(name): tensor for name, tensor in whole}
        remove_other_stages(lm, self.layout)

    def _build_pipeline(self) -> Pipeline | None:
        """Complete the table, and return this rank's stage, or None without a pipeline."""
        if self.layout.pp == 1:
            return None
        assert isinstance(self.module, PackedStage)
        held = {entry.name for entry in self.table}
        self.table = complete_table(
            self.table, self._pieces, self._whole, self.layout.ranks_per_stage
        )
        ends = [entry for entry in self.table if entry.name == EMBEDDING]
        self._tied = ends[0] if is_tied(self._pieces) and held & {EMBEDDING, HEAD} else None
        self._absent = [
            entry for entry in self.table if entry.name not in held and entry is not self._tied
        ]
        dtype = DTYPES[self.config.precision.compute]
        return Pipeline(self.module, self.layout, self.device, dtype)

    def _quantize(self, tree: Any) -> None:
        options = self.options
        quantize_blocks(tree, options.float8_recipe, emulate=options.float8_emulate)

    def _pack(self, lm: Any) -> PackedTorchTitan:
        given: dict[str, Any] = {
            "kind": self.kind,
            "logit_chunk": self.config.memory.logit_chunk,
            "layout": self.layout,
        }
        if self.layout.pp == 1:
            return PackedTorchTitan(lm, **given)
        return PackedStage(lm, **given, sequence_parallel=self.options.sequence_parallel)

    def _fill_buffers(self, built: BuiltDecoder) -> None:
        tie(built.lm)
        fill_buffers(built.lm, self.device)

    @property
    def _layers(self) -> nn.Module:
        return self.module.lm.layers

    @property
    def _multiple(self) -> int:
        # Sequence parallelism divides the tokens over the tensor-parallel ranks.
        return super()._multiple * self.layout.tp

    # --- a pipeline ----------------------------------------------------------------------------

    def forward_step(
        self,
        batch: Batch,
        *,
        needs: Sequence[str],
        temperature: float,
        coefficients: Tensor | None = None,
    ) -> TokenOutputs:
        """Compute the outputs of one micro-batch, on a pipeline without a gradient.

        See ``BaseEngine.forward_step``.
        """
        if self.pipeline is None:
            return super().forward_step(
                batch, needs=needs, temperature=temperature, coefficients=coefficients
            )
        names = self.module.list_outputs(needs)
        found = self.pipeline.run(self.pack(batch), needs, temperature)
        if found:
            rows = torch.stack(found)
        else:
            rows = torch.empty(len(names), batch.num_tokens, device=self.device)
        return _name_outputs(names, self.pipeline.spread(rows))

    def states_step(self, batch: Batch) -> Tensor:
        """Compute the hidden states (see ``EngineDefaults.states_step``)."""
        if self.pipeline is None:
            return super().states_step(batch)
        found = self.pipeline.run(self.pack(batch), ("states",), 1.0)
        shape = (batch.num_tokens, self._hf_config.hidden_size)
        like = torch.empty(shape, dtype=self.pipeline.dtype, device=self.device)
        return self.pipeline.spread(found[0] if found else like)

    def _whole_head(self) -> OutputHead:
        if self.pipeline is None:
            return super()._whole_head()
        if self.layout.is_last:
            head = super()._whole_head()
        else:
            shape = self._pieces[HEAD][0].shape
            weight = torch.empty(shape, dtype=self.pipeline.dtype, device=self.device)
            own = self.module.head
            head = OutputHead(weight=weight, bias=None, scale=own.scale, cap=own.cap)
        self.pipeline.spread(head.weight)
        return head

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        if self.pipeline is None:
            return super()._run_train(parts, loss, denominator, temperature)
        needs = needs_of(loss)
        teaching = teaching_of(loss) if DIVERGENCE in needs else None
        names = self.module.list_outputs(needs)
        known: list[Tensor | None] = []
        if teaching is None:
            # It may raise, which no stage may do alone once the schedule has begun.
            together(self.comm, lambda: known.extend(_list_coefficients(loss, parts)))
        results: list[LossOutput] = []

        def pack(index: int) -> PackedInputs:
            if not self.layout.is_last:
                return self.pack(parts[index])
            if teaching is None:
                return self.pack(parts[index], coefficients=known[index])
            return self.pack(parts[index], teaching=teaching, teacher=self._teacher_head)

        def loss_of(index: int, outputs: tuple[Tensor, ...]) -> Tensor:
            result = self._apply_loss(loss, _name_outputs(names, outputs), parts[index])
            results.append(LossOutput(loss=result.loss.detach(), metrics=result.metrics))
            return result.loss / denominator

        self._switch(training=True)
        self.pipeline.train(
            len(parts),
            pack,
            needs,
            temperature,
            loss_of=loss_of,
            accumulating=lambda index: self._accumulation(last=index == len(parts) - 1),
        )
        # The last stage alone knows the losses, and one of its ranks is the primary one.
        return results or [LossOutput(loss=torch.zeros(()))] * len(parts)

    def _clip_gradients(self, max_norm: float | None) -> float:
        if self.pipeline is None:
            return super()._clip_gradients(max_norm)
        tied = self._tied
        if tied is not None:
            assert tied.param.grad is not None, "each micro-batch has a gradient of it"
            self.pipeline.sum_over_ends(local_of(tied.param.grad))
        norms = self.comm.all_gather(measure_gradients(self._owned))
        norm = math.hypot(*norms[:: self.layout.ranks_per_stage])
        scale_gradients(self.table, norm, max_norm)
        return norm

    @property
    def _owned(self) -> list[ShardedParam]:
        """The parameters that this stage counts and writes, without a further copy of one."""
        is_copy = self._tied is not None and self.layout.is_last
        left_out = {entry.name for entry in self._absent} | ({EMBEDDING} if is_copy else set())
        return [entry for entry in self.table if entry.name not in left_out]

    def get_per_tensor_param(
        self,
        *,
        dtype: torch.dtype | None = None,
        adapter: Adapter = "merged",
        bucket_bytes: int = 512 << 20,
    ) -> WeightExport:
        """Return whole weights by name, as an iterator (see ``Engine.get_per_tensor_param``)."""
        if self.pipeline is None:
            return super().get_per_tensor_param(
                dtype=dtype, adapter=adapter, bucket_bytes=bucket_bytes
            )
        self._expect("get_per_tensor_param", "ready")
        check_export(dtype, bucket_bytes)
        self._check_adapter(adapter)
        own = export.export_whole(self._owned, None, dtype, adapter, bucket_bytes, self.device)
        layers = self._hf_config.num_hidden_layers
        tensors = export_stages(own, self.table, self.layout, layers, dtype, self.device)
        return watched_each(self._call_name("get_per_tensor_param"), tensors)

    def state_shards(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """Return this rank's training state as boxes (see ``BaseEngine.state_shards``)."""
        if self.pipeline is None:
            return super().state_shards()
        # Of the ranks that have a step count, the first one of the stage writes it.
        place = self.topology.rank % self.layout.ranks_per_stage
        return checkpoint.state_of(self._owned, self.optimizer, place)

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        super()._install_state(tensors)
        if self.optimizer is not None:
            for entry in self._absent:
                self.optimizer.state.pop(entry.param, None)

    def _release(self) -> None:
        self._tied = None
        self._absent = []
        self._whole = {}
        self.pipeline = None
        try:
            super()._release()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None


class TorchTitanEngineWithLMHead(TorchTitanEngine):
    """The engine for log-probs and entropy of torchtitan's causal language models."""

    kind = "language_model"


class TorchTitanEngineWithValueHead(TorchTitanEngine):
    """The engine for a scalar per token, from a linear head on the last hidden states."""

    kind = "value_model"
    gives = ("values",)


def _name_outputs(names: Sequence[str], values: Iterable[Tensor]) -> TokenOutputs:
    """Return outputs by name."""
    return TokenOutputs(**dict(zip(names, values, strict=True)))


def _list_coefficients(loss: LossFn, parts: Sequence[Batch]) -> list[Tensor | None]:
    """Return the derivative of the loss in each micro-batch, where it is known in advance."""
    return [coefficients_of(loss, part) if part.num_tokens else None for part in parts]
