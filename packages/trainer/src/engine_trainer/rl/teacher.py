"""Sources of a teacher's log-probs or distributions on the policy's own completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import torch

from engine_api.batch import TEACHER_STATES, TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS
from engine_api.capabilities import Capability, unsupported
from engine_api.comm import Comm, together
from engine_api.distillation import Teaching
from engine_api.errors import ConfigError
from engine_trainer.config import DataSection, EngineSection, RLConfig
from engine_trainer.config.engine_keys import named_below
from engine_trainer.data import ChatTokenizer, load_tokenizer
from engine_trainer.placement.groups import EngineGroup, Launcher, run_together
from engine_trainer.placement.replica import Group
from engine_trainer.rl.companion import check_companion
from engine_trainer.rl.credit import CompletionIndex
from engine_trainer.rl.partition import Partition, TrainingDocument
from engine_trainer.rl.served_teacher import TeacherClient
from engine_trainer.run.reference import log_probs_of
from engine_trainer.run.run import Run

T = TypeVar("T")
KEY = "algorithm.teacher"
SAMPLED = "teacher_log_probs"
"""Field of a batch with the log-probs of the sampled tokens."""


class Teacher(Protocol):
    """A source of a teacher's log-probs or distributions at the tokens of completions."""

    @property
    def engines(self) -> EngineGroup | None:
        """The teacher's own engine, None for one that has none."""
        ...

    def fields(
        self,
        documents: Sequence[TrainingDocument],
        partition: Partition,
        temperature: float,
    ) -> dict[str, list[torch.Tensor]]:
        """Return the fields that the loss reads, each for every local dp shard.

        They are ``teacher_log_probs`` ``[T]`` float32 of the sampled tokens, or those of
        ``engine_api.distillation``, and defined at the tokens of completions alone. Called on all
        processes of the loop together.

        Args:
            documents: the teacher's documents, which end in the same completions as those of the
                partition.
            partition: the policy's partition.
            temperature: divisor of the logits.
        """
        ...

    def begin_updates(self, policy: EngineGroup) -> None:
        """Give the policy what its updates need in addition to the fields."""
        ...

    def end_updates(self, policy: EngineGroup) -> None:
        """Drop what ``begin_updates`` gave."""
        ...

    def close(self) -> None:
        """Free what the teacher holds (idempotent)."""
        ...


def create_teacher(run: Run, config: RLConfig, teaching: Teaching | None) -> Teacher | None:
    """Build the teacher that the configuration names, or return None without one.

    ``teaching`` is that of ``teaching_of_run``.
    """
    section = config.algorithm.teacher
    if section is None:
        return None
    if section.url is not None:
        return ServedTeacher(TeacherClient(section), run.comm, teaching)
    if section.engine is None:
        return EngineTeacher(run.policy, run, config.engine, config)
    engine = section.engine.engine(config.engine)
    with named_below(f"{KEY}.engine"):
        device, _ = run.launcher.resolve(engine)
        built = engine.build(seed=config.run.seed, total_steps=run.total_steps)
        engines = run.launcher.engines(engine, built, device)
    return EngineTeacher(engines, run, engine, config)


def teaching_of_run(config: RLConfig) -> Teaching | None:
    """Return the divergence that the engine computes, or None without or for sampled tokens.

    It is over the tokens of the policy's tokenizer.
    """
    section = config.algorithm.teacher
    if section is None or section.chosen_kl == "sampled":
        return None
    return Teaching(
        vocabulary=load_tokenizer(config.data, config.engine.model).vocabulary,
        divergence=section.divergence,
        beta=section.beta,
        top=section.chosen_kl == "top_k",
    )


