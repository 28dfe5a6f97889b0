"""The FSDP2 engine: Hugging Face models on ``fully_shard``, packed documents, Ulysses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from engine_api.balance import BALANCE_LOSS, Balance, check_balanced
from engine_api.batch import Batch
from engine_api.comm import together
from engine_api.config import EngineConfig
from engine_api.errors import ConfigError
from engine_api.hf_vision import position_tokens
from engine_api.prepare import MicroBatches
from engine_api.registry import Resolution
from engine_fsdp.options import FSDPOptions
from engine_fsdp.parallel import Layout, build_layout, limit_groups, shard_model
from engine_torch import lora
from engine_torch.compiling import check_kept_activations, compile_blocks, recompute_in_code
from engine_torch.engine import DTensorEngine
from engine_torch.experts import spread_experts
from engine_torch.float8 import (
    GatherScales,
    in_bfloat16,
    warn_uncompiled,
)
from engine_torch.float8_layers import gathers_float8, quantize_blocks, refuse_model
from engine_torch.inputs import PackedInputs, pack_inputs, pack_tree
from engine_torch.model import (
    DTYPES,
    BuiltModel,
    ModelClasses,
    PackedModel,
    blocks_of,
    build_model,
    document_limit,
    initial_std,
    is_compiled,
    is_recomputing_blocks,
    reset_buffers,
)
from engine_torch.options import DTensorOptions
from engine_torch.parallel import is_plain
from engine_torch.verify import verify_model
from engine_torch.vision import tower_of
from engine_torch.weights import fill, parameter_table

log = logging.getLogger("engine_fsdp")


class FSDPModelClasses(ModelClasses):
    """transformers' own classes."""

    engine = "engine-fsdp"


