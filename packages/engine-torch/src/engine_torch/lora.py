"""Low-rank adapters through peft (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine_api.config import LoraConfig
from engine_api.errors import ConfigError
from engine_torch.weights import ShardedParam

# Families whose kernels take the weight of a layer without its adapter, which peft refuses by them.
_FUSED = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})


def inject(lm: Any, lora: LoraConfig, *, outside: Collection[nn.Module] = ()) -> None:
    """Insert adapters into ``lm`` in place, and freeze all but them and a value head.

    Modules of ``outside``, such as a vision tower, get none.

    Raises:
        ConfigError: peft is not installed, or the target modules do not fit the model.
    """
    try:
        from peft import LoraConfig as PeftLoraConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            "lora", "peft is not installed", remedy="pip install 'engine-torch[lora]'"
        ) from error
    targets = lora.target_modules
    root = lm
    if not isinstance(targets, str):
        targets = list(targets)
    elif targets.lower() == "all-linear":
        # peft knows the head of transformers' models alone.
        outside = {*outside, lm.get_output_embeddings()}
        root = lm if lm.config.model_type in _FUSED else _hide_config(lm)
    # peft annotates lora_alpha as an integer and computes with it as a number.
    alpha: Any = lora.alpha
    config = PeftLoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=_match_inside(lm, outside),
    )
    try:
        inject_adapter_in_model(config, root)
    except ValueError as error:
        raise ConfigError(
            "lora.target_modules",
            f"{targets!r} matches no layer of the model",
            why=str(error),
            remedy="name linear layers of the model, or all-linear",
        ) from error
    for name, child in root.named_children():
        lm.register_module(name, child)
    _refuse_unseen(lm)
    freeze_base(lm)


def freeze_base(lm: nn.Module) -> None:
    """Freeze all parameters but those of adapters and of a value head.

    A library's division of its model makes new parameters, which train again.
    """
    for name, param in lm.named_parameters():
        param.requires_grad_(".lora_" in name or name.startswith("score."))


def _hide_config(lm: nn.Module) -> nn.Module:
    """Return a module of a model's children, without its configuration.

    From it peft knows families whose experts once were linear layers. Of these ``all-linear`` would
    mean the matrices of experts too, which are no linear layers now.
    """
    root = nn.Module()
    for name, child in lm.named_children():
        root.register_module(name, child)
    return root


def _match_inside(lm: nn.Module, outside: Collection[nn.Module]) -> str | None:
    """Return a regular expression of the names of modules and all in them, or None for none."""
    names = [re.escape(name) for name, module in lm.named_modules() if module in outside]
    return rf"({'|'.join(names)})(\..*)?" if names else None


def _refuse_unseen(lm: Any) -> None:
    """Raise ``ConfigError`` for adapters that the head or an export would lose.

    The head multiplies by the output weight itself, and exports merge linear layers only.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in lm.named_modules():
        if isinstance(module, BaseTunerLayer):
            head = module is lm.get_output_embeddings()
            if head or not isinstance(module.get_base_layer(), nn.Linear):
                raise ConfigError(
                    "lora.target_modules",
                    f"{name} cannot carry an adapter",
                    why="it is the output head" if head else "it is not a linear layer",
                    remedy="name linear layers inside the blocks, or all-linear. Of a mixture of "
                    "experts peft takes gate_proj, up_proj and down_proj for the matrices of these",
                )


def initialize(table: list[ShardedParam], seed: int) -> None:
    """Draw A from uniform(±1/sqrt(fan_in)), which is peft's default, and set B to zero.

    The values are the same in every layout.
    """
    for entry in (e for e in table if e.adapter):
        shape = tuple(entry.param.shape)
        local = entry.local.detach()
        if ".lora_B." in entry.name:
            local.zero_()
            continue
        generator = torch.Generator().manual_seed(seed + zlib.crc32(entry.name.encode()))
        whole = (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])
        local.copy_(whole[entry.box.slices])


@contextmanager
def disabled(lm: nn.Module) -> Iterator[None]:
    """Turn the adapters off inside the block, which makes the model its own reference."""
    layers = _layers(lm)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _layers(lm: nn.Module) -> list[Any]:
    """Return the layers that carry an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [m for m in lm.modules() if isinstance(m, BaseTunerLayer)]


def deltas(
    table: list[ShardedParam], lora: LoraConfig | None
) -> dict[str, tuple[ShardedParam, ShardedParam, float]]:
    """Return (A, B, alpha / rank) of each adapter, by the name of the base parameter under it."""
    if lora is None:
        return {}
    by_name = {entry.name: entry for entry in table}
    scale = lora.alpha / lora.rank
    found: dict[str, tuple[ShardedParam, ShardedParam, float]] = {}
    for name, a in by_name.items():
        if ".lora_A." in name:
            base = name.replace(".lora_A.default.", ".base_layer.")
            b = by_name[name.replace(".lora_A.", ".lora_B.")]
            found[base] = (a, b, scale)
    return found


def merged_rows(rows: Tensor, a: Tensor, b_rows: Tensor, scale: float) -> Tensor:
    """Return some rows of ``W + scale · B A``, computed in float32 from the same rows of W and B.

    Shapes are ``rows`` ``[n, in]``, ``a`` ``[rank, in]`` and ``b_rows`` ``[n, rank]``, where the
    inputs may be some of the weight's.
    """
    delta = scale * (b_rows.float() @ a.float())
    return (rows.float() + delta).to(rows.dtype)
