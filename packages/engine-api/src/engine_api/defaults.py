"""Defaults of ``BaseEngine`` that an engine may override: refusals, plain hooks, generators."""

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
from engine_api.batch import Batch
from engine_api.capabilities import Capability, unsupported
from engine_api.contract import Adapter
from engine_api.distillation import DIVERGENCE, OutputHead, Teaching
from engine_api.errors import ConfigError, EngineStateError
from engine_api.results import TokenOutputs, Topology
from engine_api.weights import ShardExport

if TYPE_CHECKING:
    import torch


class EngineDefaults(ABC):
    """A mixin of ``BaseEngine`` with a refusal for each member that needs a capability.

    An engine that declares the capability overrides the member.
    """

    _name: str
    _state: str
    device_type: str
    topology: Topology

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities that the plug-in declares."""

    # --- members that need a capability: refused ------------------------------------------------

    def get_per_tensor_param_shard(
        self, *, dtype: torch.dtype | None = None, adapter: Adapter = "merged"
    ) -> ShardExport:
        """Raise ``UnsupportedCapability``.

        See ``Engine.get_per_tensor_param_shard``.
        """
        raise self._refusal("get_per_tensor_param_shard", Capability.EXPORT_SHARDS)

    def save_hf(self, directory: Path | str, *, dtype: torch.dtype | None = None) -> None:
        """Raise ``UnsupportedCapability``.

        See ``Engine.save_hf``.
        """
        raise self._refusal("save_hf", Capability.SAVE_HF)

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Raise ``UnsupportedCapability``, or ``ConfigError`` for a wrong device.

        See ``Engine.to``.
        """
        error = self._refusal("to", Capability.OFFLOAD)
        check_device(device, self.device_type)
        raise error

    def _refusal(self, called: str, capability: Capability) -> Exception:
        if self._state != "ready":
            return EngineStateError(called, self._state, "ready")
        assert capability not in self.capabilities, (
            f"{capability} is declared, but {called} is not overridden"
        )
        return unsupported(capability, self._name, self.capabilities)

    # --- hooks ------------------------------------------------------------------------------------

    def _choices(self) -> Mapping[str, Any]:
        """Return, for ``resolved``, what the engine chose itself, or can tell of what it built."""
        return {}

    def _accumulation(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch.

        Gradients need to be reduced over ranks only in the last one, as sums.
        """
        return nullcontext()

    def _inference(self, adapter: bool) -> AbstractContextManager[None]:
        """Return the context of inference, which records no gradient.

        An engine that trains in training mode, or with adapters, switches these as well.
        """
        import torch

        return torch.no_grad()

    def _own_metrics(self) -> Mapping[str, torch.Tensor]:
        """Return the engine's own metrics of the micro-batch that was computed last.

        They are sums, as those of a loss function, and all ranks call it together.
        """
        return {}

    gives: ClassVar[tuple[str, ...]] = ("log_probs", "entropy")
    """Names of the outputs that a loss may need, the one of plain inference first.

    A value model has ``("values",)``.
    """

    def _inference_needs(self, entropy: bool) -> tuple[str, ...]:
        """Return the names of the outputs that ``infer_batch`` computes.

        Raises ``ConfigError`` if ``entropy`` is on and the engine has none.
        """
        if entropy and "entropy" not in self.gives:
            raise ConfigError("entropy", "a value model has none", remedy="leave entropy off")
        return (self.gives[0], "entropy") if entropy else self.gives[:1]

    def _check_needs(self, needs: Sequence[str]) -> None:
        """Raise an error for an output that this engine does not give.

        It is ``UnsupportedCapability`` for a divergence, and ``ConfigError`` for any other.
        """
        if DIVERGENCE in needs and Capability.DISTILLATION not in self.capabilities:
            raise unsupported(Capability.DISTILLATION, self._name, self.capabilities)
        known = self._possible_outputs
        if absent := [name for name in needs if name not in known]:
            raise ConfigError(
                "loss.needs",
                f"this engine gives no {absent[0]!r}",
                remedy=f"it gives: {', '.join(known)}",
            )

    @property
    def _possible_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that a loss may need."""
        distils = Capability.DISTILLATION in self.capabilities and "log_probs" in self.gives
        return (*self.gives, DIVERGENCE) if distils else self.gives

    # --- hooks of the capability distillation -----------------------------------------------------

    def states_step(self, batch: Batch) -> torch.Tensor:
        """Return the aligned hidden states ``[T, d]`` of one micro-batch, without a gradient.

        They are the input of the output head, the same on every model-parallel rank. An empty
        micro-batch must take part in every collective.
        """
        raise NotImplementedError

    def taught_step(
        self, batch: Batch, *, needs: Sequence[str], temperature: float, teaching: Teaching
    ) -> TokenOutputs:
        """Run the model on one micro-batch whose loss needs the divergence to a teacher.

        It is ``forward_step`` with one more output. The teacher's head is ``_teacher_head``. The
        logits of either model exist for ``memory.logit_chunk`` tokens at a time.
        """
        raise NotImplementedError

    def _whole_head(self) -> OutputHead:
        """Return a copy of the output head, gathered from all ranks, on the engine's device."""
        raise NotImplementedError

    def _place_head(self, head: OutputHead) -> OutputHead:
        """Return a teacher's head on the engine's device."""
        raise NotImplementedError

    def _optimizer_fields(self) -> Collection[str]:
        """Return the names of the state that the optimizer keeps of a weight that has had a step.

        A load then requires all of it. The result is empty where nothing is kept, or where the
        names are not known: then a checkpoint must have the same fields for each weight. An engine
        with an optimizer of torch returns ``engine_api.optimizers.state_fields`` of it.
        """
        return ()

    @property
    def _seed_rank(self) -> int:
        """The number that makes this rank's random draws (dropout) differ from other ranks'.

        Ranks that must draw the same numbers return the same value.
        """
        return self.topology.rank

    def _rng_state(self) -> dict[str, Any]:
        """Return the state of this rank's generators as JSON.

        They are those of Python, NumPy, torch and the device.
        """
        return generators.capture(self.device_type)

    def _set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that ``_rng_state`` returned.

        Raises ``CheckpointCorrupt`` for anything else, and then changes nothing.
        """
        generators.check(state, self.device_type)
        generators.restore(state, self.device_type)
