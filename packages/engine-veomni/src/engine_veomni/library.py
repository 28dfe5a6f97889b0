"""VeOmni as a library of model classes: its import, its classes, and its global variables.

Importing VeOmni prints to stdout, replaces a function of transformers and methods of
``logging.Logger``. Its kernels are module-level slots that all models of a family share. This
module undoes the former, and lets the engines of a process agree about the latter. VeOmni's other
global variables, the configuration of operators and the parallel state, are never set:
engine-fsdp's groups and attention take their place.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import transformers.integrations.hub_kernels

from engine_api.errors import ConfigError
from engine_veomni.options import EAGER

__all__ = ["Hold", "bind_kernels", "find_class", "list_families"]

log = logging.getLogger("engine_veomni")

_LOGGER = "veomni"
_VERBOSITY = "VEOMNI_VERBOSITY"
# The function by which a module of models asks for the parallel state.
_STATE = "get_parallel_state"
# transformers has methods of these names, which VeOmni replaces.
_LOGGER_METHODS = ("debug_once", "info_once", "warning_once")


@contextmanager
def _contain_changes() -> Iterator[None]:
    """Undo what modules of VeOmni that are imported inside the block change outside of VeOmni.

    The text that they print goes to the log.
    """
    hub: Any = transformers.integrations.hub_kernels
    loader = hub.load_and_register_attn_kernel
    methods = {name: vars(logging.Logger).get(name) for name in _LOGGER_METHODS}
    root = logging.getLogger(_LOGGER)
    handlers = list(root.handlers)
    environment = os.environ.copy()
    # VeOmni reads this when it adds its handler, and then reports its settings at level INFO.
    os.environ.setdefault(_VERBOSITY, "WARNING")
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            log.debug("VeOmni printed: %s", line)
        _restore_environment(environment)
        hub.load_and_register_attn_kernel = loader
        for name, method in methods.items():
            if method is not None:
                setattr(logging.Logger, name, method)
        for added in [one for one in root.handlers if one not in handlers]:
            # Its messages then go where the process sends those of all libraries.
            root.removeHandler(added)
            root.propagate = True
            root.setLevel(logging.NOTSET)


def _restore_environment(before: Mapping[str, str]) -> None:
    """Set the environment as it was, without a change to variables that are as they were.

    Other threads may read them meanwhile.
    """
    for name in [name for name in os.environ if name not in before]:
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _load_registry() -> Any:
    """Return VeOmni's registry of model classes."""
    with _contain_changes():
        # The registry is filled by the import of the families.
        import veomni.models  # noqa: F401
        from veomni.models.loader import MODELING_REGISTRY
    return MODELING_REGISTRY


def list_families() -> list[str]:
    """Return the model types of which VeOmni has classes, in alphabetical order."""
    return sorted(_load_registry().valid_keys())


def find_class(model_type: str, head: str) -> Any:
    """Return VeOmni's class of a family for a kind of head, or None.

    Args:
        model_type: ``model_type`` in config.json.
        head: the end of transformers' class name, such as ``ForCausalLM``.

    Raises:
        ConfigError: a package is not installed that VeOmni needs for this family.
    """
    registry = _load_registry()
    if model_type not in registry.valid_keys():
        return None
    try:
        with _contain_changes():
            cls = registry[model_type](head)
    except ImportError as error:
        raise ConfigError(
            "model.path",
            f"VeOmni's classes of {model_type} cannot be imported",
            why=str(error),
            remedy=f"pip install {(error.name or 'the package').replace('_', '-')}, "
            "or use backend fsdp2 for this model",
        ) from error
    # Where a family has no such class, VeOmni returns another one of it.
    return cls if cls.__name__.endswith(head) else None


def _find_slots(module: Any) -> dict[str, Any]:
    """Return the kernel slots of a module of models, by the name of the operator."""
    from veomni.ops.dispatch import OpSlot

    return {slot.op_name: slot for slot in vars(module).values() if isinstance(slot, OpSlot)}


