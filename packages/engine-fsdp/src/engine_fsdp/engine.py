"""The FSDP2 engine: Hugging Face models on ``fully_shard``, packed documents, Ulysses."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from engine_api.arguments import check_export, folder_of
from engine_api.base import BaseEngine
from engine_api.batch import Batch
from engine_api.comm import Comm, SingleComm, TorchComm, together
from engine_api.config import EngineConfig, build_options
from engine_api.contract import Adapter
from engine_api.devices import device_of
from engine_api.errors import ConfigError
from engine_api.heartbeat import watched_each
from engine_api.hf_folder import save_hf
from engine_api.manifest import Entry
from engine_api.optimizers import build_optimizer, state_fields
from engine_api.prepare import MicroBatches
from engine_api.registry import Resolution
from engine_api.results import TokenOutputs
from engine_api.weights import ShardExport, ShardSpec, WeightExport
from engine_fsdp.options import FSDPOptions
from engine_fsdp.parallel import Layout, build_layout, limit_groups, shard_model
from engine_torch import checkpoint, export, lora
from engine_torch.attention import choose_kernel
from engine_torch.fsdp_modules import reset_after_failure
from engine_torch.inputs import pack_inputs
from engine_torch.model import (
    DTYPES,
    BuiltModel,
    Kind,
    ModelClasses,
    PackedModel,
    blocks_of,
    build_model,
    document_limit,
    reset_buffers,
)
from engine_torch.optimizer import clip, move_state
from engine_torch.verify import verify_model
from engine_torch.weights import ShardedParam, fill, parameter_table, trainable

log = logging.getLogger("engine_fsdp")


class FSDPModelClasses(ModelClasses):
    """transformers' own classes."""

    engine = "engine-fsdp"


