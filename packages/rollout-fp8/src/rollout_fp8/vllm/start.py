"""Start and stop of vLLM's engine, in this process or in others."""

from __future__ import annotations

import gc
import importlib
import os
import random
import secrets
import traceback
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import vllm
import vllm.envs

from engine_api.config import ModelSource
from engine_api.errors import ConfigError, EngineError, RolloutError
from rollout_fp8.kernels.capability import require_fp8
from rollout_fp8.kernels.float32 import exact_float32
from rollout_fp8.options import VllmOptions
from rollout_fp8.ranks import require_own_devices
from rollout_fp8.transports.channel import secret
from rollout_fp8.vllm import cache, environment, linear_attention, private, speculation
from rollout_fp8.vllm.sampling import NORMALIZE

WHERE = "rollout 'vllm'"
GIB = 1 << 30
CPU_CACHE_BYTES = GIB
# Ranks of adapters that vLLM reserves memory for.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Classes for which vLLM's CPU build computes other log-probs than transformers with the same
# weights (measured by `tools/zoo.py`, 0.32.0).
_WRONG_ON_CPU = frozenset(
    {
        "Cohere2ForCausalLM",
        "Cohere2MoeForCausalLM",
        # Weights are served rightly, the derived ones of latent attention included. Without it
        # (VLLM_MLA_DISABLE=1) log-probs are as wrong.
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        # The biases of its routers are served rightly, too.
        "Ernie4_5_MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Lfm2ForCausalLM",
    }
)
# Classes that vLLM's backend of transformers' classes computes wrongly or not at all, with the
# reason (``_refuse_on_backend``). With 0.32.0's CPU build JetMoe was off by 6 nats, Moshi by 5 and
# Zaya by 2.
_WRONG_ON_BACKEND = {
    "JetMoeForCausalLM": "it repeats keys and values for each of a token's experts",
    "MiniMaxForCausalLM": "its layers of linear attention keep states of their own",
    "MoshiForCausalLM": "its configuration has a window that its attention does not use",
    "RecurrentGemmaForCausalLM": "its recurrent layers keep states of their own",
    "ZayaForCausalLM": "its attention keeps states of convolutions",
}
# Classes that the backend was seen to divide rightly over two ranks, by device. With the audited
# weights OLMo 2, OLMo 3, FlexOLMo and BitNet, whose norms are of all heads, were off by 5 nats, and
# Hunyuan's log-probs were no numbers (0.32.0's CPU build).
_DIVIDED_ON_BACKEND = {
    "cpu": frozenset(
        {
            "ArceeForCausalLM",
            "CwmForCausalLM",
            "Dots1ForCausalLM",
            "GPTNeoXForCausalLM",
            "GlmForCausalLM",
            "HeliumForCausalLM",
            "Jais2ForCausalLM",
            "MellumForCausalLM",
            "MinistralForCausalLM",
            "NanoChatForCausalLM",
            "OlmoForCausalLM",
            "SeedOssForCausalLM",
            "SmolLM3ForCausalLM",
            "SolarOpenForCausalLM",
            "Starcoder2ForCausalLM",
            "VaultGemmaForCausalLM",
        }
    ),
}
# Engines of this process.
_living: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Parameters of an engine to start.

    Attributes:
        tied: True if the model's head is its embedding.
        quantization_config: configuration of the served checkpoint, for FP8.
        adapter: rank and layers of a LoRA that is served in addition to the weights.
        worker_extension: ``module.Class`` whose methods workers get in addition to their own.
        routed_experts: True if the experts of each token are recorded.
        has_vision: True if the model has a vision tower.
        keys: keys of the configuration that vLLM reads and transformers does not.
    """

    device: torch.device
    model: ModelSource
    dtype: str
    max_num_seqs: int
    options: VllmOptions
    tied: bool
    quantization_config: Mapping[str, Any] | None = None
    worker_extension: str | None = None
    adapter: tuple[int, Sequence[str]] | None = None
    routed_experts: bool = False
    has_vision: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_process(self) -> bool:
        """True if the engine lives in this process."""
        return self.options.executor == "in_process"

    @property
    def shared(self) -> bool:
        """True if neighbouring ranks serve one replica together, each with a part of it."""
        return self.in_process and self.options.tensor_parallel_size > 1

    @property
    def fp8_cache(self) -> bool:
        """True if keys and values are cached in FP8."""
        return self.options.kv_cache_dtype == "fp8"

    @property
    def untie(self) -> bool:
        """True if the head is served as its own weight, and must be sent besides the embedding.

        vLLM's CPU build multiplies with a packed copy of the head, and ``reload_weights`` packs
        only the weights that it receives: a tied head would stay the one that vLLM started with
        (0.32.0).
        """
        return self.tied and self.device.type == "cpu"


def start(plan: Plan) -> vllm.LLMEngine:
    """Start an engine with undefined weights.

    Raises:
        RolloutError: too little memory, no kernels for the device, or a model that vLLM does not
            know.
    """
    _check_fp8(plan)
    if plan.fp8_cache:
        cache.check_device(plan.device)
    if not plan.in_process:
        require_own_devices(plan.device.type, plan.options.tensor_parallel_size)
    # It stays set, because kernels are compiled whenever one is first needed.
    exact_float32(plan.device.type, plan.dtype)
    # An earlier engine of this process froze the variables that it had read.
    vllm.envs.disable_envs_cache()
    arguments = _arguments(plan)
    try:
        if plan.in_process:
            if plan.device.type == "cuda":
                environment.import_tables()
                private.clear_allocator_error()
            if not _living:
                # This frees the memory that frames of a failed start have released since.
                free_memory(plan)
            _join_group(plan)
            private.repair_kernel_scan()
            if plan.shared and plan.device.type == "cpu":
                size = plan.options.tensor_parallel_size
                private.unlink_shared_memory(dist.get_rank() // size * size, size)
            local = plan.device.index or 0
            with (
                environment.in_process(dist.get_rank(), local),
                private.own_threads(),
                Generators(plan.device).own(),
                private.forgotten_on_failure(),
            ):
                engine = _make_engine(plan, arguments)
            private.not_at_exit(engine)
            _living.add(engine)
            return engine
        # Made before the workers are, so that they inherit it.
        secret("channel")
        with environment.workers(plan.device.index, plan.options.tensor_parallel_size):
            return _make_engine(plan, arguments)
    except EngineError:
        raise
    except BaseException as error:
        # vLLM raises whatever stopped it, and an interrupt leaves a part of the engine, too.
        clear_frames(error)
        free_memory(plan)
        if isinstance(error, Exception):
            raise _explain(error, has_vision=plan.has_vision) from error
        raise


def refuse_wrong_models(architectures: Collection[str], device: torch.device) -> None:
    """Raise ``RolloutError`` for a class that vLLM's CPU build was seen to compute wrongly."""
    if device.type != "cpu":
        return
    if wrong := ", ".join(_WRONG_ON_CPU.intersection(architectures)):
        raise RolloutError(
            "vLLM did not start: its CPU build does not compute this model rightly",
            where=WHERE,
            why=f"log-probs of {wrong} differ from transformers' (0.32.0)",
            remedy="rollout.name=local for this model",
        )


