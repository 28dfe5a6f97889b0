"""Descriptors: light, versioned, honest about devices. None of these cases starts a rank."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module

from engine_api.config import EngineConfig
from engine_api.errors import PluginNotFound, PluginUnavailable
from engine_api.plugin import CONTRACT, contract_problem
from engine_api.registry import DEVICES, EngineRegistry
from engine_conformance.cases._case import case, must
from engine_conformance.cases._target import Target

_LIGHT = """
import sys
sys.path[:0] = {path!r}
from engine_api.registry import EngineRegistry
rows = [row for found, row in EngineRegistry.rows() if {backend!r} in row.backends]
assert rows, "not discovered in a fresh process"
heavy = sorted({{"torch", "transformers", "numpy", "megatron"}} & set(sys.modules))
assert not heavy, f"loading the descriptor imports {{heavy}}"
"""


@case(id="plugin.light", world=(1,))
def light(target: Target) -> None:
    """Loading the descriptor MUST import no torch; it is found in a fresh process.

    If this fails: the descriptor's module imports the engine, or an option's default needs torch.
    """
    code = _LIGHT.format(path=sys.path, backend=target.backend)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    must(done.returncode == 0, "descriptor", done.stderr.strip().splitlines()[-1] if done.stderr else "exit code")


@case(id="plugin.contract", world=(1,))
def contract(target: Target) -> None:
    """The descriptor MUST state a contract version that this engine-api serves.

    If this fails: the engine was written for another major version.
    """
    stated = target.resolution.plugin.contract
    must(contract_problem(stated) is None, "contract", f"{stated}, engine-api serves {CONTRACT}")


@case(id="plugin.classes", world=(1,))
def classes(target: Target) -> None:
    """The class and the options dataclass that the descriptor names MUST be there, and the descriptor's data be plain.

    If this fails: a renamed class; options that need arguments, so that none given means an error.
    """
    resolution = target.resolution
    module, _, name = resolution.row.target.partition(":")
    must(isinstance(getattr(import_module(module), name), type), "target", f"{resolution.row.target} is no class")
    if resolution.plugin.options is not None:
        module, _, name = resolution.plugin.options.partition(":")
        getattr(import_module(module), name)()
    pickle.loads(pickle.dumps((resolution.row, sorted(resolution.plugin.capabilities))))  # noqa: S301 - made here


@case(id="plugin.probe", world=(1,))
def probe(target: Target) -> None:
    """The probe MUST answer for every device without raising, and say why and what to do where it says no.

    If this fails: a missing driver is an exception of the probe.
    """
    for device in DEVICES:
        result = target.resolution.plugin.probe(device)
        must(
            result.ok or bool(result.reason and result.remedy),
            "probe",
            "says no without reason or remedy",
            where=device,
        )


@case(id="plugin.device", world=(1,))
def device(target: Target) -> None:
    """An explicit device MUST NOT be replaced; one that is absent is refused with the trace and what there is.

    If this fails: training falls back to the CPU in silence (vLLM #48277).
    """
    must(
        target.resolution.device == target.device,
        "device",
        f"{target.resolution.device}, {target.device} was asked for",
    )
    try:
        got = EngineRegistry.resolve(model_type=target.model_type, backend=target.backend, device="abacus")
    except PluginUnavailable as error:
        must(bool(error.remedy), "error", "does not say what to do")
    else:
        must(False, "device", f"abacus was replaced by {got.device}")


@case(id="plugin.near_match", world=(1,))
def near_match(target: Target) -> None:
    """A misspelt backend MUST be an error that names the near match; creating one needs no rank.

    If this fails: the name is matched loosely.
    """
    wrong = target.backend + "x"
    try:
        EngineRegistry.create(
            backend=wrong, device=target.device, config=EngineConfig(model=target.config(target.model()).model)
        )
    except PluginNotFound as error:
        must(target.backend in error.remedy, "error", f"does not name {target.backend}: {error}")
    else:
        must(False, "backend", f"{wrong} was taken for {target.backend}")
