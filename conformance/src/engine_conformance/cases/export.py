"""Weights out: Hugging Face names, complete and exact, whole or as shards, and as a folder."""

from __future__ import annotations

import gc
import json
import math
import shutil
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine_api.capabilities import Capability
from engine_api.config import EngineConfig, LoraConfig, ModelSource, Precision
from engine_api.contract import Adapter, Engine
from engine_api.errors import ConfigError, EngineError, UnsupportedCapability
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._expect import documents, outputs_match
from engine_conformance.cases._ranks import (
    InferCall,
    RankOutputs,
    build,
    digest,
    infer_on_rank,
    opened,
    save,
    step,
    train,
    whole_weights,
)
from engine_conformance.cases._shards import Shards, shards_and_whole, shards_make_the_whole
from engine_conformance.cases._target import Setup, Target
from engine_conformance.cases._written import written_model, written_weights
from engine_conformance.compare import assert_bitwise, assert_close_per_token
from engine_conformance.oracle import expected_shapes, read_config, read_safetensors
from engine_conformance.tolerances import tolerance

TYPES = (LM, VALUE)
_EVERY = 16  # yields
FAMILIES = (
    {"family": "llama", "tied": False},
    {"family": "qwen2", "tied": True},
    {"family": "qwen3", "tied": True, "shards": 2},
)


