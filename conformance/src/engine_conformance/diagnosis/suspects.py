"""The table of causes, and the oracle with one defect for each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine_conformance.diagnosis.readings import Document, Reading, Subject
from engine_conformance.oracle import OracleModel
from engine_conformance.oracle.layers import cap

__all__ = ["CAUSES", "Suspect", "predict", "rounded", "suspects"]

CAUSES: Mapping[str, str] = {
    "temperature": "the logits are divided by another temperature",
    "adapter scale": "the adapter is added with another scale",
    "stale weights": "the weights are those of an earlier version",
    "chat template": "the prompt is rendered by another template",
    "tied head": "the head is not the matrix that config.json says",
    "rope scaling": "the frequencies of rotary positions are others",
    "positions": "the positions are others",
    "mask": "a token attends to other tokens",
    "alignment": "values are at the token before or after",
    "truncation": "log-probs are those after top-k or top-p",
    "norm": "the epsilon of the norms is another one",
    "scale": "scores or logits are scaled or capped in another way",
    "dtype": "the computation is in another dtype",
}
"""Sentence about each cause, by its name."""

_EVERY_SCALE = (0.0, 0.5, 2.0)
Prediction = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """The oracle with one defect."""

    cause: str
    detail: str
    predict: Callable[[], Prediction]
    """Function that returns the log-probs of every document's completion."""


@torch.no_grad()
def predict(
    oracle: OracleModel,
    documents: Sequence[Document],
    subject: Subject,
    *,
    head: Tensor | None = None,
    shift: int = 0,
    truncated: bool = False,
) -> Prediction:
    """Return the log-probs of each document's completion, ``[L - prompt]`` in nats.

    Args:
        oracle: the model.
        documents: the documents.
        subject: the temperature, and the truncation where that is asked for.
        head: the matrix ``[V, C]`` in place of the model's own.
        shift: 1 returns at each token the log-prob of the next one, -1 that of the one before.
        truncated: normalise over the tokens that top-k and top-p leave.
    """
    found: Prediction = []
    for document in documents:
        scores = _logits(oracle, document, head) / subject.temperature
        log_p = scores.log_softmax(dim=-1)
        if truncated:
            log_p = _truncate(log_p, subject)
        ids = torch.tensor(document.tokens)
        chosen = log_p[:-1].gather(-1, ids[1:, None]).squeeze(-1)  # of tokens 1 to L - 1
        found.append(chosen.roll(-shift)[document.prompt - 1 :])
    return found


def rounded(subject: Subject, dtype: torch.dtype) -> OracleModel:
    """Return the oracle with its weights rounded to a dtype."""
    params = {name: value.to(dtype).double() for name, value in subject.params.items()}
    return replace(subject.oracle, params=params)


def suspects(
    subject: Subject, documents: Sequence[Document], reading: Reading
) -> Iterator[Suspect]:
    """Yield the oracle with each defect that the model may have, the commonest first."""
    yield from _temperatures(subject, documents, reading)
    yield from _adapters(subject, documents)
    yield from _stale(subject, documents)
    yield from _templates(subject, documents)
    yield from _heads(subject, documents)
    yield from _configs(subject, documents)
    if reading.packed and len(documents) > 1:
        yield Suspect(
            cause="mask",
            detail="documents of a batch attend to the ones before them",
            predict=lambda: _predict_joined(subject, documents),
        )
    for shift, where in ((1, "before"), (-1, "after")):
        yield Suspect(
            cause="alignment",
            detail=f"the log-prob of a token is at the token {where} it",
            predict=lambda shift=shift: predict(subject.oracle, documents, subject, shift=shift),
        )
    if subject.top_k or subject.top_p < 1:
        yield Suspect(
            cause="truncation",
            detail=f"top_k {subject.top_k}, top_p {subject.top_p:g}",
            predict=lambda: predict(subject.oracle, documents, subject, truncated=True),
        )


# --- the rows of the table ----------------------------------------------------------------------


def _temperatures(
    subject: Subject, documents: Sequence[Document], reading: Reading
) -> Iterator[Suspect]:
    asked = subject.temperature
    for other in dict.fromkeys(
        (1.0, asked * asked, 1 / asked, _fit_temperature(subject, documents, reading))
    ):
        if not math.isclose(other, asked, rel_tol=1e-4):
            yield Suspect(
                cause="temperature",
                detail=f"{other:.4g} in place of {asked:g}",
                predict=lambda other=other: predict(
                    subject.oracle, documents, replace(subject, temperature=other)
                ),
            )
    yield Suspect(
        cause="temperature",
        detail=f"log-probs, and not logits, are divided by {asked:g}",
        predict=lambda: [
            values / asked
            for values in predict(subject.oracle, documents, replace(subject, temperature=1.0))
        ],
    )


