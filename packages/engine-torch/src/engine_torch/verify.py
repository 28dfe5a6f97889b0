"""The check at the start that the packed forward computes what the model's own forward computes.

The model's own forward runs one document at a time. The check finds what the model's structure does
not show: a head that does more than h W^T, layers that mix tokens outside of attention
(state-space, linear attention) and would leak between documents, positions that are not reset, and
noise in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.errors import ConfigError, EngineError, UnsupportedCapability
from engine_api.hf_vision import build_arguments, draw_image
from engine_torch.mechanisms import has_sinks

# Largest difference in nats or value units, for scores of ordinary size. In float32 the two agree
# to about 1e-5.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}

# Largest root mean square of the differences, for log-probs. A wrong computation moves most tokens,
# rounding few.
_AVERAGE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}


def verify_model(
    engine: Any,
    lengths: list[int],
    *,
    name: str,
    reshard: Callable[[], None],
    shared: int = 0,
) -> None:
    """Check packed outputs against the model's own, and training against inference.

    Args:
        engine: the engine, whose ``module`` is a ``PackedModel`` with its weights loaded, and whose
            ``table`` has its parameters.
        lengths: tokens of each random document that is compared.
        name: name of the engine in errors.
        reshard: frees the gathered weights that a forward pass leaves behind.
        shared: number of tokens at which all documents begin alike.

    Raises:
        UnsupportedCapability: the outputs differ by more than rounding.
        ConfigError: the model fails on these documents, or its own outputs are not finite.
    """
    documents = _draw_documents(engine, lengths, shared)
    batch = Batch.pack(documents)
    value_model = engine.kind == "value_model"
    try:
        with torch.no_grad():
            got = _packed(engine, batch)
            trained = got
            if engine.config.optimizer is not None:
                trained = _packed_in_training(engine, batch)
            want = torch.cat([_reference(engine, Batch.pack([d]), value_model) for d in documents])
    except EngineError:
        raise
    except Exception as error:
        # The family's own code may raise anything for sizes in config.json that do not fit
        # together.
        raise ConfigError(
            "model.path",
            f"{type(engine.module.lm).__name__} cannot compute {len(documents)} short documents",
            why=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            remedy="check the sizes in config.json, or use another backend for this model family",
        ) from error
    reshard()
    _check_finite(engine, want)
    compute = engine.config.precision.compute
    for what, found, expected in (
        ("packed outputs differ from the model's own", got, want),
        ("outputs in training mode differ from those in inference", trained, got),
    ):
        difference = _difference(found, expected, compute, average=not value_model)
        if difference:
            raise UnsupportedCapability(
                "this model family",
                where=f"{name} with {type(engine.module.lm).__name__}",
                why=f"{what} by {difference} of documents {batch.lengths}",
                remedy="report the model; "
                "options.verify_model: false skips this check at your own risk",
            )


def _draw_documents(engine: Any, lengths: list[int], shared: int) -> list[dict[str, Any]]:
    """Return random documents that begin alike, with one more where the model takes images."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, engine.vocab_size, (n,), generator=generator) for n in lengths]
    for document in documents:
        document[:shared] = documents[0][:shared]
    vision = engine.vision
    if vision is None:
        return [{"input_ids": ids} for ids in documents]
    special = vision.tokens
    plain = next(i for i in range(engine.vocab_size) if i not in special)
    for ids in documents:
        ids[torch.isin(ids, torch.tensor(special))] = plain
    media = draw_image(vision, generator)
    run = vision.count_features(media.grid[0].tolist())
    image = torch.full((run,), vision.image_token)
    shown = torch.cat([documents[-1], image, documents[0]])
    pictured = {"input_ids": shown, "media": {"pixels": media.pixels, "grid": media.grid}}
    return [pictured, *({"input_ids": ids} for ids in documents)]


def _check_finite(engine: Any, outputs: Tensor) -> None:
    """Raise ``ConfigError`` for outputs that are not finite, and name the weights at fault."""
    if bool(outputs.isfinite().all()):
        return
    bad = [entry.name for entry in engine.table if not bool(entry.local.isfinite().all())]
    if bad:
        why = f"NaN or infinity in: {', '.join(bad[:3])}"
        remedy = "fetch or export the weights again"
    else:
        why = f"in {engine.config.precision.compute}"
        remedy = "use precision.compute: float32"
    raise ConfigError(
        "model.path", "the model's own outputs are not finite", why=why, remedy=remedy
    )


def _difference(got: Tensor, want: Tensor, compute: str, *, average: bool) -> str:
    """Return the difference of outputs in words, or an empty text where it is rounding."""
    apart = (got - want).abs()
    worst = float(apart.max())
    mean = float(apart.square().mean().sqrt())
    scale = max(1.0, float(want.abs().max()))
    if worst <= _TOLERANCE[compute] * scale and (not average or mean <= _AVERAGE[compute] * scale):
        return ""
    return f"{worst:.3g}, {mean:.3g} on average, most at token {int(apart.argmax())}"


def _packed(engine: Any, batch: Batch) -> Tensor:
    """Return the engine's outputs ``[T]`` of the packed batch."""
    outputs = engine.forward_step(batch, needs=engine.gives[:1], temperature=1.0)
    return outputs.values if engine.kind == "value_model" else outputs.log_probs


def _packed_in_training(engine: Any, batch: Batch) -> Tensor:
    """Return the packed outputs of a training pass, where dropout and a router's noise are on.

    An adapter adds nothing yet, because its B is zero.
    """
    engine.module.train()
    try:
        return _packed(engine, batch)
    finally:
        engine.module.eval()


def own_attention(lm: Any) -> str:
    """Return the name of transformers' attention that computes all that a model asks for.

    Its sdpa leaves capped scores out, and has no sinks.
    """
    capped = getattr(lm.config.get_text_config(), "attn_logit_softcapping", None) is not None
    plain = lm._supports_sdpa and not capped  # noqa: SLF001 - no public name
    return "sdpa" if plain and not has_sinks(lm) else "eager"


def _reference(engine: Any, document: Batch, value_model: bool) -> Tensor:
    """Return the model's own per-token outputs ``[L]`` of one document, in contract alignment."""
    lm = engine.module.lm
    text = lm.get_decoder() if engine.vision is not None else lm
    ids = document.input_ids.to(engine.device)
    arguments = {"input_ids": ids[None]}
    if engine.vision is not None:
        arguments = build_arguments(engine.vision, ids, document.media)
    former = lm.config.get_text_config()._attn_implementation  # noqa: SLF001 - no public name
    text.set_attn_implementation(own_attention(lm))
    try:
        scores = engine.module(arguments, (), 1.0)[0][0].float()
    finally:
        text.set_attn_implementation(former)
    first = scores.new_zeros(1)
    if value_model:
        return torch.cat([first, scores[:-1, 0]])
    log_probs = scores[:-1].log_softmax(-1).gather(-1, ids[1:, None].to(scores.device))
    return torch.cat([first, log_probs[:, 0]])
