"""Vision-language models: images of packed documents, their positions, and their tower's gradients.

The model is a tiny Qwen3-VL, and once InternVL or Qwen2.5-VL, which transformers writes, and
computes in float64 one document at a time. An engine that does not declare `vision` refuses it by
that name (`refusal.vision`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.config import (
    EngineConfig,
    LoraConfig,
    Memory,
    OptimizerConfig,
    ScheduleConfig,
)
from engine_api.contract import Engine
from engine_api.errors import BatchError, ConfigError, EngineError, UnsupportedCapability
from engine_api.losses import sft_loss
from engine_api.results import TrainOutput
from engine_conformance.cases._case import FLOAT32, SkipCase, case, must
from engine_conformance.cases._expect import raised_everywhere
from engine_conformance.cases._pictured import picture_oracle
from engine_conformance.cases._ranks import (
    build,
    caught,
    digest,
    opened,
    own_documents,
    whole_weights,
)
from engine_conformance.cases._target import Setup, Target
from engine_conformance.compare import (
    assert_bitwise,
    assert_close_per_token,
    assert_scalar_close,
    assert_weights_close,
)
from engine_conformance.fixtures.pictures import (
    IMAGE,
    LAYERS,
    VIDEO,
    Part,
    PictureDocument,
    PictureOracle,
    draw_document,
    draw_whole_document,
    picture_batch,
    write_moving_model,
    write_picture_model,
    write_whole_model,
)
from engine_conformance.tolerances import gradient_tolerances, tolerance

SINCE = "1.4"
FAMILIES = ("qwen3_vl",)
_VISION = (Capability.VISION,)
# A step of 1 along the gradient: what a weight changes by is its gradient.
_STEP = OptimizerConfig(name="torch.optim.SGD", lr=1.0, clip_norm=None)
# Several micro-batches, some of them without an image.
_MEMORY = Memory(max_tokens=20)
# Two micro-batches, of which one packs two documents with images of other sizes.
_TOGETHER = Memory(max_tokens=36)
_DECAY = 0.25
_TOWER = ("model.visual.",)
# Tower and projector of InternVL.
_BESIDE = ("vision_tower.", "multi_modal_projector.")


def write_model(target: Target, write: Callable[[Path], Path] = write_picture_model) -> Path:
    """Return the folder of the model that ``write`` writes, written once."""
    if find_spec("transformers") is None:
        raise SkipCase("needs transformers, which writes and computes the model of these cases")
    return target.written(write)


def mixed_documents() -> list[PictureDocument]:
    """Return documents with one image, two images, and none, so that two ranks have images."""
    return [
        draw_document(1, 3, (4, 6), 5),
        draw_document(2, 2, (2, 4), 3, (4, 4), 4),
        draw_document(3, 9),
        draw_document(4, 6),
        draw_document(5, 2, (2, 4), 2),
    ]


def divided_documents() -> list[PictureDocument]:
    """Return documents of which every other one has images, so that half of the ranks have none."""
    first, second, third, fourth, _ = mixed_documents()
    return [first, third, second, fourth]


def ending_documents() -> list[PictureDocument]:
    """Return documents that end in an image, one for each of two ranks."""
    return [draw_document(21, 3, (4, 4)), draw_document(22, 5, (2, 4))]


def late_documents() -> list[PictureDocument]:
    """Return documents whose images come in the last micro-batch of each of two ranks alone."""
    return [
        draw_document(31, 18),
        draw_document(32, 17),
        draw_document(33, 3, (4, 4), 5),
        draw_document(34, 2, (2, 4), 3),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A rank's log-probs before a step, the step, and the weights after it (rank 0)."""

    documents: list[int]
    log_probs: Tensor
    output: TrainOutput
    digest: str
    weights: dict[str, Tensor] = field(repr=False)


def _own_batch(engine: Engine, documents: Sequence[PictureDocument], device: str) -> Batch:
    mine = own_documents(len(documents), engine.topology)
    return picture_batch([documents[i] for i in mine], device)


def see(setup: Setup, documents: Sequence[PictureDocument]) -> Seen:
    """Infer and make one step of supervised fine-tuning on this rank's documents."""
    with opened(setup) as engine:
        batch = _own_batch(engine, documents, setup.device)
        log_probs = engine.infer_batch(batch).log_probs
        assert log_probs is not None, "a language model's"
        output = engine.train_batch(batch, sft_loss)
        weights = whole_weights(engine)
        return Seen(
            documents=own_documents(len(documents), engine.topology),
            log_probs=log_probs.cpu(),
            output=output,
            digest=digest(weights),
            weights=weights if engine.topology.rank == 0 else {},
        )


