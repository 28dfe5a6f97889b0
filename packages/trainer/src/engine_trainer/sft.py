"""Supervised fine-tuning: the loop."""

from __future__ import annotations

import math
from collections.abc import Callable
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
        engine = run.start()
        speed = measure(engine, run.engine_config, run.device)
        evaluate = _evaluator(run, config, data, tokenizer)
        state = run.resume()
        position = int(state.get("position", 0))
        if state["step"] == 0:
            run.log.write(0, evaluate())
        for step in run.steps(state["step"]):
            documents = [data.train[i] for i in order.take(position, config.batch_size)]
            position += len(documents)
            with run.timers.phase("train"):
                output = engine.train_batch(run.share([d.fields() for d in documents]), sft_loss)
            metrics = _figures(run, step, output) | {"train/epoch": position / len(data.train)}
            metrics |= speed.metrics([len(d) for d in documents], run.timers.last("train"))
            if config.eval and (step == run.total_steps or (config.eval.every and step % config.eval.every == 0)):
                metrics |= evaluate()
            run.end_step(step, metrics, {"position": position}, show=SHOW)
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


def _evaluator(run: Run, config: SFTConfig, data: _Data, tokenizer: ChatTokenizer) -> Callable[[], Metrics]:
    """What measures the held-out loss, and the accuracy where there is a reward; nothing without ``eval``."""
    accuracy = _accuracy(run, config, data.problems, tokenizer) if data.problems else dict

    def evaluate() -> Metrics:
        if data.heldout is None:
            return {}
        with run.timers.phase("eval"):
            return heldout_loss(run, data.heldout) | accuracy()

    return evaluate


def _accuracy(run: Run, config: SFTConfig, problems: PromptDataset, tokenizer: ChatTokenizer) -> Callable[[], Metrics]:
    raise NotImplementedError  # filled in below once evaluate.py stands


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
