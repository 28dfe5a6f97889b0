"""Kahneman-Tversky optimization, in which the policy learns from completions with a label.

It needs neither pairs nor a rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine_api.batch import Batch
from engine_trainer.algorithms.preference import LinearLoss
from engine_trainer.algorithms.unpaired import LabelledRows, UnpairedObjective
from engine_trainer.config import KTOConfig
from engine_trainer.config.preferences import KTOSection
from engine_trainer.config.sections import token_budget
from engine_trainer.data import ChatTokenizer, positions_of
from engine_trainer.data.datasets import Document as Tokens
from engine_trainer.data.labelled import LabelledDataset
from engine_trainer.preferences.loop import (
    EVAL_ROWS,
    Data,
    Metrics,
    Plan,
    PreferenceTrainer,
    counted_tokens,
    document_sums,
    pack,
    share,
    train_on_preferences,
)
from engine_trainer.run.reference import Reference
from engine_trainer.run.run import Outcome, Run

log = logging.getLogger("engine_trainer")
RATIOS = (1.0, 4 / 3)
"""Bounds of the sum of the desirable rows' factors over that of the undesirable ones (the paper's
eq. 8).
"""

LabelledData = Data[LabelledDataset]
Document = tuple[int, int]
"""A row's prompt with the completion of a row, which is the same one in the row's own document."""


def train_kto(config: KTOConfig) -> Outcome:
    """Train as ``config`` says, from the beginning or from the last checkpoint.

    KTO is of Ethayarajh et al. 2024, arXiv:2402.01306 (``engine_trainer.algorithms.unpaired``). A
    row counts by ``log π(completion | prompt) - log ref(completion | prompt)``; the reference is
    the model as the run began. The baseline is the mean of the same over the step's prompts, each
    with the completion of another row (``LabelledDataset.mismatched``).

    Raises ``EngineError`` for configuration, data, plug-ins and checkpoints.
    """
    return train_on_preferences(
        config,
        kind="kto",
        load=lambda tokenizer: _load(config, tokenizer),
        trainer_of=lambda run, data, plan, _: KTOTrainer(run, config.kto, data, plan),
    )


class KTOTrainer(PreferenceTrainer[Document, LabelledRows]):
    """Steps and evaluations over labelled rows.

    An item is a row with the row whose completion goes with its prompt for the baseline, which is
    the row itself where the loss reads no baseline.
    """

    show = ("train/loss", "train/accuracy", "train/baseline", "train/grad_norm", "eval/accuracy")

    def __init__(self, run: Run, section: KTOSection, data: LabelledData, plan: Plan) -> None:
        super().__init__(run, LinearLoss(), 0 if data.heldout is None else len(data.heldout))
        self.data = data
        self.loss = UnpairedObjective.named(
            section.loss,
            section.beta,
            section.loss_options,
            desirable=section.desirable,
            undesirable=section.undesirable,
        )
        self._baseline = section.reads_baseline
        self._reference: Reference | None = None
        self._known: dict[bool, dict[Document, float]] = {}
        if run.is_main and (warning := warn_of_weights(data.train.counts, section)):
            log.warning(warning)
        if section.reference == "engine":
            self._reference = Reference(run)
            return
        # Before a checkpoint is loaded the policy is the reference.
        with run.timers.phase("reference"):
            steps = (plan.step(step) for step in range(1, plan.steps + 1))
            items = [item for step in steps for item in self.items(step, heldout=False)]
            self._known[False] = self._precompute(items, heldout=False)
            if self.heldout:
                items = self.items(range(self.heldout), heldout=True)
                self._known[True] = self._precompute(items, heldout=True)

    def items(self, indices: Sequence[int], *, heldout: bool) -> list[Document]:
        """Return each row with its partner for the baseline."""
        if not self._baseline:
            return [(row, row) for row in indices]
        partners = self.data.select(heldout).mismatched(indices)
        return list(zip(indices, partners, strict=True))

    def measure(self, items: Sequence[Document], *, heldout: bool) -> tuple[Batch, LabelledRows]:
        """Return the documents of this rank's rows, and their sums.

        ``kl`` is the log-ratio of each row's prompt with the completion of the other row.
        """
        sizes = [sum(len(self._tokens(d, heldout)) for d in self._documents([i])) for i in items]
        local = [items[k] for k in share(sizes, self.run)]
        count = len(local)
        documents = self._documents(local)
        batch = self._pack(documents, heldout)
        sums = document_sums(self.run.engine.infer_batch(batch), batch)
        if self._reference is None:
            known = self._known[heldout]
            reference = torch.tensor([known[d] for d in documents], dtype=torch.float64)
        else:
            reference = document_sums(self._reference.outputs(batch), batch)
        own = batch.select(range(count))
        rows = [self.data.select(heldout)[row] for row, _ in local]
        return own, LabelledRows(
            log_probs=sums[:count],
            ref_log_probs=reference[:count],
            tokens=counted_tokens(own),
            desirable=torch.tensor([row.desirable for row in rows], dtype=torch.bool),
            kl=(sums - reference)[count:] if self._baseline else torch.zeros_like(sums),
        )

    def score(self, sums: LabelledRows) -> tuple[torch.Tensor, Metrics]:
        """Return the slopes of the documents, and the figures of the rows."""
        total, count = self.add([float(sums.kl.sum()), len(sums.kl)])
        kl = total / max(count, 1.0)
        rows = replace(sums, kl=torch.full_like(sums.log_probs, kl))
        losses, slopes = self.loss(rows)
        rewards = self.loss.rewards(rows)
        above = rows.signs * (rows.log_ratios - max(0.0, kl))
        right = (above > 0).double() + 0.5 * (above == 0).double()
        marks = rows.desirable.double()
        loss, accuracy, desirable, better, worse = self.add(
            [float(x.sum()) for x in (losses, right, marks, marks * rewards, (1 - marks) * rewards)]
        )
        count = max(count, 1.0)
        undesirable = count - desirable
        figures = {
            "loss": loss / count,
            "accuracy": accuracy / count,
            "desirable_share": desirable / count,
        }
        # A step may have rows of one label only.
        if desirable:
            figures["desirable"] = better / desirable
        if undesirable:
            figures["undesirable"] = worse / undesirable
        if desirable and undesirable:
            figures["margin"] = figures["desirable"] - figures["undesirable"]
        if self._baseline:
            figures["baseline"] = kl
        return slopes, figures

    def close(self) -> None:
        """Close the reference."""
        if self._reference is not None:
            self._reference.close()

    # --- inside ---------------------------------------------------------------------------------

    def _documents(self, items: Sequence[Document]) -> list[Document]:
        """Return the rows' own documents, then those for the baseline, where the loss reads it."""
        own = [(row, row) for row, _ in items]
        return [*own, *items] if self._baseline else own

    def _tokens(self, document: Document, heldout: bool) -> Tokens:
        row, completion = document
        dataset = self.data.select(heldout)
        return dataset[row].with_completion_of(dataset[completion], dataset.limit)

    def _pack(self, documents: Sequence[Document], heldout: bool) -> Batch:
        return pack([self._tokens(document, heldout).fields() for document in documents])

    def _precompute(self, items: Sequence[Document], *, heldout: bool) -> dict[Document, float]:
        """Return the reference's sums of all documents of ``items``, the same on all ranks."""
        documents = sorted(set(self._documents(items)))
        found: dict[Document, float] = {}
        for start in range(0, len(documents), EVAL_ROWS):
            part = documents[start : start + EVAL_ROWS]
            local = [
                part[k] for k in share([len(self._tokens(d, heldout)) for d in part], self.run)
            ]
            batch = self._pack(local, heldout)
            sums = document_sums(self.run.engine.infer_batch(batch), batch).tolist()
            own = dict(zip(local, sums, strict=True))
            for row in self.run.policy.gather([own]):
                found |= row
        return found


