"""Engines whose model is another library's own decoder, built on the meta device.

Such a library divides its model over ranks of tensor and expert parallelism. What comes after that
is the same for all of them: ``fully_shard``, weights from files or drawn, packing, and the head.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from engine_api.batch import Batch
from engine_api.comm import together
from engine_api.config import EngineConfig
from engine_api.errors import ConfigError
from engine_api.hf_folder import WeightFiles
from engine_api.hf_names import Piece
from engine_api.registry import Resolution
from engine_torch import lora
from engine_torch.boxes import local_of
from engine_torch.compiling import compile_blocks
from engine_torch.context import CONTEXT_KERNELS
from engine_torch.engine import DTensorEngine
from engine_torch.float8 import warn_uncompiled
from engine_torch.float8_layers import refuse_divided
from engine_torch.head import VocabularyShard
from engine_torch.inputs import PackedInputs, pack_inputs
from engine_torch.model import (
    Kind,
    PackedModel,
    find_recomputed,
    initial_std,
    is_compiled,
    is_recomputing,
)
from engine_torch.parallel import is_plain, shard_model
from engine_torch.weights import draw, fill, name_adapted, parameter_table

__all__ = ["BuiltDecoder", "DecoderEngine", "DecoderLayout", "PackedDecoder", "check_divisible"]

log = logging.getLogger("engine_torch")


class DecoderLayout(Protocol):
    """The meshes of an engine, and this rank's place in them."""

    cp: int
    """Number of context-parallel ranks."""

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of ``fully_shard``: ``(shard,)``, or ``(replicate, shard)`` for HSDP."""
        ...

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """Mesh that ``fully_shard`` shards experts over, or None where they are not spread."""
        ...

    @property
    def cp_group(self) -> Any:
        """Process group of context parallelism, or None without it."""
        ...

    @property
    def cp_rank(self) -> int:
        """This rank's index in the group of context parallelism."""
        ...


@dataclass(frozen=True, kw_only=True)
class BuiltDecoder:
    """A model on the meta device, divided by its library but not yet by ``fully_shard``."""

    lm: Any
    """The library's model."""

    hf_config: Any
    """Transformers' configuration of the model."""

    pieces: dict[str, list[Piece]]
    """Saved tensors of each parameter, in the order of transformers.

    They are by the parameter's name without the prefixes of adapters and of recomputed blocks.
    """

    folder: str
    """Folder of the model's files."""

    files: WeightFiles | None
    """The weights, or None for a model that draws them."""

    blocks: list[nn.Module]
    """The repeated blocks in their order."""

    experts: list[nn.Module]
    """The modules that hold the weights of experts."""


class PackedDecoder(PackedModel):
    """The FSDP root, made of a library's decoder and the head that computes per-token outputs."""

    def __init__(self, lm: Any, *, kind: Kind, logit_chunk: int, cp_group: Any) -> None:
        super().__init__(lm, kind=kind, logit_chunk=logit_chunk, group=cp_group)

    def _adapt(self, lm: Any) -> None:
        """Leave the library's layers as they are, which are given the documents in each pass."""

    @abstractmethod
    def decode(self, inputs: PackedInputs) -> Tensor:
        """Compute the hidden states ``[1, T, d]``, whole on each tensor-parallel rank."""

    @abstractmethod
    def divide(self, hidden: Tensor) -> tuple[Tensor, Tensor, VocabularyShard | None]:
        """Return hidden states ``[1, T, d]`` and the language model's head, as local tensors.

        The second value is this rank's rows of the head's weight, and the third their place in the
        vocabulary, or None for all rows. Where ranks have different rows, each has a part of the
        hidden states' gradient.
        """

    def forward(
        self, inputs: PackedInputs | Tensor, needs: Sequence[str], temperature: float
    ) -> tuple[Tensor, ...]:
        """Compute the aligned outputs of the whole micro-batch (see ``PackedModel.forward``)."""
        assert isinstance(inputs, PackedInputs)
        hidden = self.decode(inputs)
        if self.kind == "value_model":
            return self.evaluate(inputs, local_of(hidden)[0])
        hidden, weight, shard = self.divide(hidden)
        return self.score(inputs, needs, temperature, hidden[0], weight, shard=shard)

    @property
    def output_embedding(self) -> Any:
        """The module of the output head."""
        return self.lm.lm_head


