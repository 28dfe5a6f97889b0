"""Defects of per-token outputs: masks, positions, norms, heads, alignment and order."""
# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from engine_api.batch import Batch
from engine_api.prepare import MicroBatches
from engine_api.results import TokenOutputs
from engine_loopback.engine import LoopbackEngine
from engine_loopback.layers import PackedInputs, Params
from engine_loopback.model import Model
from engine_mutants.mutant import mutant

# --- masks --------------------------------------------------------------------------------------


@mutant("forward.causal", group="core", part="model")
class NoCausalMask(Model):
    """A token attends to its whole document, including later tokens."""

    def document_mask(self, documents: Tensor, own: Tensor) -> Tensor:
        return documents[own][:, None] == documents


@mutant("forward.causal", group="core", part="model")
class MaskOffByOne(Model):
    """A token attends to the next one too, which it is to predict."""

    def document_mask(self, documents: Tensor, own: Tensor) -> Tensor:
        causal = own[:, None] + 1 >= torch.arange(len(documents))
        return (documents[own][:, None] == documents) & causal


@mutant("forward.isolation", group="core", part="model", seen_in="transformers #46634")
class NoDocumentMask(Model):
    """Documents attend to earlier ones in the pack; positions restart, so the loss still falls."""

    def document_mask(self, documents: Tensor, own: Tensor) -> Tensor:
        return own[:, None] >= torch.arange(len(documents))


@mutant("forward.loss_weight", group="core", part="model")
class MaskedTokensUnseen(Model):
    """Tokens without loss, as a prompt's, are treated as padding that no token attends to."""

    def pack_inputs(self, batch: Batch) -> PackedInputs:
        packed = super().pack_inputs(batch)
        if "loss_weight" not in batch.fields:
            return packed
        padding = packed.mask.shape[1] - batch.num_tokens
        seen = pad(batch.loss_weight.cpu() > 0, (0, padding)).to(self.device)
        diagonal = torch.eye(*packed.mask.shape, dtype=torch.bool, device=self.device)
        return replace(packed, mask=packed.mask & (seen | packed.first | diagonal))


# --- positions ----------------------------------------------------------------------------------


@mutant("forward.llama", group="core", part="model")
class RopeInPairs(Model):
    """RoPE turns neighbours 2i and 2i + 1 instead of i and i + D/2, a different convention."""

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        apart = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return super().rope(apart, positions).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


@mutant("forward.llama", group="core", part="model")
class RopeBaseFixed(Model):
    """RoPE's base is always 10000, since its key is looked up where it used to be."""

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        shape = self.shape
        self.shape = replace(shape, theta=10000.0)
        try:
            return super().rope(x, positions)
        finally:
            self.shape = shape


@mutant("forward.llama", group="core", part="model")
class RopeScaled(Model):
    """Positions are divided by two, a scaling that config.json does not ask for."""

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().rope(x, positions / 2)


@mutant("forward.llama", group="core", part="model", seen_in="transformers #29285, gpt-neox #1003")
class PositionsInBfloat16(Model):
    """RoPE's positions are bfloat16, which holds no odd number above 256."""

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().rope(x, positions.bfloat16())


# --- attention and norms ------------------------------------------------------------------------


@mutant("forward.llama", group="core", part="model")
class ScoresOverWidth(Model):
    """Scores are divided by D, not by its square root."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return super().attend(q / math.sqrt(self.shape.head_dim), k, v, mask)


@mutant("forward.llama", group="core", part="model")
class KeyHeadsInterleaved(Model):
    """Query head h uses key-value head h modulo G: heads are repeated as a whole."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return super().attend(q, k.repeat(1, group, 1), v.repeat(1, group, 1), mask)


@mutant("forward.llama", group="core", part="model")
class SoftmaxInBfloat16(Model):
    """Attention's weights are rounded to bfloat16 in a float32 computation."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1)).float()
        weights = (scores / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf).softmax(-1)
        v = v.repeat_interleave(group, dim=1)
        return torch.einsum("hqk,khd->qhd", weights.bfloat16().to(v.dtype), v)


@mutant("forward.repeats", group="core", part="model")
class UnorderedSums(Model):
    """Keys are summed in a different order each time, as a kernel with atomic adds does."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
        order = torch.randperm(len(k), generator=generator).to(k.device)
        return super().attend(q, k[order], v[order], mask[:, order])


