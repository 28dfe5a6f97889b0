"""Functions that the tests of positions call in ranks, some with a vLLM that passes over keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import tiny_rollouts
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.models import llama

from engine_api.config import ModelSource
from engine_api.errors import EngineError
from rollout_fp8.install.positions import Positions
from rollout_fp8.vllm import positions


class FormerYarn(rotary_embedding.YaRNScalingRotaryEmbedding):
    """YaRN as vLLM 0.26 has it: it reads ``attn_factor``, and no ``mscale``."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: Any,
        *,
        attn_factor: float = 1.0,
        **keys: Any,
    ) -> None:
        super().__init__(
            head_size,
            rotary_dim,
            max_position_embeddings,
            base,
            is_neox_style,
            scaling_factor,
            dtype,
            attention_factor=(0.1 * math.log(scaling_factor) + 1) * attn_factor,
            **keys,
        )


def _get_former_rope(
    head_size: int, max_position: int, *, rope_parameters: dict[str, Any], **arguments: Any
) -> Any:
    rope = rope_parameters
    keys = {key: rope[key] for key in ("attn_factor", "beta_fast", "beta_slow") if key in rope}
    return FormerYarn(
        head_size,
        head_size,
        rope["original_max_position_embeddings"],
        rope["rope_theta"],
        arguments.get("is_neox_style", True),
        rope["factor"],
        llama.torch.get_default_dtype(),
        **keys,
    )


@contextmanager
def former_yarn() -> Iterator[None]:
    """Compute YaRN in Llama's layers, and those derived from them, as vLLM 0.26 does."""
    with (
        mock.patch.object(rotary_embedding, "YaRNScalingRotaryEmbedding", FormerYarn),
        mock.patch.object(llama, "get_rope", _get_former_rope),
    ):
        yield


@contextmanager
def no_keys() -> Iterator[None]:
    """Give vLLM transformers' keys of positions alone."""
    with mock.patch.object(positions, "server_keys", return_value={}):
        yield


def refuse(folder: str, *, former: bool = False, **options: Any) -> EngineError | None:
    """Return the error of a server that gets transformers' keys alone."""
    try:
        with no_keys(), former_yarn() if former else nullcontext():
            tiny_rollouts.start_vllm(folder, **options).close()
    except EngineError as error:
        return error.with_traceback(None)
    return None


def compare_former(folder: str) -> dict[str, Any]:
    """Return how a vLLM with the YaRN of 0.26 differs from transformers."""
    with former_yarn():
        return tiny_rollouts.compare_vllm(folder)


def compare_workers(folder: str) -> list[int]:
    """Return the number of tables of each worker with which a rollout compares transformers'."""
    with mock.patch.object(positions, "differences", wraps=positions.differences) as compared:
        tiny_rollouts.start_vllm(folder, executor="workers").close()
    return [len(call.args[1].tables) for call in compared.call_args_list]


def require_of_another_version(error: Exception) -> EngineError | None:
    """Return the error of a vLLM whose attributes cannot be read."""
    model = Positions(text=None, nested=False, tables={}, scale=None)
    workers = mock.Mock()
    workers.read_positions.side_effect = error
    try:
        positions.require_served(model, workers, 64)
    except EngineError as found:
        return found.with_traceback(None)
    return None


def keys_of(folder: str, *, nested: bool) -> dict[str, Any]:
    """Return the keys that vLLM gets for a language model, which may be a part of another model."""
    model = Positions.read(ModelSource(path=folder))
    return positions.server_keys(replace(model, nested=nested))
