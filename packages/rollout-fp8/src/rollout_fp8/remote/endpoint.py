"""Server of a rollout as its client sees it: its process, and calls that notice when it is gone."""

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

from engine_api.errors import EngineError, RolloutError
from rollout_fp8.ranks import launcher_variables
from rollout_fp8.remote.messages import CONFIG, dumps, error_from_json
from rollout_fp8.transports.channel import secret

WHERE = "rollout in a server"
POLL_S = 0.2
# Seconds between two checks whether the server is alive, while an answer is waited for.
HEARTBEAT_S = 2.0
# Seconds for the server to end by itself.
GRACE_S = 10.0
# Lines of the server's log in an error.
LOG_LINES = 20


class ServerProcess:
    """Server that this process starts, and that always ends with this process.

    Args:
        name: name of the rollout.
        device: ``cuda`` or ``cpu``.
        config: content of ``--config``.
        gpus: number of GPUs that it may see, from this process's current one on.
        timeout_s: deadline for the server to announce its address.
        python: interpreter of the server, which may be of another environment that has this package
            in the same version. None: this process's.

    Raises:
        EngineError: the rollout's constructor raised it in the server.
        RolloutError: the server ended, or did not answer in time.
    """

    def __init__(
        self,
        name: str,
        device: str,
        config: Mapping[str, Any],
        *,
        gpus: int,
        timeout_s: float,
        python: str | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-server-")
        announce = Path(self._folder.name) / "announce.json"
        command = [
            python or sys.executable,
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
        # At the end of the interpreter too, if ``close`` is never called. It is made before there
        # is anything to end.
        self._end = weakref.finalize(self, _end_all, started, self.log)
        try:
            # Readable by this user alone: the output of a model's code may be private.
            with open(
                self.log, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)
            ) as log:
                # Every user of this machine can read another user's command lines, but not their
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
        except BaseException:
            # After an interrupt too, no process may be left behind.
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id of the server, which is also its process group's."""
        return self._process.pid

    def check(self) -> None:
        """Raise ``RolloutError`` when the server has ended."""
        code = _exit_code(self._process)
        if code is not None:
            raise self.error("the server has ended", f"exit code {code}")

    def error(self, what: str, why: str) -> RolloutError:
        """Return an error with the last lines of the server's log."""
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
        """End the server and all that it started (idempotent)."""
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
    # Made here if there is none.
    secret("http")
    own = launcher_variables()
    kept = {name: value for name, value in os.environ.items() if name not in own}
    if gpus:
        first = torch.cuda.current_device()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = (
            visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        )
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + gpus])
    return kept


def _exit_code(process: subprocess.Popen[bytes], wait_s: float = 0.0) -> int | None:
    """Return the exit code, or None while the process runs.

    The process stays a zombie, so that no other process gets its number, which is also its group's.
    """
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
    """End the server by SIGTERM if it handles that, and kill the rest of its group."""
    os.kill(process.pid, signal.SIGTERM)
    code = _exit_code(process, GRACE_S)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    # The log of a server that failed stays.
    if code == 0:
        log.unlink(missing_ok=True)


class Endpoint:
    """Endpoint for calls to a server.

    Args:
        url: ``http://host:port``.
        silence_s: longest time that the server may not answer whether it is alive.
        process: the server's process, if it was started here.
    """

    def __init__(self, url: str, silence_s: float, process: ServerProcess | None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise RolloutError(
                f"expected the address of a server, got {url!r}",
                where=WHERE,
                remedy="give http://host:port",
            )
        self.closed = False
        self.url = url
        self.host = parts.hostname
        self.port = parts.port
        self.silence_s = silence_s
        self.process = process

    def call(self, name: str, **body: Any) -> dict[str, Any]:
        """POST a call, and wait for its answer.

        Raises:
            EngineError: the server answers with it.
            RolloutError: the server is gone or hangs.
        """
        with self.start(name, **body) as pending:
            return pending.response()

    def start(self, name: str, **body: Any) -> Pending:
        """POST a call without waiting for its answer."""
        return Pending(self, "POST", name, body)

    def health(self) -> dict[str, Any]:
        """Return /health, or raise ``RolloutError`` without an answer within ``silence_s``."""
        with Pending(self, "GET", "health", {}) as pending:
            if not pending.has_response(self.silence_s):
                raise self.error(
                    "the server hangs",
                    f"it has shown no sign of life for {self.silence_s:g} s",
                )
            return pending.response()

    def own_address(self) -> str:
        """Return the address of this host by which the server reaches it.

        Raises ``RolloutError``.
        """
        try:
            with socket.create_connection((self.host, self.port), self.silence_s) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            raise self.error("the server does not respond", str(error)) from error

    def require_open(self) -> None:
        """Raise ``RolloutError`` after the rollout's ``close``."""
        if self.closed:
            raise RolloutError(
                "cannot be used",
                where=WHERE,
                why="the rollout is closed",
                remedy="create another one",
            )

    def error(self, what: str, why: str) -> RolloutError:
        """Return an error with the facts that are known of the server's process."""
        if self.process is not None:
            return self.process.error(what, why)
        return RolloutError(
            what, where=WHERE, why=why, remedy=f"see the log of the server at {self.url}"
        )


class Pending:
    """Call that is under way."""

    def __init__(self, endpoint: Endpoint, method: str, name: str, body: Mapping[str, Any]) -> None:
        endpoint.require_open()
        self._endpoint = endpoint
        self._beat = time.monotonic()
        self._answer: dict[str, Any] | EngineError | None = None
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

    def has_response(self, wait_s: float) -> bool:
        """Return whether there is an answer, or the server is gone."""
        if self._answer is not None:
            return True
        # ``select.select`` accepts no descriptor above 1023.
        watched = select.poll()
        watched.register(self._http.sock, select.POLLIN)
        return bool(watched.poll(wait_s * 1000))

    def check(self) -> None:
        """Check at intervals whether the server is alive. Raises ``RolloutError``."""
        if time.monotonic() - self._beat > HEARTBEAT_S:
            self._endpoint.health()
            self._beat = time.monotonic()

    def response(self) -> dict[str, Any]:
        """Wait for the answer, and return it; a later call returns or raises the same.

        Raises:
            EngineError: the server answers with it.
            RolloutError: the server is gone or hangs.
        """
        while not self.has_response(POLL_S):
            self.check()
        if self._answer is None:
            try:
                response = self._http.getresponse()
                found: dict[str, Any] = json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._lost(error) from error
            is_error = response.status != http.client.OK
            self._answer = error_from_json(found) if is_error else found
        if isinstance(self._answer, EngineError):
            raise self._answer
        return self._answer

    def _lost(self, error: Exception) -> RolloutError:
        return self._endpoint.error(
            "the server does not respond", f"{type(error).__name__}: {error}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
