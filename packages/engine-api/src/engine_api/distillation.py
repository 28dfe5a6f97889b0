"""Arguments of distillation: a teacher's output head, and the divergence that a loss needs.

A student is compared with a teacher over the vocabulary without either model's logits of a whole
batch. The teacher's engine gives the two factors of its logits, ``infer_states`` and
``output_head``. The student's engine receives them as a field of the batch and by ``set_teacher``,
and computes the output ``divergence`` for a loss with an attribute ``teaching``. A teacher behind a
server gives its most likely tokens instead, as two fields of the batch.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from engine_api.batch import (
    TEACHER_STATES,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOG_PROBS,
    Batch,
)
from engine_api.config import near_matches
from engine_api.errors import BatchError, ConfigError, EngineStateError, kind_of

if TYPE_CHECKING:
    import torch

    from engine_api.losses import LossFn

DIVERGENCE = "divergence"
"""Name of the output in ``needs`` of a loss."""

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)


@dataclass(frozen=True, kw_only=True, eq=False)  # tensors have no truth value to compare by
class OutputHead:
    """The whole output head of a language model.

    With hidden states ``h`` its logits at temperature τ are ``s (h Wᵀ + b) / τ``, or with a cap c
    ``c tanh(s (h Wᵀ + b) / c) / τ``.

    Attributes:
        weight: ``[V, d]``, W.
        bias: ``[V]``, b, or None.
        scale: s.
        cap: c, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def to(self, device: torch.device) -> OutputHead:
        """Return the same head on ``device``."""
        bias = None if self.bias is None else self.bias.to(device)
        weight = self.weight.to(device)
        return OutputHead(weight=weight, bias=bias, scale=self.scale, cap=self.cap)


