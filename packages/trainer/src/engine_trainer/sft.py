"""Supervised fine-tuning: the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine_api.losses import sft_loss
from engine_api.results import TrainOutput
from engine_trainer.config import SFTConfig
from engine_trainer.data import (
    ChatTokenizer,
    PromptDataset,
    SFTDataset,
    load_tokenizer,
    order_of,
    read_examples,
    read_heldout,
    warn_of_overlap,
    without_limit,
)
from engine_trainer.runtime import Outcome, Run
from engine_trainer.throughput import measure

SHOW = ("train/loss", "train/lr", "train/grad_norm", "perf/tokens_per_s", "eval/loss", "eval/accuracy")
EVAL_DOCUMENTS = 256  # documents in one inference call, over all ranks

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
    with Run(config, kind="sft", total_steps=config.run.total_steps(len(data.train), config.batch_size)) as run:
        run.start()
        speed = measure(run.engine, run.engine_config, run.device)
        state = run.resume(len(data.train))
        position = int(state.get("position", 0))
        with _evaluation(run, config, data, tokenizer) as evaluate:
            if state["step"] == 0:
                run.log.write(0, evaluate(0))
            for step in run.steps(state["step"]):
                documents = [data.train[i] for i in order.take(position, config.batch_size)]
                position += len(documents)
                with run.timers.phase("train"):
                    output = run.engine.train_batch(run.share([d.fields() for d in documents]), sft_loss)
                metrics = _figures(run, step, output) | {"train/epoch": position / len(data.train)}
                metrics |= speed.metrics([len(d) for d in documents], run.timers.last("train"))
                if step == run.total_steps or (config.eval and config.eval.every and step % config.eval.every == 0):
                    metrics |= evaluate(step)
                run.end_step(step, metrics, {"position": position, "rows": len(data.train)}, show=SHOW)
        return run.finish(tokenizer.tokenizer)


@dataclass(frozen=True, kw_only=True)
class _Data:
    train: SFTDataset
    heldout: SFTDataset | None
    problems: PromptDataset | None

    @staticmethod
    def load(config: SFTConfig, tokenizer: ChatTokenizer) -> _Data:
        examples = read_examples(config.data, "response")
        train = SFTDataset.build(examples, tokenizer, config.data)
        if config.eval is None:
            return _Data(train=train, heldout=None, problems=None)
        strict, heldout = without_limit(config.data), read_heldout(config.data, config.eval, "response")
        warn_of_overlap(examples, heldout)
        asked = config.reward is not None and config.eval.samples > 0
        return _Data(train=train, heldout=SFTDataset.build(heldout, tokenizer, strict),
                     problems=PromptDataset.build(heldout, tokenizer, strict) if asked else None)  # fmt: skip


@contextmanager
def _evaluation(
    run: Run, config: SFTConfig, data: _Data, tokenizer: ChatTokenizer
) -> Iterator[Callable[[int], Metrics]]:
    """What measures the held-out loss, and the accuracy where there is a reward; nothing without ``eval``."""
    accuracy = _Accuracy(run, config, data.problems, tokenizer) if data.problems else None

    def evaluate(step: int) -> Metrics:
        if data.heldout is None:
            return {}
        with run.timers.phase("eval"):
            return heldout_loss(run, data.heldout) | (accuracy.measure(step) if accuracy else {})

    yield evaluate
    if accuracy is not None:
        accuracy.sampler.close()


class _Accuracy:
    """Completions to the held-out problems, judged; ``output_dir/eval`` keeps them."""

    def __init__(self, run: Run, config: SFTConfig, problems: PromptDataset, tokenizer: ChatTokenizer) -> None:
        # Imported here: SFT without a reward needs no rollout.
        from engine_trainer.sampler import Sampler

        assert config.eval is not None and config.reward is not None
        self.run, self.section, self.problems = run, config.eval, problems
        self.sampler = Sampler.create(run, tokenizer, config.rollout, config.reward)

    def measure(self, step: int) -> Metrics:
        """``eval/accuracy`` and what belongs to it, after ``step``."""
        from engine_trainer.evaluate import evaluate

        figures = evaluate(self.sampler, self.problems.prompts, samples=self.section.samples,
                           temperature=self.section.temperature, seed=self.run.config.run.seed,
                           path=self.run.folder / "eval" / f"step-{step:06d}.jsonl")  # fmt: skip
        return {f"eval/{name}": value for name, value in figures.items()}


def heldout_loss(run: Run, dataset: SFTDataset) -> Metrics:
    """``eval/loss`` (mean NLL of the learned tokens, nats) and ``eval/perplexity``; the same on all ranks."""
    nll = tokens = 0.0
    for start in range(0, len(dataset), EVAL_DOCUMENTS):
        batch = run.share([d.fields() for d in dataset.documents[start : start + EVAL_DOCUMENTS]])
        log_probs = run.engine.infer_batch(batch).log_probs
        if batch.num_tokens and run.engine.topology.is_primary:
            assert log_probs is not None, "a language model gives log-probs"
            nll -= float((batch.loss_weight.double() * log_probs.cpu().double()).sum())
            tokens += float(batch.loss_weight.double().sum())
    rows = run.comm.all_gather((nll, tokens))
    loss = math.fsum(n for n, _ in rows) / math.fsum(t for _, t in rows)
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}


def _figures(run: Run, step: int, output: TrainOutput) -> Metrics:
    if output.skipped:
        run.log.say(f"step {step} was skipped: {output.skipped}; weights and optimizer are as before")
    return {
        "train/loss": output.loss, "train/grad_norm": output.grad_norm, "train/lr": output.lr,
        "train/tokens": output.num_tokens, "train/learned_tokens": output.denominator,
        "train/micro_batches": output.num_micro_batches, "train/skipped": float(output.skipped is not None),
    }  # fmt: skip
