"""LoRA adapter on its way to a server: the engine's export, the expected tensors, the PEFT folder.

An adapter's tensors have PEFT's names, ``base_model.model.<module>.lora_A.weight`` ``[rank, in]``
and ``….lora_B.weight`` ``[out, rank]``; the contract requires them of the engine's
``adapter="only"`` export. A server adds ``alpha / rank · B A`` to its base.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine_api.config import LoraConfig, ModelSource, near_matches
from engine_api.errors import ConfigError, RolloutError
from engine_api.weights import ShardSpec
from rollout_fp8.model import config_of
from rollout_fp8.wire.audit import MODULUS
from rollout_fp8.wire.checksum import checksum

WHERE = "adapter sync"
PREFIX = "base_model.model."
# Folders in it have unique names and are readable only by their owner.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is a tmpfs on purpose


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Version of an adapter: whole tensors by PEFT's name, on the CPU, in the served dtype."""

    lora: LoraConfig
    tensors: Mapping[str, Tensor]
    sums: Mapping[str, int] | None = None
    """Checksums from the process that exported the adapter.

    None if this process exported it.
    """

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def checksums(self) -> Mapping[str, int]:
        """Return the checksum of every tensor as a server holds it, by name.

        ``alpha / rank`` is multiplied into B, in B's dtype.
        """
        if self.sums is not None:
            return self.sums
        scale = self.lora.alpha / self.lora.rank
        checksums: dict[str, int] = {}
        for name, tensor in self.tensors.items():
            is_scaled = scale != 1 and ".lora_B." in name
            checksums[name] = whole_checksum(tensor.clone().mul_(scale) if is_scaled else tensor)
        return checksums


def whole_checksum(tensor: Tensor) -> int:
    """Return the checksum of a whole tensor, unsigned."""
    return checksum(tensor.contiguous(), ShardSpec.whole(tensor.shape)) % MODULUS


# --- the expected tensors -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExpectedAdapter:
    """Adapter that a configuration puts on a model.

    Attributes:
        shapes: shapes of its tensors, by PEFT's names.
        layers: last parts of the names of the layers that carry it (``q_proj``).
    """

    shapes: Mapping[str, tuple[int, ...]]
    layers: tuple[str, ...]

    @classmethod
    def of(cls, source: ModelSource, lora: LoraConfig) -> ExpectedAdapter:
        """Return the adapter that ``lora`` puts on a model's folder or hub id. No weight is read.

        Raises:
            ConfigError: the target modules match no linear layer.
        """
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config_of(source), trust_remote_code=source.trust_remote_code
            )
        head = model.get_output_embeddings()
        linear = {
            n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head
        }
        found = {name: layer for name, layer in linear.items() if _is_target(name, lora)}
        if not found:
            raise ConfigError(
                "engine.lora.target_modules",
                f"{lora.target_modules!r} fits no linear layer",
                remedy=near_matches(str(lora.target_modules), _leaves(linear)),
            )
        shapes: dict[str, tuple[int, ...]] = {}
        for name, layer in found.items():
            shapes[f"{PREFIX}{name}.lora_A.weight"] = (lora.rank, layer.in_features)
            shapes[f"{PREFIX}{name}.lora_B.weight"] = (layer.out_features, lora.rank)
        return cls(shapes=shapes, layers=_leaves(found))

    def check(self, adapter: Adapter) -> None:
        """Raise ``RolloutError`` that lists missing, unknown, misshapen and non-finite tensors."""
        problems = [
            problem
            for name, tensor in adapter.tensors.items()
            if (problem := self._problem(name, tensor))
        ]
        problems += [f"{name}: missing" for name in self.shapes if name not in adapter.tensors]
        if problems:
            shown = problems[:8]
            if len(problems) > 8:
                shown.append(f"and {len(problems) - 8} more")
            raise RolloutError(
                f"{len(problems)} tensor(s) of the adapter do not fit",
                where=WHERE,
                why="\n       ".join(shown),
                remedy="give engine and rollout the same model and engine.lora; nothing is "
                "generated until a sync succeeds",
            )

    def _problem(self, name: str, tensor: Tensor) -> str | None:
        if name not in self.shapes:
            return f"{name}: the model has no such layer ({near_matches(name, list(self.shapes))})"
        if self.shapes[name] != tuple(tensor.shape):
            return f"{name}: expected shape {list(self.shapes[name])}, got {list(tensor.shape)}"
        return None if bool(torch.isfinite(tensor).all()) else f"{name}: not finite"


def _leaves(layers: Mapping[str, nn.Linear]) -> tuple[str, ...]:
    return tuple(sorted({name.rpartition(".")[2] for name in layers}))


def _is_target(name: str, lora: LoraConfig) -> bool:
    """Return whether PEFT would adapt the layer.

    A target is ``all-linear``, a pattern for the whole name, or a list of endings.
    """
    targets = lora.target_modules
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


# --- a folder -------------------------------------------------------------------------------------


@contextmanager
def folder_of(adapter: Adapter) -> Iterator[Path]:
    """Yield a folder as ``PeftModel.save_pretrained`` writes it, and remove it afterwards.

    It is in shared memory where there is any, and complete once it has its name.

    Raises:
        RolloutError: the folder cannot be written.
    """
    parent: Path | None = None
    try:
        try:
            parent = Path(tempfile.mkdtemp(prefix="rollout-adapter-", dir=_memory()))
            partial = parent / "adapter.partial"
            final = parent / "adapter"
            partial.mkdir()
            save_file(
                dict(adapter.tensors),
                partial / "adapter_model.safetensors",
                metadata={"format": "pt"},
            )
            (partial / "adapter_config.json").write_text(
                json.dumps(peft_config(adapter.lora)), encoding="utf-8"
            )
            partial.rename(final)
        except (OSError, SafetensorError) as error:
            raise RolloutError(
                "the adapter cannot be written",
                where=WHERE,
                why=str(error),
                remedy=f"free memory in {_memory() or tempfile.gettempdir()}",
            ) from error
        yield final
    finally:
        if parent is not None:
            shutil.rmtree(parent, ignore_errors=True)


def peft_config(lora: LoraConfig) -> dict[str, object]:
    """Return the content of ``adapter_config.json``.

    ``B A`` is scaled by ``lora_alpha / r``.
    """
    targets = (
        lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "bias": "none",
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "inference_mode": True,
    }


def read_folder(folder: Path, sums: Mapping[str, int]) -> Adapter:
    """Read the folder that ``folder_of`` wrote, without unpickling anything.

    Raises:
        RolloutError: the folder cannot be read.
    """
    try:
        about = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise RolloutError(
            f"{folder} holds no adapter",
            where=WHERE,
            why=str(error),
            remedy="server and trainer must be on one host and share its memory files",
        ) from error
    lora = LoraConfig(
        rank=about["r"],
        alpha=about["lora_alpha"],
        dropout=about["lora_dropout"],
        target_modules=about["target_modules"],
    )
    return Adapter(lora=lora, tensors=tensors, sums=dict(sums))


def _memory() -> Path | None:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
