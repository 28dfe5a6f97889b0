"""One replica of a rollout: it generates, and judges what it generated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from engine_api.capabilities import Capability
from engine_api.codec import register
from engine_api.config import EngineConfig, LoraConfig
from engine_api.errors import ConfigError
from engine_api.plugin import is_older
from engine_api.registry import EngineRegistry, RolloutRegistry
from engine_api.rollout import Completion, Rollout, SamplingParams, WeightExporter
from engine_trainer.agent import AgentLoop, Trajectory
from engine_trainer.config.secrets import masked
from engine_trainer.config.sections import (
    AgentSection,
    EngineSection,
    RewardSection,
    RolloutSection,
)
from engine_trainer.data import ChatTokenizer, Prompt
from engine_trainer.rewards import Sample, Score, Scorer
from engine_trainer.telemetry.logs import Timers


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredCompletion:
    """One completion, judged."""

    tokens: list[int]  # the stop token included
    log_probs: list[float]  # the rollout's, one a token
    text: str
    finished: bool  # it came to a stop by itself
    score: Score
    weight_versions: list[int] = field(
        default_factory=list[int]
    )  # one a token, of the weights that made it
    loss_weights: list[float] | None = (
        None  # one a token, 0 where a tool made it; None: the model made all
    )
    figures: dict[str, float] = field(default_factory=dict[str, float])  # of an agent's trajectory
    problem: str = ""  # what the agent's function raised

    @property
    def num_generated(self) -> int:
        """Tokens that the model made."""
        return len(self.tokens) if self.loss_weights is None else int(sum(self.loss_weights))

    @property
    def versions(self) -> list[int]:
        """Of the weights that made each token of the model; a tool's have none."""
        if self.loss_weights is None:
            return self.weight_versions
        return [
            v for v, weight in zip(self.weight_versions, self.loss_weights, strict=True) if weight
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The answers to one prompt."""

    prompt: Prompt
    completions: list[ScoredCompletion]


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """All that a process needs to make a replica and the exporter that feeds it."""

    section: RolloutSection
    reward: RewardSection
    tokenizer: ChatTokenizer
    engine: EngineSection
    engine_config: EngineConfig
    engine_device: str
    agent: AgentSection | None = None

    @property
    def device(self) -> str:
        """The device type of the rollout."""
        return rollout_device(self.section, self.engine_device)

    @property
    def dtype(self) -> str:
        """In which it computes."""
        return rollout_dtype(self.section, self.engine_config)


DTYPES = ("float32", "bfloat16", "float16")
# Unless told otherwise a rollout computes where and as the engine does: the nearer, the smaller the mismatch.


def rollout_device(section: RolloutSection, engine_device: str) -> str:
    """The device type of a rollout that serves an engine."""
    return engine_device if section.device == "auto" else section.device


def rollout_dtype(section: RolloutSection, engine_config: EngineConfig) -> str:
    """In which it computes. Raises ``ConfigError`` for what is no dtype of one."""
    compute = engine_config.precision.compute
    dtype = section.options.get("dtype", "bfloat16" if compute == "float8" else compute)
    if dtype not in DTYPES:
        raise ConfigError(
            "rollout.options.dtype",
            f"unknown dtype {dtype!r}",
            remedy=f"one of: {', '.join(DTYPES)}",
        )
    return str(dtype)


class Replica:
    """A rollout, and the rewards of what it says; with an agent, of whole conversations."""

    def __init__(
        self,
        rollout: Rollout,
        scorer: Scorer,
        tokenizer: ChatTokenizer,
        timers: Timers,
        agent: AgentLoop | None = None,
    ) -> None:
        self.rollout, self.scorer, self.tokenizer, self.timers = rollout, scorer, tokenizer, timers
        self.agent = agent

    @staticmethod
    def create(spec: RolloutSpec, timers: Timers) -> Replica:
        """Raises ``PluginError``, ``ConfigError``."""
        with ExitStack() as stack:
            scorer = Scorer.from_section(spec.reward)  # first: a mistake there costs nothing yet
            stack.callback(scorer.close)
            agent = AgentLoop(spec.agent, spec.tokenizer) if spec.agent else None
            made = Replica(create_rollout(spec), scorer, spec.tokenizer, timers, agent)
            stack.pop_all()
        return made

    def generate_and_score(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[list[ScoredCompletion]]:
        """``sampling.n`` judged answers to each prompt. Raises ``RolloutError``, ``RewardError``, ``AgentError``."""
        if self.agent is not None:
            return self._converse(self.agent, prompts, sampling)
        with self.timers.phase("generate"):
            completions = self.rollout.generate([p.tokens for p in prompts], sampling)
        with self.timers.phase("reward"):
            answers = self.score([prompts[c.prompt_index] for c in completions], completions)
        by_prompt: list[list[ScoredCompletion]] = [[] for _ in prompts]
        for completion, answer in zip(completions, answers, strict=True):
            by_prompt[completion.prompt_index].append(answer)
        return by_prompt

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[ScoredCompletion]:
        """Each completion with its reward; ``prompts`` are theirs, one a completion."""
        texts = [self.tokenizer.decode(c.tokens) for c in completions]
        samples = [
            Sample(
                prompt=p.rendered,
                completion=text,
                answer=p.answer,
                metadata=p.metadata,
                finished=_finished(c),
            )
            for p, c, text in zip(prompts, completions, texts, strict=True)
        ]
        scores = self.scorer.score(samples)
        return [
            ScoredCompletion(
                tokens=c.tokens,
                log_probs=c.log_probs,
                text=text,
                finished=_finished(c),
                score=score,
                weight_versions=c.weight_versions,
            )
            for c, text, score in zip(completions, texts, scores, strict=True)
        ]

    def _converse(
        self, agent: AgentLoop, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[list[ScoredCompletion]]:
        with self.timers.phase("generate"):
            said = agent.run(self.rollout, prompts, sampling)
        with self.timers.phase("reward"):
            pairs = [(p, t) for p, row in zip(prompts, said, strict=True) for t in row]
            answers = iter(self.score_trajectories(pairs))
            return [[next(answers) for _ in row] for row in said]

    def score_trajectories(
        self, said: Sequence[tuple[Prompt, Trajectory]]
    ) -> list[ScoredCompletion]:
        """Each conversation, with its problem, with its reward."""
        scores = self.scorer.score([sample_of(prompt, trajectory) for prompt, trajectory in said])
        return [
            _score_trajectory(trajectory, score)
            for (_, trajectory), score in zip(said, scores, strict=True)
        ]

    def close(self) -> None:
        """Close the rollout, and end the processes that judge; idempotent."""
        try:
            self.rollout.close()
        finally:
            self.scorer.close()


def sample_of(prompt: Prompt, said: ScoredCompletion | Trajectory) -> Sample:
    """What a reward is given of an answer to ``prompt``; of a trajectory with what its function noted."""
    noted = said.info if isinstance(said, Trajectory) else {}
    return Sample(
        prompt=prompt.rendered,
        completion=said.text,
        answer=prompt.answer,
        metadata={**prompt.metadata, **noted},
        finished=said.finished,
    )


def _score_trajectory(trajectory: Trajectory, score: Score) -> ScoredCompletion:
    figures = {
        "turns": float(trajectory.turns),
        "tool_tokens": float(trajectory.loss_weights.count(0.0)),
    }
    figures |= {name: float(trajectory.end == name) for name in ("limit", "timeout", "failed")}
    return ScoredCompletion(
        tokens=trajectory.tokens,
        log_probs=trajectory.log_probs,
        text=trajectory.text,
        finished=trajectory.finished,
        score=score,
        weight_versions=trajectory.weight_versions,
        loss_weights=trajectory.loss_weights,
        figures=figures,
        problem=trajectory.problem,
    )


def _finished(completion: Completion) -> bool:
    return completion.finish_reason == "stop"


def create_exporter(spec: RolloutSpec) -> WeightExporter:
    """What turns the engine's weights into what the rollout installs; on every rank of the engine."""
    section = spec.section
    return RolloutRegistry.create_exporter(
        name=section.name,
        device=spec.device,
        model=spec.engine_config.model,
        dtype=spec.dtype,
        quantization=section.quantization,
        options=section.options,
        **served_adapter(spec),
    )


def create_rollout(spec: RolloutSpec) -> Rollout:
    """Raises ``PluginError``; ``ConfigError`` for an option that the rollout does not take."""
    section = spec.section
    arguments = {**section.options, "dtype": spec.dtype, **served_adapter(spec)}
    if section.quantization != "none":
        arguments["quantization"] = section.quantization
    try:
        return RolloutRegistry.create(
            name=section.name,
            device=spec.device,
            model=spec.engine_config.model,
            pad_token_id=spec.tokenizer.pad_token_id,
            eos_token_ids=spec.tokenizer.stop_token_ids,
            batch_size=section.batch_size,
            **arguments,
        )
    except TypeError as error:  # an argument that its class does not take
        if "'quantization'" in str(error):
            raise ConfigError(
                "rollout.quantization",
                f"rollout {section.name!r} does not serve {section.quantization}",
                why=str(error),
                remedy="use rollout.name=vllm or sglang, or quantization: none",
            ) from error
        raise ConfigError(
            "rollout.options",
            f"rollout {section.name!r} cannot be made with {masked(section.options)}",
            why=str(error),
            remedy="see the rollout's own class for what it takes",
        ) from error


def served_adapter(spec: RolloutSpec) -> dict[str, LoraConfig]:
    """The argument ``lora`` of exporter and rollout; nothing where merged weights are served.

    Raises ``ConfigError`` where the engine has no adapter or cannot export its base, or the rollout serves none.
    """
    section, given, lora = spec.section, spec.engine, spec.engine_config.lora
    if section.lora == "merged":
        return {}

    def refuse(what: str, why: str, remedy: str) -> ConfigError:
        return ConfigError("rollout.lora", what, why=why, remedy=f"{remedy}rollout.lora: merged")

    if lora is None:
        raise refuse(
            "adapter, but the engine trains none",
            "engine.lora is null",
            "give engine.lora a rank, or ",
        )
    engine = EngineRegistry.resolve(
        model_type=given.model_type, backend=given.backend, device=spec.engine_device
    ).plugin
    if is_older(engine.contract, "1.1"):
        raise refuse(
            f"engine {given.backend!r} does not export the base weights of an adapter",
            f"it was written for contract {engine.contract}, that came with 1.1",
            "",
        )
    rollout = RolloutRegistry.resolve(backend=section.name, device=spec.device).plugin
    if Capability.LORA not in rollout.capabilities:
        raise refuse(
            f"rollout {section.name!r} serves no adapters",
            "it does not declare lora",
            "rollout.name: vllm, or ",
        )
    return {"lora": lora}
