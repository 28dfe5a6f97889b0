"""Rollout ``sglang``."""

from __future__ import annotations

import importlib
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from engine_api.config import ModelSource
from engine_api.errors import EngineError, RolloutError
from engine_api.hf_vision import refuse_vision
from engine_api.registry import Resolution
from engine_api.requests import check_version
from engine_api.rollout import Completion, Generation, SamplingParams, SyncResult
from engine_api.weights import WeightExport
from rollout_fp8 import versions
from rollout_fp8.export.exporter import DTYPES, collect_export
from rollout_fp8.install.session import SyncSession
from rollout_fp8.model import architecture_of, config_of
from rollout_fp8.ranks import require_own_devices
from rollout_fp8.sglang import environment
from rollout_fp8.sglang.generation import SglangGeneration
from rollout_fp8.sglang.host import Host
from rollout_fp8.sglang.options import (
    SglangOptions,
    check_arguments,
    check_cache,
    context_of,
    engine_arguments,
    write_config,
)
from rollout_fp8.sglang.requests import WHERE, check_request, completions_of, request_parameters
from rollout_fp8.sglang.sync import Schedulers
from rollout_fp8.transports.channel import secret
from rollout_fp8.wire.expected import Expected
from rollout_fp8.wire.format import WireStream

# Seconds for the last request to leave the scheduler.
IDLE_S = 60.0
_SYNCING = "a weight sync is running"


