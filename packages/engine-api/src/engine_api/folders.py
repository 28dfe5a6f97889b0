"""Replacement of files and folders as a whole, safe against a kill and a loss of power.

After either of them the old version or the new one is there, complete.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

_PARTIAL = ".partial"
# The former folder has this suffix between the two renames on a file system that cannot exchange
# names.
_FORMER = ".former"
# AT_FDCWD of Linux's fcntl.h, and RENAME_EXCHANGE of its renameat2.
_AT_CWD = -100
_EXCHANGE = 2


def sync(path: Path) -> None:
    """Write a file's content, or the names in a folder, to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folders(folder: Path) -> None:
    """Write the names in a folder and in the folders below it to the disk, its own last."""
    for place, _, _ in os.walk(folder, topdown=False):
        sync(Path(place))


def sync_tree(folder: Path) -> None:
    """Write everything in a folder to the disk, the folder itself last."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)
    sync_folders(folder)


def write_text(path: Path, text: str) -> None:
    """Replace a file's text.

    A kill leaves the former text or the new one.
    """
    partial = path.with_name(path.name + _PARTIAL)
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def give_common_mode(path: Path) -> None:
    """Give a file the mode that the process's umask gives to new files.

    safetensors makes files that only their owner can read. The umask itself can only be read by
    changing it, for all threads, so that the mode is taken from an empty file.
    """
    probe = path.with_name(path.name + ".mode")
    probe.touch()
    try:
        path.chmod(probe.stat().st_mode & 0o777)
    finally:
        probe.unlink()


def remove(folder: Path) -> None:
    """Remove a folder that other processes look for.

    A kill leaves it complete, or under the name of an unfinished folder.
    """
    partial = folder.with_name(folder.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    folder.rename(partial)
    shutil.rmtree(partial)


def replace_folder(new: Path, old: Path, *, stale: Collection[str] = ("*",)) -> None:
    """Rename the folder ``new`` to ``old``, replacing the folder of that name.

    A kill leaves the former folder or the new one under ``old``, complete. On a file system that
    cannot exchange two names (NFS) there is a moment without either: `restore` then brings the
    former folder back.

    Args:
        new: a complete folder next to ``old``, or next to the target of the link ``old``.
        old: the name to take.
        stale: patterns of the names in the former folder that are dropped. Its other files are
            kept, unless ``new`` has a file of that name.
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
    """Undo an unfinished `replace_folder` of ``folder`` that was killed."""
    folder = real(folder)
    former = folder.with_name(folder.name + _FORMER)
    if former.exists() and not folder.exists():
        former.rename(folder)
    elif former.exists():
        shutil.rmtree(former)


def real(folder: Path) -> Path:
    """Return the target of a link to a folder, so that it is replaced there and the link stays."""
    return folder.resolve() if folder.is_symlink() else folder


def _keep(former: Path, new: Path, stale: Collection[str]) -> None:
    """Add the other files of the former folder to ``new``, as hard links and not as copies."""
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
    # The file system has no hard links.
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step, and return whether system and file system support it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
