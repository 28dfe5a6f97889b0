"""The things that are compared: documents, readings of them, and the model that both are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine_conformance.oracle import Adapter, ModelConfig, OracleModel

__all__ = ["Document", "Finding", "Place", "Reading", "Subject"]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A prompt with its completion."""

    name: str
    """Name for people, such as ``group 3, sample 1``."""

    tokens: Sequence[int]
    """Token ids of prompt and completion, ``[L]``."""

    prompt: int
    """Number of tokens of the prompt, at least 1."""

    routed_experts: Tensor | None = None
    """Experts ``[L, layers, k]`` that served the tokens, -1 where the routers' own did.

    None is -1 everywhere.
    """

    other_prompts: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    """Token ids of the prompt as other templates render it, by a name of the template."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The log-probs of completions that an engine or a rollout has reported."""

    name: str
    """Name for people: ``engine`` or ``rollout``."""

    log_probs: Sequence[Tensor]
    """Log-probs of the tokens of each document's completion, ``[L - prompt]`` in nats.

    NaN where there is none.
    """

    dtype: str = "float32"
    """Dtype of the computation, which sets the tolerance."""

    packed: bool = False
    """True if the documents were one batch, in this order."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model as it should have been computed, and what may have taken its place."""

    config: ModelConfig
    """Architecture of the model."""

    params: dict[str, Tensor]
    """Weights in float64 by their Hugging Face names, without the adapter."""

    adapter: Adapter | None = None
    """Adapter on top of the weights."""

    older: Mapping[str, OracleModel] = field(default_factory=dict[str, OracleModel])
    """The model of earlier versions, by a name of the version, the newest first."""

    temperature: float = 1.0
    """Divisor of the logits."""

    top_k: int = 0
    """Number of most probable tokens that were sampled from; 0 is all."""

    top_p: float = 1.0
    """Probability mass that was sampled from."""

    @property
    def oracle(self) -> OracleModel:
        """The oracle of the model without a defect."""
        return OracleModel(config=self.config, params=self.params, adapter=self.adapter)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A token whose log-prob is not the oracle's."""

    document: str
    position: int
    """Index of the token in its document, the prompt included."""

    got: float
    want: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The comparison of a reading with the oracle."""

    reading: str
    bound: float
    """Largest difference in nats that rounding explains."""

    worst: float
    """Largest difference in nats."""

    tokens: int
    """Number of tokens that were compared."""

    wrong: Mapping[str, int]
    """Number of tokens beyond the bound in each document that has some, by its name."""

    places: Sequence[Place] = ()
    """The first token beyond the bound of each of these documents."""

    cause: str = ""
    """Name of the likeliest cause (a key of ``CAUSES``), "" where there is none."""

    detail: str = ""
    """Details of the cause in this case, as text."""

    left: float = 0.0
    """Share of the difference (root mean square) that the cause does not explain."""

    nearest: Sequence[tuple[str, float]] = ()
    """Causes that explain less, each with the share that it leaves."""

    @property
    def is_right(self) -> bool:
        """True if no token is beyond the bound."""
        return not self.wrong
