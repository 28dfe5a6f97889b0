"""Uses of SGLang (0.5.16) that have no public call, with the reason and the upstream thread."""

from __future__ import annotations

import asyncio
import atexit
import importlib
import sys
from functools import wraps
from typing import Any

import torch
from torch import nn


def loop_of(engine: Any) -> asyncio.AbstractEventLoop:
    """Return the loop of ``Engine``, which runs only inside the engine's own blocking calls.

    Nothing is answered in the background unless another thread runs that very loop: on a second
    loop its requests hang. Upstream: sgl-project/sglang#5162, of engines that hang on a second
    loop.
    """
    return engine.loop


def abort(engine: Any, rid: str) -> None:
    """End one request.

    Unknown ids are ignored. To be called on the engine's loop.

    ``Engine`` has no call for it; SGLang's own HTTP server uses this one. Upstream:
    sgl-project/sglang#5963 asked for it; it is closed, and ``Engine`` has none as of 0.5.16.
    """
    engine.tokenizer_manager.abort_request(rid=rid)


def shut_down(engine: Any) -> None:
    """End the engine's processes, and with them *all* children of this process.

    ``Engine.shutdown`` calls ``kill_process_tree``. The constructor registers it to be called once
    more when the process ends, which would end the children that were started since. Upstream: no
    thread known (0.5.16).
    """
    engine.shutdown()
    atexit.unregister(engine.shutdown)


def renew_derived(model: Any) -> None:
    """Compute again the values that models derive from weights, such as DeepSeek's w_kc and w_vc.

    SGLang's loader calls it wherever it does not go through ``load_weights``, as syncs after the
    first do not.
    Upstream: no thread known (0.5.16, ``model_loader/loader.py``).
    """
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def keep_float32_of_experts(model: nn.Module) -> None:
    """Let SGLang's kernel of experts write float32 where its input is float32.

    SGLang 0.5.16 has it write float16 for every dtype but bfloat16 (``compute_type`` in
    ``fused_moe.py``), which moved log-probs of a float32 model by 0.004 nats. CUDA graphs that were
    captured before hold the old kernel. Models without experts are left alone. Upstream: no thread
    known; vllm-project/vllm#11921 corrected such a line in vLLM.
    """
    path = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    # Some families call its functions from modules of their own, and have imported them.
    if path not in sys.modules and "FusedMoE" not in kinds:
        return
    import triton.language as tl

    fused_moe: Any = importlib.import_module(path)
    launch = fused_moe.invoke_fused_moe_kernel
    if hasattr(launch, "__wrapped__"):
        return

    @wraps(launch)
    def invoke(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if inputs.dtype == torch.float32:
            kwargs["compute_type"] = tl.float32
        launch(inputs, *args, **kwargs)

    fused_moe.invoke_fused_moe_kernel = invoke


def is_constant(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a scale of the key-value cache, which a checkpoint may lack.

    They are in SGLang's ``layers/quantization/kv_cache.py``.

    SGLang marks them so for its own check of loaded weights; the mark has no public name.
    Upstream: sgl-project/sglang#31621, on what that check does with them.
    """
    return bool(getattr(parameter, "_skip_weight_check", False))


def reset_cache_scales(model: nn.Module) -> None:
    """Set all scales of the key-value cache to 1, so that none belongs to certain weights.

    e4m3 keeps three bits of numbers between 2⁻⁶ and 448, whatever the weights are, and SGLang
    computes no scales itself. It has them as parameters where weights are quantized, and starts
    with random ones because it loads no checkpoint (0.5.16, ``initialize_dummy_weights``). The
    scales are changed in their memory, which CUDA graphs read. Upstream: no thread known.
    """
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if name in ("k_scale", "v_scale") and is_constant(parameter):
                parameter.data.fill_(1.0)
                setattr(layer, f"{name}_float", 1.0)
