"""The Hugging Face model, wrapped so that one forward gives per-token outputs of a packed micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine_api.batch import Batch
from engine_api.config import EngineConfig
from engine_api.devices import device_of
from engine_api.errors import BatchError, ConfigError, UnsupportedCapability
from engine_api.hf_config import read_hf_config, require_memory, unbuildable
from engine_api.hf_folder import fetch
from engine_api.hf_names import Piece, pieces_of
from engine_api.hf_noise import refuse_noise
from engine_api.hf_overrides import override
from engine_api.results import TokenOutputs
from engine_fsdp import attention
from engine_fsdp.head import chunked_log_probs
from engine_fsdp.parallel import DTYPES, Layout, gather_tokens
from engine_fsdp.weights import check_files

WHERE = "engine-fsdp"

Kind = Literal["language_model", "value_model"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedInputs:
    """One micro-batch on the device, padded to what the engine needs.

    Attributes:
        input_ids, position_ids: ``[1, T'/n]`` int64, this rank's slice under Ulysses.
        targets: ``[T'/n]`` int64, the token after each.
        first: ``[T']`` bool, true at the first token of each document.
        size: T, the tokens of the batch without padding.
        coefficients: ``[T'/n]`` float32, the loss's known derivative by the log-prob of each target; or None.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    first: Tensor
    packing: attention.Packing
    size: int
    coefficients: Tensor | None = None


def pack_inputs(
    batch: Batch,
    *,
    layout: Layout,
    kernel: str,
    multiple: int,
    device: torch.device,
    coefficients: Tensor | None = None,
) -> PackedInputs:
    """Pad (as documents of their own, at the end) to a multiple of ``multiple`` and of the Ulysses size."""
    step = multiple * layout.ulysses
    padding = -batch.num_tokens % step or (step if batch.num_tokens == 0 else 0)
    lengths = [*batch.lengths, *([padding] if padding else [])]
    ids = torch.cat([batch.input_ids.cpu(), torch.zeros(padding, dtype=torch.int64)])
    ends = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.arange(len(ids)) - torch.repeat_interleave(ends[:-1], torch.tensor(lengths))
    mine = torch.arange(len(ids)).chunk(layout.ulysses)[layout.ulysses_rank]
    return PackedInputs(
        input_ids=ids[mine][None].to(device, non_blocking=True),
        position_ids=positions[mine][None].to(device, non_blocking=True),
        targets=ids.roll(-1)[mine].to(device, non_blocking=True),
        first=(positions == 0).to(device, non_blocking=True),
        packing=attention.build_packing(lengths, kernel, device, layout.ulysses_group),
        size=batch.num_tokens,
        coefficients=None
        if coefficients is None
        else _about_next(coefficients, padding, mine).to(device),
    )


def _about_next(values: Tensor, padding: int, mine: Tensor) -> Tensor:
    """``[T]`` about this token → ``[T'/n]`` about the next one, float32, zero at padding."""
    return torch.cat([values.cpu().float(), torch.zeros(padding)]).roll(-1)[mine]


class PackedModel(nn.Module):
    """The FSDP root: a Hugging Face model and the head that gives per-token outputs."""

    def __init__(self, lm: Any, *, kind: Kind, logit_chunk: int, group: Any) -> None:
        super().__init__()
        self.lm = lm
        self.kind, self.logit_chunk, self.group = kind, logit_chunk, group

    def forward(
        self, inputs: PackedInputs | Tensor, needs: Sequence[str], temperature: float
    ) -> tuple[Tensor, ...]:
        """``[T]`` float32 outputs of the whole micro-batch, aligned, on every rank that shares it.

        A tuple, because FSDP looks for tensors in tuples: (values,), or (log-probs,) or (log-probs, entropy).
        Plain ids ``[1, L]`` run the model's own forward and give its logits (the check at start).
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
            return (self._align(self.lm.score(hidden).squeeze(-1).float(), inputs),)
        log_probs, entropy = chunked_log_probs(
            hidden,
            self.lm.get_output_embeddings().weight,
            inputs.targets,
            temperature=temperature,
            chunk=self.logit_chunk,
            entropy="entropy" in needs,
            coefficients=inputs.coefficients,
        )
        return tuple(self._align(x, inputs) for x in (log_probs, entropy) if x is not None)

    def outputs(
        self, inputs: PackedInputs, needs: Sequence[str], temperature: float
    ) -> TokenOutputs:
        """The same by name."""
        parts = self(inputs, needs, temperature)
        names = ("values",) if self.kind == "value_model" else ("log_probs", "entropy")
        return TokenOutputs(**dict(zip(names, parts, strict=False)))

    def _align(self, about_next: Tensor, inputs: PackedInputs) -> Tensor:
        """From "about the token after this one" to the contract's "about this token"; padding cut off."""
        whole = about_next if self.group is None else gather_tokens(about_next, self.group)
        # A copy: FSDP hangs its backward hook on the output, which a view would lose.
        return whole.roll(1).masked_fill(inputs.first, 0.0)[: inputs.size].clone()


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model before sharding.

    Attributes:
        pieces: parameter name (without any adapter's or wrapper's prefix) → saved tensors.
        folder: where its files are.
        materialized: false when the parameters are on the meta device, to be read after sharding.
    """

    lm: Any
    pieces: dict[str, list[Piece]]
    folder: str
    materialized: bool


def build_model(config: EngineConfig, kind: Kind, ulysses: int) -> BuiltModel:
    """The transformers model of ``config.model``, unsharded; raises ``ConfigError``."""
    folder = fetch(config.model)
    hf_config = _hf_config(folder, config, kind)
    _refuse_unknown_head(hf_config)
    _refuse_other_layers(hf_config)
    _refuse_other_attention(hf_config, kind)
    if config.optimizer is not None:
        refuse_noise(hf_config, where=WHERE)
    attention.register()
    attention.check_heads(hf_config.get_text_config(), ulysses)
    random = config.model.init == "random"
    lm = _from_config(hf_config, config, kind, folder, torch.device("meta"))
    if random:
        need = sum(parameter.nbytes for parameter in lm.parameters())
        require_memory(hf_config, folder, need, device_of("cpu").room()[1])
        lm = _from_config(hf_config, config, kind, folder, torch.device("cpu"))
    _refuse_biased_head(lm, kind)
    _refuse_saved_buffers(lm)
    if config.memory.recompute == "full":
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pieces = pieces_of(lm)
    if not random:
        check_files(folder, [piece for name, _ in lm.named_parameters() for piece in pieces[name]])
    return BuiltModel(lm=lm, pieces=pieces, folder=folder, materialized=random)


def _from_config(
    hf_config: Any, config: EngineConfig, kind: Kind, folder: str, device: torch.device
) -> Any:
    with torch.random.fork_rng(devices=[]), device:
        torch.default_generator.manual_seed(config.seed)  # the CPU alone: no device is reseeded
        try:
            return _auto_class(kind).from_config(
                hf_config,
                attn_implementation=attention.NAME,
                dtype=DTYPES[config.precision.master],
                trust_remote_code=config.model.trust_remote_code,
            )
        except Exception as error:  # each family's own code reads the configuration: an activation or a RoPE unknown to it
            raise unbuildable(hf_config, folder, error) from error


def _auto_class(kind: Kind) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    return AutoModelForCausalLM if kind == "language_model" else AutoModelForTokenClassification


def _hf_config(folder: str, config: EngineConfig, kind: Kind) -> Any:
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
    known = _auto_class(kind)._model_mapping  # noqa: SLF001 - nothing public says it without building
    if type(hf_config) not in known and not config.model.trust_remote_code:
        raise ConfigError(
            "model.path",
            f"transformers has no {kind} of type {hf_config.model_type!r}",
            remedy="give a causal language model",
        )
    override(hf_config, config.model.config_overrides)
    if kind == "value_model":
        hf_config.num_labels = 1
    return hf_config


def _refuse_unknown_head(hf_config: Any) -> None:
    # The chunked head computes h W^T. These would change the logits after it, and be lost in silence.
    text = hf_config.get_text_config()
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        value = getattr(text, key, None)
        if value is not None and value != 1.0:
            raise UnsupportedCapability(
                f"{key}={value}",
                where="engine-fsdp",
                why="its head computes plain h W^T",
                remedy="use another backend for this model family",
            )


# What attention by documents computes, and layers that look at each token alone (transformers' names).
_LAYERS = {"full_attention", "attention", "sliding_attention", "moe", "mlp", "sparse", "dense"}


def _refuse_other_layers(hf_config: Any) -> None:
    if other := sorted(
        set(getattr(hf_config.get_text_config(), "layer_types", None) or ()) - _LAYERS
    ):
        raise UnsupportedCapability(
            f"layers of type {', '.join(other)}",
            where="engine-fsdp",
            why="this engine's attention would leave that out, or they would look into the documents beside theirs",
            remedy="use another backend for this model family",
        )


def _refuse_other_attention(hf_config: Any, kind: Kind) -> None:
    cls = _auto_class(kind)._model_mapping.get(type(hf_config), None)  # noqa: SLF001 - None: code of the model's own folder
    if cls is not None and not cls._supports_attention_backend:
        raise UnsupportedCapability(
            "attention that cannot be replaced",
            where=f"{WHERE} with {cls.__name__}",
            why="transformers computes it in the family's own code, which knows no documents",
            remedy="use another backend for this model family",
        )


def _refuse_biased_head(lm: Any, kind: Kind) -> None:
    if kind == "language_model" and getattr(lm.get_output_embeddings(), "bias", None) is not None:
        raise UnsupportedCapability(
            "an output head with a bias",
            where=f"engine-fsdp with {type(lm).__name__}",
            why="its head computes plain h W^T",
            remedy="use another backend for this model family",
        )


def _refuse_saved_buffers(lm: Any) -> None:
    """Reading, exports and checkpoints are of parameters. RoPE's frequencies are saved by some, and made anew."""
    params = {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    if other := sorted(
        name for name in set(lm.state_dict()) - params if not name.endswith("inv_freq")
    ):
        raise UnsupportedCapability(
            "saved tensors that are no parameters",
            where=f"engine-fsdp with {type(lm).__name__}",
            why=f"{other[0]} and the like would be neither read nor exported",
            remedy="use another backend for this model family",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentLimit:
    """From how many positions on transformers takes RoPE's frequencies from the longest document of a pack."""

    tokens: int
    kind: str

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ``BatchError`` for a longer document: others beside it would be computed with its frequencies."""
        for index, length in enumerate(lengths):
            if length > self.tokens:
                raise BatchError(
                    "cu_seqlens",
                    f"document {index} has {length} tokens, this model takes {self.tokens}",
                    index=index,
                    why=f"beyond that its RoPE ({self.kind}) follows the longest document of a pack, and changes the others",
                    remedy="shorten the document, or use a model or backend whose RoPE does not",
                )


def document_limit(hf_config: Any) -> DocumentLimit | None:
    """The limit of a model whose RoPE depends on length, or None."""
    text = hf_config.get_text_config()
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    found: list[DocumentLimit] = []
    for part in [rope] if "rope_type" in rope else rope.values():  # one, or one a kind of layer
        kind = str(part.get("rope_type", "default")) if isinstance(part, Mapping) else "default"
        if "dynamic" in kind:
            found.append(DocumentLimit(tokens=int(text.max_position_embeddings), kind=kind))
        elif kind == "longrope":
            found.append(
                DocumentLimit(tokens=int(part["original_max_position_embeddings"]), kind=kind)
            )
    return min(found, key=lambda limit: limit.tokens, default=None)


def blocks_of(lm: Any) -> list[nn.Module]:
    """The repeated blocks, by the model's own list of what must not be split."""
    names = set(lm._no_split_modules or ())  # noqa: SLF001 - the attribute that transformers documents for this
    blocks = [m for m in lm.modules() if type(m).__name__ in names]
    if not blocks:
        raise ConfigError(
            "model.path",
            f"{type(lm).__name__} names no blocks (_no_split_modules)",
            remedy="use a transformers causal language model",
        )
    return blocks