def _configure(target: Target, model: Path, memory: Memory = _MEMORY) -> EngineConfig:
    return target.config(model, optimizer=_STEP, memory=memory)


def _holds(target: Target, documents: Sequence[PictureDocument], memory: Memory = _MEMORY) -> float:
    """Compare log-probs, loss, norm and every weight's gradient with the oracle's."""
    model = write_model(target)
    ranks: list[Seen] = target.run(see, _configure(target, model, memory), documents=documents)
    oracle = picture_oracle(str(model))
    return max(
        _log_probs_match(target, oracle, documents, ranks),
        _gradients_match(target, oracle, documents, ranks),
    )


def _log_probs_match(
    target: Target,
    oracle: PictureOracle,
    documents: Sequence[PictureDocument],
    ranks: Sequence[Seen],
) -> float:
    margins = [0.0]
    bound = target.tolerance("log_probs", layers=LAYERS)
    for rank, seen in enumerate(ranks):
        lengths = [len(documents[i].input_ids) for i in seen.documents]
        for document, got in zip(seen.documents, seen.log_probs.split(lengths), strict=True):
            want = oracle.log_probs(documents[document]).detach()
            name = f"log_probs of document {document} on rank {rank}"
            margins.append(assert_close_per_token(name, got, want, bound))
    return max(margins)


def _gradients_match(
    target: Target,
    oracle: PictureOracle,
    documents: Sequence[PictureDocument],
    ranks: Sequence[Seen],
    *,
    frozen: tuple[str, ...] = (),
    rate_of: Callable[[str], float] = lambda _name: 1.0,
    decay: float = 0.0,
) -> float:
    """Compare the loss and each weight after a step along its gradient.

    Weights whose names begin with one of ``frozen`` must be as they were. ``rate_of`` is the length
    of the step of a weight, by its name, and ``decay`` SGD's weight decay.
    """
    loss, found = oracle.gradients(documents)
    start = oracle.weights
    kept = [n for n in found if n.startswith(frozen)]
    gradients = {
        name: torch.zeros_like(start[name]) if one is None or name in kept else one
        for name, one in found.items()
    }
    norm = float(torch.stack([one.norm() for one in gradients.values()]).norm())
    output = ranks[0].output
    must(all(r.digest == ranks[0].digest for r in ranks), "weights", "differ between ranks")
    margins = [
        assert_scalar_close("loss", output.loss, loss, target.tolerance("loss", layers=LAYERS)),
        assert_scalar_close(
            "grad_norm", output.grad_norm, norm, target.tolerance("grad_norm", layers=LAYERS)
        ),
    ]
    # A weight that no document reaches has no error, and no spread to measure one by.
    reached = {name: one for name, one in gradients.items() if bool(one.any())}
    bounds = gradient_tolerances(reached, target.torch_dtype, layers=LAYERS)
    step = torch.finfo(torch.float32).eps
    limits = {
        name: rate_of(name) * bounds.get(name, torch.zeros_like(start[name]))
        + step * start[name].abs()
        for name in start
    }
    after = ranks[0].weights
    for name in () if decay else set(start) - set(reached):
        assert_bitwise({name: after[name]}, {name: start[name].float()}, name="weights")
    want = {
        name: one - rate_of(name) * (gradients[name] + decay * one) for name, one in start.items()
    }
    return max(*margins, assert_weights_close(after, want, limits, start=start))


@case(id="vision.mixed", since=SINCE, requires=_VISION, world=(1, 2), families=FAMILIES)
def mixed(target: Target) -> float:
    """Log-probs and gradients MUST be those of each document alone, with its images.

    Documents with an image, two images and none are packed together, in several micro-batches, also
    with images in the last micro-batch alone, and documents that end in an image without padding
    behind them. The gradient of every weight is compared, the tower's too.

    If this fails: positions are computed over the pack and not by document (6 to 8 nats off in
    transformers' sdpa, in silence; TRL #5785, Automodel #3113, verl #1947), an image's features
    reach the tokens of another image or document, are added to the placeholders' embeddings instead
    of replacing them, or enter the first layer or two alone, the last feature of a pack is lost, or
    the tower's first gradient meets the others' in another dtype (FSDP ends the step in bfloat16).
    """
    margins = [
        _holds(target, mixed_documents(), _TOGETHER),
        _holds(target, late_documents()),
        _holds(target, ending_documents(), Memory()),
    ]
    return max(margins)


