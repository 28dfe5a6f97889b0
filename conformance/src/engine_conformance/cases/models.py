"""Requests of ``config.json``, which an engine computes rightly or refuses by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors.torch import save_file

from engine_api.config import EngineConfig
from engine_api.errors import (
    BatchError,
    EngineError,
    RankFailure,
)
from engine_conformance.cases._case import EXPERTS, LM, VALUE, case, must
from engine_conformance.cases._expect import (
    asking,
    documents,
    oracle_of,
    oracle_training,
    outputs_match,
    require_refusal_by_name,
    training_matches,
)
from engine_conformance.cases._ranks import (
    InferCall,
    RankOutputs,
    Trained,
    build,
    infer_on_rank,
    opened,
    step,
    summary,
    whole_weights,
)
from engine_conformance.cases._target import Setup, Target
from engine_conformance.compare import ConformanceFailure
from engine_conformance.fixtures import PackedDocuments, packed_documents
from engine_conformance.oracle import expected_shapes, read_config, read_safetensors
from engine_conformance.oracle.config import ACTIVATIONS
from engine_conformance.seeds import cached_by_seed

TYPES = (LM, VALUE)
SINCE = "1.3"
CONTEXT = 16
# Documents within the context, of different lengths, of one length and as long as it may be, then
# documents beyond it, by one token and by many, as the first of its pack and behind short ones, on
# one rank and on two.
LENGTHS = (
    (7, 1, 12, 5, 3, 9),
    (8, 8, 8, 8),
    (CONTEXT, 3, 5),
    (CONTEXT + 1, 2, 3),
    (24, 2, 2, 2),
    (2, 3, CONTEXT + 1, 2),
)
_WITHIN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """Requests of one model.

    Attributes:
        words: of which a refusal says at least one, in any case of letters.
        model: arguments of `TinyModel`.
        overrides: ``model.config_overrides``, which lead from another model's folder, without
            the same keys, to this model.
        has_kinks: True where the gradient jumps, on either side of which rounding may put a unit:
            outputs alone are compared.
    """

    words: tuple[str, ...]
    model: dict[str, Any]
    overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    has_kinks: bool = False


def _rope(kind: str, **keys: Any) -> ModelRequest:
    rope = {"rope_type": kind, **keys}
    # A longrope has the context of its short factors, and a longer one altogether.
    longest = 4 * CONTEXT if kind == "longrope" else CONTEXT
    return ModelRequest(
        words=("rope", "rotary"), model={"family": "llama", "max_position": longest, "rope": rope}
    )


def _window(family: str, **keys: Any) -> ModelRequest:
    words = ("window", "sliding", family)
    return ModelRequest(
        words=words, model={"family": family, "keys": {"sliding_window": 4, **keys}}
    )


def _cap(*, missing: str, **keys: Any) -> ModelRequest:
    # The window is longer than every document: it is not what the case is about.
    given = {"query_pre_attn_scalar": 16, "sliding_window": 64, missing: None, **keys}
    words = ("gemma2", "softcap", *keys)
    return ModelRequest(words=words, model={"family": "gemma2", "keys": given})


def _activation(name: str, **model: Any) -> ModelRequest:
    # Experts may be what is refused.
    words = ("activation", "hidden_act", name, "moe", "expert")
    keys = {"hidden_act": name}
    return ModelRequest(words=words, model={"keys": keys, **model}, has_kinks=name == "relu")


def _mixture(**keys: Any) -> ModelRequest:
    words = ("moe", "expert", *keys)
    return ModelRequest(words=words, model={"family": "qwen3_moe", "tied": False, "keys": keys})


ROPES: dict[str, ModelRequest] = {
    "linear": _rope("linear", factor=2.5),
    "dynamic": _rope("dynamic", factor=2.0),
    "yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "llama3": _rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "longrope": _rope(
        "longrope",
        factor=4.0,
        original_max_position_embeddings=CONTEXT,
        short_factor=[1.0 + i / 16 for i in range(8)],
        long_factor=[1.0 + i / 2 for i in range(8)],
    ),
    "yarn with bounds and a factor of its own": _rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.3,
    ),
    "longrope with a factor of its own": _rope(
        "longrope",
        factor=4.0,
        original_max_position_embeddings=CONTEXT,
        attention_factor=1.2,
        short_factor=[1.0 + i / 16 for i in range(8)],
        long_factor=[1.0 + i / 2 for i in range(8)],
    ),
    "linear in the older keys": ModelRequest(
        words=("rope", "rotary"),
        model={
            "family": "llama",
            "old_config_keys": True,
            "rope": {"type": "linear", "factor": 2.5},
        },
    ),
}
WINDOWS: dict[str, ModelRequest] = {
    "in all layers": _window("mistral"),
    "above a layer": _window("qwen2", use_sliding_window=True, max_window_layers=1),
    "by type of layer": _window(
        "qwen3", use_sliding_window=True, layer_types=["sliding_attention", "full_attention"]
    ),
    "not switched on": _window("qwen2", use_sliding_window=False),
    "not switched on, with norms of heads": _window("qwen3", use_sliding_window=False),
}
CAPS: dict[str, ModelRequest] = {
    "of scores": _cap(missing="final_logit_softcapping", attn_logit_softcapping=2.0),
    "of logits": _cap(missing="attn_logit_softcapping", final_logit_softcapping=3.0),
    # Heads are 16 wide, so that the scale is another one than theirs.
    "none, and another scale of scores": _cap(
        missing="attn_logit_softcapping", final_logit_softcapping=None, query_pre_attn_scalar=40
    ),
}
SHAPES: dict[str, ModelRequest] = {
    "biases on every projection": ModelRequest(
        words=("bias",),
        model={"family": "llama", "keys": {"attention_bias": True, "mlp_bias": True}},
    ),
    "biases beside norms of heads": ModelRequest(
        words=("bias",), model={"family": "qwen3", "keys": {"attention_bias": True}}
    ),
    "heads wider than their share": ModelRequest(words=("head_dim",), model={"head_dim": 24}),
    "one head of keys": ModelRequest(words=("num_key_value_heads",), model={"num_kv_heads": 1}),
    "a vocabulary of 259": ModelRequest(words=("vocab",), model={"vocab_size": 259}),
    "another vocabulary, untied": ModelRequest(
        words=("vocab",), model={"vocab_size": 331, "tied": False}
    ),
    "a vocabulary beyond 16 bits": ModelRequest(
        words=("vocab",), model={"vocab_size": 70_001, "hidden_size": 16, "num_layers": 1}
    ),
    **{f"activation {name}": _activation(name) for name in ACTIVATIONS if name != "silu"},
    "activation gelu of experts": _activation("gelu", family="qwen3_moe", tied=False),
    "a mixture with a dense layer": _mixture(mlp_only_layers=[0]),
    "a mixture in every second layer": _mixture(decoder_sparse_step=2),
}
# Those whose layers differ in the weights that they have.
MIXTURES = ("a mixture with a dense layer", "a mixture in every second layer")
# By family, keys of config.json that may be left out, with arguments of `TinyModel` for which
# transformers' default is what the model has.
LEFT_OUT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": (
        {"num_kv_heads": 4, "tied": False},
        (
            "attention_dropout",
            "head_dim",
            "hidden_act",
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_parameters",
            "tie_word_embeddings",
        ),
    ),
    # Not hidden size / heads, as in the other families.
    "qwen3": ({"head_dim": 128}, ("head_dim",)),
    "qwen3_moe": (
        {"norm_topk_prob": False, "tied": False},
        ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "tie_word_embeddings"),
    ),
}
DROPOUTS: dict[str, dict[str, ModelRequest]] = {
    LM: {
        "of attention": ModelRequest(
            words=("dropout",), model={"family": "llama", "keys": {"attention_dropout": 0.1}}
        )
    },
    VALUE: {
        "before the head": ModelRequest(
            words=("dropout",), model={"keys": {"classifier_dropout": 0.1}}
        ),
        "of attention": ModelRequest(
            words=("dropout",), model={"keys": {"attention_dropout": 0.1}}
        ),
    },
}
FILES: dict[str, ModelRequest] = {
    "weights in bfloat16": ModelRequest(words=("bfloat16",), model={"stored": "bfloat16"}),
    "an override": ModelRequest(
        words=("override",),
        model={"rms_norm_eps": 0.01},
        overrides={"rms_norm_eps": 0.01},
    ),
    "weights in float16": ModelRequest(words=("float16",), model={"stored": "float16"}),
    "an override by what may be refused": ModelRequest(
        words=("override", "activation", "hidden_act", "gelu"),
        model={"keys": {"hidden_act": "gelu"}},
        overrides={"hidden_act": "gelu"},
    ),
    "an override of a part": ModelRequest(
        words=("override", "rope"),
        model={"rope_theta": 500.0},
        overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
}


# A batch that one rank refuses ends the call on the others by a `RankFailure`.
Refusal = BatchError | RankFailure


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Result of a model on one rank: its refusal, or the results of calls and a step."""

    refused: EngineError | None = None
    outputs: list[RankOutputs | Refusal] = field(default_factory=list[RankOutputs | Refusal])
    trained: Trained | None = field(default=None, repr=False)