def choose_eager(config: Any, device: torch.device, options: VllmOptions) -> bool:
    """Return whether a model is to have neither compilation nor CUDA graphs.

    Raises:
        ConfigError: a model with states in its layers is to be compiled on a CPU.
    """
    asked = options.enforce_eager
    if not _has_states(config):
        return device.type == "cpu" if asked is None else asked
    if device.type == "cpu" and asked is False:
        raise ConfigError(
            "rollout.options.enforce_eager",
            "expected true for a model with states in its layers on a CPU, got false",
            why="no run has compared such a model that vLLM's CPU build compiles",
            remedy="leave it out, or set it to true",
        )
    # One run with CUDA graphs was wrong for a reason that is not known, and ten were right.
    return asked is not False


def _has_states(config: Any) -> bool:
    """Return whether layers keep states of linear attention or of a state space."""
    return bool(config.is_hybrid or config.has_inner_state)


def _make_engine(plan: Plan, arguments: dict[str, Any]) -> vllm.LLMEngine:
    if plan.has_vision:
        _check_torchvision()
    with private.kept_configurations():
        return _make_checked(plan, vllm.EngineArgs(**arguments))


def _make_checked(plan: Plan, chosen: vllm.EngineArgs) -> vllm.LLMEngine:
    config = chosen.create_model_config()
    on_backend = config.using_transformers_backend()
    if on_backend:
        _refuse_on_backend(plan, config.architectures)
    linear_attention.check(config, plan.device, plan.options.gdn_prefill_backend)
    if plan.fp8_cache:
        cache.check_model(config, has_vision=plan.has_vision)
    refuse_wrong_models(config.architectures, plan.device)
    chosen.enforce_eager = choose_eager(config, plan.device, plan.options)
    if plan.device.type == "cpu" and _has_states(config):
        # States of linear attention are kept by prefix only where prompts come in chunks, which
        # they do not here (see ``_arguments``).
        chosen.enable_prefix_caching = False
    if not on_backend:
        return vllm.LLMEngine.from_engine_args(chosen)
    chosen.enforce_eager = True
    with private.prepared_backend():
        engine = vllm.LLMEngine.from_engine_args(chosen)
    _require_same_model(engine)
    return engine


