"""Float64 execution of code that hard-codes float32: transformers casts norms, RoPE and routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64Everywhere(TorchFunctionMode):
    """Mode that replaces float32 by float64, as an argument, in ``.float()`` and as the default."""

    def __enter__(self) -> Self:
        # An integer tensor times a Python float has the default dtype.
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        torch.set_default_dtype(self._before)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = {key: _widen(value) for key, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **wide)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
