"""Completions with their rewards: rollouts on every data-parallel rank, the result on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine_api.capabilities import Capability
from engine_api.comm import Comm, together
from engine_api.config import LoraConfig
from engine_api.contract import Engine
from engine_api.errors import ConfigError
from engine_api.plugin import is_older
from engine_api.registry import EngineRegistry, RolloutRegistry
from engine_api.results import Topology
from engine_api.rollout import Completion, Rollout, SamplingParams, SyncResult, WeightExporter
from engine_trainer.data import ChatTokenizer, Prompt
from engine_trainer.logs import Timers
from engine_trainer.rewards import Sample, Score, Scorer
from engine_trainer.runtime import Run
from engine_trainer.sections import RewardSection, RolloutSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One completion, judged."""

    tokens: list[int]  # the stop token included
    log_probs: list[float]  # the rollout's, one a token
    text: str
    finished: bool  # it came to a stop by itself
    score: Score


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The answers to one prompt."""

    prompt: Prompt
    answers: list[Answer]


class Sampler:
    """Generates and judges. Every method is called on all ranks together and returns the same on all.

    A rollout runs on the primary rank of each data-parallel rank; ``rollout`` is None elsewhere. Every rank exports.

    Attributes:
        synced: ``sync/…`` of the newest weight sync: seconds by phase (the slowest rank's), bytes, tensors, quantized
            tensors and whether it was audited.
    """

    def __init__(
        self, *, rollout: Rollout | None, exporter: WeightExporter, comm: Comm, topology: Topology, tokenizer: ChatTokenizer,
        scorer: Scorer, section: RolloutSection, timers: Timers,
    ) -> None:  # fmt: skip
        assert (rollout is not None) == topology.is_primary, "rollouts belong to primary ranks"
        self.rollout, self.exporter, self.comm, self.topology = rollout, exporter, comm, topology
        self.tokenizer, self.scorer, self.section, self.timers = tokenizer, scorer, section, timers
        self.synced: dict[str, float] = {}

    @staticmethod
    def create(run: Run, tokenizer: ChatTokenizer, section: RolloutSection, reward: RewardSection) -> Sampler:
        """For a run that has started. Raises ``PluginError``, ``ConfigError``: all ranks together."""
        primary = run.engine.topology.is_primary

        def build() -> tuple[Scorer, WeightExporter, Rollout | None]:
            scorer = Scorer.from_section(reward)
            exporter = _create_exporter(run, section)
            return scorer, exporter, _create_rollout(run, tokenizer, section) if primary else None

        made: list[tuple[Scorer, WeightExporter, Rollout | None]] = []
        together(run.comm, lambda: made.append(build()))  # the objects themselves do not travel
        scorer, exporter, rollout = made[0]
        return Sampler(rollout=rollout, exporter=exporter, comm=run.comm, topology=run.engine.topology, tokenizer=tokenizer,
                       scorer=scorer, section=section, timers=run.timers)  # fmt: skip

    @contextmanager
    def serving(self, engine: Engine) -> Iterator[None]:
        """The rollout awake with the engine's weights of now; afterwards it gives its memory back (``rollout.sleep``)."""
        with self.timers.phase("sync"):
            self._wake(weights=True)
            self.synced = _sync_figures(together(self.comm, lambda: self._sync(engine)))
            self._wake(weights=False)  # caches only now: a sync may need their memory
        yield
        if self.rollout is not None and self.section.sleep:
            self.rollout.sleep()

    def sample(self, prompts: Sequence[Prompt], *, n: int, temperature: float, seed: int) -> list[Group]:
        """``n`` judged answers to each prompt, in the order of ``prompts``; within ``serving``.

        Raises ``RolloutError``, ``RewardError``; ``RankFailure`` on the other ranks.
        """
        section = self.section
        sampling = SamplingParams(n=n, max_new_tokens=section.max_new_tokens, temperature=temperature, top_p=section.top_p,
                                  top_k=section.top_k, stop_token_ids=self.tokenizer.stop_token_ids, seed=seed)  # fmt: skip
        rows = together(self.comm, lambda: self._mine(prompts, sampling))
        found = {index: answers for row in rows for index, answers in row.items()}
        return [Group(prompt=prompt, answers=found[index]) for index, prompt in enumerate(prompts)]

    def close(self) -> None:
        """Close the rollout and the exporter."""
        if self.rollout is not None:
            self.rollout.close()
        self.exporter.close()

    def _wake(self, *, weights: bool) -> None:
        """The weights' memory, or the caches'; changes nothing where the rollout is awake."""

        def wake() -> None:
            if self.rollout is not None:
                self.rollout.wake_up(weights=weights, kv_cache=not weights)

        if self.section.sleep:
            together(self.comm, wake)

    def _sync(self, engine: Engine) -> SyncResult | None:
        export = self.exporter.export(engine)
        try:
            return None if self.rollout is None else self.rollout.update_weights(export, engine.weight_version)
        finally:
            for _ in export:  # ranks without a rollout gather along, and so does one whose sync failed
                pass

    def _mine(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> dict[int, list[Answer]]:
        if self.rollout is None:
            return {}
        mine = range(self.topology.dp_rank, len(prompts), self.topology.dp_size)
        with self.timers.phase("generate"):
            completions = self.rollout.generate([prompts[i].tokens for i in mine], sampling)
        answers: dict[int, list[Answer]] = {index: [] for index in mine}
        with self.timers.phase("reward"):
            for completion, answer in self._judge([prompts[i] for i in mine], completions):
                answers[mine[completion.prompt_index]].append(answer)
        return answers

    def _judge(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> Iterator[tuple[Completion, Answer]]:
        for completion in completions:
            prompt = prompts[completion.prompt_index]
            text, finished = self.tokenizer.decode(completion.tokens), completion.finish_reason == "stop"
            sample = Sample(prompt=prompt.rendered, completion=text, answer=prompt.answer, metadata=prompt.metadata,
                            finished=finished)  # fmt: skip
            score = self.scorer.score([sample])[0]
            yield completion, Answer(tokens=completion.tokens, log_probs=completion.log_probs, text=text, finished=finished,
                                     score=score)  # fmt: skip


def _create_exporter(run: Run, section: RolloutSection) -> WeightExporter:
    return RolloutRegistry.create_exporter(
        name=section.name, device=_device(run, section), model=run.engine_config.model, dtype=_dtype(run, section),
        quantization=section.quantization, options=section.options, **_served_adapter(run, section),
    )  # fmt: skip


def _create_rollout(run: Run, tokenizer: ChatTokenizer, section: RolloutSection) -> Rollout:
    arguments = {**section.options, "dtype": _dtype(run, section), **_served_adapter(run, section)}
    if section.quantization != "none":
        arguments["quantization"] = section.quantization
    try:
        return RolloutRegistry.create(
            name=section.name, device=_device(run, section), model=run.engine_config.model, pad_token_id=tokenizer.pad_token_id,
            eos_token_ids=tokenizer.stop_token_ids, batch_size=section.batch_size, **arguments,
        )  # fmt: skip
    except TypeError as error:  # an argument that its class does not take
        if "'quantization'" in str(error):
            raise ConfigError("rollout.quantization", f"rollout {section.name!r} does not serve {section.quantization}",
                              why=str(error), remedy="use rollout.name=vllm or sglang, or quantization: none") from error  # fmt: skip
        raise ConfigError("rollout.options", f"rollout {section.name!r} cannot be made with {dict(section.options)}",
                          why=str(error), remedy="see the rollout's own class for what it takes") from error  # fmt: skip


def _served_adapter(run: Run, section: RolloutSection) -> dict[str, LoraConfig]:
    """The argument ``lora`` of exporter and rollout; nothing where merged weights are served.

    Raises ``ConfigError`` where the engine has no adapter or cannot export its base, or the rollout serves none.
    """
    if section.lora == "merged":
        return {}
    given, lora = run.config.engine, run.engine_config.lora

    def refuse(what: str, why: str, remedy: str) -> ConfigError:
        return ConfigError("rollout.lora", what, why=why, remedy=f"{remedy}rollout.lora: merged")

    if lora is None:
        raise refuse("adapter, but the engine trains none", "engine.lora is null", "give engine.lora a rank, or ")
    engine = EngineRegistry.resolve(model_type=given.model_type, backend=given.backend, device=run.device).plugin
    if is_older(engine.contract, "1.1"):
        raise refuse(f"engine {given.backend!r} does not export the base weights of an adapter",
                     f"it was written for contract {engine.contract}, that came with 1.1", "")  # fmt: skip
    rollout = RolloutRegistry.resolve(backend=section.name, device=_device(run, section)).plugin
    if Capability.LORA not in rollout.capabilities:
        raise refuse(
            f"rollout {section.name!r} serves no adapters", "it does not declare lora", "rollout.name: vllm, or "
        )
    return {"lora": lora}


# Unless told otherwise a rollout computes where and as the engine does: the nearer, the smaller the mismatch.


def _device(run: Run, section: RolloutSection) -> str:
    return run.device if section.device == "auto" else section.device


def _dtype(run: Run, section: RolloutSection) -> str:
    compute = run.engine_config.precision.compute
    return str(section.options.get("dtype", "bfloat16" if compute == "float8" else compute))


def _sync_figures(results: Sequence[SyncResult | None]) -> dict[str, float]:
    """``sync/…``, the largest of any rank."""
    given = [result for result in results if result is not None]
    phases = sorted({name for result in given for name in result.seconds})
    return {f"sync/{name}_s": max(r.seconds.get(name, 0.0) for r in given) for name in phases} | {
        "sync/bytes": float(max(r.num_bytes for r in given)), "sync/tensors": float(max(r.num_tensors for r in given)),
        "sync/quantized": float(max(r.num_quantized for r in given)),
        "sync/audited": float(all(r.audited for r in given)),
    }  # fmt: skip
