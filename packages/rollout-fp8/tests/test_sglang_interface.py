"""Calls of SGLang compared with its source: it runs on a GPU only, but signatures can be read.

Skipped where there is no source. It need not be installed: ``pip download sglang==0.5.16
--no-deps``, unpack the wheel, and put its folder on PYTHONPATH.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import sglang_fakes
from transformers import Qwen3Config

from engine_api.config import ModelSource
from engine_api.rollout import SamplingParams
from rollout_fp8.sglang import environment, loader
from rollout_fp8.sglang.options import SglangOptions, engine_arguments
from rollout_fp8.sglang.requests import request_parameters
from rollout_fp8.transports import ipc

SPEC = importlib.util.find_spec("sglang")
pytestmark = pytest.mark.skipif(SPEC is None, reason="needs SGLang's source")
ENGINE = "entrypoints/engine.py"


def text(path: str) -> str:
    assert SPEC is not None and SPEC.submodule_search_locations
    return (Path(next(iter(SPEC.submodule_search_locations))) / "srt" / path).read_text()


@cache
def classes(path: str) -> dict[str, ast.ClassDef]:
    return {
        node.name: node for node in ast.parse(text(path)).body if isinstance(node, ast.ClassDef)
    }


def fields(path: str, name: str) -> set[str]:
    body = classes(path)[name].body
    return {
        n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }


def parameters(path: str, name: str, method: str) -> tuple[list[str], bool]:
    """Return the names of a method's parameters, and whether it is a coroutine."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    (found,) = [n for n in classes(path)[name].body if isinstance(n, kinds) and n.name == method]
    arguments = [*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs]
    return [a.arg for a in arguments], isinstance(found, ast.AsyncFunctionDef)


@pytest.mark.parametrize(
    "method",
    [
        "get_server_info",
        "async_generate",
        "update_weights_from_tensor",
        "flush_cache",
        "release_memory_occupation",
        "resume_memory_occupation",
        "shutdown",
    ],
)
def test_the_stand_in_takes_what_the_engine_takes(method):
    ours = getattr(sglang_fakes.Engine, method)
    names, is_coroutine = parameters(ENGINE, "Engine", method)
    assert set(inspect.signature(ours).parameters) <= set(names)
    assert inspect.iscoroutinefunction(ours) == is_coroutine


def test_the_engine_takes_every_argument_that_it_is_given(tmp_path):
    Qwen3Config().save_pretrained(tmp_path)
    options = SglangOptions(
        attention_backend="triton",
        sampling_backend="pytorch",
        kv_cache_dtype="fp8",
        kv_cache_for_batch=True,
    )
    given = engine_arguments(
        options,
        folder=Path("x"),
        source=ModelSource(path=str(tmp_path)),
        dtype="bfloat16",
        batch_size=4,
        gpu=0,
        context=64,
    )
    known = fields("server_args.py", "ServerArgs")
    assert set(given) <= known
    assert f'"{given["kv_cache_dtype"]}"' in text("server_args.py")
    assert {"page_size"} <= known  # with it get_server_info answers
    source, hints = text("server_args.py"), get_type_hints(SglangOptions)
    for name in ("attention_backend", "sampling_backend"):
        for choice in set(get_args(hints[name])) - {"auto"}:
            assert f'"{choice}"' in source


def test_requests_and_answers_have_the_names_that_are_used():
    (row,) = request_parameters([[1]], SamplingParams(), [2])
    assert set(row) <= fields("sampling/sampling_params.py", "SamplingParams")
    assert (
        "rid" in parameters("managers/tokenizer_manager.py", "TokenizerManager", "abort_request")[0]
    )
    assert "success" in fields("managers/io_struct.py", "FlushCacheReqOutput")
    scheduler, manager = text("managers/scheduler.py"), text("managers/tokenizer_manager.py")
    for name in ("max_req_input_len", "max_total_num_tokens"):
        assert f'"{name}": self.{name}' in scheduler
    for name in ("output_ids", "finish_reason", "output_token_logprobs"):
        assert f'"{name}"' in manager
    assert 'matched="NaN happened"' in text("managers/schedule_batch.py")


def test_experts_in_float32_are_rounded_to_float16():
    """Once they are not, ``private.keep_float32_of_experts`` can go."""
    kernels = text("layers/moe/moe_runner/triton_utils/fused_moe.py")
    chosen = "tl.bfloat16 if hidden_states.dtype == torch.bfloat16 else tl.float16"
    assert f"compute_type = {chosen}" in kernels
    launches = kernels.count("    invoke_fused_moe_kernel(\n")
    assert launches == kernels.count("compute_type=compute_type") == 2
    assert "class FusedMoE(" in text("layers/moe/fused_moe_triton/layer.py")


def test_the_loader_is_called_as_it_expects():
    updater = text("model_executor/model_runner_components/weight_updater.py")
    assert "custom_loader(self.get_model(), named_tensors)" in updater
    assert "load_format in self.custom_weight_loaders" in updater
    assert "_skip_weight_check = True" in text("layers/quantization/kv_cache.py")
    assert "model.post_load_weights()" in text("model_loader/loader.py")
    # The calls are those of torch.distributed's default group.
    assert "rank=rank" in text("distributed/parallel_state.py")
    assert list(inspect.signature(loader.load).parameters) == ["model", "named_tensors"]


def test_tags_and_variables_exist():
    constants, settings = text("constants.py"), text("environ.py")
    assert 'GPU_MEMORY_TYPE_WEIGHTS = "weights"' in constants
    assert 'GPU_MEMORY_TYPE_KV_CACHE = "kv_cache"' in constants
    assert environment.LONGER in settings


def test_tensors_are_shared_as_sglang_patches_it():
    assert f"_REDUCE_TENSOR_ARG_DEVICE_INDEX = {ipc.STORAGE_DEVICE}" in text("utils/patch_torch.py")


def test_hopper_keeps_block_scales_as_a_checkpoint_has_them():
    """Check that DeepGEMM packs powers of two on Blackwell only.

    On other GPUs the learning would find the weights rearranged.
    """
    wrapper = text("layers/deep_gemm_wrapper/configurer.py")
    assert "DEEPGEMM_SCALE_UE8M0 = DEEPGEMM_BLACKWELL" in wrapper
    assert "is_sm100_supported()" in wrapper
