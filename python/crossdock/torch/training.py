"""Steps of a training loop on gradients and parameters of models that are spread over ranks.

The ranks of a communicator hold different experts, or parts of the weights of layers of tensor
parallelism, and the same of everything else. They may be one axis of a larger mesh: then ranks that
hold the same parts are replicas, and wrappers for data parallelism (`data_parallel`, or FSDP)
average over those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ._alike import axes_of, require_alike
from ._comm import Comm
from ._experts import expert_parameters
from ._held import Held, gradient_of, held_parameters, refuse_two_gradients, spread_parameters
from ._replicas import remember_replicas, replicas_of
from ._sharding import is_share, local_tensor, ranks_of, sharded_dims

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "assert_replicated",
    "average_gradients",
    "clip_grad_norm_",
    "data_parallel",
    "parameter_groups",
]


@torch.no_grad()
def average_gradients(model: nn.Module, *, between: Iterable[torch.Tensor] | None = None) -> None:
    """Turns gradients into gradients of the loss averaged over ranks. Collective.

    Call it once per step, after the last backward pass: a second call would scale once more.

    Gradients of parameters that every rank holds are averaged over the communicator, and over its
    ``replicas`` where DistributedDataParallel in the model has not done so. An expert's gradient
    already is the sum over all its ranks' tokens, and is only scaled, and averaged over replicas.
    With equally many tokens per rank and a loss that is a mean over them, this is the gradient of
    one process with the whole batch. Parameters that FSDP has sharded over a mesh of which the
    communicator's ranks, or its replicas, are part are left alone there: FSDP has averaged them.

    Gradients in layers of `crossdock.torch.tp`, and in DTensors of torch's own layers beside them,
    are scaled as an expert's are, and averaged over ``replicas`` of their communicator; those that
    `fused_wgrad` has added to ``main_grad``, there. Without sequence parallelism all ranks of such
    a layer have the same tokens and the same loss, and its gradients are that loss's already.

    Ranks first compare which parameters require gradients, and how these are averaged. On GPUs
    whose process group has no backend for the host the host waits for that, and so for the backward
    pass; ``dist.init_process_group()`` without a backend makes one.

    Args:
        model: one `MoELayer` or more, or experts of `mark_experts`; or layers of tensor
            parallelism on one communicator. On several, each communicator with its ``replicas`` has
            equally many ranks. A parameter that has no gradient here counts as zero.
        between: needed where layers are without sequence parallelism: the parameters that every
            rank holds and uses for its own columns alone, such as a norm of heads. Their gradients
            are summed over the layer's ranks. () = there are none. Of the model, requiring
            gradients, and not sharded by FSDP over these ranks.

    Raises:
        ValueError: the model has no such layer, or layers of tensor parallelism both with sequence
            parallelism and without, or `between` is missing; or a parameter is sharded over some of
            the communicator's ranks and not over others, or ``replicas`` do not fit; or `between`
            has something else; or ``replicas`` are set and FSDP shards experts or parts over them;
            or a weight with `fused_wgrad` has a gradient beside ``main_grad``. Nothing has changed.
        TypeError: `between` is a tensor or a str.
        RuntimeError: the communicator was made without torch.distributed, which does the averaging;
            or parameters require gradients on some ranks only, or another rank has one of the
            errors above: on all ranks, and nothing has changed.
    """
    comms = _communicators_of(model, "average_gradients")
    ways: dict[torch.Tensor, _Way] = {}
    lines: list[str] = []
    failure: Exception | None = None
    try:
        ways = _ways(model, comms, between)
        lines = [f"{name}: {_described(p, ways)}" for name, p in model.named_parameters()]
    except (TypeError, ValueError) as error:
        failure = error
    axes = axes_of(comms, replicas_of(model))
    require_alike("average_gradients", axes, lines, failure, comms[0].device)
    spread = spread_parameters(model)
    means: dict[ProcessGroup, list[torch.Tensor]] = {}
    for parameter, (groups, divisor, factor) in ways.items():
        gradient = local_tensor(_gradient_or_zeros(parameter, spread.get(parameter)))
        if divisor > 1:
            gradient.div_(divisor)
        if factor > 1:
            gradient.mul_(factor)
        for group in groups:
            means.setdefault(group, []).append(gradient)
    for group, gradients in means.items():
        _average(gradients, group)


class _Way(NamedTuple):
    """The way of a parameter's gradient through averaging."""

    axes: list[ProcessGroup]  # it is averaged over them
    divisor: int
    factor: int


