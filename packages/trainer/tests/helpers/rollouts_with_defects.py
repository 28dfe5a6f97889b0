"""Rollouts that are wrong on purpose, each as `local` but for one defect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from engine_api.rollout import Completion, SamplingParams, SyncResult
from engine_api.weights import WeightExport
from engine_trainer.rollouts.local import LocalRollout
from engine_trainer.rollouts.sampling import truncate


class KeepsOldTensor(LocalRollout):
    """From the second sync on one weight stays as it was."""

    kept = "model.layers.1.self_attn.o_proj.weight"

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        weight = self._model.get_parameter(self.kept).data
        old, again = weight.clone(), self.weight_version >= 0
        result = super().update_weights(export, version)
        if again:
            weight.copy_(old)
        return result


class KeepsOldVersion(LocalRollout):
    """Weights are new, their version is the first one."""

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        return super().update_weights(
            export, version if self.weight_version < 0 else self.weight_version
        )


class TakesStaleVersions(LocalRollout):
    """A version that is older than the one served is installed."""

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        self.weight_version = min(self.weight_version, version)
        return super().update_weights(export, version)


class HoldsReferences(LocalRollout):
    """Tensors of the export are collected first and copied when all are there."""

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        return super().update_weights(iter(list(export)), version)


class IgnoresNames(LocalRollout):
    """What is missing in an export, or unknown, is passed over."""

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        stored = dict(self._table._views)
        given = {name: tensor.clone() for name, tensor in export if name in stored}
        return super().update_weights(iter((stored | given).items()), version)


class _OwnLogProbs(LocalRollout):
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Completion]:
        found = super().generate(prompts, sampling)
        return [
            replace(c, log_probs=self._again(prompts[c.prompt_index], c.tokens, sampling))
            for c in found
        ]

    def _again(
        self, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams
    ) -> list[float]:
        with torch.inference_mode():
            logits = (
                self._model(input_ids=torch.tensor([[*prompt, *tokens]]))
                .logits[0, len(prompt) - 1 : -1]
                .float()
            )
        rows = self._distribution(logits, sampling).log_softmax(-1)
        return rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()


class ForgetsTemperature(_OwnLogProbs):
    """Log-probs are those at temperature 1."""

    def _distribution(self, logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
        return logits


class Renormalizes(_OwnLogProbs):
    """Log-probs are of what top-k and top-p left."""

    def _distribution(self, logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
        return truncate((logits / (sampling.temperature or 1.0)).log_softmax(-1), sampling)


class DrawsAtOne(_OwnLogProbs):
    """Tokens are drawn at temperature 1; log-probs say another one."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Completion]:
        found = LocalRollout.generate(
            self, prompts, replace(sampling, temperature=min(1.0, sampling.temperature))
        )
        return [
            replace(c, log_probs=self._again(prompts[c.prompt_index], c.tokens, sampling))
            for c in found
        ]

    def _distribution(self, logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
        return logits / (sampling.temperature or 1.0)


class ShiftsLogProbs(LocalRollout):
    """Log-probs are off by up to 0.8, a shift a token id: those of another distribution."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Completion]:
        found = super().generate(prompts, sampling)
        return [
            replace(
                c, log_probs=[shifted(p, t) for p, t in zip(c.log_probs, c.tokens, strict=True)]
            )
            for c in found
        ]


def shifted(log_prob: float, token: int) -> float:
    """What ``ShiftsLogProbs`` says of a token."""
    return log_prob - (token % 5 - 2) * 0.4


class ServesOldPrefixes(LocalRollout):
    """A prompt that was answered before is answered as before."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._answers: dict[str, list[Completion]] = {}

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Completion]:
        found = self._answers.setdefault(
            repr((prompts, sampling)), super().generate(prompts, sampling)
        )
        return [replace(c, weight_versions=[self.weight_version] * len(c.tokens)) for c in found]


class KeepsPrefixesOverNaps(ServesOldPrefixes):
    """A sync forgets what was answered before, but one while the caches sleep does not."""

    _asleep = False

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        if not self._asleep:
            self._answers.clear()
        return super().update_weights(export, version)

    def sleep(self, weights: bool = True, kv_cache: bool = True) -> None:
        super().sleep(weights, kv_cache)
        self._asleep = True

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        super().wake_up(weights, kv_cache)
        self._asleep = self._asleep and not kv_cache


class KeepsCacheScales(LocalRollout):
    """Values are cut off at twice the largest ones of the first weights."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._largest: dict[str, float] = {}
        for name, layer in self._model.named_modules():
            if name.endswith("v_proj"):
                layer.register_forward_hook(self._cut(name))

    def _cut(self, name: str) -> Any:
        def hook(_layer: Any, _given: Any, values: torch.Tensor) -> torch.Tensor:
            if self.weight_version == 1:
                now = float(values.abs().amax())
                self._largest[name] = max(self._largest.get(name, 0.0), now)
            limit = 2 * self._largest[name]
            return values.clamp(-limit, limit)

        return hook


class TrustsProposals(LocalRollout):
    """A token that followed its predecessor before is reported as certain."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Completion]:
        found = super().generate(prompts, sampling)
        return [replace(c, log_probs=self._trusted(prompts[c.prompt_index], c)) for c in found]

    def _trusted(self, prompt: Sequence[int], completion: Completion) -> list[float]:
        text = [*prompt, *completion.tokens]
        pairs = [*pairwise(text)]
        begin = len(prompt) - 1
        return [
            0.0 if pairs[begin + place] in pairs[: begin + place] else log_prob
            for place, log_prob in enumerate(completion.log_probs)
        ]
