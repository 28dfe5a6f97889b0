"""Uses of vLLM that have no public call, each with the reason and the upstream thread."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import inspect
import math
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo import convert_frame, guards
from torch._dynamo.eval_frame import remove_from_cache
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.device_allocator import cumem
from vllm.distributed import parallel_state
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.ops.triton_ops import utils as lora_pointers
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.model_loader import weight_utils
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.models import interfaces
from vllm.model_executor.models.llama4 import Llama4Attention
from vllm.model_executor.models.mistral import MistralAttention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.sample import rejection_sampler

from engine_api.errors import RolloutError
from rollout_fp8.install.adapter import PREFIX, SHARED_MEMORY
from rollout_fp8.install.positions import (
    FREQUENCIES,
    ServedPositions,
    ServedTable,
    find_frequencies,
    read_table,
)
from rollout_fp8.vllm.held import HeldOutputs

# Parameters of latent attention that no checkpoint has.
_DERIVED = frozenset({"W_UV", "W_UK_T"})
# Prefix of Dynamo's names.
_COMPILED = "__compiled_fn"
# Names that Dynamo's guards give to what they read on the way to an attribute.
_TEMPORARY = re.compile(r"tmp\d*")
# Method with which vLLM's backend makes a class of transformers one that it can compile, and its
# arguments.
_DECORATE = "_decorate_cls_for_torch_compile"
_DECORATED = ("self", "cls", "dynamic_arg_dims", "enable_if", "is_encoder")
# Function with which the backend's models attend.
_ATTEND = "vllm_attention_forward"
# Keys of the largest logit in transformers' configurations.
_HEAD_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Layers of attention that the backend has computed.
_attended: weakref.WeakSet[Any] = weakref.WeakSet()


def not_at_exit(engine: Any) -> None:
    """Keep an engine of this process from shutting itself down at exit or when it is freed.

    Since 0.32 vLLM does both by ``engine_core.shutdown``: in a run that failed it met groups that
    the trainer had destroyed, and its traceback came after the run's own error. Upstream: no thread
    on the exit known (0.32.0); vllm-project/vllm#21073 is about the remains of deleting such an
    engine.
    """
    finalizer = getattr(engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def shut_down(engine: Any) -> None:
    """Shut down an engine of this process, and only vLLM's own process groups.

    The public ``engine_core.shutdown`` ends in ``cleanup_dist_env_and_memory``, which destroys the
    default group, and that is the trainer's. Upstream: no thread of vLLM's known (0.32.0);
    pytorch/torchtitan#3365 leaves that call out, too.
    """
    for model in engine.collective_rpc("get_model"):
        _forget_reloads(model)
        _forget_compiled(model)
        _forget_cached(model)
    _forget_guarded()
    _forget_adapters()
    engine.collective_rpc("shutdown")
    leave_groups()


class ReloadByCopies(TorchDispatchMode):
    """Context of a reload in which what a model itself copies into a parameter counts as loaded.

    While vLLM reloads, parameters have no memory, and what their ``weight_loader`` is given is kept
    until a layer is whole. gpt-oss copies into sinks and experts without one, which vLLM then loses
    (0.26.0 and 0.32.0, ``GptOssModel._load_weights_other``). Here such a copy goes through a
    loader. Upstream: reloads came with vllm-project/vllm#32133; no thread on such copies known.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._is_loading = False
        self._count = layerwise.get_numel_loaded

    def __enter__(self) -> Self:
        layerwise.get_numel_loaded = self._count_loaded
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        layerwise.get_numel_loaded = self._count
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        is_copy = func is torch.ops.aten.copy_.default and not self._is_loading
        if is_copy and args[0].is_meta and not args[1].is_meta:
            found = self._find(args[0])
            if found is not None:
                self._load(*found, args[0], args[1])
                return args[0]
        return func(*args, **(kwargs or {}))

    def _count_loaded(self, *arguments: Any) -> tuple[int, object]:
        """Do ``get_numel_loaded``, in which a loader's copies are counted."""
        former, self._is_loading = self._is_loading, True
        try:
            return self._count(*arguments)
        finally:
            self._is_loading = former

    def _find(self, target: Tensor) -> tuple[Any, str] | None:
        """Return the layer and the name of the parameter or buffer that a tensor is in."""
        storage = target.untyped_storage()
        for layer in self._model.modules():
            own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
            for name, tensor in own:
                if tensor.untyped_storage() is storage:
                    return layer, name
        return None

    def _load(self, layer: Any, name: str, target: Tensor, source: Tensor) -> None:
        parameter: Any = getattr(layer, name)
        if _place_of(target) != _place_of(parameter):
            raise RolloutError(
                "vLLM would lose a weight in a reload",
                where="vLLM's loader",
                why=f"{type(layer).__name__} copies into a part of its {name} without a loader",
                remedy="this model family cannot be synced into vLLM; use rollout.name=local",
            )
        parameter.weight_loader = weight_utils.default_weight_loader
        parameter.weight_loader = layerwise.make_online_process_loader(layer, name)
        parameter.weight_loader(parameter, source)