def _described(parameter: Any, ways: dict[torch.Tensor, _Way]) -> str:
    """The facts about a parameter that have to be the same on all ranks."""
    kind = f"{tuple(parameter.shape)} {parameter.dtype}"
    way = ways.get(parameter)
    if way is None:
        return f"{kind} without a gradient"
    return f"{kind} averaged {len(way.axes)} times, * {way.factor} / {way.divisor}"


def _ways(
    model: nn.Module, comms: list[Comm], between: Iterable[torch.Tensor] | None
) -> dict[torch.Tensor, _Way]:
    """Of all parameters that require gradients, before any is changed."""
    spread, experts = spread_parameters(model), expert_parameters(model)
    refuse_two_gradients(model, spread)
    comm, replicas = comms[0], replicas_of(model)
    _check_replicas(comms, spread, replicas)
    summed = _summed(model, comm, spread, between)
    by_ddp = _averaged_by_ddp(model, replicas(comm))
    ways: dict[torch.Tensor, _Way] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        how = spread.get(parameter)
        if how is not None or parameter in experts:
            home = experts[parameter].group.comm if how is None else how.comm
            divides = how is None or how.sequence_parallel
            axes = _replicas_of_part(parameter, replicas(home), name)
            ways[parameter] = _Way(axes, home.num_ranks if divides else 1, 1)
            continue
        over = [comm.process_group if comm.num_ranks > 1 else None]
        over += [] if parameter in by_ddp else [replicas(comm)]
        found = [group for group in over if group is not None]
        found = [group for group in found if not _covers(parameter, group, name)]
        ways[parameter] = _Way(found, 1, summed.get(parameter, 1))
    return ways


def _replicas_of_part(
    parameter: Any, replicas: ProcessGroup | None, name: str
) -> list[ProcessGroup]:
    """Over which ranks the gradient of an expert or of a part of a layer is averaged.

    Raises:
        ValueError: FSDP has sharded it over them, and each holds the gradient of another shard.
    """
    if replicas is None:
        return []
    others = set(dist.get_process_group_ranks(replicas)) - {dist.get_rank()}
    if is_share(parameter) and others & ranks_of(parameter.device_mesh):
        raise ValueError(
            f"{name}: expected Comm.replicas to be None where FSDP shards parameters over these "
            f"ranks, whose gradients it averages itself, got ranks {sorted(others)} beside "
            f"{dist.get_rank()} and {parameter.device_mesh}"
        )
    return [replicas]


def _averaged_by_ddp(model: nn.Module, replicas: ProcessGroup | None) -> set[torch.Tensor]:
    """The parameters whose gradients DistributedDataParallel in the model averages over these."""
    if replicas is None:
        return set()
    ranks = set(dist.get_process_group_ranks(replicas))
    found: set[torch.Tensor] = set()
    for ddp in model.modules():
        if not isinstance(ddp, DistributedDataParallel):
            continue
        if ranks <= set(dist.get_process_group_ranks(ddp.process_group)):
            ignored = ddp.parameters_to_ignore
            found |= {p for name, p in ddp.module.named_parameters() if name not in ignored}
    return found


def _gradient_or_zeros(parameter: torch.Tensor, how: Held | None) -> Any:
    """The gradient, which ranks hold alike or in parts."""
    gradient = gradient_of(parameter, how)
    if gradient is None:
        gradient = torch.zeros_like(parameter)
        if how is None or not how.fused_wgrad:
            parameter.grad = gradient
    if is_share(gradient) and any(placement.is_partial() for placement in gradient.placements):
        # As torch's sequence-parallel norms leave it: each rank has a summand.
        share: Any = parameter
        gradient = parameter.grad = gradient.redistribute(placements=share.placements)
    return gradient


def _summed(
    model: nn.Module,
    comm: Comm,
    spread: dict[torch.Tensor, Held],
    between: Iterable[torch.Tensor] | None,
) -> dict[torch.Tensor, int]:
    """Whose gradients are summed over ranks, and over how many."""
    kinds = {(how.comm, how.sequence_parallel) for how in spread.values() if how.comm.num_ranks > 1}
    comms = {comm for comm, _ in kinds}
    if len(kinds) > len(comms):
        raise ValueError(
            "model: expected layers of tensor parallelism either with sequence_parallel or without "
            "it, as the ranks' losses are of their own tokens or of all; got both"
        )
    given = [] if between is None else _checked_between(model, comm, spread, between)
    alike = [comm.num_ranks for comm, sequence_parallel in kinds if not sequence_parallel]
    if not alike:
        return {}
    if between is None:
        raise ValueError(
            "between: expected the parameters between layers without sequence_parallel that every "
            "rank holds and uses for its own columns alone, or () if there are none; got None"
        )
    return {parameter: alike[0] for parameter in given}