class SglangRollout:
    """Rollout by SGLang.

    ``engine_api.rollout.AsyncRollout`` defines its members.

    The server is built from the model's configuration alone; weights come only from
    ``update_weights``. SGLang runs in its own processes on the same GPUs; ``close`` goes through
    its shutdown, which ends *every* child of this process.

    Args:
        resolution: from the registry; the server takes the process's current GPU, and the next ones
            under tensor parallelism.
        model: a folder or hub id with a ``config.json``.
        pad_token_id: unused, because SGLang pads nothing.
        eos_token_ids: ids that end every completion, in addition to
            ``SamplingParams.stop_token_ids``; those of the model's folder do not.
        batch_size: completions that are generated at the same time.
        dtype: dtype of weights and computation.
        quantization: ``fp8``: linear layers in e4m3 with one scale for each 128×128 block; or
            ``none``.
        options: see ``SglangOptions``.

    Raises:
        ConfigError: an argument or option is wrong.
        UnsupportedCapability: the model has a vision tower.
        PluginUnavailable: SGLang is not installed, or its version was not tested.
        RolloutError: SGLang does not start: too little memory, no FP8 kernels, a model that it
            does not know.
    """

    def __init__(
        self,
        *,
        resolution: Resolution,
        model: ModelSource,
        pad_token_id: int,
        eos_token_ids: Sequence[int] = (),
        batch_size: int = 64,
        dtype: str = "bfloat16",
        quantization: str = "none",
        **options: Any,
    ) -> None:
        del pad_token_id
        self.options = SglangOptions.parse(options)
        self._device = _device(resolution.device)
        check_arguments(
            self.options,
            dtype=dtype,
            quantization=quantization,
            batch_size=batch_size,
            device=self._device,
        )
        environment.require_tempered_log_probs()
        versions.check(
            "sglang", resolution.device, allow_untested=self.options.allow_untested_version
        )
        # Its plug-in does not declare vision either.
        refuse_vision(config_of(model), (), WHERE)
        check_cache(self.options, config_of(model))
        # No weights yet.
        self.weight_version = -1
        self._eos = tuple(eos_token_ids)
        self._dtype = DTYPES[dtype]
        self._expected = Expected.read(model)
        self._architecture = architecture_of(model) if quantization == "fp8" else None
        # Held while the state changes.
        self._gate = threading.Lock()
        self._not_ready = "no weights have been installed"
        self._asleep: frozenset[str] = frozenset()
        # Generations; a finished one may still be among them.
        self._running: set[Future[Any]] = set()
        # True if tokens were generated since the caches were flushed.
        self._used = False
        require_own_devices(resolution.device, self.options.tensor_parallel_size)
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-")
        self._host: Host | None = None
        try:
            self._host = self._make_host(model, dtype, batch_size)
            self._host.open()
            self._learn_limits(self._host)
            self._schedulers = Schedulers(
                self._host, self.options.tensor_parallel_size, self._device
            )
            self._session = SyncSession(self._schedulers, self._expected)
        except BaseException:
            # After an interrupt too, no process and no folder may be left behind.
            if self._host is not None:
                self._host.close()
            self._folder.cleanup()
            raise

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Completion]:
        """See ``Rollout.generate``.

        Global random generators stay as they are.
        """
        with self._gate:
            host = self._check_ready()
            check_request(prompts, sampling, vocab_size=self._vocabulary, limit=self._limit)
            generation = self._begin(host, prompts, sampling) if prompts else None
        if generation is None:
            return []
        try:
            return generation.result()
        except BaseException:
            # After Ctrl-C too: the server would continue to generate for no one. A generation that
            # failed leaves the others of its request running.
            generation.abort()
            raise

    def submit(self, prompt: Sequence[int], sampling: SamplingParams) -> Generation:
        """See ``AsyncRollout.submit``."""
        with self._gate:
            host = self._check_ready()
            check_request([prompt], sampling, vocab_size=self._vocabulary, limit=self._limit)
            return self._begin(host, [prompt], sampling)

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        """See ``Rollout.update_weights``. The export is run to its end even when the sync fails.

        Raises:
            RolloutError: tokens are being generated, and the rollout continues to serve; or the
                sync failed in another way, and nothing is served.
        """
        stream: WireStream | None = None
        try:
            with self._syncing(version):
                stream = self._stream(export)
                result = self._session.run(stream, version)
        except BaseException:
            # After any error, because other ranks wait in the export's gathers. The first error is
            # the one to report.
            with suppress(EngineError):
                for _ in stream or export:
                    pass
            raise
        self.weight_version = version
        return result

    def sleep(self, weights: bool = True, kv_cache: bool = True) -> None:
        """See ``Rollout.sleep``.

        Memory that sleeps keeps its addresses, so that CUDA graphs stay valid.
        """
        with self._gate:
            host = self._check_idle("sleep")
            wanted = _tags(weights, kv_cache) - self._asleep
            if not wanted:
                return
            if not self.options.memory_saver:
                raise RolloutError(
                    "cannot sleep",
                    where=WHERE,
                    why="torch_memory_saver was not loaded",
                    remedy="rollout.options.memory_saver=true",
                )
            self._flush(host)
            host.call(lambda: host.engine.release_memory_occupation(tags=sorted(wanted)))
            self._asleep |= wanted
            if "weights" in wanted:
                self._not_ready = "it sleeps"

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        """See ``Rollout.wake_up``."""
        with self._gate:
            host = self._check_idle("wake up")
            wanted = _tags(weights, kv_cache) & self._asleep
            if not wanted:
                return
            # SGLang's processes cannot use the memory that PyTorch keeps for this one.
            torch.cuda.empty_cache()
            host.call(lambda: host.engine.resume_memory_occupation(tags=sorted(wanted)))
            self._asleep -= wanted
            if "weights" in wanted:
                self._not_ready = "no weights have been installed since it woke up"

    def close(self) -> None:
        """Close the rollout (idempotent). Unfinished generations are lost."""
        with self._gate:
            self._not_ready = "the rollout is closed"
            host = self._host
            self._host = None
        if host is not None:
            host.close()
            self._schedulers.close()
            self._folder.cleanup()

    # --- the server -----------------------------------------------------------------------------

    def _make_host(self, model: ModelSource, dtype: str, batch_size: int) -> Host:
        folder = Path(self._folder.name)
        config = write_config(folder, model, self._architecture)
        self._context = context_of(config, self.options)
        self._vocabulary = int(config["vocab_size"])
        arguments = engine_arguments(
            self.options,
            folder=folder,
            source=model,
            dtype=dtype,
            batch_size=batch_size,
            gpu=self._device.index or 0,
            context=self._context,
        )
        return Host(partial(_engine, arguments))

    def _learn_limits(self, host: Host) -> None:
        info: Mapping[str, Any] = host.call(host.engine.get_server_info)
        # Where memory is short SGLang has memory for less than the context, and would silently
        # truncate completions (``init_req_max_new_tokens`` in its scheduler).
        self._limit = min(
            self._context,
            info["max_req_input_len"] - 1,
            info["max_total_num_tokens"] - 2 * info["page_size"],
        )

    def _begin(
        self, host: Host, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> SglangGeneration:
        """Begin a generation with one request for each completion.

        SGLang's ``n`` would give all completions of a request one seed.
        """
        stop = sorted({*self._eos, *sampling.stop_token_ids})
        rids = [uuid.uuid4().hex for _ in range(len(prompts) * sampling.n)]
        request = {
            "input_ids": [list(prompt) for prompt in prompts for _ in range(sampling.n)],
            "sampling_params": request_parameters(prompts, sampling, stop),
            "return_logprob": True,
            "rid": rids,
        }
        self._used = True
        answers = host.spawn(lambda: host.engine.async_generate(**request))
        self._running.add(answers)
        answers.add_done_callback(self._running.discard)
        read = partial(completions_of, n=sampling.n, version=self.weight_version, stop=stop)
        return SglangGeneration(host, answers, rids, read)

    def _flush(self, host: Host) -> None:
        """Drop keys and values of the old weights, once the last request has left the scheduler."""
        deadline = time.monotonic() + IDLE_S
        while self._used:
            self._used = not host.call(host.engine.flush_cache).success
            if self._used and time.monotonic() > deadline:
                raise RolloutError(
                    "SGLang keeps keys and values of the old weights",
                    where=WHERE,
                    why=f"it was not idle within {IDLE_S:.0f} s",
                    remedy="close this rollout and create another",
                )
            if self._used:
                time.sleep(0.01)

    # --- the sync -------------------------------------------------------------------------------

    def _stream(self, export: WeightExport) -> WireStream:
        if hasattr(export, "buckets"):
            return cast("WireStream", export)
        return collect_export(
            self._expected.checked(export),
            device=self._device,
            dtype=self._dtype,
            architecture=self._architecture,
            scales=self.options.scales,
            audit=self.options.audit,
        )

    @contextmanager
    def _syncing(self, version: int) -> Iterator[None]:
        """Block generation during the context, and after it if the sync failed."""
        with self._gate:
            host = self._check_idle("take weights")
            if "weights" in self._asleep or self._not_ready == _SYNCING:
                raise RolloutError(
                    "cannot take weights",
                    where=WHERE,
                    why=self._not_ready,
                    remedy="wait for it" if self._not_ready == _SYNCING else "call wake_up first",
                )
            self._not_ready = _SYNCING
        failed = "the last weight sync failed, some weights may be old and some new"
        try:
            check_version(version, self.weight_version, where=WHERE)
            self._flush(host)
            yield
            failed = ""
        finally:
            with self._gate:
                if failed:
                    self._session.forget()
                if self._host is not None:
                    self._not_ready = failed

    # --- states ---------------------------------------------------------------------------------

    def _check_ready(self) -> Host:
        why = self._not_ready or ("its caches sleep" if self._asleep else "")
        if why or self._host is None:
            remedy = (
                "create another one" if self._host is None else "call wake_up, then update_weights"
            )
            raise RolloutError("cannot generate", where=WHERE, why=why, remedy=remedy)
        self._host.check()
        return self._host

    def _check_idle(self, what: str) -> Host:
        if self._host is None:
            raise RolloutError(
                f"cannot {what}",
                where=WHERE,
                why="the rollout is closed",
                remedy="create another one",
            )
        self._host.check()
        if any(not future.done() for future in tuple(self._running)):
            raise RolloutError(
                f"cannot {what}",
                where=WHERE,
                why="it is generating",
                remedy="wait for what was submitted, or abort it",
            )
        return self._host


def _engine(arguments: Mapping[str, Any]) -> Any:
    # Made before the schedulers are, so that they inherit it.
    secret("channel")
    with environment.kept(arguments["dtype"]):
        return importlib.import_module("sglang").Engine(**arguments)


def _tags(weights: bool, kv_cache: bool) -> frozenset[str]:
    return frozenset(
        name for name, wanted in (("weights", weights), ("kv_cache", kv_cache)) if wanted
    )


def _device(name: str) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )
