"""The configuration of a rehearsal, made from the user's own, and what it leaves out.

Only what bounds a run's size, and what this machine does not have, is replaced. The rest of the
file, references and secrets in the environment included, stays as it is written.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from engine_api.capabilities import refuse_undeclared
from engine_api.config import Parallelism
from engine_api.errors import PluginError, UnsupportedCapability
from engine_api.registry import EngineRegistry, RolloutRegistry
from engine_trainer.config import Config, RLConfig, SFTConfig
from engine_trainer.config.combined_reward import COMBINE
from engine_trainer.config.evaluation import EvalSection
from engine_trainer.config.loading import read_tree
from engine_trainer.config.sections import AUTO, EngineSection
from engine_trainer.placement.automatic import list_automatic
from engine_trainer.utils.hf_models import hf_config

NOISE = "engine_trainer.rehearsal.noise:rehearsal_noise"
STEPS = 2
ENGINES = ("fsdp2", "torchtitan", "veomni", "megatron")
"""Engines in the order in which one takes the place of an engine that does not run here."""

# Largest values in a rehearsal, by key.
_CAPS: dict[str, int] = {
    "batch_size": 4,
    "algorithm.prompts_per_step": 4,
    "algorithm.mini_batches": 2,
    "rollout.n": 2,
    "rollout.max_new_tokens": 48,
    "rollout.batch_size": 16,
    "eval.max_problems": 4,
    "eval.max_pairs": 4,
    "eval.max_rows": 4,
    "eval.samples": 2,
    "engine.schedule.warmup_steps": 1,
    "data.reasoning_gym.size": 64,
    "data.reasoning_gym.skip": 0,
    "data.reasoning_gym.heldout_size": 8,
    "agent.max_turns": 3,
    "reward.workers": 1,
}
# Values in a rehearsal, by key, with what is then not exercised where the value is another one.
_FIXED: dict[str, tuple[Any, str]] = {
    "run.epochs": (None, ""),
    "run.steps": (STEPS, ""),
    "run.save_every": (1, ""),
    "run.resume": ("auto", "run.resume from a checkpoint of another run"),
    "run.progress": (False, ""),
    "run.patience": (None, "run.patience"),
    "run.wandb": (None, "metrics to Weights & Biases"),
    "run.trackio": (None, "metrics to trackio"),
    "run.push_to_hub": (None, "the push to the hub"),
    "run.profile_steps": ([], "torch's profiler"),
    "engine.device": ("cpu", ""),
    "engine.memory.kept_activations": ("auto", "kept activations, which only compiled blocks have"),
    "algorithm.critic.memory.kept_activations": ("auto", ""),
    "rollout.device": ("auto", ""),
    "ray.address": (None, "the Ray cluster; a local one takes its place"),
    "ray.gpus_per_worker": (None, ""),
    "ray.cpus_per_worker": (0.5, ""),
    # Another rollout may take the place of one that takes weights while it generates.
    "overlap.in_flight": ("auto", ""),
}
_SIZES = ("tp", "pp", "cp", "ulysses", "dp_replicate")


@dataclass(kw_only=True)
class Plan:
    """The files of a rehearsal, and what differs from the real run."""

    task: str
    tree: dict[str, Any]
    """The configuration as it is written to the rehearsal's file."""

    ranks: int
    """Number of ranks, of the engines of a cluster on Ray."""

    backend: str
    """Name of the engine that trains."""

    other: str
    """Name of the engine that continues from the checkpoint."""

    changes: list[str] = field(default_factory=list[str])
    """Values that are smaller here, as text."""

    missing: list[str] = field(default_factory=list[str])
    """Parts of the configuration that the rehearsal does not exercise, as text."""

    @property
    def on_ray(self) -> bool:
        """True if Ray starts the ranks."""
        return self.tree.get("launcher") == "ray"

    @property
    def ranks_after(self) -> int:
        """Number of ranks that continue from the checkpoint, another one for the same engine."""
        return self.ranks if self.other != self.backend else 3 - min(self.ranks, 2)

    def write(self, path: Path) -> None:
        """Write the configuration, readable by the user alone."""
        _write(self.tree, path)

    def write_switched(self, path: Path) -> None:
        """Write the configuration of one more step by the other engine, or on other ranks."""
        tree = copy.deepcopy(self.tree)
        _put(tree, "run.steps", STEPS + 1)
        _put(tree, "engine.parallelism", {})
        if self.other != self.backend:
            _put(tree, "engine.backend", self.other)
            _put(tree, "engine.options", {})
        if self.on_ray:
            _put(tree, "ray.engines", self.ranks_after)
        _write(tree, path)