def _checked_between(
    model: nn.Module,
    comm: Comm,
    spread: dict[torch.Tensor, Held],
    between: Iterable[torch.Tensor],
) -> list[torch.Tensor]:
    """Refuses whatever has no gradient that every rank holds: it would be left out unseen."""
    wanted = "between: expected parameters of the model that require gradients, and that every rank"
    if isinstance(between, (torch.Tensor, str)):
        raise TypeError(f"{wanted} holds, as a list, got {type(between).__name__}")
    experts = expert_parameters(model)
    plain = {
        id(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter not in experts and parameter not in spread
        if comm.process_group is None or not _covers(parameter, comm.process_group, name)
    }
    given = list(between)
    for place, one in enumerate(given):
        if id(one) not in plain:
            names = [name for name, parameter in model.named_parameters() if parameter is one]
            shape = f" {tuple(one.shape)}" if isinstance(one, torch.Tensor) else f" {one!r}"
            got = names[0] if names else f"{type(one).__name__}{shape}, which is none of it"
            raise ValueError(f"{wanted} holds, got {got} in place {place}")
    return given


def _check_replicas(
    comms: list[Comm],
    spread: dict[torch.Tensor, Held],
    replicas: Callable[[Comm], ProcessGroup | None],
) -> None:
    """Refuses communicators with whose replicas there are fewer or more ranks than of the first."""

    def ranks(one: Comm) -> int:
        group = replicas(one)
        return one.num_ranks * (1 if group is None else dist.get_world_size(group))

    for other in {how.comm for how in spread.values()} | set(comms):
        if ranks(other) != ranks(comms[0]):
            raise ValueError(
                f"replicas: expected each communicator and its replicas to be the "
                f"{ranks(comms[0])} ranks that the model is spread over, got {ranks(other)}: set "
                "Comm.replicas to the process group of the ranks that hold the same parts"
            )


def _communicators_of(model: nn.Module, what: str) -> list[Comm]:
    """The communicators of the model's layers, fit for collectives of torch.distributed.

    The first one's ranks, with its replicas, are those that parameters are averaged over.
    """
    of_experts = {layer.group.comm: None for layer in expert_parameters(model).values()}
    of_parts = {how.comm: None for how in held_parameters(model).values()}
    if not of_experts and len(of_parts) != 1:
        got = f"layers on {len(of_parts)} communicators" if of_parts else "none"
        raise ValueError(
            "model: expected a MoELayer in it, or experts that mark_experts has marked, or layers "
            f"of tensor parallelism on one communicator; got {got}"
        )
    comms = list(of_experts | of_parts)
    for comm in comms:
        if comm.num_ranks > 1 and comm.process_group is None:
            raise RuntimeError(
                f"{what}: expected torch.distributed to be initialised before "
                "crossdock.torch.init, got a communicator without it"
            )
    return comms


def _covers(parameter: Any, group: ProcessGroup, name: str) -> bool:
    """Whether a parameter is a DTensor over all ranks of a communicator, or of its replicas.

    Raises:
        ValueError: over some of them, beside this one.
    """
    if not is_share(parameter):
        return False
    ranks = set(dist.get_process_group_ranks(group))
    common = ranks & ranks_of(parameter.device_mesh)
    if common not in (ranks, {dist.get_rank()}):
        raise ValueError(
            f"{name}: expected a parameter sharded over all of the communicator's ranks, or of its "
            f"replicas, {sorted(ranks)} or over one of them, got {parameter.device_mesh}"
        )
    return common == ranks


def _average(tensors: list[torch.Tensor], process_group: ProcessGroup | None) -> None:
    """Over ranks, in place."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for parts in alike.values():
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=process_group)
        flat.div_(dist.get_world_size(process_group))
        for part, mean in zip(parts, flat.split([part.numel() for part in parts])):
            part.copy_(mean.view_as(part))


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales gradients so that their norm over all ranks is at most `max_norm`. Collective.

    As ``torch.nn.utils.clip_grad_norm_``, which knows nothing of experts on other ranks, nor of
    ``main_grad``. Call it
    after `average_gradients`; every rank scales by the same factor.

    Args:
        model: as of `average_gradients`; FSDP may have sharded it.
        max_norm: of all gradients together, each expert, part and parameter counted once.
        norm_type: p of the p-norm, above 0; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: whether a norm that is no finite number is an error; else gradients are
            scaled by it.

    Returns:
        The norm before scaling, ``[]`` float32, equal on all ranks.

    Raises:
        ValueError: the model has no such layer, or `norm_type` is not above 0, or a weight with
            `fused_wgrad` has a gradient beside ``main_grad``.
        RuntimeError: the communicator was made without torch.distributed; a norm that is not
            finite, where that is an error.
    """
    comm = _communicators_of(model, "clip_grad_norm_")[0]
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a number above 0, got {norm_type}")
    spread = held_parameters(model)
    refuse_two_gradients(model, spread)
    found = (gradient_of(p, spread.get(p)) for p in model.parameters())
    gradients = [gradient for gradient in found if gradient is not None]
    total = _total_norm(gradients, float(norm_type), comm.device)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} is {total.item()}, expected a finite "
            "one, as error_if_nonfinite is set"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        part = local_tensor(gradient)
        part.mul_(factor.to(part.device, part.dtype))
    return total