def moving_documents(*, by_frame: bool) -> list[PictureDocument]:
    """Return documents with a video, with videos around an image, with an image, and with text."""
    drawn: list[tuple[Part, ...]] = [
        (3, (3, 2, 4), 4),
        (2, (2, 2, 2), 2, (2, 4), 2, (1, 4, 2), 3),
        (2, (4, 2), 3),
        (7,),
    ]
    return [draw_document(40 + i, *parts, by_frame=by_frame) for i, parts in enumerate(drawn)]


@case(
    id="vision.video",
    since=SINCE,
    requires=(Capability.VIDEO, Capability.VISION),
    world=(1, 2),
    families=FAMILIES,
)
def video(target: Target) -> float:
    """Log-probs and gradients MUST be those of each document alone, with its videos and images.

    Videos, an image between two of them, and text are packed together. Qwen3-VL has text before
    each row in time of a video. Qwen2.5-VL has none, and positions that count the seconds of a
    video, unless the engine refuses that family.

    If this fails: the features of a video reach the tokens of an image, the frames of a video are
    taken for images, or their places in time are counted and not their seconds.
    """
    margin = _holds(target, moving_documents(by_frame=True), _TOGETHER)
    if not target.builds("qwen2_5_vl"):
        return margin
    model = write_model(target, write_moving_model)
    config = _configure(target, model, _TOGETHER)
    errors: list[EngineError | None] = target.run(build, config)
    if any(errors):
        raised_everywhere("Qwen2.5-VL", errors, UnsupportedCapability)
        return margin
    documents = moving_documents(by_frame=False)
    ranks: list[Seen] = target.run(see, config, documents=documents)
    oracle = picture_oracle(str(model))
    return max(
        margin,
        _log_probs_match(target, oracle, documents, ranks),
        _gradients_match(target, oracle, documents, ranks),
    )


@case(id="vision.some_ranks", since=SINCE, requires=_VISION, world=(2, 4), families=FAMILIES)
def some_ranks(target: Target) -> float:
    """Images on some ranks alone MUST give the results of one process, the tower's gradient too.

    Half of the ranks have all images, in some of their micro-batches, and the others have text.

    If this fails: the rank without images does not take part where the tower's weights are gathered
    (FSDP aborts or waits; torchtitan #4777, VeOmni #177) or its gradients are reduced, the tower's
    gradient is divided by the number of ranks, or a stand-in image adds to it.
    """
    return _holds(target, divided_documents())


@case(id="vision.text", since=SINCE, requires=_VISION, world=(1, 2), families=FAMILIES)
def text(target: Target) -> float:
    """Documents without images MUST be computed as text, and leave the tower as it was.

    If this fails: a tower that no image has reached is decayed, or stepped by a gradient of zeros.
    """
    return _holds(target, [draw_document(seed, 5 + seed) for seed in range(5, 9)])


@case(
    id="vision.frozen",
    since=SINCE,
    requires=_VISION,
    world=(1, 2),
    families=FAMILIES,
    dtypes=FLOAT32,
)
def frozen(target: Target) -> float:
    """The tower MUST stay as it was with `model.freeze: [vision]`, and all else be trained.

    The gradients of the other weights are those with a tower that is trained. So it is with
    InternVL, whose projector is a module beside its tower, unless the engine refuses that family.
    In float32, because rounding of the computation says nothing about which weights are trained.

    If this fails: the projector or a part of the tower is trained, the text model is not, or
    features are left out with their gradient.
    """

    def configure(model: Path) -> EngineConfig:
        config = _configure(target, model)
        return replace(config, model=replace(config.model, freeze=("vision",)))

    return _towers_match(target, configure, lambda tower: {"frozen": tower})


