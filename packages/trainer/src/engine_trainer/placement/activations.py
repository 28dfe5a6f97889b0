"""The memory of a micro-batch: what a decoder's blocks keep for the backward pass, and its logits.

The count is of transformers' blocks in eager PyTorch. A compiled block computes some of these
tensors again, and keeps a share that was measured. Attention keeps no scores, as in FlashAttention
(arXiv:2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_api.config import EngineConfig
from engine_api.hf_layers import count_experts
from engine_trainer.scaling.shapes import Shape

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 2}
"""Bytes of a number by the dtype of the computation (float8 keeps bfloat16)."""

# Share of an eager block's bytes that a compiled one keeps. From 8,192 to 32,768 tokens the peaks
# of docs/benchmarks.md grow by 0.60 (0.6B) and 0.62 (1.7B) of the count below.
_COMPILED = 0.65

# Norms compute in float32.
_NORM_WIDTH = 4

_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """The sizes of a decoder that its memory depends on."""

    shape: Shape
    norms_heads: bool
    """True where queries and keys have norms of their own, as in Qwen3."""

    @staticmethod
    def of(text: Any) -> Decoder | None:
        """Return the sizes in a model's text configuration, or None where it has others."""
        values: dict[str, Any] = {}
        for key in {*Shape.__dataclass_fields__, *text.to_dict()}:
            values[key] = getattr(text, key, None)
        if _list_unknown(text):
            return None
        values["num_experts"] = count_experts(text) or None
        # Families differ in their norms; those of heads are counted where they are not known.
        norms = str(getattr(text, "model_type", "")) not in ("llama", "mistral", "qwen2")
        return Decoder(shape=Shape.from_config("", values), norms_heads=norms)

    @staticmethod
    def why_unknown(text: Any) -> str:
        """Return why ``of`` returns None for a model's text configuration."""
        return f"the configuration of a {text.model_type} has no {', '.join(_list_unknown(text))}"

    def kept_by_block(self, width: int) -> float:
        """Return the bytes that one block keeps of one token.

        Args:
            width: bytes of a number of the computation.
        """
        shape = self.shape
        queries = shape.heads * shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        # Each of two norms keeps its input in float32, its normed values, and its output.
        kept = 2.0 * shape.hidden * (_NORM_WIDTH + 2 * width)
        if self.norms_heads:
            kept += (queries + keys) * (_NORM_WIDTH + width)
        # Queries, keys, values, the result, and the result in the order of the output projection;
        # the log-sum-exp of each head.
        kept += width * (3 * queries + 2 * keys) + 4 * shape.heads
        # Gate, its activation, up, and their product.
        mlp = 4.0 * width * shape.inner
        if not shape.experts:
            return kept + mlp
        # Each chosen expert has a copy of the input and a result, and the router is float32.
        each = mlp + 3.0 * width * shape.hidden
        return kept + shape.active_experts * each + 12.0 * shape.experts

    def micro_batch(self, config: EngineConfig, *, recompute: bool) -> float:
        """Return the bytes that a rank needs for a micro-batch of ``memory.max_tokens`` tokens.

        They are activations, logits, and the gradient of the output embedding.
        """
        sizes = config.parallelism
        width = WIDTH[config.precision.compute]
        shape = self.shape
        tokens = config.memory.max_tokens / (sizes.ulysses * sizes.cp)
        block = self.kept_by_block(width) / sizes.tp
        if config.memory.compile:
            block *= _COMPILED
        if recompute:
            # Each block's input, and one block at a time in the backward pass.
            kept = tokens * (shape.layers * width * shape.hidden + block)
        else:
            kept = tokens * shape.layers * block
        chunk = min(config.memory.logit_chunk, tokens)
        # Logits, their scores in float32, and the gradient of the output embedding in float32.
        head = shape.vocabulary * (chunk * (width + 4) + 4 * shape.hidden) / sizes.tp
        return kept + head

    def linear_results(self, config: EngineConfig) -> float:
        """Return the bytes of the results of all blocks' linear layers in a micro-batch of a rank.

        For a model with experts it counts one expert for each token.
        """
        sizes = config.parallelism
        shape = self.shape
        queries = shape.heads * shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        # Of queries, keys, values and the output projection; gate, up and down.
        columns = queries + 2 * keys + shape.hidden + 2 * shape.inner + shape.hidden
        tokens = config.memory.max_tokens / (sizes.ulysses * sizes.cp)
        return tokens * shape.layers * columns * WIDTH[config.precision.compute] / sizes.tp

    def gathered(self, config: EngineConfig) -> float:
        """Return the bytes of weights and gradients that a rank has beyond its part of the state.

        They are copies of the embeddings and of two blocks in the dtype of the computation, and,
        where gradients are reduced once a step, a gradient of all weights of the rank. Of experts
        that are spread over ranks they are those of the rank's own.
        """
        sizes = config.parallelism
        shape = self.shape
        experts = shape.layers * shape.experts * 3 * shape.hidden * shape.inner
        parameters = shape.parameters - experts * (1 - 1 / sizes.ep)
        embeddings = shape.embedding * (1 if shape.tied else 2)
        two_blocks = 2 * (parameters - embeddings) / shape.layers
        copies = (embeddings + two_blocks) * WIDTH[config.precision.compute]
        gradient = 0.0
        each = isinstance(config.options, dict) and config.options.get("reduce_each_micro_batch")
        if config.lora is None and not each:
            gradient = parameters * WIDTH[config.precision.reduce]
        return (copies + gradient) / (sizes.tp * sizes.pp)


def _list_unknown(text: Any) -> list[str]:
    """Return the keys of sizes that a model's text configuration lacks."""
    return [key for key in _KEYS if not isinstance(getattr(text, key, None), int)]
