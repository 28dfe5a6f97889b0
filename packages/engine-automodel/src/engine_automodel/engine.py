"""The Automodel engine: its models and their parallelism, over packed documents."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from engine_automodel.library import synchronize_tp_replica_gradients
from engine_automodel.model import PackedAutomodel, build_decoder, place_positions, tie
from engine_automodel.options import AutomodelOptions
from engine_automodel.parallel import Layout, build_layout, limit_groups
from engine_torch.decoder import BuiltDecoder, DecoderEngine
from engine_torch.float8_layers import quantize_blocks, refuse_model
from engine_torch.options import DTensorOptions

__all__ = ["AutomodelEngine", "AutomodelEngineWithLMHead", "AutomodelEngineWithValueHead"]


class AutomodelEngine(DecoderEngine):
    """The common part of the language-model and value-model engines."""

    options_class: ClassVar[type[DTensorOptions]] = AutomodelOptions

    float8_install = "pip install 'engine-automodel[core,float8]'"
    uncompiled_tp = "no test has compared compiled blocks of divided layers"

    layout: Layout

    # --- building ------------------------------------------------------------------------------

    def _build_layout(self) -> None:
        self.layout = build_layout(self.config.parallelism, self.device_type)
        limit_groups(self.layout, self.device_type, self.options.timeout_s)
        self.topology = self.layout.topology

    def _build_decoder(self) -> BuiltDecoder:
        return build_decoder(
            self.config,
            self.kind,
            self.layout,
            experts=self._choose_experts(),
            quantize=self._quantize if self._float8 else None,
        )

    def _quantize(self, lm: nn.Module, blocks: list[nn.Module]) -> None:
        options = self.options
        refuse_model(lm, blocks, self.config)
        quantize_blocks(blocks, options.float8_recipe, emulate=options.float8_emulate)

    def _choose_experts(self) -> str:
        assert isinstance(self.options, AutomodelOptions)
        return self.options.choose_experts(self.config.precision.compute)

    def _pack(self, lm: Any) -> PackedAutomodel:
        return PackedAutomodel(
            lm, kind=self.kind, logit_chunk=self.config.memory.logit_chunk, layout=self.layout
        )

    def _fill_buffers(self, built: BuiltDecoder) -> None:
        tie(built.lm)
        place_positions(built.lm, built.hf_config, self.device)

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

    @property
    def _seed_rank(self) -> int:
        # Tensor-parallel ranks drop the same inputs of an adapter of which each has a copy. Where
        # they have different inputs, the same places among them are dropped.
        return self.topology.rank // self.layout.tp

    @property
    def _layers(self) -> nn.Module:
        return self.module.lm.model.layers

    def _choices(self) -> dict[str, Any]:
        return super()._choices() | {"options.experts": self._choose_experts()}

    # --- running -------------------------------------------------------------------------------

    def _clip_gradients(self, max_norm: float | None) -> float:
        # Norms of queries and keys have the gradient of a rank's own heads until then.
        synchronize_tp_replica_gradients([self.module.lm], self.layout.root)
        return super()._clip_gradients(max_norm)


class AutomodelEngineWithLMHead(AutomodelEngine):
    """The engine for log-probs and entropy of Automodel's causal language models."""

    kind = "language_model"


class AutomodelEngineWithValueHead(AutomodelEngine):
    """The engine for a scalar per token, from a linear head on the last hidden states."""

    kind = "value_model"
    gives = ("values",)
