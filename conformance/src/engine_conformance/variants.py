"""The layouts and options in which a run repeats a few cases in addition to data parallelism.

Most cases train data parallel with the engine's default options. What an adapter, an accumulated
gradient, a metric or a checkpoint is under tensor parallelism, or with another kernel, no other
case shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine_api.capabilities import Capability
from engine_api.config import Parallelism
from engine_api.plugin import EnginePlugin

__all__ = [
    "CASES",
    "CASES_OF_EXPERTS",
    "GROUP",
    "LAYOUTS",
    "Repetition",
    "changed_sizes",
    "name_variant",
    "repetitions",
]

GROUP = "variants"
"""Group of the rows of repeated cases."""

LAYOUTS: Mapping[Capability, Parallelism] = {
    Capability.HSDP: Parallelism(dp_replicate=2),
    Capability.ULYSSES: Parallelism(ulysses=2),
    Capability.TP: Parallelism(tp=2),
    Capability.PP: Parallelism(pp=2),
    Capability.CP: Parallelism(cp=2),
    Capability.EP: Parallelism(ep=2),
}

# Few, since each is repeated in every layout. The cases ``parallel.*`` already train one model in
# it, by ``train_batch``, with the loss that needs the least, and without adapters.
CASES = (
    "train.policy",
    "train.entropy",
    "train.moe",
    "moe.replay",
    "distill.divergence",
    "train.accumulation",
    "steps.clipping",
    "checkpoint.resume_bitwise",
    "checkpoint.into_stepped",
    "export.exact",
    "lora.train",
    "lora.resume",
    "models.windows",
    "rl.ratio_is_one",
)
# An engine may refuse to spread the experts of a model that has none.
CASES_OF_EXPERTS = ("train.moe", "moe.replay", "checkpoint.resume_moe", "export.moe")


@dataclass(frozen=True, kw_only=True, slots=True)
class Repetition:
    """A layout and options in which some cases run once more.

    Attributes:
        name: the name of both in reports, as ``tp=2, sequence_parallel=true``.
        world: the number of ranks.
        layout: the sizes of parallelism.
        options: values of the engine's own options, by name.
        cases: ids of the repeated cases.
    """

    name: str
    world: int
    layout: Parallelism
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cases: tuple[str, ...] = CASES


def changed_sizes(layout: Parallelism) -> dict[str, int]:
    """Return the sizes that differ from the default."""
    default = asdict(Parallelism())
    return {name: size for name, size in asdict(layout).items() if size != default[name]}


def name_variant(layout: Parallelism, options: Mapping[str, Any]) -> str:
    """Return the sizes and options that are not the defaults, in the command line's spelling."""
    sizes = [f"{name}={size}" for name, size in changed_sizes(layout).items()]
    values = [
        f"{name}={value if isinstance(value, str) else json.dumps(value, default=str)}"
        for name, value in options.items()
    ]
    return ", ".join([*sizes, *values])


def repetitions(plugin: EnginePlugin, worlds: Sequence[int]) -> Iterator[Repetition]:
    """Yield every declared layout, then the options that the descriptor lists as variants.

    Each is on the smallest of ``worlds`` with several ranks that the layout fits; options that need
    no layout fall back to one rank. A layout that fits none of them is left out.
    """
    for capability, layout in LAYOUTS.items():
        world = _smallest(worlds, layout)
        if capability in plugin.capabilities and world:
            cases = CASES_OF_EXPERTS if capability == Capability.EP else CASES
            yield Repetition(name=name_variant(layout, {}), world=world, layout=layout, cases=cases)
    for variant in plugin.variants:
        layout = Parallelism(**variant.parallelism)
        world = _smallest(worlds, layout) or (0 if variant.parallelism else min(worlds))
        if world:
            yield Repetition(
                name=name_variant(layout, variant.options),
                world=world,
                layout=layout,
                options=variant.options,
            )


def _smallest(worlds: Sequence[int], layout: Parallelism) -> int:
    """Return the smallest number of several ranks that ``layout`` divides, or 0."""
    ranks = layout.dp_replicate * layout.tp * layout.pp * layout.cp * layout.ulysses
    return min((n for n in worlds if n > 1 and n % ranks == 0 and n % layout.ep == 0), default=0)