def _towers_match(
    target: Target,
    configure: Callable[[Path], EngineConfig],
    expect: Callable[[tuple[str, ...]], dict[str, Any]],
) -> float:
    """Compare a step with the oracle's, of Qwen3-VL and of InternVL unless that is refused.

    ``configure`` makes the configuration for a model's folder. ``expect`` returns the further
    arguments of `_gradients_match`, given how the names of the tower's weights begin.
    """

    def match(model: Path, documents: Sequence[PictureDocument], tower: tuple[str, ...]) -> float:
        ranks: list[Seen] = target.run(see, configure(model), documents=documents)
        oracle = picture_oracle(str(model))
        return _gradients_match(target, oracle, documents, ranks, **expect(tower))

    margin = match(write_model(target), divided_documents(), _TOWER)
    if not target.builds("internvl"):
        return margin
    model = write_model(target, write_whole_model)
    errors: list[EngineError | None] = target.run(build, configure(model))
    if any(errors):
        raised_everywhere("InternVL", errors, UnsupportedCapability)
        return margin
    whole = [draw_whole_document(1, 3, None, 5, None, 2), draw_whole_document(2, 2, None, 4)]
    return max(margin, match(model, whole, _BESIDE))


@case(
    id="vision.part_lr",
    since=SINCE,
    requires=(Capability.VISION, Capability.PARAMETER_GROUPS),
    world=(1, 2),
    families=FAMILIES,
    dtypes=FLOAT32,
)
def part_lr(target: Target) -> float:
    """The tower MUST have the rate of `optimizer.part_lr`, scaled by the schedule, all else `lr`.

    The first of four steps of warm-up, in SGD with weight decay, of a tower with an eighth of the
    rate. The norm of the gradient is that of all weights as they are. So it is with InternVL, whose
    projector is a module beside its tower, unless the engine refuses that family. In float32,
    because the tolerance of 16 bits is as large as the tower's step.

    If this fails: the tower has the rate of the text model or the projector does not have the
    tower's, the schedule does not scale the tower's rate, or a gradient is scaled and not a rate.
    """
    optimizer = replace(_STEP, weight_decay=_DECAY, part_lr={"vision": _STEP.lr / 8})
    schedule = ScheduleConfig(warmup_steps=4)

    def configure(model: Path) -> EngineConfig:
        return replace(_configure(target, model), optimizer=optimizer, schedule=schedule)

    def expect(tower: tuple[str, ...]) -> dict[str, Any]:
        def rate_of(name: str) -> float:
            return _STEP.lr / 4 / (8 if name.startswith(tower) else 1)

        return {"rate_of": rate_of, "decay": _DECAY}

    return _towers_match(target, configure, expect)