def attempt(setup: Setup, calls: Sequence[InferCall], batch: PackedDocuments) -> Attempt:
    """Build the engine, make the calls and take a step, unless the model is refused."""
    engine = None
    try:
        engine = setup.create()
        engine.initialize()
    except EngineError as error:
        if engine is not None:
            engine.close()
        return Attempt(refused=error)
    try:
        outputs: list[RankOutputs | Refusal] = []
        for call in calls:
            try:
                outputs.append(infer_on_rank(engine, call, setup.device))
            except (BatchError, RankFailure) as error:
                outputs.append(error)
        return Attempt(outputs=outputs, trained=summary(engine, [step(engine, setup, batch)]))
    finally:
        engine.close()


def _require_right_or_refused(target: Target, requests: dict[str, ModelRequest]) -> float:
    """Require right outputs and a right step of each model, or its refusal on every rank.

    Models of families that the engine does not declare are left out.
    """
    margins = [0.0]
    for name, one in requests.items():
        family = one.model.get("family", target.families[0])
        # In 16 bits rounding decides which experts a token has, and with them its gradient.
        decided = family in EXPERTS and target.dtype != "float32"
        if family in target.families and not decided:
            margins.append(_compare_model(target, name, one))
    return max(margins)


def _compare_model(target: Target, name: str, request: ModelRequest) -> float:
    model = target.model(**request.model)
    config = _request_config(target, request)
    smooth = not request.has_kinks
    try:
        return _compare_built(target, name, request.words, model, config, smooth=smooth)
    except ConformanceFailure as failure:
        hint = f"this is about {name!r}, which may be computed rightly or be refused by its name"
        raise failure.with_hint(hint) from failure


