"""The order of work that engines over DTensor share: groups, a step, weights and state.

An engine derives from ``DTensorEngine`` and adds its layout, its model and its forward pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from engine_api.arguments import check_export, folder_of
from engine_api.base import BaseEngine
from engine_api.batch import Batch
from engine_api.comm import Comm, SingleComm, TorchComm
from engine_api.config import EngineConfig, build_options
from engine_api.contract import Adapter
from engine_api.devices import device_of
from engine_api.distillation import OutputHead, Teaching
from engine_api.heartbeat import watched_each
from engine_api.hf_folder import save_hf
from engine_api.hf_mtp import MtpHead
from engine_api.manifest import Entry
from engine_api.optimizers import build_optimizer, group_weights, set_rate, state_fields
from engine_api.registry import Resolution
from engine_api.results import TokenOutputs
from engine_api.weights import ShardExport, ShardSpec, WeightExport
from engine_torch import checkpoint, export, lora
from engine_torch.attention import choose_kernel, choose_kernel_of_trees
from engine_torch.copies import (
    add_gradients,
    clear_gradients,
    keep_copies,
    move_masters,
    refresh_copies,
)
from engine_torch.float8 import (
    check_float8,
    compute_in_bfloat16,
    refuse_without_torchao,
    round_up,
    takes_float8,
)
from engine_torch.fsdp_modules import LateGradients, reset_after_failure
from engine_torch.inputs import PackedInputs
from engine_torch.model import DTYPES, Kind, PackedModel
from engine_torch.optimizer import clip, move_state
from engine_torch.options import DTensorOptions, Float8Options
from engine_torch.parallel import keeps_copies
from engine_torch.weights import ShardedParam, trainable

__all__ = ["DTensorEngine"]


class DTensorEngine(BaseEngine):
    """The part of an engine that does not depend on how its model is built and divided.

    ``engine_api.contract.Engine`` describes what its methods promise.
    """

    kind: ClassVar[Kind]

    options_class: ClassVar[type[DTensorOptions]] = DTensorOptions
    """Class of ``EngineConfig.options``, which an engine with more options derives."""

    module: PackedModel
    """The module that computes per-token outputs, set by ``_build_model``.

    It is wrapped by ``fully_shard``, unless there is nothing to shard, reduce or cast.
    """

    float8_install: ClassVar[str]
    """Command that installs the engine with the torchao that computes in FP8.

    An engine has FP8 where ``options_class`` derives ``Float8Options``, and needs it then.
    """

    table: list[ShardedParam]
    """The parameters of ``module`` with their saved tensors and boxes, set by ``_build_model``."""

    folder: str
    """Folder of the model's files, set by ``_build_model``."""

    mtp: MtpHead | None
    """The folder's head that predicts further tokens, set by ``_build_model``.

    It is None for a model whose weights come from no file.
    """

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        self.options: Any = build_options(config.options, self.options_class)
        has_float8 = issubclass(self.options_class, Float8Options)
        emulate = has_float8 and self.options.float8_emulate
        device = resolution.device
        if has_float8:
            refuse_without_torchao(
                config, device, resolution.plugin.name, self.float8_install, emulate=emulate
            )
        super().__init__(config, resolution=resolution)
        self._float8 = takes_float8(config)
        check_float8(config, device, emulate=emulate)
        if self._float8:
            self.config = compute_in_bfloat16(config)
        self._late: LateGradients | None = None

    # --- hooks that a derived engine provides --------------------------------------------------

    @abstractmethod
    def _build_layout(self) -> None:
        """Make the meshes, limit their groups' timeout, and set ``topology``."""

    @abstractmethod
    def _build_model(self) -> None:
        """Build, shard and fill the model, and set the attributes that are named above."""

    @abstractmethod
    def pack(self, batch: Batch, **given: Any) -> PackedInputs:
        """Return a micro-batch as the module takes it.

        ``given`` are the further arguments of ``engine_torch.inputs.pack_inputs`` that depend on
        the call: ``coefficients``, or ``teaching`` and ``teacher``.
        """

    @property
    @abstractmethod
    def _hf_config(self) -> Any:
        """The transformers configuration of the model, which ``save_hf`` writes."""

    # --- building ------------------------------------------------------------------------------

    def _build(self) -> None:
        config = self.config
        device = device_of(self.device_type)
        timeout = timedelta(seconds=self.options.timeout_s)
        self._use_process_group(device.group_timeout(timeout))
        self.device = device.current()
        self._build_layout()
        self.comm: Comm = TorchComm(timeout) if self.topology.world_size > 1 else SingleComm()
        asynchronous = config.checkpoint.async_save and self.topology.world_size > 1
        self._save_comm: Comm = TorchComm(timeout) if asynchronous else self.comm
        try:
            self.kernel = choose_kernel(
                config.model.attention, self.device_type, config.precision.compute
            )
            if config.memory.share_prefixes:
                self.kernel = choose_kernel_of_trees(config, self.kernel)
            self._build_model()
            if self.config.optimizer is not None and isinstance(self.module, FSDPModule):
                self._late = LateGradients(self.module)
            chosen = config.optimizer
            weights = [entry.as_trained() for entry in trainable(self.table)]
            groups = group_weights(chosen, weights) if chosen else []
            self.optimizer = build_optimizer(chosen, groups) if chosen else None
        # Ctrl-C included: no groups are kept for an engine that was not built.
        except BaseException:
            self._close_groups()
            raise

    def _will_keep_copies(self, module: nn.Module, *, gathers_float8: bool = False) -> bool:
        """Return whether ``module``, before it takes memory, will compute with copies.

        ``gathers_float8`` says that its weights are gathered in FP8.
        """
        return keeps_copies(
            self.config,
            self.topology.world_size,
            module,
            self.device_type,
            self.options.cast_each_pass,
            gathers_float8=gathers_float8,
        )

    @property
    def _multiple(self) -> int:
        """Number of tokens of which a rank's part of a micro-batch is a multiple."""
        multiple = self.config.memory.pad_to_multiple
        return round_up(multiple) if self._float8 else multiple

    def _choices(self) -> dict[str, Any]:
        precision = self.config.precision
        casts = precision.compute != precision.master
        chosen = {"precision.compute": "float8"} if self._float8 else {}
        return {
            **chosen,
            "options.cast_each_pass": casts and all(one.copy is None for one in self.table),
        }

    def _keep_copies(self, blocks: Iterable[nn.Module]) -> None:
        """Let the module, whose table is filled, compute with copies of its weights."""
        keep_copies(self.module, self.table, blocks, DTYPES[self.config.precision.compute])

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
        return self.module.outputs(self.pack(batch, coefficients=coefficients), needs, temperature)

    def taught_step(
        self, batch: Batch, *, needs: Sequence[str], temperature: float, teaching: Teaching
    ) -> TokenOutputs:
        """Compute the divergence as well (see ``EngineDefaults.taught_step``)."""
        inputs = self.pack(batch, teaching=teaching, teacher=self._teacher_head)
        return self.module.outputs(inputs, needs, temperature)

    def states_step(self, batch: Batch) -> Tensor:
        """Compute the hidden states (see ``EngineDefaults.states_step``)."""
        states: Tensor = self.module(self.pack(batch), ("states",), 1.0)[0]
        return states

    def _whole_head(self) -> OutputHead:
        # The module has another parameter while its weights are gathered.
        self._reshard()
        module = self.module.output_embedding
        dtype = DTYPES[self.config.precision.compute]

        def whole(parameter: Tensor) -> Tensor:
            (entry,) = (one for one in self.table if one.live is parameter)
            gathered = export.gather_parameter(entry, self.device)
            return gathered.to(dtype, copy=True)

        bias = getattr(module, "bias", None)
        return OutputHead(
            weight=whole(module.weight),
            bias=None if bias is None else whole(bias),
            scale=self.module.head.scale,
            cap=self.module.head.cap,
        )

    def _place_head(self, head: OutputHead) -> OutputHead:
        return head.to(self.device)

    @contextmanager
    def _accumulation(self, *, last: bool) -> Iterator[None]:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last or self.options.reduce_each_micro_batch)
            self.module.set_is_last_backward(last)
        self._switch(training=True)
        try:
            yield
            add_gradients(self.table)
        finally:
            if self._late is not None:
                # Gradients that are reduced after each micro-batch meet no earlier ones.
                self._late.is_late = not last and not self.options.reduce_each_micro_batch

    def _switch(self, *, training: bool) -> None:
        """Put the module into the mode of training or of inference.

        It stays there, because a walk over all modules in each micro-batch takes milliseconds.
        """
        if self.module.training != training:
            self.module.train(training)

    @contextmanager
    def _inference(self, adapter: bool) -> Iterator[None]:
        self._switch(training=False)
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
        # Weights are kept for a backward pass, which inference does not have: the blocks' without
        # memory.reshard_after_forward, and always the root's. Whatever changes the weights next
        # would not reach the gathered ones.
        for module in self.module.modules():
            if isinstance(module, FSDPModule) and module is not self.module:
                module.reshard()
        if isinstance(self.module, FSDPModule):
            self.module.reshard()

    def _clip_gradients(self, max_norm: float | None) -> float:
        return clip(self.table, max_norm)

    def _apply_optimizer(self, lr: float) -> None:
        assert self.optimizer is not None
        if self.config.memory.offload_optimizer:
            move_state(self.optimizer, None)
        set_rate(self.optimizer, lr)
        self.optimizer.step()
        refresh_copies(self.table)
        if self.config.memory.offload_optimizer:
            move_state(self.optimizer, torch.device("cpu"))

    def _zero_grad(self) -> None:
        for entry in self.table:
            entry.param.grad = None
        clear_gradients(self.table)

    def _abort(self) -> None:
        reset_after_failure(self.module)
        if self._late is not None:
            self._late.is_late = False

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
            hf_config=self._hf_config,
            mtp=self.mtp,
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
            move_masters(self.table, device, away=away)
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
        self._late = None
        self.table.clear()
        del self.module
        device_of(self.device_type).empty_cache()
