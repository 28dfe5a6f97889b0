"""torchtitan's model, wrapped to return per-token outputs of a packed micro-batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from engine_api.config import EngineConfig, ModelSource
from engine_api.devices import device_of
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.hf_config import require_memory
from engine_api.hf_folder import WeightFiles, fetch
from engine_api.hf_names import Piece
from engine_api.hf_noise import refuse_noise
from engine_torch import attention
from engine_torch.boxes import find_box, local_of
from engine_torch.decoder import BuiltDecoder, PackedDecoder, check_divisible
from engine_torch.head import VocabularyShard
from engine_torch.inputs import PackedInputs
from engine_torch.mechanisms import refuse_unserved
from engine_torch.model import (
    DTYPES,
    Kind,
    ModelClasses,
    make_model,
    read_config,
    recompute_children,
)
from engine_torch.weights import strip
from engine_torchtitan.families import FAMILIES
from engine_torchtitan.library import Decoder, MoE, RoPE, RoutedExperts
from engine_torchtitan.parallel import Layout
from engine_torchtitan.plugin import PLUGIN
from engine_torchtitan.tree import build_tree, has_experts, set_layouts

__all__ = [
    "EMBEDDING",
    "HEAD",
    "PackedTorchTitan",
    "build_decoder",
    "fill_buffers",
    "tie",
]


class TorchTitanClasses(ModelClasses):
    """The families of torchtitan, with the saved names of transformers' own classes."""

    engine = "engine-torchtitan"

    def check(self, hf_config: Any, kind: Kind, source: ModelSource) -> None:
        """Raise ``ConfigError`` for a family that the engine does not build."""
        if hf_config.model_type not in FAMILIES:
            raise ConfigError(
                "model.path",
                f"expected a model of type {' or '.join(FAMILIES)}, got {hf_config.model_type!r}",
                why="this engine maps no other family to torchtitan's blocks",
                remedy="use backend fsdp2 for this model",
            )
        if source.trust_remote_code and getattr(hf_config, "auto_map", None):
            raise ConfigError(
                "model.trust_remote_code",
                "expected false, got true for a folder that brings its own code",
                why=f"torchtitan's own {hf_config.model_type} would be computed instead",
                remedy="use backend fsdp2 for this model, or leave trust_remote_code out",
            )
        super().check(hf_config, kind, source)


CLASSES = TorchTitanClasses()

EMBEDDING = "tok_embeddings.weight"
"""Name of the embedding's parameter."""

HEAD = "lm_head.weight"
"""Name of the head's parameter."""


class PackedTorchTitan(PackedDecoder):
    """The FSDP root with torchtitan's decoder."""

    def __init__(self, lm: Any, *, kind: Kind, logit_chunk: int, layout: Layout) -> None:
        super().__init__(lm, kind=kind, logit_chunk=logit_chunk, cp_group=layout.cp_group)
        # The head computes its logits in chunks, from the weight alone.
        lm._skip_lm_head = True  # noqa: SLF001 - torchtitan's trainer sets it for the same purpose
        self.tp_group = layout.tp_group

    def decode(self, inputs: PackedInputs) -> Tensor:
        """Compute the hidden states (see ``PackedDecoder.decode``).

        A stage before the last returns them as torchtitan divides them.
        """
        hidden: Tensor = self.lm(
            inputs.input_ids, positions=inputs.position_ids, attention_masks=inputs.packing
        )
        return hidden

    def divide(self, hidden: Tensor) -> tuple[Tensor, Tensor, VocabularyShard | None]:
        """Return hidden states and head of this rank (see ``PackedDecoder.divide``)."""
        weight = self.lm.lm_head.weight
        if not isinstance(hidden, DTensor):
            return hidden, weight, None
        shard = VocabularyShard(group=self.tp_group, first=find_box(weight).offset[0])
        # Each rank's logits are of its own part of the vocabulary, and so is its gradient.
        return hidden.to_local(grad_placements=[Partial()]), weight.to_local(), shard

    def apply_value_head(self, hidden: Tensor) -> Tensor:
        """Return the outputs of the head (see ``PackedModel.apply_value_head``).

        It has the place of the language model's, and is whole on each tensor-parallel rank.
        """
        head = self.lm.lm_head
        bias = None if head.bias is None else local_of(head.bias)
        return F.linear(hidden, local_of(head.weight), bias)


