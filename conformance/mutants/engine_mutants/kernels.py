"""Right engines that differ from one another in rounding alone.

Each kernel replaces operators of torch, below autograd, while the engine computes: products that
are summed in another order, in another precision or on padded inputs, softmaxes and sums in
float64, another attention. No case may fail for any of them, at any seed (tools/margins.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from engine_api.plugin import EnginePlugin, Row
from engine_api.registry import EngineRegistry
from engine_fsdp.plugin import PLUGIN as FSDP
from engine_loopback.plugin import PLUGIN as LOOPBACK

__all__ = ["ENGINES", "KERNELS", "backend", "install_kernels"]

aten = torch.ops.aten
Product = Callable[[Tensor, Tensor], Tensor]
# The engines that run on other kernels, by backend.
ENGINES: Mapping[str, EnginePlugin] = {"loopback": LOOPBACK, "fsdp2": FSDP}
# The methods in which an engine computes.
_COMPUTE = ("infer_batch", "forward_backward", "train_batch", "optimizer_step")


class Rewrite(TorchDispatchMode):
    """Replacement of some operators on plain tensors, while all others run as they are."""

    def __init__(self, operators: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.operators = operators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator or its replacement."""
        plain = all(kind in (Tensor, torch.nn.Parameter) for kind in types)
        return (
            self.operators.get(func, func)(*args, **(kwargs or {}))
            if plain
            else func(*args, **(kwargs or {}))
        )


def _products(product: Product) -> dict[Any, Callable[..., Any]]:
    """Return the matrix products of torch, made of one product ``[…, n, K] x […, K, m]``."""

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return product(a, b).to(a.dtype)

    def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return (beta * bias + alpha * product(a, b)).to(a.dtype)

    return {aten.mm.default: mm, aten.bmm.default: mm, aten.addmm.default: addmm}


