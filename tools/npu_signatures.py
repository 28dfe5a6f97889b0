"""Write packages/engine-npu/tests/signatures.json, the publishers' signatures of its calls.

``python tools/npu_signatures.py --mindspeed REPOSITORY WHEEL …`` reads the torch_npu wheels of
``engine_npu.versions`` (``pip download --no-deps torch_npu==…``) and a clone of MindSpeed. It
imports none of them. A symbol whose parameters differ between two of the wheels is an error:
engine-npu then has to know both.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "packages" / name / "src") for name in ("engine-api", "engine-npu")]

from engine_npu.versions import MINDSPEED, TORCH_NPU  # noqa: E402 - found through the line above

TABLE = ROOT / "packages/engine-npu/tests/signatures.json"
# Operators register their schemas as text in this library.
LIBRARY = "torch_npu/lib/libtorch_npu.so"
OPERATORS = ("npu_fusion_attention",)
GROUP_HEADER = "torch_npu/include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp"
GROUP_HELPER = "torch_npu/_init/registry/distributed.py"
# The module that defines each name of torch.npu. A class stands for its constructor.
MODULE = {
    "set_device": "utils",
    "current_device": "utils",
    "current_stream": "utils",
    "stream": "utils",
    "synchronize": "utils",
    "mem_get_info": "__init__",
    "device_count": "__init__",
    "empty_cache": "memory",
    "get_rng_state": "random",
    "set_rng_state": "random",
    "Stream": "streams",
    "Stream.wait_event": "streams",
    "Stream.wait_stream": "streams",
    "Stream.record_event": "streams",
    "Stream.synchronize": "streams",
    "Event": "streams",
    "Event.record": "streams",
    "Event.synchronize": "streams",
    "Event.elapsed_time": "streams",
}
# The arguments of `repatch` are read by MindSpeed's features, or by Megatron's configuration, which
# MindSpeed fills from the same names.
FEATURES = "mindspeed/features_manager"


def of_wheel(wheel: Path) -> dict[str, Any]:
    """Return the parameters by symbol of one torch_npu wheel."""
    with zipfile.ZipFile(wheel) as archive:
        found = {f"torch_npu.{name}": _operator(archive.read(LIBRARY), name) for name in OPERATORS}
        for name, file in MODULE.items():
            path = f"torch_npu/npu/{file}.py"
            found[f"torch_npu.npu.{name}"] = _python(archive.read(path).decode(), name) | {
                "file": path
            }
        found |= _group(archive)
    return found


def _operator(library: bytes, name: str) -> dict[str, Any]:
    text = re.search(rb"[\0]" + name.encode() + rb"\(([^\0]*?)\) -> [^\0]*[\0]", library)
    if text is None:
        raise SystemExit(f"{LIBRARY} has no schema of {name}")
    parameters, keyword_only = [], False
    for part in re.split(r", (?=[A-Z*a-z])", text.group(1).decode()):
        if part == "*":
            keyword_only = True
            continue
        declared, _, default = part.partition("=")
        parameters.append(
            _parameter(declared.split()[-1], required=not default, keyword_only=keyword_only)
        )
    return {"parameters": parameters, "file": LIBRARY}


def _parameter(name: str, *, required: bool, keyword_only: bool = False) -> list[Any]:
    return [
        name,
        "required" if required else "optional",
        *(["keyword only"] if keyword_only else []),
    ]


def _python(source: str, name: str) -> dict[str, Any]:
    """Return the parameters of ``function``, ``Class`` or ``Class.method``, without self."""
    owner, _, method = name.partition(".")
    tree: Any = ast.parse(source)
    node = next(
        (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == owner),
        None,
    )
    skip = 0
    if isinstance(node, ast.ClassDef):
        wanted, skip = [method] if method else ["__init__", "__new__"], 1
        node = next(
            (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in wanted), None
        )
    if not isinstance(node, ast.FunctionDef):
        raise SystemExit(f"no definition of {name}")
    given = node.args
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    first_default = len(names) - len(given.defaults)
    parameters = [_parameter(n, required=i < first_default) for i, n in enumerate(names)][skip:]
    parameters += [
        _parameter(a.arg, required=d is None, keyword_only=True)
        for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return {"parameters": parameters}


def _group(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return the signatures of HCCL's process group.

    The constructor comes from its header, the options' attributes from torch_npu's own helper.
    """
    header, helper = archive.read(GROUP_HEADER).decode(), archive.read(GROUP_HELPER).decode()
    text = re.search(r"\n +ProcessGroupHCCL\(([^)]*?options = [^;]*)\);", header)
    if text is None:
        raise SystemExit(f"{GROUP_HEADER}: no constructor with options")
    parameters = []
    for part in text.group(1).split(","):
        declared, _, default = part.partition("=")
        parameters.append(_parameter(declared.split()[-1], required=not default.strip()))
    where = "torch_npu._C._distributed_c10d.ProcessGroupHCCL"
    attributes = sorted(set(re.findall(r"pg_options\.(\w+) =", helper)))
    return {
        where: {"parameters": parameters, "file": GROUP_HEADER},
        f"{where}.Options": {"parameters": [], "attributes": attributes, "file": GROUP_HELPER},
    }