def _refuse_on_backend(plan: Plan, architectures: Sequence[str]) -> None:
    """Raise an error for a model that vLLM has no class of its own for, and cannot serve as asked.

    Raises:
        ConfigError: workers, tensor parallelism that was not compared, CUDA graphs or compilation.
        RolloutError: the model is wrong with any options, has a tower, or is to be served in FP8.
    """
    names = ", ".join(architectures)
    found = [why for name, why in _WRONG_ON_BACKEND.items() if name in architectures]
    remedy = "rollout.name=local for this model"
    if plan.has_vision:
        found.append("no run has compared vLLM's backend with transformers behind images")
    elif plan.quantization_config is not None and not found:
        found.append("no run has compared vLLM's backend in FP8 with transformers")
        remedy = f"rollout.quantization=none, or {remedy}"
    if found:
        raise RolloutError(
            f"vLLM did not start: it has no class of its own for {names}, and cannot serve it "
            "with transformers'",
            where=WHERE,
            why="; ".join(found),
            remedy=remedy,
        )
    if not plan.in_process:
        raise ConfigError(
            "rollout.options.executor",
            f"expected in_process for {names}, got {plan.options.executor}",
            why="vLLM has no class of its own for it. Its backend for transformers' ignores "
            "masks, sinks, windows and caps, which only a rollout in this process compares",
            remedy="leave it out, or set it to in_process; or rollout.name=local for this model",
        )
    parallel = plan.options.tensor_parallel_size
    divided = _DIVIDED_ON_BACKEND.get(plan.device.type, frozenset())
    if parallel > 1 and not divided.issuperset(architectures):
        raise ConfigError(
            "rollout.options.tensor_parallel_size",
            f"expected 1 for {names}, got {parallel}",
            why="vLLM has no class of its own for it. It divides transformers' over ranks by rules "
            f"of its own, and no run has compared this class so on {plan.device.type}: OLMo 2 was "
            "5 nats off on two ranks, with audited weights (0.32.0)",
            remedy="tensor_parallel_size: 1, or rollout.name=local for this model",
        )
    if plan.options.enforce_eager is False:
        raise ConfigError(
            "rollout.options.enforce_eager",
            f"expected true for {names}, got false",
            why="vLLM has no class of its own for it, and to compile transformers' it would change "
            "that class for the whole process, and with it the engine's model",
            remedy="leave it out, or set it to true",
        )


def _require_same_model(engine: vllm.LLMEngine) -> None:
    """Stop the engine and raise ``BackendError`` if its model is not computed as transformers'."""
    models = engine.collective_rpc("get_model")
    faults = [why for model in models for why in private.find_backend_faults(model)]
    # The shutdown frees it.
    del models
    if faults:
        private.shut_down(engine)
        raise private.BackendError("; ".join(faults))


def _check_torchvision() -> None:
    """Raise ``RolloutError`` where vLLM could not import its classes of models with a tower."""
    try:
        importlib.import_module("torchvision")
    # A build for another torch lacks operators, or libraries of CUDA.
    except (ImportError, OSError, RuntimeError) as error:
        raise RolloutError(
            "vLLM did not start: torchvision cannot be imported",
            where=WHERE,
            why=f"vLLM's classes of models with a vision tower need it; {type(error).__name__}: "
            f"{error}",
            remedy="install the build of torchvision that belongs to this torch (on a CPU: "
            "`uv pip install --torch-backend cpu torchvision`), or rollout.name=local",
        ) from error


def stop(engine: vllm.LLMEngine, plan: Plan, asleep: Collection[str]) -> None:
    """Shut the engine down, of which the parts ``asleep`` sleep.

    Its memory is free when the caller has dropped it and called ``free_memory``.
    """
    if plan.in_process:
        if asleep and plan.device.type == "cuda":
            _map_again(engine, plan, asleep)
        private.shut_down(engine)
        _living.discard(engine)
    else:
        engine.engine_core.shutdown()


