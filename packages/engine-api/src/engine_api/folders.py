"""Files and folders that a kill or a loss of power leaves whole: the old ones, or the new ones."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

_PARTIAL = ".partial"
_FORMER = (
    ".former"  # what a folder held, between the two renames of a file system that cannot exchange
)
_AT_CWD = -100  # AT_FDCWD of Linux' fcntl.h
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux' renameat2


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folders(folder: Path) -> None:
    """Put the names in a folder and in the folders below on the disk, its own last."""
    for place, _, _ in os.walk(folder, topdown=False):
        sync(Path(place))


def sync_tree(folder: Path) -> None:
    """Put all that is in a folder on the disk, the folder itself last."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)
    sync_folders(folder)


def write_text(path: Path, text: str) -> None:
    """Replace a file's text: a kill leaves the former text or the new one."""
    partial = path.with_name(path.name + _PARTIAL)
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def remove(folder: Path) -> None:
    """Remove a folder that others look for: a kill leaves it whole, or under the name of an unfinished one."""
    partial = folder.with_name(folder.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    folder.rename(partial)
    shutil.rmtree(partial)


def replace_folder(new: Path, old: Path, *, stale: Collection[str] = ("*",)) -> None:
    """Give the folder ``new`` the name ``old``, in place of what has that name.

    A kill leaves under ``old`` the former folder or the new one, whole. Where the file system cannot exchange two names
    (NFS) there is a moment without either: `restore` then brings the former one back.

    Args:
        new: A complete folder beside ``old``, or beside what ``old`` is a link to.
        old: The name to take.
        stale: Patterns of the names that go with the former folder. What else it holds, and ``new`` does not, is kept.
    """
    old = real(old)
    if old.exists():
        _keep(old, new, stale)
        shutil.copymode(old, new)
    sync_tree(new)
    if not old.exists():
        new.rename(old)
    elif _exchange(new, old):
        shutil.rmtree(new)
    else:
        former = old.with_name(old.name + _FORMER)
        old.rename(former)
        new.rename(old)
        shutil.rmtree(former)
    sync(old.parent)


def restore(folder: Path) -> None:
    """Undo what a killed `replace_folder` has left of ``folder``."""
    folder = real(folder)
    former = folder.with_name(folder.name + _FORMER)
    if former.exists() and not folder.exists():
        former.rename(folder)
    elif former.exists():
        shutil.rmtree(former)


def real(folder: Path) -> Path:
    """Return what a link to a folder leads to, so that it is replaced there and the link stays."""
    return folder.resolve() if folder.is_symlink() else folder


def _keep(former: Path, new: Path, stale: Collection[str]) -> None:
    """Put into ``new`` what else the former folder holds; its files are shared, not copied."""
    if not former.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(former))
    for path in former.iterdir():
        target = new / path.name
        if target.exists() or any(fnmatchcase(path.name, pattern) for pattern in stale):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, target, symlinks=True, copy_function=_share)
        else:
            _share(path, target)


def _share(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links to files
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return whether system and file system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