def _wide(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors in the precision in which a right engine accumulates 16-bit products."""
    if a.dtype.itemsize < 4:
        return a.float(), b.float()
    return a, b


def _halves(a: Tensor, b: Tensor) -> Tensor:
    a, b = _wide(a, b)
    half = a.shape[-1] // 2
    return a[..., :half] @ b[..., :half, :] + a[..., half:] @ b[..., half:, :]


def _one_by_one(a: Tensor, b: Tensor) -> Tensor:
    a, b = _wide(a, b)
    total = a.new_zeros(*a.shape[:-1], b.shape[-1])
    for k in range(a.shape[-1]):
        total += a[..., k : k + 1] * b[..., k : k + 1, :]
    return total


def _backwards(a: Tensor, b: Tensor) -> Tensor:
    a, b = _wide(a, b)
    return a.flip(-1) @ b.flip(-2)


def _shuffled(a: Tensor, b: Tensor) -> Tensor:
    """Sum in a random order, as the gradient of a weight is when documents are permuted."""
    a, b = _wide(a, b)
    order = torch.randperm(a.shape[-1], generator=torch.Generator().manual_seed(a.shape[-1]))
    return a[..., order] @ b[..., order, :]


def _padded(a: Tensor, b: Tensor) -> Tensor:
    """Pad all three sizes to multiples of 32, and the sum by five zeros in front of it."""
    a, b = _wide(a, b)
    n, length, m = a.shape[-2], a.shape[-1], b.shape[-1]
    after = -(length + 5) % 32
    a = torch.nn.functional.pad(a, (5, after, 0, -n % 32))
    b = torch.nn.functional.pad(b, (0, -m % 32, 5, after))
    return (a @ b)[..., :n, :m]


def _transposed(a: Tensor, b: Tensor) -> Tensor:
    a, b = _wide(a, b)
    return (b.mT.contiguous() @ a.mT.contiguous()).mT


def _in_float64(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double()


def _noisy(a: Tensor, b: Tensor) -> Tensor:
    """Move each element by up to two roundings of float32, at random."""
    a, b = _wide(a, b)
    exact = a @ b
    generator = torch.Generator().manual_seed(exact.numel())
    return exact * (1 + (torch.rand(exact.shape, generator=generator) - 0.5) * 2.0**-21)


def _in_double(operator: Any) -> Callable[..., Any]:
    """Return the operator computed in float64 and rounded once."""

    @wraps(operator)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not x.is_floating_point():
            return operator(x, *args, **kwargs)
        dtype = kwargs.pop("dtype", None) or x.dtype
        return operator(x.double(), *args, **kwargs).to(dtype)

    return run


_SOFTMAX = tuple(getattr(aten, name).default for name in ("_softmax", "_log_softmax", "logsumexp"))
_SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.dim)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to round.

    Attributes:
        about: one phrase for the table.
        operators: replacements by operator.
        attention: kernel of torch's scaled-dot-product attention, or None for its own choice.
    """

    about: str
    operators: Mapping[Any, Callable[..., Any]] = field(default_factory=dict[Any, Any])
    attention: SDPBackend | None = None

    def running(self) -> AbstractContextManager[Any]:
        """Return a context in which torch computes by this kernel."""
        if self.operators:
            return Rewrite(self.operators)
        return nullcontext() if self.attention is None else sdpa_kernel(self.attention)


KERNELS: dict[str, Kernel] = {
    "own": Kernel(about="the engine's own kernels"),
    "math": Kernel(about="attention by matrix products", attention=SDPBackend.MATH),
    "halves": Kernel(about="products summed in two halves", operators=_products(_halves)),
    "one-by-one": Kernel(about="products summed one by one", operators=_products(_one_by_one)),
    "backwards": Kernel(about="products summed backwards", operators=_products(_backwards)),
    "shuffled": Kernel(about="products summed in random order", operators=_products(_shuffled)),
    "padded": Kernel(about="factors padded with zeros", operators=_products(_padded)),
    "transposed": Kernel(about="the transposed product", operators=_products(_transposed)),
    "float64": Kernel(about="products in float64", operators=_products(_in_float64)),
    "softmax": Kernel(about="softmax in float64", operators={o: _in_double(o) for o in _SOFTMAX}),
    "sums": Kernel(about="sums and means in float64", operators={o: _in_double(o) for o in _SUMS}),
    "noisy": Kernel(about="products off by up to 2 roundings", operators=_products(_noisy)),
}


def backend(engine: str, kernel: str) -> str:
    """Return the backend's name of an engine on one of the kernels."""
    return f"{engine}-{kernel}"


def _on_kernel(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A method that calls another one is inside the context already.
        if self.computes_on_kernel:
            return method(self, *args, **kwargs)
        self.computes_on_kernel = True
        try:
            with KERNELS[self.kernel_name].running():
                return method(self, *args, **kwargs)
        finally:
            self.computes_on_kernel = False

    return compute


def _class(target: str, kernel: str) -> type:
    """Return the class of ``target`` that computes on a kernel, as an attribute of this module."""
    module, _, name = target.partition(":")
    base = getattr(import_module(module), name)
    methods = {method: _on_kernel(getattr(base, method)) for method in _COMPUTE}
    about = {"__module__": __name__, "kernel_name": kernel, "computes_on_kernel": False}
    return type(f"{name}_{kernel.replace('-', '_')}", (base,), about | methods)


def _row(row: Row, name: str, kernel: str) -> Row:
    made = _class(row.target, kernel)
    setattr(sys.modules[__name__], made.__name__, made)
    return replace(row, backends=(name,), devices=("cpu",), target=f"{__name__}:{made.__name__}")


def _attribute(name: str) -> str:
    return name.upper().replace("-", "_")


for _engine, _plugin in ENGINES.items():
    for _kernel in KERNELS:
        _name = backend(_engine, _kernel)
        _rows = tuple(_row(row, _name, _kernel) for row in _plugin.rows)
        globals()[_attribute(_name)] = replace(_plugin, name=_name, rows=_rows)


def install_kernels(folder: Path) -> None:
    """Offer every engine on every kernel to this process and to the ranks that it starts.

    They are found by entry points in ``folder``, which is added to ``sys.path``.
    """
    names = [backend(engine, kernel) for engine in ENGINES for kernel in KERNELS]
    info = folder / "engine_kernels-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-kernels\nVersion: 0\n")
    lines = "".join(f"{name} = {__name__}:{_attribute(name)}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[engine_api.engines]\n{lines}")
    sys.path.append(str(folder))
    EngineRegistry.refresh()
