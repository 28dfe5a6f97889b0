"""A user's own function, named in a configuration.

The name is ``path/to/file.py:name`` or ``package.module:name``.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from engine_api.config import near_matches
from engine_api.errors import ConfigError

T = TypeVar("T")


def load_function(target: str, key: str) -> Callable[..., Any]:
    """Return the function that ``target`` names.

    A named file can import the files in its folder, as a script can.

    Args:
        target: ``file.py:name``, relative to the working directory, or ``package.module:name``.
        key: the configuration's key, for errors.

    Raises ``ConfigError`` for a target that is not of that form, for a file, module or function
    that does not exist, and for an import that fails.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise ConfigError(
            key,
            f"expected the name of a function, got {target!r}",
            remedy="write path/to/file.py:name or package.module:name",
        )
    module = _import(place, key)
    function = getattr(module, name, None)
    if not callable(function):
        offered = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(
            key, f"{place} has no function {name!r}", remedy=near_matches(name, offered)
        )
    return function


def absolute_target(target: str) -> str:
    """Return ``target`` with an absolute path, where it names a file.

    Processes with a different working directory then find it. Other names stay as they are.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place.endswith(".py"):
        return target
    return f"{Path(place).expanduser().resolve()}:{name}"


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call of ``function`` returns a coroutine.

    That holds for an ``async def`` and for an object whose ``__call__`` is one.
    """
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 - the method itself is inspected
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def require_arguments(
    function: Callable[..., Any], key: str, positional: Sequence[str], keywords: Mapping[str, Any]
) -> None:
    """Raise ``ConfigError`` unless ``function`` can be called with these arguments.

    ``positional`` are the names of the positional arguments, for the error.
    """
    try:
        inspect.signature(function).bind(*positional, **keywords)
    except TypeError as error:
        given = ", ".join([*positional, *(f"{name}=…" for name in keywords)])
        raise ConfigError(
            key,
            f"the function cannot be called with ({given})",
            why=str(error),
            remedy="give it these parameters, or correct its kwargs",
        ) from error
    except ValueError:
        # A function in C may have no signature. Its first call shows whether the arguments fit.
        return


def run_past_exits(
    loop: asyncio.AbstractEventLoop,
    main: Coroutine[Any, Any, T],
    exits: tuple[type[BaseException], ...] = (SystemExit,),
) -> T:
    """Run ``main`` to its end, even if a task that a user's function started calls ``sys.exit``.

    An event loop ends with the exit of any of its tasks. Here the loop continues: code that awaits
    the task receives the exit, and if no code awaits it, asyncio logs it. ``exits`` are the
    exceptions that count as an exit.
    """
    task = loop.create_task(main)
    while True:
        try:
            return loop.run_until_complete(task)
        except exits:
            if task.done():  # the exit is that of `main` itself
                raise


def _import(place: str, key: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _import_file(Path(place), key)
        _find_in(Path.cwd())  # a console script does not search the working directory
        return importlib.import_module(place)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ConfigError(
            key,
            f"{place} cannot be imported",
            why=f"{type(error).__name__}: {error}",
            remedy="fix the module, or correct the name; a file needs its suffix .py",
        ) from error


def _import_file(path: Path, key: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(
            key, f"there is no file {path}", remedy="paths are relative to the working directory"
        )
    # Two files with the same name are two modules, and each file is loaded once in a process.
    name = f"_engine_trainer_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _find_in(path.parent)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # A module that is loaded in part must not stay, not even after an interrupt.
        del sys.modules[name]
        raise
    return module


def _find_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # at the end, where it hides no other module