def build_decoder(
    config: EngineConfig,
    kind: Kind,
    layout: Layout,
    *,
    sequence_parallel: bool,
    quantize: Callable[[Decoder.Config], None] | None = None,
    cut: Callable[[Any], None] | None = None,
) -> BuiltDecoder:
    """Build the model of ``config.model`` and divide it by tensor parallelism.

    ``quantize`` changes the configuration of the blocks' linear layers, which then compute in FP8.
    ``cut`` removes the parts of the model that other stages of a pipeline hold. The names of saved
    tensors are those of the whole model all the same.

    Raises:
        ConfigError: the folder, or a setting of the model, cannot be used.
        UnsupportedCapability: the engine would compute this model wrongly.
    """
    folder = fetch(config.model)
    hf_config = read_config(folder, config, kind, CLASSES)
    tree = build_tree(hf_config, kind)
    if config.optimizer is not None:
        refuse_noise(hf_config, where=CLASSES.engine)
    _refuse_indivisible(hf_config, layout.tp, layout.ep)
    _refuse_context(hf_config, layout.cp)
    set_layouts(
        tree,
        hf_config.model_type,
        kind,
        sequence_parallel=sequence_parallel,
        divides_experts=layout.ep > 1,
    )
    if quantize is not None:
        quantize(tree)
    files = None if config.model.init == "random" else WeightFiles(folder)
    names = _list_saved(hf_config, config, kind, folder, files)
    with torch.device("meta"):
        lm: Any = tree.build()
    lm.to(DTYPES[config.precision.master])
    _keep_biases(lm)
    if layout.tp > 1 or layout.ep > 1:
        lm.parallelize(layout.dims)
        tie(lm)
    if config.memory.recompute == "full":
        recompute_children(lm.layers)
    pieces = _map_names(lm, hf_config, kind, names)
    if files is not None:
        files.check({piece.name: piece.shape for parts in pieces.values() for piece in parts})
    if cut is not None:
        # The last stage has a parameter of its own for a head that is tied to the embedding.
        pieces.setdefault(HEAD, pieces[EMBEDDING])
        cut(lm)
    if config.model.init == "random":
        ranks = layout.mesh.size(layout.mesh.ndim - 1) * layout.tp
        need = sum(parameter.nbytes for parameter in lm.parameters()) // ranks
        require_memory(hf_config, folder, need, device_of(layout.mesh.device_type).room()[1])
    routed = [module for module in lm.modules() if isinstance(module, RoutedExperts)]
    return BuiltDecoder(
        lm=lm,
        hf_config=hf_config,
        pieces=pieces,
        folder=folder,
        files=files,
        blocks=list(lm.layers.values()),
        experts=[module.inner_experts for module in routed],
    )


def _refuse_indivisible(hf_config: Any, tp: int, ep: int) -> None:
    """Raise ``ConfigError`` for sizes that tensor or expert parallelism does not divide."""
    family = FAMILIES[hf_config.model_type]
    divided = ["num_attention_heads", "num_key_value_heads", "vocab_size"]
    if family.dense_width is not None:
        divided.append(family.dense_width)
    if has_experts(hf_config) and (ep == 1 or getattr(hf_config, "n_shared_experts", 0)):
        # Tensor-parallel ranks divide each expert, unless the experts are spread over them. They
        # always divide the expert of all tokens, whose width is a multiple of another's.
        divided.append(family.expert_width)
    for name in divided:
        check_divisible(hf_config, name, "tp", tp)
    if ep == 1:
        return
    if not has_experts(hf_config):
        raise ConfigError(
            "parallelism.ep",
            f"expected 1 for a model without experts, got {ep}",
            remedy="leave parallelism.ep out, or choose a mixture of experts",
        )
    check_divisible(hf_config, family.experts, "ep", ep)


def _refuse_context(hf_config: Any, cp: int) -> None:
    """Raise ``ConfigError`` for context parallelism with attention that it cannot divide."""
    if cp > 1 and not FAMILIES[hf_config.model_type].divides_context:
        raise ConfigError(
            "parallelism.cp",
            f"expected 1 for a model of type {hf_config.model_type}, got {cp}",
            why="the attention to gathered keys and values has neither sinks nor windows",
            remedy="use data, tensor or expert parallelism for this model",
        )


def _keep_biases(lm: Any) -> None:
    """Make saved biases of routers float32 in a model of any dtype.

    A rounded one would send tokens to other experts.
    """
    for module in lm.modules():
        if isinstance(module, MoE) and module.expert_bias_E is not None:
            module.expert_bias_E = module.expert_bias_E.float()


