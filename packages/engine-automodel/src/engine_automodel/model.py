"""Automodel's model, wrapped to return per-token outputs of a packed micro-batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from engine_api.config import EngineConfig, ModelSource
from engine_api.devices import device_of
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.hf_config import require_memory, unbuildable
from engine_api.hf_folder import WeightFiles, fetch
from engine_api.hf_names import Piece
from engine_api.hf_noise import refuse_noise
from engine_automodel.library import (
    FAMILIES,
    apply_ep,
    find_plan,
    has_experts,
    has_plan,
    make_decoder,
)
from engine_automodel.modules import Experts, PackedLatentAttention, adapt
from engine_automodel.parallel import Layout
from engine_automodel.plugin import PLUGIN
from engine_torch import attention, lora
from engine_torch.boxes import find_box
from engine_torch.decoder import BuiltDecoder, PackedDecoder, check_divisible
from engine_torch.head import VocabularyShard
from engine_torch.inputs import PackedInputs
from engine_torch.mechanisms import has_sinks, refuse_unserved
from engine_torch.model import (
    DTYPES,
    Kind,
    ModelClasses,
    make_model,
    read_config,
    recompute_children,
)

__all__ = ["PackedAutomodel", "build_decoder", "place_positions", "tie"]

# Types of rotary positions whose frequencies do not depend on the length of a document.
_ROPE = ("default", "linear", "llama3", "yarn")
# Families of which Automodel rotates a part of each head.
_PARTLY_ROTATED = ("glm4_moe", "minimax_m2")
_SILU_UNTIED: Mapping[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False}
_LATENT: Mapping[str, Any] = {**_SILU_UNTIED, "attention_bias": False, "rope_interleave": True}
# Fields that Automodel's mixtures of experts do not read, with the one value that they compute.
_FIXED: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {**_SILU_UNTIED, "use_sliding_window": False},
    "deepseek_v3": _LATENT,
    "gpt_oss": {"tie_word_embeddings": False, "attention_bias": True, "swiglu_alpha": 1.702},
    "glm4_moe": _SILU_UNTIED,
    "glm4_moe_lite": _LATENT,
    "minimax_m2": _SILU_UNTIED,
}
# Field that counts the experts.
_COUNTS: Mapping[str, str] = {
    "qwen3_moe": "num_experts",
    "deepseek_v3": "n_routed_experts",
    "gpt_oss": "num_local_experts",
    "glm4_moe": "n_routed_experts",
    "glm4_moe_lite": "n_routed_experts",
    "minimax_m2": "num_local_experts",
}
# Parts of names in Automodel's models, with those in transformers'.
_RENAMED: Mapping[str, tuple[str, str]] = {
    "gpt_oss": (".mlp.gate.", ".mlp.router."),
    "minimax_m2": (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),
}


class AutomodelClasses(ModelClasses):
    """The families of Automodel, with the saved names of transformers' own classes."""

    engine = "engine-automodel"

    def check(self, hf_config: Any, kind: Kind, source: ModelSource) -> None:
        """Raise ``ConfigError`` for a family that the engine does not build."""
        if hf_config.model_type not in FAMILIES:
            raise ConfigError(
                "model.path",
                f"expected a model of type {' or '.join(FAMILIES)}, got {hf_config.model_type!r}",
                why="this engine has compared no other family of Automodel",
                remedy="use backend fsdp2 for this model",
            )
        if source.trust_remote_code and getattr(hf_config, "auto_map", None):
            raise ConfigError(
                "model.trust_remote_code",
                "expected false, got true for a folder that brings its own code",
                why=f"Automodel's own {hf_config.model_type} would be computed instead",
                remedy="use backend fsdp2 for this model, or leave trust_remote_code out",
            )
        super().check(hf_config, kind, source)


CLASSES = AutomodelClasses()


