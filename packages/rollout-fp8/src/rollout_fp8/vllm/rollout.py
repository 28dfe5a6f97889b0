"""Rollout ``vllm``."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from engine_api.codec import register
from engine_api.comm import GroupComm
from engine_api.config import LoraConfig, ModelSource, check_choice
from engine_api.errors import ConfigError, PeerError, RolloutError, UnsupportedCapability
from engine_api.hf_vision import Vision, read_vision
from engine_api.registry import Resolution
from engine_api.requests import check_images, check_version
from engine_api.rollout import (
    Completion,
    Generation,
    PromptImages,
    SamplingParams,
    SyncResult,
)
from engine_api.weights import WeightExport
from rollout_fp8 import versions
from rollout_fp8.experts import routed_layers
from rollout_fp8.export.exporter import DTYPES, EngineStream, collect_export
from rollout_fp8.fp8.kv_scales import fixed_tokens
from rollout_fp8.fp8.layers import server_config
from rollout_fp8.install.adapter import ExpectedAdapter
from rollout_fp8.install.adapter_session import AdapterParts, AdapterSession
from rollout_fp8.install.positions import Positions
from rollout_fp8.install.session import SyncSession
from rollout_fp8.model import architecture_of, config_of
from rollout_fp8.options import QUANTIZATIONS, VllmOptions
from rollout_fp8.seeds import seeds
from rollout_fp8.transports.remote import RemoteStream
from rollout_fp8.vllm import environment, speculation
from rollout_fp8.wire.expected import Expected

# Before vLLM is imported.
environment.prepare()

from vllm.distributed import get_tp_group  # noqa: E402

from rollout_fp8.vllm import positions  # noqa: E402
from rollout_fp8.vllm import sampling as draws  # noqa: E402
from rollout_fp8.vllm import start as engines  # noqa: E402
from rollout_fp8.vllm.cache import require_served  # noqa: E402
from rollout_fp8.vllm.generation import WHERE, Job, Stepper  # noqa: E402
from rollout_fp8.vllm.images import ImageInputs, digests, require_family  # noqa: E402
from rollout_fp8.vllm.in_flight import check as check_in_flight  # noqa: E402
from rollout_fp8.vllm.private import hold_outputs  # noqa: E402
from rollout_fp8.vllm.processes import Processes, WatchedEngine, processes_of  # noqa: E402
from rollout_fp8.vllm.sync import EXTENSION, InProcess, OtherProcesses, ServedAdapter  # noqa: E402

_DTYPES = ("float32", "bfloat16", "float16")
# Families whose positions in time, height and width take turns in the dimensions of a head.
_INTERLEAVED = ("qwen3_vl", "qwen3_5", "qwen3_5_moe")


class VllmRollout:
    """Rollout by vLLM.

    ``engine_api.rollout.InFlightRollout`` and ``VisionRollout`` define its members.

    The server is built from the model's configuration alone; weights come only from
    ``update_weights``.

    Args:
        resolution: from the registry; its device is used.
        model: a folder or hub id with a ``config.json``.
        pad_token_id: unused, because vLLM pads nothing.
        eos_token_ids: ids that end every completion, in addition to
            ``SamplingParams.stop_token_ids``; those of the model's folder do not.
        batch_size: completions that are generated at the same time.
        dtype: dtype of weights and computation; ``float32``, ``bfloat16`` or ``float16``.
        quantization: ``fp8``: linear layers in e4m3 with one scale for each 128×128 block; or
            ``none``.
        lora: serve the base weights and the adapter that this configuration puts on the model;
            syncs must then come from an exporter with the same configuration. None: merged
            weights.
        routed_experts: True records the experts that serve each token (``Completion``).
        in_flight: True takes weights while it generates (``InFlightRollout``).
        options: see ``VllmOptions``.

    Raises:
        ConfigError: an argument or option is wrong.
        UnsupportedCapability: the experts of a model without any are to be recorded, or on a
            device where vLLM cannot; the model has a vision tower of a family that is not known;
            ``in_flight`` is excluded by another argument.
        PluginUnavailable: vLLM is not installed, or its version was not tested.
        RolloutError: vLLM does not start: too little memory, no FP8 kernels, a model that it
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
        dtype: str = "float32",
        quantization: str = "none",
        lora: LoraConfig | None = None,
        routed_experts: bool = False,
        in_flight: bool = False,
        **options: Any,
    ) -> None:
        del pad_token_id
        check_choice("rollout.options.dtype", dtype, _DTYPES)
        check_choice("rollout.quantization", quantization, QUANTIZATIONS)
        if batch_size < 1:
            raise ConfigError(
                "rollout.batch_size",
                f"expected at least 1, got {batch_size}",
                remedy="give at least 1",
            )
        self.options = VllmOptions.parse(options)
        versions.check(
            "vllm", resolution.device, allow_untested=self.options.allow_untested_version
        )
        speculation.check(
            self.options,
            routed_experts=routed_experts,
            adapter=lora is not None,
            tower=read_vision(config_of(model), WHERE) is not None,
        )
        # No weights yet.
        self.weight_version = -1
        self._eos = tuple(eos_token_ids)
        self._images = self._read_images(model, resolution.device, dtype, lora)
        check_in_flight(
            self.options,
            in_flight=in_flight,
            adapter=lora is not None,
            routed_experts=routed_experts,
            vision=self._images is not None,
        )
        self._in_flight = in_flight
        self.kv_cache_in_flight = self.options.kv_cache_in_flight
        self._expected = Expected.read(model)
        self._model_positions = Positions.read(model)
        config = _quantization_config(model) if quantization == "fp8" else None
        adapter = None if lora is None else self._expected_adapter(model, lora, resolution.device)
        self._plan = engines.Plan(
            device=_device(resolution.device),
            model=model,
            dtype=dtype,
            max_num_seqs=batch_size,
            options=self.options,
            quantization_config=config,
            adapter=None if lora is None or adapter is None else (lora.rank, adapter.layers),
            tied=bool(self._expected.aliases),
            worker_extension=EXTENSION,
            routed_experts=routed_experts,
            has_vision=self._images is not None,
            keys=positions.server_keys(self._model_positions),
        )
        self._routing = routed_layers(model) if routed_experts else None
        if routed_experts and self._plan.device.type == "cpu":
            raise UnsupportedCapability(
                "router_replay",
                where="rollout 'vllm' on cpu",
                why="vLLM records experts in a model runner that needs Triton, which its CPU build "
                "does not have (0.32.0)",
                remedy="rollout.name=local, or rollout.routed_experts=off",
            )
        if routed_experts and self._plan.shared:
            raise ConfigError(
                "rollout.routed_experts",
                "expected off with rollout.options.tensor_parallel_size above 1 in this process, "
                "got replay",
                why="no run has shown that each rank's engine records the experts",
                remedy="rollout.options.executor=workers",
            )
        self._quantized = architecture_of(model) if quantization == "fp8" else None
        self._generators = engines.Generators(self._plan.device)
        # Held while the state changes.
        self._gate = threading.Lock()
        self._not_ready = "no weights have been installed"
        # Version of the weights that the scales of an FP8 cache were computed with.
        self._scales_version = -1
        # Weight syncs so far: features of images are those of one of them.
        self._syncs = 0
        self._asleep: frozenset[str] = frozenset()
        self._engine: Any = None
        self._processes: Processes | None = None
        # The engine for calls, where its processes may end.
        self._server: Any = None
        self._stepper: Any = None
        self._workers: Any = None
        try:
            self._engine = engines.start(self._plan)
            self._server = self._engine
            limits = self._engine.model_config
            self._positions = limits.max_model_len
            self._vocabulary = limits.get_vocab_size()
            self._reach(adapter)
        except BaseException:
            # After an interrupt too, no engine may be left behind.
            self.close()
            raise

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[Completion]:
        """Generate completions as ``VisionRollout.generate`` defines them.

        Global random generators stay as they are.
        """
        with self._generators.own() if self._plan.in_process else nullcontext():
            return self._wait(self._begin(prompts, sampling, images, streamed=False))

    def _wait(self, job: Job) -> list[Completion]:
        """Return the completions of a job, which any error aborts.

        vLLM would continue to generate for no caller. With shared ranks the job stays, because the
        other ranks' steps wait for this one's.
        """
        try:
            return job.result()
        except BaseException:
            if not self._plan.shared:
                job.abort()
            raise

    @property
    def tokens_generated(self) -> int:
        """Number of tokens so far (see ``InFlightRollout.tokens_generated``)."""
        return self._stepper.tokens

    def submit(self, prompt: Sequence[int], sampling: SamplingParams) -> Generation:
        """See ``AsyncRollout.submit``.

        In this process it uses the global random generators.
        """
        if self._plan.shared:
            raise RolloutError(
                "cannot generate in the background",
                where=WHERE,
                why="ranks that serve one replica must ask for the same at the same time",
                remedy="rollout.options.executor=workers",
            )
        return self._begin([prompt], sampling, None, streamed=True)

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        """See ``Rollout.update_weights``.

        Raises:
            RolloutError: tokens are being generated by a rollout without ``in_flight``, and the
                rollout continues to serve; or the sync failed in another way, and nothing is
                served.
        """
        try:
            with self._syncing() as pause:
                check_version(version, self.weight_version, where=WHERE)
                # Whole tensors are collected while completions go on.
                stream = self._checked(export)
                begin = time.perf_counter()
                paused = pause()
                # Other weights may come under the version that the scales are for.
                self._scales_version = -1
                result = self._session.run(stream, version)
                if not paused or self.options.kv_cache_in_flight == "recompute":
                    self._forget_prefixes(preempt=paused)
                self._syncs += 1
                if self._plan.fp8_cache and "kv_cache" not in self._asleep:
                    result = self._with_scales(result, version)
                if paused:
                    seconds = {**result.seconds, "paused": time.perf_counter() - begin}
                    result = replace(result, seconds=seconds)
                self.weight_version = version
                self._stepper.version = version
        except BaseException as error:
            # After any error, because its holder must be able to make another rollout.
            engines.clear_frames(error)
            if self._processes is not None and isinstance(error, PeerError):
                self._processes.explain(error)
            raise
        return result

    def _with_scales(self, result: SyncResult, version: int) -> SyncResult:
        """Compute the scales of the FP8 cache, and return the sync's result with their seconds."""
        begin = time.perf_counter()
        self._scale_cache(version)
        seconds = {**result.seconds, "scales": time.perf_counter() - begin}
        return replace(result, seconds=seconds)

    def _scale_cache(self, version: int) -> None:
        """Compute the scales of the FP8 cache for the served weights, on fixed tokens.

        The cache must be awake. All ranks that serve a replica together call it.
        """
        self._scales_version = -1
        tokens = fixed_tokens(self._vocabulary, self._positions)
        job = Job(self._stepper, self._adapter.request if self._adapter else None)
        params = draws.server_params(
            SamplingParams(max_new_tokens=1, temperature=0.0),
            seed=None,
            stop=(),
            streamed=False,
            normalized=self.options.truncation,
        )
        job.add(0, tokens, params)
        with self._generators.own() if self._plan.in_process else nullcontext():
            try:
                self._workers.observe_cache()
                self._stepper.enter(job)
                self._wait(job)
                self._workers.scale_cache(len(tokens))
            except BaseException:
                # After an interrupt too. The first error is the one to report, whether or not vLLM
                # still responds.
                with suppress(Exception):
                    self._workers.forget_cache()
                raise
        # Keys and values of the fixed tokens, which have other scales.
        self._forget_prefixes()
        self._scales_version = version

    def sleep(self, weights: bool = True, kv_cache: bool = True) -> None:
        """See ``Rollout.sleep``.

        With the weights the caches always sleep; vLLM frees nothing on a CPU.

        When only the caches sleep, vLLM moves the weights to the host and back.

        Raises:
            RolloutError: there is too little memory for the parts that it wakes up on the way; all
                of it sleeps then.
        """
        wanted: set[str] = set()
        if weights:
            wanted = {"weights", "kv_cache"}
        elif kv_cache:
            wanted = {"kv_cache"}
        with self._gate:
            self._check_idle("sleep")
            if wanted <= self._asleep:
                return
            if self._plan.device.type == "cuda":
                if not self.options.memory_saver:
                    raise RolloutError(
                        "cannot sleep",
                        where=WHERE,
                        why="rollout.options.memory_saver is false",
                        remedy="set it, or rollout.sleep=false",
                    )
                if self._asleep:
                    engines.wake_up(self._server, self._plan, self._asleep)
                engines.sleep(self._server, self._plan, weights=weights)
                self._asleep = frozenset({"weights", "kv_cache"})
                if not weights:
                    engines.wake_up(self._server, self._plan, {"weights"})
            self._asleep = frozenset(wanted)
            if weights:
                self._not_ready = "it sleeps"
                self._session.forget_weights()

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        """See ``Rollout.wake_up``.

        Caches wake up with the weights or after them.

        Raises:
            RolloutError: there is too little memory.
        """
        with self._gate:
            self._check_idle("wake up")
            named = (("weights", weights), ("kv_cache", kv_cache))
            wanted = {name for name, wakes in named if wakes} & self._asleep
            if wanted == {"kv_cache"} and "weights" in self._asleep:
                raise RolloutError(
                    "the caches cannot wake up",
                    where=WHERE,
                    why="the weights sleep",
                    remedy="wake up the weights first, or both together",
                )
            if not wanted:
                return
            if self._plan.device.type == "cuda":
                engines.wake_up(self._server, self._plan, wanted)
            self._asleep -= wanted
            if "weights" in wanted:
                self._not_ready = "no weights have been installed since it woke up"
            installed = not self._not_ready and "kv_cache" in wanted
            if self._plan.fp8_cache and installed and self._scales_version != self.weight_version:
                # Weights came while the cache slept.
                self._scale_cache(self.weight_version)

    def close(self) -> None:
        """Close the rollout (idempotent). Unfinished generations are lost."""
        with self._gate:
            if self._engine is None:
                return
            self._not_ready = "the rollout is closed"
            engine = self._engine
            self._engine = None
            if self._processes is not None:
                self._processes.close()
            if self._stepper is not None:
                self._stepper.close()
            if isinstance(self._workers, OtherProcesses):
                self._workers.close()
            # They hold the engine.
            self._server = None
            self._stepper = None
            self._workers = None
            self._session = None
            self._adapter = None
            engines.stop(engine, self._plan, self._asleep)
            # The memory that vLLM sleeps with serves one engine at a time: it must be gone before
            # the next.
            del engine
            engines.free_memory(self._plan)

    def _expected_adapter(
        self, model: ModelSource, lora: LoraConfig, device: str
    ) -> ExpectedAdapter:
        if device == "cpu" and any(".experts." in name for name in self._expected.shapes):
            raise ConfigError(
                "rollout.lora",
                "adapter, for a model with experts on a CPU",
                why="with adapters vLLM computes experts only with Triton kernels, and its CPU "
                "build has none",
                remedy="rollout.lora: merged",
            )
        return ExpectedAdapter.of(model, lora)

    def _checked(self, export: Any) -> Any:
        """Return the stream that the session installs.

        Raises:
            RolloutError: the export has merged weights where an adapter is served, or the reverse.
        """
        if isinstance(export, AdapterParts) != (self._adapter is not None):
            served = "merged weights"
            given = "an adapter"
            if self._adapter is not None:
                served, given = given, served
            raise RolloutError(
                f"the export has {given}, the rollout serves {served}",
                where=WHERE,
                remedy="give exporter and rollout the same lora, or neither",
            )
        known = isinstance(export, EngineStream | RemoteStream | AdapterParts)
        return export if known else self._collect(export)

    def _collect(self, export: WeightExport) -> EngineStream:
        """Return the stream of an export of whole tensors, of any dtype, from another exporter."""
        return collect_export(
            self._expected.checked(export),
            device=self._plan.device,
            dtype=DTYPES[self._plan.dtype],
            architecture=self._quantized,
            scales=self.options.scales,
            audit=self.options.audit,
        )

    def _read_images(
        self, model: ModelSource, device: str, dtype: str, lora: LoraConfig | None
    ) -> ImageInputs | None:
        """Return the side of a model's images, or None for a model without a vision tower."""
        config = config_of(model)
        # Videos are not taken: the text behind one of Qwen2.5-VL has other positions in vLLM 0.32,
        # from the largest one of the prompt before it, than in the engine and transformers.
        vision: Vision | None = read_vision(config, WHERE)
        if vision is None:
            return None
        family = str(config.model_type)
        require_family(family, device, WHERE)
        sections = getattr(config.get_text_config(), "rope_parameters", None) or {}
        if family in _INTERLEAVED and not sections.get("mrope_interleaved"):
            raise ConfigError(
                "engine.model.path",
                f"expected mrope_interleaved: true in rope_parameters of a {family}, got "
                f"{sections.get('mrope_interleaved')!r}",
                why="transformers interleaves the positions of this family in any case, and vLLM "
                "by this key alone",
                remedy="add it to text_config.rope_parameters in config.json, as published models "
                "have it",
            )
        if not self.options.truncation:
            raise ConfigError(
                "rollout.options.truncation",
                "expected true for a model with a vision tower, got false",
                why="the processor that truncates also leaves out tokens of images",
                remedy="set it to true, or leave it out",
            )
        if lora is not None:
            raise ConfigError(
                "rollout.lora",
                "expected merged for a model with a vision tower, got adapter",
                why="no test has compared an adapter beside a tower",
                remedy="rollout.lora: merged",
            )
        return ImageInputs(vision, family, DTYPES[dtype])

    def _forget_prefixes(self, *, preempt: bool = False) -> None:
        """Drop keys and values of the old weights.

        ``preempt``: also those of unfinished completions, which vLLM computes again.
        """
        if self._images is not None:
            # Features of images, too, which the tower of the old weights has computed.
            self._server.reset_encoder_cache()
        # Sleeping caches too: vLLM is notified of sleep only on CUDA; on other devices caches
        # survive it.
        refused: RuntimeError | None = None
        try:
            done = self._server.reset_prefix_cache(reset_running_requests=preempt)
        # vLLM raises it for unfinished completions, and returns False for others.
        except RuntimeError as error:
            done, refused = False, error
        if not done:
            raise RolloutError(
                "vLLM keeps keys and values of the old weights",
                where=WHERE,
                why="" if refused is None else str(refused),
                remedy="close this rollout and create another one",
            ) from refused

    def _reach(self, adapter: ExpectedAdapter | None) -> None:
        salted = self._in_flight and self.options.kv_cache_in_flight == "keep"
        # vLLM reports a token's experts in the output of its step.
        held = None if self._plan.routed_experts else hold_outputs(self._engine)
        self._stepper = Stepper(self._engine, self._plan.device, salted=salted, held=held)
        if not self._plan.in_process:
            self._processes = processes_of(self._engine, self._stepper.fail)
            self._server = WatchedEngine(self._engine, self._processes)
        self._adapter = ServedAdapter(self._server) if adapter is not None else None
        self._workers = self._reach_workers()
        positions.require_served(self._model_positions, self._workers, self._positions)
        if self._plan.fp8_cache:
            # Before the first sync, which may take minutes.
            require_served(self._workers.cache_refusals())
        self._session: Any = (
            SyncSession(self._workers, self._expected)
            if adapter is None
            else AdapterSession(
                self._workers, adapter, audit=self.options.audit, model=self._expected
            )
        )

    def _reach_workers(self) -> InProcess | OtherProcesses:
        aliases = self._expected.aliases if self._plan.untie else {}
        parallel = self.options.tensor_parallel_size
        call = self._server.collective_rpc
        if self._plan.in_process:
            return InProcess(call, aliases, parallel, self._adapter)
        return OtherProcesses(call, aliases, parallel, self._plan.device, self._adapter)

    def _begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        images: Sequence[PromptImages | None] | None,
        *,
        streamed: bool,
    ) -> Job:
        with self._gate:
            self._check_ready()
            rows = [_Asked(prompts, sampling, images)]
            own_index = 0
            if self._plan.shared:
                rows, own_index = _gather_requests(rows[0])
            for row in rows:
                self._check(row)
            adapter = self._adapter.request if self._adapter else None
            job = Job(
                self._stepper,
                adapter,
                self._routing,
                counted=self.options.speculative != "none",
            )
            for rank, row in enumerate(rows):
                self._fill(job, row, streamed=streamed, kept=rank == own_index)
            self._stepper.enter(job)
            return job

    def _check(self, asked: _Asked) -> None:
        """Raise ``RolloutError`` that names the prompt for a request that cannot be generated."""
        draws.check_request(
            asked.prompts,
            asked.sampling,
            where=WHERE,
            positions=self._positions,
            vocabulary=self._vocabulary,
            truncation=self.options.truncation,
        )
        vision = None if self._images is None else self._images.vision
        check_images(asked.prompts, asked.images, vision, WHERE)

    def _fill(self, job: Job, asked: _Asked, *, streamed: bool, kept: bool) -> None:
        # Other ids are never drawn, and vLLM refuses them (0.32.0): tokenizers may have more tokens
        # than models.
        ids = {*self._eos, *asked.sampling.stop_token_ids}
        stop = sorted(token for token in ids if 0 <= token < self._vocabulary)
        images = asked.images or [None] * len(asked.prompts)
        names = [[] if one is None else digests(one.media) for one in images]
        rows = seeds(asked.prompts, asked.sampling, names)
        for index, (prompt, row) in enumerate(zip(asked.prompts, rows, strict=True)):
            inputs = self._prompt_inputs(prompt, images[index], names[index])
            for seed in row:
                own = seed if self.options.deterministic or self._plan.shared else None
                params = draws.server_params(
                    asked.sampling,
                    seed=own,
                    stop=stop,
                    # One output for each forward pass, by which the passes are counted, and the
                    # versions of the weights told apart.
                    streamed=streamed or self._in_flight or self.options.speculative != "none",
                    normalized=self.options.truncation,
                )
                job.add(index, prompt, params, inputs=inputs, kept=kept)

    def _prompt_inputs(
        self, prompt: Sequence[int], images: PromptImages | None, names: Sequence[str]
    ) -> Any:
        """Return a prompt with images as vLLM's engine takes it, or None for one without any."""
        if images is None or self._images is None:
            return None
        # vLLM keeps features by name: those of a tower before a sync have another one.
        return self._images.prompt(prompt, images, [f"{name}-{self._syncs}" for name in names])

    @contextmanager
    def _syncing(self) -> Iterator[Callable[[], bool]]:
        """Block new generations during the context, and after it if the sync failed.

        The context's value is a function that pauses unfinished completions of a rollout with
        ``in_flight``, and returns whether there are any. They continue after the context, or fail
        with the sync.
        """
        with self._gate:
            if self._in_flight:
                self._check_open("take weights")
            else:
                self._check_idle("take weights")
            if "weights" in self._asleep:
                raise RolloutError(
                    "cannot take weights",
                    where=WHERE,
                    why=self._not_ready,
                    remedy="call wake_up first",
                )
            if self._not_ready == _SYNCING:
                raise RolloutError(
                    "cannot take weights", where=WHERE, why=_SYNCING, remedy="wait for it"
                )
            self._not_ready = _SYNCING
        failed = "the last weight sync failed, some weights may be old and some new"
        lost: RolloutError | None = None
        paused = False

        def pause() -> bool:
            nonlocal paused
            if self._stepper.busy and not paused:
                self._stepper.pause()
                paused = True
            return paused

        try:
            yield pause
            failed = ""
        except BaseException as error:
            # After any error, because the completions have no weights to continue with.
            lost = _lost_in_sync(error)
            with suppress(RolloutError):
                # The engine has failed, so that there are none.
                pause()
            raise
        finally:
            with self._gate:
                if self._engine is not None:
                    self._not_ready = failed
                    if paused:
                        self._stepper.resume(lost)

    def _check_ready(self) -> None:
        if self._engine is not None:
            self._stepper.check("generate")
        asleep = "its caches sleep" if self._asleep else ""
        if self._not_ready or asleep:
            remedy = (
                "create another one"
                if self._engine is None
                else "call wake_up, then update_weights"
            )
            raise RolloutError(
                "cannot generate", where=WHERE, why=self._not_ready or asleep, remedy=remedy
            )

        if self._plan.fp8_cache and self._scales_version != self.weight_version:
            raise RolloutError(
                "cannot generate",
                where=WHERE,
                why="the FP8 cache has no scales for the weights, which are those of version "
                f"{self.weight_version}",
                remedy="call update_weights again",
            )

    def _check_open(self, what: str) -> None:
        if self._engine is None:
            raise RolloutError(
                f"cannot {what}",
                where=WHERE,
                why="the rollout is closed",
                remedy="create another one",
            )
        self._stepper.check(what)

    def _check_idle(self, what: str) -> None:
        self._check_open(what)
        if self._stepper.busy:
            raise RolloutError(
                f"cannot {what}",
                where=WHERE,
                why="it is generating",
                remedy="wait for what was submitted, or abort it",
            )


