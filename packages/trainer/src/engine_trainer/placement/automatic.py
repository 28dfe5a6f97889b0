"""The choice for each value of a configuration that is ``auto``, by device, engine and memory.

It is made before anything is loaded, where the engine will run. An explicit value is never changed,
and engines and rollouts get explicit values alone. On a CPU the choices are the contract's
defaults, so that a run computes there what it did before there were choices.
docs/gpus.md has a table of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine_api.capabilities import Capability
from engine_api.config import Memory, Precision
from engine_api.devices import device_of
from engine_trainer.config import Config, RLConfig
from engine_trainer.config.sections import AUTO, EngineSection, RolloutSection
from engine_trainer.placement import memory
from engine_trainer.placement.activations import WIDTH, Decoder
from engine_trainer.placement.groups import Launcher
from engine_trainer.placement.memory import GIB, FreeMemory
from engine_trainer.placement.replica import records_experts, rollout_device
from engine_trainer.utils.hf_models import has_experts, text_config

SERVERS = ("vllm", "sglang")
"""Rollouts that ``rollout.name: auto`` prefers to ``local``, in order."""

LOGIT_BYTES = 1 << 30
"""Largest size of the logits of a chunk that ``logit_chunk: auto`` chooses."""

# A chunk's number of tokens is a multiple of this, for few shapes of matrix products.
_CHUNK_STEP = 256

# Share of the free memory that the estimate may fill. The rest is for what it does not count: the
# allocator's gaps, workspaces of kernels and communication, and a server that sleeps.
_USABLE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A value that was chosen in place of ``auto``."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}={value} ({self.why})"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The facts beyond the configuration that a choice depends on.

    Attributes:
        device: type of the engine's device.
        capabilities: what the engine declares.
        free: free memory of each rank's device; empty on a CPU.
        unusable: why each server cannot be used on the rollout's device, "" where it can.
    """

    device: str
    capabilities: frozenset[Capability]
    free: Sequence[FreeMemory] = ()
    unusable: Mapping[str, str] | None = None


def settle(config: Config, launcher: Launcher) -> tuple[Config, list[Choice]]:
    """Return the configuration with explicit values in place of ``auto``, and what was chosen.

    Called on all processes of the loop together.

    Raises ``PluginError``, ``ConfigError``.
    """
    section = config.engine
    device, capabilities = launcher.resolve(section)
    rollout = _read_rollout(config)
    around = Surroundings(device=device, capabilities=capabilities)
    if device != "cpu" and _asks_for_survey(config, rollout):
        served = device if rollout is None else rollout_device(rollout, device)
        rows = launcher.survey(device, served, SERVERS)
        unusable = {
            name: next((reasons[name] for _, reasons in rows if reasons[name]), "")
            for name in SERVERS
        }
        around = replace(around, free=[free for free, _ in rows], unusable=unusable)
    choices: list[Choice] = []
    changed: dict[str, Any] = {}
    if rollout is not None and rollout.name == AUTO:
        choice = _choose_rollout(rollout, around)
        choices.append(choice)
        changed["rollout"] = rollout = replace(rollout, name=choice.value)
    engine, found = _settle_engine(section, around, config, rollout)
    changed["engine"] = engine
    choices += found
    if isinstance(config, RLConfig):
        algorithm = config.algorithm
        critic, teacher = algorithm.critic, algorithm.teacher

        def settle_companion(whole: EngineSection, key: str) -> dict[str, Any]:
            _, own = launcher.resolve(whole)
            surroundings = replace(around, capabilities=own)
            settled, found = _settle_engine(whole, surroundings, config, rollout, prefix=key)
            choices.extend(found)
            return {"precision": settled.precision, "memory": settled.memory}

        if critic is not None:
            explicit = settle_companion(critic.engine(section), "algorithm.critic")
            algorithm = replace(algorithm, critic=replace(critic, **explicit))
        if teacher is not None and teacher.engine is not None:
            own_engine = teacher.engine
            explicit = settle_companion(own_engine.engine(section), "algorithm.teacher.engine")
            own_engine = replace(own_engine, **explicit)
            algorithm = replace(algorithm, teacher=replace(teacher, engine=own_engine))
        changed["algorithm"] = algorithm
    return replace(config, **changed), choices


def settle_precision(
    section: EngineSection, device: str, capabilities: Collection[Capability]
) -> tuple[EngineSection, list[Choice]]:
    """Return the section with an explicit ``precision.compute``, and the choice, if any."""
    if section.precision.compute != AUTO:
        return section, []
    choice = _choose_compute(device, capabilities)
    precision = replace(section.precision, compute=choice.value)
    return replace(section, precision=precision), [choice]


def _read_rollout(config: Config) -> RolloutSection | None:
    """Return the section of a rollout that the run will have, or None."""
    # SFT generates only where a reward scores what is generated.
    if getattr(config, "reward", None) is None:
        return None
    section: RolloutSection | None = getattr(config, "rollout", None)
    return section


def _asks_for_survey(config: Config, rollout: RolloutSection | None) -> bool:
    sections = [config.engine.memory]
    critic = config.algorithm.critic if isinstance(config, RLConfig) else None
    if critic is not None and critic.memory is not None:
        sections.append(critic.memory)
    recomputes = any(one.recompute == AUTO for one in sections)
    return recomputes or (rollout is not None and rollout.name == AUTO)