@mutant("forward.qwen3", group="core", part="model")
class HeadNormsAfterRope(Model):
    """Queries and keys are normalised after RoPE, with which norms' weights do not commute."""

    def attention(self, params: Params, x: Tensor, packed: PackedInputs) -> Tensor:
        x = self.collectives.copy_to_tensor(x)
        q, k, v = (self.heads(self.column(params, f"self_attn.{p}_proj", x)) for p in "qkv")
        q = self.rope(q, packed.positions)
        k = self.rope(k, packed.positions)
        if self.shape.qk_norm:
            q = self.norm(q, params["self_attn.q_norm.weight"])
            k = self.norm(k, params["self_attn.k_norm.weight"])
        k = self.collectives.gather_sequence(k)
        v = self.collectives.gather_sequence(v)
        return self.row(params, "self_attn.o_proj", self.attend(q, k, v, packed.mask).flatten(1))


@mutant("forward.qwen2", group="core", part="model")
class AttentionBiasDropped(Model):
    """The biases of queries, keys and values are not added."""

    def with_bias(self, params: Params, name: str, y: Tensor) -> Tensor:
        return y if name.startswith("self_attn.") else super().with_bias(params, name, y)


@mutant("forward.llama", group="core", part="model")
class NormEpsFixed(Model):
    """Norms use 1e-5, the Llama default, instead of config.json's value."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


@mutant("forward.llama", group="core", part="model")
class LastNormSkipped(Model):
    """The norm before the head only scales by its weight, as hidden states are near 1 already."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        last = self.weights["model.norm.weight"].held
        return x * weight if weight.data_ptr() == last.data_ptr() else super().norm(x, weight)


# --- head, alignment and order ------------------------------------------------------------------


@mutant("forward.llama", group="core", part="model")
class HeadAlwaysTied(Model):
    """The embedding is used as the head of a model that has its own."""

    def weight(self, name: str) -> Tensor:
        return super().weight("model.embed_tokens.weight" if name == "lm_head.weight" else name)


