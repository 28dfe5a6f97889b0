"""Tokens per second and MFU, the model FLOP utilization.

MFU is defined in Chowdhery et al. 2022 (arXiv:2204.02311, appendix B).

FLOP of one training step on documents of n_d tokens each, with a causal mask:

    6 · N · Σ n_d  +  6 · L · H · D · Σ n_d²

N is the number of parameters without the input embedding (a tied head counts once); there are L
layers and H heads of D channels. The second term is attention: 12·L·H·D·n²/2, causal; packed
documents do not see each other. Recomputation is not counted.
MFU = FLOP / (seconds · devices · peak FLOP/s of the dtype). It is not reported on a CPU, on a
device without an entry in ``PEAK``, for a mixture of experts, for a model with a vision tower, or
with ``engine.memory.share_prefixes``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_api.capabilities import Capability
from engine_api.config import EngineConfig
from engine_api.contract import Engine
from engine_api.hf_layers import has_experts
from engine_api.hf_vision import has_vision
from engine_trainer.scaling.shapes import Shape
from engine_trainer.utils.hf_models import hf_config, text_config

# Dense bf16 tensor-core peaks, FLOP/s, by a part of the device's name (vendor data sheets).
PEAK = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}
SHAPE_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The figures of a model and its devices that throughput is computed from."""

    parameters: int
    """Number of parameters N, as defined above."""

    attention: int
    """Product L·H·D of layers, heads and channels of a head."""

    peak: float | None
    """Peak FLOP/s of all devices together, or None if it is unknown."""

    def flop(self, lengths: Sequence[int]) -> float:
        """Return the FLOP of one training pass over documents of these lengths.

        A training pass is forward and backward.
        """
        return 6.0 * self.parameters * sum(lengths) + 6.0 * self.attention * sum(
            n * n for n in lengths
        )

    def metrics(self, lengths: Sequence[int], seconds: float) -> dict[str, float]:
        """Return ``perf/tokens_per_s`` over all ranks, and ``perf/mfu`` (0 to 1) if known."""
        if seconds <= 0 or not lengths:
            return {}
        figures = {"perf/tokens_per_s": sum(lengths) / seconds}
        return figures | (
            {"perf/mfu": self.flop(lengths) / seconds / self.peak} if self.peak else {}
        )

    def of_updates(
        self, lengths: Sequence[int], trained: float, seconds: float
    ) -> dict[str, float]:
        """Return ``perf/mfu`` (0 to 1) of RL's updates if known.

        The updates trained on ``trained`` tokens in ``seconds``, of documents of ``lengths``.
        Documents that no update computes, because they have no advantage, are not known one by
        one. They are assumed to be as long on average as the other documents.
        """
        if seconds <= 0 or not self.peak or not sum(lengths):
            return {}
        return {"perf/mfu": self.flop(lengths) * trained / sum(lengths) / seconds / self.peak}


def of_config(config: EngineConfig, device: str, ranks: int) -> Throughput | None:
    """Return the figures like ``measure``, from ``config.json`` alone.

    It is meant for a loop that holds no engine. Returns None where no MFU is reported.
    """
    # Tokens that documents share would count several times.
    if config.memory.share_prefixes:
        return None
    peak, model = _peak(device, config.precision.compute), text_config(config.model)
    # A tower computes patches, not tokens.
    if has_vision(hf_config(config.model)):
        return None
    if peak is None or has_experts(model) or not hasattr(model, "intermediate_size"):
        return None
    shape = Shape.from_config("", {name: getattr(model, name, None) for name in SHAPE_KEYS})
    return Throughput(parameters=shape.active, attention=_attention(model), peak=peak * ranks)


def measure(engine: Engine, config: EngineConfig, device: str) -> Throughput:
    """Return the figures of an initialized engine.

    They come from the shapes of its export and from the model's ``config.json``.
    """
    shapes = _shapes(engine)
    model = text_config(config.model)
    embedding = [n for n in shapes if n.endswith("embed_tokens.weight")]
    untied = any(n.endswith("lm_head.weight") for n in shapes)
    skipped = embedding if untied else []
    parameters = sum(math.prod(shape) for name, shape in shapes.items() if name not in skipped)
    # Tokens that documents share would count several times.
    counts = not has_experts(model) and not config.memory.share_prefixes
    # A tower computes patches, not tokens.
    counts = counts and not has_vision(hf_config(config.model))
    peak = _peak(device, config.precision.compute) if counts else None
    return Throughput(
        parameters=parameters,
        attention=_attention(model),
        peak=peak * engine.topology.world_size if peak else None,
    )


def _shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    if Capability.EXPORT_SHARDS in engine.capabilities:  # this needs no gather
        return {name: spec.global_shape for name, _, spec in engine.get_per_tensor_param_shard()}
    return {name: tuple(tensor.shape) for name, tensor in engine.get_per_tensor_param()}


def _attention(model: Any) -> int:
    heads = int(getattr(model, "num_attention_heads", 0))
    width = getattr(model, "head_dim", None) or int(model.hidden_size) // max(1, heads)
    return int(getattr(model, "num_hidden_layers", 0)) * heads * int(width)


def _peak(device: str, dtype: str) -> float | None:
    if device != "cuda" or dtype not in ("bfloat16", "float16"):
        return None
    import torch

    # A controller may have no GPU while its workers have some.
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK.items() if part in name), None)
