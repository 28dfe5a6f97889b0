"""The choice for each value of a configuration that is ``auto``, by device, engine and memory.

It is made before anything is loaded, where the engine will run. An explicit value is never changed,
and engines and rollouts get explicit values alone. On a CPU the choices are the contract's
defaults, except that norms and biases do not decay.
docs/gpus.md has a table of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from engine_api.capabilities import Capability
from engine_api.config import Memory, Precision
from engine_api.devices import device_of
from engine_api.errors import ConfigError
from engine_api.hf_layers import carries_state, has_experts
from engine_trainer.config import Config, RewardModelConfig, RLConfig
from engine_trainer.config.engine_keys import named_below
from engine_trainer.config.sections import AUTO, KEPT_ACTIVATIONS, EngineSection, RolloutSection
from engine_trainer.placement import memory
from engine_trainer.placement.activations import WIDTH, Decoder
from engine_trainer.placement.groups import Launcher
from engine_trainer.placement.memory import GIB, FreeMemory
from engine_trainer.placement.replica import LOCAL, check_adapter, rollout_device
from engine_trainer.utils.hf_models import attends_uncompiled, text_config

SERVERS = ("vllm", "sglang")
"""Rollouts that ``rollout.name: auto`` prefers to ``local`` on an accelerator, in order."""

LOGIT_BYTES = 1 << 30
"""Largest size of the logits of a chunk that ``logit_chunk: auto`` chooses."""

# Numbers of tokens of a micro-batch that ``max_tokens: auto`` chooses from.
_MICRO_BATCHES = (32768, 16384, 8192, 4096)

# A chunk's number of tokens is a multiple of this, for few shapes of matrix products.
_CHUNK_STEP = 256

# Share of the free memory that the estimate may fill. The rest is for what it does not count: the
# allocator's gaps, workspaces of kernels and communication, and a server that sleeps.
_USABLE = 0.9

_AWAKE = "a server that stays awake takes the rest of the device's memory"

# Kept shares of activations are multiples of this.
_KEPT_STEP = 0.05

# The capability that a value needs, and the value that needs none.
_NEEDED: Mapping[tuple[str, Any], tuple[Capability, str]] = {
    ("compute", "bfloat16"): (Capability.BF16, "float32"),
    ("compute", "float16"): (Capability.FP16, "float32"),
    ("compute", "float8"): (Capability.FP8, "float32"),
    ("recompute", "full"): (Capability.RECOMPUTE, "none"),
    ("compile", True): (Capability.COMPILE, "false"),
    ("decay", "matrices"): (Capability.PARAMETER_GROUPS, "all"),
}

# The parts of an engine's section that have values that may be auto.
_PARTS = ("precision", "memory", "optimizer")


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
    """The facts beyond the configuration that a choice for an engine depends on.

    Attributes:
        device: type of the engine's device.
        capabilities: what the engine declares.
        options: names of the engine's own options.
        free: free memory of each rank's device; empty on a CPU.
    """

    device: str
    capabilities: frozenset[Capability]
    options: frozenset[str] = frozenset()
    free: Sequence[FreeMemory] = ()


def settle(config: Config, launcher: Launcher) -> tuple[Config, list[Choice]]:
    """Return the configuration with explicit values in place of ``auto``, and what was chosen.

    Called on all processes of the loop together.

    Raises ``PluginError``; ``ConfigError``, also where no rollout does what is asked.
    """
    device, capabilities = launcher.resolve(config.engine)
    around = Surroundings(device=device, capabilities=capabilities)
    if device != "cpu" and any(
        AUTO in (one.memory.recompute, one.memory.max_tokens) and one.optimizer is not None
        for one in _sections(config).values()
    ):
        around = replace(around, free=launcher.free_memory(device))
    choices: list[Choice] = []
    rollout = _read_rollout(config)
    if rollout is not None and rollout.name == AUTO:
        check_adapter(rollout, config.engine.lora)
        choice = _choose_rollout(rollout, around, launcher)
        choices.append(choice)
        rollout = replace(rollout, name=choice.value)
    settled: dict[str, EngineSection] = {}
    for prefix, section in _sections(config).items():
        with named_below(prefix):
            _, own = launcher.resolve(section)
            options = launcher.list_options(section)
            surroundings = replace(around, capabilities=own, options=options)
            settled[prefix], found = _settle_engine(section, surroundings, config, rollout, prefix)
        choices += found
    return _replaced(config, settled, rollout), choices


def keep(config: Config, before: Mapping[str, Any], where: str) -> tuple[Config, list[Choice]]:
    """Return the configuration with the values of an earlier start in place of ``auto``.

    A run that continues computes as it did before, whatever is free or installed by then.

    Args:
        config: the configuration.
        before: values of the earlier start's configuration by dotted key.
        where: name of the place that they come from.
    """
    kept: list[Choice] = []

    def find(key: str) -> Any:
        value = before.get(key, AUTO)
        if value != AUTO:
            kept.append(Choice(key=key, value=value, why=f"as in {where}"))
        return value

    rollout = _read_rollout(config)
    if rollout is not None and rollout.name == AUTO:
        rollout = replace(rollout, name=find("rollout.name"))
    sections = _sections(config)
    for prefix, section in sections.items():
        parts: dict[str, Any] = {part: getattr(section, part) for part in _PARTS}
        given = section.memory
        for part, name, key in _list_automatic(section, prefix):
            # A share belongs to what was chosen with it.
            is_other = given.recompute != AUTO or given.compile is False
            if name == KEPT_ACTIVATIONS and is_other:
                continue
            parts[part] = replace(parts[part], **{name: find(key)})
        sections[prefix] = replace(section, **parts)
    return _replaced(config, sections, rollout), kept


def fill_earlier(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an earlier start, with what was done before a key was there.

    Before ``optimizer.decay`` all weights decayed, and before ``memory.kept_activations`` nothing
    was kept beside ``recompute: full``.

    Args:
        before: values of the configuration by dotted key; none of a start that there was not.
    """
    earlier: dict[str, Any] = {}
    for key in before:
        section, _, name = key.rpartition(".")
        if key.endswith("optimizer.lr"):
            earlier[f"{section}.decay"] = "all"
        if name == "recompute":
            earlier[f"{section}.{KEPT_ACTIVATIONS}"] = 0.0
    return earlier | dict(before)