def of_mindspeed(repository: Path) -> dict[str, Any]:
    """Return parameters or attributes by symbol, of the branch that `engine_npu.versions` names."""

    def read(path: str) -> str:
        return _git(repository, "show", f"{MINDSPEED.branch}:{path}")

    version = re.search(r"__version__ = '([^']+)'", read("setup.py"))
    if version is None or version.group(1) != MINDSPEED.version:
        raise SystemExit(f"branch {MINDSPEED.branch} is not version {MINDSPEED.version}")
    source = f"{MINDSPEED.branch}@{_git(repository, 'rev-parse', MINDSPEED.branch).strip()[:12]}"
    adaptor, patches = "mindspeed/megatron_adaptor.py", read("mindspeed/patch_utils.py")
    # The table holds every name that a feature reads from its arguments.
    files = _git(repository, "ls-tree", "-r", "--name-only", MINDSPEED.branch, FEATURES).split()
    text = "\n".join(read(file) for file in files if file.endswith(".py"))
    arguments = set(re.findall(r"\bargs\.(\w+)|getattr\((?:self|args), ['\"](\w+)", text))
    read_names = sorted(
        {name for pair in arguments for name in pair if name} | _feature_names(text)
    )
    return {
        "mindspeed.megatron_adaptor": {"module": True, "source": source, "file": adaptor},
        "mindspeed.patch_utils": {
            "module": True,
            "source": source,
            "file": "mindspeed/patch_utils.py",
        },
        "mindspeed.megatron_adaptor.repatch": _python(read(adaptor), "repatch")
        | {"source": source, "file": adaptor},
        "mindspeed.patch_utils.MindSpeedPatchesManager": {
            "attributes": _class_names(patches, "MindSpeedPatchesManager"),
            "source": source,
            "file": "mindspeed/patch_utils.py",
        },
        "mindspeed.patch_utils.Patch": {
            "attributes": _class_names(patches, "Patch"),
            "source": source,
            "file": "mindspeed/patch_utils.py",
        },
        "mindspeed arguments": {"names": read_names, "source": source, "file": FEATURES},
    }


def _feature_names(text: str) -> set[str]:
    """Return the names of features, each switched by an argument of its own name."""
    return {
        name.replace("-", "_")
        for name in re.findall(r"super\([^)]*\).__init__\(\s*['\"]([\w-]+)", text)
    }


def _class_names(source: str, owner: str) -> list[str]:
    tree = ast.parse(source)
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner)
    names = {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute)
        and isinstance(n.value, ast.Name)
        and n.value.id == "self"
        and isinstance(n.ctx, ast.Store)
    }
    names |= {
        n.target.id
        for n in node.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    return sorted(names | {n.name for n in node.body if isinstance(n, ast.FunctionDef)})


def _git(repository: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True
    ).stdout


def merge(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return one table for several wheels that agree."""
    (_, first), *others = tables.items()
    for version, other in others:
        if odd := [name for name in first if first[name] != other[name]]:
            raise SystemExit(f"torch_npu {version} differs in {', '.join(odd)}")
    return {
        name: {**entry, "source": f"torch_npu {', '.join(tables)}"} for name, entry in first.items()
    }


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mindspeed", type=Path, required=True)
    parser.add_argument("wheels", nargs="+", type=Path)
    options = parser.parse_args()
    wheels = {wheel.name.split("-")[1]: wheel for wheel in options.wheels}
    if missing := [line.version for line in TORCH_NPU if line.version not in wheels]:
        raise SystemExit(f"no wheel of torch_npu {', '.join(missing)}")
    tables = {line.version: of_wheel(wheels[line.version]) for line in TORCH_NPU}
    table = merge(tables) | of_mindspeed(options.mindspeed)
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