def export(
    setup: Setup, dtypes: Sequence[torch.dtype | None], buckets: Sequence[int]
) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Return the whole export in each dtype, then digests of it for each size of buckets.

    Rank 0 sends the export.
    """
    with opened(setup) as engine:
        exports = [whole_weights(engine, dtype=dtype) for dtype in dtypes]
        digests = [digest(e) for e in exports] + [
            digest(whole_weights(engine, bucket_bytes=size)) for size in buckets
        ]
        must(engine.weight_version == 0, "weight_version", f"{engine.weight_version} after exports")
        return (exports if engine.topology.rank == 0 else []), digests


def _check_export(target: Target, model: Path) -> None:
    dtypes = (None, torch.bfloat16)
    ranks = target.run(export, target.config(model), dtypes=dtypes, buckets=(1, 20_000))
    for rank, (_, digests) in enumerate(ranks):
        must(
            digests == ranks[0][1],
            "export",
            "names, order or bits differ from rank 0's",
            where=f"rank {rank}",
        )
        must(
            set(digests[2:]) == {digests[0]},
            "export",
            "the size of buckets changes it",
            where=f"rank {rank}",
        )
    whole, half = ranks[0][0]
    stored = read_safetensors(model)
    shapes = expected_shapes(read_config(model))
    assert_bitwise(whole, {name: stored[name] for name in shapes}, name="export")
    must(
        {n: tuple(t.shape) for n, t in whole.items()} == shapes,
        "export",
        "shapes are not the checkpoint's",
    )
    assert_bitwise(half, {name: stored[name].bfloat16() for name in shapes}, name="bfloat16 export")
    _check_order(list(whole))


def _check_order(names: Sequence[str]) -> None:
    """Require the order layer by layer: embedding first, layers in order, each in one piece."""
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    must(layers == sorted(layers), "export order", f"layers come as {layers}")
    must(names[0] == "model.embed_tokens.weight", "export order", f"{names[0]} comes first")


@case(id="export.exact", model_types=TYPES, quick=True)
def exact(target: Target) -> None:
    """The export MUST have the checkpoint's names and bits, each once, in one order on all ranks.

    Tied weights come once. In the stored dtype and in bfloat16, whatever the size of
    buckets. A value model's holds the score's weight and bias, and no head of a
    language model.

    If this fails: a tied head is exported (NeMo-RL #227), padding of shards is not cut
    off, fused experts keep their fused names, a name carries a wrapper's prefix, a
    score lives outside the module that is exported.
    """
    if target.model_type == VALUE:
        _check_export(target, target.model())
        return
    for model in target.models(*FAMILIES):
        _check_export(target, model)


@case(id="export.moe", requires=(Capability.MOE,))
def moe(target: Target) -> None:
    """Every expert MUST be exported under its own Hugging Face name, bit for bit.

    If this fails: gate and up halves are swapped, or experts are numbered within a
    rank.
    """
    _check_export(target, target.model(family="qwen3_moe", tied=False))


@case(id="export.round_trip", model_types=TYPES)
def round_trip(target: Target) -> None:
    """Trained weights, exported as a folder and loaded again, MUST be exported alike, bit for bit.

    The folder is written here, from the export alone.

    If this fails: names, shapes or transpositions that only the engine's own loading
    takes back.
    """
    model = target.model()
    batches = [documents(43, "uneven")]
    first = target.run(train, target.config(model), batches=batches)[0].weights
    folder = target.scratch()
    shutil.copyfile(model / "config.json", folder / "config.json")
    save_file(first, folder / "model.safetensors", metadata={"format": "pt"})
    again = target.run(train, target.config(folder), batches=[])[0].weights
    must(list(again) == list(first), "export order", "differs after a round trip")
    assert_bitwise(again, first, name="export of the loaded export")


# Standard deviations of random weights and of a new value head. No family has them by default, and
# no other weight of these models has one that is near: memory that is left as it was may hold some.
_RANGE = 0.35
_RANGE_OF_HEAD = 0.7
# The standard deviation of so many values is within a tenth of the distribution's.
_ENOUGH = 1024


def first_values(setup: Setup, adapter: Adapter, as_peft: bool) -> tuple[EngineError | None, str]:
    """Return the digest of a new engine's weights, or the error by which it refuses to make any.

    Weights that no file holds must have the standard deviation of config.json. With ``as_peft`` an
    adapter must be distributed as PEFT's.
    """
    source = setup.config.model
    saved = set[str]() if source.init == "random" else {*read_safetensors(source.path)}
    try:
        with opened(setup) as engine:
            weights = whole_weights(engine, adapter=adapter)
            drawn = {
                n: t for n, t in weights.items() if t.numel() > 1 and bool((t != t.max()).any())
            }
            for one, other in combinations(drawn, 2):
                equal = torch.equal(drawn[one], drawn[other])
                must(not equal, one, f"has the values of {other}: they do not depend on the name")
            if adapter == "merged":
                made = {name: value for name, value in weights.items() if name not in saved}
                must(bool(made), "weights", "all have the names of saved ones")
                # Gemma 2 adds the one itself.
                norm = 0.0 if read_config(source.path).family == "gemma2" else 1.0
                keys = json.loads(Path(source.path, "config.json").read_text())
                _check_made(made, keys["initializer_range"], norm)
            elif as_peft:
                _check_adapter(weights)
            return None, digest(weights)
    except (ConfigError, UnsupportedCapability) as error:
        return error, ""


def _check_made(weights: Mapping[str, Tensor], spread: float, norm: float) -> None:
    """Require matrices of a standard deviation, norms of one value and biases of zeros."""
    for name, tensor in weights.items():
        values = tensor.double()
        if values.dim() == 1:
            want = 0.0 if name.endswith("bias") else norm
            must(bool((values == want).all()), name, f"has other values than {want}")
        elif values.numel() >= _ENOUGH:
            got = float(values.std())
            problem = f"standard deviation {got:.4g}, initializer_range is {spread}"
            must(0.8 * spread <= got <= 1.25 * spread, name, problem)


def _check_adapter(weights: Mapping[str, Tensor]) -> None:
    """Require A ``[rank, inputs]`` to be drawn as PEFT draws it, and B to be zero."""
    for name, tensor in weights.items():
        values = tensor.double()
        if ".lora_B." in name:
            must(not bool(values.any()), name, "is not zero at the start")
            continue
        spread = 1.0 / math.sqrt(3.0 * values.shape[1])
        mean, got = float(values.mean()), float(values.std())
        # Six times the deviation of a mean of so many values.
        off = 6.0 * spread / math.sqrt(values.numel())
        must(abs(mean) <= off, name, f"mean {mean:.4g}, expected 0 within {off:.4g}")
        problem = f"standard deviation {got:.4g}, expected {spread:.4g} (1 / sqrt(3 * inputs))"
        must(0.7 * spread <= got <= 1.4 * spread, name, problem)


def _made_from_seed(target: Target) -> dict[str, tuple[EngineConfig, Adapter]]:
    """Return configurations by the weights that no file holds, and the export that has them."""
    model = target.model()
    plain = target.config(model, optimizer=None)
    ranged = target.model(keys={"initializer_range": _RANGE})
    source = ModelSource(path=str(ranged), init="random")
    made: dict[str, tuple[EngineConfig, Adapter]] = {
        "random weights": (replace(plain, model=source), "merged")
    }
    if target.model_type == VALUE:
        # The folder of a language model, which has no head for values. It is as wide as its one
        # row takes to have the distribution's standard deviation.
        folder = replace(target, model_type=LM).model(
            hidden_size=_ENOUGH, num_layers=1, keys={"initializer_range": _RANGE_OF_HEAD}
        )
        made["a new value head"] = (target.config(folder, optimizer=None), "merged")
    elif Capability.LORA in target.capabilities:
        lora = LoraConfig(rank=4, target_modules=("q_proj", "down_proj"))
        made["a new adapter"] = (replace(plain, lora=lora), "only")
    return made


@case(id="export.first_values", since="1.3", model_types=TYPES, quick="once")
def first_values_follow_seed(target: Target) -> None:
    """Weights that no file holds MUST follow from the seed: the same on all ranks, in all worlds.

    Random weights (``init: random``), a new value head, a new adapter; another seed makes
    others. Random matrices, a new value head's too, have the standard deviation
    ``initializer_range`` of config.json, norms are ones and biases zeros. An adapter's A has
    zero mean and the spread of PEFT's, and its B is zero. An engine may refuse to make any.

    If this fails: a standard deviation of 0.02 whatever config.json says; each rank draws
    weights of its own, which the first reduction hides; a run of another world size starts
    from another model; all layers start alike.
    """
    alone = target.with_world(1)
    shown = _made_from_seed(target)
    for name, (config, adapter) in shown.items():
        asked = {"adapter": adapter, "as_peft": target.is_asked_since("1.4")}
        ranks = target.run(first_values, replace(config, seed=3), **asked)
        if all(error is not None for error, _ in ranks):
            continue
        one = replace(_made_from_seed(alone)[name][0], seed=3)
        ((_, want),) = alone.run(first_values, one, **asked)
        ((_, other),) = alone.run(first_values, replace(one, seed=4), **asked)
        for rank, (error, got) in enumerate(ranks):
            where = f"rank {rank}"
            must(error is None, name, f"refused on this rank alone: {error!r}", where=where)
            must(got == ranks[0][1], name, "differ from rank 0's", where=where)
            must(got == want, name, "differ from those of one rank", where=where)
        must(other != want, name, "do not depend on the seed")


def live_bytes(setup: Setup, bucket: int, dtype: torch.dtype | None) -> tuple[int, int, int]:
    """Return the most bytes of new storages alive at a yield.

    In addition, the bytes of the whole export and of its largest tensor. A storage that
    was there before, or outlives the export, is the engine's own weight: it is not
    counted.
    """
    # The ranks freeze the objects of earlier jobs, which gc.get_objects would then leave out.
    gc.unfreeze()
    with opened(setup) as engine:
        gc.collect()
        before = bytes_alive(all_tensors())
        looks = list[dict[int, int]]()
        sizes = list[int]()
        references = list[weakref.ref[Tensor]]()
        memory: Any = torch.get_device_module(setup.device) if setup.device != "cpu" else None
        if memory:
            memory.reset_peak_memory_stats()
            allocated = memory.memory_allocated()
        for _, tensor in engine.get_per_tensor_param(dtype=dtype, bucket_bytes=bucket):
            sizes.append(tensor.numel() * tensor.element_size())
            references.append(weakref.ref(tensor))
            yielded = [given for reference in references if (given := reference()) is not None]
            # What is ready but not yet handed out is looked for at a few yields, the first among
            # them: it takes long.
            looks.append(
                bytes_alive([*yielded, *(all_tensors() if len(sizes) % _EVERY == 1 else [])])
            )
            del yielded
        del tensor
        gc.collect()
        own = before.keys() | bytes_alive(all_tensors()).keys()
        most = max(sum(size for place, size in look.items() if place not in own) for look in looks)
        if memory:
            most = max(most, memory.max_memory_allocated() - allocated)
        return most, sum(sizes), max(sizes)


def all_tensors() -> list[Tensor]:
    """Return every plain tensor of this process that Python knows of."""
    # By the exact type: isinstance would ask objects of others for their class, and a DTensor has
    # no storage.
    return [one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter)]


def bytes_alive(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return the bytes of their storages, by address."""
    alive = dict[int, int]()
    for tensor in tensors:
        if tensor.layout != torch.strided:
            continue
        # A wrapper of torch.func, such as compiled flex attention leaves, has no storage of its
        # own: its values are those of another tensor.
        with suppress(NotImplementedError):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                alive[storage.data_ptr()] = storage.nbytes()
    return alive


@case(id="export.bounded", model_types=TYPES)
def bounded(target: Target) -> float:
    """Whole tensors MUST take ``bucket_bytes`` at most at a time, or be one larger tensor.

    Looked at from outside: new tensors that live at a yield, and on an accelerator the
    peak of its memory. Four times the bound is allowed: what is packed, sent and
    received, and the tensor that is handed out.

    If this fails: all weights are gathered first, so that an export needs memory for
    the whole model on each rank.
    """
    bucket = 64 << 10
    margins = []
    config = target.config(target.model(num_layers=12))
    for dtype in (None, torch.bfloat16):  # in another dtype all are copies, on one rank as well
        for rank, (most, whole, largest) in enumerate(
            target.run(live_bytes, config, bucket=bucket, dtype=dtype)
        ):
            allowed = 4 * max(bucket, largest)
            must(whole > 3 * allowed, "fixture", f"an export of {whole} bytes is too small to tell")
            problem = (
                f"{most} bytes of whole tensors at a time, "
                f"for a bucket of {bucket} and an export of {whole}"
            )
            must(most <= allowed, "export", problem, where=f"rank {rank}")
            margins.append(most / allowed)
    return max(margins)


def shards(setup: Setup) -> tuple[Shards, list[str], dict[str, Tensor]]:
    """Return this rank's shards after a step and the whole export's order.

    On rank 0 the export itself is returned, too.
    """
    with opened(setup) as engine:
        step(engine, setup, documents(40, "uneven"))
        return shards_and_whole(engine)


@case(id="export.shards", requires=(Capability.EXPORT_SHARDS,), model_types=TYPES, quick=True)
def shards_cover(target: Target) -> float:
    """All ranks' shards MUST make each exported tensor exactly once, bit for bit.

    They come in the export's order.

    If this fails: uneven shards have a wrong offset, a rank without rows is left out,
    replicas are not counted. If it stalls: the export communicates between two tensors,
    where ranks may read at a pace of their own.
    """
    models = [target.model(num_heads=3, num_kv_heads=1, hidden_size=66, vocab_size=259)]
    experts = Capability.MOE in target.capabilities and target.model_type == LM
    models += target.models({"family": "qwen3_moe", "tied": False}) if experts else []
    for model in models:
        ranks = target.run(shards, target.config(model))
        shards_make_the_whole(ranks)
    return 0.0


_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)
Exported = tuple[Shards, list[str], dict[str, Tensor]]