def _map_again(engine: vllm.LLMEngine, plan: Plan, asleep: Collection[str]) -> None:
    """Map sleeping memory again for a moment: vLLM's allocator cannot free it unmapped.

    The driver refuses, the allocator keeps that error, and frees nothing that comes after it
    (vllm-project/vllm#36651).
    """
    try:
        wake_up(engine, plan, asleep)
    except (RolloutError, RuntimeError) as error:
        warnings.warn(
            f"{WHERE}: closed while asleep, and there is not enough memory to wake up ({error}): "
            "some of its memory is not freed until this process ends. Close the engine first, "
            "or wake up the rollout before",
            stacklevel=4,
        )


def sleep(engine: vllm.LLMEngine, plan: Plan, *, weights: bool) -> None:
    """Let the caches sleep, on a GPU, and with ``weights`` the weights, too, which are lost."""
    with private.kept_memory() if plan.in_process else nullcontext():
        engine.sleep(level=2 if weights else 1)


def wake_up(engine: vllm.LLMEngine, plan: Plan, asleep: Collection[str]) -> None:
    """Wake up memory that sleeps, on a GPU.

    PyTorch keeps the memory that a process frees for its next tensors, and vLLM's allocator asks
    the driver: kept memory is returned first, where it is needed.

    Raises:
        RolloutError: there is too little memory, and nothing is awake.
    """
    if not plan.in_process:
        # The need of its workers is not known here.
        torch.cuda.empty_cache()
    elif (need := private.sleeping_bytes(asleep)) > _free_bytes(plan):
        torch.cuda.empty_cache()
        if need > (free := _free_bytes(plan)):
            # PyTorch counts sleeping memory as allocated.
            sleeping = private.sleeping_bytes({"weights", "kv_cache"})
            taken = torch.cuda.memory_allocated(plan.device) - sleeping
            raise RolloutError(
                f"cannot wake up: {' and '.join(sorted(asleep))} need {need / GIB:.2f} GiB, "
                f"{free / GIB:.2f} GiB are free",
                where=f"{WHERE} on {plan.device}",
                why=f"this process' tensors that are awake take {taken / GIB:.2f} GiB",
                remedy="rollout.offload_engine=true, engine.memory's offload, or a smaller cache "
                "(rollout.options.kv_cache_for_batch, kv_cache_bytes)",
            )
    engine.wake_up(sorted(asleep, reverse=True))


def _free_bytes(plan: Plan) -> int:
    return torch.cuda.mem_get_info(plan.device)[0]


def free_memory(plan: Plan) -> None:
    """Leave vLLM's groups and free its memory."""
    # vLLM froze the objects that it had built.
    gc.unfreeze()
    if plan.in_process:
        private.leave_groups()
    on_cuda = plan.device.type == "cuda"
    if on_cuda and plan.in_process:
        private.clear_allocator_error()
    # Twice: weights that views refer to (our bound copies, in C++) count as held in the pass that
    # frees the views.
    gc.collect()
    gc.collect()
    if on_cuda and plan.in_process:
        private.empty_pools()
    elif on_cuda:
        torch.cuda.empty_cache()


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and of the errors behind it, because they hold the model.

    A caller that keeps the error, for example in an ``except``, could otherwise make no other
    rollout, because memory that can sleep would still be in use.
    """
    behind: BaseException | None = error
    while behind is not None:
        # Frames that still run are not cleared.
        traceback.clear_frames(behind.__traceback__)
        behind = behind.__cause__ or behind.__context__


class Generators:
    """Global random generators, as vLLM seeds them and draws from them in this process.

    Within ``own`` they are vLLM's, in the state in which it left them; outside they are the
    trainer's, unchanged.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: Any = None

    @contextmanager
    def own(self) -> Iterator[None]:
        """Use vLLM's state, which begins anywhere: a repeatable draw has its own seed."""
        outer = self._read()
        if self._own is None:
            torch.manual_seed(secrets.randbits(63))
        else:
            self._write(self._own)
        try:
            yield
        finally:
            self._own = self._read()
            self._write(outer)

    def _read(self) -> Any:
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        # vLLM seeds NumPy's legacy generator.
        numpy_state = np.random.get_state()  # noqa: NPY002
        return random.getstate(), numpy_state, torch.get_rng_state(), cuda

    def _write(self, states: Any) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        if states[3] is not None:
            torch.cuda.set_rng_state(states[3], self._device)