class EngineTeacher:
    """A teacher on an engine of its own, or the policy itself.

    Args:
        engines: the engine.
        run: the run, whose policy has been built.
        engine: the section of the teacher's engine, the policy's where that is the teacher.
        config: the run's configuration, which has a teacher.
    """

    def __init__(
        self, engines: EngineGroup, run: Run, engine: EngineSection, config: RLConfig
    ) -> None:
        section = config.algorithm.teacher
        assert section is not None
        self._engines = engines
        self._comm = run.comm
        self._is_policy = section.is_policy
        self._gives_states = section.chosen_kl == "full"
        # True if the engine computes a group's prompt once (see ``Partition``).
        self._keeps_groups = engine.memory.share_prefixes
        shares = config.engine.memory.share_prefixes
        own = (engines.dp_size, list(engines.local_dp_ranks), self._keeps_groups)
        policy = (run.policy.dp_size, list(run.policy.local_dp_ranks), shares)
        alike = all(run.comm.all_gather(own == policy))
        # The policy's dp shards are then the teacher's, so that nothing travels.
        self._shares_partition = alike and not section.has_own_prompts

    @property
    def engines(self) -> EngineGroup | None:
        """The teacher's own engine, None where the policy is the teacher."""
        return None if self._is_policy else self._engines

    def fields(
        self,
        documents: Sequence[TrainingDocument],
        partition: Partition,
        temperature: float,
    ) -> dict[str, list[torch.Tensor]]:
        """Return hidden states, or the log-probs of the sampled tokens (see ``Teacher``)."""
        own = partition
        if not self._shares_partition:
            own = Partition(self._engines, [documents], keeps_groups=self._keeps_groups)
        packed = run_together(self._comm, own.pack)
        bare = [batch.keep_fields() for batch in packed]
        if self._gives_states:
            return {TEACHER_STATES: own.move(self._engines.infer_states(bare), partition)}
        outputs = self._engines.infer(bare, temperature=temperature)
        return {SAMPLED: own.move([log_probs_of(o) for o in outputs], partition)}

    def begin_updates(self, policy: EngineGroup) -> None:
        """Give the policy the teacher's current output head."""
        if self._gives_states:
            policy.learn_from(self._engines)

    def end_updates(self, policy: EngineGroup) -> None:
        """Drop the teacher's output head from the policy's engine."""
        if self._gives_states:
            policy.learn_from(None)

    def close(self) -> None:
        """Close the teacher's own engine."""
        if not self._is_policy:
            self._engines.close()


class ServedTeacher:
    """A teacher behind a URL, which the first process asks for all completions of the step.

    Its numbers are at temperature 1.
    """

    engines: EngineGroup | None = None

    def __init__(self, client: TeacherClient, comm: Comm, teaching: Teaching | None) -> None:
        self._client = client
        self._comm = comm
        self._teaching = teaching

    def fields(
        self,
        documents: Sequence[TrainingDocument],
        partition: Partition,
        temperature: float,
    ) -> dict[str, list[torch.Tensor]]:
        """Return the best tokens, or the log-probs of the sampled ones (see ``Teacher``)."""
        del temperature
        tokens = [d.tokens for d in documents]
        teaching = self._teaching
        if teaching is None:
            rows = self._ask(lambda: self._client.log_probs(tokens))
            return {SAMPLED: partition.place(_by_index(documents, rows))}
        best = self._ask(lambda: self._client.best_tokens(tokens, teaching.vocabulary))
        ids = _by_index(documents, [row[0] for row in best])
        log_probs = _by_index(documents, [row[1] for row in best])
        return {
            TEACHER_TOP_IDS: partition.place(ids, missing=-1),
            TEACHER_TOP_LOG_PROBS: partition.place(log_probs),
        }

    def _ask(self, question: Callable[[], list[T]]) -> list[T]:
        """Return the first process's answer on all of them."""
        rows = together(self._comm, lambda: None if self._comm.rank else question())[0]
        assert rows is not None
        return rows

    def begin_updates(self, policy: EngineGroup) -> None:
        """Give nothing (see ``Teacher``)."""

    def end_updates(self, policy: EngineGroup) -> None:
        """Drop nothing (see ``Teacher``)."""

    def close(self) -> None:
        """Hold nothing (see ``Teacher``)."""


