"""Defects of distillation: of what a teacher gives, and of what a student makes of it."""
# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.distillation import OutputHead, Teaching
from engine_loopback.engine import LoopbackEngine
from engine_loopback.layers import PackedInputs
from engine_loopback.model import Model, Taught
from engine_mutants.mutant import mutant

# --- the teacher --------------------------------------------------------------------------------


@mutant("distill.states", group="distillation", part="model")
class StatesOfTheToken(Model):
    """The hidden state of a row is the one after its token, not the one that predicts it."""

    def states(self, batch: Batch) -> Tensor:
        aligned = super().states(batch)
        return aligned.roll(-1, 0)


@mutant("distill.states", group="distillation")
class HeadIsLive(LoopbackEngine):
    """The output head is the weight itself, which the next step moves."""

    def _whole_head(self) -> OutputHead:
        weight = self.weights[self.model.head_name]
        return OutputHead(weight=self.assembled(weight, self.shard(weight, self.model.dtype)))


# --- the student --------------------------------------------------------------------------------


@mutant("distill.divergence", group="distillation", part="model")
class DirectionsExchanged(Model):
    """Reverse and forward KL are exchanged."""

    def compare(self, log_p: Tensor, log_q: Tensor, teaching: Teaching) -> Tensor:
        return super().compare(log_q, log_p, teaching)


@mutant("distill.divergence", group="distillation", part="model")
class SampledTokenTeaches(Model):
    """The value is over the whole vocabulary, and the gradient that of the sampled token alone."""

    def divergences(
        self, hidden: Tensor, packed: PackedInputs, taught: Taught, temperature: float
    ) -> Tensor:
        value = super().divergences(hidden, packed, taught, temperature).detach()
        if taught.teaching.top:
            return value + 0.0 * hidden.sum()
        rows = self.next_rows(taught.rows[0], len(packed.first) - packed.size)
        own = self.layout.own_part(rows, "sequence").to(self.device)
        targets = packed.targets[:, None]
        logits = self.scaled_logits(hidden @ self.weight(self.head_name).T, temperature)
        log_p = self.counted(logits, taught).gather(-1, targets)
        log_q = self.counted(self.teacher_logits(own, taught, temperature), taught)
        slope = log_p.detach() - log_q.gather(-1, targets)
        return value + slope * (log_p - log_p.detach())


@mutant("distill.divergence", group="distillation", part="model")
class TeacherWithoutTemperature(Model):
    """The temperature divides the student's logits, and not the teacher's."""

    def teacher_logits(self, states: Tensor, taught: Taught, temperature: float) -> Tensor:
        return super().teacher_logits(states, taught, 1.0)


@mutant("distill.divergence", group="distillation", part="model")
class PaddingTakesProbability(Model):
    """Rows of the output head beyond the vocabulary take part in the distributions."""

    def counted(self, logits: Tensor, taught: Taught) -> Tensor:
        return logits.log_softmax(-1)[:, : taught.teaching.vocabulary]


@mutant("distill.divergence", group="distillation", part="model")
class TeachersRowsLate(Model):
    """The teacher's rows are taken for tokens, and not for the targets after them."""

    def next_rows(self, rows: Tensor, padding: int) -> Tensor:
        return super().next_rows(rows, padding).roll(1, 0)


@mutant("distill.divergence", group="distillation", part="model", world=2, layout={"cp": 2})
class TeachersRowsOfTheFirstPart(Model):
    """Each sequence-parallel rank takes the teacher's rows of the first rank's tokens."""

    def next_rows(self, rows: Tensor, padding: int) -> Tensor:
        whole = super().next_rows(rows, padding)
        size = len(whole) // self.layout.sequence
        return whole[:size].repeat(self.layout.sequence, 1)


@mutant("distill.top", group="distillation", part="model")
class OtherTokensLeftOut(Model):
    """The class of all tokens that a teacher does not name is left out of the sum."""

    def compare(self, log_p: Tensor, log_q: Tensor, teaching: Teaching) -> Tensor:
        if teaching.top:
            return super().compare(log_p[:, :-1], log_q[:, :-1], teaching)
        return super().compare(log_p, log_q, teaching)


@mutant("distill.top", group="distillation", part="model")
class NoTokenIsTheFirst(Model):
    """A place without a token (-1) counts as the first token of the vocabulary."""

    def next_rows(self, rows: Tensor, padding: int) -> Tensor:
        given = rows if rows.is_floating_point() else rows.clamp(min=0)
        return super().next_rows(given, padding)


@mutant("distill.fields", group="distillation", part="model", dtype="bfloat16")
class TeacherInComputedDtype(Model):
    """The teacher's log-probs are rounded to the dtype of the computation."""

    def next_rows(self, rows: Tensor, padding: int) -> Tensor:
        given = rows.to(self.dtype).float() if rows.dtype == torch.float32 else rows
        return super().next_rows(given, padding)


@mutant("distill.chunks_bound", group="distillation", part="model")
class AllTeachersLogitsExist(Model):
    """The divergence is computed for all tokens of a micro-batch at once."""

    def divergences(
        self, hidden: Tensor, packed: PackedInputs, taught: Taught, temperature: float
    ) -> Tensor:
        chunk = self.memory.logit_chunk
        self.memory = replace(self.memory, logit_chunk=len(hidden))
        try:
            return super().divergences(hidden, packed, taught, temperature)
        finally:
            self.memory = replace(self.memory, logit_chunk=chunk)


@mutant("distill.refused", group="distillation")
class AnyHeadTaken(LoopbackEngine):
    """A teacher's head is taken without a look at it."""

    def set_teacher(self, head: OutputHead | None) -> None:
        self._teacher_head = head


@mutant("refusal.distillation", group="distillation", hides=(Capability.DISTILLATION,))
class StatesUndeclared(LoopbackEngine):
    """Distillation is not declared, and hidden states are returned all the same."""

    def infer_states(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self.model.states(batch)
