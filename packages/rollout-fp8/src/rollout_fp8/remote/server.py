"""Server of a rollout in its own process.

usage: ``python -m rollout_fp8.remote.server --name vllm --device cuda --config '{…}'``

It has a small HTTP API, JSON both ways. Every request carries a token made of the run's secret
(``ROLLOUT_FP8_KEY``, see ``transports.channel``):

================  ======================================  ========================================
request           arguments                               reply
================  ======================================  ========================================
GET /health       none                                    pid, weight_version, name, arguments
POST /generate    prompts, sampling, images               completions
POST /submit      prompt, sampling                        id
POST /result      id, wait_s                              done, completions
POST /abort       id                                      none
POST              address, version, timeout_s, adapter    a ``SyncResult``
/update_weights
POST /sleep,      weights, kv_cache                       none
/wake_up
POST /shutdown    none                                    none
================  ======================================  ========================================

An error is ``{"class", "what", "where", "why", "remedy", …}`` with status 400 (the request), 401
(the token), 404, 408 (nothing within ``wait_s``), 422 (an error of the contract) or 500. Several
clients are served one after another. Weights do not travel over HTTP: the server fetches them from
``address`` with ``transports.receive_weights``. HTTP is not encrypted: beyond 127.0.0.1 use it
inside a network that you trust.
"""

from __future__ import annotations

import argparse
import hmac
import inspect
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from socketserver import TCPServer
from typing import Any, cast

from engine_api.capabilities import Capability
from engine_api.config import LoraConfig, ModelSource
from engine_api.devices import device_of
from engine_api.errors import EngineError, RolloutError, UnsupportedCapability
from engine_api.parent_watchdog import end_group_with
from engine_api.registry import RolloutRegistry
from engine_api.rollout import (
    AsyncRollout,
    Completion,
    Generation,
    Rollout,
    SamplingParams,
    VisionRollout,
)
from engine_api.weights import WeightExport
from rollout_fp8.remote.messages import (
    CONFIG,
    dumps,
    error_to_json,
    from_json,
    images_from_json,
    to_json,
)
from rollout_fp8.remote.served import settings_of
from rollout_fp8.transports.channel import secret

# Largest request, in bytes: the images of a step take gigabytes.
LARGEST = 1 << 32
# Seconds after which a connection that sends nothing is closed.
IDLE_S = 60.0
# Seconds for a connection to show the token.
UNPROVEN_S = 10.0
# Largest number of connections that have not shown it yet; the oldest is closed first.
MAX_UNPROVEN = 64
# Seconds that a generation is kept when no client asks for it: steps of training may lie between
# submitting a generation and fetching its result.
KEPT_S = 3600.0

log = logging.getLogger("rollout_fp8.remote.server")