@dataclass(frozen=True, kw_only=True, slots=True)
class Teaching:
    """The divergence that a loss asks for, as its attribute ``teaching``.

    With p the student's and q the teacher's distribution over the first ``vocabulary`` token ids,
    each normalized over them at the call's temperature, the output ``divergence`` of a token is::

        reverse_kl    Σ p log(p / q)
        forward_kl    Σ q log(q / p)
        jsd           β Σ q log(q / m) + (1 - β) Σ p log(p / m),   m = β q + (1 - β) p

    ``jsd`` is the generalized Jensen-Shannon divergence of arXiv:2306.13649, eq. 1. With ``top``
    the sums are over k + 1 classes: the k tokens that the batch names, and all other tokens
    together. By the data processing inequality that is at most the divergence over the vocabulary.

    Attributes:
        vocabulary: number of token ids that count. Rows of an output head beyond are padding.
        divergence: name of the divergence.
        beta: β, inside (0, 1); read by ``jsd`` alone.
        top: false: q is that of the batch's ``teacher_states`` and the head of ``set_teacher``;
            true: that of its ``teacher_top_ids`` and ``teacher_top_log_probs``, at the call's
            temperature.

    Raises:
        ConfigError: for a value outside its range.
    """

    vocabulary: int
    divergence: Divergence = "reverse_kl"
    beta: float = 0.5
    top: bool = False

    def __post_init__(self) -> None:
        given = cast("object", self.vocabulary)
        if not isinstance(given, int) or given < 1:
            raise ConfigError(
                "loss.teaching.vocabulary",
                f"expected an integer of at least 1, got {given!r:.100}",
                remedy="give the number of tokens of the tokenizer",
            )
        if self.divergence not in DIVERGENCES:
            raise ConfigError(
                "loss.teaching.divergence",
                f"unknown divergence {self.divergence!r:.100}",
                remedy=near_matches(str(self.divergence), DIVERGENCES),
            )
        if not 0 < self.beta < 1:
            raise ConfigError(
                "loss.teaching.beta",
                f"expected a number inside (0, 1), got {self.beta!r:.100}",
                remedy="use forward_kl or reverse_kl for the ends",
            )

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a batch that it reads."""
        return (TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS) if self.top else (TEACHER_STATES,)


def teaching_of(loss: LossFn) -> Teaching:
    """Return the attribute ``teaching`` of a loss that needs ``divergence``.

    Raises ``ConfigError`` if there is none of that type.
    """
    teaching: object = getattr(loss, "teaching", None)
    if not isinstance(teaching, Teaching):
        raise ConfigError(
            "loss.teaching",
            f"expected a Teaching, got {kind_of(teaching)}",
            why="the loss needs 'divergence', which is a student's to a teacher",
            remedy="give the loss an attribute teaching = Teaching(vocabulary=...)",
        )
    return teaching


def check_head(head: object) -> None:
    """Raise ``ConfigError`` unless ``head`` is an ``OutputHead`` whose parts fit each other."""
    import torch

    if not isinstance(head, OutputHead):
        raise ConfigError(
            "head",
            f"expected an OutputHead or None, got {kind_of(head)}",
            remedy="give the output_head() of the teacher's engine",
        )
    weight = cast("object", head.weight)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else kind_of(weight)
        raise ConfigError(
            "head.weight", f"expected a tensor [V, d], got {shape}", remedy="give the whole weight"
        )
    if head.bias is not None and tuple(head.bias.shape) != (weight.shape[0],):
        raise ConfigError(
            "head.bias",
            f"expected a tensor [{weight.shape[0]}], got {tuple(head.bias.shape)}",
            remedy="give the whole bias, or None",
        )


def check_taught(
    batch: Batch, teaching: Teaching, head: OutputHead | None, vocab_size: int
) -> None:
    """Raise an error unless a batch has the fields of ``teaching``, and they fit the models.

    Args:
        batch: the batch of a training call; one without tokens need have no fields.
        teaching: what its loss asks for.
        head: the teacher's head, or None where none was given.
        vocab_size: rows of the student's output head.

    Raises:
        EngineStateError: the head was not given.
        ConfigError: the vocabulary is larger than that of the student or the teacher.
        BatchError: a field is missing, or does not fit.
    """
    sizes = {"the student": vocab_size}
    if not teaching.top:
        if head is None:
            raise EngineStateError("training", "without the output head of a teacher", "given one")
        sizes["the teacher"] = head.weight.shape[0]
    for whose, size in sizes.items():
        if teaching.vocabulary > size:
            raise ConfigError(
                "loss.teaching.vocabulary",
                f"expected at most the {size} tokens of {whose}, got {teaching.vocabulary}",
                why="both distributions are over the same token ids",
                remedy="give the number of tokens of the tokenizer that both models share",
            )
    if not batch.num_tokens:
        return
    if teaching.top:
        _check_top(batch, teaching.vocabulary)
    elif head is not None:
        width = int(batch[TEACHER_STATES].shape[1])
        if width != head.weight.shape[1]:
            raise BatchError(
                TEACHER_STATES,
                f"expected states of {head.weight.shape[1]} numbers, as the teacher's head takes, "
                f"got {width}",
                remedy="take infer_states and output_head of the same engine",
            )


def _check_top(batch: Batch, vocabulary: int) -> None:
    ids, log_probs = batch[TEACHER_TOP_IDS], batch[TEACHER_TOP_LOG_PROBS]
    if log_probs.shape[1] != ids.shape[1] + 1:
        raise BatchError(
            TEACHER_TOP_LOG_PROBS,
            f"expected {ids.shape[1] + 1} log-probs for {ids.shape[1]} tokens, "
            f"got {log_probs.shape[1]}",
            remedy="give one for each token, and one for all other tokens together",
        )
    bad = ((ids < -1) | (ids >= vocabulary)).any(1).nonzero()
    if bad.numel():
        raise BatchError(
            TEACHER_TOP_IDS,
            f"expected ids below {vocabulary}, or -1, got {ids[int(bad[0])].tolist()}",
            index=int(bad[0]),
            remedy="write -1 in place of a token that is not in the vocabulary, and add its "
            "probability to that of all other tokens",
        )
    ordered = ids.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1).nonzero()
    if twice.numel():
        raise BatchError(
            TEACHER_TOP_IDS,
            f"expected each token once, got {ids[int(twice[0])].tolist()}",
            index=int(twice[0]),
            remedy="write -1 in place of the second",
        )
