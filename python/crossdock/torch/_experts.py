"""Parameters of experts, of which ranks hold different slices: how a model says which those are.

The mark stands on the module that has the parameters, so that it goes along with the model,
whatever wraps that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ._comm import Comm
from ._group import EpGroup
from ._sharding import as_share, convert_loaded

__all__ = [
    "ExpertHome",
    "expert_parameters",
    "make_shares",
    "mark_experts",
    "require_ordered",
]

_MARK = "_crossdock_experts"


class ExpertHome(NamedTuple):
    """Where the experts of a marked module lie.

    Attributes:
        group: the ``EpGroup`` whose experts they are.
    """

    group: EpGroup

    @property
    def comm(self) -> Comm:
        """The communicator of the ranks that hold the experts."""
        return self.group.comm

    @property
    def num_experts(self) -> int:
        """E, over all ranks."""
        return self.group.num_experts

    @property
    def num_local_experts(self) -> int:
        """L, of this rank."""
        return self.group.num_local_experts

    @property
    def first_expert(self) -> int:
        """This rank's first one."""
        return self.group.comm.rank * self.group.num_local_experts


def mark_experts(module: nn.Module, group: EpGroup) -> nn.Module:
    """Says that the parameters of ``module`` are those of this rank's experts. Local.

    For layers of your own, of `EpGroup.prepare`, `dispatch` and `combine`: `average_gradients`,
    `clip_grad_norm_`, `parameter_groups`, `data_parallel`, `assert_replicated`, `GradScaler` and
    checkpoints then know them as they know those of a `MoELayer`, which marks its own. Mark a
    module before an optimiser or a wrapper takes its parameters.

    Where torch.distributed stands behind the communicator each parameter ``[L, ...]`` is replaced
    by a DTensor ``[E, ...]`` over `Comm.mesh`, of which this rank has its slices: `grouped_mm`
    takes it as it is, and for anything else `local_tensor` gives the slices. Elsewhere, and on one
    rank, parameters stay plain tensors.

    Args:
        module: all its parameters have a slice for each of the L experts of this rank, in order,
            along their first dimension. ``[L, N, M]`` for `grouped_mm`.
        group: E / W experts on every rank, in order; other groups of the same experts may be used
            in the forward pass.

    Returns:
        ``module``.

    Raises:
        TypeError: no module, or no group.
        ValueError: a parameter has another first dimension; the module has been marked; or the
            group has ``expert_ranks``. Nothing has changed.
    """
    if not isinstance(module, nn.Module) or not isinstance(group, EpGroup):
        got = f"{type(module).__name__} and {type(group).__name__}"
        raise TypeError(f"mark_experts: expected a torch.nn.Module and an EpGroup, got {got}")
    require_ordered(group)
    make_shares("module", module, group)
    return module


def require_ordered(group: EpGroup) -> None:
    """Refuses a group whose experts do not lie as parameters have them."""
    if group.expert_ranks is not None:
        raise ValueError(
            "group: expected E / W experts on every rank, in order, as parameters have them; got "
            "a group with expert_ranks"
        )


def make_shares(argument: str, module: nn.Module, group: EpGroup) -> None:
    """`mark_experts`, of a module that an argument of this name has given."""
    if any(hasattr(one, _MARK) for one in module.modules()):
        raise ValueError(f"{argument}: expected one that has not been marked, got one that has")
    count, found = group.num_local_experts, list(module.named_parameters())
    for name, parameter in found:
        if parameter.dim() == 0 or parameter.shape[0] != count:
            raise ValueError(
                f"{argument}.{name}: expected a slice for each of the {count} experts of this "
                f"rank, got shape {tuple(parameter.shape)}"
            )
    for name, parameter in found:
        share = nn.Parameter(as_share(parameter.detach(), group.comm), parameter.requires_grad)
        path, _, last = name.rpartition(".")
        setattr(module.get_submodule(path), last, share)
    setattr(module, _MARK, ExpertHome(group))
    module.register_load_state_dict_pre_hook(_convert_loaded)


def expert_parameters(model: nn.Module) -> dict[nn.Parameter, ExpertHome]:
    """The parameters of ``model`` of which ranks hold different slices, and where these lie."""
    homes = ((module, getattr(module, _MARK, None)) for module in model.modules())
    return {
        parameter: home
        for module, home in homes
        if home is not None
        for parameter in module.parameters()
    }


def _convert_loaded(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: plain tensors of experts become as the parameters are."""
    home: ExpertHome = getattr(module, _MARK)
    for name, parameter in module.named_parameters():
        key = prefix + name
        if key in state:
            state[key] = convert_loaded(state[key], parameter, home.first_expert)
