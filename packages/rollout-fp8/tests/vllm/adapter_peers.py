"""Functions that the tests of adapter syncs call in ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm_peers import DEVICE, GREEDY, PROMPTS, SAMPLED, SMALL, assert_gone, error_of, weights_of

from engine_api.batch import Batch
from engine_api.config import EngineConfig, LoraConfig, ModelSource, OptimizerConfig, Precision
from engine_api.errors import EngineError
from engine_api.losses import sft_loss
from engine_api.registry import EngineRegistry, RolloutRegistry
from engine_api.rollout import Completion, SyncResult

# A rank that vLLM pads, a factor that is no power of two, and one projection of three that share a
# parameter left out.
LORA = LoraConfig(
    rank=3, alpha=10.0, target_modules=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
)
FOLDERS = "rollout-adapter-*"
# vLLM's kernels for adapters on CUDA have no float32.
DTYPE = "float32" if DEVICE == "cpu" else "bfloat16"


@contextmanager
def trained(model: str) -> Iterator[Any]:
    """Return fsdp2 with an adapter of ``LORA`` on the model."""
    config = EngineConfig(
        model=ModelSource(path=model),
        optimizer=OptimizerConfig(lr=0.05, clip_norm=None),
        lora=LORA,
        precision=Precision(compute=DTYPE),
    )
    engine = EngineRegistry.create(backend="fsdp2", device=DEVICE, config=config)
    engine.initialize()
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def serving(model: str, lora: LoraConfig | None, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a rollout and its exporter."""
    source = ModelSource(path=model)
    rollout = RolloutRegistry.create(
        name="vllm",
        device=DEVICE,
        model=source,
        pad_token_id=0,
        lora=lora,
        dtype=DTYPE,
        enforce_eager=True,
        **(SMALL | options),
    )
    exporter = RolloutRegistry.create_exporter(
        name="vllm", device=DEVICE, model=source, dtype=DTYPE, lora=lora
    )
    weights = weights_of(rollout)
    try:
        yield rollout, exporter
    finally:
        rollout.close()
        exporter.close()
    assert_gone(weights)


def step(engine: Any) -> None:
    """Make an update that moves the adapter far enough to be seen."""
    ids = torch.arange(40).reshape(4, 10) + 5
    batch = Batch.pack(
        [{"input_ids": row, "loss_weight": torch.tensor([0.0] + [1.0] * 9)} for row in ids]
    )
    engine.train_batch(batch, sft_loss)


@dataclass(frozen=True, kw_only=True)
class Said:
    """Results of one version of the weights.

    The sync's report, greedy and drawn tokens, and the engine's log-probs of the drawn tokens.
    """

    sync: SyncResult
    greedy: list[Completion]
    drawn: list[Completion]
    told: list[list[float]]


def ask(engine: Any, rollout: Any, exporter: Any) -> Said:
    sync = rollout.update_weights(exporter.export(engine), engine.weight_version)
    greedy, drawn = rollout.generate(PROMPTS, GREEDY), rollout.generate(PROMPTS, SAMPLED)
    return Said(sync=sync, greedy=greedy, drawn=drawn, told=told_of(engine, drawn))


def told_of(engine: Any, drawn: Sequence[Completion]) -> list[list[float]]:
    """Return the engine's current log-probs of the tokens."""
    asked = Batch.pack(
        [{"input_ids": torch.tensor([*PROMPTS[c.prompt_index], *c.tokens])} for c in drawn]
    )
    rows = engine.infer_batch(asked).log_probs.split(
        [len(PROMPTS[c.prompt_index]) + len(c.tokens) for c in drawn]
    )
    return [row[-len(c.tokens) :].tolist() for row, c in zip(rows, drawn, strict=True)]