def in_dtypes(setup: Setup, *, has_shards: bool) -> tuple[EngineError | None, list[Exported]]:
    """Return the exports of a stepped engine in each of `_DTYPES`.

    The error by which it refuses the configuration stands in their place.
    """
    try:
        with opened(setup) as engine:
            step(engine, setup, documents(44, "uneven"))
            return None, [_exported(engine, dtype, has_shards=has_shards) for dtype in _DTYPES]
    except (ConfigError, UnsupportedCapability) as error:
        return error, []


def _exported(engine: Engine, dtype: torch.dtype | None, *, has_shards: bool) -> Exported:
    if has_shards:
        return shards_and_whole(engine, dtype=dtype)
    whole = whole_weights(engine, dtype=dtype)
    return [], list(whole), whole if engine.topology.rank == 0 else {}


@case(id="export.dtypes", since="1.3", model_types=TYPES)
def dtypes(target: Target) -> None:
    """Each requested dtype MUST be the stored weights rounded once; None is the masters' dtype.

    float32, bfloat16, float16 and float64, whole and as shards, of float32 and of bfloat16
    masters. An engine may refuse the latter.

    If this fails: one half type stands for both, so that float16 has bfloat16's three
    digits; bfloat16 masters are exported in float32, twice as large as they are.
    """
    has_shards = Capability.EXPORT_SHARDS in target.capabilities
    for master in (torch.float32, torch.bfloat16):
        name = str(master).removeprefix("torch.")
        precision = Precision(master=name, compute=target.dtype)  # type: ignore[arg-type] - checked by EngineConfig
        config = target.config(target.model(), precision=precision)
        ranks = target.run(in_dtypes, config, has_shards=has_shards)
        if master != torch.float32 and all(error is not None for error, _ in ranks):
            continue
        for rank, (error, _) in enumerate(ranks):
            must(error is None, f"{name} masters", f"refused: {error!r}", where=f"rank {rank}")
        stored = ranks[0][1][0][2]
        others = [n for n, tensor in stored.items() if tensor.dtype != master]
        must(not others, "export in the masters' dtype", f"{others[:3]} are not {name}")
        for at, dtype in enumerate(_DTYPES):
            exports = [found[at] for _, found in ranks]
            want = {n: tensor.to(dtype or master) for n, tensor in stored.items()}
            assert_bitwise(exports[0][2], want, name=f"export of {name} masters in {dtype}")
            if has_shards:
                shards_make_the_whole(exports)