def _place_of(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def name_loaders(model: Any) -> None:
    """Give each partial function among the loaders of weights its function's name.

    vLLM asks each loader for its ``__name__`` in a reload, and MiniMax-M2's have none (0.26.0 and
    0.32.0, ``_wrap_parameters_weight_loader``). Upstream: no thread known.
    """
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial):
            name = getattr(loader.func, "__name__", type(loader.func).__name__)
            vars(loader)["__name__"] = name


def end_reload(model: Any) -> None:
    """Restore every layer's own tensors after a reload that ended half-way, with undefined content.

    vLLM continues with half a layer at the next reload: it counts the tensors that had come before,
    and then asserts, or serves a mixture (0.26.0 and 0.32.0, ``initialize_layerwise_reload`` skips
    layers that are begun).

    Upstream: it came with vllm-project/vllm#32133; no thread on a reload that ended half-way known.
    """
    for layer in model.modules():
        info = layerwise.LAYERWISE_INFO.get(layer)
        if info is not None and info.can_load():
            layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001
            info.reset()


def _forget_reloads(model: Any) -> None:
    """Free the weights of a model that was reloaded.

    vLLM's record of its layers has weak keys, but keeps their loaders, whose owners are the layers:
    none would ever be dropped, and the next engine would find memory that can sleep still in use
    (0.26.0 and 0.32.0, ``LAYERWISE_INFO``). Upstream: the record came with vllm-project/vllm#32133;
    no thread on what it keeps known.
    """
    for layer in model.modules():
        layerwise.LAYERWISE_INFO.pop(layer, None)


def _forget_cached(model: Any) -> None:
    """Free a model that is in vLLM's caches.

    A table has the language model of each model with a tower, and its keys are strong (0.26.0,
    ``_language_model_by_module``; weak in 0.32.0). ``lru_cache`` on a method keeps each module
    whose method was called (0.26.0, ``Qwen2_5_VisionTransformer.get_rope_by_thw``). Upstream: no
    thread known.
    """
    classes: set[type] = set()
    for module in model.modules():
        interfaces._language_model_by_module.pop(module, None)  # noqa: SLF001
        classes.update(type(module).__mro__)
    for one in classes:
        for function in vars(one).values():
            if isinstance(function, functools._lru_cache_wrapper):  # noqa: SLF001
                function.cache_clear()


def _forget_guarded() -> None:
    """Free layers that Dynamo keeps for its guards.

    While torch 2.11 filters guards it reads each attribute anew. Where a layer lacks one, the read
    ends in an error that is dropped, and the layer stays under the name ``tmp`` in a table of the
    process and in that of each guard manager (``ChainedSource.get_value``; not in 2.13). vLLM's
    Llama has such a read (0.32.0, ``get_input_quant_key``). Upstream: no thread known.
    """
    managers = [one for one in gc.get_objects() if type(one) is guards.GuardManagerWrapper]
    tables = (guards._CLOSURE_VARS, *(one.closure_vars for one in managers))  # noqa: SLF001
    for table in filter(None, tables):
        for name in [name for name in table if _TEMPORARY.fullmatch(name)]:
            del table[name]


def _forget_adapters() -> None:
    """Free the slots for adapters, which are memory that can sleep.

    The kernels' tables of pointers belong to the whole process and are never emptied; where a layer
    has one projection, the "pointer" is the stacked weight itself (0.26.0 and 0.32.0,
    ``_get_lora_a_ptr``). Upstream: no thread known (0.26.0 and 0.32.0).
    """
    for name in ("_LORA_A_PTR_DICT", "_LORA_B_PTR_DICT"):
        getattr(lora_pointers, name).clear()


def _forget_compiled(model: Any) -> None:
    """Free the weights and the caches of a model that was compiled.

    vLLM registers hooks with Dynamo that hold the model, and Dynamo puts the compiled function,
    with the weights as its examples, among the globals of the model's source file. Neither is
    removed; ``cleanup`` knows only the last hook (0.26.0 and 0.32.0,
    ``TorchCompileWithNoGuardsWrapper``). Upstream: vllm-project/vllm#45195, which removes the hook,
    and #21073, which it leaves open.
    """
    for layer in model.modules():
        if isinstance(layer, TorchCompileWithNoGuardsWrapper):
            _forget_layer(layer)


def _forget_layer(layer: Any) -> None:
    hooks = convert_frame._bytecode_hooks  # noqa: SLF001
    for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is layer]:
        del hooks[key]
    # The hook gives a layer its function's name, but is not called for code that is compiled ahead
    # of time.
    compiled = getattr(layer, "_compiled_bytecode", None)
    ahead = getattr(layer, "aot_compiled_fn", None)
    names: list[str] = []
    if compiled is not None:
        names += [name for name in compiled.co_names if name.startswith(_COMPILED)]
    if ahead is not None:
        names.append(ahead._artifacts.backend_id)  # noqa: SLF001
    for name in names:
        type(layer).forward.__globals__.pop(name, None)
    remove_from_cache(layer.original_code_object())