def _arguments(plan: Plan) -> dict[str, Any]:
    options = plan.options
    source = plan.model
    cpu = plan.device.type == "cpu"
    overrides = {**source.config_overrides, **plan.keys}
    if plan.quantization_config is not None:
        overrides["quantization_config"] = dict(plan.quantization_config)
    if plan.untie:
        overrides["tie_word_embeddings"] = False
    elif plan.tied and plan.has_vision:
        # Its class reads the language model's own key, which transformers does not write as the
        # whole model's (0.26.0, Qwen3.5), and would serve a head of its own.
        overrides["text_config"] = {
            **overrides.get("text_config", {}),
            "tie_word_embeddings": True,
        }
    return {
        "model": source.path,
        "revision": source.revision,
        "trust_remote_code": source.trust_remote_code,
        "hf_overrides": overrides,
        "dtype": plan.dtype,
        "quantization": None if plan.quantization_config is None else "fp8",
        # Weights come from the engine.
        "load_format": "dummy",
        # vLLM plans its memory with the processor of images, which needs a tokenizer.
        "skip_tokenizer_init": not plan.has_vision,
        # Nothing from the model's folder: the ids that end a completion come with each request.
        "generation_config": "vllm",
        "max_model_len": options.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        # vLLM's ``calculate_kv_scales`` (0.26.0) is not used: it keeps the first weights' scales.
        "kv_cache_dtype": options.kv_cache_dtype,
        "kv_cache_memory_bytes": _cache_bytes(plan) or (CPU_CACHE_BYTES if cpu else None),
        "enable_prefix_caching": options.prefix_caching,
        # A prompt that is begun in one step and ended in another draws a token too early. vLLM
        # rewinds the request's generator, which CPU generators cannot ("CPU Generator does not use
        # offset", 0.32.0).
        **({"enable_chunked_prefill": False} if cpu else {}),
        "tensor_parallel_size": options.tensor_parallel_size,
        "distributed_executor_backend": _executor(plan),
        "enable_sleep_mode": plan.options.memory_saver and not cpu,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logits" if options.truncation else "processed_logprobs",
        "logits_processors": [NORMALIZE] if options.truncation else None,
        **({"worker_extension_cls": plan.worker_extension} if plan.worker_extension else {}),
        **({"enable_return_routed_experts": True} if plan.routed_experts else {}),
        **(_vision_arguments() if plan.has_vision else {}),
        **_adapter_arguments(plan),
        **linear_attention.arguments(options),
        **speculation.arguments(options),
    }


def _vision_arguments() -> dict[str, Any]:
    """Return vLLM's arguments for images that come processed."""
    arguments: dict[str, Any] = {
        "limit_mm_per_prompt": {"video": 0},
        # Nothing is cached before the tower.
        "mm_processor_cache_gb": 0,
    }
    # Since 0.32 towers normalize pixels that come as bytes, and would do so again.
    if any(field.name == "mm_device_do_normalize" for field in fields(vllm.EngineArgs)):
        arguments["mm_device_do_normalize"] = False
    return arguments


def _cache_bytes(plan: Plan) -> int | None:
    options = plan.options
    if not options.kv_cache_for_batch:
        return options.kv_cache_bytes
    if options.kv_cache_bytes is not None:
        raise ConfigError(
            "rollout.options.kv_cache_for_batch",
            "true together with kv_cache_bytes",
            remedy="give one of the two",
        )
    return cache.bytes_for(
        plan.model,
        plan.max_num_seqs,
        positions=options.max_model_len,
        dtype="float8_e4m3fn" if plan.fp8_cache else plan.dtype,
        parallel=options.tensor_parallel_size,
    )


def _executor(plan: Plan) -> str | None:
    """Return the name of vLLM's executor.

    In this process it is not "uni": that one takes GPU 0 and asks for a group of its own.
    """
    if plan.in_process:
        return "external_launcher"
    # Without a name, vLLM in a worker of a Ray cluster would give several workers to that cluster:
    # into the bundles of this worker's placement group, which this replica and the engine's ranks
    # fill.
    return "mp" if plan.options.tensor_parallel_size > 1 else None


