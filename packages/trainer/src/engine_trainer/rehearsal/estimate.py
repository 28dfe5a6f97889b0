"""Memory and time of the real run, by the model of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from engine_api.capabilities import Capability
from engine_api.config import EngineConfig
from engine_api.devices import Cuda
from engine_api.errors import ConfigError
from engine_api.registry import EngineRegistry
from engine_trainer.config import Config, RLConfig
from engine_trainer.config.sections import AUTO, EngineSection
from engine_trainer.placement import memory
from engine_trainer.placement.automatic import settle_precision
from engine_trainer.preview.collect import Preview
from engine_trainer.scaling import H200, Job, Shape, phases, step_of
from engine_trainer.scaling.phases import Lengths
from engine_trainer.utils.hf_models import text_config

GIB = memory.GIB


def checkpoint_bytes(config: Config) -> int:
    """Return the size of a checkpoint: weights and AdamW's moments in the master's dtype."""
    size = memory.BYTES[config.engine.precision.master]
    parameters = memory.count_parameters(config.engine.model)
    optimizer = config.engine.optimizer
    if config.engine.lora is not None or optimizer is None:
        return parameters * size
    moments = 2 if optimizer.name in memory.WITH_MOMENTS else 0
    trained = parameters - memory.count_frozen(config.engine.model)
    return (parameters + moments * trained) * size


def describe_real_run(config: Config, preview: Preview, gpus: int) -> Iterator[str]:
    """Yield lines on the memory of a GPU and the time of a step and of the run.

    Args:
        config: the user's configuration.
        preview: its rows, whose lengths count.
        gpus: number of H200s.
    """
    engine = _build_for_gpus(config.engine)
    counts = memory.engines_bytes(config, engine, Cuda.name)
    copies = engine.parallelism.dp_replicate
    shards = max(1, gpus)
    for name, (kept, gradient) in counts.items():
        yield (
            f"memory   {name}: {(kept + gradient) / shards / GIB:.1f} GiB on each of {shards} GPUs "
            f"({kept / GIB:.1f} GiB of states and {gradient / GIB:.1f} GiB of gradients in all"
            + (f", {copies} copies)" if copies > 1 else ")")
        )
    shape = _shape(config)
    if isinstance(config, RLConfig):
        context = _prompt_tokens(preview) + config.rollout.max_new_tokens
        served = memory.rollout_bytes(config.rollout, engine)
        yield f"memory   rollout: {served / GIB:.1f} GiB of weights in each replica"
        if shape is not None:
            yield (
                f"memory   rollout: {shape.kv_bytes * context / GIB:.2f} GiB of keys and values "
                f"for a completion of full length ({context:,} tokens)"
            )
    yield "memory   activations, logits and caches come on top"
    if shape is None:
        yield "time     not calculated: the model has no sizes that docs/scaling.md's model knows"
    else:
        yield from _times(config, preview, shape, gpus)


def _build_for_gpus(section: EngineSection) -> EngineConfig:
    """Return the engine's configuration with the dtype that is chosen on a GPU."""
    declared = [
        found.plugin.capabilities
        for found, row in EngineRegistry.rows()
        if found.plugin is not None
        and section.backend in row.backends
        and section.model_type in row.model_types
        and Cuda.name in row.devices
    ]
    # An engine that is not installed here is taken for one that computes in bfloat16.
    capabilities = declared[0] if declared else {Capability.BF16}
    settled, _ = settle_precision(section, "cuda", capabilities)
    return settled.build(seed=0, total_steps=1)


def _times(config: Config, preview: Preview, shape: Shape, gpus: int) -> Iterator[str]:
    micro_batch = config.engine.build(seed=0, total_steps=1).memory.max_tokens
    if not isinstance(config, RLConfig):
        lengths = [row.length for row in preview.rows if row.fate in ("kept", "cut")]
        documents = 2 if preview.task in ("dpo", "rm") else 1
        if not phases.shard_group(shape, H200, gpus):
            yield f"time     the states do not fit on {gpus} GPUs: name more with --gpus"
            return
        work = phases.update(
            shape,
            H200,
            gpus=gpus,
            tokens=config.batch_size * documents * fmean(lengths),
            length=fmean(lengths),
            micro_batch=micro_batch,
        )
        steps = config.run.steps or int((config.run.epochs or 0) * len(lengths) / config.batch_size)
        yield f"time     {_time(work.seconds)} a step, bound by {work.bottleneck}"
        yield f"time     {_time(work.seconds * steps)} for {steps} steps"
        return
    longest = config.rollout.max_new_tokens
    job = Job(
        prompts=config.algorithm.prompts_per_step,
        n=config.rollout.n,
        lengths=Lengths(prompt=_prompt_tokens(preview), mean=longest / 2, longest=longest),
        fp8=config.rollout.quantization == "fp8",
        micro_batch=micro_batch,
        updates=config.algorithm.mini_batches * config.algorithm.epochs,
        reward_processes=max(1, config.reward.workers),
    )
    step = step_of(shape, gpus, job)
    if not step.fits:
        yield f"time     the model does not fit on {gpus} GPUs: name more with --gpus"
        return
    parts = ", ".join(f"{name} {step.share(name):.0%}" for name in step.phases)
    steps = config.run.steps
    yield f"time     {_time(step.seconds)} a step ({parts})"
    yield f"time     first bottleneck: {step.bottleneck}"
    if steps is not None:
        yield f"time     {_time(step.seconds * steps)} for {steps} steps, without evaluations"
    if config.algorithm.dynamic_sampling.enabled:
        rounds = config.algorithm.dynamic_sampling.max_rounds
        yield f"time     dynamic sampling generates up to {rounds} times as much"
    slower = {"local": "`local`", AUTO: "`local`, which is chosen without vllm and sglang,"}
    if config.rollout.name in slower:
        yield (
            f"time     it is that of a serving rollout: {slower[config.rollout.name]} generates "
            "without one, and is slower"
        )


def _prompt_tokens(preview: Preview) -> int:
    return round(fmean(row.length for row in preview.rows if row.fate in ("kept", "cut")))


def _shape(config: Config) -> Shape | None:
    try:
        content = text_config(config.engine.model).to_dict()
        return Shape.from_config(config.engine.model.path, content)
    # A family with other keys for its sizes.
    except (KeyError, TypeError, ConfigError):
        return None


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