@contextmanager
def forgotten_on_failure() -> Iterator[None]:
    """Free the models that a start made in the context before it failed.

    No caller gets such a model, so it is found by the objects that keep it: hooks and tables that
    were not there before. Dynamo keeps every compiler that it was given, and so vLLM's with its
    configuration and that with the attention layers, which a shutdown would clear. Upstream:
    vllm-project/vllm#45195 for the hooks of an engine that did start; no thread on ``_ROPE_DICT``
    known (0.32.0).
    """
    # Layers that models share, which only a shutdown clears.
    rotations = rotary_embedding._ROPE_DICT  # noqa: SLF001
    languages = interfaces._language_model_by_module  # noqa: SLF001
    known = set(languages)
    before = set(convert_frame._bytecode_hooks)  # noqa: SLF001
    kept = set(rotations)
    try:
        yield
    except BaseException:
        # After Ctrl-C too: a start that takes a minute is often interrupted.
        for key in set(rotations) - kept:
            del rotations[key]
        for model in set(languages) - known:
            _forget_cached(model)
        _forget_hooked(before)
        _forget_guarded()
        raise


def _forget_hooked(before: set[int]) -> None:
    new = [hook for key, hook in convert_frame._bytecode_hooks.items() if key not in before]  # noqa: SLF001
    layers: list[Any] = [getattr(hook, "__self__", None) for hook in new]
    for layer in layers:
        if isinstance(layer, TorchCompileWithNoGuardsWrapper):
            _forget_layer(layer)
            layer.vllm_config.compilation_config.static_forward_context.clear()


# --- vLLM's backend, which computes with transformers' classes ---


class BackendError(RuntimeError):
    """Fault for which vLLM's backend of transformers' classes cannot serve a model here.

    Upstream: no thread known.
    """


@contextmanager
def kept_configurations() -> Iterator[None]:
    """Leave the classes of configurations that transformers reads folders with as they were.

    vLLM puts its own in the place of transformers' for the whole process when it reads a model of
    theirs (0.26.0: Qwen3.5, FlexOLMo, HyperCLOVA X; 0.32.0: DeepSeek-V3.2;
    ``_register_config_class``). transformers cannot make its model of them. Upstream: no thread
    known.
    """
    table: dict[str, Any] = CONFIG_MAPPING._extra_content  # noqa: SLF001
    kept = dict(table)
    try:
        yield
    finally:
        # A thread that reads a folder now must find each class.
        table.update(kept)
        for name in table.keys() - kept.keys():
            del table[name]


@contextmanager
def prepared_backend() -> Iterator[None]:
    """Let vLLM start in the context with a model that it has no class of its own for.

    Its backend gives the class of a model another base and another ``__init__``, which needs vLLM's
    configuration: the engine of this process could then make no model of that class. Only
    compilation needs either, and they are left out (0.26.0 and 0.32.0,
    ``Base._decorate_cls_for_torch_compile``). Everything else the backend changes in objects of its
    own. Its attention is checked from then on (``_attend_checked``). Upstream: no thread known.

    Raises:
        BackendError: this vLLM has other names, or changes classes in another way.
    """
    base: Any = importlib.import_module("vllm.model_executor.models.transformers.base")
    package: Any = importlib.import_module("vllm.model_executor.models.transformers")
    decorate = vars(base.Base).get(_DECORATE)
    attend = vars(package).get(_ATTEND)
    if decorate is None or tuple(inspect.signature(decorate).parameters) != _DECORATED:
        raise BackendError(
            "this version of vLLM changes transformers' classes in an unknown way: expected "
            f"Base.{_DECORATE}({', '.join(_DECORATED)})"
        )
    if attend is None:
        raise BackendError(f"this version of vLLM attends in an unknown way: expected {_ATTEND}")
    checked = functools.partial(_attend_checked, attend)
    # vLLM 0.32 registers its function, and the entry of 0.26 hides those that are registered.
    ALL_ATTENTION_FUNCTIONS.register("vllm", checked)
    ALL_ATTENTION_FUNCTIONS["vllm"] = checked
    setattr(base.Base, _DECORATE, _leave_class)
    try:
        yield
    finally:
        setattr(base.Base, _DECORATE, decorate)


def _leave_class(
    _model: Any, cls: type, dynamic_arg_dims: Any, enable_if: Any, is_encoder: bool
) -> None:
    """Do nothing in place of the backend's decoration of a class."""


