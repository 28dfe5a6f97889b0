"""Settings and the reset of modules that ``fully_shard`` has wrapped."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["reset_after_failure", "sum_gradients"]


def sum_gradients(root: nn.Module) -> None:
    """Let every wrapped module under ``root`` reduce gradients as sums, not as means.

    The loss is already divided by the global denominator, so ranks only add.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


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
            # Gradients kept between micro-batches must go too. reset_iter_state leaves them, and
            # torch has no public name for them.
            group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001
            for param in group.fsdp_params if group is not None else ():
                param.unsharded_accumulated_grad = None
                # Gradients in the dtype of the reduction are kept here instead.
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None  # noqa: SLF001
