"""Client of a rollout that lives in another process, behind ``rollout_fp8.remote.server``.

The client starts the server (in a session of its own, so that it ends with everything that it
started), or connects to a running one. While it waits for an answer it checks whether the server is
still alive: a server that ended or hangs is a ``RolloutError`` within ``silence_s`` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import torch

from engine_api.devices import device_of
from engine_api.errors import (
    ConfigError,
    EngineError,
    PeerError,
    RolloutError,
    UnsupportedCapability,
)
from engine_api.registry import Resolution, RolloutRegistry
from engine_api.requests import check_version
from engine_api.rollout import (
    Completion,
    Generation,
    PromptImages,
    SamplingParams,
    SyncResult,
)
from engine_api.weights import WeightExport
from rollout_fp8.export.exporter import DTYPES, collect_export
from rollout_fp8.install.adapter import folder_of
from rollout_fp8.install.adapter_session import AdapterParts
from rollout_fp8.model import architecture_of
from rollout_fp8.ranks import require_own_devices
from rollout_fp8.remote.endpoint import WHERE, Endpoint, ServerProcess
from rollout_fp8.remote.messages import from_json, images_to_json, to_json
from rollout_fp8.remote.served import require_same
from rollout_fp8.transports.sender import Sender
from rollout_fp8.wire.format import WireStream

LOCAL = ("127.0.0.1", "localhost", "::1")
# Seconds for the server to report why it dropped a sync.
LAST_WORDS_S = 2.0
# Seconds of one request for a result.
WAIT_S = 10.0


class RemoteRollout:
    """Rollout in a server's process.

    ``engine_api.rollout.AsyncRollout`` defines its members.

    Args:
        name: name of the registered rollout that the server hosts.
        device: ``cuda``, ``cpu`` or ``auto``; a server that is started here gets this process's
            current GPU (and its neighbours, ``tensor_parallel_size`` in all).
        arguments: arguments of ``RolloutRegistry.create``; all but ``model`` must be JSON.
        url: URL of a running server that was made with the same arguments; None: start a server,
            and end it in ``close``.
        start_timeout_s: deadline for a server that is started here to answer.
        silence_s: longest time that a server may not answer whether it is alive.
        timeout_s: deadline of each step of a weight sync.

    Raises:
        RolloutError: the server does not start, or does not answer.
        ConfigError: the server at ``url`` was made with other arguments.
        EngineError: the rollout's own constructor raised it.
    """

    def __init__(
        self,
        *,
        name: str,
        device: str,
        arguments: Mapping[str, Any],
        url: str | None = None,
        start_timeout_s: float = 900.0,
        silence_s: float = 30.0,
        timeout_s: float = 300.0,
    ) -> None:
        if arguments.get("routed_experts"):
            raise UnsupportedCapability(
                "router_replay",
                where=f"rollout '{name}-server'",
                why="its responses have no experts",
                remedy=f"use rollout.name={name}, or rollout.routed_experts=off",
            )
        if arguments.get("in_flight"):
            raise UnsupportedCapability(
                "in_flight",
                where=f"rollout '{name}-server'",
                why="no run has shown that its server responds while weights are installed",
                remedy=f"use rollout.name={name}, or overlap.in_flight=false",
            )
        if device == "auto":
            device = RolloutRegistry.resolve(backend=name).device
        self._device = device
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._sender: Sender | None = None
        # True if the last sync failed.
        self._failed = False
        # Version of the last weights that came from here.
        self._sent = -1
        # True if the server has the base weights of an adapter.
        self._has_base = False
        self._process: ServerProcess | None = None
        connects = url is not None
        try:
            if url is None:
                config = {**arguments, "model": asdict(arguments["model"])}
                if arguments.get("lora") is not None:
                    config["lora"] = asdict(arguments["lora"])
                size = int(arguments.get("tensor_parallel_size", 1))
                require_own_devices(device, size)
                gpus = size if device != "cpu" else 0
                self._process = ServerProcess(
                    name, device, config, gpus=gpus, timeout_s=start_timeout_s
                )
                url = self._process.url
            self._server = Endpoint(url, silence_s, self._process)
            health = self._server.health()
            if connects:
                require_same(url, name, arguments, health)
            # Used for arguments that the client was not given.
            self._served: Mapping[str, Any] = health["arguments"]
            self.weight_version: int = health["weight_version"]
        except BaseException:
            # After an interrupt too, no server may be left behind.
            if self._process is not None:
                self._process.close()
            raise

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[Completion]:
        """Generate as ``VisionRollout`` says. A hosted rollout without vision refuses images."""
        self._require_weights()
        return _completions(
            self._server.call(
                "generate",
                prompts=_lists(prompts),
                sampling=to_json(sampling),
                images=images_to_json(images),
            )
        )

    def submit(self, prompt: Sequence[int], sampling: SamplingParams) -> Generation:
        """See ``AsyncRollout.submit``. Raises ``RolloutError`` when the hosted rollout cannot."""
        self._require_weights()
        (tokens,) = _lists([prompt])
        return RemoteGeneration(
            self._server,
            self._server.call("submit", prompt=tokens, sampling=to_json(sampling))["id"],
        )

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        """See ``Rollout.update_weights``.

        ``export`` is an exporter's stream, or whole tensors by name.

        ``SyncResult.seconds`` has ``transfer``: the time that the server waited for weights.
        """
        self._server.require_open()
        # Also when the export is bad, which the server never learns.
        self._failed = True
        check_version(version, self._sent, where=WHERE)
        if isinstance(export, AdapterParts):
            result = self._send_adapter(export, version)
        else:
            result = self._send(self._stream(export), version)
        self.weight_version = result.version
        self._sent = result.version
        self._failed = False
        return result

    def _send_adapter(self, parts: AdapterParts, version: int) -> SyncResult:
        """Send the adapter as a folder that the server reads.

        The base weights, if they are to be sent, travel as in any sync.
        """
        if self._server.host not in LOCAL:
            raise ConfigError(
                "rollout.lora",
                "adapter, but the server is on another host",
                why="an adapter is sent as a file in this host's memory",
                remedy="rollout.lora: merged",
            )
        adapter = parts.adapter()
        base = parts.base(needed=not self._has_base)
        self._has_base = False
        with folder_of(adapter) as folder:
            extra = {"folder": str(folder), "sums": dict(adapter.checksums())}
            result = self._send(base, version, adapter=extra)
        self._has_base = True
        return replace(
            result,
            seconds={
                **result.seconds,
                "gather": result.seconds.get("gather", 0.0) + parts.seconds()["gather"],
            },
        )

    def _send(self, stream: WireStream | None, version: int, **extra: Any) -> SyncResult:
        if stream is not None and self._sender is None:
            self._sender = self._open_sender(stream.device)
        address = None if stream is None or self._sender is None else self._sender.address
        with self._server.start(
            "update_weights", address=address, version=version, timeout_s=self._timeout_s, **extra
        ) as pending:

            def watch() -> None:
                if pending.has_response(0):
                    # The answer is an error, unless the server got the last weights a moment ago:
                    # then it is kept for the end.
                    pending.response()
                pending.check()

            try:
                if stream is not None and self._sender is not None:
                    self._sender.send_weights(stream, watch)
            except PeerError:
                if pending.has_response(LAST_WORDS_S):
                    # The answer raises the server's own error.
                    pending.response()
                raise
            return from_json(SyncResult, pending.response())

    def sleep(self, weights: bool = True, kv_cache: bool = True) -> None:
        """See ``Rollout.sleep``."""
        self._has_base = self._has_base and not weights
        self._server.call("sleep", weights=weights, kv_cache=kv_cache)

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        """See ``Rollout.wake_up``."""
        # A server on this GPU cannot use the memory that PyTorch keeps for this process.
        device_of(self._device).empty_cache()
        self._server.call("wake_up", weights=weights, kv_cache=kv_cache)

    def close(self) -> None:
        """End a server that was started here (idempotent)."""
        self._server.closed = True
        if self._sender is not None:
            self._sender.close()
        if self._process is not None:
            self._process.close()

    def _require_weights(self) -> None:
        if self._failed and not self._server.closed:
            raise RolloutError(
                "cannot generate",
                where=WHERE,
                why="the last weight sync failed",
                remedy="call update_weights first",
            )

    def _open_sender(self, device: torch.device) -> Sender:
        here = self._server.host in LOCAL
        if not here:
            return Sender(
                kind="collective", host=self._server.own_address(), timeout_s=self._timeout_s
            )
        return Sender(kind="shm" if device.type == "cpu" else "ipc", timeout_s=self._timeout_s)

    def _stream(self, export: WeightExport) -> WireStream:
        if hasattr(export, "plan"):
            return cast("WireStream", export)
        given = {**self._served, **self._arguments}
        quantized = given.get("quantization", "none") == "fp8"
        return collect_export(
            export,
            device=device_of(self._device).current(),
            dtype=DTYPES[given["dtype"]],
            audit=bool(given.get("audit", True)),
            architecture=architecture_of(given["model"]) if quantized else None,
            scales=given.get("scales", "fp32"),
        )


class VllmServer(RemoteRollout):
    """``rollout.name=vllm-server``: vLLM in its own process, started here or at ``options.url``."""

    def __init__(self, *, resolution: Resolution, url: str | None = None, **arguments: Any) -> None:
        super().__init__(name="vllm", device=resolution.device, arguments=arguments, url=url)


class SglangServer(RemoteRollout):
    """``rollout.name=sglang-server``: SGLang in its own process, started here or at a URL."""

    def __init__(self, *, resolution: Resolution, url: str | None = None, **arguments: Any) -> None:
        super().__init__(name="sglang", device=resolution.device, arguments=arguments, url=url)


class RemoteGeneration:
    """See ``engine_api.rollout.Generation``."""

    def __init__(self, server: Endpoint, number: int) -> None:
        self._server = server
        self._number = number
        self._found: list[Completion] | None = None
        # Kept, because the server reports it once.
        self._failure: EngineError | None = None

    def done(self) -> bool:
        """See ``Generation.done``.

        A failed generation is done too.
        """
        return self._over or self._fetch(0.0)

    def result(self, timeout_s: float | None = None) -> list[Completion]:
        """See ``Generation.result``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._over:
            left = WAIT_S if deadline is None else min(WAIT_S, deadline - time.monotonic())
            if not self._fetch(max(left, 0.0)) and left <= 0:
                raise TimeoutError(f"{WHERE}: nothing arrived within {timeout_s} s")
        if self._found is None:
            assert self._failure is not None, "it is over"
            raise self._failure
        return self._found

    def abort(self) -> None:
        """See ``Generation.abort``."""
        if not self._over:
            self._server.call("abort", id=self._number)

    @property
    def _over(self) -> bool:
        return self._found is not None or self._failure is not None

    def _fetch(self, wait_s: float) -> bool:
        try:
            answer = self._server.call("result", id=self._number, wait_s=wait_s)
        except EngineError as error:
            self._failure = error
            return True
        if answer["done"]:
            self._found = _completions(answer)
        return answer["done"]


def _completions(answer: Mapping[str, Any]) -> list[Completion]:
    return [from_json(Completion, row) for row in answer["completions"]]


def _lists(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[int(token) for token in prompt] for prompt in prompts]