def make_plan(
    config: Config, task: str, path: Path, overrides: list[str], folder: Path, ranks: int
) -> Plan:
    """Return the plan of a rehearsal in ``folder``.

    Args:
        config: the user's configuration.
        task: its task.
        path: its file.
        overrides: the overrides of its values.
        folder: the rehearsal's folder. The small model is to be in ``folder/model``, the rows to
            train on in ``folder/rows.jsonl``.
        ranks: number of ranks.
    """
    tree = OmegaConf.to_container(read_tree(path, overrides), resolve=False)
    assert isinstance(tree, dict)
    written = cast("dict[str, Any]", tree)
    backend, why = choose_engine(config.engine)
    others = [name for name in _list_runnable(config.engine) if name != backend]
    plan = Plan(
        task=task,
        tree=written,
        ranks=ranks,
        backend=backend,
        other=others[0] if others else backend,
    )
    for key, largest in _CAPS.items():
        _cap(plan, config, key, largest)
    for key, (value, left_out) in _FIXED.items():
        if _has(config, key) and _get(config, key) != value:
            _put(written, key, value)
            plan.missing += [left_out] if left_out else []
    _put(written, "run.output_dir", str(folder / "run"))
    _place_engine(plan, config, why)
    for name in ("engine", "algorithm.critic", "algorithm.teacher.engine"):
        _place_model(plan, config, name, folder / "model")
    _place_data(plan, config, folder)
    if isinstance(config, RLConfig):
        _place_rl(plan, config)
    if isinstance(config, RLConfig | SFTConfig):
        _place_rollout(plan, config)
    if isinstance(config.eval, EvalSection):
        _cap_sets(plan, config.eval)
    if config.eval is None:
        plan.missing.append("an evaluation: the configuration has no eval")
    elif config.eval.every != STEPS:
        _put(written, "eval.every", STEPS)
    return plan


def choose_engine(section: EngineSection) -> tuple[str, str]:
    """Return the engine that trains here, and why it is not the section's, "" where it is.

    Raises ``PluginError`` where no installed engine trains the model on the CPU.
    """
    try:
        EngineRegistry.resolve(model_type=section.model_type, backend=section.backend, device="cpu")
    except PluginError as error:
        found = _list_runnable(section)
        if not found:
            raise
        return found[0], error.what
    return section.backend, ""


def _list_runnable(section: EngineSection) -> list[str]:
    """Return the installed engines that train the section's model on the CPU, the best first."""
    family = hf_config(section.model).get_text_config().model_type
    return [name for name in ENGINES if _runs(name, section, family)]


def _runs(backend: str, section: EngineSection, family: str) -> bool:
    try:
        plugin = EngineRegistry.resolve(
            model_type=section.model_type, backend=backend, device="cpu"
        ).plugin
        # The sizes of a layout are replaced by those that fit the ranks here.
        refuse_undeclared(
            replace(section, backend=backend, parallelism=Parallelism(), options={}).build(
                seed=0, total_steps=1
            ),
            plugin.capabilities,
            plugin.name,
        )
    except (PluginError, UnsupportedCapability):
        return False
    return not plugin.families or family in plugin.families


def _place_engine(plan: Plan, config: Config, why: str) -> None:
    """Choose the engine, its options and its layout."""
    engine = config.engine
    if why:
        plan.missing.append(f"the engine {engine.backend} ({why}); {plan.backend} takes its place")
        _put(plan.tree, "engine.backend", plan.backend)
        _put(plan.tree, "engine.options", {})
        _put(plan.tree, "engine.model.attention", "auto")
    layout = {name: getattr(engine.parallelism, name) for name in _SIZES}
    left = plan.ranks
    sizes: dict[str, int] = {"dp_shard": -1, "ep": 1}
    for name, size in layout.items():
        sizes[name] = 2 if size > 1 and left >= 2 and not why else 1
        left //= sizes[name]
        if size > 1 and sizes[name] == 1:
            plan.missing.append(f"engine.parallelism.{name} of {size}")
    if engine.parallelism.ep > 1:
        # Experts are spread over ranks that are data or sequence parallel for all other weights.
        if left >= 2 or sizes["ulysses"] > 1 or sizes["cp"] > 1:
            sizes["ep"] = 2
        else:
            plan.missing.append(f"engine.parallelism.ep of {engine.parallelism.ep}")
    _put(plan.tree, "engine.parallelism", sizes)
    for name in ("master", "compute", "reduce"):
        if getattr(engine.precision, name) == "float8":
            plan.missing.append(f"engine.precision.{name}: float8, which is bfloat16 here")
            _put(plan.tree, f"engine.precision.{name}", "bfloat16")
    # What decays is chosen alike on every device.
    automatic = [key for key in list_automatic(config) if not key.endswith("optimizer.decay")]
    if isinstance(config, RLConfig) and config.algorithm.correction.weight == AUTO:
        automatic.append("algorithm.correction.weight")
    if automatic:
        plan.missing.append(f"what auto chooses on a GPU for {', '.join(automatic)}")