_SYNCING = "a weight sync is running"


def _lost_in_sync(error: BaseException) -> RolloutError:
    """Return the error of completions that were unfinished in a sync that failed."""
    return RolloutError(
        "the generation was lost",
        where=WHERE,
        why=f"the weight sync during it failed: {error}",
        remedy="call update_weights again, then submit it again",
    )


@register
class _Asked(NamedTuple):
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    images: Sequence[PromptImages | None] | None


def _gather_requests(asked: _Asked) -> tuple[list[_Asked], int]:
    """Return the requests of all ranks of this replica, and the index of this rank's.

    Their schedulers must do alike.
    """
    group = get_tp_group()
    # All ranks must draw alike, also where the caller leaves the seed open.
    drawn = asked.sampling
    if drawn.seed is None:
        drawn = replace(drawn, seed=secrets.randbits(62))
    prompts = [list(map(int, prompt)) for prompt in asked.prompts]
    images = None if asked.images is None else list(asked.images)
    rows = GroupComm(group.cpu_group).all_gather(_Asked(prompts, drawn, images))
    return rows, group.rank_in_group


def _quantization_config(source: ModelSource) -> dict[str, Any]:
    config = config_of(source)
    tower = getattr(config, "vision_config", None)
    return server_config(
        architecture_of(source),
        config.get_text_config().num_hidden_layers,
        int(getattr(tower, "depth", 0)),
    )


def _device(name: str) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )
