"""MindSpeed's adaptor, which is applied and checked before Megatron-core is imported.

MindSpeed is not a library of functions to call. It is a set of replacements for parts of torch and
Megatron-core, applied when ``mindspeed.megatron_adaptor`` is imported, and again with other
settings by its ``repatch``.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from engine_api.errors import ConfigError, PluginLoadError
from engine_npu.ascend import megatron_is_first
from engine_npu.device import load
from engine_npu.versions import MINDSPEED

__all__ = ["adapt", "configure"]

log = logging.getLogger("engine_npu")

# Settings of this process, once an engine was built.
_settings: dict[str, Any] = {}


def adapt() -> Any:
    """Import the adaptor, which replaces parts of Megatron-core, and return its module.

    Raises:
        PluginLoadError: Megatron-core was imported before, MindSpeed cannot be imported, or nothing
            was replaced.
    """
    if megatron_is_first(sys.modules):
        raise PluginLoadError(
            "Megatron-core was imported before MindSpeed's adaptor",
            where="engine-npu",
            why="modules that took names from it keep the parts that MindSpeed replaces",
            remedy="in a fresh process create the NPU engine first, "
            "or import mindspeed.megatron_adaptor first",
        )
    load()
    try:
        with _own_arguments():
            adaptor = importlib.import_module("mindspeed.megatron_adaptor")
    except (ImportError, RuntimeError, OSError) as error:
        raise PluginLoadError(
            "MindSpeed's adaptor could not be imported",
            where="engine-npu",
            why=str(error).splitlines()[0],
            remedy=f"install MindSpeed {MINDSPEED.version}: docs/npu.md",
        ) from error
    _check_applied()
    log.warning(
        "MindSpeed %s is documented with torch %s; "
        "this engine is written from its documentation and was never run",
        MINDSPEED.version,
        MINDSPEED.torch,
    )
    return adaptor


def configure(adaptor: Any, settings: Mapping[str, Any]) -> None:
    """Apply MindSpeed's replacements with these settings.

    The settings hold for the whole process, so a second engine must have the same ones.

    Raises:
        ConfigError: another engine of this process has different settings.
        PluginLoadError: nothing of Megatron-core is replaced under these settings.
    """
    wanted = dict(settings)
    if _settings and wanted != _settings:
        odd = sorted(name for name in wanted if wanted[name] != _settings.get(name))
        raise ConfigError(
            "options",
            f"{', '.join(odd)} differ from those of another engine in this process",
            why="MindSpeed replaces parts of Megatron-core for the whole process",
            remedy="give both engines the same settings, or a process each",
        )
    if not _settings:
        adaptor.repatch(wanted)
        _check_applied()
        _settings.update(wanted)


def _check_applied() -> None:
    """Raise ``PluginLoadError`` unless all of MindSpeed's replacements are in place."""
    manager = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager
    patches = manager.patches_info
    found = [patches[name] for name in patches if name.startswith("megatron.core.")]
    applied = sum(patch.is_applied for patch in found)
    if not found or applied < len(found):
        raise PluginLoadError(
            "MindSpeed's adaptor was imported, but replaced nothing of Megatron-core",
            where="engine-npu",
            why=f"{applied} of {len(found)} replacements are in place",
            remedy="mindspeed.deprecate.AutoExecuteFunction.AUTO_EXECUTE must not be off",
        )


@contextmanager
def _own_arguments() -> Iterator[None]:
    """Hide the command line's arguments inside the block.

    MindSpeed reads its settings from the command line, where the arguments of this program are.
    """
    kept = sys.argv
    sys.argv = kept[:1]
    try:
        yield
    finally:
        sys.argv = kept