def _attend_checked(
    attend: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> Any:
    """Attend with vLLM's layer, and raise ``BackendError`` if it is not the model's attention.

    The backend ignores most arguments with which a model calls its attention: vLLM's layer has its
    own heads, window and cap, from the configuration, and no mask (0.26.0 and 0.32.0,
    ``vllm_attention_forward``; 0.26.0 ignores sinks, too). 0.32.0 reads the scale in the source
    of the model's class, and takes Llama's where it finds none. Upstream: no thread known.
    """
    layers = arguments.get("attention_instances")
    # Since 0.32 a module has its layer.
    layer = module.attn if layers is None else layers[module.layer_idx]
    cap = getattr(layer.impl, "logits_soft_cap", None)
    scale = arguments.get("scaling")
    is_causal = arguments.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    served_scale = layer.impl.scale
    if scale is None:
        # transformers' default.
        scale = query.shape[3] ** -0.5
    elif layers is not None:
        # Before 0.32 the backend gives the layer the scale of each call.
        served_scale = scale
    # The model's value and vLLM's: a difference gives other log-probs with audited weights.
    pairs = {
        "masks": (attention_mask is not None, False),
        "sinks": (arguments.get("s_aux") is not None, layer.has_sink),
        "windows": (arguments.get("sliding_window") or None, layer.sliding_window),
        "caps of scores": (float(arguments.get("softcap") or 0), float(cap or 0)),
        "queries": (query.shape[1] * query.shape[3], layer.num_heads * layer.head_size),
        "keys": (key.shape[1] * key.shape[3], layer.num_kv_heads * layer.head_size),
        "sizes of heads": (query.shape[3], layer.head_size),
        "causal scores": (is_causal, layer.attn_type == AttentionType.DECODER),
        # Powers and roots of the same head size differ in their last digits.
        "scales of scores": (float(f"{scale:.6g}"), float(f"{served_scale:.6g}")),
    }
    for name, (asked, served) in pairs.items():
        if asked != served:
            raise BackendError(
                f"{name} of {type(module).__name__} are {asked} in transformers, and {served} in "
                "vLLM's attention"
            )
    _attended.add(layer)
    return attend(module, query, key, value, attention_mask, **arguments)


def find_backend_faults(model: Any) -> Iterator[str]:
    """Yield the reasons why a model on vLLM's backend is not served as transformers computes it.

    Its backend has a head of its own, which ignores some keys of the configuration (0.26.0 and
    0.32.0, ``CausalMixin``). Layers without attention mix sequences (0.26.0, which has computed a
    pass on a GPU when it has started). A class that is changed all the same has vLLM's wrapper
    among its bases (``_support_torch_compile``). Upstream: no thread known.
    """
    for cls in {type(module) for module in model.modules()}:
        if issubclass(cls, PreTrainedModel) and issubclass(cls, TorchCompileWithNoGuardsWrapper):
            yield (
                f"{cls.__name__} of transformers is changed for the whole process, and with it the "
                "engine's model: vLLM's wrapper for compilation is among its bases"
            )
    # Since 0.32 vLLM refuses such layers, and modules have their layer of attention.
    layers = getattr(model, "attention_instances", {})
    idle = [number for number, layer in layers.items() if layer not in _attended]
    if idle:
        yield f"the layers {idle} have no attention in vLLM's form"
    text = model.text_config
    head = model.logits_processor
    caps = [cap for key in _HEAD_CAPS if (cap := getattr(text, key, None))]
    scale = math.prod(
        getattr(text, key, None) or 1.0 for key in ("logit_scale", "lm_head_multiplier")
    ) / (getattr(text, "logits_scaling", None) or 1.0)
    if caps != [head.soft_cap] and (caps or head.soft_cap):
        yield f"logits are capped at {caps or None} in transformers, and at {head.soft_cap} in vLLM"
    if not math.isclose(scale, head.scale):
        yield f"logits are multiplied by {scale} in transformers, and by {head.scale} in vLLM"


# --- vLLM's allocator of memory that can sleep ---


def clear_allocator_error() -> None:
    """Clear the driver's last error, which the allocator keeps in a variable of its library.

    Until that is cleared its next allocation fails ("out of memory"), and freed memory is not
    returned (0.26.0 and main, ``cumem_allocator.cpp``). Its own calls for waking and sleeping clear
    it, those for allocating and freeing do not. Upstream: vllm-project/vllm#36651.
    """
    if cumem.CuMemAllocator.instance is not None:
        ctypes.c_int.in_dll(ctypes.CDLL(cumem.lib_name), "error_code").value = 0


def empty_pools() -> None:
    """Free the memory of models that are gone.

    The pools go with the engine's shutdown, but after a start that failed they stay, and so do the
    records of allocations that failed: for vLLM that is memory of an engine that still lives
    (0.26.0 and main). PyTorch has no segment at such an address. Upstream: no thread known;
    vllm-project/vllm#36651 is about other stale records.
    """
    allocator = cumem.CuMemAllocator.instance
    if allocator is not None:
        allocator.release_pools()
    torch.cuda.empty_cache()
    if allocator is not None:
        there = {segment["address"] for segment in torch.cuda.memory_snapshot()}
        for address in set(allocator.pointer_to_data) - there:
            del allocator.pointer_to_data[address]


@contextmanager
def kept_memory() -> Iterator[None]:
    """Let PyTorch keep in the context the memory that it has for its next tensors.

    vLLM returns it to the driver at each sleep (0.26.0 and 0.32.0, ``CuMemAllocator.sleep``). An
    engine of the same process would allocate that of its update anew in each step. What sleeps is
    no memory of PyTorch's, and is returned all the same. Upstream: no thread known.
    """
    kept = torch.cuda.empty_cache
    torch.cuda.empty_cache = lambda: None
    try:
        yield
    finally:
        torch.cuda.empty_cache = kept


def sleeping_bytes(tags: Collection[str]) -> int:
    """Return the bytes that are needed to wake up memory of these kinds.

    No public call returns them (0.26.0; ``get_current_usage`` counts awake memory too). 0.32 wakes
    all memory that is not deferred, whichever kinds are requested, and empties PyTorch's cache
    itself. Upstream: no thread known.
    """
    allocator = cumem.CuMemAllocator.instance
    held = [] if allocator is None else allocator.pointer_to_data.values()
    return sum(data.handle[1] for data in held if data.is_asleep and data.tag in tags)


def leave_groups() -> None:
    """Destroy the process groups that vLLM made, including its world, which has no public call.

    A later engine would take an old world for its own, whose default group may be gone. Upstream:
    vllm-project/vllm#1908, about engines one after another in a process, where ``_WORLD`` is
    mentioned.
    """
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        world = parallel_state._WORLD  # noqa: SLF001
        if world is not None:
            world.destroy()
    parallel_state._WORLD = None  # noqa: SLF001
    parallel_state._NODE_COUNT = None  # noqa: SLF001


def unlink_shared_memory(first: int, size: int) -> None:
    """Remove the files that a killed run left under the names of a group of ranks.

    The group begins with rank ``first``. The files are used on a CPU. Under ``external_launcher``
    the names contain only ranks, and vLLM creates the files exclusively (0.32.0,
    ``_CPUSHMDistributed``): no later run of this host would start. A process that has such a file
    mapped keeps it. Upstream: no thread on files that stay known; vllm-project/vllm#34169 is about
    the names.
    """
    ranks = "-".join(str(first + place) for place in range(size))
    for file in SHARED_MEMORY.glob(f"-*-[[]{ranks}]-cpushm_{dist.get_rank() - first}"):
        file.unlink(missing_ok=True)


def forget_expert_kernels(model: Any) -> None:
    """Make the next ``reload_weights`` on a CPU pack the experts again.

    vLLM's CPU build packs them where their kernel is made, which a reload does not do a second
    time: it would serve unpacked experts as if they were packed (0.32.0,
    ``UnquantizedFusedMoEMethod._setup_kernel``). Upstream: vllm-project/vllm#40390 makes the kernel
    only once; #42821 is the same fault of ``load_weights`` on CUDA.
    """
    for method in _find_expert_methods(model):
        method.moe_kernel = None


def _find_expert_methods(model: Any) -> list[Any]:
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    return [method for method in methods if isinstance(method, FusedMoEMethodBase)]


@contextmanager
def kept_expert_kernels(model: Any) -> Iterator[None]:
    """Keep the kernels of experts over a reload in the context.

    A kernel has the scales and biases of its layer, and reads weights alone from the layer at each
    call. A reload gives quantized experts a new kernel, whose scales are temporary tensors that are
    then copied into the layer's own: the scales of later syncs into place would reach the layer and
    the audit, and no kernel (0.26.0 and 0.32.0, ``Fp8MoEMethod.process_weights_after_loading``).
    The first kernel has the layer's own, as CUDA graphs do. This assumes that a reload keeps each
    layer's ``quant_method``: a new one would go on with its temporary scales, and the check for
    copies (``install/copies.py``) would refuse the server. Upstream: vllm-project/vllm#41670.
    """
    methods = _find_expert_methods(model)
    kept = [(method, method.moe_kernel, method.moe_quant_config) for method in methods]
    try:
        yield
    finally:
        for method, kernel, config in kept:
            method.moe_kernel = kernel
            method.moe_quant_config = config


def derived_weights(model: Any) -> list[str]:
    """Return the names of the parameters that latent attention computes from ``kv_b_proj``.

    vLLM makes them after loading, as views of that weight, or as copies where it is quantized or
    packed (0.26.0 and 0.32.0, ``MLAAttention.process_weights_after_loading``). Upstream: no thread
    on a sync into place known.
    """
    return [
        f"{name}.{leaf}"
        for name, layer in model.named_modules()
        if isinstance(layer, MLAAttention)
        for leaf, _ in layer.named_parameters(recurse=False)
        if leaf in _DERIVED
    ]


def derive_weights(model: Any, dtype: torch.dtype) -> None:
    """Compute the derived parameters again, in their memory, where CUDA graphs read them.

    vLLM's own reload ends in this call (0.26.0 and 0.32.0, ``_finalize_attention_layer``).
    Upstream: no thread known; see ``derived_weights``.
    """
    for layer in model.modules():
        if isinstance(layer, MLAAttention):
            layer.process_weights_after_loading(dtype)


def attention_layers(model: Any) -> dict[str, Any]:
    """Return vLLM's layers of a model that have a cache of keys and values, by name.

    Upstream: no thread known (0.26.0 and 0.32.0).
    """
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, Attention) and layer.attn_type == AttentionType.DECODER
    }


