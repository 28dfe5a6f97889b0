"""Optimizers by name, their groups of weights, and the state that they keep of a weight."""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engine_api.config import OptimizerConfig
from engine_api.devices import device_of
from engine_api.errors import CheckpointMismatch, ConfigError
from engine_api.manifest import OPTIMIZER, WEIGHTS, Entry, field_of

if TYPE_CHECKING:
    import torch


_RATIO = "rate_ratio"
"""Key of a parameter group: its learning rate as a multiple of ``optimizer.lr``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedWeight:
    """A tensor that an optimizer updates, and what decides about its parameter group."""

    tensor: torch.Tensor
    """The tensor itself, which may be any part of the weight, in any shape."""

    name: str
    """Name of the weight in the model's files."""

    dims: int
    """Number of dimensions of the weight in the model's files."""

    part: str = ""
    """Part of the model, by its name in ``optimizer.part_lr``; empty for no part."""


def group_weights(config: OptimizerConfig, weights: Iterable[TrainedWeight]) -> list[Any]:
    """Return the parameter groups of ``optimizer.decay`` and ``optimizer.part_lr``, as torch's.

    Their order is that of their first weights. Without either option there is one group, and
    without weights none.
    """
    groups: dict[tuple[bool, float], list[torch.Tensor]] = {}
    for weight in weights:
        decays = config.decay == "all" or _decays_as_matrix(weight.name, weight.dims)
        rate = config.part_lr.get(weight.part)
        ratio = 1.0 if rate is None else rate / config.lr
        groups.setdefault((decays, ratio), []).append(weight.tensor)
    made: list[dict[str, Any]] = []
    for (decays, ratio), tensors in groups.items():
        group: dict[str, Any] = {"params": tensors, _RATIO: ratio}
        if not decays:
            group["weight_decay"] = 0.0
        made.append(group)
    return made


def _decays_as_matrix(name: str, dims: int) -> bool:
    """Return whether ``optimizer.decay: matrices`` names a weight, by its name in files.

    A bias may have two dimensions: those of stacked experts have a row for each.
    """
    return dims >= 2 and not name.endswith("bias")


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each parameter group of ``group_weights`` its rate, where the schedule is at ``lr``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(_RATIO, 1.0)


