"""The model of a run as a Hugging Face folder, and the adapter as a PEFT folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine_api.comm import Comm, together
from engine_api.config import LoraConfig, Precision
from engine_api.contract import Engine
from engine_api.errors import ConfigError
from engine_api.folders import give_common_mode, replace_folder, restore
from engine_api.hf_folder import WEIGHT_FILES

if TYPE_CHECKING:
    import torch

    from engine_trainer.placement.groups import EngineGroup

ADAPTER_FILE = "adapter_model.safetensors"


class SavesPretrained(Protocol):
    """A tokenizer, as transformers' or the trainer's."""

    def save_pretrained(self, folder: Path, /) -> Any:
        """Write its files to a folder."""
        ...


def export_dtype(name: str | None, precision: Precision) -> torch.dtype:
    """Return the dtype of exported weights: ``name``, or without one that of the computation.

    float8 is a precision of matrix products, whose weights are bfloat16.
    """
    import torch

    chosen = precision.compute if name is None else name
    return getattr(torch, "bfloat16" if chosen == "float8" else chosen)


def write_model(
    policy: EngineGroup,
    comm: Comm,
    final: Path,
    tokenizer: SavesPretrained,
    *,
    dtype: torch.dtype,
    convert: Callable[[Path], None] | None = None,
) -> None:
    """Write the model, with its adapter merged, and the tokenizer in place of the folder ``final``.

    The tokenizer also writes an image processor of its own, over that of the model's folder.

    All ranks call it together. ``convert`` changes the folder before it takes that name. A kill
    leaves the former folder or the new one, whole.
    """
    new = final.with_name(final.name + ".new")
    is_main = comm.rank == 0

    def prepare() -> None:
        restore(final)
        shutil.rmtree(new, ignore_errors=True)  # a killed save's remains

    def replace() -> None:
        tokenizer.save_pretrained(new)
        if convert is not None:
            convert(new)
        replace_folder(new, final, stale=WEIGHT_FILES)

    together(comm, lambda: prepare() if is_main else None)
    policy.save_hf(new, dtype=dtype)
    together(comm, lambda: replace() if is_main else None)


def write_adapter(
    engine: Engine, comm: Comm, final: Path, *, lora: LoraConfig, base: str, dtype: torch.dtype
) -> None:
    """Write the adapter in place of the folder ``final``, as ``PeftModel`` reads it.

    All ranks call it together.

    Args:
        lora: the adapter's configuration.
        base: the model that the adapter belongs to, as PEFT names it in the folder.
        dtype: the dtype of the written weights.

    Raises ``ConfigError`` if PEFT is not installed.
    """
    from safetensors.torch import save_file

    tensors: Mapping[str, torch.Tensor] = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in engine.get_per_tensor_param(dtype=dtype, adapter="only")
    }
    new = final.with_name(final.name + ".new")

    def write() -> None:
        restore(final)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        save_file(dict(tensors), new / ADAPTER_FILE, metadata={"format": "pt"})
        give_common_mode(new / ADAPTER_FILE)
        _peft_config(lora, base).save_pretrained(str(new))
        replace_folder(new, final, stale=(ADAPTER_FILE,))

    together(comm, lambda: write() if comm.rank == 0 else None)


def _peft_config(lora: LoraConfig, base: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "--adapter", "peft is not installed", remedy="pip install 'engine-fsdp[lora]'"
        ) from error
    targets = lora.target_modules
    return peft.LoraConfig(
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType] - it is computed with as a number
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        inference_mode=True,
    )
