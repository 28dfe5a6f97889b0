"""The torchtitan engine: its models and tensor parallelism, over packed documents."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from engine_api.config import EngineConfig
from engine_api.errors import ConfigError
from engine_api.registry import Resolution
from engine_torch.decoder import BuiltDecoder, DecoderEngine
from engine_torch.float8 import (
    check_float8,
    compile_blocks,
    compute_in_bfloat16,
    refuse_without_torchao,
    round_up,
    takes_float8,
)
from engine_torch.float8_layers import refuse_divided
from engine_torch.model import is_compiled
from engine_torch.options import DTensorOptions
from engine_torchtitan.float8 import quantize_blocks
from engine_torchtitan.library import Hold
from engine_torchtitan.model import (
    PackedTorchTitan,
    build_decoder,
    fill_buffers,
    tie,
)
from engine_torchtitan.options import TorchTitanOptions
from engine_torchtitan.parallel import Layout, build_layout, limit_groups

__all__ = ["TorchTitanEngine"]


class TorchTitanEngine(DecoderEngine):
    """The engine for log-probs and entropy of torchtitan's causal language models."""

    options_class: ClassVar[type[DTensorOptions]] = TorchTitanOptions

    layout: Layout

    _hold: Hold | None = None
    _float8 = False

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        install = "pip install 'engine-torchtitan[core,float8]'"
        refuse_without_torchao(config, resolution.plugin.name, install)
        super().__init__(config, resolution=resolution)
        check_float8(config, resolution.device, emulate=self.options.float8_emulate)
        self._float8 = takes_float8(config)
        if self._float8:
            refuse_divided(config.parallelism)
            self.config = compute_in_bfloat16(config)

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
        self.topology = self.layout.topology

    def _build_model(self) -> None:
        _refuse_compilation(self.config, self.layout.tp)
        super()._build_model()
        if self._float8 and self.config.memory.compile:
            compile_blocks(self._layers.children(), self.options.float8_recipe)

    def _build_decoder(self) -> BuiltDecoder:
        return build_decoder(
            self.config,
            self.layout,
            sequence_parallel=self.options.sequence_parallel,
            quantize=self._quantize if self._float8 else None,
        )

    def _quantize(self, tree: Any) -> None:
        options = self.options
        quantize_blocks(tree, options.float8_recipe, emulate=options.float8_emulate)

    def _pack(self, lm: Any) -> PackedTorchTitan:
        return PackedTorchTitan(lm, logit_chunk=self.config.memory.logit_chunk, layout=self.layout)

    def _fill_buffers(self, built: BuiltDecoder) -> None:
        tie(built.lm)
        fill_buffers(built.lm, self.device)

    @property
    def _layers(self) -> nn.Module:
        return self.module.lm.layers

    @property
    def _multiple(self) -> int:
        # Sequence parallelism divides the tokens over the tensor-parallel ranks.
        multiple = self.config.memory.pad_to_multiple * self.layout.tp
        return round_up(multiple) if self._float8 else multiple

    def _choices(self) -> dict[str, Any]:
        chosen = super()._choices() | {"memory.compile": is_compiled(self._layers)}
        return chosen | {"precision.compute": "float8"} if self._float8 else chosen

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
