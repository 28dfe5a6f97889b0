"""One replica of a rollout, which generates completions and scores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from engine_api.capabilities import Capability
from engine_api.codec import register
from engine_api.config import EngineConfig, LoraConfig, check_choice
from engine_api.errors import (
    ConfigError,
    PluginError,
    PluginUnavailable,
    UnsupportedCapability,
)
from engine_api.plugin import EnginePlugin, is_older
from engine_api.registry import EngineRegistry, RolloutRegistry
from engine_api.rollout import (
    Completion,
    Rollout,
    SamplingParams,
    VisionRollout,
    WeightExporter,
)
from engine_trainer.agent import AgentLoop, Trajectory
from engine_trainer.config.secrets import masked
from engine_trainer.config.sections import (
    AgentSection,
    EngineSection,
    RewardSection,
    RolloutSection,
)
from engine_trainer.data import ChatTokenizer, Prompt
from engine_trainer.data.datasets import make_prompt_images
from engine_trainer.rewards import Sample, Score, Scorer
from engine_trainer.telemetry.logs import Timers
from engine_trainer.utils.completions import require_completions
from engine_trainer.utils.plugins import list_options

if TYPE_CHECKING:
    import torch


@register
@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredCompletion:
    """One completion with its score."""

    tokens: list[int]
    """Token ids, the stop token included."""
    log_probs: list[float]
    """The rollout's log-prob of each token."""
    text: str
    finished: bool
    """True if the completion stopped by itself."""
    score: Score
    weight_versions: list[int] = field(default_factory=list[int])
    """The version of the weights that made each token."""
    loss_weights: list[float] | None = None
    """One per token, 0 where a tool made it.

    None if the model made all tokens.
    """
    figures: dict[str, float] = field(default_factory=dict[str, float])
    """Figures of an agent's trajectory."""
    problem: str = ""
    """The error that the agent's function raised, as text.

    It is empty without an error.
    """
    routed_experts: torch.Tensor | None = field(default=None, repr=False, compare=False)
    """Experts of each layer by token of the prompt and of ``tokens`` (``Completion``).

    It may end before the last tokens, whose experts are not known then.
    """
    finish_reason: str = ""
    """The rollout's reason of the end (``FinishReason``), or ``stop`` or the agent's (``End``)."""
    passes: int = 0
    """Forward passes that generated the tokens (``Completion``), 0 where they are not counted."""

    @property
    def num_generated(self) -> int:
        """The number of tokens that the model made."""
        return len(self.tokens) if self.loss_weights is None else int(sum(self.loss_weights))

    @property
    def versions(self) -> list[int]:
        """The weight version of each token of the model.

        A tool's tokens have none.
        """
        if self.loss_weights is None:
            return self.weight_versions
        return [
            v for v, weight in zip(self.weight_versions, self.loss_weights, strict=True) if weight
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The completions of one prompt."""

    prompt: Prompt
    completions: list[ScoredCompletion]


Scored = list[ScoredCompletion] | None
"""The completions of one prompt, or None where it was left out for an image."""


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """All that a process needs to build a replica and the exporter that feeds it."""

    section: RolloutSection
    reward: RewardSection
    tokenizer: ChatTokenizer
    engine: EngineSection
    engine_config: EngineConfig
    engine_device: str
    agent: AgentSection | None = None
    drop_bad_images: bool = False
    """True leaves out prompts with images that cannot be decoded (``data.on_bad_image``)."""
    in_flight: bool | Literal["auto"] = False
    """True if the rollout must take weights while it generates, ``auto`` if it is to where it can
    (``overlap.in_flight``)."""

    @property
    def device(self) -> str:
        """The device type of the rollout."""
        return rollout_device(self.section, self.engine_device)

    @property
    def dtype(self) -> str:
        """The dtype that the rollout computes in."""
        return rollout_dtype(self.section, self.engine_config)


# By default a rollout computes on the engine's device and in its dtype, for a small mismatch.
DTYPES = ("float32", "bfloat16", "float16")


def require_vision(section: RolloutSection, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts with images or videos for a rollout that takes none, before it is loaded.

    A rollout that is chosen later (``auto``) or is not installed here is refused where it is known.

    Raises ``UnsupportedCapability``.
    """
    shown = [prompt for prompt in prompts if prompt.images is not None]
    moving = [prompt for prompt in shown if prompt.images is not None and prompt.images.has_videos]
    for found, row in RolloutRegistry.rows():
        plugin = found.plugin
        if section.name not in row.backends or plugin is None:
            continue
        for noun, capability, given in (
            ("images", Capability.VISION, shown),
            ("videos", Capability.VIDEO, moving),
        ):
            if given and capability not in plugin.capabilities:
                raise UnsupportedCapability(
                    capability,
                    where=f"rollout {section.name!r}",
                    why=f"{given[0].file}:{given[0].number} has {noun}, and it takes none",
                    remedy=f"rollout.name: {LOCAL}, or remove the rows with {noun}",
                )


def rollout_device(section: RolloutSection, engine_device: str) -> str:
    """Return the device type of a rollout that serves an engine."""
    return engine_device if section.device == "auto" else section.device


def rollout_dtype(section: RolloutSection, engine_config: EngineConfig) -> str:
    """Return the dtype the rollout computes in.

    Raises ``ConfigError`` for an unknown dtype.
    """
    compute = engine_config.precision.compute
    dtype = section.options.get("dtype", "bfloat16" if compute == "float8" else compute)
    check_choice("rollout.options.dtype", dtype, tuple(DTYPES))
    return str(dtype)


def records_experts(rollout: str) -> bool:
    """Return whether a rollout records the experts of each token, as far as is known here.

    A rollout that is not installed here may be where the replicas run, and is asked there.
    """
    plugins = [found.plugin for found, row in RolloutRegistry.rows() if rollout in row.backends]
    return all(
        plugin is not None and Capability.ROUTER_REPLAY in plugin.capabilities for plugin in plugins
    )


LOCAL = "local"
"""Name of the rollout that generates in the trainer's process."""


def why_unusable(section: RolloutSection, device: str) -> str:
    """Return why this process cannot use the rollout of a section as it asks, "" where it can."""
    try:
        found = RolloutRegistry.resolve(backend=section.name, device=device)
    except PluginUnavailable as error:
        return "; ".join(error.trace) or error.what
    except PluginError as error:
        return error.what
    return why_unfit(section, found.plugin)


def why_unfit(section: RolloutSection, plugin: EnginePlugin) -> str:
    """Return what the rollout of a section lacks of what the section asks for, "" if nothing.

    ``plugin`` is its descriptor.
    """
    is_local = section.name == LOCAL
    known = {"dtype", "url"} if section.name.endswith("-server") else {"dtype"}
    known |= list_options(plugin, plugin.name)
    # A rollout without a dataclass of options may take any, except for the trainer's own.
    unknown = sorted(section.options.keys() - known) if plugin.options or is_local else []
    lacking = {
        "it serves no adapters (rollout.lora)": section.lora == "adapter"
        and Capability.LORA not in plugin.capabilities,
        "it records no experts (rollout.routed_experts)": section.routed_experts == "replay"
        and Capability.ROUTER_REPLAY not in plugin.capabilities,
        f"it does not serve {section.quantization} (rollout.quantization)": is_local
        and section.quantization != "none",
        f"it has no option {', '.join(unknown)} (rollout.options)": bool(unknown),
    }
    return ", ".join(what for what, holds in lacking.items() if holds)


class Replica:
    """A rollout and the rewards of its completions.

    With an agent it generates whole conversations. With ``drop_bad_images`` a prompt with an image
    that cannot be decoded is left out.

    Args:
        why_sliced: why the rollout takes no weights while it generates, None if it does.
    """

    def __init__(
        self,
        rollout: Rollout,
        scorer: Scorer,
        tokenizer: ChatTokenizer,
        timers: Timers,
        agent: AgentLoop | None = None,
        *,
        drop_bad_images: bool = False,
        why_sliced: str | None = "it was made without in_flight",
    ) -> None:
        self.rollout = rollout
        self.why_sliced = why_sliced
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.timers = timers
        self.agent = agent
        self._drop_bad_images = drop_bad_images

    @staticmethod
    def create(spec: RolloutSpec, timers: Timers) -> Replica:
        """Build a replica. Raises ``PluginError``, ``ConfigError``."""
        with ExitStack() as stack:
            # The scorer comes first, because a mistake there costs nothing yet.
            scorer = Scorer.from_section(spec.reward)
            stack.callback(scorer.close)
            agent = AgentLoop(spec.agent, spec.tokenizer) if spec.agent else None
            rollout, why_sliced = create_rollout_in_flight(spec)
            made = Replica(
                rollout,
                scorer,
                spec.tokenizer,
                timers,
                agent,
                drop_bad_images=spec.drop_bad_images,
                why_sliced=why_sliced,
            )
            stack.pop_all()
        return made

    def generate_and_score(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[Scored]:
        """Generate ``sampling.n`` completions per prompt and score them.

        A prompt that is left out for an image has None.

        Raises ``RolloutError``, ``RewardError``, ``AgentError``.
        """
        if self.agent is not None:
            return [*self._converse(self.agent, prompts, sampling)]
        with self.timers.phase("generate"):
            left, completions = self._generate(prompts, sampling)
        with self.timers.phase("reward"):
            scored = self.score([prompts[c.prompt_index] for c in completions], completions)
        by_prompt: dict[int, list[ScoredCompletion]] = {index: [] for index in left}
        for completion, scored_completion in zip(completions, scored, strict=True):
            by_prompt[completion.prompt_index].append(scored_completion)
        return [by_prompt.get(index) for index in range(len(prompts))]

    def _generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> tuple[list[int], list[Completion]]:
        """Generate, with the images of the prompts where any has some.

        The first value has the indices of the prompts that are not left out.

        Raises ``ImageError`` for an image that cannot be decoded, unless its prompt is left out.
        """
        left, images = make_prompt_images(prompts, drop=self._drop_bad_images)
        tokens = [prompts[index].tokens for index in left]
        if images is None:
            found = self.rollout.generate(tokens, sampling)
        else:
            # Rows with images are refused before a rollout without the capability is built.
            rollout = cast("VisionRollout", self.rollout)
            # Without any prompt, too: replicas may share a server that all of them call.
            found = rollout.generate(tokens, sampling, images=images)
        found = [replace(c, prompt_index=left[c.prompt_index]) for c in found]
        require_completions(found, left, sampling.n)
        return left, found

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[ScoredCompletion]:
        """Score each completion.

        ``prompts`` has the prompt of each.
        """
        texts = [self.tokenizer.decode(c.tokens) for c in completions]
        samples = [
            Sample(
                prompt=p.rendered,
                completion=text,
                answer=p.answer,
                metadata=p.metadata,
                finished=_finished(c),
                messages=p.messages,
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
                routed_experts=c.routed_experts,
                finish_reason=c.finish_reason,
                passes=c.passes,
            )
            for c, text, score in zip(completions, texts, scores, strict=True)
        ]

    def _converse(
        self, agent: AgentLoop, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[list[ScoredCompletion]]:
        with self.timers.phase("generate"):
            trajectories = agent.run(self.rollout, prompts, sampling)
        with self.timers.phase("reward"):
            pairs = [(p, t) for p, row in zip(prompts, trajectories, strict=True) for t in row]
            scored = iter(self.score_trajectories(pairs))
            return [[next(scored) for _ in row] for row in trajectories]

    def score_trajectories(
        self, pairs: Sequence[tuple[Prompt, Trajectory]]
    ) -> list[ScoredCompletion]:
        """Score each conversation, given with its prompt."""
        scores = self.scorer.score([sample_of(prompt, trajectory) for prompt, trajectory in pairs])
        return [
            _score_trajectory(trajectory, score)
            for (_, trajectory), score in zip(pairs, scores, strict=True)
        ]

    def close(self) -> None:
        """Close the rollout, and end the processes of the rewards (idempotent)."""
        try:
            self.rollout.close()
        finally:
            self.scorer.close()


def sample_of(prompt: Prompt, completion: ScoredCompletion | Trajectory) -> Sample:
    """Return the sample that a reward receives for a completion of ``prompt``.

    For a trajectory it includes the info that its function noted.
    """
    noted: Mapping[str, Any] = {}
    messages = prompt.messages
    if isinstance(completion, Trajectory):
        noted = completion.info
        # The completion is not the response to these messages alone.
        messages = ()
    return Sample(
        prompt=prompt.rendered,
        completion=completion.text,
        answer=prompt.answer,
        metadata={**prompt.metadata, **noted},
        finished=completion.finished,
        messages=messages,
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
        routed_experts=trajectory.routed_experts,
        finish_reason="stop" if trajectory.finished else trajectory.end,
        passes=trajectory.passes,
    )


def _finished(completion: Completion) -> bool:
    return completion.finish_reason == "stop"


def create_exporter(spec: RolloutSpec) -> WeightExporter:
    """Build the exporter of the engine's weights in the rollout's form, on every engine rank."""
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


def create_rollout_in_flight(spec: RolloutSpec) -> tuple[Rollout, str | None]:
    """Build the rollout, and say why it takes no weights while it generates, None if it does.

    Raises the errors of ``create_rollout``; ``UnsupportedCapability`` where ``spec.in_flight`` is
    true and it cannot.
    """
    if spec.in_flight is False:
        return create_rollout(spec), "overlap.in_flight is false"
    if spec.agent is not None:
        return create_rollout(spec), "the turns of an agent are generated in slices"
    try:
        _require_in_flight(spec)
        return create_rollout(spec, in_flight=True), None
    except UnsupportedCapability as error:
        if error.capability != "in_flight" or spec.in_flight is True:
            raise
        why = f"{error.where}: {error.why}"
    return create_rollout(spec), why


def _require_in_flight(spec: RolloutSpec) -> None:
    name = spec.section.name
    if not RolloutRegistry.resolve(backend=name, device=spec.device).plugin.in_flight:
        raise UnsupportedCapability(
            "in_flight",
            where=f"rollout {name!r}",
            why="its descriptor does not declare it",
            remedy="rollout.name: vllm, or leave overlap.in_flight out",
        )


def create_rollout(spec: RolloutSpec, *, in_flight: bool = False) -> Rollout:
    """Build the rollout.

    ``in_flight``: it takes weights while it generates.

    Raises ``PluginError``; ``ConfigError`` for an option that the rollout does not take.
    """
    section = spec.section
    arguments = {**section.options, "dtype": spec.dtype, **served_adapter(spec)}
    if in_flight:
        arguments["in_flight"] = True
    if spec.engine_config.router_replay:
        arguments["routed_experts"] = True
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
    except TypeError as error:
        # The rollout's class does not take an argument.
        if "'quantization'" in str(error):
            raise ConfigError(
                "rollout.quantization",
                f"rollout {section.name!r} does not serve {section.quantization}",
                why=str(error),
                remedy="use rollout.name=vllm or sglang, or quantization: none",
            ) from error
        if "'in_flight'" in str(error):
            raise ConfigError(
                "overlap.in_flight",
                f"rollout {section.name!r} declares in_flight, and does not take the argument",
                why=str(error),
                remedy="correct the rollout (docs/contract.md), or overlap.in_flight: false",
            ) from error
        said = "unexpected keyword argument '{}'"
        unknown = [name for name in section.options if said.format(name) in str(error)]
        raise ConfigError(
            f"rollout.options.{unknown[0]}" if unknown else "rollout.options",
            f"rollout {section.name!r} has no such option"
            if unknown
            else f"rollout {section.name!r} cannot be created with {masked(section.options)}",
            why=str(error),
            remedy="leave it out, or choose a rollout that has it (docs/configuration.md)",
        ) from error


def check_adapter(section: RolloutSection, lora: LoraConfig | None) -> None:
    """Raise ``ConfigError`` if a rollout is to serve an adapter that the engine does not have."""
    if section.lora == "adapter" and lora is None:
        raise ConfigError(
            "rollout.lora",
            "adapter, but the engine trains none",
            why="engine.lora is null",
            remedy="give engine.lora a rank, or rollout.lora: merged",
        )


def served_adapter(spec: RolloutSpec) -> dict[str, LoraConfig]:
    """Return the argument ``lora`` of exporter and rollout.

    It is empty where merged weights are served.

    Raises ``ConfigError`` where the engine has no adapter or cannot export its base, or the rollout
    serves none.
    """
    section = spec.section
    given = spec.engine
    lora = spec.engine_config.lora
    if section.lora == "merged":
        return {}

    def refuse(what: str, why: str, remedy: str) -> ConfigError:
        return ConfigError("rollout.lora", what, why=why, remedy=f"{remedy}rollout.lora: merged")

    check_adapter(section, lora)
    assert lora is not None
    engine = EngineRegistry.resolve(
        model_type=given.model_type, backend=given.backend, device=spec.engine_device
    ).plugin
    if is_older(engine.contract, "1.1"):
        raise refuse(
            f"engine {given.backend!r} does not export the base weights of an adapter",
            f"it was written for contract {engine.contract}; this export came with 1.1",
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
