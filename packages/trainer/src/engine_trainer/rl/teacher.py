"""Sources of a teacher's log-probs on the policy's own completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from engine_api.comm import Comm, together
from engine_api.errors import ConfigError
from engine_trainer.config import DataSection, RLConfig
from engine_trainer.data import ChatTokenizer, load_tokenizer
from engine_trainer.placement.groups import EngineGroup, Launcher, run_together
from engine_trainer.placement.replica import Group
from engine_trainer.rl.companion import check_companion, named_below
from engine_trainer.rl.credit import CompletionIndex
from engine_trainer.rl.partition import Partition, TrainingDocument
from engine_trainer.rl.served_teacher import TeacherClient
from engine_trainer.run.reference import log_probs_of
from engine_trainer.run.run import Run

KEY = "algorithm.teacher"


class Teacher(Protocol):
    """A source of the log-probs that a teacher gives to the tokens of completions."""

    @property
    def engines(self) -> EngineGroup | None:
        """The teacher's own engine, None for one that has none."""
        ...

    def log_probs(
        self,
        documents: Sequence[TrainingDocument],
        partition: Partition,
        temperature: float,
    ) -> list[torch.Tensor]:
        """Return the teacher's log-probs of each local dp shard, ``[T]`` float32.

        They are defined at the tokens of completions alone. Called on all processes of the loop
        together.

        Args:
            documents: the teacher's documents, which end in the same completions as those of the
                partition.
            partition: the policy's partition.
            temperature: divisor of the logits.
        """
        ...

    def close(self) -> None:
        """Free what the teacher holds (idempotent)."""
        ...


def create_teacher(run: Run, config: RLConfig) -> Teacher | None:
    """Build the teacher that the configuration names, or return None without one."""
    section = config.algorithm.teacher
    if section is None:
        return None
    if section.url is not None:
        return ServedTeacher(TeacherClient(section), run.comm)
    if section.engine is None:
        shares = config.engine.memory.share_prefixes
        return EngineTeacher(run.policy, run.comm, is_policy=True, keeps_groups=shares)
    engine = section.engine.engine(config.engine)
    device, _ = run.launcher.resolve(engine)
    built = engine.build(seed=config.run.seed, total_steps=run.total_steps)
    engines = run.launcher.engines(engine, built, device)
    shares = engine.memory.share_prefixes
    return EngineTeacher(engines, run.comm, is_policy=False, keeps_groups=shares)


class EngineTeacher:
    """A teacher on an engine of its own, or the policy itself.

    Args:
        engines: the engine.
        comm: communicator between all processes of the loop.
        is_policy: True for the policy's engine, which the teacher does not close.
        keeps_groups: True if the engine computes a group's prompt once (see ``Partition``).
    """

    def __init__(
        self, engines: EngineGroup, comm: Comm, *, is_policy: bool, keeps_groups: bool
    ) -> None:
        self._engines = engines
        self._comm = comm
        self._is_policy = is_policy
        self._keeps_groups = keeps_groups

    @property
    def engines(self) -> EngineGroup | None:
        """The teacher's own engine, None where the policy is the teacher."""
        return None if self._is_policy else self._engines

    def log_probs(
        self,
        documents: Sequence[TrainingDocument],
        partition: Partition,
        temperature: float,
    ) -> list[torch.Tensor]:
        """Return the log-probs (see ``Teacher``)."""
        own = Partition(self._engines, [documents], keeps_groups=self._keeps_groups)
        packed = run_together(self._comm, own.pack)
        bare = [batch.keep_fields() for batch in packed]
        outputs = self._engines.infer(bare, temperature=temperature)
        return own.move([log_probs_of(o) for o in outputs], partition)

    def close(self) -> None:
        """Close the teacher's own engine."""
        if not self._is_policy:
            self._engines.close()


class ServedTeacher:
    """A teacher behind a URL, which the first process asks for all completions of the step."""

    engines: EngineGroup | None = None

    def __init__(self, client: TeacherClient, comm: Comm) -> None:
        self._client = client
        self._comm = comm

    def log_probs(
        self,
        documents: Sequence[TrainingDocument],
        partition: Partition,
        temperature: float,
    ) -> list[torch.Tensor]:
        """Return the log-probs (see ``Teacher``), which are at temperature 1."""
        del temperature

        def ask() -> list[torch.Tensor] | None:
            if self._comm.rank:
                return None
            return self._client.log_probs([d.tokens for d in documents])

        rows = together(self._comm, ask)[0]
        assert rows is not None
        found: Mapping[CompletionIndex, torch.Tensor] = {
            d.index: row for d, row in zip(documents, rows, strict=True)
        }
        return partition.place(found)

    def close(self) -> None:
        """Hold nothing (see ``Teacher``)."""


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
    if section.url is not None:
        client = TeacherClient(section)
        together(
            launcher.comm,
            lambda: None if launcher.comm.rank else client.check_tokenizer(tokenizer.tokenizer),
        )
    if section.engine is not None:
        engine = section.engine.engine(config.engine)
        check_companion(engine, config, launcher, ranks, f"{KEY}.engine")
        # Only the vocabulary is compared, so that the policy's template does not matter.
        with named_below(f"{KEY}.engine"):
            teacher = load_tokenizer(DataSection(source="-"), engine.model)
        check_same_vocabulary(
            tokenizer.tokenizer.get_vocab(),
            teacher.tokenizer.get_vocab(),
            config.data.tokenizer or config.engine.model.path,
            engine.model.path,
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
