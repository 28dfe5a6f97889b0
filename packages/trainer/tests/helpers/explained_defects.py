"""Engines and rollouts with one defect each, for which ``engine-train explain`` names the cause.

The engines are engine-fsdp but for a defect in inference, so that the update is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from rollouts_with_defects import ForgetsTemperature, Renormalizes

from engine_api.registry import EngineRegistry, RolloutRegistry
from engine_api.rollout import Completion, SamplingParams, SyncResult
from engine_api.weights import WeightExport
from engine_fsdp.engine import FSDPEngineWithLMHead
from engine_fsdp.plugin import PLUGIN
from engine_trainer.rollouts.local import LocalRollout

USER, ASSISTANT = 4, 5
"""Ids of the tokens that open a turn in the tests' chat template."""


class _Defective(FSDPEngineWithLMHead):
    """The engine with a defect while nothing is trained."""

    def forward_step(self, batch: Any, **given: Any) -> Any:
        if torch.is_grad_enabled():
            return super().forward_step(batch, **given)
        return self.forward_wrongly(batch, **given)

    def forward_wrongly(self, batch: Any, **given: Any) -> Any:
        with self.defect():
            return super().forward_step(batch, **given)

    @contextmanager
    def defect(self) -> Iterator[None]:
        yield

    @contextmanager
    def changed(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]):
        """Give weights other values for a while."""
        before = [tensor.clone() for tensor in tensors]
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        try:
            yield
        finally:
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.module.lm.named_parameters()}


class HalvesPositions(_Defective):
    """Rotary positions are divided by two."""

    @contextmanager
    def defect(self) -> Iterator[None]:
        rotary = self.module.lm.model.rotary_emb
        with self.changed([rotary.inv_freq], [rotary.inv_freq / 2]):
            yield


class ForgetsTheTemperature(_Defective):
    """Log-probs are those at temperature 1."""

    def forward_wrongly(self, batch: Any, **given: Any) -> Any:
        return super().forward_wrongly(batch, **(given | {"temperature": 1.0}))


class JoinsDocuments(_Defective):
    """Documents of a batch attend to the ones before them."""

    def forward_wrongly(self, batch: Any, **given: Any) -> Any:
        ends = batch.cu_seqlens[[0, -1]]
        return super().forward_wrongly(replace(batch, cu_seqlens=ends), **given)


class TiesTheHead(_Defective):
    """The embedding is the head of a model that has its own."""

    @contextmanager
    def defect(self) -> Iterator[None]:
        weights = self.weights
        embedding = weights["model.embed_tokens.weight"]
        with self.changed([weights["lm_head.weight"]], [embedding]):
            yield


class DoublesTheAdapter(_Defective):
    """The adapter is added with twice its scale."""

    @contextmanager
    def defect(self) -> Iterator[None]:
        found = [value for name, value in self.weights.items() if "lora_B" in name]
        with self.changed(found, [2 * value for value in found]):
            yield


class ComputesInBfloat16(_Defective):
    """The computation is in bfloat16 where float32 is asked for."""

    @contextmanager
    def defect(self) -> Iterator[None]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield


class HasAnotherEpsilon(_Defective):
    """Norms have an epsilon of 1e-3."""

    @contextmanager
    def defect(self) -> Iterator[None]:
        norms = [m for m in self.module.lm.modules() if hasattr(m, "variance_epsilon")]
        before = [norm.variance_epsilon for norm in norms]
        for norm in norms:
            norm.variance_epsilon = 1e-3
        try:
            yield
        finally:
            for norm, epsilon in zip(norms, before, strict=True):
                norm.variance_epsilon = epsilon


class SkipsALayer(_Defective):
    """The MLP of the second layer adds nothing, a defect that no cause of the table is."""

    @contextmanager
    def defect(self) -> Iterator[None]:
        down = self.weights["model.layers.1.mlp.down_proj.weight"]
        with self.changed([down], [torch.zeros_like(down)]):
            yield


class ServesStaleWeights(LocalRollout):
    """The weights of the first sync are served for ever, under the newest version."""

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        result = super().update_weights(export, version)
        served = dict(self._model.named_parameters())
        first = self.__dict__.setdefault(
            "first", {n: p.detach().clone() for n, p in served.items()}
        )
        for name, parameter in served.items():
            parameter.data.copy_(first[name])
        return result


class DropsTheTemplate(LocalRollout):
    """The user's text is served without its chat template."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Completion]:
        plain = [ids[list(ids).index(USER) + 1 : list(ids).index(ASSISTANT)] for ids in prompts]
        return super().generate(plain, sampling)


ENGINES = {
    one.__name__: one
    for one in (
        HalvesPositions,
        ForgetsTheTemperature,
        JoinsDocuments,
        TiesTheHead,
        DoublesTheAdapter,
        ComputesInBfloat16,
        HasAnotherEpsilon,
        SkipsALayer,
    )
}
ROLLOUTS = {
    one.__name__: one
    for one in (ServesStaleWeights, DropsTheTemplate, ForgetsTemperature, Renormalizes)
}


@contextmanager
def offered() -> Iterator[None]:
    """Offer all of them to this process, each by its name."""
    for name, engine in ENGINES.items():
        EngineRegistry.register(
            backend=name, device="cpu", capabilities=PLUGIN.capabilities, options=PLUGIN.options
        )(engine)
    for name, rollout in ROLLOUTS.items():
        RolloutRegistry.register(backend=name, device="cpu")(rollout)
    try:
        yield
    finally:
        for name in ENGINES:
            EngineRegistry.unregister(name)
        for name in ROLLOUTS:
            RolloutRegistry.unregister(name)