class FSDPEngine(BaseEngine):
    """The common part of the language-model and value-model engines.

    ``engine_api.contract.Engine`` describes what its methods promise.
    """

    kind: ClassVar[Kind]

    options_class: ClassVar[type[FSDPOptions]] = FSDPOptions
    """Class of ``EngineConfig.options``, which an engine with more options derives."""

    classes: ClassVar[ModelClasses] = FSDPModelClasses()
    """Classes that the model is built of, in which an engine on another library's derives."""

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        super().__init__(config, resolution=resolution)
        self.options: FSDPOptions = build_options(config.options, self.options_class)

    # --- building ------------------------------------------------------------------------------

    def _build(self) -> None:
        config = self.config
        device = device_of(self.device_type)
        timeout = timedelta(seconds=self.options.timeout_s)
        self._use_process_group(device.group_timeout(timeout))
        self.device = device.current()
        self.layout: Layout = build_layout(config.parallelism, self.device_type)
        limit_groups(self.layout, self.device_type, self.options.timeout_s)
        self.topology = self.layout.topology
        self.comm: Comm = TorchComm(timeout) if self.topology.world_size > 1 else SingleComm()
        asynchronous = config.checkpoint.async_save and self.topology.world_size > 1
        self._save_comm: Comm = TorchComm(timeout) if asynchronous else self.comm
        try:
            self.kernel = choose_kernel(
                config.model.attention, self.device_type, config.precision.compute
            )
            self._build_model()
            params = [entry.param for entry in trainable(self.table)]
            self.optimizer = build_optimizer(config.optimizer, params) if config.optimizer else None
        # Ctrl-C included: no groups are kept for an engine that was not built.
        except BaseException:
            self._close_groups()
            raise

    def _build_model(self) -> None:
        config = self.config
        layout = self.layout
        models: list[BuiltModel] = []
        # A folder may be damaged, or absent, on one machine only.
        together(self.comm, lambda: models.append(self.build_model()))
        (built,) = models
        lm = built.lm
        self.folder = built.folder
        self.vocab_size = int(lm.config.get_text_config().vocab_size)
        self._limit_documents(lm.config)
        if config.lora is not None:
            lora.inject(lm, config.lora)
        self.module = PackedModel(
            lm,
            kind=self.kind,
            logit_chunk=config.memory.logit_chunk,
            group=layout.ulysses_group,
            head=built.head,
        )
        self.module.eval()
        # Before FSDP gives the blocks other classes.
        self._blocks = blocks = blocks_of(lm)
        shard_model(self.module, blocks, config, layout, self.options.prefetch_blocks)
        home = torch.device("cpu") if config.memory.offload_params else self.device
        files = built.files
        if files is not None:
            self._materialize(lm, home)
        elif not isinstance(self.module, FSDPModule):
            self.module.to(home)
        self.table: list[ShardedParam] = parameter_table(
            lm, built.pieces, DTYPES[config.precision.compute]
        )
        if files is not None:
            # A file may be damaged on one machine only.
            together(self.comm, lambda: fill(self.table, files, config.seed))
        lora.initialize(self.table, config.seed)
        if self.options.verify_model:
            verify_model(self, [5, 8], name=self.classes.engine, reshard=self._reshard)
        if config.memory.compile:
            for block in blocks:
                block.compile(mode=self.options.compile_mode)

    def build_model(self) -> BuiltModel:
        """Build the model on this rank, without sharding it.

        A derived engine may prepare its library here. An error on one rank is raised on all.
        """
        return build_model(
            self.config, self.kind, self.layout.ulysses, self.classes, self.device_type
        )

    def _choices(self) -> dict[str, Any]:
        lm: Any = self.module.lm
        # torch keeps a block's compiled call under this name and has no public one.
        compiled = all(block._compiled_call_impl is not None for block in self._blocks)  # noqa: SLF001
        return {
            # The kernel depends on the micro-batch where two are as good.
            "model.attention": "cudnn or varlen" if self.kernel == "auto" else self.kernel,
            "memory.recompute": "full" if lm.is_gradient_checkpointing else "none",
            "memory.compile": compiled,
            "memory.logit_chunk": self.module.logit_chunk,
        }

    def _limit_documents(self, hf_config: Any) -> None:
        self.document_limit = document_limit(hf_config)
        limit = self.document_limit
        if limit is None:
            return
        # Padding becomes a document of its own.
        padding = self.config.memory.pad_to_multiple * self.layout.ulysses
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

    def _materialize(self, lm: Any, home: torch.device) -> None:
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
            group=self.layout.ulysses_group,
            parts=self.layout.ulysses,
            part=self.layout.ulysses_rank,
            kernel=self.kernel,
            device=self.device,
            multiple=self.config.memory.pad_to_multiple,
            coefficients=coefficients,
        )
        return self.module.outputs(inputs, needs, temperature)

    @contextmanager
    def _accumulation(self, *, last: bool) -> Iterator[None]:
        self._expect_loaded("train")
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last or self.options.reduce_each_micro_batch)
            self.module.set_is_last_backward(last)
        self.module.train()
        try:
            yield
        finally:
            self.module.eval()

    @contextmanager
    def _inference(self, adapter: bool) -> Iterator[None]:
        self._expect_loaded("infer")
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if not adapter:
                stack.enter_context(lora.disabled(self.module))
            try:
                yield
            except BaseException:
                # Also after Ctrl-C the weights must not stay gathered.
                self._abort()
                raise
        self._reshard()

    def _reshard(self) -> None:
        # The root keeps its weights gathered for a backward pass, which inference does not have.
        if isinstance(self.module, FSDPModule):
            self.module.reshard()

    def _clip_gradients(self, max_norm: float | None) -> float:
        self._expect_loaded("train")
        return clip(self.table, max_norm)

    def _apply_optimizer(self, lr: float) -> None:
        assert self.optimizer is not None
        if self.config.memory.offload_optimizer:
            move_state(self.optimizer, None)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if self.config.memory.offload_optimizer:
            move_state(self.optimizer, torch.device("cpu"))

    def _zero_grad(self) -> None:
        for entry in self.table:
            entry.param.grad = None

    def _abort(self) -> None:
        reset_after_failure(self.module)

    # --- weights -------------------------------------------------------------------------------

    def get_per_tensor_param(
        self,
        *,
        dtype: torch.dtype | None = None,
        adapter: Adapter = "merged",
        bucket_bytes: int = 512 << 20,
    ) -> WeightExport:
        """Return whole weights by name, as an iterator (see ``Engine.get_per_tensor_param``)."""
        self._expect("get_per_tensor_param", "ready")
        check_export(dtype, bucket_bytes)
        self._check_adapter(adapter)
        tensors = export.export_whole(
            self.table,
            self.config.lora,
            dtype,
            adapter,
            bucket_bytes,
            self.device,
        )
        return watched_each(self._call_name("get_per_tensor_param"), tensors)

    def get_per_tensor_param_shard(
        self, *, dtype: torch.dtype | None = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        """Return this rank's shards of the weights, as an iterator.

        See ``Engine.get_per_tensor_param_shard``.
        """
        self._expect("get_per_tensor_param_shard", "ready")
        check_export(dtype)
        self._check_adapter(adapter)
        return export.export_shards(self.table, self.config.lora, dtype, adapter)

    def save_hf(self, directory: Path | str, *, dtype: torch.dtype | None = None) -> None:
        """Save the weights as a Hugging Face folder (see ``Engine.save_hf``)."""
        self._expect("save_hf", "ready")
        save_hf(
            self.get_per_tensor_param(dtype=dtype),
            folder_of(directory),
            comm=self.comm,
            source=self.folder,
            hf_config=self.module.lm.config,
        )

    # --- state ---------------------------------------------------------------------------------

    @property
    def _checkpoint_comm(self) -> Comm:
        return self._save_comm

    def state_shards(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """Return this rank's training state as boxes (see ``BaseEngine.state_shards``)."""
        return checkpoint.state_of(self.table, self.optimizer, self.topology.rank)

    def _optimizer_fields(self) -> Collection[str]:
        return () if self.optimizer is None else state_fields(self.optimizer)

    def _state_layout(
        self, entries: Mapping[str, Entry]
    ) -> dict[str, tuple[ShardSpec, torch.dtype]]:
        return checkpoint.layout_of(self.table, self.optimizer, entries)

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        checkpoint.install(self.table, self.optimizer, tensors)
        on_host = self.config.memory.offload_optimizer or "optimizer" in self._offloaded
        if self.optimizer is not None and on_host:
            move_state(self.optimizer, torch.device("cpu"))

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move the model, the optimizer state or both (see ``Engine.to``).

        Gradients are stored with their weights and move with them.
        """
        away = self._check_move(device, model=model, optimizer=optimizer, grad=grad)
        if model and not self.config.memory.offload_params:
            self.module.to(device)
            self._mark("model", away)
        if optimizer and self.optimizer is not None and not self.config.memory.offload_optimizer:
            move_state(self.optimizer, torch.device("cpu") if away else None)
            self._mark("optimizer", away)
        if away:
            # Without this PyTorch keeps the memory for this process, and no server can allocate it.
            device_of(self.device_type).empty_cache()

    def _close_groups(self) -> None:
        self.comm.close()
        if self._save_comm is not self.comm:
            self._save_comm.close()

    def _release(self) -> None:
        self._close_groups()
        self.optimizer = None
        self.table.clear()
        # A caller may hold the closed engine, and the blocks hold their weights.
        self._blocks.clear()
        del self.module
        device_of(self.device_type).empty_cache()


class FSDPEngineWithLMHead(FSDPEngine):
    """The engine for log-probs and entropy of a causal language model."""

    kind = "language_model"


class FSDPEngineWithValueHead(FSDPEngine):
    """The engine for a scalar per token, from a linear head on the last hidden states."""

    kind = "value_model"
    gives = ("values",)