class DecoderEngine(DTensorEngine):
    """The common part of the language-model and value-model engines."""

    uncompiled_tp: ClassVar[str]
    """Reason why blocks that tensor parallelism divides are not compiled."""

    layout: DecoderLayout
    """The meshes, set by ``_build_layout``."""

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        super().__init__(config, resolution=resolution)
        if self._float8:
            refuse_divided(config.parallelism)
        if config.memory.compile and config.parallelism.tp > 1:
            raise ConfigError(
                "memory.compile",
                f"expected false with parallelism.tp {config.parallelism.tp}, got true",
                why=self.uncompiled_tp,
                remedy="turn it off, or use context or data parallelism",
            )

    # --- hooks that a derived engine provides --------------------------------------------------

    @abstractmethod
    def _build_decoder(self) -> BuiltDecoder:
        """Build the model on this rank, divided by tensor and expert parallelism.

        Where ``_float8`` is true, the linear layers of its blocks compute in FP8.
        """

    @abstractmethod
    def _pack(self, lm: Any) -> PackedDecoder:
        """Return the module that computes per-token outputs with the library's model."""

    @abstractmethod
    def _fill_buffers(self, built: BuiltDecoder) -> None:
        """Tie the weights that the model shares, and compute the buffers that are in no file."""

    @property
    @abstractmethod
    def _layers(self) -> nn.Module:
        """The module whose children are the blocks."""

    def _number_copies(self) -> None:
        """Correct the number of a copy in the table, where placements do not say it."""

    # --- building ------------------------------------------------------------------------------

    def _build_model(self) -> None:
        config = self.config
        _refuse_kernel(self.kernel, self.layout.cp)
        models: list[BuiltDecoder] = []
        # A folder may be damaged, or absent, on one machine only.
        together(self.comm, lambda: models.append(self._build_decoder()))
        (built,) = models
        self.folder = built.folder
        self.mtp = None if built.files is None else built.files.mtp
        self._built_config = built.hf_config
        self.vocab_size = int(built.hf_config.vocab_size)
        self.module = self._pack(built.lm).eval()
        copies = self._will_keep_copies(built.lm)
        if not copies and not is_plain(config, self.topology.world_size):
            expert_mesh = self.layout.expert_mesh
            shard_model(
                self.module,
                built.blocks,
                config,
                self.layout.mesh,
                self.options.prefetch_blocks,
                parts={} if expert_mesh is None else dict.fromkeys(built.experts, expert_mesh),
                # Routing weights may be float32.
                exact=built.experts,
            )
        home = torch.device("cpu") if config.memory.offload_params else self.device
        self.module.to_empty(device=home)
        self._fill_buffers(built)
        self.table = parameter_table(built.lm, built.pieces)
        order = {name: index for index, name in enumerate(built.pieces)}
        self.table.sort(key=lambda entry: order[name_adapted(entry.name)])
        self._number_copies()
        # A file may be damaged on one machine only.
        together(self.comm, lambda: self._fill(built))
        if copies:
            self._keep_copies(built.blocks)
        if config.memory.compile:
            self._compile(built)
        elif self._float8 and not self.options.float8_emulate and self.comm.rank == 0:
            warn_uncompiled(log)

    def _compile(self, built: BuiltDecoder) -> None:
        """Compile each block, or what it recomputes where it holds experts."""
        if self._float8:
            rowwise = self.options.float8_recipe == "rowwise"
            compile_blocks(built.blocks, rounds_casts=rowwise)
            return
        for block in built.blocks:
            has_experts = not set(built.experts).isdisjoint(block.modules())
            # Experts may run uncompiled, which inside of a recomputed call would leave the whole
            # block so.
            (find_recomputed(block) if has_experts else block).compile()

    def _fill(self, built: BuiltDecoder) -> None:
        std = initial_std(built.hf_config)
        if built.files is None:
            draw(self.table, self.config.seed, std)
        else:
            fill(self.table, built.files, self.config.seed, std)
        lora.initialize(self.table, self.config.seed)

    @property
    def _hf_config(self) -> Any:
        return self._built_config

    def _choices(self) -> dict[str, Any]:
        kernel = self.kernel
        if kernel == "auto":
            # The kernel depends on the micro-batch where two are as good.
            kernel = "varlen" if self.layout.cp > 1 else "cudnn or varlen"
        return {
            **super()._choices(),
            "model.attention": kernel,
            "memory.recompute": "full" if is_recomputing(self._layers) else "none",
            "memory.compile": is_compiled(self._layers.children()),
            "memory.logit_chunk": self.module.logit_chunk,
        }

    # --- running -------------------------------------------------------------------------------

    def pack(self, batch: Batch, **given: Any) -> PackedInputs:
        """Return a micro-batch as the module takes it (see ``DTensorEngine.pack``)."""
        return pack_inputs(
            batch,
            group=self.layout.cp_group,
            parts=self.layout.cp,
            part=self.layout.cp_rank,
            kernel=self.kernel,
            device=self.device,
            multiple=self._multiple,
            gathers_keys=True,
            **given,
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


def check_divisible(hf_config: Any, name: str, kind: str, ranks: int) -> None:
    """Raise ``ConfigError`` for a size of the model that a number of ranks does not divide.

    Args:
        hf_config: transformers' configuration of the model.
        name: the size in it, such as ``num_experts``.
        kind: the field of ``parallelism``.
        ranks: its value.
    """
    size = getattr(hf_config, name)
    if size % ranks:
        raise ConfigError(
            f"parallelism.{kind}",
            f"{name} {size} cannot be divided over {ranks} ranks",
            remedy="choose a divisor of it",
        )