def bind_kernels(cls: Any, kernels: Mapping[str, str]) -> None:
    """Choose the kernels of a class's module, for all models of this process that have them.

    An operator that ``kernels`` does not name is computed in plain PyTorch, which some classes want
    to be told (gpt-oss).

    Raises:
        ConfigError: VeOmni has no such kernel for the family, or it cannot run here.
    """
    slots = _find_slots(sys.modules[cls.__module__])
    for operator, kernel in {**dict.fromkeys(slots, EAGER), **kernels}.items():
        slot = slots.get(operator)
        if slot is None:
            _refuse_without_slot(cls, operator, kernel)
            continue
        try:
            with _contain_changes():
                slot.bind(kernel)
        # For an unknown name, a device that is absent, and a package that is not installed.
        except (KeyError, RuntimeError, ImportError) as error:
            raise ConfigError(
                f"options.{operator}",
                f"VeOmni's kernel {kernel!r} cannot be used for {cls.__name__}",
                why=str(error.args[0]) if error.args else type(error).__name__,
                remedy=f"use {EAGER}, or install what the kernel needs",
            ) from error


def _refuse_without_slot(cls: Any, operator: str, kernel: str) -> None:
    """Raise ``ConfigError`` for a kernel of an operator that VeOmni did not replace in a family."""
    if kernel != EAGER:
        raise ConfigError(
            f"options.{operator}",
            f"expected {EAGER}, got {kernel!r}",
            why=f"VeOmni's {cls.__name__} has no choice of kernels for it",
            remedy=f"use {EAGER} for this model family",
        )


@dataclass(frozen=True)
class _Alone:
    """VeOmni's parallel state as its models see it: each computes what its rank gives it.

    VeOmni's own function refuses to answer in a process group that it has not set up. Some of its
    models ask it whether to divide tokens over ranks, and whether to run the tower where a rank has
    no images. Here engine-torch does both.
    """

    async_enabled: bool = False
    fsdp_enabled: bool = False
    sp_enabled: bool = False


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The settings that all engines of a process have in common."""

    sizes: Mapping[str, int]
    kernels: Mapping[str, str]


class Hold:
    """The claim of one engine on this process's settings, from its start to its end.

    Args:
        sizes: number of ranks of each kind of parallelism.
        kernels: the chosen kernel of each operator.

    Raises:
        ConfigError: another engine of this process has different settings.
    """

    _settings: _Settings | None = None
    _count = 0
    _bound: dict[str, Any] = {}  # noqa: RUF012 - shared by all, as VeOmni's variables are
    _states: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, sizes: Mapping[str, int], kernels: Mapping[str, str]) -> None:
        wanted = _Settings(sizes=dict(sizes), kernels=dict(kernels))
        current = Hold._settings
        if current is not None and current != wanted:
            key, got, expected = (
                ("parallelism", wanted.sizes, current.sizes)
                if wanted.sizes != current.sizes
                else ("options", wanted.kernels, current.kernels)
            )
            raise ConfigError(
                key,
                f"expected those of another engine of this process, {_format_settings(expected)}, "
                f"got {_format_settings(got)}",
                why="VeOmni keeps its layout and its kernels in global variables",
                remedy="give both engines the same, close the other one first, "
                "or give each a process",
            )
        Hold._settings = wanted
        Hold._count += 1
        self._kernels = wanted.kernels
        self._open = True

    def bind(self, cls: Any) -> None:
        """Choose the kernels and the parallel state of a class's module (see ``bind_kernels``)."""
        module = sys.modules[cls.__module__]
        Hold._bound[cls.__module__] = cls
        if hasattr(module, _STATE):
            Hold._states.setdefault(cls.__module__, getattr(module, _STATE))
            setattr(module, _STATE, _Alone)
        bind_kernels(cls, self._kernels)

    def release(self) -> None:
        """End the claim, and with the last one of the process the choice of kernels.

        A second call does nothing.
        """
        if not self._open:
            return
        self._open = False
        Hold._count -= 1
        if not Hold._count:
            Hold._settings = None
            for cls in Hold._bound.values():
                bind_kernels(cls, dict.fromkeys(self._kernels, EAGER))
            Hold._bound.clear()
            for name, function in Hold._states.items():
                setattr(sys.modules[name], _STATE, function)
            Hold._states.clear()


def _format_settings(values: Mapping[str, Any]) -> str:
    """Return settings as text."""
    return ", ".join(f"{name} {value}" for name, value in values.items())
