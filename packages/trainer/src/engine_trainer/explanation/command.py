"""The comparison of a recorded step with the oracle, printed for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_api.checkpoint import steps as checkpoints_of
from engine_api.errors import CheckpointMissing, ConfigError, EngineError
from engine_api.manifest import read_manifest
from engine_trainer.config import RLConfig
from engine_trainer.explanation.live import LiveReading, read_live
from engine_trainer.explanation.oracle import (
    load_diagnosis,
    read_checkpoint_oracle,
    read_model_oracle,
)
from engine_trainer.explanation.sample import (
    Sample,
    choose_sample,
    describe_row,
    other_prompts,
    replayed_experts,
)
from engine_trainer.placement.replica import rollout_dtype
from engine_trainer.rl.recorded import (
    CHECKPOINTS,
    check_same_run,
    load_recorded_config,
    read_step,
)
from engine_trainer.run.checkpoints import read_extra
from engine_trainer.utils.terminal import escape

OLDER = 3
"""Largest number of earlier checkpoints whose weights are tried."""
SHOWN = 3
"""Number of places that are printed."""


def explain_step(
    folder: Path,
    step: int,
    overrides: Sequence[str] = (),
    *,
    documents: int = 8,
    live: bool = True,
) -> bool:
    """Print where a step's log-probs part from the oracle's, and the likeliest cause.

    Args:
        folder: the run's ``run.output_dir``.
        step: number of the step, from 1.
        overrides: ``key.sub=value`` for the configuration of the step, such as another engine.
        documents: largest number of completions.
        live: compute with the engine, too, for its layers.

    Returns whether nothing was found. Raises ``ConfigError`` for a run, step or number that is
    wrong, and for a model that the oracle does not compute; ``CheckpointMissing`` where no
    checkpoint has the weights that the step began with; ``DataError`` for a recording that is
    damaged; ``PluginNotFound`` without engine-conformance.
    """
    if documents < 1:
        raise ConfigError("--documents", f"expected 1 or more, got {documents}", remedy="give 8")
    diagnosis = load_diagnosis()
    recorded = read_step(folder, step)
    recorded.require_text()
    config = load_recorded_config(folder, step, overrides)
    checkpoint = find_weights(folder, step)
    version = 0
    if checkpoint is not None:
        check_same_run(recorded, read_extra(checkpoint).get("run"), checkpoint)
        version = read_manifest(checkpoint).step
    sample = choose_sample(recorded, version, documents)
    subject = _make_subject(diagnosis, config, folder, checkpoint)
    made = _make_documents(diagnosis, config, sample)
    _print_head(folder, step, sample, checkpoint, version)
    _print_experts(config, made)
    findings = [
        diagnosis.diagnose(subject, made, reading)
        for reading in _readings(diagnosis, config, sample)
    ]
    if sample.lost:
        print(f"\nrollout: WRONG: {sample.lost} tokens were reported with NaN")
    for finding in findings:
        _print_finding(diagnosis, finding)
    if live:
        findings += _explain_live(diagnosis, config, subject, made, checkpoint)
    if not sample.lost and all(finding.is_right for finding in findings):
        print("\nnothing found")
        return True
    return False


def find_weights(folder: Path, step: int) -> Path | None:
    """Return the checkpoint of the weights that ``step`` began with, None for the run's model.

    Raises ``CheckpointMissing`` that names the steps that can be explained.
    """
    found = checkpoints_of(folder / CHECKPOINTS)
    if step == 1:
        return None
    if step - 1 in found:
        return found[step - 1]
    able = ", ".join(str(k) for k in sorted({1, *(k + 1 for k in found)}))
    raise CheckpointMissing(
        f"no checkpoint has the weights that step {step} began with",
        where=str(folder / CHECKPOINTS),
        why=f"expected one of step {step - 1}; steps that have one before them: {able}",
        remedy="name one of these steps, or record a run with run.save_every: 1 and run.keep: 0",
    )


def _make_subject(diagnosis: Any, config: RLConfig, folder: Path, checkpoint: Path | None) -> Any:
    """Return the model of the step, with the models of earlier versions."""
    start = read_model_oracle(diagnosis, config)
    if checkpoint is None:
        if start is None:
            raise ConfigError(
                "--step",
                "the weights of step 1 are not in any file",
                why="engine.model.init is random, or the model is on the hub",
                remedy="name a step after the first checkpoint",
            )
        now, older = start, {}
    else:
        now = read_checkpoint_oracle(diagnosis, config, checkpoint)
        own = read_manifest(checkpoint).step
        before = {k: p for k, p in checkpoints_of(folder / CHECKPOINTS).items() if p != checkpoint}
        earlier = sorted(
            (k for k, p in before.items() if read_manifest(p).step < own), reverse=True
        )
        older = {
            f"the checkpoint of step {k}": read_checkpoint_oracle(diagnosis, config, before[k])
            for k in earlier[:OLDER]
        }
        if start is not None:
            older["the model that the run began with"] = start
    rollout = config.rollout
    return diagnosis.Subject(
        config=now.config,
        params=now.params,
        adapter=now.adapter,
        older=older,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
    )


def _make_documents(diagnosis: Any, config: RLConfig, sample: Sample) -> list[Any]:
    return [
        diagnosis.Document(
            name=describe_row(row),
            tokens=[*row["prompt_tokens"], *row["tokens"]],
            prompt=len(row["prompt_tokens"]),
            routed_experts=experts,
            other_prompts=prompts,
        )
        for row, prompts, experts in zip(
            sample.rows,
            other_prompts(config, sample.rows),
            replayed_experts(config, sample.rows),
            strict=True,
        )
    ]


def _readings(diagnosis: Any, config: RLConfig, sample: Sample) -> list[Any]:
    """Return the recorded readings that have values."""
    engine = config.engine.build(seed=0, total_steps=1)
    given = [("rollout", sample.rollout, rollout_dtype(config.rollout, engine))]
    # Otherwise the old log-probs are the rollout's own.
    if config.algorithm.old_log_probs == "engine":
        given.insert(0, ("engine", sample.engine, engine.precision.compute))
    return [
        diagnosis.Reading(name=name, log_probs=values, dtype=dtype)
        for name, values, dtype in given
        if not all(bool(one.isnan().all()) for one in values)
    ]


def _compute_dtype(config: RLConfig) -> str:
    """Return the dtype in which the engine computes here.

    A run's configuration has no ``auto``. One from an override is the contract's default.
    """
    return config.engine.build(seed=0, total_steps=1).precision.compute


def _explain_live(
    diagnosis: Any, config: RLConfig, subject: Any, documents: list[Any], checkpoint: Path | None
) -> list[Any]:
    """Print what the engine computes now, and return its finding."""
    name = f"{config.engine.backend} now"
    try:
        found = read_live(
            config,
            checkpoint,
            [one.tokens for one in documents],
            [one.routed_experts for one in documents],
        )
    except EngineError as error:
        print(f"\n{name}: not compared: {escape(error.what)}")
        return []
    reading = diagnosis.Reading(
        name=name,
        log_probs=[
            values[one.prompt :] for values, one in zip(found.log_probs, documents, strict=True)
        ],
        dtype=_compute_dtype(config),
        packed=True,
    )
    finding = diagnosis.diagnose(subject, documents, reading)
    _print_finding(diagnosis, finding)
    _print_layers(diagnosis, config, subject, documents[0], found)
    return [finding]


def _print_head(
    folder: Path, step: int, sample: Sample, checkpoint: Path | None, version: int
) -> None:
    tokens = sum(len(row["tokens"]) for row in sample.rows)
    weights = "the run's model" if checkpoint is None else checkpoint.name
    print(
        f"step {step} of {escape(str(folder))}: {len(sample.rows)} completions of {tokens} tokens, "
        f"against float64 with the weights of {weights} (version {version})"
    )
    if sample.others:
        print(
            f"{sample.others} tokens that other versions of the weights made are left out of the "
            "rollout's"
        )


def _print_experts(config: RLConfig, documents: Sequence[Any]) -> None:
    """Print which experts served the tokens in the oracle, where the run replayed the rollout's."""
    if config.rollout.routed_experts == "off":
        return
    if any(one.routed_experts is not None for one in documents):
        print("the experts of each token are those that the rollout recorded")
    else:
        print(
            "the run replayed the experts of its rollout, and did not record them: here the "
            "routers choose, so that tokens with other experts differ"
        )


