"""Scaled losses of float16 training, for models of which ranks hold different parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ._sharding import is_share, local_tensor, sharded_dims

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, whose methods it has, for experts and other parts over ranks.

    Torch's own raises where an optimiser has plain parameters and DTensors. This one unscales this
    rank's part of each, and the ranks agree on whether a gradient is infinite or NaN: where one
    rank's experts overflow all ranks leave the step out, and lower the scale. So `unscale_`, or
    `step` where that has not been called, is collective.

    Call it after `average_gradients`, which takes an overflow of what every rank holds to all of
    them: ``scaler.scale(loss).backward()``, `average_gradients`, ``scaler.unscale_(optimizer)``,
    `clip_grad_norm_`, ``scaler.step(optimizer)``, ``scaler.update()``.

    Gradients in ``main_grad`` (`fused_wgrad`) are no optimiser's, and are left as they are.
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        parts = [_part_of_gradient(p) for p in parameters if p.grad is not None]
        plain: Any = SimpleNamespace(param_groups=[{"params": parts}])
        found = super()._unscale_grads_(plain, inv_scale, found_inf, allow_fp16)
        # A rank without a gradient takes part, too.
        found.setdefault(found_inf.device, found_inf)
        with torch.no_grad():
            verdict = torch.stack([one.to(found_inf.device) for one in found.values()]).amax()
            for ranks in _ranks_of_parts(parameters):
                dist.all_reduce(verdict, dist.ReduceOp.MAX, group=ranks)
            for one in found.values():
                one.copy_(verdict)
        return found


def _part_of_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A plain tensor whose ``grad`` is this rank's part of a parameter's gradient."""
    gradient = local_tensor(parameter.grad)
    stand_in = gradient.detach()
    stand_in.grad = gradient
    return stand_in


def _ranks_of_parts(parameters: list[Any]) -> list[ProcessGroup]:
    """The groups of ranks that hold different parts of some parameter, in one order on all."""
    found: dict[tuple[int, ...], ProcessGroup] = {}
    for parameter in parameters:
        for dim in sharded_dims(parameter) if is_share(parameter) else ():
            group = parameter.device_mesh.get_group(dim)
            found.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return list(found.values())
