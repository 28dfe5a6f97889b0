"""The cost of a model in parameters, FLOP per token, and bytes of keys and values per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder with grouped-query attention and a gated MLP, dense or with experts.

    The fields are those of a ``config.json``.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Inner width of the MLP, or of one expert."""

    vocabulary: int
    tied: bool
    experts: int = 0
    active_experts: int = 0

    @staticmethod
    def from_config(name: str, config: Mapping[str, Any]) -> Shape:
        """Build the shape from the content of a ``config.json``."""
        heads, experts = (
            int(config["num_attention_heads"]),
            int(config.get("num_experts") or config.get("num_local_experts") or 0),
        )
        return Shape(
            name=name,
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            inner=int(
                (config.get("moe_intermediate_size") if experts else None)
                or config["intermediate_size"]
            ),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=experts,
            active_experts=int(config.get("num_experts_per_tok") or 0),
        )

    @property
    def parameters(self) -> int:
        """Number of all weights, without those of norms."""
        return self._parameters(max(1, self.experts)) + self.embedding * (1 if self.tied else 2)

    @property
    def active(self) -> int:
        """Number of weights that a token is multiplied with.

        The head counts, the input embedding does not.
        """
        return self._parameters(self.active_experts or 1) + self.embedding

    @property
    def embedding(self) -> int:
        """Number of weights of the embedding, which is also that of the head."""
        return self.vocabulary * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def forward_flop(self, context: float) -> float:
        """Return the FLOP of one token's forward pass with ``context`` tokens before it."""
        return 2.0 * self.active + 4.0 * self.layers * self.heads * self.head_dim * context

    def train_flop(self, length: float) -> float:
        """Return the FLOP of one token's forward and backward in a document of ``length`` tokens.

        It is ``6 N + 6 L H D S``, as in ``engine_trainer.telemetry.throughput``.
        """
        return 3.0 * self.forward_flop(length / 2)

    def _parameters(self, experts: int) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        router = self.hidden * self.experts
        return self.layers * (attention + router + experts * 3 * self.hidden * self.inner)


def _qwen3(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    inner: int,
    *,
    kv_heads: int = 8,
    tied: bool = False,
    experts: int = 0,
) -> Shape:
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        inner=inner,
        tied=tied,
        vocabulary=151936,
        experts=experts,
        active_experts=8 if experts else 0,
    )


SHAPES = {
    shape.name: shape
    for shape in (
        _qwen3("qwen3-0.6b", 28, 1024, 16, 3072, tied=True),
        _qwen3("qwen3-1.7b", 28, 2048, 16, 6144, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 32, 12288),
        _qwen3("qwen3-32b", 64, 5120, 64, 25600),
        _qwen3("qwen3-30b-a3b", 48, 2048, 32, 768, kv_heads=4, experts=128),
    )
}
