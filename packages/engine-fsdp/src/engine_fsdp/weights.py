"""The table of parameters, and the reader of Hugging Face folders that fills this rank's shards.

No rank holds the whole model, because each reads only its own rows of each file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine_api.errors import ConfigError
from engine_api.hf_folder import read_index
from engine_api.hf_names import Piece
from engine_api.weights import ShardSpec
from engine_fsdp.parallel import Layout

log = logging.getLogger("engine_fsdp")

# Floating-point dtypes, by safetensors' names.
_FLOATING = ("F64", "F32", "F16", "BF16")


@dataclass(kw_only=True)
class ShardedParam:
    """One parameter of the model, sharded by rows over the layout's shard group."""

    name: str
    """Name under the wrapped model, with adapters' prefixes."""

    pieces: list[Piece]
    """Saved tensors that the parameter consists of."""

    param: nn.Parameter
    """The parameter itself."""

    first: int
    """Index of this rank's first row."""

    adapter: bool = False
    """True for a parameter of a low-rank adapter."""

    trainable: bool = True
    """True for a parameter that the optimizer updates."""

    _specs: list[ShardSpec] | None = None

    @property
    def local(self) -> Tensor:
        """The rows of this rank, in live memory."""
        return local_of(self.param)

    def specs(self, replica: int) -> list[ShardSpec]:
        """Return the box of this rank's part of each piece, computed once."""
        if self._specs is None:
            count = self.local.shape[0] if self.param.dim() else 0
            self._specs = [piece.spec(self.first, count, replica) for piece in self.pieces]
        return self._specs