def around_a_load(setup: Setup, folder: Path, *, has_shards: bool) -> tuple[Exported, Exported]:
    """Return the export at a save, and that of another engine that loads it between two exports."""
    with opened(setup) as engine:
        step(engine, setup, documents(45, "uneven"))
        save(engine, folder)
        saved = _exported(engine, torch.bfloat16, has_shards=has_shards)
    with opened(setup) as engine:
        step(engine, setup, documents(46, "uneven"))
        _exported(engine, torch.bfloat16, has_shards=has_shards)
        engine.load_checkpoint(folder)
        return saved, _exported(engine, torch.bfloat16, has_shards=has_shards)


@case(id="export.after_load", since="1.3", model_types=TYPES)
def after_load(target: Target) -> None:
    """An export after a load MUST have the loaded weights, also where the version is as before.

    If this fails: what was cast for an earlier export is kept by the number of
    ``weight_version``, which the load has not moved.
    """
    has_shards = Capability.EXPORT_SHARDS in target.capabilities
    config = target.config(target.model())
    ranks = target.run(
        around_a_load, config, folder=target.scratch() / "one", has_shards=has_shards
    )
    saved, loaded = [one for one, _ in ranks], [other for _, other in ranks]
    assert_bitwise(loaded[0][2], saved[0][2], name="export after a load")
    if has_shards:
        for rank, ((want, _, _), (got, _, _)) in enumerate(zip(saved, loaded, strict=True)):
            boxes = [[(name, spec) for name, _, spec in shards] for shards in (want, got)]
            must(boxes[0] == boxes[1], "shards", "differ after a load", where=f"rank {rank}")
            assert_bitwise(
                {name: shard for name, shard, _ in got},
                {name: shard for name, shard, _ in want},
                name=f"shards after a load, rank {rank}",
            )


