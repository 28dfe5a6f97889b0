"""Tests that right engines, which differ in rounding alone, pass at seeds that failed once.

tools/margins.py runs all cases, kernels and many seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine_api.registry import EngineRegistry
from engine_conformance.cases import Target, load_cases, run_case
from engine_conformance.ranks import close_pools
from engine_mutants.kernels import KERNELS, backend, install_kernels

# The largest margin that a right engine may show.
LIMIT = 0.8


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder for models, while the registry knows every engine on every kernel."""
    folder = tmp_path_factory.mktemp("kernels")
    install_kernels(folder / "site")
    yield folder
    close_pools()
    sys.path.remove(str(folder / "site"))
    EngineRegistry.refresh()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "engine", "kernel", "seed"),
    [
        # One element of a gradient under advantages that cancel was off by 1.34 tolerances.
        ("train.policy", "fsdp2", "own", 17),
        ("train.policy", "fsdp2", "own", 29),
        ("train.policy", "loopback", "one-by-one", 0),
        ("train.policy", "loopback", "noisy", 29),
        # One token is most of the second epoch's gradient.
        ("rl.ppo", "loopback", "own", 1),
        # A ratio came nearer to a bound of the clip than rounding allows.
        ("rl.ppo", "loopback", "own", 15),
        ("rl.grpo", "loopback", "softmax", 9),
        ("train.temperature", "fsdp2", "math", 6),
        ("lora.switched", "fsdp2", "backwards", 3),
    ],
)
def test_right_engine_passes_at_another_seed(
    root: Path, case: str, engine: str, kernel: str, seed: int
) -> None:
    target = Target(backend=backend(engine, kernel), root=root, seed=seed)

    outcome = run_case(load_cases()[case], target)

    assert outcome.status == "passed", outcome.message
    assert outcome.margin is not None
    assert outcome.margin <= LIMIT


PRODUCTS = [
    name for name, kernel in KERNELS.items() if torch.ops.aten.mm.default in kernel.operators
]


@pytest.mark.parametrize("name", PRODUCTS)
def test_kernel_differs_in_rounding_alone(name: str) -> None:
    torch.manual_seed(0)
    a = torch.randn(37, 64)
    b = torch.randn(64, 24)
    exact = (a.double() @ b.double()).float()
    plain = a @ b

    with KERNELS[name].running():
        got = a @ b
        batched = torch.bmm(a[None], b[None])[0]
        added = torch.addmm(torch.ones(24), a, b)

    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(batched, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(added, exact + 1, rtol=1e-5, atol=1e-5)
    # BLAS may compute the transposed product, and one with zeros, in the same order.
    assert name in ("transposed", "padded") or not torch.equal(got, plain)


def test_kernel_is_left_after_the_engine_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_mutants import kernels

    seen = list[bool]()

    class Base:
        def train_batch(self) -> None:
            self.forward_backward()

        def forward_backward(self) -> None:
            seen.append(self.computes_on_kernel)  # type: ignore[attr-defined]
            raise ArithmeticError

        infer_batch = optimizer_step = forward_backward

    monkeypatch.setattr(kernels, "import_module", lambda name: SimpleNamespace(Base=Base))
    engine = kernels._class("module:Base", "halves")()

    with pytest.raises(ArithmeticError):
        engine.train_batch()
    assert (seen, engine.computes_on_kernel) == ([True], False)
