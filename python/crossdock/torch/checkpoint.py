"""Checkpoints of models with experts spread over ranks, readable by any number of ranks.

A checkpoint is a folder: ``common.pt`` (parameters that every rank holds, and those of tensor
parallelism, whole; their optimiser state, buffers and what the caller adds), and
``experts-<first>-<end>.pt`` from each rank (its experts' parameters and optimiser state, by global
expert index). The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ._agreement import TOKEN_BYTES, from_rank_0, ranks_where
from ._checkpoint_files import give_name, make_folder, require_new, write
from ._checkpoint_parts import (
    Parts,
    aliases_of,
    gather_parts,
    is_own,
    own_part,
    part_of_rank,
    shares_of,
    spread_shares,
    state_shapes,
)
from ._checkpoint_read import COMMON_FILE, Shards, check_part, check_shape, read
from ._experts import ExpertHome, expert_parameters
from ._group import EpGroup
from ._replicas import replicas_of
from ._sharding import is_share, local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_FORMAT = 2
_WANTED = "expected layers (MoELayer, or of mark_experts) with equally many experts"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    replicas: ProcessGroup | DeviceMesh | None = None,
) -> None:
    """Writes ``model`` and ``optimizer`` into the new folder ``path``. Collective.

    On a mesh of data and expert parallelism all ranks call it, with `replicas`; the first replica
    writes, and the others wait for its verdict. Without `replicas` only the ranks of one
    communicator may call it for one path.

    Ranks first compare what they are about to save, so that none waits for one that cannot. No rank
    goes on before all know whether all have written. While they write, the folder is called
    ``<path>.partial-<token>``, with a token from rank 0; one that a crash has left may be deleted.

    Args:
        path: must not exist; the same on every rank, in a folder that all ranks share.
        model: one `MoELayer` or more, or experts of `mark_experts`, with equally many experts, on
            one communicator; parts of layers of `crossdock.torch.tp` are put together by
            torch.distributed; every other parameter and buffer is taken from rank 0.
        optimizer: of parameters of ``model``.
        extra: from rank 0: step, random states and the like; numbers, strings, tensors, and lists
            and dicts of them.
        replicas: the ranks that hold the same experts as this one, as in `data_parallel`; None =
            those that this has been told of.

    Raises:
        FileExistsError: ``path`` exists.
        OSError: this rank could not write its part; nothing appears under ``path``.
        RuntimeError: another rank has one of these errors, or another model or state; likewise.
        ValueError: the model has no experts, or layers whose experts are not spread alike, or
            FSDP has sharded it, or layers of tensor parallelism are not over torch.distributed, or
            nothing says how ranks share a plain tensor of the optimiser's state of theirs.
        CrossdockError: a rank is lost, or has not come in time.
    """
    path = Path(path)
    layer = _first_layer(model)
    group: Any = replicas if replicas is not None else replicas_of(model)(layer.comm)
    group = group.get_group() if hasattr(group, "get_group") else group
    shares = _agreed_shares(path, model, optimizer, layer.group, group)
    parts = gather_parts(shares, keep=layer.group.comm.rank == 0)
    if group is None:
        _write_checkpoint(path, model, optimizer, extra, layer, parts)
        return
    failure = None
    if dist.get_rank(group) == 0:
        failure = _attempt(_write_checkpoint, path, model, optimizer, extra, layer, parts)
    verdict = [None if failure is None else str(failure)]
    dist.broadcast_object_list(verdict, dist.get_global_rank(group, 0), group=group)
    if failure is not None:
        raise failure
    if verdict[0] is not None:
        raise RuntimeError(f"path: the replica that writes could not: {verdict[0]}")


def _agreed_shares(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    group: EpGroup,
    replicas: ProcessGroup | None,
) -> Parts:
    """This rank's parts of tensor parallelism, as soon as all ranks can save and have alike ones.

    Raises:
        Exception: why this rank cannot save.
        RuntimeError: another rank cannot, or has others: on all ranks.
    """
    shares: Parts = {}
    lines: list[str] = []

    def prepare() -> None:
        require_new(path)
        _one_layer(model)
        _refuse_fsdp(model)
        shares.update(shares_of(model, optimizer))
        lines.extend(_described(model, optimizer, shares))

    failure = _attempt(prepare)
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=TOKEN_BYTES).digest()
    failed = ranks_where(group, failure is not None)
    differ = ranks_where(group, from_rank_0(group, digest) != digest)
    text = ""
    if failed:
        text = f"path: another rank cannot save: rank {', '.join(map(str, failed))}"
    elif differ:
        text = (
            "model, optimizer: expected the same parameters and kinds of state as on rank 0, got "
            f"others on rank {', '.join(map(str, differ))}"
        )
    if replicas is not None:
        told: list[Any] = [None] * dist.get_world_size(replicas)
        dist.all_gather_object(told, (text, digest), group=replicas)
        text = next((one for one, _ in told if one), text)
        if not text and len({one for _, one in told}) > 1:
            text = "model, optimizer: expected the same on all replicas, got others"
    if failure is not None:
        raise failure
    if text:
        raise RuntimeError(text)
    return shares


def _described(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, shares: Parts
) -> Iterator[str]:
    """The facts that have to be the same on all ranks, which put the parts together."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        yield f"{name} {tuple(parameter.shape)} {parameter.dtype}"
        for key, value in shares.get(parameter, {}).items():
            yield f"{key} {is_share(value)} {tuple(getattr(value, 'shape', ()))}"
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        unknown = sum(parameter not in names for parameter in group["params"])
        if unknown:
            raise ValueError(
                f"optimizer: expected parameters of the model, got {unknown} that are none"
            )
        yield f"group of {[names[parameter] for parameter in group['params']]}"


