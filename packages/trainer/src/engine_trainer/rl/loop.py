"""Reinforcement learning from verifiable rewards: the loop of PPO, GRPO and their relatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

from engine_trainer.config import RLConfig
from engine_trainer.data import (
    ChatTokenizer,
    Heldout,
    Prompt,
    PromptDataset,
    SampleOrder,
    TeacherPrompts,
    heldout_sets,
    load_tokenizer,
    longest_prompt,
    order_of,
    questions,
    read_examples,
    refuse_videos,
    warn_of_overlap,
)
from engine_trainer.placement.groups import Launcher
from engine_trainer.placement.replica import Group, require_vision
from engine_trainer.rl.critic import check_critic
from engine_trainer.rl.experience import Experience, collect_experience
from engine_trainer.rl.learner import Learner, check_own_loss
from engine_trainer.rl.recorder import Recorder
from engine_trainer.rl.replay import check_replay
from engine_trainer.rl.sources import OneStepOff, Source, Synchronous
from engine_trainer.rl.teacher import check_teacher
from engine_trainer.run.run import Outcome, Run, world_size
from engine_trainer.sampling.evaluate import Evaluator
from engine_trainer.sampling.pictured import check_pictured
from engine_trainer.sampling.sampler import Sampler
from engine_trainer.telemetry.throughput import Throughput, of_config

SHOW = (
    "train/reward",
    "eval/accuracy",
    "rollout/response_length",
    "train/entropy",
    "train/grad_norm",
)

Metrics = dict[str, float]


def train_rl(config: RLConfig, launcher: Launcher | None = None) -> Outcome:
    """Train as ``config`` says, from the beginning or from the last checkpoint.

    A step brings the engine's weights to the rollout, draws a group of completions for each prompt,
    scores them, assigns an advantage to each token, and updates the engine. All randomness is a
    function of the seed and of the step, so that a run that was killed and resumed ends as an
    uninterrupted run does.

    Raises ``EngineError`` for configuration, data, plug-ins, rewards, rollouts and checkpoints; on
    all ranks together.
    """
    algorithm = config.algorithm
    check_own_loss(algorithm)
    ranks = config.ray.engines if config.launcher == "ray" else world_size()
    tokenizer = load_tokenizer(config.data, config.engine.model)
    train, heldout = _load(config, tokenizer)
    order = order_of(train, config.data, config.run.seed)
    steps = config.run.total_steps(
        len(train), algorithm.prompts_per_step, key="algorithm.prompts_per_step", data=config.data
    )
    with Run(config, kind="rl", total_steps=steps, launcher=launcher) as run:
        # First, so that an error about one of them names its own keys.
        check_critic(config, run.launcher, ranks)
        check_teacher(config, run.launcher, ranks, tokenizer)
        settled = run.settle()
        assert isinstance(settled, RLConfig)
        config = settled
        check_replay(config, run.launcher)
        _require_vision(run, config, train, heldout)
        run.start(schedule_steps=run.total_steps * algorithm.mini_batches * algorithm.epochs)
        sampler = Sampler.create(
            run,
            tokenizer,
            config.rollout,
            config.reward,
            config.agent,
            in_flight=_wants_in_flight(config),
        )
        learner = Learner(run, config)
        recorder = Recorder(run, config, tokenizer)
        evaluator = Evaluator(run, sampler, heldout)
        speed = of_config(run.engine_config, run.device, ranks)
        state = run.resume(len(train))
        images = tokenizer.keep_image_settings(state)
        learner.restore(state.get("learner", {}))
        sampler.failures.restore(state.get("failures", {}))
        learner.offload_idle_engines()
        done = state["step"]
        recorder.open(done)
        if done == 0 or "unmeasured" in state:
            figures = state.get("unmeasured", train.figures()) | evaluator.measure(done)
            if figures:
                run.log_start(done, figures)
        # Closed after an error, too: a thread that generates must not go on with ended workers.
        with (
            closing(recorder),
            closing(_source(run, config, sampler, learner, train, order, state)) as source,
        ):
            for step in run.steps(done):
                experience = source.take(step)
                sampler.failures.count(experience.generated)
                keep = recorder.choose(experience)
                metrics = experience.metrics | sampler.synced | _count_images(experience.groups)
                metrics |= learner.learn(experience.groups, keep)
                recorder.record(step, learner.kept)
                metrics |= _speed(run, experience, metrics.get("train/tokens", 0.0), speed) | {
                    "train/epoch": experience.position / len(train)
                }
                state = {
                    **experience.state,
                    "rows": len(train),
                    "learner": learner.state,
                    **images,
                }
                if config.eval and (
                    step == run.total_steps or (config.eval.every and step % config.eval.every == 0)
                ):
                    run.complete(step, metrics, state | {"failures": sampler.failures.state})
                    source.settle()
                    metrics |= evaluator.measure(step)
                run.end_step(step, metrics, state | {"failures": sampler.failures.state}, show=SHOW)
            recorder.settle()
        learner.close()
        sampler.close()
        return run.finish(tokenizer)


def _load(config: RLConfig, tokenizer: ChatTokenizer) -> tuple[PromptDataset, list[Heldout]]:
    """Return the training prompts and the held-out sets, and warn of prompts that are in both.

    Raises ``ConfigError`` and ``UnsupportedCapability`` for rows with images that a part of the run
    does not see.
    """
    limit = longest_prompt(config.engine.model, config.rollout)
    train = PromptDataset.build(
        read_examples(config.data, "prompt"),
        tokenizer,
        config.data,
        limit,
        teacher=_teacher_prompts(config),
        patches=config.engine.memory.max_patches,
    )
    heldout = heldout_sets(config.data, config.eval, tokenizer, config.engine.model, config.rollout)
    check_pictured(config, _list_prompts(train, heldout))
    asked = questions(train.prompts)
    for one in heldout:
        warn_of_overlap(asked, questions(one.problems.prompts), one.name)
    return train, heldout


def _list_prompts(train: PromptDataset, heldout: Sequence[Heldout]) -> list[Prompt]:
    return [*train.prompts, *(prompt for one in heldout for prompt in one.problems.prompts)]


def _require_vision(
    run: Run, config: RLConfig, train: PromptDataset, heldout: Sequence[Heldout]
) -> None:
    """Raise ``UnsupportedCapability`` for images that the rollout or the engine does not take."""
    require_vision(config.rollout, _list_prompts(train, heldout))
    _, declared = run.launcher.resolve(config.engine)
    images = (prompt.images for prompt in train.prompts)
    refuse_videos(images, declared, config.engine.backend)


def _teacher_prompts(config: RLConfig) -> TeacherPrompts | None:
    """Return the prompts of the teacher, None where they are the policy's."""
    teacher = config.algorithm.teacher
    if teacher is None or not teacher.has_own_prompts:
        return None
    model = config.engine.model if teacher.engine is None else teacher.engine.model
    # The context of a server is known to the server alone.
    limit = None if teacher.url is not None else longest_prompt(model, config.rollout)
    return TeacherPrompts(template=teacher.prompt_template, limit=limit)