def _list_saved(
    hf_config: Any, config: EngineConfig, kind: Kind, folder: str, files: WeightFiles | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that transformers saves of this model, in its order.

    Raises:
        UnsupportedCapability: transformers' model has a mechanism that torchtitan's does not have.
    """
    attention.register()
    twin = make_model(hf_config, config, kind, folder, torch.device("meta"), CLASSES)
    refuse_unserved(hf_config, type(twin), twin, served=PLUGIN.capabilities, engine=CLASSES.engine)
    pieces = CLASSES.list_pieces(twin, kind, files)
    return {piece.name: piece.shape for parts in pieces.values() for piece in parts}


def _map_names(
    lm: Any, hf_config: Any, kind: Kind, saved: dict[str, tuple[int, ...]]
) -> dict[str, list[Piece]]:
    """Return the saved tensor of each parameter, by torchtitan's own table of names.

    Raises:
        UnsupportedCapability: the parameters are not the tensors that transformers saves.
    """
    family = FAMILIES[hf_config.model_type]
    adapter: Any = family.adapter(lm.config, None)
    table = {theirs: ours for ours, theirs in adapter.from_hf_map.items() if theirs is not None}
    table |= family.names
    if kind == "value_model":
        table |= {HEAD: "score.weight", "lm_head.bias": "score.bias"}
    pieces: dict[str, list[Piece]] = {}
    biases = [(name, one) for name, one in lm.named_buffers() if name.endswith(".expert_bias_E")]
    for name, tensor in [*lm.named_parameters(), *biases]:
        bare = strip(name)
        plain = bare.replace("lm_head.", "tok_embeddings.") if lm.enable_weight_tying else bare
        layer = re.search(r"\d+", plain)
        plain = re.sub(r"\d+", "{}", plain, count=1)
        pieces[bare] = _list_pieces(
            table.get(plain, plain),
            layer[0] if layer else "",
            tuple(tensor.shape),
            transposed=plain in family.transposed,
        )
    own = {piece.name: piece.shape for parts in pieces.values() for piece in parts}
    if own != saved:
        odd = sorted({name for name, _ in own.items() ^ saved.items()})
        raise UnsupportedCapability(
            f"the parameters of {type(lm).__name__}",
            where=CLASSES.engine,
            why=f"{odd[0]} is not as transformers saves it",
            remedy="use backend fsdp2 for this model",
        )
    order = {name: index for index, name in enumerate(saved)}
    return dict(sorted(pieces.items(), key=lambda item: order[item[1][0].name]))


def _list_pieces(name: str, layer: str, shape: tuple[int, ...], *, transposed: bool) -> list[Piece]:
    """Return the saved tensors of a parameter or buffer, one for each expert where it has several.

    Args:
        name: saved name, with ``{}`` for the numbers of layer and expert.
        layer: number of the layer, or an empty text outside of layers.
        shape: shape of the parameter, with experts in the first dimension where it has several.
        transposed: True if it is saved with its last two dimensions exchanged.
    """
    if transposed:
        saved = (*shape[:-2], shape[-1], shape[-2])
        return [Piece(name=name.format(layer), shape=saved, transposed=True)]
    if name.count("{}") < 2:
        return [Piece(name=name.format(layer), shape=shape)]
    return [
        Piece(name=name.format(layer, expert), shape=shape[1:], expert=expert, rows=(0, shape[1]))
        for expert in range(shape[0])
    ]


def tie(lm: Any) -> None:
    """Let embedding and head share one parameter again, where the model ties them and has both.

    Each step that replaces parameters gives every module one of its own.
    """
    if lm.enable_weight_tying and lm.lm_head is not None and lm.tok_embeddings is not None:
        lm.lm_head.weight = lm.tok_embeddings.weight


def fill_buffers(lm: Any, device: torch.device) -> None:
    """Compute the buffers that are in no file, and place the others, on a device.

    With offloaded parameters the others are on the host, where only parameters are gathered from.
    """
    for module in lm.modules():
        if isinstance(module, RoPE):
            module.init_states(buffer_device=device)
        elif isinstance(module, MoE):
            # The number of tokens of each expert, which nothing reads.
            module.tokens_per_expert_E = torch.zeros_like(module.tokens_per_expert_E, device=device)
            if module.expert_bias_E is not None:
                module.expert_bias_E = module.expert_bias_E.to(device)
