"""A lock that allows one run at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from engine_api.errors import ConfigError

LOCK = ".lock"


class FolderLock:
    """A lock on a folder, held from ``acquire`` to ``release`` or to the end of the process.

    The system frees the lock when the process ends, also after a kill.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Take the lock, and make the folder if needed.

        Raises ``ConfigError`` that names the process that holds the lock, or says why the folder
        cannot be made or written to.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = (self._folder / LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                "run.output_dir",
                f"cannot create a folder, or write to it, at {self._folder}",
                why=f"{error.strerror}: {error.filename}",
                remedy="name another folder, or fix its permissions",
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise ConfigError(
                "run.output_dir",
                f"another run writes to {self._folder}",
                why=f"{holder} holds {LOCK}",
                remedy="wait for it, end it, or use another run.output_dir",
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        """Free the lock (idempotent)."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