class Service:
    """Rollout as functions from JSON to JSON.

    ``name`` is the name that it is registered under, and ``arguments`` are those that it was made
    with.
    """

    def __init__(
        self, rollout: Rollout, device: str, *, name: str, arguments: Mapping[str, Any]
    ) -> None:
        self._rollout = rollout
        self._device = device
        self._settings = settings_of(rollout, name, arguments)
        # A rollout need not be thread-safe, so clients take turns.
        self._turn = threading.Lock()
        self._running: dict[int, Generation] = {}
        # Time when a client last named a generation.
        self._asked: dict[int, float] = {}
        self._ids = count()
        self.closed = False
        self.calls: Mapping[str, Callable[..., dict[str, Any]]] = {
            "generate": self.generate,
            "submit": self.submit,
            "result": self.result,
            "abort": self.abort,
            "update_weights": self.update_weights,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
        }

    def close(self) -> None:
        """Close the rollout without waiting for calls that still run in it.

        They may fail.
        """
        self.closed = True
        self._rollout.close()

    def health(self) -> dict[str, Any]:
        """Return the server's state, even while calls wait for their turn."""
        return {
            "pid": os.getpid(),
            "weight_version": self._rollout.weight_version,
            **self._settings,
        }

    def generate(
        self,
        *,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any],
        images: str | None = None,
    ) -> dict[str, Any]:
        """Generate as ``Rollout`` says, and as ``VisionRollout`` does where images are given."""
        wanted = from_json(SamplingParams, sampling)
        given = images_from_json(images)
        with self._turn:
            if given is None:
                found = self._rollout.generate(prompts, wanted)
            else:
                found = self._vision_rollout().generate(prompts, wanted, images=given)
            return {"completions": [to_json(c) for c in found]}

    def _vision_rollout(self) -> VisionRollout:
        """Return the rollout, which takes images.

        Raises:
            UnsupportedCapability: it takes none.
        """
        if "images" not in inspect.signature(self._rollout.generate).parameters:
            raise UnsupportedCapability(
                Capability.VISION,
                where=f"server of {type(self._rollout).__name__}",
                why="it takes text alone",
                remedy="use a rollout that declares vision, or prompts without images",
            )
        return cast("VisionRollout", self._rollout)

    def submit(self, *, prompt: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """See ``AsyncRollout.submit``."""
        if not isinstance(self._rollout, AsyncRollout):
            raise RolloutError(
                "cannot generate in the background",
                where=f"server of {type(self._rollout).__name__}",
                why="it has no submit",
                remedy="use generate, or another rollout",
            )
        with self._turn:
            self._drop_unasked()
            number = next(self._ids)
            self._asked[number] = time.monotonic()
            self._running[number] = self._rollout.submit(
                prompt, from_json(SamplingParams, sampling)
            )
        return {"id": number}

    def result(self, *, id: int, wait_s: float) -> dict[str, Any]:  # noqa: A002 - the name in JSON
        """See ``Generation.result``.

        A result is handed out once.
        """
        generation = self._known(id)
        try:
            completions = _result(generation, wait_s)
            if completions is None:
                return {"done": False}
        except Exception:
            # Of a bug in the rollout too: the error is reported once.
            self._drop(id)
            raise
        self._drop(id)
        return {"done": True, "completions": [to_json(c) for c in completions]}

    def abort(self, *, id: int) -> dict[str, Any]:  # noqa: A002
        """See ``Generation.abort``."""
        self._known(id).abort()
        return {}

    def update_weights(
        self,
        *,
        address: str | None,
        version: int,
        timeout_s: float,
        adapter: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """See ``Rollout.update_weights``.

        ``adapter`` is its folder and checksums; without ``address`` it comes alone.
        """
        from rollout_fp8.install.adapter_session import SentAdapter
        from rollout_fp8.transports.remote import receive_weights

        device = device_of(self._device).current()
        with self._turn, ExitStack() as stack:
            stream = None
            if address is not None:
                receiving = receive_weights(address, device=device, timeout_s=timeout_s)
                stream = stack.enter_context(receiving)
            export = (
                stream
                if adapter is None
                else SentAdapter(Path(adapter["folder"]), adapter["sums"], stream)
            )
            with self._any_version(version):
                return to_json(self._rollout.update_weights(cast("WeightExport", export), version))

    @contextmanager
    def _any_version(self, version: int) -> Iterator[None]:
        """Accept an older version too, for the duration of the context.

        Each run counts from the start. A client itself refuses versions older than the last that it
        sent.
        """
        served = self._rollout.weight_version
        self._rollout.weight_version = min(served, version)
        try:
            yield
        except BaseException:
            # The rollout may continue to serve.
            self._rollout.weight_version = served
            raise

    def sleep(self, *, weights: bool = True, kv_cache: bool = True) -> dict[str, Any]:
        """See ``Rollout.sleep``."""
        with self._turn:
            self._rollout.sleep(weights=weights, kv_cache=kv_cache)
        return {}

    def wake_up(self, *, weights: bool = True, kv_cache: bool = True) -> dict[str, Any]:
        """See ``Rollout.wake_up``."""
        with self._turn:
            self._rollout.wake_up(weights=weights, kv_cache=kv_cache)
        return {}

    def _known(self, number: int) -> Generation:
        try:
            generation = self._running[number]
        except KeyError:
            raise RolloutError(
                f"no generation {number} is running",
                where="server",
                remedy=f"a result is returned once, and kept for {KEPT_S / 60:.0f} minutes",
            ) from None
        self._asked[number] = time.monotonic()
        return generation

    def _drop(self, number: int) -> Generation | None:
        self._asked.pop(number, None)
        return self._running.pop(number, None)

    def _drop_unasked(self) -> None:
        """Drop generations whose clients ended without fetching them, which would stay for ever."""
        limit = time.monotonic() - KEPT_S
        for number in [number for number, asked in self._asked.copy().items() if asked < limit]:
            generation = self._drop(number)
            if generation is not None:
                generation.abort()


def _result(generation: Generation, wait_s: float) -> list[Completion] | None:
    """Return the completions, or None while the generation runs.

    An error that is raised after its end is its own, even a ``TimeoutError``.
    """
    try:
        return generation.result(wait_s)
    except TimeoutError:
        return generation.result(0.0) if generation.done() else None


class Server(ThreadingHTTPServer):
    """HTTP server for one ``Service``."""

    # A generation that no client waits for must not keep the process alive.
    daemon_threads = True

    def __init__(self, address: tuple[str, int], service: Service) -> None:
        self.service = service
        self.token = secret("http").hex()
        # Deadlines of sockets by time.monotonic(), the oldest first.
        self._unproven: dict[Any, float] = {}
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a new connection in a thread, for ``UNPROVEN_S`` unless it shows the token."""
        for oldest in list(self._unproven)[: 1 - MAX_UNPROVEN]:
            self._hang_up(oldest)
        self._unproven[request] = time.monotonic() + UNPROVEN_S
        super().process_request(request, client_address)

    def is_known(self, request: Any) -> None:
        """Note that a connection has shown the token."""
        self._unproven.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._unproven.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that have not shown the token in time, whatever they sent."""
        now = time.monotonic()
        for request in [
            request for request, until in self._unproven.copy().items() if until <= now
        ]:
            self._hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of a connection, unless its other end is closed, as clients may do."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _hang_up(self, request: Any) -> None:
        # None: it has shown the token just now.
        if self._unproven.pop(request, None) is None:
            return
        # The other end may have closed it.
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        """Bind without the look-up of this host's name that ``HTTPServer`` makes."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])

    @property
    def url(self) -> str:
        """The URL at which the server listens."""
        return f"http://{self.server_name}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    _is_last = False

    def do_GET(self) -> None:
        self._serve({"/health": lambda **_: self._server.service.health()})

    def do_POST(self) -> None:
        calls = {f"/{name}": call for name, call in self._server.service.calls.items()}
        try:
            self._serve({**calls, "/shutdown": self._shutdown})
        finally:
            # Behind the answer: the process ends whatever its threads are about to write. In a
            # thread, because it waits for the loop that serves.
            if self._is_last:
                threading.Thread(target=self._server.shutdown).start()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing: errors are logged, requests are not."""

    @property
    def _server(self) -> Server:
        server = self.server
        assert isinstance(server, Server)
        return server

    def _serve(self, calls: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
        try:
            status = 200
            answer = self._call(calls)
        except _Refused as refused:
            status = refused.status
            answer = error_to_json(refused)
        except EngineError as error:
            status = 422
            answer = error_to_json(error)
        except Exception as error:
            # The client waits for an answer, and gets this error.
            log.exception("%s failed", self.path)
            reported: Exception = error
            if self._server.service.closed:
                reported = RolloutError(
                    "the server was closed during this call",
                    where="server",
                    remedy="start another one",
                )
            status = 500
            answer = error_to_json(reported)
        data = dumps(answer)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _call(self, calls: Mapping[str, Callable[..., dict[str, Any]]]) -> dict[str, Any]:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._server.token.encode()):
            raise self._refused(
                401, "the token is wrong", "give server and client the same ROLLOUT_FP8_KEY"
            )
        self._server.is_known(self.connection)
        if self.path not in calls:
            raise self._refused(
                404,
                f"there is no {self.command} {self.path}",
                f"one of: {', '.join(sorted(calls))}",
            )
        call = calls[self.path]
        arguments = self._body()
        try:
            inspect.signature(call).bind(**arguments)
        except TypeError as error:
            raise self._refused(
                400, f"{self.path}: {error}", "see rollout_fp8.remote.server"
            ) from error
        return call(**arguments)

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > LARGEST:
            raise self._refused(400, f"a request of {length} bytes", f"at most {LARGEST}")
        try:
            body = json.loads(self.rfile.read(int(length)) or b"{}")
        except ValueError as error:
            raise self._refused(
                400, f"the request is not JSON: {error}", "send an object"
            ) from error
        if not isinstance(body, dict):
            raise self._refused(400, f"the request is a {type(body).__name__}", "send an object")
        return body

    def _refused(self, status: int, what: str, remedy: str) -> _Refused:
        # Parts of the request may be unread.
        self.close_connection = True
        return _Refused(status, what, remedy)

    def _shutdown(self) -> dict[str, Any]:
        self._is_last = True
        return {}


class _Refused(RolloutError):
    """Refusal of a request that never reached the rollout."""

    def __init__(self, status: int, what: str, remedy: str) -> None:
        super().__init__(what, where="server", remedy=remedy)
        self.status = status


def create(name: str, device: str, config: Mapping[str, Any]) -> Rollout:
    """Create a registered rollout.

    ``config`` holds the arguments of ``RolloutRegistry.create``, with ``model`` as a mapping.
    """
    arguments = {**config, "model": ModelSource(**config["model"])}
    if config.get("lora") is not None:
        arguments["lora"] = LoraConfig(**config["lora"])
    return RolloutRegistry.create(name=name, device=device, **arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until /shutdown, SIGTERM, or (``--with-parent``) until standard input is closed."""
    options = _parser().parse_args(arguments)
    if options.with_parent:
        # With all that the server has started.
        end_group_with(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        config = json.loads(options.config or os.environ.pop(CONFIG))
        device = options.device
        if device == "auto":
            device = RolloutRegistry.resolve(backend=options.name).device
        rollout = create(options.name, device, config)
    except Exception as error:
        # The process that started the server reads the reason in the announcement.
        log.exception("the rollout did not start")
        _announce(options.announce, {"error": error_to_json(error)})
        return 1
    service = Service(rollout, device, name=options.name, arguments=config)
    try:
        with Server((options.host, options.port), service) as server:
            _announce(options.announce, {"url": server.url, "pid": os.getpid()})
            server.serve_forever(poll_interval=0.1)
    finally:
        service.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollout_fp8.remote.server", description="A rollout in a process of its own."
    )
    parser.add_argument(
        "--name", required=True, help="of a registered rollout: vllm, sglang, local"
    )
    parser.add_argument(
        "--device", default="auto", help="cuda, cpu, or auto: the first of them that is available"
    )
    parser.add_argument(
        "--config",
        required=CONFIG not in os.environ,
        help="JSON: the arguments of the rollout's class (model, batch_size, dtype, …); "
        f"if not given, in the variable {CONFIG}",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where it listens")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument(
        "--announce", type=Path, help="a file that gets the URL, or the error, as JSON"
    )
    parser.add_argument(
        "--with-parent",
        action="store_true",
        help="end when standard input is closed; needs a session of its own",
    )
    return parser


def _announce(path: Path | None, news: Mapping[str, Any]) -> None:
    print(json.dumps(news, default=str), flush=True)
    if path is not None:
        part = path.with_suffix(".part")
        part.write_bytes(dumps(news))
        # The file appears whole or not at all.
        part.replace(path)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(main())
