"""The Hugging Face model, wrapped to return per-token outputs of a packed micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from engine_api.config import EngineConfig, ModelSource
from engine_api.devices import device_of
from engine_api.errors import BatchError, ConfigError, UnsupportedCapability
from engine_api.hf_config import read_hf_config, require_memory, unbuildable
from engine_api.hf_folder import WeightFiles, fetch
from engine_api.hf_names import Piece, pieces_of
from engine_api.hf_noise import refuse_noise
from engine_api.hf_overrides import override
from engine_api.results import TokenOutputs
from engine_torch import attention
from engine_torch.head import chunked_log_probs
from engine_torch.inputs import PackedInputs

Kind = Literal["language_model", "value_model"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""torch's dtypes by their names in the configuration."""


class PackedModel(nn.Module):
    """The FSDP root, made of a Hugging Face model and the head that computes per-token outputs."""

    def __init__(self, lm: Any, *, kind: Kind, logit_chunk: int, group: Any) -> None:
        super().__init__()
        self.lm = lm
        self.kind = kind
        self.logit_chunk = logit_chunk
        self.group = group

    def forward(
        self, inputs: PackedInputs | Tensor, needs: Sequence[str], temperature: float
    ) -> tuple[Tensor, ...]:
        """Compute the aligned outputs of the whole micro-batch, on every rank that shares it.

        Plain ids ``[1, L]`` instead run the model's own forward, for the check at the start.

        Returns:
            ``(values,)``, ``(log-probs,)`` or ``(log-probs, entropy)``, each ``[T]`` float32, as a
            tuple because FSDP looks for tensors in tuples. For plain ids ``(logits,)``.
        """
        if isinstance(inputs, Tensor):
            return (self.lm(input_ids=inputs, use_cache=False).logits,)
        hidden = self.lm.base_model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            packing=inputs.packing,
        ).last_hidden_state[0]
        if self.kind == "value_model":
            values = self.lm.score(hidden).squeeze(-1).float()
            return (inputs.align(values, self.group),)
        log_probs, entropy = chunked_log_probs(
            hidden,
            self.lm.get_output_embeddings().weight,
            inputs.targets,
            temperature=temperature,
            chunk=self.logit_chunk,
            entropy="entropy" in needs,
            coefficients=inputs.coefficients,
        )
        return tuple(inputs.align(x, self.group) for x in (log_probs, entropy) if x is not None)

    def outputs(
        self, inputs: PackedInputs, needs: Sequence[str], temperature: float
    ) -> TokenOutputs:
        """Compute the outputs of ``forward`` and return them by name."""
        parts = self(inputs, needs, temperature)
        names = ("values",) if self.kind == "value_model" else ("log_probs", "entropy")
        return TokenOutputs(**dict(zip(names, parts, strict=False)))


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model before sharding.

    Attributes:
        lm: the transformers model.
        pieces: saved tensors by parameter name (without an adapter's or wrapper's prefix).
        folder: folder of the model's files.
        files: weights that are read after sharding, for parameters on the meta device; None for a
            model that has its random weights.
    """

    lm: Any
    pieces: dict[str, list[Piece]]
    folder: str
    files: WeightFiles | None


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
        # No public name tells it without building.
        return auto_class(kind)._model_mapping.get(type(hf_config), None)  # noqa: SLF001

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
                remedy="give a causal language model",
            )

    def make(
        self, hf_config: Any, kind: Kind, *, dtype: torch.dtype, trust_remote_code: bool
    ) -> Any:
        """Make a model with random weights on torch's default device, ``attention.NAME`` in it."""
        return auto_class(kind).from_config(
            hf_config,
            attn_implementation=attention.NAME,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )

    def list_pieces(self, lm: Any, kind: Kind) -> dict[str, list[Piece]]:
        """Return the saved tensors of each parameter of a model that ``make`` made, in order."""
        del kind
        return pieces_of(lm)


def build_model(
    config: EngineConfig, kind: Kind, ulysses: int, classes: ModelClasses
) -> BuiltModel:
    """Build the model of ``config.model`` without sharding it.

    Raises:
        ConfigError: the folder, or a setting of the model, cannot be used.
        UnsupportedCapability: the engine would compute this kind of model wrongly.
    """
    folder = fetch(config.model)
    hf_config = read_config(folder, config, kind, classes)
    _refuse_unknown_head(hf_config, classes.engine)
    _refuse_other_layers(hf_config, classes.engine)
    _refuse_other_attention(classes.find(hf_config, kind), classes.engine)
    if config.optimizer is not None:
        refuse_noise(hf_config, where=classes.engine)
    attention.register()
    attention.check_heads(hf_config.get_text_config(), ulysses)
    random = config.model.init == "random"
    lm = make_model(hf_config, config, kind, folder, torch.device("meta"), classes)
    if random:
        need = sum(parameter.nbytes for parameter in lm.parameters())
        require_memory(hf_config, folder, need, device_of("cpu").room()[1])
        lm = make_model(hf_config, config, kind, folder, torch.device("cpu"), classes)
    _refuse_biased_head(lm, kind, classes.engine)
    _refuse_saved_buffers(lm, classes.engine)
    if config.memory.recompute == "full":
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pieces = classes.list_pieces(lm, kind)
    files = None if random else WeightFiles(folder)
    if files is not None:
        files.check({piece.name: piece.shape for parts in pieces.values() for piece in parts})
    return BuiltModel(lm=lm, pieces=pieces, folder=folder, files=files)


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
            return classes.make(
                hf_config,
                kind,
                dtype=DTYPES[config.precision.master],
                trust_remote_code=config.model.trust_remote_code,
            )
        except Exception as error:
            # The family's own code reads the configuration, and may raise anything for a value it
            # does not know.
            raise unbuildable(hf_config, folder, error) from error