def _compare_built(
    target: Target,
    name: str,
    words: Sequence[str],
    model: Path,
    config: EngineConfig,
    *,
    smooth: bool = True,
) -> float:
    """Compare what a configuration builds with the oracle of ``model``, unless it is refused.

    A step is compared too where the gradient is ``smooth``.
    """
    oracle = oracle_of(str(model))
    calls = [asking(target, _batch(81, lengths, oracle.config.vocab_size)) for lengths in LENGTHS]
    batch = _batch(82, LENGTHS[0], oracle.config.vocab_size)
    ranks: list[Attempt] = target.run(attempt, config, calls=calls, batch=batch)
    if any(rank.refused for rank in ranks):
        require_refusal_by_name(name, words, [rank.refused for rank in ranks])
        return 0.0
    margins = list[float]()
    for i, call in enumerate(calls):
        rows = [rank.outputs[i] for rank in ranks]
        errors = [row for row in rows if not _has_outputs(row)]
        if i >= _WITHIN and any(isinstance(error, BatchError) for error in errors):
            # A document beyond the model's context may be refused when it comes.
            must(len(errors) == len(rows), name, "a long document is refused on some ranks only")
            continue
        must(not errors, name, f"a short document is refused: {errors[:1]}")
        margins.append(outputs_match(target, oracle, call, [r for r in rows if _has_outputs(r)]))
    trained = [rank.trained for rank in ranks if smooth and rank.trained is not None]
    if trained:
        want = oracle_training(str(model), (batch,))
        margins.append(training_matches(target, trained, want, oracle))
    return max(margins)


