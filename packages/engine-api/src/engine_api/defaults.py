"""What ``BaseEngine`` gives an engine that does not write its own: refusals, plain hooks, generators."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_api import generators
from engine_api.arguments import check_device
from engine_api.capabilities import Capability, unsupported
from engine_api.contract import Adapter
from engine_api.errors import ConfigError, EngineStateError
from engine_api.results import Topology
from engine_api.weights import ShardExport

if TYPE_CHECKING:
    import torch


class EngineDefaults(ABC):
    """A mixin of ``BaseEngine``. An engine that declares a capability overrides the member that it is about."""

    _name: str
    _state: str
    device_type: str
    topology: Topology

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[Capability]:
        """What the plug-in declares."""

    # --- members that need a capability: refused ------------------------------------------------

    def get_per_tensor_param_shard(
        self, *, dtype: torch.dtype | None = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        """See ``Engine.get_per_tensor_param_shard``; raises ``UnsupportedCapability``."""
        raise self._refusal("get_per_tensor_param_shard", Capability.EXPORT_SHARDS)

    def save_hf(self, directory: Path | str, *, dtype: torch.dtype | None = None) -> None:
        """See ``Engine.save_hf``; raises ``UnsupportedCapability``."""
        raise self._refusal("save_hf", Capability.SAVE_HF)

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """See ``Engine.to``; raises ``UnsupportedCapability``, or ``ConfigError`` for what is no device of it."""
        error = self._refusal("to", Capability.OFFLOAD)
        check_device(device, self.device_type)
        raise error

    def _refusal(self, called: str, capability: Capability) -> Exception:
        if self._state != "ready":
            return EngineStateError(called, self._state, "ready")
        assert capability not in self.capabilities, (
            f"{capability} is declared, and {called} not overridden"
        )
        return unsupported(capability, self._name, self.capabilities)

    # --- hooks ------------------------------------------------------------------------------------

    def _accumulation(self, *, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch; gradients need only be reduced over ranks in the last one, as sums."""
        return nullcontext()

    def _inference(self, adapter: bool) -> AbstractContextManager[None]:
        """No gradient; an engine that trains in training mode, or with adapters, switches that as well."""
        import torch

        return torch.no_grad()

    # What a loss may need, the output of a plain inference first; ("values",) for a value model.
    gives: ClassVar[tuple[str, ...]] = ("log_probs", "entropy")

    def _inference_needs(self, entropy: bool) -> tuple[str, ...]:
        """Which outputs ``infer_batch`` computes; raises ``ConfigError`` for an entropy that there is not."""
        if entropy and "entropy" not in self.gives:
            raise ConfigError("entropy", "a value model has none", remedy="leave entropy off")
        return (self.gives[0], "entropy") if entropy else self.gives[:1]

    def _check_needs(self, needs: Sequence[str]) -> None:
        """Raise ``ConfigError`` for an output that this engine does not give."""
        if absent := [name for name in needs if name not in self.gives]:
            raise ConfigError(
                "loss.needs",
                f"this engine gives no {absent[0]!r}",
                remedy=f"it gives: {', '.join(self.gives)}",
            )

    def _optimizer_fields(self) -> Collection[str]:
        """Return what the optimizer keeps of a weight that has had a step, so that a load can ask for all of it.

        Empty where nothing is kept, or nothing is known: then a checkpoint must have of each weight what it has of any.
        """
        return ()

    @property
    def _seed_rank(self) -> int:
        """Number that sets this rank's random draws (dropout) apart; ranks that must draw alike return the same."""
        return self.topology.rank

    def _rng_state(self) -> dict[str, Any]:
        """Return the state of this rank's generators as JSON: Python's, NumPy's, torch's and the device's."""
        return generators.capture(self.device_type)

    def _set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``_rng_state`` returned; raise ``CheckpointCorrupt``, and change nothing, for anything else."""
        generators.check(state, self.device_type)
        generators.restore(state, self.device_type)
