"""Functions on linear attention that the tests of vLLM call in ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from tiny_rollouts import GREEDY, PROMPTS, compare_vllm, start_vllm
from vllm_peers import DEVICE, error_of, hide_kernels

from engine_api.errors import EngineError
from rollout_fp8.options import VllmOptions
from rollout_fp8.vllm import linear_attention, private, start


def compare(folder: str) -> dict[str, Any]:
    """Return how vLLM in bf16 differs (see ``compare_vllm``)."""
    hide_kernels()
    return compare_vllm(folder, DEVICE, dtype="bfloat16")


def refused(folder: str, **arguments: Any) -> EngineError | None:
    """Return the error of making a rollout, by default in bf16."""
    return error_of(start_vllm, folder, device=DEVICE, **({"dtype": "bfloat16"} | arguments))


def generate(folder: str, **arguments: Any) -> EngineError | None:
    """Return the error of a rollout that is made in bf16, takes weights and generates."""

    def run() -> None:
        rollout = start_vllm(folder, device=DEVICE, dtype="bfloat16", **arguments)
        try:
            rollout.update_weights(iter(load_file(f"{folder}/model.safetensors").items()), 1)
            rollout.generate(PROMPTS, GREEDY)
        finally:
            rollout.close()

    return error_of(run)


def own_choice(asked: str) -> str | None:
    """Return the kernel that vLLM itself chooses here for a Qwen3-Next."""
    text = SimpleNamespace(linear_key_head_dim=128, linear_value_head_dim=128)
    config = SimpleNamespace(hf_text_config=text, dtype=torch.bfloat16)
    return private.find_prefill_kernel(config, asked)


def choice_of_another_version(error: Exception) -> str | None:
    """Return the kernel of a vLLM whose rule fails with our arguments."""
    config = SimpleNamespace(hf_text_config=None, dtype=torch.bfloat16)
    layers: Any = SimpleNamespace(_resolve_gdn_prefill_backend=mock.Mock(side_effect=error))
    with mock.patch.object(private.importlib, "import_module", return_value=layers):
        return private.find_prefill_kernel(config, "auto")


def check_on_hopper(
    asked: str, chosen: str | None, holds: dict[str, Any] | None, dtype: str = "bfloat16"
) -> EngineError | None:
    """Return the error for a Qwen3-Next on a Hopper GPU, by default in bf16.

    ``chosen`` is the kernel that vLLM would choose, and ``holds`` are the kernels of FlashInfer,
    which is None where it cannot be imported.
    """
    text = SimpleNamespace(model_type="qwen3_next")
    config = SimpleNamespace(hf_text_config=text, dtype=getattr(torch, dtype))
    flashinfer = None if holds is None else SimpleNamespace(**holds)
    modules: Any = {"flashinfer": flashinfer, "flashinfer.gdn_prefill": flashinfer}
    with (
        mock.patch.object(private, "find_prefill_kernel", return_value=chosen),
        mock.patch.object(
            private.current_platform,
            "get_device_capability",
            return_value=SimpleNamespace(major=9, minor=0),
        ),
        # It would start CUDA in the parent process of workers.
        mock.patch.object(torch.cuda, "get_device_capability", side_effect=AssertionError),
        mock.patch.dict("sys.modules", modules),
    ):
        return error_of(linear_attention.check, config, torch.device("cuda"), asked)


def refuse_wrong_model(architecture: str, device: str) -> EngineError | None:
    """Return the error for a model of a class."""
    return error_of(start.refuse_wrong_models, [architecture], torch.device(device))


def choose_eager(device: str, *, has_states: bool, asked: bool | None) -> bool | EngineError:
    """Return the choice for a model with states in its layers or without, or its error."""
    config = SimpleNamespace(is_hybrid=False, has_inner_state=has_states)
    options = VllmOptions(enforce_eager=asked)
    try:
        return start.choose_eager(config, torch.device(device), options)
    except EngineError as error:
        return error.with_traceback(None)


def arguments_of(asked: str) -> dict[str, Any]:
    """Return the arguments that vLLM is started with for the option."""
    return linear_attention.arguments(VllmOptions(gdn_prefill_backend=asked))