def _wants_in_flight(config: RLConfig) -> bool | Literal["auto"]:
    """Return whether the rollout is to take weights while it generates (``RolloutSpec``)."""
    return config.overlap.in_flight if config.overlap.mode == "full" else False


def _source(
    run: Run,
    config: RLConfig,
    sampler: Sampler,
    learner: Learner,
    data: PromptDataset,
    order: SampleOrder,
    state: Mapping[str, Any],
) -> Source:
    position = int(state.get("position", 0))

    def gather(step: int, start: int) -> Experience:
        return collect_experience(sampler, data, order, config, step=step, position=start)

    if config.overlap.mode == "full":
        from engine_trainer.rl.fully_async import FullyAsync

        return FullyAsync(
            sampler,
            data,
            order,
            config,
            position=position,
            pending=state.get("pending", ()),
            oldest=lambda: learner.oldest_version,
        )
    if config.overlap.mode == "one_step_off":
        return OneStepOff(
            sampler, gather, position, lambda: learner.oldest_version, run.total_steps
        )
    return Synchronous(sampler, gather, position)


def _count_images(groups: Sequence[Group]) -> Metrics:
    """Return the numbers of a step's images and of their rows of pixels, where there are any.

    An image counts once for each completion that is trained on.
    """
    pairs = [(g.prompt.images, len(g.completions)) for g in groups]
    shown = [(images, count) for images, count in pairs if images is not None]
    if not shown:
        return {}
    return {
        "train/images": float(sum(len(images.planned) * count for images, count in shown)),
        "train/patches": float(sum(images.rows * count for images, count in shown)),
    }


def _speed(run: Run, experience: Experience, trained: float, speed: Throughput | None) -> Metrics:
    """Return the speed figures.

    ``trained`` is the number of tokens in all updates of the step.
    """
    updates = run.timers.take_spent("train")
    seconds = updates + run.timers.take_spent("log_probs")
    figures = {"perf/trained_tokens_per_s": trained / seconds if seconds else 0.0}
    lengths = [
        len(g.prompt.tokens) + len(a.tokens) for g in experience.groups for a in g.completions
    ]
    return figures | (speed.of_updates(lengths, trained, updates) if speed else {})