def _total_norm(gradients: list[Any], order: float, device: torch.device) -> torch.Tensor:
    """The norm of all gradients together; DTensors count with the parts of all their ranks."""
    # Where a gradient's parts lie: in this rank, or along some dimensions of a mesh.
    places: dict[Any, list[torch.Tensor]] = {(): []}
    for gradient in gradients:
        dims = sharded_dims(gradient) if is_share(gradient) else ()
        key = (gradient.device_mesh, dims) if dims else ()
        part = local_tensor(gradient)
        if part.numel():
            places.setdefault(key, []).append(
                torch.linalg.vector_norm(part, order, dtype=torch.float32).to(device)
            )
        else:  # this rank still takes part in the sum over ranks
            places.setdefault(key, [])
    norms = []
    for key, parts in places.items():
        norm = torch.zeros((), dtype=torch.float32, device=device)
        if parts:
            norm = torch.linalg.vector_norm(torch.stack(parts), order)
        if key:
            mesh, dims = key
            norm = _norm_over_ranks(norm, order, [mesh.get_group(dim) for dim in dims])
        norms.append(norm)
    return torch.linalg.vector_norm(torch.stack(norms), order)


def _norm_over_ranks(norm: torch.Tensor, order: float, groups: list[Any]) -> torch.Tensor:
    """The norm of the ranks' norms, along one group of ranks after another."""
    if order != math.inf:
        total = norm.pow(order)
        for group in groups:
            dist.all_reduce(total, group=group)
        return total.pow(1 / order)
    # A backend's maximum of NaN and a number may be the number, so NaN travels as a flag.
    largest = torch.stack((norm.nan_to_num(nan=0.0, posinf=math.inf), norm.isnan().to(norm.dtype)))
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest[0].masked_fill(largest[1] > 0, math.nan)