@mutant("memory.chunks", group="core", part="model")
class LastChunkDropped(Model):
    """The head's last, shorter chunk is not computed."""

    def chunked(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        whole = len(targets) - len(targets) % self.memory.logit_chunk or len(targets)
        outputs = super().chunked(hidden[:whole], targets[:whole], temperature)
        return pad(outputs, (0, 0, 0, len(targets) - whole))


@mutant("forward.microbatch_split", group="core", part="model")
class ChunkShiftsAlone(Model):
    """Labels are shifted within each chunk of the head, so that its last token's is wrong."""

    def chunked(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        size = self.memory.logit_chunk
        if len(targets) <= size:
            return super().chunked(hidden, targets, temperature)
        parts = [torch.cat((part[:-1], part[:1])) for part in targets.split(size)]
        return super().chunked(hidden, torch.cat(parts), temperature)


@mutant("forward.llama", group="core", part="model")
class OutputsOneEarly(Model):
    """The log-prob of a token is returned at the token before it."""

    def align(self, about_next: Tensor, packed: PackedInputs) -> Tensor:
        return super().align(about_next.roll(-1, 0), packed)


@mutant("forward.one_token_documents", group="core", part="model")
class FirstTokensCarry(Model):
    """First tokens have the log-prob after the document before, which no loss weight shows."""

    def align(self, about_next: Tensor, packed: PackedInputs) -> Tensor:
        return about_next.roll(1, 0)[: packed.size]


@mutant("forward.llama", group="core", part="model")
class LogitsInBfloat16(Model):
    """Logits are rounded to bfloat16 before the softmax in a float32 computation."""

    def scaled_logits(self, logits: Tensor, temperature: float) -> Tensor:
        return super().scaled_logits(logits.bfloat16(), temperature)


@mutant("forward.llama", group="core", part="model", dtype="bfloat16")
class LogProbsInBfloat16(Model):
    """Log-probs are computed in the model's bfloat16 and returned as float32."""

    def log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        log_p = ((hidden @ weight.T) / temperature).log_softmax(-1)
        chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
        return torch.stack((chosen, -(log_p.exp() * log_p).sum(-1)), dim=-1).float()


@mutant("forward.temperature", group="core", part="model")
class TemperatureAfterSoftmax(Model):
    """Log-probs instead of logits are divided by the temperature."""

    def log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        return super().log_probs(hidden, weight, targets, 1.0) / temperature


@mutant("forward.temperature", group="core", part="model")
class EntropyAtOne(Model):
    """Entropy is that of temperature 1."""

    def log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        chosen = super().log_probs(hidden, weight, targets, temperature)[:, 0]
        return torch.stack((chosen, super().log_probs(hidden, weight, targets, 1.0)[:, 1]), dim=-1)


@mutant("forward.microbatch_split", group="core")
class OutputsInMicroBatchOrder(LoopbackEngine):
    """Outputs are in the order of micro-batches, even if balancing has reordered documents."""

    def _prepare(self, batch: Batch, *, needs_weight: bool) -> MicroBatches:
        parts = super()._prepare(batch, needs_weight=needs_weight)
        order = [document for part in parts.documents for document in part]
        number = count()
        return replace(
            parts,
            batch=batch.select(order),
            documents=[[next(number) for _ in p] for p in parts.documents],
        )


@mutant("train.visible_at_once", group="core", part="model", seen_in="NeMo-RL #227")
class StaleWeights(Model):
    """Inference keeps using the copies of the weights from its first call."""

    def weight(self, name: str) -> Tensor:
        copies: dict[str, Tensor] = self.__dict__.setdefault("copies", {})
        if self.training:
            return super().weight(name)
        return copies.setdefault(name, super().weight(name).clone())


@mutant("forward.no_documents", group="dp", world=2, deadline=0.1)
class EmptyRankReturns(LoopbackEngine):
    """A rank without documents returns at once, and all others wait for it in a collective."""

    def infer_batch(
        self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: bool = True
    ) -> TokenOutputs:
        if not batch.num_tokens:
            nothing = torch.zeros(0, device=self.device)
            return TokenOutputs(log_probs=nothing, entropy=nothing if entropy else None)
        return super().infer_batch(batch, temperature=temperature, entropy=entropy, adapter=adapter)


# --- different paths for training and inference --------------------------------------------------


@mutant("rl.ratio_is_one", group="rl", part="model")
class TrainingDropsOut(Model):
    """Dropout of 1e-4 is on in training, so that the ratio to inference is not one."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return dropout(super().attend(q, k, v, mask), 1e-4, self.training)


@mutant("rl.ratio_is_one", group="rl", part="model", seen_in="verl #2996, NeMo-RL #4243")
class TrainingHeadFused(Model):
    """Training uses a different formula for the same log-probs, which rounds differently."""

    def log_probs(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        both = super().log_probs(hidden, weight, targets, temperature)
        if not self.training:
            return both
        logits = self.scaled_logits(hidden @ weight.T, temperature)
        chosen = logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)
        return torch.stack((chosen, both[:, 1]), dim=-1)


@mutant("rl.old_and_new_by_one_path", group="rl", part="model")
class OtherKernelAfterTraining(Model):
    """Inference after training uses a different kernel, which sums keys in a different order."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        self.trained = getattr(self, "trained", False) or self.training
        if self.trained and not self.training:
            k = k.flip(0)
            v = v.flip(0)
            mask = mask.flip(1)
        return super().attend(q, k, v, mask)


@mutant("rl.value", group="rl", part="model", model_type="value_model")
class ValuesShiftedInTraining(Model):
    """A value depends on its own token in training, and not in inference."""

    def align(self, about_next: Tensor, packed: PackedInputs) -> Tensor:
        return super().align(about_next.roll(-1, 0) if self.training else about_next, packed)


@mutant("forward.microbatch_split", group="core")
class EntropyUnasked(LoopbackEngine):
    """Inference returns entropy without being asked for it, at its cost."""

    def _inference_needs(self, entropy: bool) -> tuple[str, ...]:
        del entropy
        return super()._inference_needs(entropy=True)
