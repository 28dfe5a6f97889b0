"""Float64 execution of code that hard-codes float32: transformers casts norms, RoPE and routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64Everywhere(TorchFunctionMode):
    """Mode that replaces float32 by float64, as an argument or in ``.float()``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = {key: _widen(value) for key, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **wide)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
