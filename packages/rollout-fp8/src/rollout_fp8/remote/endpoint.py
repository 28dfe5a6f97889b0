"""A rollout's server as its client sees it: its process, and calls over HTTP that notice when it is gone."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import torch

from engine_api.errors import RolloutError
from rollout_fp8.remote.messages import CONFIG, dumps, error_from_json
from rollout_fp8.transports.channel import secret

WHERE = "rollout in a server"
POLL_S = 0.2
HEARTBEAT_S = 2.0  # between two looks at whether the server is alive, while an answer is waited for
GRACE_S = 10.0  # to end by itself
LOG_LINES = 20  # of the server's log, in an error
# What torchrun tells a rank: the server would take itself for that rank.
_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class ServerProcess:
    """A server that this process starts; it ends with this process, whatever happens to it.

    Args:
        name: of the rollout.
        device: ``cuda`` or ``cpu``.
        config: for ``--config``.
        gpus: how many it may see, from this process's current one on.
        timeout_s: until it must say where it listens.

    Raises:
        EngineError: what the rollout's constructor raised there.
        RolloutError: it ended, or did not answer in time.
    """

    def __init__(
        self, name: str, device: str, config: Mapping[str, Any], *, gpus: int, timeout_s: float
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-server-")
        announce = Path(self._folder.name) / "announce.json"
        command = [
            sys.executable,
            "-m",
            "rollout_fp8.remote.server",
            "--name",
            name,
            "--device",
            device,
            "--announce",
            str(announce),
            "--with-parent",
        ]
        self.log = Path(tempfile.gettempdir(), f"rollout-{name}-{secrets.token_hex(4)}.log")
        started: list[subprocess.Popen[bytes]] = []
        # At the end of the interpreter too, if no one calls ``close``; made before there is
        # anything to end.
        self._end = weakref.finalize(self, _end_all, started, self.log)
        try:
            # For this user alone: what a model's code prints may be private.
            with open(
                self.log, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)
            ) as log:
                # Every user of this machine can read another's command lines, and not their
                # environment.
                environment = {**_environment(gpus), CONFIG: json.dumps(config)}
                # In one statement: an interrupt after it finds the process in the list.
                started.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        env=environment,
                    )
                )
            (self._process,) = started
            self.url = self._await(announce, timeout_s)
        except BaseException:  # an interrupt too must leave no process behind; raised again
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the server, and of its process group."""
        return self._process.pid

    def check(self) -> None:
        """Raises ``RolloutError`` when it has ended."""
        code = _exit_code(self._process)
        if code is not None:
            raise self.error("the server has ended", f"exit code {code}")

    def error(self, what: str, why: str) -> RolloutError:
        """With the last lines of its log."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        except FileNotFoundError:
            return RolloutError(
                what,
                where=WHERE,
                why=f"another thread closed it ({why})",
                remedy="create another rollout",
            )
        return RolloutError(
            what,
            where=WHERE,
            why="\n       ".join([why, *lines]),
            remedy=f"its log is {self.log}; close this rollout and create another",
        )

    def close(self) -> None:
        """End it and all that it started; idempotent."""
        self._end()
        self._folder.cleanup()

    def _await(self, announce: Path, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while not announce.exists():
            self.check()
            if time.monotonic() > deadline:
                raise self.error("the server did not start", f"nothing within {timeout_s:g} s")
            time.sleep(POLL_S)
        news = json.loads(announce.read_bytes())
        if "error" in news:
            raise error_from_json(news["error"])
        return news["url"]


def _environment(gpus: int) -> dict[str, str]:
    secret("http")  # made here if there is none
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER and not name.startswith("TORCHELASTIC_")
    }
    if gpus:
        first, visible = torch.cuda.current_device(), os.environ.get("CUDA_VISIBLE_DEVICES")
        names = (
            visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        )
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + gpus])
    return kept


def _exit_code(process: subprocess.Popen[bytes], wait_s: float = 0.0) -> int | None:
    """None while it runs. It stays a zombie, so that nobody else gets its number, which is also its group's."""
    deadline = time.monotonic() + wait_s
    while (found := os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _end_all(started: Iterable[subprocess.Popen[bytes]], log: Path) -> None:
    for process in started:
        _end(process, log)


def _end(process: subprocess.Popen[bytes], log: Path) -> None:
    """The server, by SIGTERM if it listens to that; then whatever is left of its group."""
    os.kill(process.pid, signal.SIGTERM)
    code = _exit_code(process, GRACE_S)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    if code == 0:
        log.unlink(missing_ok=True)  # of a server that failed it stays


class Endpoint:
    """Calls to a server.

    Args:
        url: ``http://host:port``.
        silence_s: how long it may not answer whether it is alive.
        process: the server's, if it was started here.
    """

    def __init__(self, url: str, silence_s: float, process: ServerProcess | None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise RolloutError(
                f"{url!r} is no server's address", where=WHERE, remedy="give http://host:port"
            )
        self.closed = False
        self.url, self.host, self.port, self.silence_s, self.process = (
            url,
            parts.hostname,
            parts.port,
            silence_s,
            process,
        )

    def call(self, name: str, **body: Any) -> dict[str, Any]:
        """POST and wait. Raises the ``EngineError`` that the server answers, ``RolloutError`` when it is gone or hangs."""
        with self.start(name, **body) as pending:
            return pending.answer()

    def start(self, name: str, **body: Any) -> Pending:
        """POST, and do not wait."""
        return Pending(self, "POST", name, body)

    def health(self) -> dict[str, Any]:
        """Raises ``RolloutError`` when the server does not answer within ``silence_s``."""
        with Pending(self, "GET", "health", {}) as pending:
            if not pending.answered(self.silence_s):
                raise self.error(
                    "the server hangs",
                    f"it does not say that it is alive, for {self.silence_s:g} s",
                )
            return pending.answer()

    def own_address(self) -> str:
        """Under which this host reaches the server, and so the server this host. Raises ``RolloutError``."""
        try:
            with socket.create_connection((self.host, self.port), self.silence_s) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            raise self.error("the server does not answer", str(error)) from error

    def require_open(self) -> None:
        """Raises ``RolloutError`` after the rollout's ``close``."""
        if self.closed:
            raise RolloutError(
                "cannot be used", where=WHERE, why="it is closed", remedy="create another one"
            )

    def error(self, what: str, why: str) -> RolloutError:
        """With what is known of its process."""
        if self.process is not None:
            return self.process.error(what, why)
        return RolloutError(
            what, where=WHERE, why=why, remedy=f"see the log of the server at {self.url}"
        )


class Pending:
    """One call that is under way."""

    def __init__(self, endpoint: Endpoint, method: str, name: str, body: Mapping[str, Any]) -> None:
        endpoint.require_open()
        self._endpoint = endpoint
        self._beat = time.monotonic()
        self._http = http.client.HTTPConnection(
            endpoint.host, endpoint.port, timeout=endpoint.silence_s
        )
        headers = {
            "Authorization": f"Bearer {secret('http').hex()}",
            "Content-Type": "application/json",
            "Connection": "close",
        }
        try:
            self._http.request(method, f"/{name}", dumps(body), headers)
        except OSError as error:
            self._http.close()
            raise self._lost(error) from error

    def answered(self, wait_s: float) -> bool:
        """Whether there is an answer, or the server is gone."""
        watched = select.poll()  # ``select.select`` knows no descriptor above 1023
        watched.register(self._http.sock, select.POLLIN)
        return bool(watched.poll(wait_s * 1000))

    def check(self) -> None:
        """Now and then, look whether the server is alive. Raises ``RolloutError``."""
        if time.monotonic() - self._beat > HEARTBEAT_S:
            self._endpoint.health()
            self._beat = time.monotonic()

    def answer(self) -> dict[str, Any]:
        """Wait for it. Raises the ``EngineError`` that it is, ``RolloutError`` when the server is gone or hangs."""
        while not self.answered(POLL_S):
            self.check()
        try:
            response = self._http.getresponse()
            found = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._lost(error) from error
        if response.status != http.client.OK:
            raise error_from_json(found)
        return found

    def _lost(self, error: Exception) -> RolloutError:
        return self._endpoint.error(
            "the server does not answer", f"{type(error).__name__}: {error}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