def save_folder(setup: Setup, folder: Path, call: InferCall) -> RankOutputs:
    """Take a step and write the Hugging Face folder in float32 and bfloat16.

    Return the engine's own outputs for ``call``.
    """
    with opened(setup) as engine:
        step(engine, setup, documents(41, "uneven"))
        own = infer_on_rank(engine, call, setup.device)
        whole = whole_weights(engine)
        engine.save_hf(folder / "float32")
        engine.save_hf(folder / "bfloat16", dtype=torch.bfloat16)
        if engine.topology.rank == 0:
            torch.save(whole, folder / "whole.pt")
        return own


def transformers_log_probs(setup: Setup, folder: Path, ids: Tensor) -> Tensor:
    """Return log-probs of one document by transformers' own loading of ``folder``.

    In float32 on the CPU.
    """
    del setup
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        scores = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
    return torch.cat([torch.zeros(1), scores.gather(-1, ids[1:, None])[:, 0]])


@case(id="export.save_hf", requires=(Capability.SAVE_HF,), quick=True)
def save_hf(target: Target) -> float:
    """A ``save_hf`` folder MUST load in transformers and the oracle, with equal results.

    Weights and outputs are equal to the engine's own.

    If this fails: config.json names another dtype, head, architecture or base of rotary
    angles, or lacks the overrides with which the model was built; a tied head is stored
    under both names; files do not state the format of their tensors, without which
    transformers 4 does not read them.
    """
    folder = target.scratch()
    margins = list[float]()
    call = InferCall(documents=documents(42, "single"))
    tokens = {"bos_token_id": 5, "eos_token_id": 7, "pad_token_id": 9}
    models = target.models(
        {"family": "qwen3", "tied": True, "keys": tokens}, {"family": "llama", "tied": False}
    )
    for model in models or [target.model()]:
        place = folder / model.name
        place.mkdir()
        config, overrides = _overridden(target, model)
        outputs = target.run(save_folder, config, folder=place, call=call)
        whole = torch.load(place / "whole.pt", weights_only=True)
        assert_bitwise(written_weights(place / "float32"), whole, name="save_hf")
        assert_bitwise(
            written_weights(place / "bfloat16"), _bfloat16(whole), name="bfloat16 save_hf"
        )
        for written in ("float32", "bfloat16"):
            _says_the_same(model, place / written, overrides)
        ids = torch.tensor(call.documents.input_ids)
        oracle = written_model(place / "float32")
        want = oracle.token_outputs(ids, [0, len(ids)]).log_probs
        margins.append(outputs_match(target, oracle, call, outputs))
        got = target.run(
            transformers_log_probs, target.config(model), folder=place / "float32", ids=ids
        )[0]
        margins.append(
            assert_close_per_token("transformers' log_probs", got, want, tolerance("log_probs"))
        )
    return max(margins)


