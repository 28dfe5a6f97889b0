"""MindSpeed's adaptor: applied before Megatron-core is imported, checked, and refused where the order is wrong.

MindSpeed is no library that is called, but a set of replacements for parts of torch and Megatron-core, applied when
``mindspeed.megatron_adaptor`` is imported, and again with other settings by its ``repatch``.
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
_settings: dict[str, Any] = {}  # of this process, once an engine was built


def adapt() -> Any:
    """Import the adaptor, which replaces parts of Megatron-core; returns its module.

    Raises ``PluginLoadError`` where Megatron-core is imported already, MindSpeed cannot be imported, or nothing was replaced.
    """
    if megatron_is_first(sys.modules):
        raise PluginLoadError(
            "Megatron-core was imported before MindSpeed's adaptor",
            where="engine-npu",
            why="modules that took names from it keep the parts that MindSpeed replaces",
            remedy="in a fresh process create the NPU engine first, or import mindspeed.megatron_adaptor first",
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
        "MindSpeed %s is documented with torch %s; this is written from its documentation and was never run",
        MINDSPEED.version,
        MINDSPEED.torch,
    )
    return adaptor


def configure(adaptor: Any, settings: Mapping[str, Any]) -> None:
    """Apply MindSpeed's replacements with these settings; they are the process's, so a second engine must want the same.

    Raises ``ConfigError`` where another engine of this process has set others.
    """
    wanted = dict(settings)
    if _settings and wanted != _settings:
        odd = sorted(name for name in wanted if wanted[name] != _settings.get(name))
        raise ConfigError(
            "options",
            f"{', '.join(odd)} differ from another engine's of this process",
            why="MindSpeed replaces parts of Megatron-core for the whole process",
            remedy="give both engines the same, or a process each",
        )
    if not _settings:
        adaptor.repatch(wanted)
        _check_applied()
        _settings.update(wanted)


def _check_applied() -> None:
    manager = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager
    found = [
        patch for name, patch in manager.patches_info.items() if name.startswith("megatron.core.")
    ]
    if not found or not all(patch.is_applied for patch in found):
        raise PluginLoadError(
            "MindSpeed's adaptor was imported, but replaced nothing of Megatron-core",
            where="engine-npu",
            why=f"{sum(patch.is_applied for patch in found)} of {len(found)} replacements are in place",
            remedy="mindspeed.deprecate.AutoExecuteFunction.AUTO_EXECUTE must not be off",
        )


@contextmanager
def _own_arguments() -> Iterator[None]:
    """MindSpeed reads its settings from this process's command line, where another program's options stand."""
    kept = sys.argv
    sys.argv = kept[:1]
    try:
        yield
    finally:
        sys.argv = kept
