"""The parts below ``algorithm.teacher``, a model that scores the policy's own completions.

Every field has a reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine_api.config import ModelSource, Parallelism
from engine_api.distillation import Divergence
from engine_trainer.config.checks import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    INSIDE_0_1,
    Refusal,
    refuse,
    require,
)
from engine_trainer.config.sections import EngineSection, MemorySection, PrecisionSection

PROMPT = "{prompt}"


@dataclass(frozen=True, kw_only=True)
class TeacherEngineSection:
    """The engine of the teacher, which only infers, in the processes of the policy."""

    model: ModelSource
    """Model of the teacher, of any size and family, with the tokenizer of the policy."""

    backend: str | None = None
    """Name of the engine that runs the teacher. Null is ``engine.backend``."""

    parallelism: Parallelism | None = None
    """Parallel layout of the teacher, on all ranks of the policy. Null is
    ``engine.parallelism``.
    """

    precision: PrecisionSection | None = None
    """Dtypes of the teacher. Null is ``engine.precision``."""

    memory: MemorySection | None = None
    """Memory settings of the teacher. Null is ``engine.memory``."""

    options: Mapping[str, Any] | None = None
    """Options of the teacher's engine. Null is ``engine.options`` if both have the same backend,
    and no options if not.
    """

    def engine(self, policy: EngineSection) -> EngineSection:
        """Return the whole section of the teacher's engine.

        ``policy`` is the policy's section.
        """
        backend = self.backend or policy.backend
        options = policy.options if backend == policy.backend else {}
        return replace(
            policy,
            model=self.model,
            backend=backend,
            optimizer=None,
            lora=None,
            parallelism=self.parallelism or policy.parallelism,
            precision=self.precision or policy.precision,
            memory=self.memory or policy.memory,
            options=options if self.options is None else self.options,
        )


@dataclass(frozen=True, kw_only=True)
class TeacherSection:
    """On-policy distillation: a KL to a teacher on the policy's own completions.

    The teacher is an ``engine``, a served model (``url``), or with neither the policy itself, which
    then sees more in its prompt (``prompt_template``). docs/algorithms.md has the objective.
    """

    engine: TeacherEngineSection | None = None
    """Second engine that runs the teacher. Null needs ``url`` or ``prompt_template``."""

    url: str | None = None
    """Address of a server with an OpenAI-compatible completions API that returns the log-probs of a
    prompt, as vLLM's does, such as ``http://localhost:8000/v1``. Null asks no server.
    """

    served_model: str | None = None
    """Name of the model at ``url``. Null is the only one that the server lists."""

    api_key: str | None = None
    """Key that ``url`` asks for, such as ``${oc.env:TEACHER_KEY}``. Null sends none."""

    concurrency: int = 16
    """Number of requests to ``url`` at the same time."""

    timeout_s: float = 300.0
    """Seconds that a request to ``url`` may take."""

    kl: Literal["full", "top_k", "sampled"] | None = None
    """Part of the vocabulary that the KL is summed over. ``full`` is all of it, from an engine or
    the policy itself; ``top_k`` the most likely tokens of a ``url``, and all other tokens as one;
    ``sampled`` an estimate from the sampled token alone, with the same expected gradient as
    ``full`` and more variance. Null is ``top_k`` with a ``url`` and ``full`` without. ``full`` and
    ``top_k`` need engines that declare the capability ``distillation``.
    """

    divergence: Divergence = "reverse_kl"
    """Divergence between the policy π and the teacher q: ``reverse_kl`` is KL(π ‖ q),
    ``forward_kl`` KL(q ‖ π), and ``jsd`` the generalized Jensen-Shannon divergence of
    arXiv:2306.13649. ``kl: sampled`` has ``reverse_kl`` alone.
    """

    beta: float = 0.5
    """Weight of the teacher in the mixture of ``divergence: jsd``, inside (0, 1)."""

    top_k: int = 20
    """Number of tokens that ``kl: top_k`` asks a server for at each position. vLLM returns at most
    its own ``--max-logprobs``, which is 20 by default.
    """

    prompt_template: str = PROMPT
    """Text around the last user turn in the teacher's prompt, in which ``{prompt}``, ``{answer}``
    and ``{response}`` are the row's. The teacher may thus see what the policy does not, such as the
    solution.
    """

    coefficient: float = 1.0
    """Factor of the KL to the teacher in the loss, above 0, per nat."""

    reward_weight: float = 0.0
    """Factor of the policy's loss from rewards and advantages, at least 0. With 0 the policy learns
    from the teacher alone, and rewards are only measured.
    """

    def __post_init__(self) -> None:
        require(
            "algorithm.teacher",
            self,
            {
                "coefficient": ABOVE_0,
                "reward_weight": AT_LEAST_0,
                "concurrency": AT_LEAST_1,
                "top_k": AT_LEAST_1,
                "beta": INSIDE_0_1,
                "timeout_s": ABOVE_0,
            },
        )
        refuse("algorithm.teacher", _wrong_teacher(self))

    @property
    def chosen_kl(self) -> Literal["full", "top_k", "sampled"]:
        """The part of the vocabulary that the KL is summed over."""
        if self.kl is not None:
            return self.kl
        return "full" if self.url is None else "top_k"

    @property
    def is_policy(self) -> bool:
        """True if the policy is its own teacher, with a different prompt."""
        return self.engine is None and self.url is None

    @property
    def has_own_prompts(self) -> bool:
        """True if the teacher's prompts are not the policy's."""
        return self.prompt_template != PROMPT


def _wrong_teacher(section: TeacherSection) -> Iterator[Refusal]:
    """Yield a refusal for each combination of values that a teacher may not have."""
    yield (
        section.engine is not None and section.url is not None,
        "url",
        "give algorithm.teacher.engine or algorithm.teacher.url, one of the two, got both",
        "",
        "set one of them to null",
    )
    yield (
        PROMPT not in section.prompt_template,
        "prompt_template",
        f"expected a text with {{prompt}}, got {section.prompt_template!r:.200}",
        "",
        "write {prompt} where the question goes",
    )
    yield (
        section.is_policy and not section.has_own_prompts,
        "engine",
        "expected an engine, a url or a prompt_template, got none of them",
        "the policy would be its own teacher with the same prompt, and the KL 0",
        "write `engine: {model: {path: FOLDER}}`, or `prompt_template: '{prompt} ({answer})'`",
    )
    yield (
        section.kl == "full" and section.url is not None,
        "kl",
        "expected top_k or sampled with a url, got full",
        "a server gives log-probs of tokens, and not the whole distribution",
        "set kl: top_k, or give algorithm.teacher.engine",
    )
    yield (
        section.kl == "top_k" and section.url is None,
        "kl",
        "expected full or sampled without a url, got top_k",
        "an engine gives the whole distribution",
        "set kl: full, or give algorithm.teacher.url",
    )
    yield (
        section.chosen_kl == "sampled" and section.divergence != "reverse_kl",
        "divergence",
        f"expected reverse_kl with kl: sampled, got {section.divergence}",
        "the tokens are the policy's, and an estimate from them is of KL(policy ‖ teacher)",
        "set divergence: reverse_kl, or kl: full",
    )
    for name in ("served_model", "api_key"):
        yield (
            section.url is None and getattr(section, name) is not None,
            name,
            "expected null without a url, got a value",
            "nothing reads it",
            "give algorithm.teacher.url, or leave it out",
        )