def auto_class(kind: Kind) -> Any:
    """Return the transformers class that builds this kind of model."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    return AutoModelForCausalLM if kind == "language_model" else AutoModelForTokenClassification


def read_config(folder: str, config: EngineConfig, kind: Kind, classes: ModelClasses) -> Any:
    """Read config.json, check that the model is of this kind, and apply the overrides."""
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
    classes.check(hf_config, kind, config.model)
    override(hf_config, config.model.config_overrides)
    if kind == "value_model":
        hf_config.num_labels = 1
    return hf_config


def _refuse_unknown_head(hf_config: Any, engine: str) -> None:
    """Raise ``UnsupportedCapability`` for a head that caps or scales its logits.

    The chunked head computes h W^T, and would silently leave such a change out.
    """
    text = hf_config.get_text_config()
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        value = getattr(text, key, None)
        if value is not None and value != 1.0:
            raise UnsupportedCapability(
                f"{key}={value}",
                where=engine,
                why="its head computes plain h W^T",
                remedy="use another backend for this model family",
            )


# Types of layers that attend within documents, or compute each token alone (transformers' names).
_LAYERS = {"full_attention", "attention", "sliding_attention", "moe", "mlp", "sparse", "dense"}


def _refuse_other_layers(hf_config: Any, engine: str) -> None:
    """Raise ``UnsupportedCapability`` for layers of a type not in ``_LAYERS``."""
    types = getattr(hf_config.get_text_config(), "layer_types", None) or ()
    if other := sorted(set(types) - _LAYERS):
        raise UnsupportedCapability(
            f"layers of type {', '.join(other)}",
            where=engine,
            why="this engine's attention would leave that out, "
            "or they would mix tokens of different documents",
            remedy="use another backend for this model family",
        )


def _refuse_other_attention(cls: Any, engine: str) -> None:
    """Raise ``UnsupportedCapability`` for a family whose attention cannot be replaced.

    ``cls`` is its class, or None for a model whose folder brings its own code.
    """
    if cls is not None and not cls._supports_attention_backend:
        raise UnsupportedCapability(
            "attention that cannot be replaced",
            where=f"{engine} with {cls.__name__}",
            why="transformers computes it in the family's own code, which ignores documents",
            remedy="use another backend for this model family",
        )


def _refuse_biased_head(lm: Any, kind: Kind, engine: str) -> None:
    """Raise ``UnsupportedCapability`` for a head with a bias, which would be left out."""
    if kind == "language_model" and getattr(lm.get_output_embeddings(), "bias", None) is not None:
        raise UnsupportedCapability(
            "an output head with a bias",
            where=f"{engine} with {type(lm).__name__}",
            why="its head computes plain h W^T",
            remedy="use another backend for this model family",
        )


def _refuse_saved_buffers(lm: Any, engine: str) -> None:
    """Raise ``UnsupportedCapability`` for saved tensors that are not parameters.

    Loading, exports and checkpoints handle parameters only. RoPE's frequencies, which some models
    save, are accepted because they are computed again.
    """
    params = {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    buffers = set(lm.state_dict()) - params
    if other := sorted(name for name in buffers if not name.endswith("inv_freq")):
        raise UnsupportedCapability(
            "saved tensors that are not parameters",
            where=f"{engine} with {type(lm).__name__}",
            why=f"{other[0]} and the like would be neither read nor exported",
            remedy="use another backend for this model family",
        )


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


def blocks_of(lm: Any) -> list[nn.Module]:
    """Return the repeated blocks, by the model's own list of modules that must not be split.

    Raises:
        ConfigError: the model has no such list.
    """
    names = set(lm._no_split_modules or ())  # noqa: SLF001 - transformers documents this attribute
    blocks = [m for m in lm.modules() if type(m).__name__ in names]
    if not blocks:
        raise ConfigError(
            "model.path",
            f"{type(lm).__name__} names no blocks (_no_split_modules)",
            remedy="use a transformers causal language model",
        )
    return blocks
