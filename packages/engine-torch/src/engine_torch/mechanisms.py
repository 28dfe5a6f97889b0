"""Mechanisms that models ask for beyond a plain transformer, and what serves each of them.

A model is served by its mechanisms, not by its name. Each has a name, which a refusal gives, and a
function that finds it in the configuration or, before any weight is read, in the modules of the
model on the meta device. A mechanism that an engine does not serve is refused by its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine_api.errors import UnsupportedCapability
from engine_api.hf_names import saved_buffers
from engine_torch.mixers import find_mixers

__all__ = [
    "MECHANISMS",
    "SERVED",
    "Head",
    "Mechanism",
    "has_sinks",
    "measure_head",
    "refuse_unserved",
    "selects_tokens",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mechanism:
    """A mechanism that some models ask for."""

    name: str
    """Name in refusals, in the contract's spelling of capabilities."""

    find: Callable[[Any, Any, Any], str]
    """Function of the text configuration, the class or None, and the model or None.

    It returns what asks for the mechanism in words, or an empty text. It is called before the model
    is made, without it, and again with the model on the meta device.
    """

    served_by: str = ""
    """Name of the code that serves it, or an empty text where nothing does."""

    why: str = "no part of this engine computes it"
    """Reason of the refusal."""


# Types of layers by the mechanism that they need (transformers' names). The other types attend
# within documents, or compute each token alone.
_PLAIN_LAYERS = {
    "full_attention",
    "attention",
    "sliding_attention",
    "moe",
    "mlp",
    "sparse",
    "dense",
}
_MIXING_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2"}
# The second name is that of transformers before 5.18.
_INDEXED_LAYERS = {"indexed_attention", "deepseek_sparse_attention"}
_COMPRESSED_LAYERS = {"compressed_sparse_attention", "heavily_compressed_attention"}


def _types(text: Any) -> set[str]:
    return {str(one) for one in getattr(text, "layer_types", None) or ()}


def _find_layers(text: Any, kinds: Collection[str]) -> str:
    found = sorted(_types(text) & set(kinds))
    return f"layers of type {', '.join(found)}" if found else ""


def _find_softcap(text: Any, _cls: Any, _lm: Any) -> str:
    keys = ("attn_logit_softcapping", *_HEAD_CAPS)
    found = [f"{key}={value}" for key in keys if (value := getattr(text, key, None)) is not None]
    return ", ".join(found)


def _find_linear(text: Any, _cls: Any, lm: Any) -> str:
    mixers = () if lm is None else sorted({type(m).__name__ for m in find_mixers(lm).values()})
    return ", ".join(mixers) or _find_layers(text, _MIXING_LAYERS)


def _find_unknown_mixers(text: Any, _cls: Any, lm: Any) -> str:
    """Find layers of a mixing type in a model without a module that is known to mix tokens."""
    return "" if lm is None or find_mixers(lm) else _find_layers(text, _MIXING_LAYERS)


def selects_tokens(text: Any) -> bool:
    """Return whether layers of a text configuration attend to tokens that an index selects."""
    return bool(_types(text) & _INDEXED_LAYERS)


def _find_indexed(text: Any, _cls: Any, _lm: Any) -> str:
    return _find_layers(text, _INDEXED_LAYERS)


def _find_other_layers(text: Any, _cls: Any, _lm: Any) -> str:
    known = _PLAIN_LAYERS | _MIXING_LAYERS | _INDEXED_LAYERS | _COMPRESSED_LAYERS
    known |= {"chunked_attention"}
    return _find_layers(text, _types(text) - known)


