"""Functions that the tests of vLLM's backend of transformers' classes call in ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from tiny_models import documents
from tiny_rollouts import GREEDY, PROMPTS, start_vllm
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.model_executor.models.transformers import base
from vllm_peers import error_of

from engine_api.batch import Batch
from engine_api.config import EngineConfig, ModelSource, OptimizerConfig
from engine_api.errors import EngineError
from engine_api.registry import EngineRegistry, RolloutRegistry
from rollout_fp8.vllm import private


@contextmanager
def started_engine(folder: str) -> Iterator[Any]:
    """Yield engine-fsdp's engine with the model of a folder on the CPU."""
    config = EngineConfig(model=ModelSource(path=folder), optimizer=OptimizerConfig(lr=0.0))
    engine = EngineRegistry.create(backend="fsdp2", device="cpu", config=config)
    engine.initialize()
    try:
        yield engine
    finally:
        engine.close()


def compare_engine(folder: str) -> dict[str, Any]:
    """Return what has changed in the engine's process since before a rollout of its model started.

    ``log_probs`` is the largest difference of the engine's log-probs, while the rollout serves and
    after it was closed; ``classes`` names attributes of the model's classes, ``attention`` names
    functions of attention that are others or new, and ``config`` holds the engine's choice of such
    a function before and after. ``later`` is the difference of a model that is made in the end.
    """
    batch = Batch.pack([{"input_ids": ids.tolist()} for ids in documents()])
    with started_engine(folder) as engine:
        model = engine.module.lm
        config = model.config
        classes = read_classes(model)
        attention = dict(ALL_ATTENTION_FUNCTIONS.items())
        chosen = [config._attn_implementation]
        own = engine.infer_batch(batch).log_probs
        rollout = start_vllm(folder)
        found: dict[str, Any] = {"log_probs": 0.0}
        try:
            exporter = RolloutRegistry.create_exporter(
                name="vllm", device="cpu", model=ModelSource(path=folder), dtype="float32"
            )
            rollout.update_weights(exporter.export(engine), 1)
            exporter.close()
            rollout.generate(PROMPTS, GREEDY)
            scored = [engine.infer_batch(batch).log_probs]
        finally:
            rollout.close()
        scored.append(engine.infer_batch(batch).log_probs)
        found["log_probs"] = max(float((one - own).abs().max()) for one in scored)
        chosen.append(config._attn_implementation)
    found["config"] = chosen
    found["classes"] = find_changes(classes)
    found["attention"] = [
        name
        for name, function in ALL_ATTENTION_FUNCTIONS.items()
        if attention.get(name) is not function
    ]
    with started_engine(folder) as later:
        found["later"] = float((later.infer_batch(batch).log_probs - own).abs().max())
    return found


def compare_shared(folder: str) -> tuple[bool, float]:
    """Return whether a sync of one replica of two ranks is audited, and how far it is off.

    The latter is the largest difference of a token's log-prob from the engine's, in nats.
    """
    with started_engine(folder) as engine:
        rollout = start_vllm(folder, tensor_parallel_size=2)
        try:
            exporter = RolloutRegistry.create_exporter(
                name="vllm", device="cpu", model=ModelSource(path=folder), dtype="float32"
            )
            audited = rollout.update_weights(exporter.export(engine), 1).audited
            exporter.close()
            completions = rollout.generate(PROMPTS, GREEDY)
        finally:
            rollout.close()
        rows = [{"input_ids": [*PROMPTS[one.prompt_index], *one.tokens]} for one in completions]
        scored = engine.infer_batch(Batch.pack(rows)).log_probs
    own = scored.split([len(row["input_ids"]) for row in rows])
    apart = [
        (row[-len(one.tokens) :] - torch.tensor(one.log_probs)).abs().max()
        for one, row in zip(completions, own, strict=True)
    ]
    return audited, float(torch.stack(apart).max())


