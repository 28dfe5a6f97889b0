"""The Megatron engine: Hugging Face models on Megatron-core's GPT model, packed documents."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine_api.arguments import check_export, folder_of
from engine_api.balance import BALANCE_LOSS, check_balanced
from engine_api.base import BaseEngine
from engine_api.batch import Batch
from engine_api.comm import Comm, SingleComm, TorchComm, together
from engine_api.config import EngineConfig
from engine_api.contract import Adapter
from engine_api.devices import device_of
from engine_api.errors import ConfigError
from engine_api.heartbeat import watched_each
from engine_api.hf_folder import WeightFiles, fetch, save_hf
from engine_api.hf_noise import refuse_noise
from engine_api.losses import LossFn, evaluate, needs_of, zero_loss
from engine_api.manifest import Entry, Manifest
from engine_api.optimizers import state_fields
from engine_api.process_groups import world_and_rank
from engine_api.registry import Resolution
from engine_api.results import CheckpointInfo, LossOutput, TokenOutputs
from engine_api.weights import ShardExport, ShardSpec, WeightExport
from engine_megatron import te

# This must come before Megatron imports Transformer Engine.
te.share_cudnn()

from megatron.core.transformer.transformer_config import TransformerConfig

from engine_megatron import checkpoint, export, lora, native, pipeline
from engine_megatron.balance import StepBalance, check_experts
from engine_megatron.masters import check_precision, whole_masters
from engine_megatron.mechanisms import find_local_mechanism
from engine_megatron.model import (
    Forward,
    build_model,
    kept_generators,
    release_model,
    token_multiple,
    transformer_config,
)
from engine_megatron.optimizer import StageOptimizer
from engine_megatron.options import megatron_options
from engine_megatron.parallel import (
    DTYPES,
    ModelParallel,
    build_layout,
    pipeline_group,
)
from engine_megatron.replay import routing_of
from engine_megatron.shape import Kind, read_hf_config, refuse_other_models, shape_of
from engine_megatron.weights import (
    Reader,
    Weight,
    attach,
    check_layout,
    check_stages,
    describer_of,
    fill,
    merges_of,
    weight_table,
)


class MegatronEngine(BaseEngine):
    """Base of the language-model and the value engine.

    ``engine_api.contract.Engine`` documents the public methods.
    """

    kind: ClassVar[Kind]

    def __init__(self, config: EngineConfig, *, resolution: Resolution) -> None:
        super().__init__(config, resolution=resolution)
        self.options = megatron_options(config.options)
        # Closes the groups that were made, also if only some of them were.
        self._groups = ExitStack()
        if self.options.sequence_parallel and config.parallelism.tp == 1:
            raise ConfigError(
                "options.sequence_parallel",
                "without tensor parallelism",
                remedy="set parallelism.tp, or leave it out",
            )
        if self.options.virtual_stages > 1 and config.parallelism.pp == 1:
            raise ConfigError(
                "options.virtual_stages",
                f"{self.options.virtual_stages} without a pipeline",
                remedy="set parallelism.pp, or leave it out",
            )
        if self.options.balance_loss:
            check_balanced(config)

    # --- building ------------------------------------------------------------------------------

    def _build(self) -> None:
        # Everything that can be refused from the configuration and the files' headers alone is
        # refused before a process group is made.
        config = self.config
        options = self.options
        multiple = options.vocabulary_multiple
        check_precision(config.precision)
        self.folder = fetch(config.model)
        hf_config = read_hf_config(config.model, self.folder)
        refuse_other_models(hf_config)
        refuse_noise(hf_config, where="engine-megatron")
        if self.kind == "value_model":
            _describe_value_model(hf_config)
        spec = te.choose_spec(
            options.spec, config, self.device_type, find_local_mechanism(hf_config)
        )
        te.check_environment()
        self.shape = shape_of(hf_config, self.kind, spec)
        self.hf_config = hf_config
        self.vocab_size = self.shape.vocab_size
        self.layout = build_layout(
            config.parallelism,
            options.expert_tensor_parallel,
            options.virtual_stages,
            *world_and_rank(),
        )
        self.topology = self.layout.topology
        check_layout(self.shape, self.layout, multiple)
        te.check_fp8(config, self.shape.widths(self.layout.tensor, self.layout.expert_tensor))
        self._check_experts()
        if self._is_balanced:
            check_experts(self.shape)
        if config.router_replay:
            self.routing = routing_of(self.shape)
        if config.lora is not None:
            lora.check_targets(self.shape, config.lora)
        self.table = weight_table(
            self.shape, self.layout, multiple, DTYPES[config.precision.master], config.lora
        )
        if config.lora is not None:
            check_stages(self.table, self.layout)
        files = None if config.model.init == "random" else WeightFiles(self.folder)
        if files is not None:
            files.check({weight.name: weight.shape for weight in self.table if not weight.adapter})
        self.mtp = None if files is None else files.mtp
        ModelParallel.check(self.layout, has_experts=self.shape.experts > 0)
        settings = transformer_config(
            self.shape, config, options, self.layout, on_cpu=self.device_type == "cpu"
        )
        try:
            self._build_groups(timedelta(seconds=options.timeout_s))
            self._build_model(settings, files)
        # Ctrl-C included: groups are not kept for an engine that was not built.
        except BaseException:
            self._close_groups()
            raise

    @property
    def _is_balanced(self) -> bool:
        """True if training adds a balance loss."""
        return self.options.balance_loss > 0 and self.config.optimizer is not None

    def _check_experts(self) -> None:
        """Raise ``ConfigError`` for parallelism that the model's experts do not allow."""
        if self.options.expert_tensor_parallel and not self.shape.experts:
            raise ConfigError(
                "options.expert_tensor_parallel",
                "given, but the model has no experts",
                remedy="leave it out",
            )
        if self.shape.experts and self.layout.tensor > 1 and not self.options.sequence_parallel:
            raise ConfigError(
                "options.sequence_parallel",
                f"off, with tp {self.layout.tensor} and experts",
                why="each tensor-parallel rank would send the same tokens to the experts",
                remedy="turn it on",
            )

    def _choices(self) -> dict[str, Any]:
        return {"model.attention": "sdpa" if self.shape.spec == "local" else "transformer engine"}

    def _build_groups(self, timeout: timedelta) -> None:
        limit = device_of(self.device_type).group_timeout(timeout)
        self._use_process_group(limit)
        ModelParallel.join(self.layout, limit)
        self._groups.callback(ModelParallel.leave)
        self.device = device_of(self.device_type).current()
        self.comm: Comm = TorchComm(timeout) if self.layout.world > 1 else SingleComm()
        self._groups.callback(self.comm.close)

    def _build_model(self, settings: TransformerConfig, files: WeightFiles | None) -> None:
        # One rank may run out of memory, or one machine may have a damaged file: then every other
        # rank raises too and does not wait for it.
        together(self.comm, lambda: self._build_stage(settings))
        together(self.comm, self._build_masters)
        together(
            self.comm,
            lambda: fill(self.table, self.masters, files, self.config.seed, self.shape.std),
        )

    def _build_stage(self, settings: TransformerConfig) -> None:
        config, options = self.config, self.options
        chunks = build_model(
            self.shape,
            settings,
            options,
            self.layout,
            lora=config.lora,
            replays=config.router_replay,
            balanced=self._is_balanced,
        )
        attach(self.table, chunks, self.layout)
        chunks.eval()
        self.forward = Forward(
            chunks=chunks,
            shape=self.shape,
            layout=self.layout,
            device=self.device,
            multiple=token_multiple(config, options, self.layout),
            splits_tokens=options.sequence_parallel,
            logit_chunk=config.memory.logit_chunk,
            step_balance=(
                StepBalance(coefficient=options.balance_loss) if self._is_balanced else None
            ),
        )

    def _build_masters(self) -> None:
        chunks = self.forward.chunks
        dtype = DTYPES[self.config.precision.master]
        self.optimizer: StageOptimizer | None = None
        if self.config.optimizer:
            self.optimizer = StageOptimizer(
                chunks,
                self.config.optimizer,
                self.layout,
                self.comm,
                dtype,
                describer_of(self.table),
            )
            self.masters = self.optimizer.masters
        else:
            self.masters = whole_masters(chunks.parameters(), dtype)

    # --- running -------------------------------------------------------------------------------

    def forward_step(
        self,
        batch: Batch,
        *,
        needs: Sequence[str],
        temperature: float,
        coefficients: Tensor | None = None,
    ) -> TokenOutputs:
        """Implement ``BaseEngine.forward_step``, without gradient on a pipeline.

        ``coefficients`` are not used.
        """
        del coefficients
        if self.layout.stages > 1:
            return pipeline.infer(self.forward, self._chunks, batch, needs, temperature)
        packed = self.forward.pack_inputs(batch)
        return self.forward.outputs(
            self.forward.hidden(packed, self.forward.chunks[0]), packed, needs, temperature
        )

    @contextmanager
    def _inference(self, adapter: bool) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(super()._inference(adapter))
            if self.shape.spec == "te":
                stack.enter_context(kept_generators(self.device_type))
            if not adapter:
                stack.enter_context(lora.disabled(self.forward.chunks))
            yield

    @property
    def _chunks(self) -> Sequence[Any]:
        return list(self.forward.chunks) if self.optimizer is None else self.optimizer.chunks

    def _run_train(
        self, parts: Sequence[Batch], loss: LossFn, denominator: float, temperature: float
    ) -> list[LossOutput]:
        balance = self.forward.step_balance
        if balance is not None:
            balance.begin(self._num_tokens)
        if self.layout.stages == 1:
            return super()._run_train(parts, loss, denominator, temperature)
        needs = needs_of(loss)

        def loss_of(outputs: TokenOutputs, batch: Batch) -> LossOutput:
            if batch.num_tokens:
                return evaluate(loss, outputs, batch.to(self.device))
            return zero_loss(outputs)

        with self._accumulation(last=True):
            results, error = pipeline.train(
                self.forward, self._chunks, parts, loss_of, needs, denominator, temperature
            )
        together(self.comm, lambda: _raise(error))
        if balance is None:
            return results
        # The stages have the layers, and the last one the results.
        value = torch.stack([part.sum_losses() for part in balance.micro_batches]).sum()
        torch.distributed.all_reduce(value, group=pipeline_group())
        *others, last = results
        metrics = {**last.metrics, BALANCE_LOSS: value}
        return [*others, LossOutput(loss=last.loss, metrics=metrics)]

    def _own_metrics(self) -> Mapping[str, Tensor]:
        balance = self.forward.step_balance
        return {} if balance is None else {BALANCE_LOSS: balance.micro_batches[-1].sum_losses()}

    @contextmanager
    def _accumulation(self, *, last: bool) -> Iterator[None]:
        # Not needed: gradients are not reduced over ranks before the step.
        del last
        self.forward.chunks.train()
        try:
            yield
        finally:
            self.forward.chunks.eval()

    @property
    def _seed_rank(self) -> int:
        # Tensor-parallel ranks hold the same tokens, and must draw the same numbers for them.
        return self.topology.dp_rank

    # --- the step ------------------------------------------------------------------------------

    @property
    def _training(self) -> StageOptimizer:
        assert self.optimizer is not None, "the base class refuses a step without an optimizer"
        return self.optimizer

    def _clip_gradients(self, max_norm: float | None) -> float:
        return self._training.clip(max_norm)

    def _apply_optimizer(self, lr: float) -> None:
        self._training.step(lr)

    def _zero_grad(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    # --- weights -------------------------------------------------------------------------------

    def get_per_tensor_param(
        self,
        *,
        dtype: torch.dtype | None = None,
        adapter: Adapter = "merged",
        bucket_bytes: int = 512 << 20,
    ) -> WeightExport:
        """See ``Engine.get_per_tensor_param``."""
        self._expect("get_per_tensor_param", "ready")
        check_export(dtype, bucket_bytes)
        self._check_adapter(adapter)
        tensors = export.export_whole(
            self._exported(adapter),
            self.layout,
            self._reader(dtype, adapter),
            bucket_bytes,
            self.device,
        )
        return watched_each(self._call_name("get_per_tensor_param"), tensors)

    def get_per_tensor_param_shard(
        self, *, dtype: torch.dtype | None = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        """See ``Engine.get_per_tensor_param_shard``."""
        self._expect("get_per_tensor_param_shard", "ready")
        check_export(dtype)
        self._check_adapter(adapter)
        return export.export_shards(self._exported(adapter), self._reader(dtype, adapter))

    def _exported(self, adapter: Adapter) -> list[Weight]:
        return [weight for weight in self.table if weight.adapter == (adapter == "only")]

    def _reader(self, dtype: torch.dtype | None, adapter: Adapter) -> Reader:
        lora_config = self.config.lora
        if lora_config is None or adapter != "merged":
            return Reader(self.masters, dtype)
        return Reader(self.masters, dtype, merges_of(self.table, lora_config))

    def save_hf(self, directory: Path | str, *, dtype: torch.dtype | None = None) -> None:
        """See ``Engine.save_hf``."""
        self._expect("save_hf", "ready")
        save_hf(
            self.get_per_tensor_param(dtype=dtype),
            folder_of(directory),
            comm=self.comm,
            source=self.folder,
            hf_config=self.hf_config,
            mtp=self.mtp,
        )

    # --- state ---------------------------------------------------------------------------------

    def state_shards(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """Return the state as boxes (see ``BaseEngine.state_shards``).

        All ranks call it together.
        """
        return checkpoint.state_of(self.table, self.masters, self.optimizer)

    def _optimizer_fields(self) -> Collection[str]:
        return () if self.optimizer is None else state_fields(self.optimizer.groups[0].inner)

    def _state_layout(
        self, entries: Mapping[str, Entry]
    ) -> dict[str, tuple[ShardSpec, torch.dtype]]:
        return checkpoint.layout_of(self.table, self.optimizer, entries)

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        checkpoint.install(self.table, self.masters, self.optimizer, tensors)

    def _checkpoint_writer(self, *, copied: bool) -> Callable[..., CheckpointInfo]:
        if self.options.checkpoint == native.MEGATRON:
            return native.writer(self._local_parameters(), self.masters, self.optimizer)
        return super()._checkpoint_writer(copied=copied)

    def _read_checkpoint(self, folder: Path, manifest: Manifest) -> Callable[[], None]:
        if manifest.state != native.MEGATRON:
            return super()._read_checkpoint(folder, manifest)
        parameters = self._local_parameters()
        tensors = native.read(
            folder,
            manifest,
            parameters,
            comm=self.comm,
            layout=self.layout,
            optimizer=self.optimizer,
        )
        return lambda: native.install(parameters, self.masters, self.optimizer, tensors)

    def _local_parameters(self) -> list[native.LocalParameter]:
        return native.local_parameters(self.forward.chunks, self.layout, self.masters)

    def _release(self) -> None:
        self.optimizer = None
        self.table.clear()
        release_model(self.forward.chunks)
        del self.forward, self.masters
        self._close_groups()
        # Megatron's modules refer to each other: until they are collected they hold their memory,
        # and the groups' threads.
        gc.collect()
        device_of(self.device_type).empty_cache()

    def _close_groups(self) -> None:
        self._groups.close()


def _describe_value_model(hf_config: Any) -> None:
    """Turn a configuration into that of a value model, for ``save_hf``."""
    from transformers import AutoModelForTokenClassification

    hf_config.num_labels = 1
    # A server reads the name of the class, which a language model's folder has otherwise.
    cls: Any = AutoModelForTokenClassification._model_mapping.get(type(hf_config), None)  # noqa: SLF001 - no public name tells it without building
    if cls is not None:
        hf_config.architectures = [cls.__name__]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


class MegatronEngineWithLMHead(MegatronEngine):
    """Engine for the log-probs and entropy of a causal language model."""

    kind = "language_model"


class MegatronEngineWithValueHead(MegatronEngine):
    """Engine for one scalar per token, from a linear head on the model's last hidden states."""

    kind = "value_model"
    gives = ("values",)