class CachedAttention:
    """Layer of vLLM's whose cache is FP8, as a ``CacheLayer``.

    vLLM computes no scales since 0.32, and 0.26 does once, at the first forward pass, and keeps
    them over all syncs. Its kernels read scales from buffers, also in CUDA graphs, and those for
    CPUs read numbers on the host at each call. The computation is ``impl``, which the operator that
    splits compiled graphs looks up at each call. Upstream: no thread on scales after a sync known
    (0.26.0 and 0.32.0).
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def observe(self, note: Callable[[str, Tensor], None]) -> None:
        """Call ``note`` in each forward pass (see ``CacheLayer.observe``)."""
        layer = self._layer
        forward = layer.impl.forward

        def observed(
            owner: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            *rest: Any,
            **named: Any,
        ) -> Any:
            # None: vLLM measures its memory. Rows behind the tokens are padding.
            if attn_metadata is not None:
                number = attn_metadata.num_actual_tokens
                queries = query[:number].float()
                # Quantized before the operator, where the kernels take FP8 queries.
                quantized = query.dtype == torch.float8_e4m3fn
                note("q", queries * layer._q_scale if quantized else queries)  # noqa: SLF001
                note("k", key[:number])
                note("v", value[:number])
            return forward(owner, query, key, value, kv_cache, attn_metadata, *rest, **named)

        layer.impl.forward = observed

    def forget(self) -> None:
        """Stop calling ``note`` (idempotent)."""
        # The method of its class again.
        vars(self._layer.impl).pop("forward", None)

    def set_scale(self, kind: str, scale: float) -> None:
        """Change a scale in the memory that the kernels read."""
        getattr(self._layer, f"_{kind}_scale").fill_(scale)
        setattr(self._layer, f"_{kind}_scale_float", scale)
        on_host = getattr(self._layer, f"_{kind}_scale_cpu", None)
        if on_host is not None:
            on_host.fill_(scale)


# --- positions ---


def read_positions(model: Any, positions: Sequence[int]) -> ServedPositions:
    """Return the rotary tables of a model's layers, and the scales of its attention by position.

    Those of a vision tower are left out. No public call returns either (0.26.0 and 0.32.0).
    Upstream: no thread known.
    """
    # Models with a tower have this method, which is public.
    language = model.get_language_model() if hasattr(model, "get_language_model") else model
    tables: list[ServedTable] = []
    scales: dict[str, Tensor] = {}
    for name, module in language.named_modules():
        cache = _read_cache(module)
        if cache is not None:
            known = [position for position in positions if position < len(cache)]
            rows = cache[torch.tensor(known, device=cache.device)]
            tables.append(
                ServedTable(
                    name=name,
                    kind=type(module).__name__,
                    length=len(cache),
                    epsilon=torch.finfo(cache.dtype).eps,
                    rows=rows.float().cpu(),
                )
            )
        tables += _read_frequencies(name, module, positions)
        scale = _read_scale(module, torch.tensor(positions))
        if scale is not None:
            scales[name] = scale.reshape(-1).cpu()
    return ServedPositions(tables=tables, scales=scales)


def _read_cache(module: Any) -> Tensor | None:
    """Return the cosines and sines by position of a module, or None if it has no such table."""
    if isinstance(module, rotary_embedding.Phi3LongRoPEScaledRotaryEmbedding):
        # Both tables, one behind the other: the model's length decides which of them is read.
        short = module.original_max_position_embeddings
        cache = module.long_short_cos_sin_cache
        return cache[short:] if module.use_long_rope else cache[:short]
    if not isinstance(module, rotary_embedding.base.RotaryEmbeddingBase):
        return None
    cache = module.cos_sin_cache
    # Some have other numbers in it: products with weights, or complex ones.
    is_plain = cache.dim() == 2 and cache.shape[1] == module.rotary_dim and not cache.is_complex()
    return cache if is_plain and module.rotary_dim % 2 == 0 else None


def _read_frequencies(name: str, module: Any, positions: Sequence[int]) -> Iterator[ServedTable]:
    """Yield the tables of a module of transformers', which computes them in each pass.

    vLLM's own modules with such buffers are parts of towers.
    """
    if type(module).__module__.partition(".")[0] == "vllm":
        return
    for leaf in find_frequencies(module):
        layer_type = leaf.removesuffix(FREQUENCIES).rstrip("_")
        length = _find_length(module, layer_type, positions[-1] + 1)
        known = [position for position in positions if position < length]
        yield ServedTable(
            name=f"{name}.{leaf}",
            kind=type(module).__name__,
            length=length,
            epsilon=torch.finfo(getattr(module, leaf).dtype).eps,
            rows=read_table(module, leaf).rows(known).float(),
        )


def _find_length(module: Any, layer_type: str, length: int) -> int:
    """Return the number of first positions, at most the length, that a module computes alike.

    Beyond them transformers changes the frequencies of all sequences of a pass by its longest one.
    """
    kind = getattr(module, "rope_type", "default")
    if isinstance(kind, Mapping):
        kind = kind[layer_type]
    if kind == "dynamic":
        return min(length, int(module.original_max_seq_len))
    if kind == "longrope":
        rope = module.config.rope_parameters
        own = rope[layer_type] if layer_type else rope
        return min(length, int(own["original_max_position_embeddings"]))
    return length


def _read_scale(module: Any, positions: Tensor) -> Tensor | None:
    """Return the factors of a module's queries by position, or None if it knows no such factor."""
    if isinstance(module, MistralAttention):
        # Mistral's own format has the keys elsewhere than transformers'.
        if not module.do_llama_4_scaling:
            return torch.ones(len(positions))
        return module._get_llama_4_attn_scale(positions)  # noqa: SLF001
    if isinstance(module, Llama4Attention) and module.nope:
        # vLLM itself decides by the model's length whether these layers have the factor.
        if not module.attn_temperature_tuning:
            return torch.ones(len(positions))
        return module._get_attn_scale(positions)  # noqa: SLF001
    return None


