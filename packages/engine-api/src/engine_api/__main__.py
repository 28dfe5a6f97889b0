"""The command line ``python -m engine_api list | explain | doctor``, which imports no torch.

It shows the installed plug-ins, how a name is resolved, and missing, broken or untested parts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import traceback
from collections.abc import Sequence

from engine_api.capabilities import Capability
from engine_api.commands import run_command
from engine_api.dependencies import check_dependencies
from engine_api.devices import DEVICES, cuda_devices, torch_version
from engine_api.discovery import Found, printable, probe, refuse
from engine_api.errors import PluginError
from engine_api.plugin import CONTRACT, ENGINE_GROUP, ROLLOUT_GROUP
from engine_api.preflight import offenders
from engine_api.registry import EngineRegistry, RolloutRegistry


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    The code is 0 on success, 1 if the requested plug-in cannot be used here or one is broken, 2 for
    wrong usage, and 141 if the reader of the output ended early.
    """
    return run_command(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="engine-api", description="Engines and rollouts of this environment."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="every row, and whether it can run here")
    listing.add_argument(
        "--capability", choices=[str(c) for c in Capability], help="only rows that declare it"
    )
    explain = commands.add_parser(
        "explain", help="how a backend is resolved, candidate by candidate"
    )
    explain.add_argument("backend")
    explain.add_argument("--model-type", default="language_model")
    explain.add_argument("--device", default="auto")
    explain.add_argument("--rollout", action="store_true", help="look among rollouts")
    commands.add_parser("doctor", help="what is missing, broken or untested in this environment")
    options = parser.parse_args(arguments)
    # A plug-in that ends its process or does not return does so in a child process. Here it is
    # named, and left out.
    refuse(offenders((ENGINE_GROUP, ROLLOUT_GROUP)))
    EngineRegistry.refresh()
    RolloutRegistry.refresh()
    if options.command == "list":
        return _list(options.capability)
    if options.command == "explain":
        return _explain(
            options.backend, options.model_type, options.device, rollout=options.rollout
        )
    return _doctor()


def _version() -> str:
    return (
        f"engine-api {importlib.metadata.version('engine-api')} (contract {CONTRACT}, "
        f"Python {platform.python_version()})"
    )


def _list(capability: str | None) -> int:
    lines = [("model type", "backend", "device", "here", "by")]
    for kind, registry in (("", EngineRegistry), ("rollout", RolloutRegistry)):
        for found, row in registry.rows():
            assert found.plugin is not None
            if capability and capability not in found.plugin.capabilities:
                continue
            for device in row.devices:
                here = "yes" if probe(found, device).ok else "no"
                types = kind or ", ".join(row.model_types)
                lines.append(
                    (types, ", ".join(row.backends), device, here, found.source.split(" ")[0])
                )
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    for line in lines:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
    broken = _broken()
    for found in broken:
        print(f"broken: {found.name} from {found.source}: {found.problem}")
    for conflict in _conflicts():
        print(f"conflict: {conflict}")
    if len(lines) == 1:
        print("nothing is installed that offers an engine; try: pip install 'engine-trainer[fsdp]'")
    return 0


def _explain(backend: str, model_type: str, device: str, *, rollout: bool) -> int:
    registry = RolloutRegistry if rollout else EngineRegistry
    try:
        resolution = registry.resolve(model_type=model_type, backend=backend, device=device)
    except PluginError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    for candidate in resolution.trace:
        print(candidate)
    print(f"-> {resolution.row.target} on {resolution.device}")
    if not rollout:
        declared = ", ".join(sorted(resolution.plugin.capabilities))
        print(f"   declares: {declared or 'nothing optional'}")
    return 0


def _doctor() -> int:
    print(f"python {sys.version.split()[0]}, contract {CONTRACT}")
    print(f"torch: {torch_version() or 'not installed (pip install torch)'}")
    print(f"cuda devices shown by the driver: {cuda_devices()}")
    for registry in (EngineRegistry, RolloutRegistry):
        for found, row in registry.rows():
            for device in (d for d in DEVICES if d in row.devices):
                result = probe(found, device)
                verdict = "ok" if result.ok else f"{result.reason}; to do: {result.remedy}"
                triple = f"{'/'.join(row.model_types)} by {'/'.join(row.backends)} on {device}"
                print(f"{triple} ({found.source}): {verdict}")
    broken = _broken()
    for found in broken:
        print(f"\n{found.name} from {found.source} is broken: {found.problem}")
        if found.cause is not None:
            print(printable("".join(traceback.format_exception(found.cause))))
    conflicts = _conflicts()
    for conflict in conflicts:
        print(f"\nconflict: {conflict}")
    complete = _print_dependencies()
    return 1 if broken or conflicts or not complete else 0


def _print_dependencies() -> bool:
    """Print what is untested or absent, and return whether every package has what it needs."""
    found = check_dependencies()
    for line in filter(None, (*found.absent, *found.untested, found.unchecked)):
        print(line)
    if found.extras:
        print("extras that are not installed:")
    for line in found.extras:
        print(f"  {line}")
    return not found.absent


def _conflicts() -> list[str]:
    return [*EngineRegistry.conflicts(), *RolloutRegistry.conflicts()]


def _broken() -> list[Found]:
    return [
        f for registry in (EngineRegistry, RolloutRegistry) for f in registry.found() if f.problem
    ]


if __name__ == "__main__":
    sys.exit(main())