def check_kept(config: Config, kept: Sequence[Choice], launcher: Launcher) -> None:
    """Raise ``ConfigError`` for a value of ``keep`` that can no longer be had.

    Called on all processes of the loop together.
    """
    sections = _sections(config)
    for one in kept:
        if one.key == "rollout.name":
            _check_kept_rollout(config, one, launcher)
            continue
        prefix, _, name = one.key.rsplit(".", 2)
        if name == "max_tokens":
            _check_kept_max_tokens(config, one)
            continue
        needed, without = _NEEDED.get((name, one.value), (None, ""))
        section = sections[prefix]
        if needed is not None and needed not in launcher.resolve(section)[1]:
            raise ConfigError(
                one.key,
                f"{str(one).split('=', 1)[1]} is no longer possible",
                why=f"engine {section.backend!r} does not declare {needed}, and a run that "
                "continues keeps what was chosen for auto",
                remedy=f"set {one.key}={without}, which changes how the run computes from here on",
            )


def list_automatic(config: Config) -> list[str]:
    """Return the keys of a configuration that ``settle`` replaces, in its order."""
    rollout = _read_rollout(config)
    named = ["rollout.name"] if rollout is not None and rollout.name == AUTO else []
    engines = _sections(config).items()
    return named + [
        key for prefix, section in engines for _, _, key in _list_automatic(section, prefix)
    ]


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


def _sections(config: Config) -> dict[str, EngineSection]:
    """Return the whole section of each engine of a run, the policy first, by its key."""
    found: dict[str, EngineSection] = {"engine": config.engine}
    if isinstance(config, RLConfig):
        critic, teacher = config.algorithm.critic, config.algorithm.teacher
        if critic is not None:
            found["algorithm.critic"] = critic.engine(config.engine)
        if teacher is not None and teacher.engine is not None:
            found["algorithm.teacher.engine"] = teacher.engine.engine(config.engine)
    return found