class PackedAutomodel(PackedDecoder):
    """The FSDP root with Automodel's model."""

    def __init__(self, lm: Any, *, kind: Kind, logit_chunk: int, layout: Layout) -> None:
        super().__init__(lm, kind=kind, logit_chunk=logit_chunk, cp_group=layout.cp_group)
        self.tp_mesh = layout.tp_mesh if layout.tp > 1 else None

    def decode(self, inputs: PackedInputs) -> Tensor:
        """Compute the hidden states (see ``PackedDecoder.decode``)."""
        outputs: Any = self.lm.model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            # With a cache Automodel's classes let documents see each other.
            use_cache=False,
            # Automodel's classes take the default from a property that transformers warns about.
            return_dict=True,
            packing=inputs.packing,
        )
        # Mixtures of experts return the hidden states alone.
        hidden: Tensor = getattr(outputs, "last_hidden_state", outputs)
        return hidden

    def divide(self, hidden: Tensor) -> tuple[Tensor, Tensor, VocabularyShard | None]:
        """Return hidden states and head of this rank (see ``PackedDecoder.divide``)."""
        weight = self.lm.lm_head.weight
        if self.tp_mesh is None:
            return hidden, weight, None
        first = find_box(weight).offset[0]
        shard = VocabularyShard(group=self.tp_mesh.get_group(), first=first)
        # Each rank's logits are of its own part of the vocabulary, and so is its gradient.
        whole = DTensor.from_local(hidden, self.tp_mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()]), weight.to_local(), shard


def build_decoder(
    config: EngineConfig,
    kind: Kind,
    layout: Layout,
    *,
    experts: str,
    quantize: Callable[[nn.Module, list[nn.Module]], None] | None = None,
) -> BuiltDecoder:
    """Build the model of ``config.model``, divided by tensor and expert parallelism.

    Args:
        config: the engine's configuration.
        kind: kind of the model.
        layout: the meshes.
        experts: way to compute experts (``AutomodelOptions.choose_experts``).
        quantize: function that lets a model's blocks compute in FP8, or None.

    Raises:
        ConfigError: the folder, or a setting of the model, cannot be used.
        UnsupportedCapability: the engine would compute this model wrongly.
    """
    folder = fetch(config.model)
    hf_config = read_config(folder, config, kind, CLASSES)
    _refuse_differing(hf_config)
    _refuse_windows(hf_config, layout.cp)
    if config.optimizer is not None:
        refuse_noise(hf_config, where=CLASSES.engine)
    _refuse_indivisible(hf_config, layout)
    attention.register()
    twin = make_model(hf_config, config, kind, folder, torch.device("meta"), CLASSES)
    refuse_unserved(hf_config, type(twin), twin, served=PLUGIN.capabilities, engine=CLASSES.engine)
    _refuse_sinks(twin, layout.cp)
    files = None if config.model.init == "random" else WeightFiles(folder)
    device_type = layout.mesh.device_type
    lm = _make(hf_config, config, folder, twin, device_type, experts)
    if kind == "value_model":
        _replace_head(lm, twin)
    if files is None:
        ranks = layout.mesh.size(layout.mesh.ndim - 1) * layout.tp
        need = sum(parameter.nbytes for parameter in lm.parameters()) // ranks
        require_memory(hf_config, folder, need, device_of(device_type).room()[1])
    saved = CLASSES.list_pieces(twin, kind, files)
    pieces = _map_names(lm, twin, saved)
    if quantize is not None:
        quantize(lm, list(lm.model.layers.children()))
    if config.lora is not None:
        lora.inject(lm, config.lora)
    _divide(lm, layout)
    if config.lora is not None:
        lora.freeze_base(lm)
    if config.memory.recompute == "full":
        draws = config.lora is not None and config.lora.dropout > 0
        recompute_children(lm.model.layers, draws=draws)
    if files is not None:
        files.check({piece.name: piece.shape for parts in pieces.values() for piece in parts})
    return BuiltDecoder(
        lm=lm,
        hf_config=hf_config,
        pieces=pieces,
        folder=folder,
        files=files,
        blocks=list(lm.model.layers.children()),
        experts=[module for module in lm.modules() if isinstance(module, Experts)],
    )