@case(id="export.save_hf_values", since="1.3", requires=(Capability.SAVE_HF,), model_types=(VALUE,))
def save_hf_values(target: Target) -> float:
    """A value model's folder MUST hold its head, and give the engine's values in the oracle.

    If this fails: the head lives outside the module that is written, or the folder is
    written as that of the language model under it.
    """
    model = target.model()
    call = InferCall(documents=documents(42, "single"))
    folder = target.scratch()
    outputs = target.run(save_folder, target.config(model), folder=folder, call=call)
    whole = torch.load(folder / "whole.pt", weights_only=True)
    assert_bitwise(written_weights(folder / "float32"), whole, name="save_hf")
    assert_bitwise(written_weights(folder / "bfloat16"), _bfloat16(whole), name="bfloat16 save_hf")
    return outputs_match(target, written_model(folder / "float32"), call, outputs)


# These files of a model's folder are read with its tokenizer. One of them has a name that only the
# pattern of names covers, and one is in a second format for the same tokenizer.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def _content(name: str) -> bytes:
    """Return the content of a file, which is JSON where its name says so."""
    text = json.dumps({"file": name, "name": "é"}, ensure_ascii=False)
    return (text if name.endswith(".json") else f"{name}\r\n\u00e9 without a last newline").encode()


def write_twice(setup: Setup, folder: Path) -> None:
    """Write a Hugging Face folder under a new name and over a folder with two files of its own."""
    with opened(setup) as engine:
        engine.save_hf(folder / "deep" / "new")
        engine.save_hf(folder / "over")


@case(id="export.save_hf_tokenizer", since="1.3", requires=(Capability.SAVE_HF,), world=(1, 2))
def save_hf_tokenizer(target: Target) -> None:
    """The tokenizer of the model's folder MUST be in the folder of ``save_hf``, byte for byte.

    A folder with that name keeps its own tokenizer and its other files: a trainer may have
    saved a tokenizer with a chat template of its own. Its former weights, in several files with
    an index, give way to the new ones. A folder is made with its parents.

    If this fails: config.json and weights alone are written, files are read and written as
    text, the folder is replaced with everything in it, or an index of former weights stays, by
    which a reader finds those instead of the new ones.
    """
    scratch = target.scratch()
    source = scratch / "model"
    shutil.copytree(target.model(), source)
    for name in COMPANIONS:
        (source / name).write_bytes(_content(name))
    (source / "notes.txt").write_text("not of the tokenizer")
    own = {"tokenizer_config.json": b'{"file": "of the trainer"}', "README.md": b"of the user"}
    # Of the same names and shapes, so that a reader would take them.
    shutil.copytree(target.model(seed=9, shards=2), scratch / "over")
    for name, content in own.items():
        (scratch / "over" / name).write_bytes(content)

    target.run(write_twice, target.config(source), folder=scratch)

    new, over = scratch / "deep" / "new", scratch / "over"
    _holds(new, {name: _content(name) for name in COMPANIONS})
    _holds(over, {name: _content(name) for name in COMPANIONS} | own)
    stored = read_safetensors(source)
    for folder in (new, over):
        assert_bitwise(written_weights(folder), stored, name=f"weights of the folder {folder.name}")


