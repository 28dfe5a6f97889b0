"""Descriptors: light, versioned, honest about devices.

None of these cases starts a rank.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from difflib import get_close_matches
from functools import cache
from importlib import import_module

import torch

from engine_api.config import EngineConfig
from engine_api.devices import DEVICES
from engine_api.errors import PluginNotFound, PluginUnavailable
from engine_api.plugin import CONTRACT, contract_problem
from engine_api.registry import EngineRegistry
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._target import Setup, Target

TYPES = (LM, VALUE)
_MARK = "--- the descriptor is loaded"
# The descriptor's module alone first: another plug-in's faults are not this one's.
_LOAD = """
import importlib, sys
sys.path[:0] = {path!r}
importlib.import_module({module!r})
heavy = sorted({{"torch", "transformers", "numpy", "megatron"}} & set(sys.modules))
print({mark!r}, flush=True)
assert not heavy, f"loading the descriptor imports {{heavy}}"
from engine_api.registry import EngineRegistry
rows = [row for found, row in EngineRegistry.rows() if {backend!r} in row.backends]
assert rows, "not discovered in a fresh process"
"""


@cache
def _loaded(backend: str, source: str) -> subprocess.CompletedProcess[str]:
    """Return a fresh process that loads the descriptor and then looks for it among all.

    ``source`` ends in (module:attr).
    """
    module = source.rpartition("(")[2].partition(":")[0]
    code = _LOAD.format(path=sys.path, module=module, mark=_MARK, backend=backend)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


@case(id="plugin.light", world=(1,), model_types=TYPES, quick=True)
def light(target: Target) -> None:
    """Loading the descriptor MUST import no torch, and a fresh process MUST find it.

    If this fails: the descriptor's module imports the engine, or an option's default
    needs torch; a stale ``.egg-info`` hides the entry point (vLLM PR #43987: a named
    plug-in is silently ignored).
    """
    done = _loaded(target.backend, target.resolution.source)
    last = (
        done.stderr.strip().splitlines()[-1]
        if done.stderr.strip()
        else f"exit code {done.returncode}"
    )
    must(done.returncode == 0, "descriptor", last)


@case(id="plugin.quiet", world=(1,), model_types=TYPES)
def quiet(target: Target) -> None:
    """Loading the descriptor MUST write nothing to standard output, which belongs to the caller.

    If this fails: a banner, or a print left over; it ends up in somebody's JSON.
    """
    printed, mark, _ = _loaded(target.backend, target.resolution.source).stdout.partition(_MARK)
    must(bool(mark), "descriptor", "cannot be loaded in a fresh process")
    must(not printed, "standard output", f"{printed[:200]!r} while the descriptor loads")


@case(id="plugin.contract", world=(1,), model_types=TYPES)
def contract(target: Target) -> None:
    """The descriptor MUST state a contract version that this engine-api serves.

    If this fails: the engine was written for another major version.
    """
    stated = target.resolution.plugin.contract
    must(contract_problem(stated) is None, "contract", f"{stated}, engine-api serves {CONTRACT}")


def load_classes(setup: Setup) -> list[str]:
    """Return the faults of class and options.

    It runs in a rank, since importing an unknown class runs its code.
    """
    resolution = EngineRegistry.resolve(
        model_type=setup.model_type, backend=setup.backend, device=setup.device
    )
    targets = {resolution.row.target: resolution.load()}
    problems = list[str]()
    if options := resolution.plugin.options:
        module, _, name = options.partition(":")
        targets[options] = getattr(import_module(module), name, None)
    if not options and any(variant.options for variant in resolution.plugin.variants):
        problems.append("variants have options, and no options dataclass is named")
    problems += [
        f"{target} is no class" for target, cls in targets.items() if not isinstance(cls, type)
    ]
    if options and not problems:
        targets[options]()
        for variant in resolution.plugin.variants:
            targets[options](**variant.options)
    pickle.dumps((resolution.row, sorted(resolution.plugin.capabilities)))
    return problems


def find_missing_class(setup: Setup) -> str:
    """Return why the engine's class is not there, or nothing if it is.

    It runs in a rank, as `load_classes` does. A module that raises anything else is reported by the
    cases, with its traceback.
    """
    row = EngineRegistry.resolve(
        model_type=setup.model_type, backend=setup.backend, device=setup.device
    ).row
    name, _, attribute = row.target.partition(":")
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            return ""
        return f"the descriptor names {row.target}: no module is called {error.name!r}"
    if hasattr(module, attribute):
        return ""
    near = get_close_matches(attribute, dir(module), n=3, cutoff=0.6)
    remedy = f"did you mean {' or '.join(near)}?" if near else "correct Row.target"
    return f"the descriptor names {row.target}: {name} has no {attribute!r}; {remedy}"


@case(id="plugin.classes", world=(1,), model_types=TYPES)
def classes(target: Target) -> None:
    """The class and options dataclass of a descriptor MUST exist, and its data MUST be plain.

    If this fails: a renamed class; options that need arguments, so that none given
    means an error; options that the descriptor does not name, which the registry refuses.
    """
    problems = target.run(load_classes, target.config(target.model()))[0]
    must(not problems, "descriptor", "; ".join(problems))


def probe_devices(setup: Setup) -> list[str]:
    """Return the faults of the probe's results."""
    resolution = EngineRegistry.resolve(
        model_type=setup.model_type, backend=setup.backend, device=setup.device
    )
    problems = []
    for device in DEVICES:
        try:
            result = resolution.plugin.probe(device)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a probe raises is its fault
            problems.append(f"raises {type(error).__name__} ({error}) for {device}")
            continue
        if not result.ok and not (result.reason and result.remedy):
            problems.append(f"says no for {device} without reason or remedy")
        if result.ok and not _is_here(device):
            problems.append(f"says yes for {device}, which torch does not find here")
    return problems