def _write_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any] | None,
    layer: ExpertHome,
    parts: Parts,
) -> None:
    """`save_checkpoint` of one communicator."""
    group, rank = layer.group, layer.group.comm.rank
    token = from_rank_0(group, os.urandom(TOKEN_BYTES)).hex()[:8]
    partial = path.with_name(f"{path.name}.partial-{token}")
    try:
        _together(group, make_folder, path, partial if rank == 0 else None)
        _together(group, _write_parts, partial, model, optimizer, extra, layer, parts)
        _together(group, give_name, partial if rank == 0 else None, path)
    except Exception:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _together(group: EpGroup, work: Callable[..., None], *arguments: Any) -> None:
    """Each rank does its work; returns where that went well on all of them.

    The folder as one rank sees it decides nothing: on network file systems one rank's files appear
    late on another's host.

    Raises:
        Exception: what `work` has raised here.
        RuntimeError: it has failed elsewhere: names the ranks.
    """
    failure = _attempt(work, *arguments)
    failed = ranks_where(group, failure is not None)
    if failure is not None:
        raise failure
    if failed:
        ranks = ", ".join(map(str, failed))
        raise RuntimeError(f"path: another rank could not write its part of it: rank {ranks}")


def _attempt(work: Callable[..., None], *arguments: Any) -> Exception | None:
    """The exception of a step, to be raised when the other ranks need this one no more."""
    try:
        work(*arguments)
    except Exception as error:
        return error
    return None


def _refuse_fsdp(model: nn.Module) -> None:
    """Shares of shares have no place in these files."""
    known = expert_parameters(model).keys() | spread_shares(model)
    for name, parameter in model.named_parameters():
        share: Any = parameter
        if is_share(share) and (parameter not in known or share.device_mesh.ndim != 1):
            raise ValueError(
                f"{name}: expected a parameter that FSDP has not sharded, got placements "
                f"{share.placements}: use torch.distributed.checkpoint for this model"
            )


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Reads what `save_checkpoint` wrote, on any number of ranks. Local: needs no other rank.

    Args:
        path: the folder.
        model: made like the saved one; overwritten.
        optimizer: made like the saved one, or None to leave the saved state unread; overwritten.

    Returns:
        The ``extra`` of `save_checkpoint`, on every rank.

    Raises:
        FileNotFoundError: no checkpoint there, or a part is missing.
        OSError: a file cannot be read.
        ValueError: a file is damaged or no part of a checkpoint, or it is of another model or
            optimiser: names what is missing or does not fit; or other experts lie on this rank than
            when it was saved, and optimiser state of theirs has no slice for each expert.
            Parameters are unchanged then.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"path: expected the folder of a checkpoint, got {path}")
    file = path / COMMON_FILE
    common = read(file, ("format",))
    if common["format"] != _FORMAT:
        raise ValueError(f"path: expected checkpoint format {_FORMAT}, got {common['format']}")
    check_part(file, common, ("format", "model", "optimizer", "extra"))
    experts = expert_parameters(model)
    names = dict(model.named_parameters())
    sharded = {name: experts[p] for name, p in names.items() if p in experts}
    aliases = aliases_of(model, names)
    spread = {name: p for name, p in names.items() if p in spread_shares(model)}
    layer = _one_layer(model)
    shards = Shards(path, layer.num_experts)

    state = dict(common["model"])
    values = {
        name: value if name in spread else local_tensor(value)
        for name, value in model.state_dict().items()
        if name not in aliases
    }
    expert_file, in_experts = shards.names(layer)
    _check_names(f"{file} with {expert_file}", set(values), set(state) | in_experts)
    _check_names(str(file), set(values) - set(sharded), set(state))
    for name, saved in state.items():
        check_shape(file, name, saved, tuple(values[name].shape))
    for name, layer in sharded.items():
        state[name] = shards.gather(name, layer, tuple(values[name].shape))
    for name, parameter in spread.items():
        state[name] = part_of_rank(state[name], parameter)
    if optimizer is not None:
        _load_optimizer(path, optimizer, names, common["optimizer"], sharded, shards, spread)
    model.load_state_dict(state | {alias: state[name] for alias, name in aliases.items()})
    return common["extra"]