def _print_finding(diagnosis: Any, finding: Any) -> None:
    size = f"largest difference {finding.worst:.2g} nats, {finding.bound:.2g} allowed"
    if finding.is_right:
        print(f"\n{finding.reading}: right on {finding.tokens} tokens; {size}")
        return
    wrong = sum(finding.wrong.values())
    print(
        f"\n{finding.reading}: WRONG on {wrong} of {finding.tokens} tokens, in "
        f"{len(finding.wrong)} completions; {size}"
    )
    for place in finding.places[:SHOWN]:
        print(
            f"  {place.document}: first at position {place.position}, {place.got:.6f} where the "
            f"oracle has {place.want:.6f}; {finding.wrong[place.document]} tokens"
        )
    if len(finding.places) > SHOWN:
        print(f"  and {len(finding.places) - SHOWN} more completions")
    if finding.cause:
        print(f"  likeliest cause: {finding.cause}: {diagnosis.CAUSES[finding.cause]}")
        print(f"    {finding.detail}; {finding.left:.1%} of the difference is left")
    else:
        print("  no cause of the table explains it; the nearest:")
        for name, left in finding.nearest:
            print(f"    {name}: {left:.0%} of the difference is left")


def _print_layers(
    diagnosis: Any, config: RLConfig, subject: Any, document: Any, found: LiveReading
) -> None:
    if not found.states:
        print("  layers: the engine shows none")
        return
    layers = diagnosis.compare_layers(
        subject.oracle, document, found.states, _compute_dtype(config)
    )
    errors = ", ".join(f"{error:.1e}" for error in layers.errors)
    if layers.first is None:
        print(f"  layers: right; relative errors after the embedding and each layer: {errors}")
    else:
        first = "the embedding" if layers.first < 0 else f"layer {layers.first}"
        print(f"  layers: first wrong after {first} (relative errors {errors})")