def local_of(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor (live memory), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(rows: int, layout: Layout) -> int:
    """Return this rank's first row, for chunks of ``ceil(rows / ranks)`` as in ``torch.chunk``."""
    return min(layout.shard_rank * math.ceil(rows / layout.shard_size), rows)


def parameter_table(
    root: nn.Module, pieces: dict[str, list[Piece]], layout: Layout
) -> list[ShardedParam]:
    """Return every parameter under ``root.lm`` in the model's order, with tied parameters once."""
    table: list[ShardedParam] = []
    for full_name, param in root.named_parameters():
        name = full_name.removeprefix("lm.")
        plain = name.replace(".base_layer.", ".").replace(".default.", ".")
        adapter = ".lora_" in name
        shape = tuple(param.shape)
        peft_name = f"base_model.model.{plain}"
        own = [Piece(name=peft_name, shape=shape)] if adapter else pieces[plain]
        first = first_row(shape[0], layout) if shape else 0
        table.append(
            ShardedParam(
                name=name,
                pieces=own,
                param=param,
                first=first,
                adapter=adapter,
                trainable=param.requires_grad,
            )
        )
    return table


def weight_files(folder: str) -> dict[str, str]:
    """Return the name of each tensor's file, by tensor name.

    Raises:
        ConfigError: the folder has no safetensors weights.
    """
    index = read_index(Path(folder))
    if index is not None:
        return index
    names = sorted(p.name for p in Path(folder).glob("*.safetensors"))
    if not names:
        pickled = sorted(p.name for p in Path(folder).glob("*.bin"))
        raise ConfigError(
            "model.path",
            f"{folder} holds no weights (*.safetensors)",
            why=f"{pickled[0]} is a pickle, which is never read" if pickled else "",
            remedy="convert it with transformers' save_pretrained, or set model.init: random",
        )
    return {name: file for file in names for name in _names_in(Path(folder) / file)}


def _names_in(path: Path) -> list[str]:
    """Return the names of a file's tensors."""
    with _open(path) as handle:
        return list(handle.keys())


def _open(path: Path) -> Any:
    """Open a safetensors file, or raise ``ConfigError``."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    """Return the error for a file that cannot be read."""
    return ConfigError(
        "model.path", f"{path} cannot be read", why=str(error), remedy="fetch the file again"
    )


def fill(table: list[ShardedParam], folder: str, seed: int) -> None:
    """Fill the shards from files that ``check_files`` has accepted.

    A value head that is in no file is drawn from the seed.
    """
    files = weight_files(folder)
    opened = _Files(folder)
    for entry in (e for e in table if not e.adapter):
        if entry.name.startswith("score.") and entry.pieces[0].name not in files:
            _draw_head(entry, seed)
            continue
        for piece in entry.pieces:
            _read_piece(opened, files[piece.name], entry, piece)
    wanted = {piece.name for entry in table for piece in entry.pieces}
    if unused := sorted(set(files) - wanted):
        log.warning("%s: %d tensors are not used: %s", folder, len(unused), ", ".join(unused[:4]))


class _Files:
    """The files of a folder, each opened once."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.open: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """Return a file's handle."""
        if name not in self.open:
            self.open[name] = _open(self.folder / name)
        return self.open[name]


def check_files(folder: str, pieces: Iterable[Piece]) -> None:
    """Raise ``ConfigError`` unless the folder's files hold these tensors in their shapes.

    Only the files' headers are read. A value head may be missing.
    """
    files = weight_files(folder)
    opened = _Files(folder)
    missing: list[str] = []
    for piece in pieces:
        if piece.name in files:
            _checked(opened, files[piece.name], piece)
        elif not piece.name.startswith("score."):
            missing.append(piece.name)
    if missing:
        raise ConfigError(
            "model.path",
            f"{folder} lacks {len(missing)} tensors: {', '.join(missing[:3])} …",
            remedy="use the folder that save_pretrained wrote for this config.json",
        )


def _checked(opened: _Files, file: str, piece: Piece) -> Any:
    """Check a saved tensor's shape and dtype, and return its handle without reading it."""
    from safetensors import SafetensorError

    try:
        source = opened.get(file).get_slice(piece.name)
    except SafetensorError as error:
        # The index names a file that does not hold the tensor.
        raise _unreadable(opened.folder / file, error) from error
    if tuple(source.get_shape()) != piece.shape:
        raise ConfigError(
            "model.path",
            f"{piece.name} is {tuple(source.get_shape())}, config.json says {piece.shape}",
            remedy="use files and config.json of the same model",
        )
    if source.get_dtype() not in _FLOATING:
        raise ConfigError(
            "model.path",
            f"{piece.name} is stored as {source.get_dtype()}",
            why="this engine reads floating-point weights as they are, not quantized ones",
            remedy="use the model's bf16, fp16 or fp32 files",
        )
    return source


def _read_piece(opened: _Files, file: str, entry: ShardedParam, piece: Piece) -> None:
    """Copy this rank's part of a saved tensor into its shard."""
    from safetensors import SafetensorError

    rows = entry.local.shape[0] if piece.shape else 0
    source = _checked(opened, file, piece)
    target = piece.view(entry.local.detach(), entry.first)
    try:
        if piece.expert is None and piece.shape:
            if rows:
                target.copy_(source[entry.first : entry.first + rows])
        elif target.numel():
            target.copy_(opened.get(file).get_tensor(piece.name))
    except (SafetensorError, OSError) as error:
        raise _unreadable(opened.folder / file, error) from error


def _draw_head(entry: ShardedParam, seed: int) -> None:
    """Draw a new value head, with its weight from normal(0, 0.02) and a zero bias.

    The values are the same in every layout.
    """
    log.warning("%s is not in the folder: a new one is made from seed %d", entry.name, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(entry.param.shape)
    if entry.name.endswith("bias"):
        whole = torch.zeros(shape)
    else:
        whole = torch.randn(shape, generator=generator) * 0.02
    rows = entry.local.shape[0]
    entry.local.detach().copy_(whole[entry.first : entry.first + rows])


def trainable(table: list[ShardedParam]) -> Iterator[ShardedParam]:
    """Yield the entries that the optimizer updates."""
    return (entry for entry in table if entry.trainable)