def parameter_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Groups for an optimiser: what every rank holds, experts, parts of tensor parallelism.

    With several of them in one group, torch's optimisers take their slowest path, one operator
    after another, and ``foreach=True`` and ``fused=True`` raise, as those operators take either
    plain tensors or DTensors of one mesh. In groups of their own all ways work.
    """
    experts, homes = expert_parameters(model), _homes(model)
    groups = [
        {"params": [p for p in model.parameters() if p not in homes]},
        {"params": list(experts)},
        {"params": [p for p in model.parameters() if p in homes and p not in experts]},
    ]
    return [group for group in groups if group["params"]]


def data_parallel(
    model: nn.Module, replicas: ProcessGroup | DeviceMesh, **options: Any
) -> DistributedDataParallel:
    """DistributedDataParallel over ranks that hold the same parts of the model. Collective.

    DDP takes plain parameters only, so experts and parts of layers of tensor parallelism are left
    out of it: as in DDP they begin as those of the group's first rank, and `average_gradients`,
    which is needed anyway, averages their gradients over replicas.

    Args:
        model: as of `average_gradients`.
        replicas: the ranks that hold the same experts as this one: the data axis of a mesh whose
            other axis is the communicator's, as the other steps on this model then know. Other
            communicators of the model that have ``replicas`` keep them.
        options: further arguments of DistributedDataParallel.

    Raises:
        ValueError: the model has no such layer; `replicas` has other ranks of a communicator, which
            hold other parts, and is not part of it.
    """
    comms = _communicators_of(model, "data_parallel")
    group: Any = replicas.get_group() if hasattr(replicas, "get_group") else replicas
    told = {
        comm: group if comm is comms[0] else comm.replicas or group
        for comm in _with_replicas(comms, group)
    }
    homes = _homes(model)
    remember_replicas(model, homes, told)
    for parameter, comm in homes.items():
        replicas_here = replicas_of(model)(comm)
        if replicas_here is not None:
            first = dist.get_global_rank(replicas_here, 0)
            part = local_tensor(parameter.detach())
            dist.broadcast(part, first, group=replicas_here)
    ignored = [name for name, parameter in model.named_parameters() if parameter in homes]
    ignored += getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model, process_group=group, **options)


def _with_replicas(comms: list[Comm], group: ProcessGroup) -> list[Comm]:
    """The communicators whose parts the ranks of `group` hold alike, or those of `replicas` do.

    The others have all ranks of `group`, which hold different parts.
    """
    ranks, alike = set(dist.get_process_group_ranks(group)), []
    for comm in comms:
        common = {dist.get_rank()}
        if comm.process_group is not None:
            common = ranks & set(dist.get_process_group_ranks(comm.process_group))
        if common == {dist.get_rank()}:
            alike.append(comm)
        elif common != ranks or len(comms) == 1:
            raise ValueError(
                "replicas: expected ranks that hold the same experts as this one, got ranks "
                f"{sorted(common)} of its communicator, which hold different ones"
            )
    if not alike:
        raise ValueError(
            f"replicas: expected ranks {sorted(ranks)} to hold the same experts, or the same parts "
            "of layers of tensor parallelism; got ranks of all their communicators"
        )
    return alike


def _homes(model: nn.Module) -> dict[torch.Tensor, Comm]:
    """The parameters of which ranks hold different parts, and the communicator of these ranks."""
    homes = {
        parameter: how.comm
        for parameter, how in spread_parameters(model).items()
        if how.dim is not None or is_share(parameter)
    }
    return homes | {p: layer.group.comm for p, layer in expert_parameters(model).items()}


@torch.no_grad()
def assert_replicated(model: nn.Module) -> None:
    """Checks that ranks hold the same of what they should. Collective; for tests and debugging.

    Compares, bit for bit by a hash, all parameters and buffers but experts and parts of tensor
    parallelism over the communicator's ranks, and with `data_parallel` everything over replicas,
    and whether they require gradients. It finds ranks that began with different seeds, and norms
    that were clipped on each rank for itself.

    Raises:
        ValueError: the model has no layer that is spread over ranks.
        RuntimeError: on all ranks: names the first parameter that differs, and where, on those that
            compared it; or the communicator was made without torch.distributed.
    """
    comm, homes = _communicators_of(model, "assert_replicated")[0], _homes(model)
    replicas_at = replicas_of(model)
    axes: dict[ProcessGroup | None, dict[str, torch.Tensor]] = {}
    for name, tensor in _held(model):
        shared = tensor not in homes and comm.num_ranks > 1
        replicas = replicas_at(homes.get(tensor, comm))
        for group in (comm.process_group if shared else None, replicas):
            if group is not None and not _covers(tensor, group, name):
                compared = axes.setdefault(group, {})
                compared[name] = local_tensor(tensor)
                compared[f"{name}.requires_grad"] = torch.tensor(tensor.requires_grad, device="cpu")
    texts = (_difference(tensors, group, comm.device) for group, tensors in axes.items())
    found = [text for text in texts if text]
    # One axis after the other, so that in the end all ranks of the mesh have heard.
    verdict = torch.tensor(float(bool(found)), device=comm.device)
    for group in axes:
        dist.all_reduce(verdict, dist.ReduceOp.MAX, group=group)
    if verdict:
        raise RuntimeError(found[0] if found else "other ranks found values that differ")


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _difference(
    tensors: dict[str, torch.Tensor], process_group: ProcessGroup | None, device: torch.device
) -> str:
    """The first difference between the ranks of a group; "" if there is none."""
    mine = torch.stack([_hash(tensor).to(device) for tensor in tensors.values()])
    hashes = [torch.empty_like(mine) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(hashes, mine, group=process_group)
    ranks = dist.get_process_group_ranks(process_group)
    for rank, other in zip(ranks, hashes):
        for name, expected, got in zip(tensors, hashes[0].tolist(), other.tolist()):
            if got != expected:
                return (
                    f"{name}: expected equal values on ranks {ranks}, got others on rank {rank} "
                    f"than on rank {ranks[0]}"
                )
    return ""


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    """``[2]`` int64 from its bits and their places."""
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    # Modulo 2^64; multiplied by odd numbers, one changed byte always changes the first sum.
    place = torch.arange(bits.numel(), device=bits.device)
    mixed = (place * 0x9E3779B1) ^ place
    return torch.stack(((bits * (2 * place + 1)).sum(), (bits * mixed).sum()))
