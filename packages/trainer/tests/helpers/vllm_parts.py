"""What the tests of vLLM call in Ray's workers."""

from __future__ import annotations


def executor_of(model: str) -> str:
    """How vLLM would run a replica of two workers of its own."""
    import torch

    from engine_api.config import ModelSource
    from rollout_fp8.options import VllmOptions
    from rollout_fp8.vllm import environment

    environment.prepare()
    import vllm

    from rollout_fp8.vllm import start

    plan = start.Plan(
        device=torch.device("cpu"),
        model=ModelSource(path=model),
        dtype="float32",
        max_num_seqs=8,
        tied=False,
        options=VllmOptions(executor="workers", tensor_parallel_size=2),
    )
    config = vllm.EngineArgs(**start._arguments(plan)).create_engine_config()
    return str(config.parallel_config.distributed_executor_backend)
