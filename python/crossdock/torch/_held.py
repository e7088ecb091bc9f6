"""The parts that ranks hold of parameters of layers of tensor parallelism, as these layers say."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from ._comm import Comm
from ._experts import expert_parameters
from ._sharding import is_share, like, local_tensor, ranks_of

__all__ = [
    "Held",
    "gradient_of",
    "held_parameters",
    "refuse_two_gradients",
    "spread_parameters",
]


class Held(NamedTuple):
    """How the ranks of a layer of tensor parallelism hold one of its parameters."""

    comm: Comm
    dim: int | None  # along which ranks have different parts; None = all ranks hold the same
    sequence_parallel: bool  # its gradient is the sum over all ranks' losses
    fused_wgrad: bool  # its gradient is added to ``main_grad``


def held_parameters(model: nn.Module) -> dict[torch.Tensor, Held]:
    """The parameters of ``model`` that its layers of tensor parallelism have.

    Raises:
        ValueError: layers that share a parameter hold it in different ways.
    """
    found: dict[torch.Tensor, Held] = {}
    for name, layer in model.named_modules():
        own: dict[str, Held] = getattr(layer, "held_parameters", dict)()
        for key, held in own.items():
            parameter = getattr(layer, key)
            if found.setdefault(parameter, held) != held:
                raise ValueError(
                    f"{name}.{key}: expected layers that share a parameter to agree on "
                    f"sequence_parallel and fused_wgrad, got {found[parameter]} and {held}"
                )
    return found


def spread_parameters(model: nn.Module) -> dict[torch.Tensor, Held]:
    """The parameters of layers of tensor parallelism, ours and torch's own beside them."""
    held = held_parameters(model)
    return held | _of_torchs_layers(model, held)


def _of_torchs_layers(model: nn.Module, held: dict[torch.Tensor, Held]) -> dict[torch.Tensor, Held]:
    """The DTensors that torch's own styles have made, on a mesh of a communicator of `held`.

    Dimensions of FSDP's own mesh count for none: over those FSDP averages gradients.
    """
    comms = {how.comm: how.sequence_parallel for how in held.values()}
    of_fsdp = _meshes_of_fsdp(model)
    known = {*held, *expert_parameters(model)}
    found: dict[torch.Tensor, Held] = {}
    for parameter in model.parameters():
        share: Any = parameter
        if parameter in known or not is_share(share):
            continue
        mesh = share.device_mesh
        along = _along_all(mesh)
        averaged = _along_all(of_fsdp[parameter]) if parameter in of_fsdp else []
        for comm, sequence_parallel in comms.items():
            dims = [dim for dim, ranks in enumerate(along) if ranks == _ranks(comm)]
            dims = [dim for dim in dims if along[dim] not in averaged]
            if dims:
                placement = share.placements[dims[0]]
                dim = placement.dim if placement.is_shard() else None
                found[parameter] = Held(comm, dim, sequence_parallel, False)
    return found


def _ranks(comm: Comm) -> set[int]:
    return set() if comm.mesh is None else ranks_of(comm.mesh)


def _ranks_along(mesh: Any, dim: int) -> set[int]:
    return set(torch.distributed.get_process_group_ranks(mesh.get_group(dim)))


def _along_all(mesh: Any) -> list[set[int]]:
    return [_ranks_along(mesh, dim) for dim in range(mesh.ndim)]


def _meshes_of_fsdp(model: nn.Module) -> dict[torch.Tensor, Any]:
    """The parameters that FSDP has sharded, and the meshes that it was given for them.

    Torch tells neither in public: of a DTensor over several dimensions it does not say whose they
    are.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nobody has used it
        return {}
    found = {}
    for module in model.modules():
        if not isinstance(module, fsdp.FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        several = hasattr(state, "_fsdp_param_groups")  # newer releases of torch
        groups = state._fsdp_param_groups if several else [state._fsdp_param_group]
        for group in filter(None, groups):
            for one in group.fsdp_params:
                found[one.sharded_param] = one.mesh_info.mesh
    return found


def gradient_of(parameter: Any, how: Held | None) -> Any:
    """The gradient, as a DTensor where the parameter is one; None where there is none."""
    if how is None or not how.fused_wgrad:
        return parameter.grad
    main = getattr(parameter, "main_grad", None)
    if main is None or is_share(main) or not is_share(parameter):
        return main
    return like(main, parameter)


def refuse_two_gradients(model: nn.Module, held: dict[torch.Tensor, Held]) -> None:
    """Refuses weights with `fused_wgrad` whose gradient is not in ``main_grad`` alone.

    Raises:
        ValueError: names one: something else uses it, too, and left a gradient in ``grad``.
    """
    for name, parameter in model.named_parameters():
        how = held.get(parameter)
        if how is None or not how.fused_wgrad or parameter.grad is None:
            continue
        grad, main = local_tensor(parameter.grad), gradient_of(parameter, how)
        if main is not None and local_tensor(main).data_ptr() == grad.data_ptr():
            continue
        if grad.any():
            raise ValueError(
                f"{name}.grad: expected None, zeros or main_grad itself, as the layer's "
                "fused_wgrad adds gradients to main_grad; got others: if something else uses the "
                "weight, too, set fused_wgrad=False, and if they are copies of an earlier step, "
                "clear them"
            )