def warn_of_weights(counts: tuple[int, int], section: KTOSection) -> str:
    """Return a warning for factors of the labels that do not fit the data, empty if they fit.

    ``counts`` are the numbers of desirable and of undesirable rows.
    """
    desirable, undesirable = counts
    if not desirable or not undesirable:
        label = "undesirable" if undesirable else "desirable"
        return (
            f"all {desirable + undesirable} rows are {label}: the policy only moves "
            f"{'away from' if undesirable else 'towards'} them, held by the reference alone"
        )
    if not section.desirable or not section.undesirable:
        return ""  # a label was turned off on purpose
    ratio = section.desirable * desirable / (section.undesirable * undesirable)
    low, high = RATIOS
    # A ratio at a bound may be off by rounding.
    if low - 1e-9 <= ratio <= high + 1e-9:
        return ""
    if ratio < low:
        advice = f"kto.desirable={section.undesirable * undesirable / desirable:.4g}"
    else:
        advice = f"kto.undesirable={section.desirable * desirable / undesirable:.4g}"
    return (
        f"{desirable} desirable rows with the factor {section.desirable:g} weigh {ratio:.2f} times "
        f"as much as {undesirable} undesirable rows with {section.undesirable:g}; the paper (KTO, "
        f"arXiv:2402.01306, eq. 8) asks for {low:g} to {high:.2f}, as with {advice}"
    )


def _load(config: KTOConfig, tokenizer: ChatTokenizer) -> LabelledData:
    section = config.data
    assert section.source is not None  # the configuration checks it
    context = positions_of(config.engine.model)
    budget = token_budget(config.engine.memory, config.data.max_length)
    train = LabelledDataset.read(
        section.source,
        section.split,
        tokenizer,
        section,
        label=config.kto.label,
        context=context,
        budget=budget,
    )
    heldout = None
    if config.eval is not None:
        heldout = LabelledDataset.read(
            config.eval.source,
            config.eval.split,
            tokenizer,
            section,
            label=config.kto.label,
            limit=config.eval.max_rows,
            context=context,
            budget=budget,
            name="eval",
        )
    if config.kto.reads_baseline:
        train.check_mismatches()
        if heldout is not None:
            heldout.check_mismatches()
    return Data(train=train, heldout=heldout)
