"""Places of a server's weights in memory, which syncs write and CUDA graphs read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Of a parameter in memory: address, shape, strides and dtype.
Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
# A module's variables, the name of one of its registries, a name in it, its object, and the
# place of a watched parameter.
_Entry = tuple[Mapping[str, Any], str, str, Any, Place | None]


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements, uint8 [bytes], a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def list_saved(model: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and saved buffers by name."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: one for name, one in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


class Places:
    """Places of some of a module's parameters and buffers, as they are when this object is made.

    A sync takes some ten ms, and to list the parameters of an 8B model takes more than two of them
    on the host. The entries of the modules' registries through which the parameters are found are
    therefore listed once, and only compared afterwards, for as long as nothing differs.

    Args:
        model: the module.
        parameters: the parameters and buffers to watch, by their names in `list_saved`.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self._model = model
        self._places = {name: _place(tensor) for name, tensor in parameters.items()}
        self._entries = self._list_entries()

    def moved(self) -> list[str]:
        """Return the names of the parameters that are not where they were.

        A parameter that was replaced by another one in the same memory is where it was.
        """
        if self._entries is not None and all(map(_is_unchanged, self._entries)):
            return []
        live = list_saved(self._model)
        moved = [
            name
            for name, place in self._places.items()
            if name not in live or _place(live[name]) != place
        ]
        if not moved:
            self._entries = self._list_entries()
        return moved

    def _list_entries(self) -> list[_Entry] | None:
        """Return the entries on the way to every watched parameter, or None if some have none.

        A module may name its parameters otherwise than after its modules, as wrappers do.
        """
        entries: list[_Entry] = []
        found = set[str]()
        for prefix, module in self._model.named_modules():
            variables = vars(module)
            for name, child in variables["_modules"].items():
                entries.append((variables, "_modules", name, child, None))
            for registry in ("_parameters", "_buffers"):
                for name, tensor in variables[registry].items():
                    full = f"{prefix}.{name}" if prefix else name
                    if full in self._places and tensor is not None:
                        found.add(full)
                        entries.append((variables, registry, name, tensor, self._places[full]))
        return entries if found == self._places.keys() else None


def _is_unchanged(entry: _Entry) -> bool:
    variables, registry, name, kept, place = entry
    return variables[registry].get(name) is kept and (place is None or _place(kept) == place)


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
