"""Every call of torch_npu and MindSpeed, compared with its publisher's definition.

There is no hardware here to run them on.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_npu.options import MindSpeedOptions
from engine_npu.versions import MINDSPEED, TORCH_NPU

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parents[1]
TABLE: dict[str, Any] = json.loads((HERE / "signatures.json").read_text())
OWN = sorted((PACKAGES / "engine-npu/src/engine_npu").glob("*.py"))
# Files that use a device's module of torch, which is torch.npu on an NPU.
NEUTRAL = [
    *(PACKAGES / "engine-api/src/engine_api" / name for name in ("devices.py", "defaults.py")),
    PACKAGES / "trainer/src/engine_trainer/rollouts/local.py",
    *(
        PACKAGES / "rollout-fp8/src/rollout_fp8" / name
        for name in ("export/exporter.py", "phases.py", "transports/remote.py")
    ),
]
# The published symbol that an expression of the sources stands for.
MEANS = {
    "torch_npu": "torch_npu",
    "torch.npu": "torch_npu.npu",
    "load()": "torch_npu",
    "self.module": "torch_npu.npu",
    "self._module": "torch_npu.npu",
    "kind.module": "torch_npu.npu",
    "self._kind.module": "torch_npu.npu",
    "self._module.current_stream(buffer.device)": "torch_npu.npu.Stream",
    "self._stream": "torch_npu.npu.Stream",
    "self._callers": "torch_npu.npu.Stream",
    "kind.module.current_stream(self.device)": "torch_npu.npu.Stream",
    "first": "torch_npu.npu.Event",
    "last": "torch_npu.npu.Event",
    "a": "torch_npu.npu.Event",
    "spans[-1][1]": "torch_npu.npu.Event",
    "adaptor": "mindspeed.megatron_adaptor",
    "_adaptor": "mindspeed.megatron_adaptor",
    "manager": "mindspeed.patch_utils.MindSpeedPatchesManager",
    "patch": "mindspeed.patch_utils.Patch",
    "options": "torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options",
}


def meaning(node: ast.expr, local: set[str]) -> str | None:
    """Return the published symbol that an expression stands for, or None."""
    text = ast.unparse(node)
    if text in MEANS and (text in local or "." in text or "(" in text):
        return MEANS[text]
    if isinstance(node, ast.Attribute) and (owner := meaning(node.value, local)) is not None:
        return f"{owner}.{node.attr}"
    return None


def names_of(path: Path) -> set[str]:
    """Return the plain names of ``MEANS`` that stand for a published symbol in this file."""
    known = {
        "device.py": {"torch_npu", "options"},
        "attention.py": {"torch_npu"},
        "mindspeed.py": {"adaptor", "manager", "patch"},
        "megatron.py": {"_adaptor"},
        "phases.py": {"first", "last", "a", "spans[-1][1]"},
    }
    return known.get(path.name, set())


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield calls of published symbols.

    Calls of methods of data, and those of NVIDIA's devices, are left out.
    """
    local = names_of(path)
    tree = ast.parse(path.read_text())
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.ClassDef) and node.name == "Cuda")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (symbol := meaning(node.func, local)) is not None:
            owner, _, attribute = symbol.rpartition(".")[0].rpartition(".")
            if attribute not in TABLE.get(owner, {}).get("attributes", ()):
                yield symbol, node


def problem(symbol: str, call: ast.Call) -> str | None:
    """Return the reason why a call does not fit the table, or None."""
    if symbol not in TABLE:
        return f"{symbol} is not in the table: tools/npu_signatures.py"
    kinds = {"keyword only": inspect.Parameter.KEYWORD_ONLY}
    parameters = [
        inspect.Parameter(
            name,
            kinds.get(more[0] if more else "", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            default=inspect.Parameter.empty if needed == "required" else None,
        )
        for name, needed, *more in TABLE[symbol]["parameters"]
    ]
    try:
        inspect.Signature(parameters).bind(
            *call.args, **{str(k.arg): k.value for k in call.keywords}
        )
    except TypeError as error:
        return f"{symbol}: {error}"
    return None


FOUND = [(path, symbol, call) for path in [*OWN, *NEUTRAL] for symbol, call in calls(path)]


@pytest.mark.parametrize(
    ("path", "symbol", "call"),
    FOUND,
    ids=lambda v: f"{v.lineno}" if isinstance(v, ast.Call) else getattr(v, "name", v),
)
def test_a_call_fits(path: Path, symbol: str, call: ast.Call) -> None:
    assert problem(symbol, call) is None, f"{path}:{call.lineno}"


def test_all_that_matters_is_looked_at() -> None:
    seen = {symbol for _, symbol, _ in FOUND}
    assert seen >= {
        "torch_npu.npu_fusion_attention",
        "torch_npu._C._distributed_c10d.ProcessGroupHCCL",
        "mindspeed.megatron_adaptor.repatch",
        "torch_npu.npu.set_device",
        "torch_npu.npu.get_rng_state",
        "torch_npu.npu.Stream",
        "torch_npu.npu.Event",
        "torch_npu.npu.Stream.wait_event",
        "torch_npu.npu.current_stream",
        "torch_npu.npu.mem_get_info",
        "torch_npu.npu.synchronize",
    }
    unused = {s for s, entry in TABLE.items() if "parameters" in entry} - seen
    assert not unused, f"the table holds symbols that are not called: {sorted(unused)}"


@pytest.mark.parametrize(
    "code",
    [
        "torch_npu.npu_fused_attention(q, k, v, 8, 'TND')",
        "torch_npu.npu_fusion_attention(q, k, v, 8)",
        "torch_npu.npu_fusion_attention(q, k, v, 8, 'TND', pre_tokens=1)",
        "torch_npu._C._distributed_c10d.ProcessGroupHCCL(store, rank, size, timeout=t)",
    ],
)
def test_a_misspelt_call_does_not_fit(code: str) -> None:
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    symbol = meaning(call.func, {"torch_npu"})
    assert symbol is not None
    assert problem(symbol, call) is not None


def test_attributes_exist() -> None:
    for path in OWN:
        local = names_of(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and (owner := meaning(node.value, local)) in TABLE
                and "attributes" in TABLE[owner]
            ):
                assert node.attr in TABLE[owner]["attributes"], f"{path.name}:{node.lineno}"


def test_modules_exist() -> None:
    names = [
        n.value
        for path in OWN
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Constant)
        and isinstance(n.value, str)
        and n.value.startswith("mindspeed.")
        and " " not in n.value
        and ".deprecate" not in n.value
    ]
    assert names
    assert not [name for name in names if name not in TABLE]


def test_mindspeed_knows_the_settings_that_it_is_told() -> None:
    source = ast.parse((PACKAGES / "engine-npu/src/engine_npu/megatron.py").read_text())
    told = {
        key.value
        for node in ast.walk(source)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    told |= set(MindSpeedOptions().features())
    assert len(told) >= 10
    assert not told - set(TABLE["mindspeed arguments"]["names"])


def test_the_table_is_of_the_versions_that_are_accepted() -> None:
    for symbol, entry in TABLE.items():
        if symbol.startswith("torch_npu"):
            assert all(
                line.version in entry["source"].split("torch_npu ")[1].split(", ")
                for line in TORCH_NPU
            )
        else:
            assert entry["source"].startswith(f"{MINDSPEED.branch}@")
