"""The check that engine and rollout can replay the rollout's experts, before anything is loaded."""

from __future__ import annotations

from engine_api.capabilities import Capability, unsupported
from engine_api.errors import UnsupportedCapability
from engine_trainer.config import RLConfig
from engine_trainer.placement.groups import Launcher
from engine_trainer.placement.replica import records_experts

_OFF = "set rollout.routed_experts=off"


def check_replay(config: RLConfig, launcher: Launcher) -> None:
    """Raise ``UnsupportedCapability`` for an engine or a rollout that cannot replay experts.

    The configuration is the run's, with a rollout in place of ``auto``. A rollout that is not
    installed here may be where the replicas run, and is asked there.
    """
    if config.rollout.routed_experts == "off":
        return
    _, capabilities = launcher.resolve(config.engine)
    if Capability.ROUTER_REPLAY not in capabilities:
        raise unsupported(Capability.ROUTER_REPLAY, config.engine.backend, capabilities, off=_OFF)
    name = config.rollout.name
    if not records_experts(name):
        raise UnsupportedCapability(
            Capability.ROUTER_REPLAY,
            where=f"rollout {name!r}",
            why="it records no experts",
            remedy=f"use rollout.name=local or vllm, or {_OFF}",
        )
