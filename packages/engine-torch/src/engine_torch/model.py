"""The Hugging Face model, wrapped to return per-token outputs of a packed micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)

from engine_api.capabilities import Capability
from engine_api.config import EngineConfig, ModelSource
from engine_api.devices import device_of
from engine_api.errors import BatchError, ConfigError, UnsupportedCapability
from engine_api.hf_config import read_hf_config, require_memory, unbuildable
from engine_api.hf_folder import WeightFiles, fetch
from engine_api.hf_names import Piece, SavedTensors, keep_float32, pieces_of
from engine_api.hf_noise import refuse_noise
from engine_api.hf_overrides import override
from engine_api.hf_routers import Routers
from engine_api.hf_vision import (
    Vision,
    find_auto_class,
    has_vision,
    read_vision,
    refuse_vision,
)
from engine_api.results import TokenOutputs
from engine_torch import attention
from engine_torch.divergence import chunked_divergence
from engine_torch.head import VocabularyShard, chunked_log_probs
from engine_torch.inputs import PackedInputs
from engine_torch.mechanisms import (
    Head,
    measure_head,
    refuse_unserved,
    selects_tokens,
)
from engine_torch.mixers import (
    divide_mixers,
    refuse_without_kernels,
    refuse_wrong_gradients,
)
from engine_torch.vision import (
    compute_features,
    multiply_patches,
    replace_tower,
    tower_of,
    use_attention_by_image,
)

Kind = Literal["language_model", "value_model"]
# Attention of a tower until its model is packed (``engine_torch.vision``).
_TOWER_ATTENTION = "sdpa"
# transformers' where a family's configuration has no initializer_range.
_INITIAL_STD = 0.02
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""torch's dtypes by their names in the configuration."""


