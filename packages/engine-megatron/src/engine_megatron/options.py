"""Options that only this engine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from engine_api.balance import check_balance_loss
from engine_api.config import build_options, near_matches
from engine_api.errors import ConfigError

SPECS = ("auto", "local", "te")
CHECKPOINTS = ("portable", "megatron")


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronOptions:
    """Options of engine-megatron (``EngineConfig.options``)."""

    spec: Literal["auto", "local", "te"] = "auto"
    """Layers of the model: Megatron's own (``local``) or Transformer Engine's (``te``).

    ``auto`` means ``te`` on CUDA where Transformer Engine is installed and the computation is not
    in float32, which it does not have. The log names the choice.
    """

    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks by tokens.

    See Korthikanti et al. 2022, arXiv:2205.05198.
    """

    expert_tensor_parallel: int = 0
    """Number of tensor-parallel ranks that split each expert's matrices, where 0 means all.

    With 1, ``parallelism.ep`` spreads whole experts over the tensor-parallel ranks as well.
    """

    virtual_stages: int = 1
    """Number of model chunks on each rank of a pipeline, which a micro-batch visits in turn.

    More chunks make the bubbles smaller and the messages more (Narayanan et al. 2021,
    arXiv:2104.04473). Empty micro-batches are added up to a multiple of ``parallelism.pp``.
    """

    vocabulary_multiple: int = 1
    """Number that the embedding's rows are padded to a multiple of, times tp.

    The padding is in no export and no checkpoint.
    """

    balance_loss: float = 0.0
    """Factor of the balance loss of a mixture of experts in training, where 0 means none.

    It is DeepSeek-V3's for each document (arXiv:2412.19437, equations 17 to 20), summed over layers
    and averaged over the documents of a step by their tokens, prompts included. It is 1 for each
    layer whose experts serve equally many tokens of each document. Neither packing nor
    micro-batches nor the layout change it. Each call of ``forward_backward`` adds the mean over its
    own documents. The metric ``balance_loss`` is its value without the factor. The ``loss`` of a
    call is without it. It excludes ``router_replay``, whose selection is not the routers' own.
    """

    checkpoint: Literal["portable", "megatron"] = "portable"
    """Format that save_checkpoint writes.

    load_checkpoint reads both formats. ``portable`` is engine-api's format, which every engine
    loads in every layout. ``megatron`` is Megatron's own, for which nothing is gathered. Only this
    engine loads it, in a layout that differs in dp and cp at most.
    """

    timeout_s: int = 600
    """Seconds that a rank may keep other ranks waiting in a collective, or be silent.

    A rank is silent if it is stopped or its host is lost. After this time the call ends with
    ``RankFailure`` on the other ranks. Megatron's groups use whole minutes, at least one. A rank
    whose process is gone is noticed within seconds.
    """

    def __post_init__(self) -> None:
        for name, what, known in (
            ("spec", "layer spec", SPECS),
            ("checkpoint", "format", CHECKPOINTS),
        ):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(
                    f"options.{name}",
                    f"expected a known {what}, got {value!r}",
                    remedy=near_matches(str(value), known),
                )
        check_balance_loss(self.balance_loss)
        if self.expert_tensor_parallel < 0:
            raise ConfigError(
                "options.expert_tensor_parallel",
                f"expected 0 or more, got {self.expert_tensor_parallel}",
                remedy="give 1 or more, or 0 for as many as tp",
            )
        for name in ("virtual_stages", "vocabulary_multiple", "timeout_s"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"options.{name}",
                    f"expected 1 or more, got {getattr(self, name)}",
                    remedy="give 1 or more",
                )


def megatron_options(options: Any) -> MegatronOptions:
    """Return the options that a configuration holds as None, a mapping or the dataclass."""
    result: MegatronOptions = build_options(options, MegatronOptions)
    return result