def _is_here(device: str) -> bool:
    """Return whether torch finds a device of this kind in this process."""
    if device == "cpu":
        return True
    module = getattr(torch, device, None)
    return module is not None and bool(module.is_available())


@case(id="plugin.probe", world=(1,), model_types=TYPES)
def probe(target: Target) -> None:
    """The probe MUST answer for every device without raising, with reason and remedy for a no.

    A yes is for a device that torch finds here.

    If this fails: a missing driver is an exception of the probe, or is not looked for.
    """
    problems = target.run(probe_devices, target.config(target.model()))[0]
    must(not problems, "probe", "; ".join(problems))


@case(id="plugin.device", world=(1,), model_types=TYPES)
def device(target: Target) -> None:
    """An explicit device MUST NOT be replaced, and an absent one MUST be refused.

    The refusal gives the trace and the devices there are.

    If this fails: training falls back to the CPU in silence (vLLM #48277).
    """
    must(
        target.resolution.device == target.device,
        "device",
        f"{target.resolution.device}, {target.device} was asked for",
    )
    try:
        got = EngineRegistry.resolve(
            model_type=target.model_type, backend=target.backend, device="abacus"
        )
    except PluginUnavailable as error:
        must(bool(error.remedy), "error", "does not say what to do")
    else:
        must(False, "device", f"abacus was replaced by {got.device}")


@case(id="plugin.near_match", world=(1,), model_types=TYPES)
def near_match(target: Target) -> None:
    """A misspelt backend MUST be an error that names the near match, without starting a rank.

    If this fails: the name is matched loosely.
    """
    wrong = target.backend + "x"
    try:
        EngineRegistry.create(
            backend=wrong,
            device=target.device,
            config=EngineConfig(model=target.config(target.model()).model),
        )
    except PluginNotFound as error:
        must(target.backend in error.remedy, "error", f"does not name {target.backend}: {error}")
    else:
        must(False, "backend", f"{wrong} was taken for {target.backend}")
