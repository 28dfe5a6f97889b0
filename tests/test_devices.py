"""A few files of a package name a vendor's devices, each for a reason.

Everything else asks `engine_api.devices.Device`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from layout import ROOT

NAMES = ("cuda", "npu")
# These files may name them: the interface and the probes; descriptors and tables, whose rows are
# about devices; the file that knows Ascend's names; and code that is specific to CUDA by nature and
# has nothing to ask: Triton's kernels, IPC, servers that are built for CUDA.
ALLOWED = {
    "engine-api/src/engine_api": ["devices.py"],
    # Automodel asks for the number of a GPU where there is none.
    "engine-automodel/src/engine_automodel": ["library.py", "plugin.py"],
    "engine-fsdp/src/engine_fsdp": ["plugin.py"],
    "engine-megatron/src/engine_megatron": ["plugin.py"],
    "engine-npu/src/engine_npu": ["ascend.py"],
    "engine-torch/src/engine_torch": [],
    # torchao's products of FP8 ask for the compute capability.
    "engine-torchtitan/src/engine_torchtitan": ["float8.py", "plugin.py"],
    "engine-veomni/src/engine_veomni": ["plugin.py"],
    "trainer/src/engine_trainer": [
        "telemetry/throughput.py",
        "placement/ray/cluster.py",
        # The estimate is of the real run, which it says is on H200s.
        "rehearsal/estimate.py",
    ],
    "rollout-fp8/src/rollout_fp8": [
        "plugin.py",
        "versions.py",
        "remote/endpoint.py",
        "kernels/*",
        "transports/ipc.py",
        "transports/kinds.py",
        "vllm/*",
        "sglang/*",
    ],
}


def named(node: ast.AST) -> Iterator[str]:
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        and node.attr in NAMES
    ):
        yield f"torch.{node.attr}"
    elif isinstance(node, ast.Attribute) and node.attr in {f"is_{name}" for name in NAMES}:
        yield f".{node.attr}"
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in NAMES
    ):
        yield f".{node.func.attr}()"
    elif (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.partition(":")[0] in NAMES
    ):
        yield repr(node.value)
    elif isinstance(node, ast.JoinedStr) and node.values:
        yield from named(node.values[0])


def offenders(path: Path) -> list[str]:
    return [
        f"{path.name}:{getattr(n, 'lineno', 0)} {what}"
        for n in ast.walk(ast.parse(path.read_text()))
        for what in named(n)
    ]


@pytest.mark.parametrize("folder", ALLOWED, ids=lambda folder: folder.partition("/")[0])
def test_devices_are_named_in_one_file(folder: str) -> None:
    files = sorted((ROOT / "packages" / folder).rglob("*.py"))
    assert files
    may = {
        path for pattern in ALLOWED[folder] for path in (ROOT / "packages" / folder).glob(pattern)
    }
    assert not [one for path in files if path not in may for one in offenders(path)]


@pytest.mark.parametrize("folder", ALLOWED, ids=lambda folder: folder.partition("/")[0])
def test_who_may_does(folder: str) -> None:
    for pattern in ALLOWED[folder]:
        assert any(offenders(path) for path in (ROOT / "packages" / folder).glob(pattern)), pattern


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "x.is_cuda",
        "x.cuda()",
        'torch.device("npu")',
        'f"cuda:{i}"',
        'd == "cuda"',
        "torch.npu.Stream()",
    ],
)
def test_the_check_sees(code: str, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(code)
    assert offenders(tmp_path / "one.py")
