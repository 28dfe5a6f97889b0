"""Extension of the class of a vLLM worker, called through vLLM's ``collective_rpc``.

The methods below become methods of the worker (``worker_extension_cls``), so their names begin with
``rollout_fp8_``. ``get_model``, ``reload_weights``, ``rank`` and ``device`` are the worker's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from engine_api.codec import decode, encode
from rollout_fp8.fp8.kv_scales import CacheScales
from rollout_fp8.install.adapter import whole_checksum
from rollout_fp8.install.adapter_session import LoadedAdapter
from rollout_fp8.install.receiver import Receiver
from rollout_fp8.phases import Phases
from rollout_fp8.transports.remote import receive_weights
from rollout_fp8.vllm import cache, private
from rollout_fp8.vllm.packed import PackedReader
from rollout_fp8.vllm.towers import add_level, find_towers
from rollout_fp8.wire.audit import Boxes
from rollout_fp8.wire.format import WirePlan, WireStream


class SyncExtension:
    """Worker's side of the weight sync."""

    _rollout_fp8: Receiver | None = None
    _rollout_fp8_plan: WirePlan | None = None
    _rollout_fp8_aliases: Mapping[str, str]
    _rollout_fp8_scales: CacheScales | None = None

    def rollout_fp8_processes(self) -> tuple[int, int]:
        """Return the process ids of this worker and of its parent.

        The parent is vLLM's own process, unless that is the worker or the rollout's process.
        """
        return os.getpid(), os.getppid()

    def rollout_fp8_positions(self, positions: list[int]) -> bytes:
        """Return the encoded ``ServedPositions`` of this worker's part of the model."""
        worker: Any = self
        with torch.no_grad():
            return encode(private.read_positions(worker.get_model(), positions))

    def rollout_fp8_learn_encoded(self, plan: bytes, aliases: Mapping[str, str]) -> bytes:
        """Do ``rollout_fp8_learn`` between processes, with encoded arguments and results.

        vLLM's own serializer knows no classes of this package, but it passes bytes.
        """
        return encode(self.rollout_fp8_learn(decode(plan), aliases))

    def rollout_fp8_learn(self, plan: WirePlan, aliases: Mapping[str, str]) -> Boxes:
        """Return the served boxes, after learning the places of the tensors if they are unknown.

        ``aliases``: tensors that are served under a second name, by that name, where the server has
        a head of its own.
        """
        worker: Any = self
        if worker.device.type == "cpu":
            private.repair_expansion()
        if self._rollout_fp8_plan is None or self._rollout_fp8_plan.tensors != plan.tensors:
            # Both: a plan that cannot be learnt leaves none.
            self._rollout_fp8 = None
            self._rollout_fp8_plan = None
            model = worker.get_model()
            self._rollout_fp8_aliases = aliases if _has_head(model) else {}
            packed = PackedReader(model) if next(model.parameters()).device.type == "cpu" else None
            self._rollout_fp8 = Receiver(
                model,
                plan,
                self._rollout_fp8_load,
                packed,
                derived=private.derived_weights(model),
                derive=lambda: private.derive_weights(model, worker.model_config.dtype),
            )
            self._rollout_fp8_plan = plan
        assert self._rollout_fp8 is not None
        return self._rollout_fp8.boxes

    def rollout_fp8_sync(self, stream: WireStream) -> tuple[list[int], dict[str, float]]:
        """Install a stream.

        Returns:
            Checksums of the weights that are then served (if it is audited), and seconds by phase.
        """
        assert self._rollout_fp8 is not None, "rollout_fp8_learn comes first"
        phases = Phases(stream.device)
        self._rollout_fp8.sync(stream, phases)
        sums: list[int] = []
        if stream.audit:
            with phases.phase("audit"), torch.no_grad():
                found = self._rollout_fp8.served()
            sums = found.tolist()
        # Queued copies are not served weights yet: the sync ends when the device has finished them.
        return sums, dict(phases.seconds())

    def rollout_fp8_pull(self, address: str) -> None:
        """Install the stream of the sender at ``address``, and send it checksums and seconds."""
        worker: Any = self
        with receive_weights(address, rank=worker.rank, device=worker.device) as stream:
            sums, seconds = self.rollout_fp8_sync(stream)
            stream.answer = sums, {**stream.seconds(), **seconds}

    def rollout_fp8_cache_refusals(self) -> list[str]:
        """Return the reasons why the scales of layers cannot be set, and change nothing."""
        worker: Any = self
        return cache.refusals(private.attention_layers(worker.get_model()))

    def rollout_fp8_observe_cache(self) -> None:
        """Note queries, keys and values of the next passes."""
        worker: Any = self
        if self._rollout_fp8_scales is None:
            layers = private.attention_layers(worker.get_model())
            self._rollout_fp8_scales = CacheScales(
                {name: private.CachedAttention(layer) for name, layer in layers.items()}
            )
        self._rollout_fp8_scales.observe()

    def rollout_fp8_scale_cache(self, tokens: int) -> dict[str, float]:
        """Set the scales of the FP8 cache from the passes since, which had ``tokens`` tokens.

        Returns:
            The scales of this worker's layers, by name and kind.
        """
        assert self._rollout_fp8_scales is not None, "rollout_fp8_observe_cache comes first"
        return self._rollout_fp8_scales.compute(tokens)

    def rollout_fp8_forget_cache(self) -> None:
        """End what ``rollout_fp8_observe_cache`` began (idempotent)."""
        if self._rollout_fp8_scales is not None:
            self._rollout_fp8_scales.forget()

    def rollout_fp8_adapter(self, number: int, audit: bool) -> bytes:
        """Return an encoded ``LoadedAdapter`` with this worker's parts of adapter ``number``."""
        worker: Any = self
        model = worker.get_model()
        if not audit:
            return encode(LoadedAdapter())
        begin = time.perf_counter()
        sums = {
            name: whole_checksum(tensor)
            for name, tensor in private.adapter_tensors(model, number).items()
        }
        wrong = private.stale_slots(model, number)
        return encode(LoadedAdapter(sums=sums, wrong=wrong, seconds=time.perf_counter() - begin))

    def _rollout_fp8_load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        worker: Any = self
        model = worker.get_model()
        private.name_loaders(model)
        kernels: AbstractContextManager[None] = nullcontext()
        if worker.device.type == "cpu":
            private.forget_expert_kernels(model)
        else:
            kernels = private.kept_expert_kernels(model)
        try:
            with kernels, private.ReloadByCopies(model):
                worker.reload_weights(weights_iterator=self._rollout_fp8_named(tensors))
        except BaseException:
            # After any error, the next reload begins from the start.
            private.end_reload(model)
            raise

    def _rollout_fp8_named(
        self, tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        worker: Any = self
        model = worker.get_model()
        wrapped = private.base_layer_names(model)
        towers = find_towers(model)
        for name, tensor in tensors:
            layer, _, leaf = name.rpartition(".")
            served = f"{layer}.base_layer.{leaf}" if layer in wrapped else add_level(name, towers)
            yield served, tensor
            for alias, of in self._rollout_fp8_aliases.items():
                if of == name:
                    yield alias, tensor


def _has_head(model: Any) -> bool:
    """Return whether a served model has a head, which some tied models (Gemma 2, Cohere) do not.

    Those multiply with their embedding whatever the configuration says.
    """
    return any(isinstance(module, ParallelLMHead) for module in model.modules())