class Changed:
    """Engine whose adapter's export was changed on its way."""

    def __init__(
        self, engine: Any, change: Callable[[str, Tensor], tuple[str, Tensor] | None]
    ) -> None:
        self._engine, self._change = engine, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def get_per_tensor_param(self, **arguments: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._engine.get_per_tensor_param(**arguments):
            changed = self._change(name, tensor)
            if changed is not None:
                yield changed


ONE = "base_model.model.model.layers.1.mlp.gate_proj.lora_B.weight"
BAD: Mapping[str, Callable[[str, Tensor], tuple[str, Tensor] | None]] = {
    "name": lambda n, t: (n.replace("gate_proj", "gate_prj") if n == ONE else n, t),
    "shape": lambda n, t: (n, t[:-1] if n == ONE else t),
    "nan": lambda n, t: (n, t * float("nan") if n == ONE else t),
    "missing": lambda n, t: None if n == ONE else (n, t),
}


def adapters(model: str) -> dict[str, Any]:
    """Run two versions, an adapter that does not fit, a sleep and refusals.

    Then serve the second version merged, by another server.
    """
    said: dict[str, Any] = {"bad": {}}
    with trained(model) as engine:
        with serving(model, LORA) as (rollout, exporter):
            said["merged export"] = error_of(
                rollout.update_weights, engine.get_per_tensor_param(), 0
            )
            versions: list[Said] = []
            for _ in range(2):
                step(engine)
                versions.append(ask(engine, rollout, exporter))
            said["versions"] = versions
            # What the first version's server drew, and the second version's engine says of it.
            said["outdated"] = replace(versions[0], told=told_of(engine, versions[0].drawn))
            for kind, change in BAD.items():
                stream = exporter.export(Changed(engine, change))
                errors = [
                    error_of(rollout.update_weights, stream, 3),
                    error_of(rollout.generate, PROMPTS, GREEDY),
                ]
                said["bad"][kind] = errors
            said["audit"] = tampered(engine, rollout, exporter)
            said["again"] = ask(engine, rollout, exporter)
            rollout.sleep()
            rollout.wake_up()
            said["woken"] = [ask(engine, rollout, exporter) for _ in range(2)]
            said["folders"] = [*Path("/dev/shm").glob(FOLDERS)]
        with serving(model, None) as (rollout, exporter):
            said["merged"] = ask(engine, rollout, exporter)
    return said


def tampered(engine: Any, rollout: Any, exporter: Any) -> list[EngineError | None]:
    """Run a worker that holds other numbers than it was sent.

    They differ in the adapter that it keeps, and in the memory of the kernels.
    """
    workers, errors = rollout._workers, []
    load = workers._adapter.load
    for place in ("kept", "slot"):

        def spoil(folder: Path, place: str = place) -> str:
            error = load(folder)
            manager = rollout._engine.apply_model(lambda served: served.lora_manager)[0]
            if place == "kept":
                manager.get_adapter(workers._adapter.number).loras[
                    "model.layers.0.self_attn.o_proj"
                ].lora_a[0, 0] += 1
            else:
                manager.modules["model.layers.1.mlp.down_proj"].lora_b_stacked[0][0, 0, 0, 0] += 1
            return error

        workers._adapter.load = spoil
        errors.append(error_of(rollout.update_weights, exporter.export(engine), 3))
        errors.append(error_of(rollout.generate, PROMPTS, GREEDY))
    workers._adapter.load = load
    # An error holds the frames of its callers too, here one with the engine's inside.
    return [error and error.with_traceback(None) for error in errors]


def on_ranks(model: str, **options: Any) -> tuple[Said, list[str]]:
    """Run ranks that train and serve together; names in the second sync's bytes do not matter."""
    with trained(model) as engine, serving(model, LORA, **options) as (rollout, exporter):
        step(engine)
        first = ask(engine, rollout, exporter)
        step(engine)
        return ask(engine, rollout, exporter), [str(c.tokens) for c in first.greedy]


def greedy_tokens(said: Sequence[Said]) -> list[list[list[int]]]:
    return [[c.tokens for c in one.greedy] for one in said]