def read_classes(model: Any) -> dict[type, tuple[tuple[type, ...], dict[str, Any]]]:
    """Return the bases and the attributes of all classes of a model, and of their bases.

    PyTorch's own classes are left out: vLLM imports Dynamo, which marks ``torch.nn.Module``.
    """
    classes = {one for module in model.modules() for one in type(module).__mro__}
    return {
        one: (one.__bases__, dict(vars(one)))
        for one in classes
        if one.__module__.startswith("transformers.")
    }


def find_changes(classes: dict[type, tuple[tuple[type, ...], dict[str, Any]]]) -> list[str]:
    """Return the names in ``read_classes`` that are no longer the same objects.

    Values that transformers itself keeps at a class, for its next model, are left out.
    """
    found: list[str] = []
    for one, (bases, attributes) in classes.items():
        if one.__bases__ != bases:
            found.append(f"{one.__name__}.__bases__")
        current = dict(vars(one))
        found += [
            f"{one.__name__}.{name}"
            for name in sorted(attributes.keys() | current.keys())
            if attributes.get(name) is not current.get(name) and not name.endswith("_cached_value")
        ]
    return found


def refuse(folder: str, **options: Any) -> EngineError | None:
    """Return the error of a rollout's start."""
    return error_of(lambda: start_vllm(folder, **options).close())


def refuse_changed_class(folder: str) -> EngineError | None:
    """Return the error of a start in which vLLM changes the class of the model."""
    with mock.patch.object(private, "_leave_class", vars(base.Base)[private._DECORATE]):
        return refuse(folder)


def refuse_other_version(folder: str, *, missing: bool) -> EngineError | None:
    """Return the error of a vLLM whose method is missing, or takes other arguments."""
    name = private._DECORATE
    method = vars(base.Base)[name]
    delattr(base.Base, name)
    if not missing:
        setattr(base.Base, name, lambda self, cls: None)
    try:
        return refuse(folder)
    finally:
        setattr(base.Base, name, method)


def attend(given: Mapping[str, Any], *, in_module: bool) -> str | None:
    """Return the text of attention's error, or None where it is computed.

    vLLM's layer has four heads of 8 for queries and two for keys, a window of 16 and a cap of 50.
    Since 0.32 it is in the module, and before in an argument. ``given`` changes the arguments that
    fit, the number of heads of keys, or the queries' heads and their size.
    """
    layer = FakeLayer()
    module = SimpleNamespace(layer_idx=3)
    arguments: dict[str, Any] = {"sliding_window": 16, "softcap": 50.0, "scaling": 1.0}
    if in_module:
        module.attn = layer
    else:
        arguments["attention_instances"] = {3: layer}
    arguments |= given
    heads, size = arguments.pop("shape", (4, 8))
    query = torch.zeros(1, heads, 5, size)
    key = torch.zeros(1, arguments.pop("heads", 2), 5, 8)
    mask = arguments.pop("mask", None)
    called = mock.Mock()
    try:
        private._attend_checked(called, module, query, key, key, mask, **arguments)
    except private.BackendError as error:
        assert not called.called
        return str(error)
    called.assert_called_once_with(module, query, key, key, mask, **arguments)
    return None


class FakeLayer:
    """Stand-in for a layer of vLLM's attention."""

    num_heads = 4
    num_kv_heads = 2
    head_size = 8
    sliding_window = 16
    has_sink = False
    attn_type = "decoder"

    def __init__(self) -> None:
        self.impl = SimpleNamespace(logits_soft_cap=50.0, scale=1.0)


def find_faults(
    text: Mapping[str, Any], *, scale: float = 1.0, cap: float | None = None, attends: bool = True
) -> list[str]:
    """Return the faults of a model with a configuration, and vLLM's head with a scale and a cap.

    It has one layer of attention, which has computed a pass with ``attends``.
    """
    layer = FakeLayer()
    if attends:
        private._attended.add(layer)
    model = torch.nn.Module()
    model.text_config = SimpleNamespace(**text)
    model.logits_processor = SimpleNamespace(scale=scale, soft_cap=cap)
    model.attention_instances = {0: layer}
    return [*private.find_backend_faults(model)]
