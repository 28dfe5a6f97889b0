"""What only this engine knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from engine_api.config import build_options, near_matches
from engine_api.errors import ConfigError

SPECS = ("auto", "local", "te")
CHECKPOINTS = ("portable", "megatron")


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronOptions:
    """Options of engine-megatron (``EngineConfig.options``)."""

    # Whose layers: Megatron's own (local) or Transformer Engine's (te). auto: te on CUDA where it is installed and the
    # computation is not float32, which it does not have; the log says which it is.
    spec: Literal["auto", "local", "te"] = "auto"
    # Split norms and residuals over the tensor-parallel ranks by tokens (Korthikanti et al. 2022, arXiv:2205.05198).
    sequence_parallel: bool = False
    # Tensor-parallel ranks that split each expert's matrices; 0: all of them. With 1, parallelism.ep spreads whole experts
    # over the tensor-parallel ranks as well.
    expert_tensor_parallel: int = 0
    # Model chunks on each rank of a pipeline, which a micro-batch visits in turn: smaller bubbles for more messages
    # (Narayanan et al. 2021, arXiv:2104.04473). Micro-batches are filled up with empty ones to a multiple of parallelism.pp.
    virtual_stages: int = 1
    # The embedding's rows are padded to a multiple of this and of tp; padding is in no export and no checkpoint.
    vocabulary_multiple: int = 1
    # What save_checkpoint writes: engine-api's layout, which every engine loads in every layout, or Megatron's own, for which
    # nothing is gathered: it loads here alone, with the same layout but for dp and cp. load_checkpoint reads either.
    checkpoint: Literal["portable", "megatron"] = "portable"
    timeout_s: int = 600
    """Seconds that a rank may keep the others waiting in a collective, or be silent (stopped, its host lost), after which the
    call ends with ``RankFailure`` on them; in Megatron's groups whole minutes, one at least. A rank whose process is gone is
    noticed within seconds."""

    def __post_init__(self) -> None:
        for name, what, known in (
            ("spec", "layer spec", SPECS),
            ("checkpoint", "format", CHECKPOINTS),
        ):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(
                    f"options.{name}",
                    f"unknown {what} {value!r}",
                    remedy=near_matches(str(value), known),
                )
        if self.expert_tensor_parallel < 0:
            raise ConfigError(
                "options.expert_tensor_parallel",
                f"{self.expert_tensor_parallel} is negative",
                remedy="give 1 or more, or 0 for as many as tp",
            )
        for name in ("virtual_stages", "vocabulary_multiple", "timeout_s"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"options.{name}",
                    f"{getattr(self, name)} is not positive",
                    remedy="give 1 or more",
                )


def megatron_options(options: Any) -> MegatronOptions:
    """The options from what the configuration holds (None, a mapping or the dataclass)."""
    result: MegatronOptions = build_options(options, MegatronOptions)
    return result