def _choose_rollout(section: RolloutSection, around: Surroundings) -> Choice:
    device = rollout_device(section, around.device)
    if device == "cpu":
        return Choice(key="rollout.name", value="local", why="on a CPU")
    if Capability.EXPORT_SHARDS not in around.capabilities:
        why = f"the engine declares no {Capability.EXPORT_SHARDS}, which servers need"
        return Choice(key="rollout.name", value="local", why=why)
    reasons = dict(around.unusable or {})
    if section.routed_experts == "replay":
        reasons |= {
            name: "it records no experts"
            for name, reason in reasons.items()
            if not reason and not records_experts(name)
        }
    passed: list[str] = []
    for name in SERVERS:
        if name in reasons and not reasons[name]:
            why = "; ".join(["installed, and supports " + device, *passed])
            return Choice(key="rollout.name", value=name, why=why)
        passed.append(f"not {name}: {reasons.get(name, 'unknown')}")
    return Choice(key="rollout.name", value="local", why="; ".join(passed))


def _settle_engine(
    section: EngineSection,
    around: Surroundings,
    config: Config,
    rollout: RolloutSection | None,
    *,
    prefix: str = "engine",
) -> tuple[EngineSection, list[Choice]]:
    section, choices = settle_precision(section, around.device, around.capabilities)
    accelerated = around.device != "cpu"
    chosen: dict[str, Any] = {}

    def choose(name: str, value: Any, why: str) -> None:
        chosen[name] = value
        choices.append(Choice(key=f"engine.memory.{name}", value=value, why=why))

    text = text_config(section.model) if accelerated else None
    if section.memory.compile == AUTO:
        choose("compile", *_choose_compile(section, around, text))
    if section.memory.logit_chunk == AUTO:
        choose("logit_chunk", *_choose_chunk(section, text))
    section = replace(section, memory=replace(section.memory, **chosen))
    if section.memory.recompute == AUTO:
        choose("recompute", *_choose_recompute(section, around, config, rollout, text))
        section = replace(section, memory=replace(section.memory, recompute=chosen["recompute"]))
    named = [replace(one, key=one.key.replace("engine", prefix, 1)) for one in choices]
    return section, named


def _choose_compute(device: str, capabilities: Collection[Capability]) -> Choice:
    key = "engine.precision.compute"
    if device == "cpu":
        return Choice(key=key, value=Precision().compute, why="on a CPU")
    if Capability.BF16 not in capabilities:
        return Choice(key=key, value=Precision().compute, why="the engine declares no bf16")
    return Choice(key=key, value="bfloat16", why=f"on {device}")


def _choose_compile(section: EngineSection, around: Surroundings, text: Any) -> tuple[bool, str]:
    where = "on a CPU" if around.device == "cpu" else f"on {around.device}"
    reasons = {
        where: not device_of(around.device).compiles_elementwise,
        "the engine declares no compile": Capability.COMPILE not in around.capabilities,
        "an engine that only infers": section.optimizer is None,
        f"parallelism.tp is {section.parallelism.tp}": section.parallelism.tp > 1,
        "weights on the host": section.memory.offload_params,
        "a model with experts": text is not None and has_experts(text),
    }
    for why, holds in reasons.items():
        if holds:
            return False, why
    return True, f"the engine declares it, {where}"


def _choose_chunk(section: EngineSection, text: Any) -> tuple[int, str]:
    if text is None:
        return Memory().logit_chunk, "on a CPU"
    if section.model_type == "value_model":
        return Memory().logit_chunk, "a value model has no logits"
    each = int(text.vocab_size) * WIDTH[section.precision.compute] // section.parallelism.tp
    tokens = max(_CHUNK_STEP, LOGIT_BYTES // each // _CHUNK_STEP * _CHUNK_STEP)
    return tokens, f"logits of {tokens * each / GIB:.2f} GiB"


def _choose_recompute(
    section: EngineSection,
    around: Surroundings,
    config: Config,
    rollout: RolloutSection | None,
    text: Any,
) -> tuple[str, str]:
    if text is None:
        return "none", "on a CPU"
    if section.optimizer is None:
        return "none", "an engine that only infers"
    if Capability.RECOMPUTE not in around.capabilities:
        return "none", "the engine declares no recompute"
    if rollout is not None and _stays_awake_colocated(config, rollout):
        return "full", "a server that stays awake takes the rest of the device's memory"
    decoder = Decoder.of(text)
    if decoder is None:
        return "none", f"no estimate of the memory of a {text.model_type}"
    built = section.build(seed=0, total_steps=1)
    usable = min(_free_of_ranks(around.free)) * _USABLE
    state = _state_bytes(config, around) / len(around.free)
    if rollout is not None and rollout.name == "local" and not rollout.sleep:
        state += memory.rollout_bytes(rollout, built)
    need = state + decoder.gathered(built) + decoder.micro_batch(built, recompute=False)
    what = f"needs {need / GIB:.1f} GiB without it, {usable / GIB:.1f} GiB are usable"
    return ("none" if need <= usable else "full"), what


def _stays_awake_colocated(config: Config, rollout: RolloutSection) -> bool:
    """Return whether a server keeps memory of the engine's devices while the engine trains."""
    apart = isinstance(config, RLConfig) and (
        config.launcher == "ray" and config.ray.rollouts is not None
    )
    elsewhere = "url" in rollout.options
    return rollout.name != "local" and not rollout.sleep and not apart and not elsewhere


def _free_of_ranks(free: Sequence[FreeMemory]) -> list[float]:
    """Return the free bytes of each rank, where ranks on one device share them."""
    names = [one.device for one in free]
    return [one.free / names.count(one.device) for one in free]


def _state_bytes(config: Config, around: Surroundings) -> float:
    """Return the bytes of weights, gradients and moments of all engines, over all ranks."""
    # Nothing that can be auto changes the count.
    policy = config.engine.build(seed=0, total_steps=1)
    counts = memory.engines_bytes(config, policy, around.device)
    return float(sum(kept + gradient for kept, gradient in counts.values()))
