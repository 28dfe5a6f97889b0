"""The training loop of supervised fine-tuning."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine_api.balance import BALANCE_LOSS
from engine_api.batch import Batch
from engine_api.errors import ConfigError
from engine_api.hf_vision import refuse_vision
from engine_api.losses import sft_loss, where_counted
from engine_api.registry import EngineRegistry
from engine_api.results import TrainOutput
from engine_trainer.config import EngineSection, SFTConfig
from engine_trainer.config.sections import token_budget
from engine_trainer.data import (
    ChatTokenizer,
    Document,
    Heldout,
    SFTDataset,
    heldout_sets,
    load_tokenizer,
    order_of,
    positions_of,
    questions,
    read_examples,
    read_responses,
    refuse_videos,
    warn_of_overlap,
)
from engine_trainer.errors import DataError
from engine_trainer.run.run import Outcome, Run
from engine_trainer.telemetry.throughput import measure
from engine_trainer.utils.hf_models import hf_config

if TYPE_CHECKING:
    from engine_trainer.sampling.evaluate import Evaluator

log = logging.getLogger("engine_trainer")
SHOW = (
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "perf/tokens_per_s",
    "eval/loss",
    "eval/accuracy",
)
# Number of documents in one inference call, over all ranks.
EVAL_DOCUMENTS = 256

Metrics = dict[str, float]


def train_sft(config: SFTConfig) -> Outcome:
    """Fine-tune as ``config`` says, from the beginning or from the last checkpoint.

    The loss is the mean negative log-likelihood of the assistant's tokens over the whole step,
    whatever the number of ranks or micro-batches.

    Raises ``EngineError``: configuration, data, plug-ins, checkpoints.
    """
    tokenizer = load_tokenizer(config.data, config.engine.model)
    declared = _refuse_tower(config.engine)
    data = _Data.load(config, tokenizer)
    _refuse_videos(config.engine, declared, data.train, *data.heldout.documents.values())
    order = order_of(data.train, config.data, config.run.seed)
    steps = config.run.total_steps(
        len(data.train), config.batch_size, key="batch_size", data=config.data
    )
    with Run(config, kind="sft", total_steps=steps) as run:
        run.start()
        speed = measure(run.engine, run.engine_config, run.device)
        state = run.resume(len(data.train))
        images = tokenizer.keep_image_settings(state)
        position = int(state.get("position", 0))
        with closing(_Evaluation(run, config, data.heldout, tokenizer)) as evaluation:
            evaluation.restore(state)
            done = state["step"]
            if done == 0 or "unmeasured" in state:
                figures = state.get("unmeasured", data.train.figures())
                run.log_start(done, figures | evaluation.measure(done))
            for step in run.steps(done):
                documents = [data.train[i] for i in order.take(position, config.batch_size)]
                position += len(documents)
                with run.timers.phase("train"):
                    batch = run.pack_local(documents)
                    learned = _Learned.gather(run, documents, batch)
                    output = run.engine.train_batch(batch, sft_loss)
                metrics = _figures(run, step, output) | {"train/epoch": position / len(data.train)}
                metrics |= speed.metrics(learned.lengths, run.timers.last("train"))
                metrics |= learned.figures
                state = {"position": position, "rows": len(data.train)} | images
                if step == run.total_steps or (
                    config.eval and config.eval.every and step % config.eval.every == 0
                ):
                    run.complete(step, metrics, state | evaluation.state)
                    metrics |= evaluation.measure(step)
                run.end_step(step, metrics, state | evaluation.state, show=SHOW)
        return run.finish(tokenizer)


def evaluate_sft(config: SFTConfig) -> Metrics:
    """Measure a model on the held-out sets of ``eval``, without training.

    It is ``engine.model``, or the checkpoint that ``run.resume`` names.
    This is ``engine-train eval`` with a file of ``sft``. The figures are the loss of each set, and
    with ``reward`` its accuracy. They are written as those of a file of ``rl``
    (``engine_trainer.sampling.evaluate``).

    Raises ``ConfigError`` without held-out documents, or while another run writes to the folder,
    and the errors of the rollout and the reward.
    """
    from engine_trainer.sampling.evaluate import write_evaluation

    if config.eval is None:
        raise ConfigError(
            "eval.source",
            "missing",
            why="there are no held-out documents to evaluate",
            remedy="name a file of rows that are not trained on",
        )
    tokenizer = load_tokenizer(config.data, config.engine.model)
    declared = _refuse_tower(config.engine)
    heldout = _Heldout.load(config, tokenizer)
    _refuse_videos(config.engine, declared, *heldout.documents.values())
    only = replace(
        config,
        engine=replace(config.engine, optimizer=None),
        run=replace(config.run, save_hf=False, push_to_hub=None),
    )
    with Run(only, kind="eval", total_steps=1, saves=False) as run:
        run.start()
        evaluated = run.load_evaluated()
        # The pictures are shown as those that the checkpoint was trained on.
        tokenizer.keep_image_settings(evaluated.state)
        with closing(_Evaluation(run, only, heldout, tokenizer, "evaluation")) as evaluation:
            figures = evaluation.measure(evaluated.step)
            write_evaluation(run, evaluated, figures)
    return figures


@dataclass(frozen=True, kw_only=True)
class _Heldout:
    """The held-out documents and problems of a run."""

    documents: dict[str, SFTDataset]
    """Documents whose loss is measured, by the set's name.

    The name is empty for the set without one.
    """

    problems: list[Heldout]
    """Problems of every held-out set.

    There are none without a reward.
    """

    questions: dict[str, list[str]]
    """Last user turns of each set, by its name."""

    @staticmethod
    def load(config: SFTConfig, tokenizer: ChatTokenizer) -> _Heldout:
        asked = config.eval if config.reward is not None else None
        model, section = config.engine.model, config.data
        problems = heldout_sets(section, asked, tokenizer, model, config.rollout)
        if problems:
            # SFT without a reward needs no rollout.
            from engine_trainer.placement.replica import require_vision

            for one in problems:
                require_vision(config.rollout, one.problems.prompts)
        texts = {one.name: questions(one.problems.prompts) for one in problems}
        documents: dict[str, SFTDataset] = {}
        for name, chosen in (config.eval.all_sets(section) if config.eval else {}).items():
            scored = chosen if asked else replace(chosen, samples=0)
            examples = read_responses(section, scored)
            key = f"eval.sets.{name}" if name else "eval"
            if examples is None:
                log.info("the rows of %s have no responses: their loss is not measured", key)
                continue
            documents[name] = SFTDataset.build(
                examples,
                tokenizer,
                section,
                positions_of(model),
                key,
                budget=token_budget(config.engine.memory, config.data.max_length),
                patches=config.engine.memory.max_patches,
            )
            texts[name] = questions(examples)
        return _Heldout(documents=documents, problems=problems, questions=texts)


@dataclass(frozen=True, kw_only=True)
class _Data:
    """The training documents and the held-out sets of a run."""

    train: SFTDataset
    heldout: _Heldout

    @staticmethod
    def load(config: SFTConfig, tokenizer: ChatTokenizer) -> _Data:
        examples = read_examples(config.data, "response")
        train = SFTDataset.build(
            examples,
            tokenizer,
            config.data,
            positions_of(config.engine.model),
            budget=token_budget(config.engine.memory, config.data.max_length),
            patches=config.engine.memory.max_patches,
        )
        heldout = _Heldout.load(config, tokenizer)
        seen = questions(examples)
        for name, asked in heldout.questions.items():
            warn_of_overlap(seen, asked, name)
        return _Data(train=train, heldout=heldout)


class _Evaluation:
    """The measurement of the held-out losses, and of the accuracy where there is a reward.

    Without ``eval`` it measures nothing.
    """

    def __init__(
        self,
        run: Run,
        config: SFTConfig,
        heldout: _Heldout,
        tokenizer: ChatTokenizer,
        folder: str = "eval",
    ) -> None:
        self._run = run
        self._documents = heldout.documents
        self._accuracy = _accuracy(run, config, heldout.problems, tokenizer, folder)

    @property
    def state(self) -> dict[str, Any]:
        """State that a resumed run needs, as JSON."""
        return {"failures": self._accuracy.sampler.failures.state} if self._accuracy else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the failure counts from the saved state of the run."""
        if self._accuracy is not None:
            self._accuracy.sampler.failures.restore(state.get("failures", {}))

    def measure(self, step: int) -> Metrics:
        """Return the figures after ``step``: ``eval/…``, for sets with a name ``eval/NAME/…``."""
        figures: Metrics = {}
        with self._run.timers.phase("eval") if self._documents else nullcontext():
            for name, documents in self._documents.items():
                prefix = f"eval/{name}" if name else "eval"
                found = heldout_loss(self._run, documents)
                figures |= {f"{prefix}/{key}": value for key, value in found.items()}
        return figures | (self._accuracy.measure(step) if self._accuracy else {})

    def close(self) -> None:
        """Close the rollout."""
        if self._accuracy is not None:
            self._accuracy.sampler.close()