def _find_own_attention(text: Any, cls: Any, _lm: Any) -> str:
    # A model whose folder brings its own code has no class of transformers.
    if cls is None or cls._supports_attention_backend:
        return ""
    # Some families take their attention from the interface, and do not say so.
    if hasattr(sys.modules[cls.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return ""
    types = _types(text)
    attends = not types or bool(types - _MIXING_LAYERS)
    return f"attention of {cls.__name__} in its own code" if attends else ""


def has_sinks(lm: nn.Module) -> bool:
    """Return whether a layer of the model has attention sinks."""
    return any(name.rpartition(".")[2] == "sinks" for name, _ in lm.named_parameters())


def _find_sinks(_text: Any, _cls: Any, lm: Any) -> str:
    return "sinks" if lm is not None and has_sinks(lm) else ""


def _find_head_bias(_text: Any, _cls: Any, lm: Any) -> str:
    head = None if lm is None else lm.get_output_embeddings()
    return "an output head with a bias" if getattr(head, "bias", None) is not None else ""


def _find_scale(text: Any, _cls: Any, _lm: Any) -> str:
    keys = ("logit_scale", "logits_scaling", "lm_head_multiplier")
    found = [f"{key}={x}" for key in keys if (x := getattr(text, key, None)) not in (None, 1.0)]
    return ", ".join(found)


def _find_buffers(_text: Any, _cls: Any, lm: Any) -> str:
    return "" if lm is None else next(iter(saved_buffers(lm)), "")


def _find_odd_buffers(_text: Any, _cls: Any, lm: Any) -> str:
    buffers = {} if lm is None else saved_buffers(lm)
    return next((name for name, one in buffers.items() if not one.is_floating_point()), "")


MECHANISMS: tuple[Mechanism, ...] = (
    Mechanism(
        name="softcap",
        find=_find_softcap,
        served_by="`engine_torch.plain`, on CUDA `engine_torch.flex`; each chunk of logits",
    ),
    Mechanism(
        name="sinks",
        find=_find_sinks,
        served_by="`engine_torch.plain`, on CUDA `engine_torch.varlen`",
    ),
    Mechanism(
        name="head_bias",
        find=_find_head_bias,
        served_by="each chunk of logits (`engine_torch.head`)",
    ),
    Mechanism(
        name="logit_scale",
        find=_find_scale,
        served_by="each chunk of logits (`engine_torch.head`)",
    ),
    Mechanism(
        name="saved_buffers",
        find=_find_buffers,
        served_by="the table of weights, whole on each rank and never trained",
    ),
    Mechanism(
        name="linear_attention",
        find=_find_linear,
        served_by="each layer on batches of documents (`engine_torch.mixers`), on CUDA with fla, "
        "causal-conv1d or mamba-ssm",
        why="it would mix tokens of different documents",
    ),
    Mechanism(
        name="chunked_attention",
        find=lambda text, _cls, _lm: _find_layers(text, {"chunked_attention"}),
        why="this engine's attention would leave its chunks out",
    ),
    Mechanism(
        name="sparse_attention",
        find=_find_indexed,
        served_by="sdpa under a mask of the whole pack (`engine_torch.attention.MASKED`), "
        "without Ulysses",
        why="this engine's attention would leave its selection of tokens out",
    ),
    Mechanism(
        name="compressed_attention",
        find=lambda text, _cls, _lm: _find_layers(text, _COMPRESSED_LAYERS),
        why="this engine's attention would leave its compressed keys out",
    ),
    Mechanism(
        name="other_layers",
        find=_find_other_layers,
        why="this engine's attention would leave that out, "
        "or they would mix tokens of different documents",
    ),
    Mechanism(
        name="unknown_mixers",
        find=_find_unknown_mixers,
        why="they would mix tokens of different documents",
    ),
    Mechanism(
        name="own_attention",
        find=_find_own_attention,
        why="transformers computes it in the family's own code, which ignores documents",
    ),
    Mechanism(
        name="integer_buffers",
        find=_find_odd_buffers,
        why="saved tensors that are no floating-point numbers would not be exported",
    ),
)

SERVED = frozenset(one.name for one in MECHANISMS if one.served_by)
"""Names of the mechanisms that this package serves; an engine may serve fewer."""


def refuse_unserved(
    hf_config: Any, cls: Any, lm: Any, *, served: Collection[str], engine: str
) -> None:
    """Raise ``UnsupportedCapability`` for the first mechanism that the engine does not serve.

    Args:
        hf_config: config.json of the model.
        cls: the model's class, or None for one that its folder brings.
        lm: the model on any device, or None before it is made.
        served: names of the mechanisms that the engine serves.
        engine: name of the engine in errors.
    """
    text = hf_config.get_text_config()
    name = hf_config.model_type if cls is None else cls.__name__
    for one in MECHANISMS:
        found = "" if one.name in served else one.find(text, cls, lm)
        if found:
            raise UnsupportedCapability(
                one.name,
                where=f"{engine} with {name}",
                why=f"the model has {found}; {one.why}",
                remedy="use another backend for this model family",
            )


# --- the head -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Treatment of a language model's plain logits x = h W^T + b.

    It is ``scale · x``, or ``cap · tanh(scale · x / cap)`` with a cap.
    """

    scale: float = 1.0
    cap: float | None = None


# Keys of a configuration that name the head's cap.
_HEAD_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Plain logits at which a head is measured.
_POINTS = torch.linspace(-24.0, 24.0, 17, dtype=torch.float64)
# Largest relative difference, for heads that compute in float32.
_NEAR = 1e-5


class _Output(dict[str, Any]):
    """The output of a base model that has nothing but hidden states."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return ()
        return self["last_hidden_state"] if key == 0 else super().__getitem__(key)


class _Base(nn.Module):
    """A base model whose hidden states are the points.

    Numbers that a head reads from its base model are those of the model's own.
    """

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self._numbers = {k: v for k, v in vars(own).items() if isinstance(v, int | float)}

    def __getattr__(self, name: str) -> Any:
        # A model whose forward pass calls its decoder alone (OPT).
        if name == "decoder":
            return self
        numbers: dict[str, Any] = self.__dict__.get("_numbers", {})
        return numbers[name] if name in numbers else super().__getattr__(name)

    def forward(self, *_: Any, **__: Any) -> _Output:
        """Return the points as hidden states of one token."""
        return _Output(last_hidden_state=_POINTS[None, None].clone())


class _PassOn(nn.Module):
    """An output embedding whose logits are the hidden states."""

    bias = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", _POINTS.new_empty(0), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden states."""
        return hidden


def measure_head(lm: Any, *, engine: str) -> Head:
    """Return what the model's own forward pass does with plain logits.

    The families' keys mean different things (one multiplies by its scale, another divides), so the
    forward pass itself is asked: it runs with a base model that gives known hidden states, and an
    output embedding that passes them on. No weight is read.

    Raises:
        UnsupportedCapability: it is neither a scale nor a cap.
    """
    points = _POINTS
    try:
        with _replaced(lm):
            given: Tensor = lm(
                input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False
            ).logits
    # The family's own code may do anything with the parts that stand in for its own.
    except Exception as error:
        raise _unknown_head(lm, engine, f"{type(error).__name__}: {error}") from error
    if given.shape != (1, 1, len(points)):
        raise _unknown_head(lm, engine, f"its logits have another shape: {tuple(given.shape)}")
    scores = given[0, 0].double()
    text = lm.config.get_text_config()
    cap = next((x for key in _HEAD_CAPS if (x := getattr(text, key, None)) is not None), None)
    if cap is not None:
        scores = torch.atanh(scores / cap) * cap
    # Points around 0 have no ratio, and a cap's largest scores no digits.
    near = (points != 0) & (points.abs() < 8)
    ratios = scores[near] / points[near]
    scale = float(ratios.median())
    if not bool((ratios - scale).abs().max() <= _NEAR * abs(scale)) or scale == 0:
        raise _unknown_head(lm, engine, "its logits are neither scaled nor capped alone")
    if abs(scale - 1.0) < _NEAR:
        scale = 1.0
    head = Head(scale=scale, cap=None if cap is None else float(cap))
    want = points * scale if cap is None else torch.tanh(points * scale / cap) * cap
    if not torch.allclose(given[0, 0].double(), want, rtol=_NEAR, atol=1e-6):
        raise _unknown_head(lm, engine, "its logits are neither scaled nor capped alone")
    return head


def _unknown_head(lm: Any, engine: str, why: str) -> UnsupportedCapability:
    return UnsupportedCapability(
        "logits",
        where=f"{engine} with {type(lm).__name__}",
        why=f"its head computes something else than h W^T + b with a scale and a cap ({why})",
        remedy="use another backend for this model family",
    )


@contextmanager
def _replaced(lm: Any) -> Iterator[None]:
    """Put ``_Base`` and ``_PassOn`` in the place of the model's own inside the block."""
    embedding = lm.get_output_embeddings()
    places: list[tuple[nn.Module, str, nn.Module]] = [
        (lm.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], _PassOn())
        for name, module in lm.named_modules()
        if module is embedding
    ]
    places.append((lm, lm.base_model_prefix, _Base(lm.base_model)))
    former = [(owner, leaf, owner._modules[leaf]) for owner, leaf, _ in places]  # noqa: SLF001
    try:
        for owner, leaf, module in places:
            owner._modules[leaf] = module  # noqa: SLF001
        with torch.no_grad():
            yield
    finally:
        for owner, leaf, module in former:
            owner._modules[leaf] = module  # noqa: SLF001