@torch.no_grad()
def _fit_temperature(subject: Subject, documents: Sequence[Document], reading: Reading) -> float:
    """Return the temperature at which the oracle is nearest to the reading."""
    low, high = 0.2, 5.0
    for _ in range(4):
        grid = torch.logspace(math.log10(low), math.log10(high), 17, dtype=torch.float64)
        errors = torch.zeros_like(grid)
        for document, got in zip(documents, reading.log_probs, strict=True):
            logits = _logits(subject.oracle, document, None)[document.prompt - 1 : -1]
            ids = torch.tensor(document.tokens[document.prompt :])
            chosen = logits.gather(-1, ids[:, None]).squeeze(-1)
            for i, temperature in enumerate(grid.tolist()):
                values = chosen / temperature - (logits / temperature).logsumexp(-1)
                errors[i] += (values - got.double()).nan_to_num(0.0).square().sum()
        best = int(errors.argmin())
        low, high = float(grid[max(0, best - 1)]), float(grid[min(len(grid) - 1, best + 1)])
    return math.sqrt(low * high)


def _adapters(subject: Subject, documents: Sequence[Document]) -> Iterator[Suspect]:
    adapter = subject.adapter
    if adapter is None:
        return
    rank = next(iter(adapter.params[a].shape[0] for a, _ in adapter.pairs.values()))
    factors = {f"{f:g} times the scale": f for f in _EVERY_SCALE}
    factors |= {
        "alpha over the root of the rank": math.sqrt(rank),
        "alpha, not divided by the rank": float(rank),
        "1, not alpha over the rank": 1 / adapter.scaling,
    }
    for detail, factor in factors.items():
        if factor != 1:
            other = replace(adapter, scaling=adapter.scaling * factor)
            yield Suspect(
                cause="adapter scale",
                detail=detail,
                predict=lambda other=other: predict(
                    replace(subject.oracle, adapter=other), documents, subject
                ),
            )


def _stale(subject: Subject, documents: Sequence[Document]) -> Iterator[Suspect]:
    for version, older in subject.older.items():
        yield Suspect(
            cause="stale weights",
            detail=f"those of {version}",
            predict=lambda older=older: predict(older, documents, subject),
        )


def _templates(subject: Subject, documents: Sequence[Document]) -> Iterator[Suspect]:
    named: dict[str, list[Document]] = {}
    for name in documents[0].other_prompts:
        named[name] = [_with_prompt(one, one.other_prompts[name]) for one in documents]
    named["without the prompt's first token"] = [
        _with_prompt(one, one.tokens[1 : one.prompt]) for one in documents
    ]
    named["with the prompt's first token twice"] = [
        _with_prompt(one, [one.tokens[0], *one.tokens[: one.prompt]]) for one in documents
    ]
    for detail, others in named.items():
        if all(one.prompt > 0 for one in others):
            yield Suspect(
                cause="chat template",
                detail=detail,
                predict=lambda others=others: predict(subject.oracle, others, subject),
            )


def _with_prompt(document: Document, prompt: Sequence[int]) -> Document:
    tokens = [*prompt, *document.tokens[document.prompt :]]
    experts = document.routed_experts
    if experts is not None:
        # Nothing is known of the experts of another prompt.
        unknown = experts.new_full((len(prompt), *experts.shape[1:]), -1)
        experts = torch.cat([unknown, experts[document.prompt :]])
    return replace(document, tokens=tokens, prompt=len(prompt), routed_experts=experts)


def _heads(subject: Subject, documents: Sequence[Document]) -> Iterator[Suspect]:
    embedding = "model.embed_tokens.weight"
    heads: dict[str, Tensor] = {}
    if subject.config.tied:
        heads |= {
            f"the head is the embedding of {version}": older.params[embedding]
            for version, older in subject.older.items()
        }
    else:
        heads["the embedding is the head"] = subject.params[embedding]
        heads |= {
            f"the head is that of {version}": older.params["lm_head.weight"]
            for version, older in subject.older.items()
        }
    for detail, head in heads.items():
        yield Suspect(
            cause="tied head",
            detail=detail,
            predict=lambda head=head: predict(subject.oracle, documents, subject, head=head),
        )


