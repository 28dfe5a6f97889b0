"""Servers that vLLM starts by itself, with which the tests compare a synced one."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from vllm_peers import DEVICE, PROMPTS

# With other tests on a GPU, the memory that vLLM takes by default is not free.
SHARED = {"gpu_memory_utilization": 0.1} if DEVICE == "cuda" else {}


def fresh_tokens(models: Sequence[tuple[str, str]]) -> list[list[list[int]]]:
    """Return greedy tokens of servers that read (folder, dtype) themselves.

    vLLM ends this rank's group: use a separate pool.
    """
    return [_fresh(*model) for model in models]


def _fresh(model: str, dtype: str) -> list[list[int]]:
    from rollout_fp8.kernels.float32 import exact_float32
    from rollout_fp8.vllm import environment

    environment.prepare()
    exact_float32(DEVICE, dtype)  # as the rollout that it is compared with
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
        )
    with environment.in_process(0, 0):
        import vllm

        server = vllm.LLM(
            model,
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            generation_config="vllm",
            kv_cache_memory_bytes=1 << 28,
            distributed_executor_backend="external_launcher",
            **SHARED,
        )
    params = vllm.SamplingParams(max_tokens=8, temperature=0.0, detokenize=False, ignore_eos=True)
    outputs = server.generate(
        [{"prompt_token_ids": list(p)} for p in PROMPTS], params, use_tqdm=False
    )
    server.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]