def random_shapes(setup: Setup) -> EngineError | dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of an engine that draws them, or its refusal."""
    error = build(setup)
    if error is not None:
        return error
    with opened(setup) as engine:
        return {name: tuple(value.shape) for name, value in whole_weights(engine).items()}


def _require_weights_of(target: Target, name: str, request: ModelRequest) -> None:
    """Require random weights of the names and shapes of a model's, or a refusal on every rank."""
    model = target.model(**request.model)
    config = target.config(model, optimizer=None)
    source = replace(config.model, init="random")
    ranks: list[EngineError | dict[str, tuple[int, ...]]] = target.run(
        random_shapes, replace(config, model=source)
    )
    errors = [one if isinstance(one, EngineError) else None for one in ranks]
    if any(errors):
        require_refusal_by_name(name, ("init", "random", *request.words), errors)
        return
    want = expected_shapes(read_config(model))
    for rank, got in enumerate(ranks):
        assert not isinstance(got, EngineError)
        differ = sorted({*got.items()} ^ {*want.items()})
        problem = f"those of {name} and the random ones differ: {differ[:2]}"
        must(not differ, "weights", problem, where=f"rank {rank}")


@cached_by_seed
def _batch(seed: int, lengths: tuple[int, ...], vocab_size: int) -> PackedDocuments:
    """Return documents with ids of the whole vocabulary."""
    return packed_documents(seed, lengths, vocab_size)


def _has_outputs(row: RankOutputs | Refusal) -> TypeGuard[RankOutputs]:
    return isinstance(row, RankOutputs)


def _request_config(target: Target, request: ModelRequest) -> EngineConfig:
    """Return the configuration that asks for it, by the folder or by overrides."""
    if not request.overrides:
        return target.config(target.model(**request.model))
    changed = {*request.overrides, *request.overrides.get("rope_parameters", {})}
    plain = {key: value for key, value in request.model.items() if key not in changed}
    keys = {key: value for key, value in plain.get("keys", {}).items() if key not in changed}
    plain |= {"keys": keys}
    config = target.config(target.model(**plain))
    return replace(config, model=replace(config.model, config_overrides=request.overrides))


_OWN_CODE = """\
from pathlib import Path

from transformers import LlamaConfig

Path({marker!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own"


class Own:
    config_class = OwnConfig
"""


def _add_own_code(model: Path, folder: Path, marker: Path, **keys: Any) -> Path:
    """Copy a model, and let its ``config.json`` name code that leaves ``marker`` where it runs."""
    shutil.copytree(model, folder)
    (folder / "own.py").write_text(_OWN_CODE.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "own.OwnConfig"}
    auto |= dict.fromkeys(("AutoModelForCausalLM", "AutoModelForTokenClassification"), "own.Own")
    config |= {"auto_map": auto, **keys}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@case(id="models.own_code", since=SINCE, model_types=TYPES)