def write_folders(setup: Setup, folder: Path) -> None:
    """Write the Hugging Face folder in float32 and bfloat16, without a step."""
    with opened(setup) as engine:
        engine.save_hf(folder / "float32")
        engine.save_hf(folder / "bfloat16", dtype=torch.bfloat16)


@case(id="export.save_hf_mtp", since="1.4", requires=(Capability.SAVE_HF,), world=(1, 2))
def save_hf_mtp(target: Target) -> None:
    """A head that predicts further tokens MUST be in the folder of ``save_hf``, bit for bit.

    The model's folder has it in a file of its own, in two dtypes. It is kept in these when the
    model is written in another dtype. It is there in both forms that folders have: under names of
    its own as in Qwen3-Next's, and as a further layer that config.json counts as in DeepSeek-V3's.

    If this fails: the weights that the engine computes with are all that is written, so that a
    server can no longer guess tokens with the head; or all weights are cast on the way.
    """
    scratch = target.scratch()
    source = scratch / "model"
    shutil.copytree(target.model(shards=2), source)
    model = read_safetensors(source)
    generator = torch.Generator().manual_seed(43)
    path = source / "config.json"
    config = json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config))
    further = f"model.layers.{config['num_hidden_layers']}"
    head = {
        f"{further}.eh_proj.weight": torch.randn(16, 8, generator=generator),
        "mtp.fc.weight": torch.randn(8, 16, generator=generator).bfloat16(),
        "mtp.layers.0.mlp.up_proj.weight": torch.randn(16, 8, generator=generator),
        "mtp.norm.weight": torch.ones(8).bfloat16(),
    }
    save_file(head, source / "mtp.safetensors", metadata={"format": "pt"})
    file = source / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= dict.fromkeys(head, "mtp.safetensors")
    file.write_text(json.dumps(index))

    target.run(write_folders, target.config(source), folder=scratch)

    wanted = {"float32": model | head, "bfloat16": _bfloat16(model) | head}
    for name, tensors in wanted.items():
        assert_bitwise(written_weights(scratch / name), tensors, name=f"{name} save_hf")
        _says_the_same(source, scratch / name, {})


def _holds(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        where = f"{folder.name}/{name}"
        must(path.is_file(), "save_hf", "the file is not in the folder", where=where)
        must(path.read_bytes() == content, "save_hf", "the file has another content", where=where)


def _overridden(target: Target, model: Path) -> tuple[EngineConfig, dict[str, float]]:
    """Return the configuration of a model with an override, and the override.

    It has none for an engine that refuses them.
    """
    plain = target.config(model)
    overrides = {"rms_norm_eps": 1e-3}
    config = replace(plain, model=replace(plain.model, config_overrides=overrides))
    refused = any(error is not None for error in target.run(build, config))
    return (plain, {}) if refused else (config, overrides)


def _says_the_same(source: Path, written: Path, overrides: Mapping[str, float]) -> None:
    """Require ``config.json`` to say what the source's says, but for its dtype and RoPE's keys.

    transformers has renamed the latter two; the oracle reads RoPE.
    """
    want, got = (json.loads((folder / "config.json").read_text()) for folder in (source, written))
    want |= overrides
    renamed = {"dtype", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters"}
    for key in want.keys() - renamed:
        problem = f"{key} is {got.get(key)!r}, the model's folder says {want[key]!r}"
        must(got.get(key) == want[key], "config.json of save_hf", problem)


def _bfloat16(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() for name, tensor in whole.items()}