# ---- Parts ---------------------------------------------------------------------------------------


def _write_parts(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any] | None,
    layer: ExpertHome,
    parts: Parts,
) -> None:
    """This rank's files."""
    part = _expert_part(model, optimizer, layer)
    write(folder / f"experts-{part['first']}-{part['end']}.pt", part)
    if layer.group.comm.rank == 0:
        write(folder / COMMON_FILE, _common_part(model, optimizer, extra or {}, parts))


def _common_part(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any], parts: Parts
) -> dict[str, Any]:
    experts = expert_parameters(model)
    names = dict(model.named_parameters())
    left_out = {name for name, p in names.items() if p in experts} | aliases_of(model, names).keys()
    whole = {name: parts[p][""] for name, p in names.items() if p in parts}
    state = {k: whole.get(k, v) for k, v in model.state_dict().items() if k not in left_out}
    return {
        "format": _FORMAT,
        "model": state,
        "optimizer": _optimizer_state(model, optimizer, lambda p: p not in experts, parts),
        "extra": extra,
    }


def _first_layer(model: nn.Module) -> ExpertHome:
    """The experts through whose group ranks agree."""
    layers = list(expert_parameters(model).values())
    if not layers:
        raise ValueError(f"model: {_WANTED}, got []")
    return layers[0]


def _one_layer(model: nn.Module) -> ExpertHome:
    """Where the experts of all layers lie."""
    layers = list(expert_parameters(model).values())
    numbers = sorted({layer.num_experts for layer in layers})
    if len(numbers) != 1:
        raise ValueError(f"model: {_WANTED}, got {numbers}")
    places = sorted({(layer.first_expert, layer.num_local_experts) for layer in layers})
    if len(places) != 1:
        raise ValueError(
            "model: expected layers whose experts lie on ranks alike, as on one communicator; got "
            f"first experts and numbers of experts {places} here"
        )
    return layers[0]


def _expert_part(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, layer: ExpertHome
) -> dict[str, Any]:
    experts = expert_parameters(model)
    return {
        "first": layer.first_expert,
        "end": layer.first_expert + layer.num_local_experts,
        "model": {
            name: local_tensor(p.detach()) for name, p in model.named_parameters() if p in experts
        },
        "optimizer": _optimizer_state(model, optimizer, lambda p: p in experts, {}),
    }


def _optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    wanted: Callable[[torch.Tensor], bool],
    parts: Parts,
) -> dict[str, Any] | None:
    """State and hyperparameters by parameter name: the order of parameters means nothing."""
    if optimizer is None:
        return None
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    states = {
        names[p]: {
            key: parts[p][key] if p in parts else own_part(value, p) for key, value in state.items()
        }
        for p, state in optimizer.state.items()
        if wanted(p)
    }
    return {
        "state": states,
        "shapes": {name: state_shapes(state) for name, state in states.items()},
        "own": {
            names[p]: [key for key, value in state.items() if is_own(value, p)]
            for p, state in optimizer.state.items()
            if wanted(p)
        },
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            | {"names": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def _load_optimizer(
    path: Path,
    optimizer: torch.optim.Optimizer,
    names: dict[str, nn.Parameter],
    common: dict[str, Any] | None,
    sharded: dict[str, ExpertHome],
    shards: Shards,
    spread: dict[str, nn.Parameter],
) -> None:
    if common is None:
        raise ValueError(f"optimizer: expected None, as {path} was saved without one")
    by_parameter = {parameter: name for name, parameter in names.items()}
    here = [[by_parameter[p] for p in group["params"]] for group in optimizer.param_groups]
    there = [group["names"] for group in common["groups"]]
    if here != there:
        raise ValueError(f"optimizer: expected parameter groups {there} as in {path}, got {here}")
    state = dict(common["state"])
    for name, layer in sharded.items():
        gathered = shards.optimizer(name, layer, names[name])
        if gathered is not None:
            state[name] = gathered
    for name in spread.keys() & state.keys():
        own = common.get("own", {}).get(name, ())
        state[name] = {
            k: part_of_rank(v, spread[name], own=k in own) for k, v in state[name].items()
        }
    order = [name for group in here for name in group]
    positions = iter(range(len(order)))
    groups = [
        {key: value for key, value in group.items() if key != "names"}
        | {"params": [next(positions) for _ in group["names"]]}
        for group in common["groups"]
    ]
    # Torch moves the state to each parameter's device and dtype.
    optimizer.load_state_dict(
        {
            "state": {i: state[name] for i, name in enumerate(order) if name in state},
            "param_groups": groups,
        }
    )


def _check_names(files: str, expected: set[str], got: set[str]) -> None:
    missing, unknown = sorted(expected - got), sorted(got - expected)
    if missing or unknown:
        raise ValueError(f"{files} is of another model: it lacks {missing}, and has {unknown} too")