def takes_factor_of_yarn() -> bool:
    """Return whether this vLLM multiplies a factor of the parameters with YaRN's own.

    Until 0.26 the key is ``attn_factor``, and ``mscale``, ``mscale_all_dim`` and
    ``attention_factor`` are not read. Later versions read those and not this one. Upstream: no
    thread known.
    """
    made = inspect.signature(rotary_embedding.YaRNScalingRotaryEmbedding)
    return "attn_factor" in made.parameters


# --- adapters --- `add_lora`, `remove_lora` and `list_loras` are public and report numbers; no call
# reports an adapter's content.


def base_layer_names(model: Any) -> frozenset[str]:
    """Return the layers whose weights ``load_weights`` expects as ``<layer>.base_layer.<weight>``.

    They are given by checkpoint names. vLLM puts a wrapper with that child around each layer that
    may carry an adapter. Before 0.32 its loaders do not look through it (0.26.0,
    ``AutoWeightsLoader._load_module``); since then the wrapper does, and takes no other name.
    Upstream: no thread of vLLM's known; verl-project/verl#7327 does the same.
    """
    if hasattr(BaseLayerWithLoRA, "load_weights"):
        return frozenset()
    packed = getattr(model, "packed_modules_mapping", {})
    wrapped = [
        name.rpartition(".")
        for name, module in model.named_modules()
        if isinstance(module, BaseLayerWithLoRA)
    ]
    return frozenset(
        f"{parent}{dot}{part}" for parent, dot, leaf in wrapped for part in packed.get(leaf, [leaf])
    )