def _replaced(
    config: Config, sections: Mapping[str, EngineSection], rollout: RolloutSection | None
) -> Config:
    """Return the configuration with the settled parts of ``sections``, and the rollout."""
    parts = {key: {part: getattr(one, part) for part in _PARTS} for key, one in sections.items()}
    changed: dict[str, Any] = {"engine": replace(config.engine, **parts["engine"])}
    if rollout is not None:
        changed["rollout"] = rollout
    if isinstance(config, RLConfig):
        algorithm = config.algorithm
        critic, teacher = algorithm.critic, algorithm.teacher
        if critic is not None:
            algorithm = replace(algorithm, critic=replace(critic, **parts["algorithm.critic"]))
        if teacher is not None and teacher.engine is not None:
            settled = parts["algorithm.teacher.engine"]
            own = replace(teacher.engine, precision=settled["precision"], memory=settled["memory"])
            algorithm = replace(algorithm, teacher=replace(teacher, engine=own))
        changed["algorithm"] = algorithm
    return replace(config, **changed)


def _list_automatic(section: EngineSection, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield part, name and dotted key of each value of an engine's section that is ``auto``."""
    for part in _PARTS:
        values = getattr(section, part)
        if values is None:
            continue
        for one in fields(values):
            if getattr(values, one.name) == AUTO:
                yield part, one.name, f"{prefix}.{part}.{one.name}"


def _choose_rollout(section: RolloutSection, around: Surroundings, launcher: Launcher) -> Choice:
    """Return the first rollout that can be used and does what the section asks for.

    Raises ``ConfigError`` where there is none.
    """
    device = rollout_device(section, around.device)
    # A running server is behind a name of its own.
    servers = tuple(f"{name}-server" for name in SERVERS) if "url" in section.options else SERVERS
    passed: list[str] = []
    for name in (LOCAL, *servers) if device == "cpu" else (*servers, LOCAL):
        if name != LOCAL and Capability.EXPORT_SHARDS not in around.capabilities:
            reason = f"the engine declares no {Capability.EXPORT_SHARDS}, which servers need"
        else:
            reasons = launcher.probe_rollout(replace(section, name=name), device)
            reason = next(filter(None, reasons), "")
        if not reason:
            good = "on a CPU" if device == "cpu" else f"installed, and supports {device}"
            why = [good, *passed] if name != LOCAL or device == "cpu" else passed
            return Choice(key="rollout.name", value=name, why="; ".join(why))
        passed.append(f"not {name}: {reason}")
    raise ConfigError(
        "rollout.name",
        "auto found no rollout that does what the configuration asks for",
        why="; ".join(passed),
        remedy="install one that does, or change what they lack",
    )


def _check_kept_max_tokens(config: Config, kept: Choice) -> None:
    longest = _longest_documents(config)
    if longest > kept.value:
        raise ConfigError(
            kept.key,
            f"{str(kept).split('=', 1)[1]} is too small: documents of {longest} tokens may come",
            why="a document is never cut, and a run that continues keeps what was chosen for auto",
            remedy=f"set {kept.key}={longest}, or bound the documents as before (data.max_length"
            + (", rollout.max_new_tokens)" if isinstance(config, RLConfig) else ")"),
        )


def _check_kept_rollout(config: Config, kept: Choice, launcher: Launcher) -> None:
    rollout = _read_rollout(config)
    assert rollout is not None, "its name was kept"
    device, _ = launcher.resolve(config.engine)
    reasons = launcher.probe_rollout(rollout, rollout_device(rollout, device))
    if reason := next(filter(None, reasons), ""):
        raise ConfigError(
            kept.key,
            f"{str(kept).split('=', 1)[1]} can no longer be used",
            why=f"{reason}; a run that continues keeps what was chosen for auto",
            remedy="restore it, or set rollout.name, which changes the completions from here on",
        )


def _settle_engine(
    section: EngineSection,
    around: Surroundings,
    config: Config,
    rollout: RolloutSection | None,
    prefix: str,
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
    if section.memory.max_tokens == AUTO:
        choose("max_tokens", *_choose_max_tokens(section, around, config, rollout, text))
        section = replace(section, memory=replace(section.memory, max_tokens=chosen["max_tokens"]))
    given = section.memory.recompute
    if given == AUTO:
        choose("recompute", *_choose_recompute(section, around, config, rollout, text))
        section = replace(section, memory=replace(section.memory, recompute=chosen["recompute"]))
    kept = section.memory.kept_activations
    if kept == AUTO:
        share = (0.0, "recompute is given")
        if given == AUTO:
            share = _choose_kept_activations(section, around, config, rollout, text)
        choose(KEPT_ACTIVATIONS, *share)
        section = replace(section, memory=replace(section.memory, kept_activations=share[0]))
    elif kept and section.optimizer and KEPT_ACTIVATIONS not in around.options:
        raise ConfigError(
            f"memory.{KEPT_ACTIVATIONS}",
            f"expected 0 with engine {section.backend!r}, got {kept:g}",
            why=f"it has no option {KEPT_ACTIVATIONS}",
            remedy="set it to 0, or use fsdp2 or veomni",
        )
    optimizer = section.optimizer
    if optimizer is not None and optimizer.decay == AUTO:
        choices.append(_choose_decay(optimizer.weight_decay, around.capabilities))
        section = replace(section, optimizer=replace(optimizer, decay=choices[-1].value))
    named = [replace(one, key=one.key.replace("engine", prefix, 1)) for one in choices]
    return section, named


def _choose_compute(device: str, capabilities: Collection[Capability]) -> Choice:
    key = "engine.precision.compute"
    if device == "cpu":
        return Choice(key=key, value=Precision().compute, why="on a CPU")
    if Capability.BF16 not in capabilities:
        return Choice(key=key, value=Precision().compute, why="the engine declares no bf16")
    return Choice(key=key, value="bfloat16", why=f"on {device}")


def _choose_decay(weight_decay: float, capabilities: Collection[Capability]) -> Choice:
    key = "engine.optimizer.decay"
    if weight_decay == 0:
        return Choice(key=key, value="all", why="weight_decay is 0")
    if Capability.PARAMETER_GROUPS in capabilities:
        return Choice(key=key, value="matrices", why="the engine declares parameter_groups")
    return Choice(key=key, value="all", why="the engine declares no parameter_groups")


def _choose_compile(section: EngineSection, around: Surroundings, text: Any) -> tuple[bool, str]:
    where = "on a CPU" if around.device == "cpu" else f"on {around.device}"
    # Without compilation each cast to FP8 is a kernel of its own, also in inference.
    casts = section.precision.compute == "float8"
    reasons = {
        where: not device_of(around.device).compiles_elementwise,
        "the engine declares no compile with its options": (
            Capability.COMPILE not in around.capabilities
        ),
        "an engine that only infers": section.optimizer is None and not casts,
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


def _choose_max_tokens(
    section: EngineSection,
    around: Surroundings,
    config: Config,
    rollout: RolloutSection | None,
    text: Any,
) -> tuple[int, str]:
    longest = _longest_documents(config)
    usual = max(Memory().max_tokens, longest)
    if text is None:
        return usual, "on a CPU"
    if section.optimizer is None:
        return usual, "an engine that only infers"
    if rollout is not None and _stays_awake_colocated(config, rollout):
        return usual, _AWAKE
    decoder = Decoder.of(text)
    if decoder is None:
        return usual, f"unknown whether it fits: {Decoder.why_unknown(text)}"
    sizes = [size for size in sorted({*_MICRO_BATCHES, usual}, reverse=True) if size >= longest]
    usable = _usable_bytes(around)
    needs = {
        size: _needed_bytes(
            replace(section, memory=replace(section.memory, max_tokens=size)),
            around,
            config,
            rollout,
            decoder,
        )
        for size in sizes
    }
    for size, need in needs.items():
        if need <= usable:
            return size, f"needs {need / GIB:.1f} GiB, {usable / GIB:.1f} GiB are usable"
    least = sizes[-1]
    why = f"even {least} need {needs[least] / GIB:.1f} GiB, {usable / GIB:.1f} GiB are usable"
    # Where everything is recomputed, smaller micro-batches are not needed.
    recomputes = section.memory.recompute == AUTO and Capability.RECOMPUTE in around.capabilities
    return usual if recomputes else least, why


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
    if section.memory.kept_activations not in (AUTO, 0):
        return "full", f"{KEPT_ACTIVATIONS} is given"
    if rollout is not None and _stays_awake_colocated(config, rollout):
        return "full", _AWAKE
    decoder = Decoder.of(text)
    if decoder is None:
        return "none", f"unknown whether it fits: {Decoder.why_unknown(text)}"
    usable = _usable_bytes(around)
    need = _needed_bytes(section, around, config, rollout, decoder)
    what = f"needs {need / GIB:.1f} GiB without it, {usable / GIB:.1f} GiB are usable"
    return ("none" if need <= usable else "full"), what


def _choose_kept_activations(
    section: EngineSection,
    around: Surroundings,
    config: Config,
    rollout: RolloutSection | None,
    text: Any,
) -> tuple[float, str]:
    """Return the share of activations that fits beside the ``recompute`` that was chosen."""
    memory = section.memory
    if memory.recompute != "full" or text is None:
        return 0.0, "nothing is recomputed"
    reasons = {
        f"the engine has no option {KEPT_ACTIVATIONS}": KEPT_ACTIVATIONS not in around.options,
        f"options.{KEPT_ACTIVATIONS} is given": KEPT_ACTIVATIONS in section.options,
        "blocks are not compiled": memory.compile is not True,
        _AWAKE: rollout is not None and _stays_awake_colocated(config, rollout),
        "adapters with dropout": section.lora is not None and section.lora.dropout > 0,
        "a model with experts": has_experts(text),
        "a model whose layers carry a state": carries_state(text),
        "attention outside of compiled code": (memory.share_prefixes or attends_uncompiled(text)),
    }
    for why, holds in reasons.items():
        if holds:
            return 0.0, why
    decoder = Decoder.of(text)
    assert decoder is not None, "its memory was estimated"
    usable = _usable_bytes(around)
    full = _needed_bytes(section, around, config, rollout, decoder)
    every = decoder.linear_results(section.build(seed=0, total_steps=1))
    steps = math.floor((usable - full) / every / _KEPT_STEP)
    share = round(min(steps * _KEPT_STEP, 1 - _KEPT_STEP), 2)
    if share <= 0:
        return 0.0, f"needs {full / GIB:.1f} GiB without, {usable / GIB:.1f} GiB are usable"
    need = full + share * every
    return share, f"needs {need / GIB:.1f} GiB with it, {usable / GIB:.1f} GiB are usable"


def _longest_documents(config: Config) -> int:
    """Return the tokens that must fit into a micro-batch: the default where nothing bounds them."""
    limit, usual = config.data.max_length, Memory().max_tokens
    if limit is None:
        return usual
    if isinstance(config, RLConfig):
        teacher = config.algorithm.teacher
        bound = limit + config.rollout.max_new_tokens
        # A teacher's own prompts are bounded by its context alone.
        return bound if teacher is None else max(bound, usual)
    # A score of its own stands at the end of each document.
    return limit + 1 if isinstance(config, RewardModelConfig) else limit


def _usable_bytes(around: Surroundings) -> float:
    """Return the bytes that the estimate may fill on the rank that has the fewest."""
    return min(_free_of_ranks(around.free)) * _USABLE


def _needed_bytes(
    section: EngineSection,
    around: Surroundings,
    config: Config,
    rollout: RolloutSection | None,
    decoder: Decoder,
) -> float:
    """Return the estimated bytes of a rank that trains. ``recompute: auto`` counts as ``none``."""
    built = section.build(seed=0, total_steps=1)
    recompute = built.memory.recompute == "full"
    state = _state_bytes(config, around) / len(around.free)
    if rollout is not None and rollout.name == "local" and not rollout.sleep:
        state += memory.rollout_bytes(rollout, built)
    return state + decoder.gathered(built) + decoder.micro_batch(built, recompute=recompute)


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
