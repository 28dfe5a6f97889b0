"""Checks of an engine that shares the processes of the policy's: a critic or a teacher."""

from __future__ import annotations

import math

from engine_api.capabilities import refuse_undeclared
from engine_api.errors import ConfigError
from engine_trainer.config import EngineSection, RLConfig
from engine_trainer.config.engine_keys import named_below
from engine_trainer.placement.groups import Launcher, format_sizes, model_sizes


def check_companion(
    engine: EngineSection, config: RLConfig, launcher: Launcher, ranks: int, key: str
) -> None:
    """Refuse an engine that cannot be on the policy's ``ranks``, before anything is loaded.

    Args:
        engine: the whole section of the engine.
        config: the run's configuration.
        launcher: the launcher of the run.
        ranks: number of ranks of the policy's engine.
        key: key of the engine's own section, for errors.

    Raises ``ConfigError``, ``UnsupportedCapability``, ``PluginError``.
    """
    sizes = model_sizes(engine.parallelism)
    each = math.prod(sizes.values())
    shards = engine.parallelism.dp_shard
    if ranks % each or shards not in (-1, ranks // each):
        name = key.removeprefix("algorithm.").partition(".")[0]
        raise ConfigError(
            f"{key}.parallelism",
            f"expected sizes whose product is {ranks}, "
            f"got {format_sizes(sizes | {'dp_shard': shards})}",
            why=f"the {name} is on the ranks of the policy's engine, on all of them",
            remedy="choose sizes whose product is the number of ranks, or dp_shard: -1; "
            "null takes the policy's",
        )
    with named_below(key):
        built = engine.build(seed=config.run.seed, total_steps=1)
        _, capabilities = launcher.resolve(engine, config.engine)
    refuse_undeclared(built, capabilities, engine.backend)
