"""Completions with their rewards, from all replicas of a rollout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine_api.comm import Comm
from engine_api.rollout import SamplingParams, SyncResult
from engine_trainer.config.sections import AgentSection, RewardSection, RolloutSection
from engine_trainer.data import ChatTokenizer, Prompt
from engine_trainer.errors import DataError
from engine_trainer.placement.groups import EngineGroup, RolloutGroup, by_replica
from engine_trainer.placement.replica import Group, RolloutSpec, ScoredCompletion
from engine_trainer.run.run import Run
from engine_trainer.sampling.failure_budget import Failures
from engine_trainer.telemetry.logs import Timers

__all__ = ["Group", "Sampler", "ScoredCompletion"]


class Sampler:
    """The rollout's replicas as the loop uses them, to generate and to score.

    Every method is called on all processes of the loop together and returns the same on all.

    Attributes:
        synced: ``sync/…`` of the newest weight sync: seconds by phase (the slowest replica's),
            bytes, tensors, quantized tensors, whether it was audited, and ``wire_bytes`` where the
            rollout is in processes of its own.
        failures: failures among the completions that the loop took; the loop counts them.
    """

    def __init__(
        self,
        *,
        rollouts: RolloutGroup,
        policy: EngineGroup,
        comm: Comm,
        tokenizer: ChatTokenizer,
        section: RolloutSection,
        timers: Timers,
        failures: Failures,
    ) -> None:
        self.failures = failures
        self.rollouts = rollouts
        self.policy = policy
        self.comm = comm
        self.tokenizer = tokenizer
        self.section = section
        self.timers = timers
        self.synced: dict[str, float] = {}

    @staticmethod
    def create(
        run: Run,
        tokenizer: ChatTokenizer,
        section: RolloutSection,
        reward: RewardSection,
        agent: AgentSection | None = None,
    ) -> Sampler:
        """Build the sampler of a run that has started.

        Raises ``PluginError``, ``ConfigError``: all processes together.
        """
        spec = RolloutSpec(
            section=section,
            reward=reward,
            tokenizer=tokenizer,
            engine=run.config.engine,
            engine_config=run.engine_config,
            engine_device=run.device,
            agent=agent,
            drop_bad_images=run.config.data.on_bad_image == "drop",
        )
        rollouts = run.launcher.rollouts(spec, run.timers)
        return Sampler(
            rollouts=rollouts,
            policy=run.policy,
            comm=run.comm,
            tokenizer=tokenizer,
            section=section,
            timers=run.timers,
            failures=Failures(reward, agent),
        )

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Wake the rollout and make sure it serves the policy's current weights.

        At the end of the context it frees its memory (``rollout.sleep``). With
        ``rollout.offload_engine`` the rollout has the engine's memory inside of the context.
        """
        with self.timers.phase("sync"):
            self.sync()
        yield
        if self.section.sleep:
            self.rollouts.sleep()
        if self.section.offload_engine:
            self.policy.reload()

    def sync(self) -> None:
        """Wake the rollout, and bring the policy's weights to it."""
        section = self.section
        if section.sleep:
            self.rollouts.wake_up(weights=True)
        self.synced = _sync_figures(self.rollouts.sync())
        if section.offload_engine:
            self.policy.offload()
        if section.sleep:
            # The caches come last, because a sync may need their memory.
            self.rollouts.wake_up(weights=False)

    def sample(
        self, prompts: Sequence[Prompt], *, n: int, temperature: float, seed: int
    ) -> list[Group]:
        """Generate ``n`` completions per prompt and score them, in the order of ``prompts``.

        A prompt with an image that cannot be decoded is left out with ``data.on_bad_image: drop``,
        so that there may be no group (``require_groups``).

        Called within ``serving``. Raises ``RolloutError``, ``RewardError``, ``ImageError``;
        ``RankFailure`` on the other ranks.
        """
        indices = by_replica(prompts, self.rollouts.size)
        local = [[prompts[i] for i in indices[replica]] for replica in self.rollouts.local_replicas]
        found = self.rollouts.generate_and_score(
            local, self.sampling(n=n, temperature=temperature, seed=seed)
        )
        completions: dict[int, list[ScoredCompletion]] = {}
        for own, rows in zip(indices, found, strict=True):
            completions |= dict(zip(own, rows, strict=True))
        return [
            Group(prompt=prompt, completions=completions[i])
            for i, prompt in enumerate(prompts)
            if completions[i]
        ]

    def sampling(self, *, n: int, temperature: float, seed: int) -> SamplingParams:
        """Return sampling parameters with the configuration's values for the rest."""
        section = self.section
        return SamplingParams(
            n=n,
            max_new_tokens=section.max_new_tokens,
            temperature=temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            stop_token_ids=self.tokenizer.stop_token_ids,
            seed=seed,
        )

    def close(self) -> None:
        """Close the rollout."""
        self.rollouts.close()


def require_groups(groups: Sequence[Group], what: str) -> None:
    """Raise ``DataError`` if bad images have left no group of a step or a set, ``what``."""
    if not groups:
        raise DataError(
            f"no image of {what} can be decoded",
            why="data.on_bad_image=drop has left out all of its prompts",
            remedy="see the warnings above, and correct the files",
        )


def _sync_figures(results: Sequence[SyncResult]) -> dict[str, float]:
    """Return ``sync/…``, each the largest of any replica."""
    phases = sorted({name for result in results for name in result.seconds})
    wire_bytes = max(r.wire_bytes for r in results)
    apart = {"sync/wire_bytes": float(wire_bytes)} if wire_bytes else {}
    return (
        apart
        | {f"sync/{name}_s": max(r.seconds.get(name, 0.0) for r in results) for name in phases}
        | {
            "sync/bytes": float(max(r.num_bytes for r in results)),
            "sync/tensors": float(max(r.num_tensors for r in results)),
            "sync/quantized": float(max(r.num_quantized for r in results)),
            "sync/audited": float(all(r.audited for r in results)),
        }
    )
