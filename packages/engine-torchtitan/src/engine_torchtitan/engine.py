"""The torchtitan engine: its models and tensor parallelism, over packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.comm import together
from engine_api.config import EngineConfig
from engine_api.errors import ConfigError
from engine_api.results import TokenOutputs
from engine_torch.context import CONTEXT_KERNELS
from engine_torch.engine import DTensorEngine
from engine_torch.inputs import pack_inputs
from engine_torch.model import is_recomputing
from engine_torch.options import DTensorOptions
from engine_torch.parallel import shard_model
from engine_torch.weights import draw, fill, parameter_table
from engine_torchtitan.library import Hold
from engine_torchtitan.model import (
    BuiltDecoder,
    PackedDecoder,
    build_decoder,
    fill_buffers,
    is_compiled,
    tie,
)
from engine_torchtitan.options import TorchTitanOptions
from engine_torchtitan.parallel import Layout, build_layout, limit_groups

__all__ = ["TorchTitanEngine"]


class TorchTitanEngine(DTensorEngine):
    """The engine for log-probs and entropy of torchtitan's causal language models."""

    kind = "language_model"
    options_class: ClassVar[type[DTensorOptions]] = TorchTitanOptions

    _hold: Hold | None = None

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
        self.layout: Layout = build_layout(self.config.parallelism, self.device_type)
        limit_groups(self.layout, self.device_type, self.options.timeout_s)
        self.topology = self.layout.topology

    def _build_model(self) -> None:
        config = self.config
        _refuse_kernel(self.kernel, self.layout.cp)
        _refuse_compilation(config, self.layout.tp)
        models: list[BuiltDecoder] = []
        # A folder may be damaged, or absent, on one machine only.
        together(self.comm, lambda: models.append(self._build_decoder()))
        (built,) = models
        lm = built.lm
        self.folder = built.folder
        self._built_config = built.hf_config
        self.vocab_size = int(built.hf_config.vocab_size)
        self.module = PackedDecoder(
            lm, logit_chunk=config.memory.logit_chunk, layout=self.layout
        ).eval()
        if not self._is_plain():
            expert_mesh = self.layout.expert_mesh
            shard_model(
                self.module,
                built.blocks,
                config,
                self.layout.mesh,
                self.options.prefetch_blocks,
                parts={} if expert_mesh is None else dict.fromkeys(built.experts, expert_mesh),
            )
        home = torch.device("cpu") if config.memory.offload_params else self.device
        self.module.to_empty(device=home)
        tie(lm)
        fill_buffers(lm, self.device)
        self.table = parameter_table(lm, built.pieces)
        order = {name: index for index, name in enumerate(built.pieces)}
        self.table.sort(key=lambda entry: order[entry.name])
        # A file may be damaged on one machine only.
        together(self.comm, lambda: self._fill(built))
        if config.memory.compile:
            for block in built.blocks:
                block.compile()

    def _build_decoder(self) -> BuiltDecoder:
        return build_decoder(
            self.config, self.layout, sequence_parallel=self.options.sequence_parallel
        )

    def _is_plain(self) -> bool:
        """Return whether there is nothing to shard, reduce or cast.

        FSDP would still copy every weight and gradient through its buffers.
        """
        precision = self.config.precision
        one_dtype = precision.master == precision.compute == precision.reduce
        alone = self.topology.world_size == 1
        return alone and one_dtype and not self.config.memory.offload_params

    def _fill(self, built: BuiltDecoder) -> None:
        if built.files is None:
            draw(self.table, self.config.seed, built.hf_config.initializer_range)
        else:
            fill(self.table, built.files, self.config.seed)

    @property
    def _hf_config(self) -> Any:
        return self._built_config

    def _choices(self) -> dict[str, Any]:
        kernel = self.kernel
        if kernel == "auto":
            # The kernel depends on the micro-batch where two are as good.
            kernel = "varlen" if self.layout.cp > 1 else "cudnn or varlen"
        return {
            "model.attention": kernel,
            "memory.recompute": "full" if is_recomputing(self.module.lm.layers) else "none",
            "memory.compile": is_compiled(self.module.lm),
            "memory.logit_chunk": self.module.logit_chunk,
        }

    # --- running -------------------------------------------------------------------------------

    def forward_step(
        self,
        batch: Batch,
        *,
        needs: Sequence[str],
        temperature: float,
        coefficients: Tensor | None = None,
    ) -> TokenOutputs:
        """Compute the per-token outputs of one micro-batch (see ``BaseEngine.forward_step``)."""
        inputs = pack_inputs(
            batch,
            group=self.layout.cp_group,
            parts=self.layout.cp,
            part=self.layout.cp_rank,
            kernel=self.kernel,
            device=self.device,
            # Sequence parallelism divides the tokens over the tensor-parallel ranks.
            multiple=self.config.memory.pad_to_multiple * self.layout.tp,
            coefficients=coefficients,
            gathers_keys=True,
        )
        return self.module.outputs(inputs, needs, temperature)

    def _release(self) -> None:
        try:
            super()._release()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None


def _refuse_compilation(config: EngineConfig, tp: int) -> None:
    """Raise ``ConfigError`` for compiled blocks under tensor parallelism."""
    if config.memory.compile and tp > 1:
        raise ConfigError(
            "memory.compile",
            f"expected false with parallelism.tp {tp}, got true",
            why="torchtitan hands each block a tensor that is still being gathered, which "
            "torch.compile does not take",
            remedy="turn it off, or use context or data parallelism",
        )


def _refuse_kernel(kernel: str, cp: int) -> None:
    """Raise ``ConfigError`` for a kernel that context parallelism cannot use."""
    if cp > 1 and kernel not in ("auto", *CONTEXT_KERNELS):
        raise ConfigError(
            "model.attention",
            f"expected {' or '.join(CONTEXT_KERNELS)} with parallelism.cp {cp}, got {kernel}",
            why="it takes whole documents",
            remedy=f"use auto, {' or '.join(CONTEXT_KERNELS)}",
        )
