"""Places of a server's weights in memory, which syncs write and CUDA graphs read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Of a parameter in memory: address, shape, strides and dtype.
Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class Places:
    """Places of some parameters of a module, as they are when this object is made.

    A sync takes some ten ms. To list the parameters of an 8B model takes more than two of them on
    the host, so that the attributes that hold them are listed once, and only read afterwards.

    Args:
        model: the module.
        parameters: the parameters to look after by name, which may be of any module.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self._model = model
        self._places = {name: _place(tensor) for name, tensor in parameters.items()}
        self._attributes = list(_attributes(model, self._places))

    def moved(self) -> list[str]:
        """Return the names of the parameters that are not where they were.

        A parameter that was replaced by another one in the same memory is where it was.
        """
        if all(
            attributes.get(name) is kept and (place is None or _place(kept) == place)
            for attributes, name, kept, place in self._attributes
        ):
            return []
        live = dict(self._model.named_parameters())
        moved = [
            name
            for name, place in self._places.items()
            if name not in live or _place(live[name]) != place
        ]
        if not moved:
            self._attributes = list(_attributes(self._model, self._places))
        return moved


# A module's modules or parameters, a name among them, what has the name, and a parameter's place.
Attribute = tuple[Mapping[str, Any], str, Any, Place | None]


def _attributes(model: nn.Module, places: Mapping[str, Place]) -> Iterable[Attribute]:
    """Yield every attribute on the way from a module to the parameters in ``places``."""
    for prefix, module in model.named_modules():
        # A module's own lookup takes longer than the whole comparison of an attribute.
        modules, parameters = vars(module)["_modules"], vars(module)["_parameters"]
        for name, child in modules.items():
            yield modules, name, child, None
        for name, parameter in parameters.items():
            place = places.get(f"{prefix}.{name}" if prefix else name)
            if place is not None and parameter is not None:
                yield parameters, name, parameter, place


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
