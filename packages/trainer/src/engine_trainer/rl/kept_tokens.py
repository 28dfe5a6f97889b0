"""The tokens of a step whose numbers a run keeps, and the numbers that the learner used for them.

Completions are spread over data-parallel ranks, mini-batches and micro-batches. Each kept token has
a *place* among all kept tokens of the step, which travels with it as a field of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine_api.batch import Batch
from engine_api.losses import LossFn, coefficients_of, needs_of
from engine_api.results import LossOutput, TokenOutputs
from engine_trainer.placement.replica import Group
from engine_trainer.rl.credit import CompletionIndex
from engine_trainer.rl.partition import TrainingDocument

FIELD = "kept_place"
"""Field of a batch with the place of each token, int32; -1 for tokens that are not kept."""
LEARNED = ("old_log_probs", "ref_log_probs", "teacher_log_probs", "entropy", "advantages")
"""Names of the numbers. A number that the learner does not have is NaN."""
_PLACES = "places"


class KeptTokens:
    """The kept tokens of one step, the same in all processes of the loop.

    Its truth value says whether any token is kept.

    Args:
        groups: the groups that the step learns from.
        documents: the training documents of all of their completions.
        keep: the completions whose tokens are kept.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        documents: Sequence[TrainingDocument],
        keep: Sequence[CompletionIndex],
    ) -> None:
        self._spans: dict[CompletionIndex, tuple[int, int]] = {}
        begin = 0
        for group, index in keep:
            end = begin + len(groups[group].completions[index].tokens)
            self._spans[group, index] = (begin, end)
            begin = end
        self._numbers = {name: torch.full((begin,), torch.nan) for name in LEARNED}
        # The learner computes no document without an advantage, and no token is trained then.
        self._numbers["advantages"].zero_()
        self._mask = torch.zeros(begin, dtype=torch.bool)
        for document in documents:
            first, last = self._spans.get(document.index, (0, 0))
            if last > first:
                self._mask[first:last] = torch.tensor(document.mask[first - last :]) > 0

    def __bool__(self) -> bool:
        return bool(self._mask.numel())

    def places(self, documents: Sequence[TrainingDocument]) -> torch.Tensor:
        """Return ``FIELD`` of a dp shard ``[T]``."""
        found = torch.full((sum(len(d.tokens) for d in documents),), -1, dtype=torch.int32)
        end = 0
        for document in documents:
            end += len(document.tokens)
            first, last = self._spans.get(document.index, (0, 0))
            found[end - (last - first) : end] = torch.arange(first, last, dtype=torch.int32)
        return found

    @staticmethod
    def read(shard: Batch) -> dict[str, torch.Tensor]:
        """Return the numbers of the kept tokens of a dp shard, for ``note``."""
        wanted = shard[FIELD] >= 0
        found = {name: shard[name][wanted] for name in LEARNED if name in shard.fields}
        # A correction that rejects a token takes its weight.
        return found | {
            _PLACES: shard[FIELD][wanted],
            "loss_mask": shard.loss_weight[wanted] > 0,
        }

    def note(self, row: Mapping[str, torch.Tensor], *, replace: bool = True) -> None:
        """Take over the numbers of some tokens.

        Without ``replace`` numbers that are known stay.
        """
        places = row[_PLACES].long()
        for name, values in row.items():
            if name == "loss_mask":
                self._mask[places] = values
            elif name != _PLACES:
                known = self._numbers[name][places]
                new = values.float()
                self._numbers[name][places] = new if replace else known.where(~known.isnan(), new)

    def numbers(self, index: CompletionIndex) -> dict[str, torch.Tensor]:
        """Return a completion's numbers by name, and its ``loss_mask``, one per token."""
        begin, end = self._spans[index]
        return {name: values[begin:end] for name, values in self._numbers.items()} | {
            "loss_mask": self._mask[begin:end]
        }


class TokenWatch:
    """A loss that notes the log-probs and the entropy of kept tokens, around another loss.

    With a single update per step these log-probs are those of the old policy, which are computed
    nowhere else.
    """

    def __init__(self, loss: LossFn) -> None:
        self._loss = loss
        self.needs = needs_of(loss)
        # Read where the loss needs a divergence (``engine_api.distillation``).
        self.teaching = getattr(loss, "teaching", None)
        # All tokens of each micro-batch: to choose those that are kept would be to wait for the
        # device.
        self._rows: list[dict[str, torch.Tensor]] = []

    @property
    def observed(self) -> dict[str, Any]:
        """The wrapped loss's observations (``inner``), and the kept tokens (see ``Trained``)."""
        parts: dict[str, list[torch.Tensor]] = {}
        for row in self._rows:
            wanted = row[_PLACES] >= 0
            for name, values in row.items():
                parts.setdefault(name, []).append(values[wanted].cpu())
        tokens = {name: torch.cat(values) for name, values in parts.items()}
        if not self._rows:
            tokens = {_PLACES: torch.zeros(0, dtype=torch.int32)}
        return {"inner": getattr(self._loss, "observed", None), "tokens": tokens}

    def coefficients(self, batch: Batch) -> torch.Tensor | None:
        """Return the wrapped loss's coefficients."""
        return coefficients_of(self._loss, batch)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the wrapped loss."""
        assert outputs.log_probs is not None
        row = {_PLACES: batch[FIELD], "old_log_probs": outputs.log_probs.detach().float()}
        if outputs.entropy is not None:
            row["entropy"] = outputs.entropy.detach().float()
        self._rows.append(row)
        return self._loss(outputs, batch)