def _accuracy(
    run: Run, config: SFTConfig, sets: Sequence[Heldout], tokenizer: ChatTokenizer, folder: str
) -> Evaluator | None:
    if not sets or config.reward is None:
        return None
    # The imports stand here because SFT without a reward needs no rollout.
    from engine_trainer.sampling.evaluate import Evaluator
    from engine_trainer.sampling.sampler import Sampler

    chosen = run.config
    assert isinstance(chosen, SFTConfig)
    sampler = Sampler.create(run, tokenizer, chosen.rollout, config.reward)
    return Evaluator(run, sampler, sets, folder)


def heldout_loss(run: Run, dataset: SFTDataset) -> Metrics:
    """Return ``loss`` and ``perplexity`` of a dataset, the same on all ranks.

    The loss is the mean negative log-likelihood of the learned tokens, in nats. ``bad_images`` is
    the number of documents that were left out for images that cannot be decoded, if there are any.
    """
    nll = tokens = 0.0
    documents = 0
    for start in range(0, len(dataset), EVAL_DOCUMENTS):
        batch = run.pack_local(dataset.documents[start : start + EVAL_DOCUMENTS])
        log_probs = run.engine.infer_batch(batch).log_probs
        if batch.num_tokens and run.engine.topology.is_primary:
            documents += batch.num_documents
            assert log_probs is not None, "a language model gives log-probs"
            weight = batch.loss_weight.double()
            nll -= float((weight * where_counted(log_probs.cpu().double(), weight)).sum())
            tokens += float(weight.sum())
    rows = run.comm.all_gather((nll, tokens, documents))
    learned = math.fsum(t for _, t, _ in rows)
    if not learned:
        raise DataError(
            "no held-out image can be decoded",
            why="all held-out documents were left out",
            remedy="see the warnings above, and correct the files",
        )
    loss = math.fsum(n for n, _, _ in rows) / learned
    bad_images = len(dataset) - sum(count for _, _, count in rows)
    figures = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    if bad_images:
        figures["bad_images"] = float(bad_images)
    return figures


