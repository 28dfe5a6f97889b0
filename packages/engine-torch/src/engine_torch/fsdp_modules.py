"""Settings and the reset of modules that ``fully_shard`` has wrapped."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["LateGradients", "reset_after_failure", "sum_gradients"]


def sum_gradients(root: nn.Module) -> None:
    """Let every wrapped module under ``root`` reduce gradients as sums, not as means.

    The loss is already divided by the global denominator, so ranks only add.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


class LateGradients:
    """First gradients that parameters get after the first micro-batch, in the reduction's dtype.

    FSDP keeps the gradients of a step's earlier micro-batches in that dtype, and those of the last
    one in the dtype of the computation. It refuses to reduce a block that has both, as where the
    tower of a model gets its first image in the last micro-batch.

    Every block is gathered once, since FSDP also fails for one that no pass has reached.
    """

    def __init__(self, root: nn.Module) -> None:
        self.is_late = False
        """True in the micro-batches after the first."""
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                for param in _list_params(module):
                    if param.unsharded_param.requires_grad:
                        hook = partial(self._accumulate, param)
                        param.unsharded_param.register_post_accumulate_grad_hook(hook)
                module.reshard()

    def _accumulate(self, param: Any, unsharded: Tensor) -> None:
        gradient = unsharded.grad
        if not self.is_late or param.unsharded_accumulated_grad is not None:
            return
        if gradient is not None and param.reduce_dtype is not None:
            param.unsharded_accumulated_grad = gradient.to(param.reduce_dtype)
            unsharded.grad = None


def _list_params(module: FSDPModule) -> list[Any]:
    """Return FSDP's own parameters of a wrapped module, for which torch has no public name."""
    group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001
    return group.fsdp_params if group is not None else []


def reset_after_failure(root: nn.Module) -> None:
    """Bring FSDP back to its state between iterations, after an exception interrupted one."""
    if not isinstance(root, FSDPModule):
        return
    # torch 2.13 and later have this method.
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            # Gradients kept between micro-batches must go too. reset_iter_state leaves them.
            for param in _list_params(module):
                param.unsharded_accumulated_grad = None
                # Gradients in the dtype of the reduction are kept here instead.
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None  # noqa: SLF001