def _adapter_arguments(plan: Plan) -> dict[str, Any]:
    """Return vLLM's arguments for the adapter, or raise ``ConfigError`` for one it cannot serve."""
    if plan.adapter is None:
        return {}
    rank, layers = plan.adapter
    max_rank = next((size for size in _RANKS if size >= rank), None)
    if max_rank is None:
        raise ConfigError(
            "engine.lora.rank",
            f"expected at most {_RANKS[-1]}, got {rank}",
            why=f"vLLM serves adapters of up to rank {_RANKS[-1]}",
            remedy=f"at most {_RANKS[-1]}, or rollout.lora=merged",
        )
    if plan.device.type == "cuda" and plan.dtype == "float32":
        raise ConfigError(
            "rollout.options.dtype",
            "float32 with rollout.lora=adapter",
            why="vLLM's LoRA kernels on CUDA support bfloat16 and float16",
            remedy="dtype: bfloat16, or rollout.lora=merged",
        )
    # Only these layers: vLLM would wrap the embedding and the head too, whose weights the sync
    # could not load then.
    return {
        "enable_lora": True,
        "max_lora_rank": max_rank,
        "max_loras": 1,
        "lora_target_modules": list(layers),
    }


def _join_group(plan: Plan) -> None:
    """Make the default group the world of vLLM.

    Without one, make a group of a single rank.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RolloutError(
                "torch.distributed is not initialized on these ranks",
                where=WHERE,
                why="vLLM in this process joins the engine's process group",
                remedy="create the engine first, or use rollout.options.executor=workers",
            )
        backend = "gloo" if plan.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        # Documented, but not re-exported.
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    world = dist.get_world_size()
    size = plan.options.tensor_parallel_size
    if world % size:
        raise RolloutError(
            f"{world} ranks cannot serve replicas of {size}",
            where=WHERE,
            remedy="choose a rollout.options.tensor_parallel_size that divides the number of ranks",
        )


def _check_fp8(plan: Plan) -> None:
    if plan.quantization_config is None:
        return
    require_fp8(
        plan.device,
        "this device has no FP8 kernels",
        kernels="block FP8 kernels",
        where=WHERE,
        remedy="rollout.quantization=none",
        flags=("amx_tile",),
        cpu="vLLM's block FP8 kernels for CPUs need AMX tiles (Intel Sapphire Rapids or newer)",
    )


def _explain(error: Exception, *, has_vision: bool = False) -> RolloutError:
    text = str(error)
    if isinstance(error, private.BackendError):
        return RolloutError(
            "vLLM did not start: it has no class of its own for this model, and cannot serve it "
            "with transformers'",
            where=WHERE,
            why=text,
            remedy="rollout.name=local for this model",
        )
    if "CuMem allocator" in text:
        return RolloutError(
            "vLLM did not start: another rollout of this process still has memory that can sleep",
            where=WHERE,
            why=text,
            remedy="rollout.options.memory_saver=false, or a process for each rollout",
        )
    if "memory profiling" in text:
        # vLLM 0.26: memory came free while it measured its own need.
        return RolloutError(
            "vLLM did not start: other processes used the device's memory meanwhile",
            where=WHERE,
            why=text,
            remedy="start one process at a time on a device",
        )
    if "Model architectures" in text or "Model architecture " in text:
        return RolloutError(
            "vLLM did not start: it does not serve this model",
            where=WHERE,
            # All of vLLM's architectures follow.
            why=text.partition("Supported architectures")[0].strip(),
            remedy="rollout.name=local for this model",
        )
    if has_vision and ("processor" in text.lower() or "tokenizer" in text.lower()):
        return RolloutError(
            "vLLM did not start: the model's processor of images cannot be read",
            where=WHERE,
            why=f"{type(error).__name__}: {text}",
            remedy="copy preprocessor_config.json (and processor_config.json, where the model has "
            "it) and the whole tokenizer into the model's folder",
        )
    memory = isinstance(error, torch.OutOfMemoryError) or "memory" in text.lower()
    remedy = (
        "free the device, or lower rollout.options.gpu_memory_utilization, max_model_len, "
        "kv_cache_bytes or batch_size"
        if memory
        else "see vLLM's message; VLLM_LOGGING_LEVEL=INFO shows more"
    )
    what = "vLLM did not start: not enough memory" if memory else "vLLM did not start"
    return RolloutError(what, where=WHERE, why=f"{type(error).__name__}: {text}", remedy=remedy)