def own_code(target: Target) -> float:
    """Code that comes in a model's folder MUST NOT run unless ``trust_remote_code`` asks for it.

    A folder of a known family is computed without it, or refused. One whose family only its
    code knows is refused by name.

    If this fails: ``trust_remote_code=True`` is passed on whatever the configuration says.
    """
    scratch = target.scratch()
    marker = scratch / "ran"
    model = target.model(family=target.families[0])
    known = _add_own_code(model, scratch / "known", marker)
    margin = _compare_built(
        target, "known family", ("auto_map", "code"), model, target.config(known)
    )
    must(not marker.exists(), "own code", "ran for a known family, without being asked for")
    unknown = _add_own_code(model, scratch / "unknown", marker, model_type="own")
    ranks: list[Attempt] = target.run(
        attempt, target.config(unknown), calls=[], batch=documents(82)
    )
    must(not marker.exists(), "own code", "ran for an unknown family, without being asked for")
    require_refusal_by_name("unknown family", ("own", "code"), [rank.refused for rank in ranks])
    return margin


@case(id="models.rope", since=SINCE, quick="once")
def rope(target: Target) -> float:
    """Scaled rotary positions MUST be computed as ``config.json`` says, or be refused by name.

    The kinds are ``linear``, ``dynamic``, ``yarn``, ``llama3`` and ``longrope``, in
    transformers' present and older keys. A kind that follows the length of a document does
    so document by document, or the engine refuses longer ones (``BatchError``).

    If this fails: ``rope_parameters`` or ``rope_scaling`` is not read, frequencies are
    right and the factor of cosine and sine is left out (YaRN), the longest document of
    the pack decides for all, or the limit of length is asked of the first document alone.
    """
    return _require_right_or_refused(target, ROPES)


@case(id="models.windows", since=SINCE)
def windows(target: Target) -> float:
    """A sliding window MUST hold in its layers, documents and to the token, or be refused by name.

    A token attends to as many tokens as the window has, itself included, in all layers
    (Mistral), from a layer on (Qwen2) or by type of layer (Qwen3). A window that is
    not switched on has no effect.

    If this fails: the window is one too wide or too narrow, applies in every layer, or
    attention is full.
    """
    return _require_right_or_refused(target, WINDOWS)


@case(id="models.caps", since=SINCE, families=("gemma2",))
def caps(target: Target) -> float:
    """Caps and scales of scores and logits MUST be applied, or the model be refused by name.

    A cap c makes x ``c * tanh(x / c)``, before the temperature. The model is Gemma 2.

    If this fails: an attention kernel without caps is used, or a chunked head leaves its
    cap out.
    """
    return _require_right_or_refused(target, CAPS)


def _without(keys: dict[str, Any], gone: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in gone}


@case(id="models.shapes", since=SINCE)
def shapes(target: Target) -> float:
    """Biases, heads, vocabularies and activations MUST be computed rightly or be refused by name.

    These are biases on each projection (the output's and the MLP's too), heads whose
    width is not hidden size / heads, one head of keys, vocabularies that no two ranks
    divide, the activations gelu, gelu_pytorch_tanh and relu, mixtures with dense layers, and
    transformers' defaults of keys that are left out.

    If this fails: the MLP's activation is SiLU whatever ``hidden_act`` is, a bias is dropped,
    ``head_dim`` is derived where it is given, or rows of the vocabulary are lost where
    ranks share it, or a key that config.json leaves out has another default than in transformers.
    """
    margins = [_require_right_or_refused(target, SHAPES)]
    for name in MIXTURES:
        if "qwen3_moe" in target.families:
            _require_weights_of(target, name, SHAPES[name])
    for family, (arguments, left_out) in LEFT_OUT.items():
        if family in target.families and not (family in EXPERTS and target.dtype != "float32"):
            whole = target.model(family=family, **arguments)
            model = target.edited(whole, partial(_without, gone=left_out))
            name = f"keys left out of {family}"
            # Experts may be what is refused.
            words = ("moe", "expert", *left_out)
            margins.append(_compare_built(target, name, words, model, target.config(model)))
    return max(margins)