def adapt(
    setup: Setup, documents: Sequence[PictureDocument]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make a step of an adapter, and return the adapter and the weights merged with it (rank 0)."""
    with opened(setup) as engine:
        engine.train_batch(_own_batch(engine, documents, setup.device), sft_loss)
        exports = whole_weights(engine, adapter="only"), whole_weights(engine)
        return exports if engine.topology.rank == 0 else ({}, {})


@case(
    id="vision.adapters",
    since=SINCE,
    requires=(Capability.VISION, Capability.LORA),
    world=(1, 2),
    families=FAMILIES,
    dtypes=FLOAT32,
)
def adapters(target: Target) -> float:
    """Adapters of `all-linear` MUST be on each linear layer of the text model, and on no other.

    Their first step is along their gradient behind images, and the tower stays as it was. In
    float32, because tolerances of 16 bits would hide which layers have an adapter.

    If this fails: the tower or its projector has adapters, which a server of the text model's
    adapter does not load; the tower is trained beside them; or images do not reach the adapter.
    """
    model = write_model(target)
    lora = LoraConfig(rank=4, alpha=6.5)
    config = replace(_configure(target, model), lora=lora)
    documents = divided_documents()
    only, merged = target.run(adapt, config, documents=documents)[0]
    oracle = picture_oracle(str(model))
    _, gradients = oracle.gradients(documents)
    text = {
        name: one
        for name, one in gradients.items()
        if one is not None and "language_model.layers." in name and one.dim() == 2
    }
    names = {
        name: f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight" for name in text
    }
    want = {key.format(part) for key in names.values() for part in "AB"}
    problem = f"more: {sorted(set(only) - want)[:3]}, missing: {sorted(want - set(only))[:3]}"
    must(set(only) == want, "adapter", problem)
    untouched = set(oracle.weights) - set(text)
    assert_bitwise(
        {name: merged[name] for name in untouched},
        {name: oracle.weights[name].float() for name in untouched},
        name="weights without an adapter",
    )
    # B begins as zero: A has no gradient in the first step, and B that of its layer through A.
    bounds = gradient_tolerances(text, target.torch_dtype, layers=LAYERS)
    scale = lora.alpha / lora.rank
    steps, limits = dict[str, Tensor](), dict[str, Tensor]()
    for name, key in names.items():
        a = only[key.format("A")].double().T
        steps[key.format("B")] = -scale * text[name] @ a
        limits[key.format("B")] = scale * bounds[name] @ a.abs()
    return assert_weights_close({name: only[name] for name in steps}, steps, limits)


@case(
    id="vision.patches",
    since=SINCE,
    requires=_VISION,
    world=(1,),
    families=FAMILIES,
    dtypes=FLOAT32,
)
def patches(target: Target) -> None:
    """`memory.max_patches` MUST bound the rows of pixels of a micro-batch, and change no result.

    A document with more is refused by a `BatchError`. In float32, in which sums of other
    micro-batches are the same within rounding.

    If this fails: micro-batches are made by tokens alone, and images of many patches do not fit
    into memory.
    """
    model = write_model(target)
    documents = [draw_document(seed, 2, (4, 4), 2) for seed in range(3)]
    counts: list[int] = []
    for most in (48, 16):
        memory = Memory(max_patches=most)
        ranks: list[Seen] = target.run(see, _configure(target, model, memory), documents=documents)
        counts.append(ranks[0].output.num_micro_batches)
        _log_probs_match(target, picture_oracle(str(model)), documents, ranks)
    must(counts == [1, 3], "num_micro_batches", f"expected 1 and 3 at 48 and 16 rows, got {counts}")
    config = _configure(target, model, Memory(max_patches=15))
    errors: list[EngineError | None] = target.run(refused, config, documents=documents)
    must(isinstance(errors[0], BatchError), "error", f"{errors[0]!r} for 16 rows of at most 15")


def refused(setup: Setup, documents: Sequence[PictureDocument]) -> EngineError | None:
    """Return the error of inference on these documents."""
    with opened(setup) as engine:
        return caught(lambda: engine.infer_batch(_own_batch(engine, documents, setup.device)))


def _with_ids(document: PictureDocument, change: Callable[[Tensor], Tensor]) -> PictureDocument:
    ids = change(document.input_ids)
    return replace(document, input_ids=ids, loss_weight=document.loss_weight[: len(ids)])


def _replaced(at: int, token: int) -> Callable[[Tensor], Tensor]:
    return lambda ids: ids.index_fill(0, torch.tensor([at]), token)


def bad_documents() -> dict[str, PictureDocument]:
    """Return documents whose images and tokens do not fit each other, by what is wrong."""
    good = draw_document(11, 3, (4, 4), 4)
    assert good.pixels is not None
    return {
        "cut inside the image": _with_ids(good, lambda ids: ids[:5]),
        "an image token in the text": _with_ids(good, _replaced(1, IMAGE)),
        "text in the image": _with_ids(good, _replaced(4, 5)),
        "image tokens without an image": replace(good, pixels=None, grid=None),
        "an image without tokens": replace(
            draw_document(12, 9), pixels=good.pixels, grid=good.grid
        ),
        "a token of a video without one": _with_ids(good, _replaced(1, VIDEO)),
        "a grid that does not merge": replace(
            good, pixels=good.pixels[:12], grid=torch.tensor([[1, 3, 4]])
        ),
        "patches of another width": replace(good, pixels=good.pixels[:, :-1]),
    }


def bad_calls(
    setup: Setup, bad: dict[str, PictureDocument], good: Sequence[PictureDocument]
) -> tuple[dict[str, EngineError | None], TrainOutput]:
    """Infer on a bad document after another on rank 0, and then train on good ones."""
    with opened(setup) as engine:
        errors: dict[str, EngineError | None] = {}
        text_alone = good[3]
        for name, one in bad.items():
            chosen = [text_alone, one] if engine.topology.dp_rank == 0 else [text_alone]
            batch = picture_batch(chosen, setup.device)
            errors[name] = caught(lambda batch=batch: engine.infer_batch(batch))
        return errors, engine.train_batch(_own_batch(engine, good, setup.device), sft_loss)


@case(
    id="vision.refused",
    since=SINCE,
    requires=_VISION,
    world=(1, 2),
    families=FAMILIES,
    dtypes=FLOAT32,
    quick="once",
)
def refused_batches(target: Target) -> None:
    """Images that do not fit their document's tokens MUST be a `BatchError` on every rank.

    It names the document. There are fewer and more image tokens than features, images without
    tokens and tokens without images, a video, and pixels of another model. The engine stays usable.
    A model without a tower refuses images, too, and one with a tower shared prefixes, by a
    `ConfigError`. In float32, because nothing is computed.

    If this fails: features move to the next image's tokens, or the error comes from a kernel on one
    rank while the others wait, or documents with different images share what stands for them.
    """
    bad = bad_documents()
    good = mixed_documents()
    ranks = target.run(bad_calls, _configure(target, write_model(target)), bad=bad, good=good)
    for name in bad:
        error = ranks[0][0][name]
        must(isinstance(error, BatchError), "error", f"{error!r}", where=name)
        about_tokens = isinstance(error, BatchError) and error.field == "input_ids"
        if about_tokens:
            must("document 1" in str(error), "error", f"{error} does not name it", where=name)
        for rank, (errors, _) in enumerate(ranks):
            must(errors[name] is not None, "error", "none", where=f"{name}, rank {rank}")
    for rank, (_, output) in enumerate(ranks):
        must(output.skipped is None, "step", f"{output.skipped}", where=f"rank {rank}")
    shown = [draw_document(11, 3, (4, 4), 4)] * 2
    replies: list[EngineError | None] = target.run(
        refused, target.config(target.model()), documents=shown
    )
    for rank, reply in enumerate(replies):
        where = f"images for a model without a tower, rank {rank}"
        must(isinstance(reply, BatchError), "error", f"{reply!r}", where=where)
    if Capability.SHARED_PREFIXES in target.capabilities:
        shared = target.config(write_model(target), memory=Memory(share_prefixes=True))
        refusals: list[EngineError | None] = target.run(build, shared)
        raised_everywhere("shared prefixes", refusals, ConfigError)
        must(
            "share_prefixes" in str(refusals[0]), "error", f"{refusals[0]} does not name the option"
        )


def go_on(
    setup: Setup, documents: Sequence[PictureDocument], folder: Path, first: bool
) -> tuple[str, dict[str, Tensor]]:
    """Train a step and save, or load, and then train a step; return the weights of rank 0."""
    with opened(setup) as engine:
        batch = _own_batch(engine, documents, setup.device)
        if first:
            engine.train_batch(batch, sft_loss)
            engine.save_checkpoint(folder).result()
        else:
            engine.load_checkpoint(folder)
        engine.train_batch(batch, sft_loss)
        weights = whole_weights(engine)
        return digest(weights), weights if engine.topology.rank == 0 else {}


@case(
    id="vision.resume",
    since=SINCE,
    requires=(Capability.VISION, Capability.PORTABLE_CHECKPOINT),
    world=(1, 2),
    families=FAMILIES,
    dtypes=FLOAT32,
)
def resume(target: Target) -> None:
    """A checkpoint MUST hold the tower with its moments: a resumed run is the same bit for bit.

    In float32, because a checkpoint holds masters and moments, which are float32 in any precision.

    If this fails: the tower's weights or moments are left out of the state.
    """
    config = target.config(write_model(target), memory=_MEMORY)
    folder = target.scratch() / "checkpoint"
    documents = divided_documents()
    whole = target.run(go_on, config, documents=documents, folder=folder, first=True)
    resumed = target.run(go_on, config, documents=documents, folder=folder, first=False)
    assert_bitwise(resumed[0][1], whole[0][1], name="resumed weights")


def export(setup: Setup, folder: Path) -> tuple[dict[str, Tensor], None]:
    """Return the export, and write the model's folder."""
    with opened(setup) as engine:
        weights = whole_weights(engine)
        engine.save_hf(folder)
        return (weights if engine.topology.rank == 0 else {}), None


@case(
    id="vision.export",
    since=SINCE,
    requires=(Capability.VISION, Capability.SAVE_HF),
    world=(1, 2),
    families=FAMILIES,
    dtypes=FLOAT32,
)
def exported(target: Target) -> float:
    """An export MUST hold tower and text under the folder's names, and `save_hf` load again.

    Outputs of the folder that it writes are the model's. In float32, because an export is of the
    masters.

    If this fails: the tower is left out, or the text model is exported as if it were alone.
    """
    model = write_model(target)
    folder = target.scratch() / "saved"
    ranks = target.run(export, target.config(model), folder=folder)
    oracle = picture_oracle(str(model))
    want = {name: one.float() for name, one in oracle.weights.items()}
    assert_bitwise(ranks[0][0], want, name="export")
    again = PictureOracle(folder)
    document = mixed_documents()[1]
    got = again.log_probs(document).detach()
    bound = tolerance("log_probs", layers=LAYERS)
    return assert_close_per_token("log_probs", got, oracle.log_probs(document).detach(), bound)
