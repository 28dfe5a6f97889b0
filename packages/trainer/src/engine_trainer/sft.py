"""The training loop of supervised fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_api.losses import sft_loss, where_counted
from engine_api.results import TrainOutput
from engine_trainer.config import SFTConfig
from engine_trainer.data import (
    ChatTokenizer,
    Heldout,
    SFTDataset,
    heldout_sets,
    load_tokenizer,
    order_of,
    positions_of,
    questions,
    read_examples,
    read_heldout,
    warn_of_overlap,
)
from engine_trainer.run.run import Outcome, Run
from engine_trainer.telemetry.throughput import measure

if TYPE_CHECKING:
    from engine_trainer.sampling.evaluate import Evaluator

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
    data = _Data.load(config, tokenizer)
    order = order_of(data.train, config.data, config.run.seed)
    steps = config.run.total_steps(
        len(data.train), config.batch_size, key="batch_size", data=config.data
    )
    with Run(config, kind="sft", total_steps=steps) as run:
        run.start()
        speed = measure(run.engine, run.engine_config, run.device)
        state = run.resume(len(data.train))
        position = int(state.get("position", 0))
        with closing(_Evaluation(run, config, data, tokenizer)) as evaluation:
            evaluation.restore(state)
            done = state["step"]
            if done == 0 or "unmeasured" in state:
                figures = state.get("unmeasured", data.train.figures())
                run.log_start(done, figures | evaluation.measure(done))
            for step in run.steps(done):
                documents = [data.train[i] for i in order.take(position, config.batch_size)]
                position += len(documents)
                with run.timers.phase("train"):
                    output = run.engine.train_batch(
                        run.pack_local([d.fields() for d in documents]), sft_loss
                    )
                metrics = _figures(run, step, output) | {"train/epoch": position / len(data.train)}
                metrics |= speed.metrics([len(d) for d in documents], run.timers.last("train"))
                state = {"position": position, "rows": len(data.train)}
                if step == run.total_steps or (
                    config.eval and config.eval.every and step % config.eval.every == 0
                ):
                    run.complete(step, metrics, state | evaluation.state)
                    metrics |= evaluation.measure(step)
                run.end_step(step, metrics, state | evaluation.state, show=SHOW)
        return run.finish(tokenizer.tokenizer)


@dataclass(frozen=True, kw_only=True)
class _Data:
    """The training documents, the held-out documents and the held-out problems of a run."""

    train: SFTDataset
    """Documents to train on."""

    heldout: SFTDataset | None
    """Held-out documents of the set without a name, whose loss is measured; None without that set.

    For sets with a name only completions are generated.
    """

    problems: list[Heldout]
    """Problems of every held-out set; empty without a reward."""

    @staticmethod
    def load(config: SFTConfig, tokenizer: ChatTokenizer) -> _Data:
        examples = read_examples(config.data, "response")
        room = positions_of(config.engine.model)
        train = SFTDataset.build(examples, tokenizer, config.data, room)
        own = config.eval.own_set(config.data) if config.eval else None
        heldout = read_heldout(config.data, own, "response") if own else []
        seen = questions(examples)
        warn_of_overlap(seen, questions(heldout))
        asked = config.eval if config.reward is not None else None
        problems = heldout_sets(config.data, asked, tokenizer, config.engine.model, config.rollout)
        for one in problems:
            if one.name:
                warn_of_overlap(seen, questions(one.problems.prompts), one.name)
        held = SFTDataset.build(heldout, tokenizer, config.data, room, "eval") if own else None
        return _Data(train=train, heldout=held, problems=problems)


class _Evaluation:
    """The measurement of the held-out loss, and of the accuracy where there is a reward.

    Without ``eval`` it measures nothing.
    """

    def __init__(self, run: Run, config: SFTConfig, data: _Data, tokenizer: ChatTokenizer) -> None:
        self._run, self._heldout = run, data.heldout
        self._accuracy = _accuracy(run, config, data.problems, tokenizer)

    @property
    def state(self) -> dict[str, Any]:
        """State that a resumed run needs, as JSON."""
        return {"failures": self._accuracy.sampler.failures.state} if self._accuracy else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the failure counts from the saved state of the run."""
        if self._accuracy is not None:
            self._accuracy.sampler.failures.restore(state.get("failures", {}))

    def measure(self, step: int) -> Metrics:
        """Return the figures ``eval/…`` after ``step``."""
        figures: Metrics = {}
        if self._heldout is not None:
            with self._run.timers.phase("eval"):
                figures = heldout_loss(self._run, self._heldout)
        return figures | (self._accuracy.measure(step) if self._accuracy else {})

    def close(self) -> None:
        """Close the rollout."""
        if self._accuracy is not None:
            self._accuracy.sampler.close()


def _accuracy(
    run: Run, config: SFTConfig, sets: Sequence[Heldout], tokenizer: ChatTokenizer
) -> Evaluator | None:
    if not sets or config.reward is None:
        return None
    # The imports stand here because SFT without a reward needs no rollout.
    from engine_trainer.sampling.evaluate import Evaluator
    from engine_trainer.sampling.sampler import Sampler

    return Evaluator(run, Sampler.create(run, tokenizer, config.rollout, config.reward), sets)


def heldout_loss(run: Run, dataset: SFTDataset) -> Metrics:
    """Return ``eval/loss`` and ``eval/perplexity`` of a dataset, the same on all ranks.

    The loss is the mean negative log-likelihood of the learned tokens, in nats.
    """
    nll = tokens = 0.0
    for start in range(0, len(dataset), EVAL_DOCUMENTS):
        batch = run.pack_local(
            [d.fields() for d in dataset.documents[start : start + EVAL_DOCUMENTS]]
        )
        log_probs = run.engine.infer_batch(batch).log_probs
        if batch.num_tokens and run.engine.topology.is_primary:
            assert log_probs is not None, "a language model gives log-probs"
            weight = batch.loss_weight.double()
            nll -= float((weight * where_counted(log_probs.cpu().double(), weight)).sum())
            tokens += float(weight.sum())
    rows = run.comm.all_gather((nll, tokens))
    loss = math.fsum(n for n, _ in rows) / math.fsum(t for _, t in rows)
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}


def _figures(run: Run, step: int, output: TrainOutput) -> Metrics:
    if output.skipped:
        run.log.say(
            f"step {step} was skipped: {output.skipped}; weights and optimizer are as before"
        )
    return {
        "train/loss": output.loss,
        "train/grad_norm": output.grad_norm,
        "train/lr": output.lr,
        "train/tokens": output.num_tokens,
        "train/learned_tokens": output.denominator,
        "train/micro_batches": output.num_micro_batches,
        "train/skipped": float(output.skipped is not None),
    }
