"""Tensors that travel in a batch: their dtypes, and the check that they are plain."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_api.errors import BatchError, kind_of

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "check_tensor"]

DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
"""Names of the dtypes that a batch may have."""


def check_tensor(name: str, value: object) -> None:
    """Raise ``BatchError`` unless ``value`` is a tensor of plain numbers.

    Each engine indexes, copies and hashes it.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        raise BatchError(
            name, f"expected a tensor, got {kind_of(value)}", remedy="convert with torch.as_tensor"
        )
    refused = [
        (not _is_plain(value), f"a {type(value).__name__}", "convert it to torch.Tensor"),
        (value.is_meta, "a tensor on the meta device", "give it values"),
        (value.is_nested, "a nested tensor", "concatenate its parts"),
        (
            value.layout is not torch.strided,
            f"a tensor of layout {value.layout}",
            "convert with .to_dense()",
        ),
        (
            value.requires_grad,
            "a tensor that requires a gradient",
            "take it out of the graph with .detach()",
        ),
        (
            str(value.dtype).removeprefix("torch.") not in DTYPES,
            f"a tensor of {value.dtype}",
            f"known: {', '.join(DTYPES)}",
        ),
    ]
    for wrong, got, remedy in refused:
        if wrong:
            raise BatchError(
                name, f"expected a plain, dense tensor of numbers, got {got}", remedy=remedy
            )


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether a tensor has the class that its device makes.

    A backend written in Python defines a class of its own.
    """
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter) or type(value) is type(
        torch.empty(0, device=value.device)
    )