def _make(
    hf_config: Any, config: EngineConfig, folder: str, twin: Any, device_type: str, experts: str
) -> Any:
    """Make the model on the meta device, with the engine's own parts in it.

    Args:
        hf_config: transformers' configuration of the model.
        config: the engine's configuration.
        folder: folder of the model's files.
        twin: transformers' model.
        device_type: kind of the device that will compute it.
        experts: way to compute experts.

    Raises:
        ConfigError: Automodel cannot build the model from its configuration.
    """
    try:
        with torch.device("meta"):
            lm = make_decoder(
                hf_config,
                attention=attention.NAME,
                dtype=DTYPES[config.precision.master],
                experts=experts,
            )
            if has_experts(hf_config.model_type):
                adapt(lm, twin, device_type)
    except Exception as error:
        # Automodel's own code reads the configuration, and may raise anything for a value it does
        # not know.
        raise unbuildable(hf_config, folder, error) from error
    return lm


def _replace_head(lm: Any, twin: Any) -> None:
    """Replace the head of a model by the value head of transformers' model, ``twin``."""
    lm.lm_head = None
    lm.score = twin.score


def _divide(lm: Any, layout: Layout) -> None:
    """Divide a model by Automodel's plans of tensor and expert parallelism."""
    if layout.tp > 1:
        parallelize_module(lm, layout.tp_mesh, _plan_modules(lm))
        tie(lm)
    if layout.ep_mesh is not None:
        apply_ep(lm, layout.ep_mesh)


def _plan_modules(lm: nn.Module) -> dict[str, Any]:
    """Return the style of each module of a model that Automodel's plan divides.

    An adapter is divided as its layer is: with outputs over ranks B is, with inputs over ranks A
    is. The other one is whole on each rank, and its gradient too.
    """
    plan = {pattern.replace("*", "[^.]+"): style for pattern, style in find_plan(lm).items()}
    found: dict[str, Any] = {}
    for name, module in lm.named_modules():
        style = next((one for key, one in plan.items() if re.fullmatch(key, name)), None)
        if style is None:
            continue
        if not hasattr(module, "base_layer"):
            found[name] = style
            continue
        found[f"{name}.base_layer"] = style
        rows = isinstance(style, RowwiseParallel)
        found[f"{name}.lora_{'A' if rows else 'B'}.default"] = style
    return found


