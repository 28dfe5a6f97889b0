"""The options of engine-fsdp, and those that engines on its code share with it."""

from __future__ import annotations

from dataclasses import dataclass

from engine_api.balance import check_balance_loss
from engine_api.config import near_matches
from engine_api.errors import ConfigError
from engine_torch.options import DTensorOptions, Float8Options

__all__ = ["FSDPOptions", "SharedOptions"]

_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedOptions(DTensorOptions):
    """The options of every engine on engine-fsdp's code, without compilation and FP8."""

    verify_model: bool = True
    """True checks packed log-probs against the model's own forward at the start.

    The model's own forward computes one document at a time.
    """

    balance_loss: float = 0.0
    """Factor of the balance loss of a mixture of experts in training, where 0 means none.

    It is DeepSeek-V3's for each document (arXiv:2412.19437, equations 17 to 20), summed over layers
    and averaged over the documents of a step by their tokens, prompts included. It is 1 for each
    layer whose experts serve equally many tokens of each document. Neither packing nor
    micro-batches nor ranks change it. Each call of ``forward_backward`` adds the mean over its own
    documents. The metric ``balance_loss`` is its value without the factor. The ``loss`` of a call
    is without it. It excludes ``router_replay``, whose selection is not the routers' own, and
    ``memory.share_prefixes``, where documents share tokens.
    """

    def __post_init__(self) -> None:
        # Slots give the class another identity, which super() without arguments does not know.
        DTensorOptions.__post_init__(self)
        check_balance_loss(self.balance_loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPOptions(Float8Options, SharedOptions):
    """The options of engine-fsdp (``EngineConfig.options``)."""

    float8_recipe: str = "rowwise"
    """Scales of the matrices that ``precision.compute: float8`` casts.

    ``rowwise`` has a scale for each row, so that an outlier costs precision in its row alone, and
    a token's log-prob does not depend on the other tokens. ``tensorwise`` has one for each matrix,
    whose products are faster. Its weights are cast in each pass (``cast_each_pass``).
    """

    compile_mode: str = "default"
    """Mode of torch.compile for each block, used when ``memory.compile`` is on."""

    kept_activations: float = 0.0
    """Share of the results of a block's linear layers, from 0 to below 1, that
    ``memory.recompute: full`` keeps for the backward pass where blocks are compiled.

    They are the first ones that fit, and everything else is computed again. A run of the trainer
    sets it by ``memory.kept_activations``. The option is for dense blocks: those with experts, with
    layers that carry a state from token to token, with adapters that have dropout, or with
    attention that is not compiled (scores with a cap, heads wider than 256, shared prefixes)
    compute everything again.
    """

    def __post_init__(self) -> None:
        # Slots give the class another identity, which super() without arguments does not know.
        SharedOptions.__post_init__(self)
        Float8Options.__post_init__(self)
        if not 0 <= self.kept_activations < 1:
            raise ConfigError(
                "options.kept_activations",
                f"expected a share from 0 to below 1, got {self.kept_activations:g}",
                remedy="give such a share; memory.recompute: none keeps all",
            )
        if self.compile_mode not in _COMPILE_MODES:
            raise ConfigError(
                "options.compile_mode",
                f"{self.compile_mode!r} is not a mode of torch.compile",
                remedy=near_matches(self.compile_mode, _COMPILE_MODES),
            )
