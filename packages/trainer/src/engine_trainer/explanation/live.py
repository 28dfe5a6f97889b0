"""The engine of a configuration as it computes now: log-probs, and hidden states where it has any.

A contract promises no hidden states. An engine whose model is a module of torch with layers called
``layers.0``, ``layers.1`` and so on, as transformers, torchtitan and Megatron name them, shows them
through hooks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from engine_api.batch import ROUTED_EXPERTS, Batch
from engine_api.config import Parallelism
from engine_api.contract import Engine
from engine_api.registry import EngineRegistry
from engine_trainer.config import RLConfig
from engine_trainer.config.engine_keys import POLICY, named_below
from engine_trainer.config.sections import KEPT_ACTIVATIONS, MemorySection

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)")
States = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LiveReading:
    """The log-probs and hidden states that the engine computes now."""

    log_probs: Sequence[torch.Tensor]
    """Log-probs of each document's tokens ``[L]``, of all documents in one batch."""

    states: States = field(default_factory=States)
    """Hidden states ``[L, C]`` of the first document, before and after each layer.

    Empty where the engine has no layers to be seen.
    """


def read_live(
    config: RLConfig,
    checkpoint: Path | None,
    documents: Sequence[Sequence[int]],
    experts: Sequence[torch.Tensor | None],
) -> LiveReading:
    """Compute documents with the engine of a configuration on one rank.

    Args:
        config: the configuration; its engine, device, dtypes and options count.
        checkpoint: the checkpoint whose weights are loaded; None for the model as it is.
        documents: token ids ``[L]`` of each document.
        experts: experts ``[L, layers, k]`` of each document that the engine replays, in all of them
            or in none.

    Raises ``EngineError`` where the engine does not run here, or refuses the model.
    """
    # Nothing is trained, so that no activations are kept.
    options = {name: one for name, one in config.engine.options.items() if name != KEPT_ACTIVATIONS}
    section = replace(
        config.engine,
        options=options,
        parallelism=Parallelism(),
        memory=MemorySection(max_tokens=sum(len(ids) for ids in documents)),
    )
    with named_below(POLICY):
        engine: Engine = EngineRegistry.create(
            model_type=section.model_type,
            backend=section.backend,
            device=section.device,
            config=replace(
                section.build(seed=config.run.seed, total_steps=1),
                router_replay=any(one is not None for one in experts),
            ),
        )
    try:
        with named_below(POLICY):
            engine.initialize()
        if checkpoint is not None:
            engine.load_checkpoint(checkpoint)
        temperature = config.rollout.temperature
        whole = _pack(documents, experts)
        together = engine.infer_batch(whole, temperature=temperature).log_probs
        assert together is not None
        with _watched(engine) as states:
            engine.infer_batch(whole.select([0]), temperature=temperature)
        return LiveReading(
            log_probs=together.double().cpu().split([len(ids) for ids in documents]),
            states=[_trim(state, len(documents[0])) for state in states],
        )
    finally:
        engine.close()


def _pack(documents: Sequence[Sequence[int]], experts: Sequence[torch.Tensor | None]) -> Batch:
    return Batch.pack(
        [
            {"input_ids": list(ids)} | ({} if own is None else {ROUTED_EXPERTS: own})
            for ids, own in zip(documents, experts, strict=True)
        ]
    )


@contextmanager
def _watched(engine: Engine) -> Iterator[States]:
    """Keep the input of the first layer and the output of each, in order."""
    states: States = []
    layers = _layers(engine)

    def keep_input(
        module: torch.nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        del module
        states.append(_tensor((*given, *named.values())))

    def keep_output(module: Any, given: Any, made: Any) -> None:
        del module, given
        states.append(_tensor(made))

    handles = [layer.register_forward_hook(keep_output) for layer in layers]
    if layers:
        handles.append(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _layers(engine: Engine) -> list[torch.nn.Module]:
    """Return the modules of the decoder's layers in order, an empty list where there are none."""
    for value in vars(engine).values():
        if isinstance(value, torch.nn.Module):
            found = {
                int(match[1]): module
                for name, module in value.named_modules()
                if (match := _LAYER.fullmatch(name))
            }
            if found:
                return [found[i] for i in sorted(found)]
    return []


def _tensor(value: Any) -> torch.Tensor:
    """Return the first tensor of a layer's input or result."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().cpu()
    return _tensor(next(v for v in cast("Sequence[Any]", value) if isinstance(v, torch.Tensor)))


def _trim(state: torch.Tensor, length: int) -> torch.Tensor:
    """Return ``[L, C]`` of a state that may have a batch's axis, and padding behind the tokens."""
    return state.reshape(-1, state.shape[-1])[:length]