def _by_index(
    documents: Sequence[TrainingDocument], rows: Sequence[torch.Tensor]
) -> dict[CompletionIndex, torch.Tensor]:
    return {d.index: row for d, row in zip(documents, rows, strict=True)}


def teacher_documents(
    documents: Sequence[TrainingDocument], groups: Sequence[Group]
) -> list[TrainingDocument]:
    """Return the documents with the teacher's prompt in place of the policy's."""
    found: list[TrainingDocument] = []
    for document in documents:
        prompt = groups[document.group].prompt
        if prompt.teacher_tokens is None:
            found.append(document)
            continue
        begin = len(prompt.tokens)
        before = [0.0] * len(prompt.teacher_tokens)
        tokens = [*prompt.teacher_tokens, *document.tokens[begin:]]
        found.append(
            replace(
                document,
                tokens=tokens,
                mask=[*before, *document.mask[begin:]],
                rollout_log_probs=[0.0] * len(tokens),
                weight_versions=None,
                routed_experts=None,
            )
        )
    return found


def check_teacher(
    config: RLConfig, launcher: Launcher, ranks: int, tokenizer: ChatTokenizer
) -> None:
    """Refuse a teacher that does not fit the policy, before anything is loaded.

    Raises ``ConfigError`` for another tokenizer, sizes that are not those of the policy's ranks,
    and a server that cannot be asked; ``UnsupportedCapability``, ``PluginError``.
    """
    section = config.algorithm.teacher
    if section is None:
        return
    if section.chosen_kl != "sampled":
        _check_distils(config.engine, launcher)
    if section.url is not None:
        client = TeacherClient(section)
        together(
            launcher.comm,
            lambda: None if launcher.comm.rank else client.check_tokenizer(tokenizer.tokenizer),
        )
    if section.engine is not None:
        engine = section.engine.engine(config.engine)
        check_companion(engine, config, launcher, ranks, f"{KEY}.engine")
        if section.chosen_kl == "full":
            _check_distils(engine, launcher)
        # Only the vocabulary is compared, so that the policy's template does not matter.
        with named_below(f"{KEY}.engine"):
            teacher = load_tokenizer(DataSection(source="-"), engine.model)
        check_same_vocabulary(
            tokenizer.tokenizer.get_vocab(),
            teacher.tokenizer.get_vocab(),
            config.data.tokenizer or config.engine.model.path,
            engine.model.path,
        )


def _check_distils(engine: EngineSection, launcher: Launcher) -> None:
    """Raise ``UnsupportedCapability`` for an engine that gives or takes no distributions."""
    _, declared = launcher.resolve(engine)
    if Capability.DISTILLATION not in declared:
        raise unsupported(
            Capability.DISTILLATION,
            engine.backend,
            declared,
            off=f"set {KEY}.kl: sampled, which compares the sampled tokens alone",
        )


def check_same_vocabulary(
    own: Mapping[str, int], teacher: Mapping[str, int], policy_path: str, teacher_path: str
) -> None:
    """Raise ``ConfigError`` unless a token has the same id in both vocabularies.

    Args:
        own: the policy's token → id.
        teacher: the teacher's.
        policy_path, teacher_path: the places of the tokenizers, for the error.
    """
    different = sorted(
        (token for token in {*own, *teacher} if own.get(token) != teacher.get(token)),
        key=lambda token: (own.get(token, len(own)), token),
    )
    if not different:
        return
    token = different[0]
    ids = [
        ("no id" if one is None else f"id {one}") for one in (own.get(token), teacher.get(token))
    ]
    raise ConfigError(
        f"{KEY}.engine.model",
        f"expected the tokenizer of the policy, got one in which {len(different)} tokens differ",
        why=f"{token!r} has {ids[0]} in {policy_path} and {ids[1]} in {teacher_path}: the teacher "
        "would score other text",
        remedy="take a teacher with the policy's tokenizer, such as a larger model of its family",
    )