def _refuse_tower(section: EngineSection) -> Collection[str]:
    """Return the engine's capabilities, with which it trains the tower of a model that has one.

    Raises ``UnsupportedCapability``, which the engine raises, too, but after the data have been
    read.
    """
    found = EngineRegistry.resolve(
        model_type=section.model_type, backend=section.backend, device=section.device
    )
    refuse_vision(hf_config(section.model), found.plugin.capabilities, section.backend)
    return found.plugin.capabilities


def _refuse_videos(section: EngineSection, declared: Collection[str], *sets: SFTDataset) -> None:
    """Raise ``UnsupportedCapability`` for documents with videos, which the engine does not take."""
    images = (document.images for one in sets for document in one.documents)
    refuse_videos(images, declared, section.backend)


@dataclass(frozen=True, kw_only=True)
class _Learned:
    """The documents that a step learns from, over all ranks, without those that are left out."""

    lengths: Sequence[int]
    """Numbers of their tokens."""

    figures: Metrics
    """Numbers of images, of their rows of pixels, and of documents that were left out.

    There are none where no document has images.
    """

    @staticmethod
    def gather(run: Run, documents: Sequence[Document], batch: Batch) -> _Learned:
        """Return the documents of all ranks' batches, the same on all ranks.

        Raises ``DataError`` if all documents are left out.
        """
        if all(document.images is None for document in documents):
            return _Learned(lengths=[len(document) for document in documents], figures={})
        # Only the rank that decodes a document knows whether it is left out.
        own: tuple[list[int], int, int] = ([], 0, 0)
        if run.engine.topology.is_primary:
            media = batch.media
            images, rows = (0, 0) if media is None else (media.num_images, len(media.pixels))
            own = (batch.lengths, images, rows)
        parts = run.comm.all_gather(own)
        lengths = [length for part, _, _ in parts for length in part]
        left_out = len(documents) - len(lengths)
        if not lengths:
            raise DataError(
                "no image of this step can be decoded",
                why=f"all {left_out} documents of the step were left out",
                remedy="see the warnings above, and correct the files",
            )
        figures = {
            "train/images": float(sum(images for _, images, _ in parts)),
            "train/patches": float(sum(rows for _, _, rows in parts)),
        }
        if left_out:
            figures["train/bad_images"] = float(left_out)
        return _Learned(lengths=lengths, figures=figures)


def _figures(run: Run, step: int, output: TrainOutput) -> Metrics:
    if output.skipped:
        run.log.say(
            f"step {step} was skipped: {output.skipped}; weights and optimizer are as before"
        )
    figures = {
        "train/loss": output.loss,
        "train/grad_norm": output.grad_norm,
        "train/lr": output.lr,
        "train/tokens": output.num_tokens,
        "train/learned_tokens": output.denominator,
        "train/micro_batches": output.num_micro_batches,
        "train/skipped": float(output.skipped is not None),
    }
    if BALANCE_LOSS in output.metrics:
        figures["train/balance_loss"] = output.metrics[BALANCE_LOSS]
    return figures