def _refuse_differing(hf_config: Any) -> None:
    """Raise ``UnsupportedCapability`` for a field that Automodel reads differently, or not at all.

    Other fields are read as transformers reads them, and show in the shapes of the parameters.
    """
    rope = dict(getattr(hf_config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE:
        # Automodel computes the frequencies once.
        _refuse("rope_parameters.rope_type", kind, f"this engine has {', '.join(_ROPE)}")
    family = hf_config.model_type
    factor = rope.get("partial_rotary_factor", 1.0)
    if factor != 1.0 and family not in _PARTLY_ROTATED:
        _refuse("rope_parameters.partial_rotary_factor", factor, "Automodel rotates whole heads")
    for name, value in _FIXED.get(family, {}).items():
        if (found := getattr(hf_config, name, value)) != value:
            _refuse(name, found, f"Automodel's {family} computes {value!r} alone")
    # transformers takes the frequencies of latent attention from the width of heads.
    rotated = getattr(hf_config, "qk_rope_head_dim", None)
    width = getattr(hf_config, "head_dim", None) or 0
    if width % 2 or (rotated is not None and rotated != width):
        _refuse("head_dim", width, "Automodel rotates whole pairs")
    normalizes = family == "minimax_m2" or getattr(hf_config, "norm_topk_prob", False)
    if normalizes and getattr(hf_config, "num_experts_per_tok", None) == 1:
        _refuse("num_experts_per_tok", 1, "Automodel does not normalize the weight of one expert")


def _refuse_windows(hf_config: Any, cp: int) -> None:
    """Raise ``UnsupportedCapability`` for layers with a window under context parallelism."""
    if cp > 1 and "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()):
        raise UnsupportedCapability(
            "sliding_window",
            where=f"{CLASSES.engine} with parallelism.cp {cp}",
            why="the attention to gathered keys and values has no window",
            remedy="set parallelism.cp: 1 for this model",
        )


def _refuse_sinks(twin: Any, cp: int) -> None:
    """Raise ``UnsupportedCapability`` for attention sinks under context parallelism."""
    if cp > 1 and has_sinks(twin):
        raise UnsupportedCapability(
            "sinks",
            where=f"{CLASSES.engine} with parallelism.cp {cp}",
            why="the attention to gathered keys and values has no sinks",
            remedy="set parallelism.cp: 1 for this model",
        )


def _refuse(name: str, value: Any, why: str) -> None:
    """Raise ``UnsupportedCapability`` for a field of config.json."""
    raise UnsupportedCapability(
        f"{name}: {value!r:.100} in config.json",
        where=CLASSES.engine,
        why=why,
        remedy="use backend fsdp2 for this model",
    )


def _refuse_indivisible(hf_config: Any, layout: Layout) -> None:
    """Raise an error for a model that tensor or expert parallelism does not divide.

    Raises:
        ConfigError: a size has no such divisor, or there are no experts to spread.
        UnsupportedCapability: Automodel has no plan of tensor parallelism for the family.
    """
    if layout.tp > 1 and not has_plan(hf_config.model_type):
        raise UnsupportedCapability(
            "tp",
            where=f"{CLASSES.engine} with a {hf_config.model_type}",
            why="Automodel has no plan of tensor parallelism for it",
            remedy="set parallelism.tp: 1, and spread its experts by parallelism.ep",
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        check_divisible(hf_config, name, "tp", layout.tp)
    if layout.ep == 1:
        return
    if not has_experts(hf_config.model_type):
        raise ConfigError(
            "parallelism.ep",
            f"expected 1 for a model without experts, got {layout.ep}",
            remedy="leave parallelism.ep out, or choose a mixture of experts",
        )
    check_divisible(hf_config, _COUNTS[hf_config.model_type], "ep", layout.ep)


def _map_names(lm: Any, twin: Any, saved: Mapping[str, list[Piece]]) -> dict[str, list[Piece]]:
    """Return the saved tensors of each parameter and saved buffer, in transformers' order.

    Raises:
        UnsupportedCapability: the parameters and buffers are not those of transformers' class.
    """
    part, their_part = _RENAMED.get(twin.config.model_type, ("", ""))
    names: dict[str, str] = {}
    own: dict[str, tuple[int, ...]] = {}
    for name, one in _list_saved(lm).items():
        plain = name.replace(part, their_part)
        names[plain] = name
        own[plain] = tuple(one.shape)
    theirs = {name: tuple(one.shape) for name, one in _list_saved(twin).items()}
    if own != theirs:
        odd = sorted({name for name, _ in own.items() ^ theirs.items()})
        raise UnsupportedCapability(
            f"the parameters of {type(lm).__name__}",
            where=CLASSES.engine,
            why=f"{odd[0]} is not as in transformers' class, whose saved names are known",
            remedy="use backend fsdp2 for this model",
        )
    return {names[name]: pieces for name, pieces in saved.items()}


def _list_saved(model: Any) -> dict[str, Tensor]:
    """Return the parameters and the saved buffers of a model."""
    every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    saved = set(model.state_dict(keep_vars=True))
    return {name: one for name, one in every.items() if name in saved}


def tie(lm: Any) -> None:
    """Let embedding and head share one parameter again, where the model ties them.

    Each step that replaces parameters gives every module one of its own. A value model has a head
    of its own.
    """
    if lm.config.tie_word_embeddings and lm.lm_head is not None:
        lm.lm_head.weight = lm.model.embed_tokens.weight


def place_positions(lm: Any, hf_config: Any, device: torch.device) -> None:
    """Compute the frequencies of rotary positions on a device, and move buffers there.

    Automodel's dense classes compute the frequencies in their first pass.
    """
    for name, buffer in list(lm.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        # Parameters may live on the host, which alone are brought to the device for each pass.
        setattr(lm.get_submodule(owner), leaf, buffer.to(device))
    if not has_experts(hf_config.model_type):
        return
    rotary = lm.model.rotary_emb
    rotary.place(hf_config, device)
    for module in lm.modules():
        if isinstance(module, PackedLatentAttention):
            # Automodel takes the frequencies of these models from another place.
            own = "freqs" if hasattr(lm.model, "freqs") else "freqs_cis"
            setattr(lm.model, own, rotary.frequencies)
            module.amplitude = rotary.amplitude