def adapter_tensors(model: Any, number: int) -> dict[str, Tensor]:
    """Return the adapter that the worker keeps, whole and on the CPU, by PEFT's names.

    ``alpha / rank`` is multiplied into B. Without an adapter it is empty.

    Upstream: no thread known (0.26.0 and 0.32.0).
    """
    adapter = model.lora_manager.get_adapter(number)
    found: dict[str, Tensor] = {}
    for layer, weights in adapter.loras.items() if adapter is not None else ():
        parts = model.lora_manager.packed_modules.get(layer, [layer])
        for part, a, b in zip(parts, _listed(weights.lora_a), _listed(weights.lora_b), strict=True):
            found |= {} if a is None else {f"{PREFIX}{part}.lora_A.weight": a}
            found |= {} if b is None else {f"{PREFIX}{part}.lora_B.weight": b}
    return found


def stale_slots(model: Any, number: int) -> list[str]:
    """Return the layers whose kernel slot differs from the worker's part of the adapter.

    Outside that part a slot must hold zeros.

    Upstream: no thread known (0.26.0 and 0.32.0).
    """
    manager = model.lora_manager
    adapter = manager.get_adapter(number)
    if adapter is None or number not in manager.lora_index_to_id:
        return [*manager.modules]
    slot = manager.lora_index_to_id.index(number)
    return [
        name
        for name, layer in manager.modules.items()
        if not _slot_holds(layer, slot, adapter.loras.get(name))
    ]


def _slot_holds(layer: Any, slot: int, weights: Any) -> bool:
    stacks = [*layer.lora_a_stacked, *layer.lora_b_stacked]
    if weights is None:
        return not any(bool(stack[slot].any()) for stack in stacks)
    a = weights.lora_a
    b = weights.lora_b
    if layer.tp_size > 1:
        a = layer.slice_lora_a(a)
        b = layer.slice_lora_b(b)
    for stack, part in zip(stacks, [*_listed(a), *_listed(b)], strict=True):
        want = torch.zeros_like(stack[slot, 0])
        if part is not None:
            want[: part.shape[0], : part.shape[1]] = part
        if not torch.equal(stack[slot, 0], want):
            return False
    return True