class PackedModel(nn.Module):
    """The FSDP root, made of a Hugging Face model and the head that computes per-token outputs."""

    def __init__(
        self,
        lm: Any,
        *,
        kind: Kind,
        logit_chunk: int,
        group: Any,
        head: Head | None = None,
        routers: Routers | None = None,
        vision: Vision | None = None,
    ) -> None:
        super().__init__()
        self.routers = routers
        self.vision = vision
        self.lm = lm
        self.head = head or Head()
        self.kind = kind
        self.logit_chunk = logit_chunk
        self.group = group
        if vision is not None:
            multiply_patches(lm)
            use_attention_by_image(lm)
        self._adapt(lm)

    def _adapt(self, lm: Any) -> None:
        """Make the layers of a transformers model fit for packs.

        An engine whose model is not one of transformers' overrides this with its own steps, if any.
        """
        self.documents = divide_mixers(lm, self.group)
        _connect_experts(lm)

    def forward(
        self,
        inputs: PackedInputs | Mapping[str, Tensor],
        needs: Sequence[str],
        temperature: float,
    ) -> tuple[Tensor, ...]:
        """Compute the aligned outputs of the whole micro-batch, on every rank that shares it.

        Arguments of the model's own forward by name, such as ``input_ids`` ``[1, L]``, instead run
        it, for the check at the start.

        Returns:
            ``(values,)``, or log-probs and what else of ``needs`` is computed of them, each ``[T]``
            float32, as a tuple because FSDP looks for tensors in tuples. Where ``states`` are
            needed ``(hidden states [T, d],)``, and for the model's own forward ``(logits,)``.
        """
        packed = inputs if isinstance(inputs, PackedInputs) else None
        self.documents.set(None if packed is None else packed.packing)
        if self.routers is not None:
            self.routers.replay(None if packed is None else packed.experts)
            self.routers.balance(None if packed is None else packed.balance)
        if not isinstance(inputs, PackedInputs):
            return (self.lm(**inputs, use_cache=False).logits,)
        with self._features(inputs) as images:
            hidden = self.lm.base_model(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                use_cache=False,
                packing=inputs.packing,
                **images,
            ).last_hidden_state[0]
        hidden = inputs.predicting(hidden)
        if self.kind == "value_model":
            return self.evaluate(inputs, hidden)
        embedding = self.lm.get_output_embeddings()
        # Some families end in float32 whatever they compute in.
        hidden = hidden.to(embedding.weight.dtype)
        bias = getattr(embedding, "bias", None)
        return self.score(inputs, needs, temperature, hidden, embedding.weight, bias=bias)

    def evaluate(self, inputs: PackedInputs, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the values of hidden states ``[T'/n, d]`` of a value model (see ``forward``)."""
        values = self.apply_value_head(hidden).squeeze(-1).float()
        return (inputs.align(values, self.group),)

    def apply_value_head(self, hidden: Tensor) -> Tensor:
        """Return the outputs ``[T'/n, 1]`` of a value model's head, and of its adapter, if any."""
        values: Tensor = self.lm.score(hidden)
        return values

    def score(
        self,
        inputs: PackedInputs,
        needs: Sequence[str],
        temperature: float,
        hidden: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        shard: VocabularyShard | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the outputs of hidden states ``[T'/n, d]`` of a language model (see ``forward``).

        Args:
            inputs: the micro-batch.
            needs: names of the outputs.
            temperature: divisor of the logits.
            hidden: hidden states, local tensors as is the weight.
            weight: this rank's rows of the output embedding, the same dtype.
            bias: this rank's bias of the logits, or None.
            shard: see ``chunked_log_probs``.
        """
        if "states" in needs:
            return (inputs.align(hidden, self.group),)
        options: dict[str, Any] = {
            "temperature": temperature,
            "chunk": self.logit_chunk,
            "bias": bias,
            "scale": self.head.scale,
            "cap": self.head.cap,
            "shard": shard,
        }
        log_probs, entropy = chunked_log_probs(
            hidden,
            weight,
            inputs.targets,
            entropy="entropy" in needs,
            coefficients=inputs.coefficients,
            **options,
        )
        divergence = None
        if inputs.taught is not None:
            divergence = chunked_divergence(hidden, weight, inputs.taught, **options)
        found = (log_probs, entropy, divergence)
        return tuple(inputs.align(x, self.group) for x in found if x is not None)

    @contextmanager
    def _features(self, inputs: PackedInputs) -> Iterator[dict[str, Any]]:
        """Yield arguments of the base model, which takes the features of the images inside.

        The tower is not run for a micro-batch in which no rank has images.
        """
        if self.vision is None or inputs.images is None:
            yield {}
            return
        trained = any(p.requires_grad for part in tower_of(self.lm) for p in part.parameters())
        features = compute_features(self.lm, self.vision, inputs.images, trained=trained)
        with replace_tower(self.lm, features):
            yield inputs.images.arguments

    def outputs(
        self, inputs: PackedInputs, needs: Sequence[str], temperature: float
    ) -> TokenOutputs:
        """Compute the outputs of ``forward`` and return them by name."""
        parts = self(inputs, needs, temperature)
        return TokenOutputs(**dict(zip(self.list_outputs(needs), parts, strict=True)))

    def list_outputs(self, needs: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the outputs of ``forward`` in their order."""
        if self.kind == "value_model":
            return ("values",)
        return ("log_probs", *(name for name in ("entropy", "divergence") if name in needs))

    @property
    def output_embedding(self) -> Any:
        """The module of the output head, with a weight and maybe a bias."""
        return self.lm.get_output_embeddings()


def _connect_experts(lm: Any) -> None:
    """Give the experts a gradient in every micro-batch, where tokens may need none of them.

    Beside experts without weights (LongCat) the tokens of one rank may pass them all by. That rank
    would have no gradient to reduce, and the others would wait for it.
    """
    if not getattr(lm.config.get_text_config(), "zero_expert_num", 0):
        return
    for module in lm.modules():
        if type(module).__name__.endswith("Experts"):
            module.forward = _connected(module, module.forward)  # type: ignore[method-assign]


def _connected(module: nn.Module, forward: Any) -> Any:
    def connected(*args: Any, **options: Any) -> Tensor:
        # Empty slices add nothing to the sum but a path for a gradient of zeros.
        nothing = [one.flatten()[:0].sum() for one in module.parameters(recurse=False)]
        result: Tensor = forward(*args, **options)
        return result + torch.stack(nothing).sum().to(result.dtype) if nothing else result

    return connected


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model before sharding.

    Attributes:
        lm: the transformers model.
        pieces: saved tensors by parameter name (without an adapter's or wrapper's prefix).
        folder: folder of the model's files.
        files: weights that are read after sharding, for parameters on the meta device; None for a
            model that has its random weights.
        head: what a language model does with its plain logits.
        routers: the model's routers, or None where no selection of experts is replayed or balanced.
        vision: the images that the model takes, or None for a model without a tower.
    """

    lm: Any
    pieces: dict[str, list[Piece]]
    folder: str
    files: WeightFiles | None
    head: Head = field(default_factory=Head)
    routers: Routers | None = None
    vision: Vision | None = None


class ModelClasses:
    """The classes that models are built of, which are transformers' own.

    An engine derives from this class to name itself, or to take another library's classes of the
    same families, and passes an instance to ``build_model``. The other classes must be
    ``PreTrainedModel``s that hold transformers' parameters under transformers' names, and take
    their attention function from ``AttentionInterface`` by ``config._attn_implementation``, with
    every further argument of the forward pass (``engine_torch.attention.packed_attention`` finds
    the documents there).
    """

    engine: ClassVar[str]
    """Name of the engine in errors about a model that it would compute wrongly."""

    def find(self, hf_config: Any, kind: Kind) -> Any:
        """Return the class of a model, or None where the library has none of its own for it."""
        return find_class(kind, hf_config)

    def check(self, hf_config: Any, kind: Kind, source: ModelSource) -> None:
        """Raise ``ConfigError`` for a model that the library does not have.

        Args:
            hf_config: config.json as it is in the folder.
            kind: kind of the model.
            source: the section of the configuration that names the folder.
        """
        if self.find(hf_config, kind) is None and not source.trust_remote_code:
            raise ConfigError(
                "model.path",
                f"transformers has no {kind} of type {hf_config.model_type!r}",
                remedy="give a causal language model"
                if kind == "language_model"
                else "give a model of another family, or use an algorithm without a critic",
            )

    def make(
        self, hf_config: Any, kind: Kind, *, dtype: torch.dtype, trust_remote_code: bool
    ) -> Any:
        """Make a model with random weights on torch's default device.

        Its attention is ``attention.NAME``, or ``attention.MASKED`` where layers select tokens.
        """
        name = attention.MASKED if selects_tokens(hf_config.get_text_config()) else attention.NAME
        by_part = {"text_config": name, "vision_config": _TOWER_ATTENTION}
        return auto_class(kind, hf_config).from_config(
            hf_config,
            attn_implementation=by_part if has_vision(hf_config) else name,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )

    def knows_experts(self, module: nn.Module) -> bool:
        """Return whether experts can be spread (see ``engine_torch.experts.spread_experts``)."""
        # transformers tells its functions of experts by this attribute how the weights lie.
        return hasattr(module, "is_transposed")

    def list_pieces(
        self, lm: Any, kind: Kind, folder: SavedTensors | None = None
    ) -> dict[str, list[Piece]]:
        """Return the saved tensors of each parameter of a model that ``make`` made, in order.

        ``folder`` has the tensors of the model's folder (None: not known).
        """
        del kind
        return pieces_of(lm, folder)


def build_model(
    config: EngineConfig,
    kind: Kind,
    ulysses: int,
    classes: ModelClasses,
    device_type: str = "cpu",
    *,
    served: Collection[str],
    balanced: bool = False,
) -> BuiltModel:
    """Build the model of ``config.model`` without sharding it.

    Args:
        config: the engine's configuration.
        kind: kind of the model.
        ulysses: number of ranks in the Ulysses group.
        classes: classes that the model is built of.
        device_type: device that will compute it.
        served: capabilities of the engine, which name the mechanisms that it serves.
        balanced: true for a model whose experts have a balance loss.

    Raises:
        ConfigError: the folder, or a setting of the model, cannot be used.
        UnsupportedCapability: the engine would compute this kind of model wrongly.
    """
    folder = fetch(config.model)
    hf_config = read_config(folder, config, kind, classes, served)
    vision = read_vision(hf_config, classes.engine, videos=Capability.VIDEO in served)
    _refuse_tower(config, vision)
    _refuse_shared(config, vision)
    cls = classes.find(hf_config, kind)
    refusal: dict[str, Any] = {"served": served, "engine": classes.engine}
    refuse_unserved(hf_config, cls, None, **refusal)
    _refuse_divided_masks(hf_config, ulysses, classes.engine)
    if config.optimizer is not None:
        refuse_noise(hf_config, where=classes.engine)
    attention.register()
    attention.check_heads(hf_config.get_text_config(), ulysses)
    random = config.model.init == "random"
    lm = make_model(hf_config, config, kind, folder, torch.device("meta"), classes)
    refuse_unserved(hf_config, cls, lm, **refusal)
    refuse_without_kernels(lm, device_type, classes.engine)
    if config.optimizer is not None:
        refuse_wrong_gradients(lm, device_type, classes.engine)
    head = Head()
    if kind == "language_model":
        head = measure_head(lm, engine=classes.engine)
        if head.scale != 1.0 and "logit_scale" not in served:
            raise UnsupportedCapability(
                "logit_scale",
                where=f"{classes.engine} with {type(lm).__name__}",
                why=f"the model multiplies its logits by {head.scale:g}",
                remedy="use another backend for this model family",
            )
    if random:
        need = sum(parameter.nbytes for parameter in lm.parameters())
        require_memory(hf_config, folder, need, device_of("cpu").room()[1])
        lm = make_model(hf_config, config, kind, folder, torch.device("cpu"), classes)
    if vision is not None and config.model.freeze:
        for part in tower_of(lm):
            part.requires_grad_(False)
    routers = _find_routers(lm, config, classes.engine, balanced=balanced)
    if config.memory.recompute == "full":
        recompute_blocks(lm)
    files = None if random else WeightFiles(folder)
    pieces = classes.list_pieces(lm, kind, files)
    if files is not None:
        files.check({piece.name: piece.shape for parts in pieces.values() for piece in parts})
    return BuiltModel(
        lm=lm,
        pieces=pieces,
        folder=folder,
        files=files,
        head=head,
        routers=routers,
        vision=vision,
    )


def _find_routers(lm: Any, config: EngineConfig, engine: str, *, balanced: bool) -> Routers | None:
    """Return the routers of a model whose experts are replayed or balanced, or None."""
    if config.router_replay or balanced:
        return Routers(lm, where=engine, balanced=balanced)
    return None


def _refuse_shared(config: EngineConfig, vision: Vision | None) -> None:
    """Raise ``ConfigError`` for shared prefixes in a model whose documents may have images."""
    if config.memory.share_prefixes and vision is not None:
        raise ConfigError(
            "memory.share_prefixes",
            "a model with a vision tower does not share the beginnings of its documents",
            why="they are compared by their ids, which are the same for all images",
            remedy="set memory.share_prefixes: false",
        )


def _refuse_tower(config: EngineConfig, vision: Vision | None) -> None:
    """Raise ``ConfigError`` for settings of a tower, of a model without one."""
    rates = {} if config.optimizer is None else config.optimizer.part_lr
    for key, parts in {"model.freeze": config.model.freeze, "optimizer.part_lr": rates}.items():
        if parts and vision is None:
            raise ConfigError(
                key,
                f"expected parts of the model, got {list(parts)} for a model without a tower",
                remedy="leave it out, or give a vision-language model",
            )


def _refuse_divided_masks(hf_config: Any, ulysses: int, engine: str) -> None:
    """Raise ``UnsupportedCapability`` for layers that need whole masks, under Ulysses."""
    if ulysses > 1 and selects_tokens(hf_config.get_text_config()):
        raise UnsupportedCapability(
            "sparse_attention",
            where=f"{engine} with a {hf_config.model_type} under Ulysses",
            why="its layers select among all tokens of a document, and a rank has a part of them",
            remedy="set parallelism.ulysses: 1",
        )


def make_model(
    hf_config: Any,
    config: EngineConfig,
    kind: Kind,
    folder: str,
    device: torch.device,
    classes: ModelClasses,
) -> Any:
    """Build the model on a device, with random weights of the configuration's seed.

    Raises:
        ConfigError: the library cannot build the model from its configuration.
    """
    with torch.random.fork_rng(devices=[]), device:
        # The CPU's generator alone is seeded, so that no device is reseeded.
        torch.default_generator.manual_seed(config.seed)
        try:
            lm = classes.make(
                hf_config,
                kind,
                dtype=DTYPES[config.precision.master],
                trust_remote_code=config.model.trust_remote_code,
            )
        except Exception as error:
            # The family's own code reads the configuration, and may raise anything for a value it
            # does not know.
            raise unbuildable(hf_config, folder, error) from error
    keep_float32(lm)
    return lm


def reset_buffers(lm: Any) -> None:
    """Compute the buffers that are in no file, such as rotary frequencies.

    transformers computes them in its hook that initializes a module. A whole model may fill the
    buffers of its layers there (Falcon-H1), so it is called after them. The hook draws no
    parameter. A model inside the model, such as a tower, has a hook of its own.
    """
    from transformers import PreTrainedModel

    for parameter in lm.parameters():
        parameter._is_hf_initialized = True  # noqa: SLF001 - transformers' mark of what is read
    hooks: dict[str, Any] = {}
    for name, module in lm.named_modules():
        above = hooks.get(name.rpartition(".")[0])
        hooks[name] = module._init_weights if isinstance(module, PreTrainedModel) else above  # noqa: SLF001 - the hook, which has no public name
    for name, module in reversed(list(lm.named_modules())):
        owns = any(True for _ in module.buffers(recurse=False))
        if owns or isinstance(module, PreTrainedModel):
            hooks[name](module)


def auto_class(kind: Kind, hf_config: Any) -> Any:
    """Return the transformers class that builds this kind of model."""
    from transformers import AutoModelForTokenClassification

    if kind == "value_model":
        return AutoModelForTokenClassification
    return find_auto_class(hf_config)


def find_class(kind: Kind, hf_config: Any) -> Any:
    """Return transformers' class of a model, or None where it has none of this kind."""
    # No public name tells it without building.
    return auto_class(kind, hf_config)._model_mapping.get(type(hf_config), None)  # noqa: SLF001


def read_config(
    folder: str,
    config: EngineConfig,
    kind: Kind,
    classes: ModelClasses,
    served: Collection[str] = (),
) -> Any:
    """Read config.json, check that the model is of this kind, and apply the overrides.

    A model with a vision tower is refused unless ``vision`` is among ``served``, the engine's
    capabilities.
    """
    hf_config = read_hf_config(
        folder,
        remedy="give a folder that save_pretrained wrote, of a family that transformers knows",
        trust_remote_code=config.model.trust_remote_code,
    )
    if config.model.init == "pretrained" and getattr(hf_config, "quantization_config", None):
        raise ConfigError(
            "model.path",
            f"{folder} holds quantized weights (quantization_config)",
            why="they would be read without their scales",
            remedy="use the bf16 release of the model",
        )
    refuse_vision(hf_config, served, classes.engine)
    if kind == "value_model" and has_vision(hf_config):
        raise UnsupportedCapability(
            "vision",
            where=f"{classes.engine} with a value model",
            why="no test has compared a value head over a vision tower",
            remedy="use a language model as the critic, or an algorithm without a critic",
        )
    classes.check(hf_config, kind, config.model)
    override(hf_config, config.model.config_overrides)
    if kind == "value_model":
        _describe_value_model(hf_config)
    return hf_config


def _describe_value_model(hf_config: Any) -> None:
    """Turn a configuration into that of a value model, for ``save_hf``."""
    hf_config.num_labels = 1
    # A server reads the name of the class, which a language model's folder has otherwise.
    cls = find_class("value_model", hf_config)
    if cls is not None:
        hf_config.architectures = [cls.__name__]


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentLimit:
    """The longest document of a model whose RoPE depends on length.

    Beyond ``tokens`` positions transformers takes RoPE's frequencies from the longest document of a
    pack.
    """

    tokens: int
    kind: str

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ``BatchError`` for a longer document.

        All other documents of its pack would be computed with its frequencies.
        """
        for index, length in enumerate(lengths):
            if length > self.tokens:
                raise BatchError(
                    "cu_seqlens",
                    f"document {index} has {length} tokens, this model takes {self.tokens}",
                    index=index,
                    why=f"beyond that its RoPE ({self.kind}) follows the longest document "
                    "of a pack, and changes the others",
                    remedy="shorten the document, or use a model or backend whose RoPE does not",
                )


def document_limit(hf_config: Any) -> DocumentLimit | None:
    """Return the limit of a model whose RoPE depends on length, or None."""
    text = hf_config.get_text_config()
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    # The parameters are those of the whole model, or one mapping for each type of layer.
    parts = [rope] if "rope_type" in rope else rope.values()
    found: list[DocumentLimit] = []
    for part in parts:
        kind = str(part.get("rope_type", "default")) if isinstance(part, Mapping) else "default"
        if "dynamic" in kind:
            tokens = int(text.max_position_embeddings)
        elif kind == "longrope":
            tokens = int(part["original_max_position_embeddings"])
        else:
            continue
        found.append(DocumentLimit(tokens=tokens, kind=kind))
    return min(found, key=lambda limit: limit.tokens, default=None)


def initial_std(hf_config: Any) -> float:
    """Return the standard deviation of random weights, read as transformers reads it."""
    own = getattr(hf_config, "initializer_range", None)
    text = getattr(hf_config.get_text_config(), "initializer_range", _INITIAL_STD)
    return float(text if own is None else own)


def blocks_of(lm: Any) -> list[nn.Module]:
    """Return the repeated blocks, by the model's own list of modules that must not be split.

    A module of that list inside another one (Mamba lists blocks and their mixers) is no block.

    Raises:
        ConfigError: the model has no such list.
    """
    names = set(lm._no_split_modules or ())  # noqa: SLF001 - transformers documents this attribute
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in lm.modules():
        if type(module).__name__ in names and module not in inside:
            blocks.append(module)
            inside |= set(module.modules())
    if not blocks:
        raise ConfigError(
            "model.path",
            f"{type(lm).__name__} names no blocks (_no_split_modules)",
            remedy="use a transformers causal language model",
        )
    return blocks


def recompute_blocks(lm: Any) -> None:
    """Let each block of a transformers model compute its activations again in the backward pass."""
    kind = _name_recomputation(lm)
    enable = getattr(lm, f"{kind}_checkpointing_enable")
    enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})


def is_recomputing_blocks(lm: Any) -> bool:
    """Return whether the blocks of a transformers model compute their activations again."""
    return bool(getattr(lm, f"is_{_name_recomputation(lm)}_checkpointing"))


def _name_recomputation(lm: Any) -> str:
    """Return the word that transformers has in its names of recomputation.

    Release 5.23 renamed them, and warns of the earlier ones.
    """
    return "activation" if hasattr(lm, "activation_checkpointing_enable") else "gradient"


def recompute_children(layers: nn.Module, *, draws: bool = False) -> None:
    """Let each child compute its activations again in the backward pass.

    It is for the blocks of a model that is none of transformers', whose own have a method for it.
    ``draws`` says that a child draws random numbers, which are then the same again.
    """
    for name, block in list(layers.named_children()):
        layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=draws))


def is_recomputing(layers: nn.Module) -> bool:
    """Return whether each child computes its activations again in the backward pass."""
    return all(isinstance(block, CheckpointWrapper) for block in layers.children())


def find_recomputed(block: nn.Module) -> nn.Module:
    """Return the module inside the wrapper of a recomputed block, or the block without one."""
    return getattr(block, "_checkpoint_wrapped_module", block)


def is_compiled(blocks: Iterable[nn.Module]) -> bool:
    """Return whether each block runs compiled, or the module inside its wrapper."""
    # torch keeps a module's compiled call under this name and has no public one.
    return all(
        any(one._compiled_call_impl is not None for one in (block, find_recomputed(block)))  # noqa: SLF001
        for block in blocks
    )
