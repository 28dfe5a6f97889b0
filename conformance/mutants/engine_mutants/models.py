"""Defects of what is read from ``config.json``: accepted and not computed, or done otherwise."""

# ruff: noqa: D102 - the class describes the defect of its method

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from engine_api.batch import Batch
from engine_api.config import EngineConfig
from engine_api.results import TokenOutputs
from engine_loopback.engine import LoopbackEngine
from engine_loopback.layers import Params
from engine_loopback.model import Model
from engine_loopback.weights import Weight
from engine_mutants.mutant import mutant
from engine_mutants.refusal import Edits


class Rereads(Edits):
    """An engine that reads keys of ``config.json`` with other values, and accepts any model."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        file = Path(config.model.path) / "config.json"
        if not file.is_file():
            return config
        raw = json.loads(file.read_text())
        reread = {key: value for key, value in self.reread(raw).items() if key in raw}
        overrides = {**config.model.config_overrides, **reread}
        return replace(config, model=replace(config.model, config_overrides=overrides))

    def reread(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


@mutant("models.rope", group="core")
class RopeScalingUnread(Rereads):
    """RoPE's base is read and its kind is not, so that Llama 3's scaling is left out."""

    def reread(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        theta = (raw.get("rope_parameters") or raw).get("rope_theta", 10000.0)
        plain = {"rope_type": "default", "rope_theta": theta}
        return {"rope_parameters": plain, "rope_scaling": None}


@mutant("models.rope", group="core")
class RopeScalingUnreadInOlderKeys(Rereads):
    """``rope_scaling``, the name of the key until transformers 5, is not read."""

    def reread(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        del raw
        return {"rope_scaling": None}


@mutant("models.windows", group="core")
class WindowUnread(Rereads):
    """Layers with a sliding window attend to all earlier tokens."""

    def reread(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        types = ["full_attention"] * raw["num_hidden_layers"]
        return {"use_sliding_window": False, "layer_types": types}


@mutant("models.windows", group="core")
class MistralIsLlama(Rereads):
    """Mistral is built as Llama, which it is but for its window."""

    def reread(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        return {"model_type": "llama"} if raw["model_type"] == "mistral" else {}


@mutant("models.shapes", group="core", part="model")
class OutputBiasesDropped(Model):
    """Biases of attention's output and of the MLP are not added."""

    def with_bias(self, params: Params, name: str, y: Tensor) -> Tensor:
        if name.endswith(("o_proj", "down_proj")):
            return y
        return super().with_bias(params, name, y)


@mutant("models.shapes", group="core")
class HeadWidthDerived(Rereads):
    """The width of heads is hidden size / heads, also where ``config.json`` gives another."""

    def reread(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        return {"head_dim": raw["hidden_size"] // raw["num_attention_heads"]}


@mutant("models.shapes", group="core")
class ActivationIsSilu(Rereads):
    """The MLP's activation is SiLU, whatever ``config.json`` names."""

    def reread(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        del raw
        return {"hidden_act": "silu"}


@mutant("models.files", group="core")
class ScalesUnread(Rereads):
    """Quantized weights are read without their scales."""

    def reread(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        del raw
        return {"quantization_config": None}


@mutant("export.first_values", group="core")
class RandomWeightsOfOneSize(Edits):
    """Random weights have a standard deviation of 0.02, whatever ``initializer_range`` is."""

    def _build_model(self) -> None:
        self.shape = replace(self.shape, std=0.02)
        super()._build_model()


class KeepsDropout(Rereads):
    """An engine that accepts dropout and applies it to what a training pass returns."""

    rate = 0.0

    def reread(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        self.rate = float(raw.get("attention_dropout") or 0) or float(
            raw.get("classifier_dropout") or 0
        )
        return {"attention_dropout": 0.0, "classifier_dropout": 0.0}

    def forward_step(
        self,
        batch: Batch,
        *,
        needs: Sequence[str],
        temperature: float,
        coefficients: Tensor | None = None,
    ) -> TokenOutputs:
        found = super().forward_step(
            batch, needs=needs, temperature=temperature, coefficients=coefficients
        )
        if not torch.is_grad_enabled():
            return found
        kept = {
            name: dropout(value, self.rate)
            for name in ("log_probs", "values")
            if (value := getattr(found, name)) is not None
        }
        return replace(found, **kept)


@mutant("models.dropout", group="core")
class DropoutOfTheModel(KeepsDropout):
    """A language model trains with the dropout of its ``config.json``, so that ratios are not 1."""


@mutant("models.dropout", group="core", model_type="value_model")
class DropoutBeforeTheValues(KeepsDropout):
    """A value model trains with the dropout of its ``config.json``."""


@mutant("models.files", group="core")
class MastersInTheFilesDtype(LoopbackEngine):
    """Masters are bfloat16 where the files are, so that small updates are lost."""

    def make_weight(self, name: str, shape: tuple[int, ...], adapter: bool) -> Weight:
        weight = super().make_weight(name, shape, adapter)
        if self.raw_config.get("dtype") != "bfloat16" or weight.param is None:
            return weight
        narrow = nn.Parameter(weight.held.detach().bfloat16(), requires_grad=weight.trainable)
        return replace(weight, dtype=torch.bfloat16, param=narrow)


@mutant("models.files", group="core")
class OverridesUnread(Edits):
    """``model.config_overrides`` is accepted, and ``config.json`` read as it is."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        return replace(config, model=replace(config.model, config_overrides={}))


@mutant("models.own_code", group="core")
class RunsTheFoldersCode(Edits):
    """Code that a folder's ``config.json`` names is run without ``trust_remote_code``."""

    def edited(self, config: EngineConfig) -> EngineConfig:
        for file in Path(config.model.path).glob("*.py"):
            runpy.run_path(str(file))
        return config