@case(id="models.dropout", since=SINCE, model_types=TYPES)
def dropout(target: Target) -> float:
    """A model with dropout MUST be refused by the key, or trained without it.

    The log-probs of a training pass are those of inference: with dropout the ratio of an
    on-policy step is not 1, and no step can be repeated.

    If this fails: the model was left in training mode with its own rates.
    """
    return _require_right_or_refused(target, DROPOUTS[target.model_type])


# Methods of quantization, each with its quantization_config apart from the method's name.
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "fp8": {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "bitsandbytes": {"load_in_8bit": True, "load_in_4bit": False},
    "gptq": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True},
}
# Largest values of the formats.
_E4M3 = 448.0
_INT8 = 127.0


def _quantize(model: Path, scratch: Path, method: str) -> tuple[Path, Path]:
    """Write a model with quantized projections, and the model that they stand for.

    Weights are at most 128 wide and high, so that each has one block, and one scale in fp8.
    """
    stored, plain = scratch / "stored", scratch / "plain"
    quantized = dict[str, torch.Tensor]()
    meant = dict[str, torch.Tensor]()
    for name, tensor in read_safetensors(model).items():
        quantized[name] = meant[name] = tensor
        if not name.endswith("_proj.weight"):
            continue
        stem = name.removesuffix(".weight")
        if method == "fp8":
            scale = tensor.abs().max() / _E4M3
            quantized[name] = (tensor / scale).to(torch.float8_e4m3fn)
            quantized[f"{name}_scale_inv"] = scale.reshape(1, 1)
            meant[name] = quantized[name].float() * scale
        elif method == "bitsandbytes":
            scale = tensor.abs().amax(dim=1) / _INT8
            quantized[name] = (tensor / scale[:, None]).round().to(torch.int8)
            quantized[f"{stem}.SCB"] = scale * _INT8
            meant[name] = quantized[name].float() * scale[:, None]
        else:
            # All values are the zero point, 8 of 0 to 15, so that the weight is zero.
            del quantized[name]
            rows, columns = tensor.shape
            groups = columns // QUANTIZATIONS[method]["group_size"]
            quantized[f"{stem}.qweight"] = torch.full((columns // 8, rows), -0x77777778).int()
            quantized[f"{stem}.qzeros"] = torch.full((groups, rows // 8), 0x77777777).int()
            quantized[f"{stem}.scales"] = torch.ones(groups, rows, dtype=torch.float16)
            quantized[f"{stem}.g_idx"] = torch.arange(columns).int() // (columns // groups)
            meant[name] = torch.zeros_like(tensor)
    config = json.loads((model / "config.json").read_text())
    asked = {"quantization_config": {"quant_method": method, **QUANTIZATIONS[method]}}
    for folder, tensors, keys in ((stored, quantized, asked), (plain, meant, {})):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return stored, plain


@case(id="models.files", since=SINCE, model_types=TYPES)
def files(target: Target) -> float:
    """Weights in bfloat16 and overrides of ``config.json`` MUST be read, or be refused by name.

    In float16 too, and overrides of a part of a key's value. A file that the folder's index
    does not name is not read. Quantized weights (``quantization_config``: fp8, bitsandbytes,
    GPTQ) are read with their scales.

    If this fails: masters are in the files' dtype, so that small updates are lost, an
    override does not reach the model, an older copy in the folder replaces the weights, or
    quantized weights are read without their scales.
    """
    margin = _require_right_or_refused(target, FILES)
    model = target.model(shards=2)
    folder = target.scratch() / "model"
    shutil.copytree(model, folder)
    stale = {name: torch.zeros_like(tensor) for name, tensor in read_safetensors(model).items()}
    save_file(stale, folder / "older.safetensors", metadata={"format": "pt"})
    words = ("older.safetensors", "index")
    margins = [margin]
    margins.append(_compare_built(target, "an unnamed file", words, model, target.config(folder)))
    for method in QUANTIZATIONS:
        stored, plain = _quantize(target.model(), target.scratch(), method)
        words = ("quant", method)
        margins.append(_compare_built(target, method, words, plain, target.config(stored)))
    return max(margins)
