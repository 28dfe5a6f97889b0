"""The engine under test: its name, its configuration, and the ranks that run code of a case."""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine_api.capabilities import REQUESTS, Capability
from engine_api.config import EngineConfig, ModelSource, OptimizerConfig, Parallelism, Precision
from engine_api.plugin import is_older
from engine_api.registry import EngineRegistry, Resolution, RolloutRegistry
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_conformance.fixtures.building import BUILDING
from engine_conformance.oracle.config import FAMILIES
from engine_conformance.ranks import RankPool, get_pool
from engine_conformance.tolerances import Quantity, Tolerance, tolerance

if TYPE_CHECKING:
    from engine_api.contract import Engine

__all__ = ["EPS", "Setup", "Target"]

# With the usual 1e-8 a weight whose first gradient nearly vanishes moves by a whole learning rate
# in a direction that rounding decides, and every later step differs by it: half of all seeds then
# leave the tolerance after three steps.
EPS = 1e-5
LONGEST = 890.0  # seconds; shorter than the ranks' collectives wait for each other


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Everything that a rank needs to build the engine, sent to the ranks."""

    backend: str
    device: str
    model_type: str
    config: EngineConfig

    def create(self) -> Engine:
        """Return the engine, not yet initialized."""
        engine: Engine = EngineRegistry.create(
            model_type=self.model_type, backend=self.backend, device=self.device, config=self.config
        )
        return engine


@dataclass(frozen=True, kw_only=True)
class Target:
    """One backend on one device, world size and precision.

    Attributes:
        backend: the engine's name, or in the ``rollout`` profile the rollout's.
        root: a folder for checkpoints; generated models in it are shared between cases.
        layout: how the ranks are spread where a case does not say it itself.
        partner: another engine's name, for what two engines owe each other; mostly absent.
        patience: deadlines are this many times as long.
        seed: the seed of the batches (`use_seed`).
        rollout: whether ``backend`` names a rollout.
        options: the backend's own (``engine.options``, or ``rollout.options``), by name.
    """

    backend: str
    root: Path
    device: str = "cpu"
    world: int = 1
    dtype: str = "float32"
    model_type: str = "language_model"
    layout: Parallelism = field(default_factory=Parallelism)
    partner: str | None = None
    patience: float = 1.0
    seed: int = 0
    rollout: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @cached_property
    def resolution(self) -> Resolution:
        """The registry's resolution for this target."""
        if self.rollout:
            return RolloutRegistry.resolve(backend=self.backend, device=self.device)
        return EngineRegistry.resolve(
            model_type=self.model_type, backend=self.backend, device=self.device
        )

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities that the plug-in declares."""
        return self.resolution.plugin.capabilities

    def is_asked_since(self, version: str) -> bool:
        """Return whether the engine was written for this version of the contract, or a newer one.

        A case that is older than one of its requirements asks for the requirement then.
        """
        return not is_older(self.resolution.plugin.contract, version)

    @property
    def families(self) -> tuple[str, ...]:
        """The model families that the engine is asked to build, the usual one first.

        They are those that the oracle computes, and of them those that the plug-in declares. A
        rollout is asked for all.
        """
        declared = () if self.rollout else self.resolution.plugin.families
        usual = ("qwen3", *FAMILIES)
        return tuple(dict.fromkeys(name for name in usual if not declared or name in declared))

    def builds(self, family: str) -> bool:
        """Return whether the engine is asked to build models of a family, if a case makes one."""
        declared = () if self.rollout else self.resolution.plugin.families
        return not declared or family in declared

    @property
    def spread(self) -> frozenset[Capability]:
        """The kinds of parallelism that the layout asks for."""
        config = EngineConfig(model=ModelSource(path=""), parallelism=self.layout)
        return frozenset(capability for capability, asks in REQUESTS.items() if asks(config))

    def with_world(self, world: int) -> Target:
        """Return the same engine on another number of ranks."""
        return replace(self, world=world)

    def partner_target(self) -> Target:
        """Return the partner's engine, data parallel and with options of its own."""
        assert self.partner is not None, "the plan asks for one"
        return replace(self, backend=self.partner, layout=Parallelism(), rollout=False, options={})

    def with_model_type(self, model_type: str) -> Target:
        """Return the same backend's engine for another model type."""
        return replace(self, model_type=model_type)

    def model(self, **kwargs: Any) -> Path:
        """Return the folder of a generated model of this model type, written once.

        The keywords are arguments of `TinyModel`. Of the usual family and tied by default; a value
        model has no head to tie.
        """
        value = self.model_type == "value_model"
        arguments: dict[str, Any] = {
            "family": self.families[0],
            "tied": not value,
            "value_model": value,
        } | kwargs
        model = TinyModel(**arguments)
        folder = self.root / "models" / f"{model.family}-{zlib.crc32(repr(model).encode()):08x}"
        return _write_once(folder, lambda empty: write_checkpoint(empty, model))

    def written(self, write: Callable[[Path], Path]) -> Path:
        """Return the folder of the model that ``write`` writes, written once."""
        return _write_once(self.root / "models" / write.__name__, write)

    def edited(self, model: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
        """Return a copy of a model's folder with the ``config.json`` that ``change`` returns."""
        folder = self.scratch() / "model"
        shutil.copytree(model, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(change(config)))
        return folder

    def models(self, *arguments: Mapping[str, Any]) -> list[Path]:
        """Return `model` of each of these arguments whose family the engine is asked to build."""
        return [self.model(**one) for one in arguments if one["family"] in self.families]

    def scratch(self) -> Path:
        """Return a new empty folder."""
        self.root.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self.root))

    def config(self, model: Path, **sections: Any) -> EngineConfig:
        """Return a configuration for ``model``: AdamW at 1e-3, without clipping.

        Each of ``sections`` replaces a whole part of it. The layout is the target's,
        and everything on one rank where the world is one; so are the backend's own
        options.
        """
        precision = Precision(compute=self.dtype)  # type: ignore[arg-type] - checked by EngineConfig
        parts = {
            "optimizer": OptimizerConfig(lr=1e-3, clip_norm=None, eps=EPS),
            "precision": precision,
        } | sections
        if self.world > 1:
            parts = {"parallelism": self.layout} | parts
        if self.options:
            parts = {"options": self.options} | parts
        return EngineConfig(model=ModelSource(path=str(model)), **parts)

    def setup(self, config: EngineConfig) -> Setup:
        """Return everything that ranks need to build the engine."""
        return Setup(
            backend=self.backend, device=self.device, model_type=self.model_type, config=config
        )

    def run(
        self,
        function: Callable[..., Any],
        config: EngineConfig,
        *,
        per_rank: Sequence[Mapping[str, Any]] | None = None,
        deadline: float = 120.0,
        fresh: bool = False,
        launched: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(setup, **kwargs)`` on every rank and return the results by rank.

        With ``fresh`` the ranks are new processes, in which no engine has lived before. With
        ``launched`` they are new processes as torchrun starts them, so that the engine makes the
        process group; otherwise the suite has made it. Both end with the call, so that no other
        case meets what the engine has left in them.

        Raises:
            RankError: where a rank raised, died or stalled.
        """
        name = f"{function.__module__}:{function.__qualname__}"
        limit = min(deadline * self.patience, LONGEST)
        arguments = {"deadline": limit, "per_rank": per_rank, "setup": self.setup(config), **kwargs}
        pool = get_pool(self.world, self.device)
        if not (fresh or launched):
            return pool.run(name, **arguments)
        # Idle ranks would hold memory of an accelerator beside the new ones.
        if self.device != "cpu":
            pool.close()
        with RankPool(self.world, device=self.device, launched=launched) as own:
            return own.run(name, **arguments)

    def tolerance(self, quantity: Quantity, *, layers: int = 2) -> Tolerance:
        """Return the suite's tolerance in this target's precision."""
        return tolerance(quantity, self.torch_dtype, layers=layers)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The precision of computation."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def _write_once(folder: Path, write: Callable[[Path], Path]) -> Path:
    """Return a model's folder, which ``write`` writes unless it is there."""
    # Lanes write models into one folder.
    with BUILDING:
        return folder if (folder / "config.json").exists() else write(folder)