def _listed(tensors: Any) -> list[Tensor | None]:
    """Return the tensors of a layer, which may stand for several of the checkpoint's layers."""
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


@contextmanager
def own_threads() -> Iterator[None]:
    """Restore ``torch.set_num_threads``, which vLLM's CPU worker replaces in the trainer's process.

    Upstream: no thread known (0.32.0).
    """
    kept = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = kept


# --- speculative decoding ---


def repair_kernel_scan() -> None:
    """Let the CPU build start where numba is loaded, which ``ngram`` looks up tokens with.

    Each start looks for Triton kernels in the attributes of all modules' values, and fails at
    llvmlite's library, whose ``__dict__`` is a foreign function: no engine would start in a process
    after the first one with ``ngram`` (0.32.0, ``dispatcher._rebind_kernels``). Upstream: no thread
    known.
    """
    if current_platform.is_cpu():
        dispatcher: Any = importlib.import_module("vllm.triton_utils.dispatcher")
        dispatcher.vars = _attributes


def _attributes(value: Any) -> Mapping[str, Any]:
    found: Any = vars(value)
    return found if isinstance(found, Mapping) else {}


def repair_expansion() -> None:
    """Replace the CPU build's expansion of temperatures to the proposed tokens of each sequence.

    Its kernel writes into a converted copy, and the sampler divides logits by memory that no one
    has written: tokens then follow no distribution, and log-probs are wrong or NaN (0.32.0,
    ``cpu_triton_utils._expand_kernel_impl``). Greedy draws do not come here. Upstream: no thread
    known.
    """
    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens


def _expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)


# --- pauses ---


def pause(engine: Any) -> Iterator[Any]:
    """Pause the scheduling of an engine, and yield outputs of the steps that were under way.

    Since 0.26 a step is launched before the one before it has been read, also in this process, so
    that tokens of the weights from before the pause arrive after it. ``pause_generation`` of
    vLLM's ``AsyncLLM`` does the same, and ``LLMEngine`` has no such call (0.26.0 and 0.32.0).
    Upstream: vllm-project/vllm#28037 and #32103 brought the pauses; no thread on ``LLMEngine``
    known.
    """
    client = engine.engine_core
    outputs = getattr(client, "outputs_queue", None)
    if outputs is None:
        core = client.engine_core
        core.pause_scheduler("keep", clear_cache=False)
        while core.scheduler.has_requests() or core.batch_queue:
            yield from engine.step()
        return
    # It returns once the engine's process is idle. Outputs come on the connection of its reply, so
    # that they are here.
    client.call_utility("pause_scheduler", "keep", False)
    while not outputs.empty():
        yield from engine.step()


def hold_outputs(engine: Any) -> HeldOutputs:
    """Let an engine process the tokens of completions that are read at their end all at once.

    ``LLMEngine.step`` processes the outputs of each step, whether or not any is reported (0.26.0
    and 0.32.0). Upstream: no thread known.
    """
    processor = engine.output_processor
    held = HeldOutputs(processor.process_outputs, processor.request_states)
    processor.process_outputs = held.process
    return held


def resume(engine: Any) -> None:
    """Continue the scheduling of an engine after ``pause``.

    ``LLMEngine`` has no such call (0.26.0 and 0.32.0). Upstream: vllm-project/vllm#28037, see
    ``pause``.
    """
    client = engine.engine_core
    if getattr(client, "outputs_queue", None) is None:
        client.engine_core.resume_scheduler()
    else:
        client.call_utility("resume_scheduler")


# --- linear attention ---


def find_prefill_kernel(config: Any, asked: str) -> str | None:
    """Return the kernel that vLLM chooses for a prompt's linear attention, by its name in options.

    vLLM chooses when it makes the layers, and says so in its log alone. None: another version of
    vLLM chooses in another way. Upstream: no thread known (0.26.0 and 0.32.0).

    Args:
        config: vLLM's configuration of the model.
        asked: the kernel that is asked for, or ``auto``.
    """
    try:
        layers: Any = importlib.import_module(
            "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
        )
    except ModuleNotFoundError:
        return None
    choose = getattr(layers, "_resolve_gdn_prefill_backend", None)
    if choose is None:
        return None
    keys = {"gdn_prefill_backend": asked}
    # Another version may take other arguments, read more of them, or return another form.
    try:
        _, kernel = choose(SimpleNamespace(model_config=config, additional_config=keys))
    except (AttributeError, TypeError, ValueError):
        return None
    return str(kernel)


def find_generation(device: torch.device) -> int | None:
    """Return the major number of a GPU's compute capability, or None if vLLM does not know it.

    PyTorch's call would start CUDA in the parent process of workers, and vLLM's platform asks the
    driver instead. Upstream: no thread known (0.26.0 and 0.32.0).
    """
    capability = current_platform.get_device_capability(device.index or 0)
    return None if capability is None else capability.major