def _place_model(plan: Plan, config: Config, section: str, small: Path) -> None:
    """Put the small model in the place of a section's own, on the policy's layout."""
    if not _has(config, f"{section}.model") or _get(config, f"{section}.model") is None:
        return
    source = _get(config, f"{section}.model")
    if source.path != config.engine.model.path:
        plan.missing.append(f"{section}.model: {source.path}; the policy's small model is there")
    kept = {"attention": source.attention, "trust_remote_code": source.trust_remote_code}
    _put(plan.tree, f"{section}.model", {"path": str(small), "init": "random", **kept})
    if section != "engine" and _get(config, f"{section}.parallelism") is not None:
        _put(plan.tree, f"{section}.parallelism", None)


def _place_data(plan: Plan, config: Config, folder: Path) -> None:
    """Read the rows that were chosen, with the tokenizer that was saved beside the model."""
    if config.data.source is not None:
        _put(plan.tree, "data.source", str(folder / "rows.jsonl"))
        _put(plan.tree, "data.split", None)
    if config.data.tokenizer is None:
        _put(plan.tree, "data.tokenizer", str(folder / "tokenizer"))


def _place_rl(plan: Plan, config: RLConfig) -> None:
    """Keep what shapes the rewards in proportion, and make the rewards of a group differ."""
    algorithm = config.algorithm
    if algorithm.overlong.buffer:
        part = algorithm.overlong.buffer / config.rollout.max_new_tokens
        longest = min(config.rollout.max_new_tokens, _CAPS["rollout.max_new_tokens"])
        _put(plan.tree, "algorithm.overlong.buffer", max(1, int(part * longest)))
    if config.agent is not None and config.agent.max_turn_tokens is not None:
        _put(plan.tree, "agent.max_turn_tokens", min(config.agent.max_turn_tokens, 16))
    if plan.tree.get("reward") is not None:
        _put(plan.tree, "reward", _with_noise(plan, config))
    if config.launcher == "ray":
        if importlib.util.find_spec("ray") is None:
            plan.missing.append("Ray, which is not installed here")
            _put(plan.tree, "launcher", "none")
            _put(plan.tree, "overlap.mode", "none")
            return
        separate = config.ray.rollouts is not None
        plan.ranks = 1 if separate else plan.ranks
        _put(plan.tree, "ray.engines", plan.ranks)
        _put(plan.tree, "ray.rollouts", 1 if separate else None)


def _with_noise(plan: Plan, config: RLConfig) -> dict[str, Any]:
    """Return the section ``reward`` with a hash of the text added to the user's own rewards.

    A model of random weights earns the same reward for everything, so that no group would teach.
    """
    written = cast("dict[str, Any]", plan.tree.get("reward", {}))
    section = config.reward
    parts: list[dict[str, Any]]
    if section.name == COMBINE:
        parts = list(written["kwargs"]["rewards"])
    else:
        parts = [{key: written[key] for key in ("name", "function", "kwargs") if key in written}]
    loads = [part for part in parts if part.get("name") == "reward_model"]
    for part in loads:
        plan.missing.append("the reward reward_model, whose model is not shrunk")
        parts.remove(part)
    rest = {key: value for key, value in written.items() if key not in ("name", "function")}
    noise = {"function": NOISE} | ({"timeout_s": None} if section.workers == 0 else {})
    return rest | {"name": COMBINE, "kwargs": {"rewards": [*parts, noise]}}


def _place_rollout(plan: Plan, config: RLConfig | SFTConfig) -> None:
    """Generate with the rollout ``local`` where the configuration's own does not run here."""
    rollout = config.rollout
    # Without a reward SFT generates nothing.
    if config.reward is None:
        return
    if rollout.name != AUTO:
        try:
            RolloutRegistry.resolve(backend=rollout.name, device="cpu")
        except PluginError as error:
            plan.missing.append(f"the rollout {rollout.name} ({error.what}); local takes its place")
        else:
            return
    _put(plan.tree, "rollout.name", "local")
    _put(plan.tree, "rollout.quantization", "none")
    _put(plan.tree, "rollout.lora", "merged")
    _put(plan.tree, "rollout.options", {})
    if rollout.quantization != "none":
        plan.missing.append(f"rollout.quantization: {rollout.quantization}")


def _cap_sets(plan: Plan, section: EvalSection) -> None:
    """Bound the numbers of held-out sets that have their own."""
    for name, values in section.sets.items():
        for key in ("max_problems", "samples"):
            if getattr(values, key) is not None:
                _put(plan.tree, f"eval.sets.{name}.{key}", _CAPS[f"eval.{key}"])


def _cap(plan: Plan, config: Config, key: str, largest: int) -> None:
    if not _has(config, key):
        return
    value = _get(config, key)
    if value is None or value > largest:
        _put(plan.tree, key, largest)
        plan.changes.append(f"{key} {'all' if value is None else value} -> {largest}")


def _write(tree: Mapping[str, Any], path: Path) -> None:
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")


# --- dotted keys --------------------------------------------------------------------------------


def _has(config: Any, key: str) -> bool:
    """Return whether a configuration has a key, none of whose sections is null."""
    for name in key.split("."):
        if not hasattr(config, name):
            return False
        config = getattr(config, name)
    return True


def _get(config: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.split(".")
    for name in above:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[last] = value