def _configs(subject: Subject, documents: Sequence[Document]) -> Iterator[Suspect]:
    """Yield suspects that read ``config.json`` in another way."""
    config = subject.config
    rope = config.rope
    changed: list[tuple[str, str, dict[str, Any]]] = []
    if rope.kind != "default":
        plain = replace(rope, kind="default")
        changed.append(("rope scaling", f"{rope.kind} is not applied", {"rope": plain}))
    else:
        for factor in (2.0, 0.5, 4.0, 8.0):
            scaled = replace(rope, kind="linear", parameters={"factor": factor})
            detail = f"positions are divided by {factor:g}"
            changed.append(("rope scaling", detail, {"rope": scaled}))
    changed += [
        (
            "rope scaling",
            f"the base is {base:g}, not {rope.theta:g}",
            {"rope": replace(rope, theta=base)},
        )
        for base in (1e4, 5e5, 1e6)
        if base != rope.theta
    ]
    still = replace(rope, kind="linear", parameters={"factor": math.inf})
    changed.append(("positions", "all tokens are at one position", {"rope": still}))
    changed.append(("mask", "tokens attend to later ones", {"mask": _hide_nothing}))
    changed.append(("mask", "tokens attend to the next one", {"mask": _hide_all_but_next}))
    if any(window is not None for window in config.windows):
        changed.append(
            ("mask", "the window is not applied", {"windows": (None,) * config.num_layers})
        )
        for by in (-1, 1):
            windows = tuple(w if w is None else w + by for w in config.windows)
            changed.append(("mask", f"the window is {by:+d} token", {"windows": windows}))
    changed += [
        ("norm", f"epsilon is {eps:g}, not {config.rms_norm_eps:g}", {"rms_norm_eps": eps})
        for eps in (1e-6, 1e-5, 1e-8, 1e-3)
        if eps != config.rms_norm_eps
    ]
    for power in (0.0, -1.0):
        scale = config.head_dim**power
        changed.append(("scale", f"scores are multiplied by {scale:g}", {"attention_scale": scale}))
    if config.attention_cap is not None:
        changed.append(("scale", "scores are not capped", {"attention_cap": None}))
    if config.logit_cap is not None:
        changed.append(("scale", "logits are not capped", {"logit_cap": None}))
    for cause, detail, values in changed:
        other = replace(subject.oracle, config=replace(config, **values))  # pyright: ignore[reportArgumentType]
        yield Suspect(
            cause=cause,
            detail=detail,
            predict=lambda other=other: predict(other, documents, subject),
        )


def _hide_nothing(length: int, window: int | None) -> Tensor:
    del window
    return torch.zeros((length, length), dtype=torch.bool)


def _hide_all_but_next(length: int, window: int | None) -> Tensor:
    del window
    return torch.ones((length, length), dtype=torch.bool).triu(2)


def _predict_joined(subject: Subject, documents: Sequence[Document]) -> Prediction:
    """Return the log-probs where all documents are one."""
    tokens = [token for one in documents for token in one.tokens]
    experts = [one.routed_experts for one in documents if one.routed_experts is not None]
    joined = torch.cat(experts) if len(experts) == len(documents) else None
    whole = replace(documents[0], tokens=tokens, prompt=1, routed_experts=joined)
    (values,) = predict(subject.oracle, [whole], subject)
    ends = list(accumulate(len(one.tokens) for one in documents))
    return [
        values[end - len(one.tokens) + one.prompt - 1 : end - 1]
        for one, end in zip(documents, ends, strict=True)
    ]


# --- computing ----------------------------------------------------------------------------------


def _logits(oracle: OracleModel, document: Document, head: Tensor | None) -> Tensor:
    """Return the logits ``[L, V]``, with another head where one is given."""
    tokens, experts = document.tokens, document.routed_experts
    if head is None:
        return oracle.logits(tokens, experts)
    scaled = oracle.config.logit_scale * (oracle.hidden(tokens, experts) @ head.T)
    return cap(scaled, oracle.config.logit_cap)


def _truncate(log_p: Tensor, subject: Subject) -> Tensor:
    """Return log-probs over the tokens that top-k and then top-p leave, the most probable first."""
    ordered, order = log_p.sort(dim=-1, descending=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if subject.top_k:
        kept[..., subject.top_k :] = False
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept &= before < subject.top_p
    left = ordered.masked_fill(~kept, -math.inf).log_softmax(-1)
    return torch.empty_like(left).scatter(-1, order, left)