class FSDPEngine(DTensorEngine):
    """The common part of the language-model and value-model engines.

    ``engine_api.contract.Engine`` describes what its methods promise.
    """

    options_class: ClassVar[type[DTensorOptions]] = FSDPOptions
    """Class of ``EngineConfig.options``, which an engine with more options derives."""

    classes: ClassVar[ModelClasses] = FSDPModelClasses()
    """Classes that the model is built of, in which an engine on another library's derives."""

    float8_install: ClassVar[str] = "pip install 'engine-fsdp[float8]'"

    _balance: Balance | None = None
    """Balance loss of the micro-batch that was packed last, or None for none."""

    _scales: GatherScales | None = None
    """Scales of the weights that are gathered in FP8, or None for none."""

    _recomputed: Sequence[nn.Module] = ()
    """Blocks whose own code computes their activations again."""

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        super().__init__(config, resolution=resolution)
        if self.options.balance_loss:
            check_balanced(config)
        if isinstance(self.options, FSDPOptions):
            check_kept_activations(self.options.kept_activations, config)

    # --- building ------------------------------------------------------------------------------

    def _build_layout(self) -> None:
        self.layout: Layout = build_layout(self.config.parallelism, self.device_type)
        limit_groups(self.layout, self.device_type, self.options.timeout_s)
        self.topology = self.layout.topology

    def _build_model(self) -> None:
        config = self.config
        layout = self.layout
        models: list[BuiltModel] = []
        # A folder may be damaged, or absent, on one machine only.
        together(self.comm, lambda: models.append(self.build_model()))
        (built,) = models
        lm = built.lm
        self.folder = built.folder
        self.mtp = None if built.files is None else built.files.mtp
        self.vocab_size = int(lm.config.get_text_config().vocab_size)
        self._limit_documents(lm.config)
        tower = tower_of(lm) if built.vision is not None else []
        if config.lora is not None:
            lora.inject(lm, config.lora, outside=tower)
        experts = self._spread_experts(lm)
        self.module = PackedModel(
            lm,
            kind=self.kind,
            logit_chunk=config.memory.logit_chunk,
            group=layout.ulysses_group,
            head=built.head,
            routers=built.routers,
            vision=built.vision,
        )
        self.vision = built.vision
        self._positions_of = position_tokens(lm, built.vision)
        # Routers that are balanced alone replay nothing.
        if config.router_replay and built.routers is not None:
            self.routing = built.routers.routing
        self.module.eval()
        # Before FSDP gives the blocks other classes.
        inside = {module for part in tower for module in part.modules()}
        every = blocks_of(lm)
        self._blocks = blocks = [block for block in every if block not in inside]
        gathered = self._float8 and self._quantize(lm)
        copies = self._will_keep_copies(lm, gathers_float8=gathered)
        if not copies:
            shard_model(
                self.module,
                blocks,
                config,
                layout,
                self.options.prefetch_blocks,
                tower=[block for block in every if block in inside],
                experts=experts,
            )
        files = built.files
        self._materialize(lm, drawn=files is None)
        self.table = parameter_table(
            lm, built.pieces, DTYPES[config.precision.compute], {"vision": tower}
        )
        if files is not None:
            # A file may be damaged on one machine only.
            std = initial_std(lm.config)
            together(self.comm, lambda: fill(self.table, files, config.seed, std))
        lora.initialize(self.table, config.seed)
        if copies:
            self._keep_copies(blocks)
        if gathered:
            self._scales = GatherScales(self.module)
        if self.options.verify_model:
            self._verify_model()
        if config.memory.compile:
            self._compile()
        elif self._float8 and not self.options.float8_emulate and self.comm.rank == 0:
            warn_uncompiled(log)

    def _spread_experts(self, lm: Any) -> list[nn.Module]:
        """Spread the experts over the ranks of expert parallelism, and return their modules."""
        mesh = self.layout.ep_mesh
        if mesh is None:
            return []
        classes = self.classes
        return spread_experts(lm, mesh, knows=classes.knows_experts, engine=classes.engine)

    def _verify_model(self) -> None:
        # In FP8 a difference of rounding would hide a wrong computation.
        with in_bfloat16(self.module) if self._float8 else nullcontext():
            verify_model(
                self,
                [5, 8],
                name=self.classes.engine,
                reshard=self._reshard,
                shared=3 if self.config.memory.share_prefixes else 0,
            )

    def _quantize(self, lm: Any) -> bool:
        """Let the blocks compute in FP8, and return whether their weights are gathered in it."""
        options = self.options
        refuse_model(lm, self._blocks, self.config)
        plain = is_plain(self.config, self.topology.world_size)
        gather = gathers_float8(self.config, options.float8_recipe, plain=plain)
        quantize_blocks(
            self._blocks,
            options.float8_recipe,
            ranks=self.layout.shard_group.size(),
            gather=gather,
            emulate=options.float8_emulate,
        )
        return gather

    def _compile(self) -> None:
        options = self.options
        memory = self.config.memory
        adapter = self.config.lora
        # Such a backward pass torch 2.11 does not compile on CUDA with dropout ("Node add was
        # invalid, but is output"). Dropout of the model itself is refused.
        drops = adapter is not None and adapter.dropout > 0
        # Attention to shared prefixes runs outside of compiled code.
        if memory.recompute == "full" and not memory.share_prefixes and not drops:
            self._recomputed = recompute_in_code(self._blocks, options.kept_activations)
        left = len(self._blocks) - len(self._recomputed)
        if options.kept_activations and left and self.comm.rank == 0:
            log.warning(
                "options.kept_activations is %g, but %d of %d blocks keep nothing: they hold "
                "experts, layers that carry a state, adapters with dropout or attention that is "
                "not compiled, or recompute in code of their family",
                options.kept_activations,
                left,
                len(self._blocks),
            )
        rowwise = self._float8 and options.float8_recipe == "rowwise"
        compile_blocks(self._blocks, options.compile_mode, rounds_casts=rowwise)

    def build_model(self) -> BuiltModel:
        """Build the model on this rank, without sharding it.

        A derived engine may prepare its library here. An error on one rank is raised on all.
        """
        return build_model(
            self.config,
            self.kind,
            self.layout.ulysses,
            self.classes,
            self.device_type,
            served=self.capabilities,
            balanced=self._is_balanced,
        )

    @property
    def _is_balanced(self) -> bool:
        """True if training adds a balance loss."""
        return self.options.balance_loss > 0 and self.config.optimizer is not None

    @property
    def _hf_config(self) -> Any:
        return self.module.lm.config

    def _choices(self) -> dict[str, Any]:
        lm: Any = self.module.lm
        compiled = is_compiled(self._blocks)
        return {
            **super()._choices(),
            # The kernel depends on the micro-batch where two are as good.
            "model.attention": "cudnn or varlen" if self.kernel == "auto" else self.kernel,
            "memory.recompute": "full" if self._recomputed or is_recomputing_blocks(lm) else "none",
            "memory.compile": compiled,
            "memory.logit_chunk": self.module.logit_chunk,
        }

    def _limit_documents(self, hf_config: Any) -> None:
        self.document_limit = document_limit(hf_config)
        limit = self.document_limit
        if limit is None:
            return
        # Padding becomes a document of its own.
        padding = self._multiple * self.layout.ulysses
        if padding > limit.tokens:
            raise ConfigError(
                "memory.pad_to_multiple",
                f"padding of up to {padding} tokens, this model takes {limit.tokens}",
                why=f"beyond that its RoPE ({limit.kind}) changes for all documents",
                remedy="choose a smaller multiple",
            )
        # In RL documents grow, and without this warning the limit would be met in the middle of a
        # run.
        if self.comm.rank == 0:
            log.warning(
                "%s takes documents of at most %d tokens of this model: beyond that "
                "its RoPE (%s) follows the longest document of a pack, and changes the others",
                self.classes.engine,
                limit.tokens,
                limit.kind,
            )

    def _materialize(self, lm: Any, *, drawn: bool) -> None:
        """Give the module its memory. Weights that were drawn have theirs on the CPU."""
        home = torch.device("cpu") if self.config.memory.offload_params else self.device
        if drawn:
            # FSDP has moved its shards already.
            if not isinstance(self.module, FSDPModule):
                self.module.to(home)
            return
        self.module.to_empty(device=home)
        # to_empty gave each module a parameter of its own, also where two share one.
        lm.tie_weights()
        reset_buffers(lm)
        for name, buffer in list(lm.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            lm.get_submodule(owner)._buffers[leaf] = buffer.to(self.device)  # noqa: SLF001

    # --- running -------------------------------------------------------------------------------

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> MicroBatches:
        if limit := self.document_limit:
            together(self.comm, lambda: limit.check(batch.lengths))
        return super()._prepare(batch, needs_weight=needs_weight)

    def pack(self, batch: Batch, **given: Any) -> PackedInputs:
        """Return a micro-batch as the module takes it (see ``DTensorEngine.pack``)."""
        multiple = self._multiple
        if self.config.memory.share_prefixes:
            return pack_tree(
                batch, kernel=self.kernel, multiple=multiple, device=self.device, **given
            )
        packed = pack_inputs(
            batch,
            group=self.layout.ulysses_group,
            parts=self.layout.ulysses,
            part=self.layout.ulysses_rank,
            kernel=self.kernel,
            device=self.device,
            multiple=multiple,
            vision=self.vision,
            positions_of=self._positions_of,
            dtype=DTYPES[self.config.precision.compute],
            **given,
        )
        self._balance = None
        if self._is_balanced and self.module.training:
            self._balance = self._balance_of(packed, batch.num_documents)
        return replace(packed, balance=self._balance)

    def _balance_of(self, packed: PackedInputs, count: int) -> Balance:
        """Return the balance loss of a micro-batch of ``count`` documents."""
        layout = self.layout
        # The padding, if any, is the last document.
        own = packed.packing.document.chunk(layout.ulysses)[layout.ulysses_rank]
        return Balance(
            coefficient=self.options.balance_loss,
            documents=own,
            count=count,
            total=self._num_tokens,
            groups=() if layout.ulysses_group is None else (layout.ulysses_group,),
        )

    def _own_metrics(self) -> Mapping[str, Tensor]:
        return {} if self._balance is None else {BALANCE_LOSS: self._balance.sum_losses()}

    # --- changes of the weights ----------------------------------------------------------------

    def _apply_optimizer(self, lr: float) -> None:
        self._expire_scales()
        super()._apply_optimizer(lr)

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._expire_scales()
        super()._install_state(tensors)

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move the model, the optimizer state or both (see ``Engine.to``)."""
        # A moved weight has lost its scale.
        self._expire_scales()
        super().to(device, model=model, optimizer=optimizer, grad=grad)

    def _expire_scales(self) -> None:
        if self._scales is not None:
            self._scales.expire()

    def _release(self) -> None:
        self._scales = None
        # A caller may hold the closed engine, and the blocks hold their weights.
        self._blocks.clear()
        self._balance = None
        self._positions_of = None
        super()._release()


class FSDPEngineWithLMHead(FSDPEngine):
    """The engine for log-probs and entropy of a causal language model."""

    kind = "language_model"


class FSDPEngineWithValueHead(FSDPEngine):
    """The engine for a scalar per token, from a linear head on the last hidden states."""

    kind = "value_model"
    gives = ("values",)
