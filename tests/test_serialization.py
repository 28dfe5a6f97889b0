"""Nothing is unpickled from a socket: the modules that may use a pickle are listed with reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from layout import ROOT

# The use of these modules can end in unpickling, and these names of torch unpickle internally.
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "multiprocessing.connection",
    "multiprocessing.managers",
    "multiprocessing.shared_memory",
}
CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "ForkingPickler",
}
TORCH = {
    "torch.load",
    "torch.save",
    "torch.multiprocessing",
    "multiprocessing.Pipe",
    "multiprocessing.Queue",
    "numpy.load",
    "np.load",
}

# These modules use it all the same: the reason says why no pickle comes from a socket that a
# stranger could reach.
EXCEPTIONS = {
    "packages/trainer/src/engine_trainer/rewards/calls.py": (
        "asks whether an error could travel to the trainer; nothing is read"
    ),
    "packages/trainer/src/engine_trainer/rewards/worker_pool.py": (
        "the trainer and the reward workers that it started, over a pipe"
    ),
    "packages/trainer/src/engine_trainer/rewards/worker_main.py": (
        "the trainer and the reward workers that it started, over a pipe"
    ),
    "packages/engine-megatron/src/engine_megatron/native.py": (
        "Megatron's index, by an unpickler that knows its classes alone"
    ),
    "packages/rollout-fp8/src/rollout_fp8/transports/channel.py": (
        "Connection frames messages (send_bytes, recv_bytes) and proves the "
        "secret; the messages are engine_api.codec's"
    ),
    "packages/rollout-fp8/src/rollout_fp8/transports/ipc.py": (
        "torch's functions that share CUDA memory, without its pickler"
    ),
    "packages/rollout-fp8/src/rollout_fp8/install/trace.py": (
        "the name of a storage's weak reference, without the pickler"
    ),
    "conformance/src/engine_conformance/ranks.py": (
        "the suite and the ranks that it started, over a pipe"
    ),
    "conformance/src/engine_conformance/_rank_worker.py": (
        "the suite and the ranks that it started, over a pipe"
    ),
    "conformance/src/engine_conformance/cases/plugin.py": (
        "a descriptor is pickled, and read by nobody"
    ),
    "conformance/src/engine_conformance/cases/faults.py": (
        "writes the pickle that an engine must refuse"
    ),
    "conformance/src/engine_conformance/cases/export.py": (
        "the suite's own file of tensors, read with weights_only"
    ),
    "conformance/mutants/engine_mutants/checkpoint.py": "the defect of a mutant",
}
SOURCES = sorted(
    path
    for folder in (
        "packages/*/src",
        "conformance/src",
        "conformance/loopback",
        "conformance/mutants",
        "examples/*/src",
    )
    for root in ROOT.glob(folder)
    for path in root.rglob("*.py")
)


def name_of(node: ast.AST) -> str:
    """Return the dotted name of an attribute chain."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)])


def uses(source: str) -> Iterator[str]:
    """Yield the names in a module that may unpickle."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                found = [alias.name for alias in node.names]
            case ast.ImportFrom():
                found = [f"{node.module}.{alias.name}" for alias in node.names]
            case ast.Attribute() | ast.Name():
                found = [name_of(node)]
            case ast.keyword(arg="allow_pickle"):
                found = ["allow_pickle"]
            case _:
                continue
        for name in found:
            if (
                any(name == m or name.startswith(f"{m}.") for m in MODULES | TORCH)
                or name.rpartition(".")[2] in CALLS
                or name == "allow_pickle"
            ):
                yield name


@pytest.mark.slow
def test_nothing_is_unpickled_but_where_it_is_said_why() -> None:
    found = {str(path.relative_to(ROOT)): sorted(set(uses(path.read_text()))) for path in SOURCES}
    users = {path: names for path, names in found.items() if names}
    assert not {path: names for path, names in users.items() if path not in EXCEPTIONS}
    assert not set(EXCEPTIONS) - set(users), "they use none any more: take them off the list"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "from multiprocessing.connection import Client",
        "import multiprocessing\nmultiprocessing.Queue()",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_the_scan_sees(source: str) -> None:
    assert list(uses(source))


def test_a_connection_of_the_weight_sync_is_only_used_for_bytes() -> None:
    """``Connection.send`` and ``recv`` pickle, but ``send_bytes`` and ``recv_bytes`` do not."""
    channel = Path(ROOT / "packages/rollout-fp8/src/rollout_fp8/transports/channel.py").read_text()
    called = {
        node.attr
        for node in ast.walk(ast.parse(channel))
        if isinstance(node, ast.Attribute) and name_of(node.value).endswith("_connection")
    }
    assert {"send_bytes", "recv_bytes"} <= called
    assert not called & {"send", "recv"}
