"""The Automodel engine: its models and their parallelism, over packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.comm import together
from engine_api.errors import ConfigError
from engine_api.results import TokenOutputs
from engine_automodel.library import synchronize_tp_replica_gradients
from engine_automodel.model import (
    BuiltDecoder,
    PackedDecoder,
    build_decoder,
    place_positions,
    tie,
)
from engine_automodel.options import AutomodelOptions
from engine_automodel.parallel import Layout, build_layout, limit_groups
from engine_torch.context import CONTEXT_KERNELS
from engine_torch.engine import DTensorEngine
from engine_torch.inputs import pack_inputs
from engine_torch.model import is_recomputing
from engine_torch.options import DTensorOptions
from engine_torch.parallel import shard_model
from engine_torch.weights import draw, fill, parameter_table

__all__ = ["AutomodelEngine"]


class AutomodelEngine(DTensorEngine):
    """The engine for log-probs and entropy of Automodel's causal language models."""

    kind = "language_model"
    options_class: ClassVar[type[DTensorOptions]] = AutomodelOptions

    # --- building ------------------------------------------------------------------------------

    def _build_layout(self) -> None:
        self.layout: Layout = build_layout(self.config.parallelism, self.device_type)
        limit_groups(self.layout, self.device_type, self.options.timeout_s)
        self.topology = self.layout.topology

    def _build_model(self) -> None:
        config = self.config
        _refuse_kernel(self.kernel, self.layout.cp)
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
        place_positions(lm, built.hf_config, self.device)
        self.table = parameter_table(lm, built.pieces)
        order = {name: index for index, name in enumerate(built.pieces)}
        self.table.sort(key=lambda entry: order[entry.name])
        self._number_copies()
        # A file may be damaged on one machine only.
        together(self.comm, lambda: self._fill(built))

    def _build_decoder(self) -> BuiltDecoder:
        return build_decoder(self.config, self.layout, experts=self._choose_experts())

    def _choose_experts(self) -> str:
        assert isinstance(self.options, AutomodelOptions)
        return self.options.choose_experts(self.config.precision.compute)

    def _is_plain(self) -> bool:
        """Return whether there is nothing to shard, reduce or cast.

        FSDP would still copy every weight and gradient through its buffers.
        """
        precision = self.config.precision
        one_dtype = precision.master == precision.compute == precision.reduce
        alone = self.topology.world_size == 1
        return alone and one_dtype and not self.config.memory.offload_params

    def _number_copies(self) -> None:
        """Count the copies of parameters that Automodel's plan leaves whole on each rank.

        Their placements say nothing about tensor parallelism.
        """
        if self.layout.tp == 1:
            return
        for entry in self.table:
            mesh: Any = getattr(entry.param, "device_mesh", None)
            if mesh is None or "tp" not in (mesh.mesh_dim_names or ()):
                entry.replica = entry.replica * self.layout.tp + self.layout.tp_rank

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
            "memory.recompute": "full" if is_recomputing(self.module.lm.model.layers) else "none",
            "memory.logit_chunk": self.module.logit_chunk,
            "options.experts": self._choose_experts(),
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
            multiple=self.config.memory.pad_to_multiple,
            coefficients=coefficients,
            gathers_keys=True,
        )
        return self.module.outputs(inputs, needs, temperature)

    def _clip_gradients(self, max_norm: float | None) -> float:
        self._expect_loaded("train")
        # Norms of queries and keys have the gradient of a rank's own heads until then.
        synchronize_tp_replica_gradients([self.module.lm], self.layout.root)
        return super()._clip_gradients(max_norm)


def _refuse_kernel(kernel: str, cp: int) -> None:
    """Raise ``ConfigError`` for a kernel that context parallelism cannot use."""
    if cp > 1 and kernel not in ("auto", *CONTEXT_KERNELS):
        raise ConfigError(
            "model.attention",
            f"expected {' or '.join(CONTEXT_KERNELS)} with parallelism.cp {cp}, got {kernel}",
            why="it takes whole documents",
            remedy=f"use auto, {' or '.join(CONTEXT_KERNELS)}",
        )
