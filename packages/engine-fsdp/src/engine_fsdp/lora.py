"""Low-rank adapters through peft (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine_api.config import LoraConfig
from engine_api.errors import ConfigError
from engine_fsdp.weights import ShardedParam


def inject(lm: nn.Module, lora: LoraConfig) -> None:
    """Put adapters into ``lm`` in place; only they (and a value head) stay trainable."""
    try:
        from peft import LoraConfig as PeftLoraConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            "lora", "peft is not installed", remedy="pip install engine-fsdp[lora]"
        ) from error
    targets = (
        lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    )
    # peft annotates lora_alpha as an integer and computes with it as a number.
    config = PeftLoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets
    )  # pyright: ignore[reportArgumentType]
    try:
        inject_adapter_in_model(config, lm)
    except ValueError as error:
        raise ConfigError(
            "lora.target_modules",
            f"{targets!r} fits nothing",
            why=str(error),
            remedy="name linear layers of the model, or all-linear",
        ) from error
    _refuse_unseen(lm)
    for name, param in lm.named_parameters():
        param.requires_grad_(".lora_" in name or name.startswith("score."))


def _refuse_unseen(lm: Any) -> None:
    """The head multiplies by the output weight itself, and exports merge linear layers: other adapters would be lost."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in lm.named_modules():
        if isinstance(module, BaseTunerLayer):
            head = module is lm.get_output_embeddings()
            if head or not isinstance(module.get_base_layer(), nn.Linear):
                raise ConfigError(
                    "lora.target_modules",
                    f"{name} cannot carry an adapter",
                    why="it is the output head" if head else "it is not a linear layer",
                    remedy="name linear layers inside the blocks, or all-linear",
                )


def initialize(table: list[ShardedParam], seed: int) -> None:
    """A from uniform(±1/sqrt(fan_in)) (peft's default), B zero; the same for every layout."""
    for entry in (e for e in table if e.adapter):
        shape = tuple(entry.param.shape)
        local = entry.local.detach()
        if ".lora_B." in entry.name:
            local.zero_()
            continue
        generator = torch.Generator().manual_seed(seed + zlib.crc32(entry.name.encode()))
        whole = (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])
        local.copy_(whole[entry.first : entry.first + local.shape[0]])


@contextmanager
def disabled(lm: nn.Module) -> Iterator[None]:
    """The adapters off, for a reference model."""
    layers = _layers(lm)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _layers(lm: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [m for m in lm.modules() if isinstance(m, BaseTunerLayer)]


def deltas(
    table: list[ShardedParam], lora: LoraConfig | None
) -> dict[str, tuple[ShardedParam, ShardedParam, float]]:
    """Base parameter name → (A, B, alpha / rank) of the adapter on it."""
    if lora is None:
        return {}
    by_name = {entry.name: entry for entry in table}
    return {
        name.replace(".lora_A.default.", ".base_layer."): (
            entry,
            by_name[name.replace(".lora_A.", ".lora_B.")],
            lora.alpha / lora.rank,
        )
        for name, entry in by_name.items()
        if ".lora_A." in name
    }


def merged_rows(rows: Tensor, a: Tensor, b_rows: Tensor, scale: float) -> Tensor:
    """``W + scale · B A`` for some rows of W and the same rows of B, computed in float32."""
    delta = scale * (b_rows.float() @ a.float())
    return (rows.float() + delta).to(rows.dtype)