def build_optimizer(
    config: OptimizerConfig, params: Iterable[torch.Tensor] | Iterable[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Build ``adamw`` or a torch optimizer by path.

    ``adamw`` is fused where the weights' device has it. Raises ``ConfigError`` for a name that is
    not an optimizer, and for arguments that the optimizer refuses.

    Args:
        config: the optimizer and its hyperparameters.
        params: tensors, which are one parameter group, or the groups of ``group_weights``.
    """
    import torch

    given: list[Any] = list(params)
    if config.name != "adamw":
        return construct(optimizer_class(config.name), given, config)
    tensors: list[torch.Tensor] = []
    for one in given:
        tensors += [one] if isinstance(one, torch.Tensor) else one["params"]
    fused = all(device_of(tensor.device.type).fused_optimizer for tensor in tensors)
    own = {"betas": config.betas, "eps": config.eps, "fused": fused}
    return construct(torch.optim.AdamW, given, config, own)


def optimizer_class(path: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer's class at ``path``.

    Raises ``ConfigError`` for a path that cannot be imported, or that is not of an optimizer.
    """
    import torch

    try:
        cls = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "optimizer.name",
            f"{path!r} is not adamw and cannot be imported",
            why=str(error),
            remedy="give adamw or a class by path, torch.optim.SGD",
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(
            "optimizer.name",
            f"{path!r} is not a torch optimizer",
            remedy="give a subclass of torch.optim.Optimizer, such as torch.optim.SGD",
        )
    return cls


def construct(
    cls: type[torch.optim.Optimizer],
    params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
    config: OptimizerConfig,
    own: Mapping[str, Any] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """Construct an optimizer with the arguments of its configuration, and ``own`` ones.

    Raises ``ConfigError`` for arguments that it refuses.
    """
    arguments = {"lr": config.lr, "weight_decay": config.weight_decay, **own, **config.kwargs}
    # The base class has other arguments than its subclasses.
    subclass: Any = cls
    try:
        made: torch.optim.Optimizer = subclass(params, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "optimizer.kwargs",
            f"{config.name} refuses its arguments",
            why=str(error),
            remedy="optimizer.lr, weight_decay and kwargs are passed to its constructor",
        ) from error
    return made


def state_fields(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the names of the state that an optimizer keeps for a weight.

    They are found with a step on a trial weight.
    """
    import torch

    return set(_state_of_a_weight(optimizer, torch.float32))


def state_dtypes(optimizer: torch.optim.Optimizer, weights: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of each field of the optimizer's state for weights of dtype ``weights``.

    Raises ``CheckpointMismatch`` for state that is not a tensor, because no checkpoint can be
    loaded into it.
    """
    state = _state_of_a_weight(optimizer, weights)
    if other := sorted(field for field, value in state.items() if not hasattr(value, "dtype")):
        raise CheckpointMismatch(
            "no checkpoint can be loaded into this optimizer",
            where=f"optimizer {type(optimizer).__name__}",
            why=f"its {', '.join(other)} is not a tensor",
            remedy="use adamw",
        )
    return {field: value.dtype for field, value in state.items()}


def _state_of_a_weight(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> dict[str, Any]:
    import torch

    probe: Any = copy.copy(optimizer)
    # A rank may have no weight of some groups.
    own = next(one for group in optimizer.param_groups for one in group["params"])
    param = torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype, device=own.device))
    param.grad = torch.zeros_like(param)
    state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    probe.state = state
    probe.param_groups = [{**optimizer.param_groups[0], "params": [param]}]
    type(optimizer).step(probe)
    return state[param]


def has_scalars_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether scalar state (a step count) is on its weight's device, not on the host."""
    return bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))


def check_fields(optimizer: torch.optim.Optimizer, keys: Iterable[str]) -> None:
    """Raise ``CheckpointMismatch`` if the ``optim.`` keys are of a different kind of optimizer."""
    saved = {key.rpartition(".")[2] for key in keys if key.startswith("optim.")}
    if saved and saved != (own := state_fields(optimizer)):
        raise CheckpointMismatch(
            "the checkpoint is of another optimizer",
            where=f"optimizer {type(optimizer).__name__}",
            why=f"it keeps {', '.join(sorted(own)) or 'nothing'}, "
            f"saved is {', '.join(sorted(saved))}",
            remedy="load it with the optimizer that it was saved with",
        )


def check_shapes(optimizer: torch.optim.Optimizer, entries: Mapping[str, Entry]) -> None:
    """Raise ``CheckpointMismatch`` for saved state whose shape is not that of the optimizer's.

    A field of the optimizer's state is a scalar, or has its weight's shape.
    """
    import torch

    state = _state_of_a_weight(optimizer, torch.float32)
    scalars = {kept for kept, value in state.items() if hasattr(value, "dim") and not value.dim()}
    for key, entry in entries.items():
        if (found := field_of(key)) is None:
            continue
        name, kept = found
        weight = next((entries[k] for kind in WEIGHTS if (k := f"{kind}.{name}") in entries), None)
        # The checkpoint is of a different model. The keys are compared elsewhere.
        if weight is None:
            continue
        expected = () if kept in scalars else weight.shape
        if entry.shape != expected:
            raise CheckpointMismatch(
                f"{key} has the shape {entry.shape}",
                where=f"optimizer {type(optimizer).__name__}",
                why=f"it keeps {kept} of this weight in the shape {expected}",
                remedy="load it with the optimizer that it was saved with",
            )


def loaded_dtypes(
    optimizer: torch.optim.Optimizer, weights: torch.dtype, entries: Mapping[str, Entry]
) -> dict[str, torch.dtype]:
    """Return ``state_dtypes`` for a checkpoint with these entries.

    The result is empty for a checkpoint without ``optim.`` keys, which any optimizer accepts.
    Raises ``CheckpointMismatch`` as ``check_fields``, ``check_shapes`` and ``state_dtypes`` do.
    """
    check_fields(optimizer, entries)
    if not any(key.startswith(OPTIMIZER) for key in entries):
        return {}
    check_shapes(optimizer, entries)
    return state_dtypes(optimizer, weights)
