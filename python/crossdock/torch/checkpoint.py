"""Checkpoints of models with experts spread over ranks, readable by any number of ranks.

A checkpoint is a folder: ``common.pt`` (parameters that every rank holds, and those of tensor
parallelism, whole; their optimiser state, buffers and what the caller adds), and
``experts-<first>-<end>.pt`` from each rank (its experts' parameters and optimiser state, by global
expert index). The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import copy
import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ._agreement import TOKEN_BYTES, from_rank_0, ranks_where
from ._checkpoint_files import give_name, make_folder, write
from ._checkpoint_parts import Parts, aliases_of, gather_parts, part_of_rank, spread_shares
from ._group import EpGroup
from ._sharding import is_share, like, local_tensor
from .moe import MoELayer, expert_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_FORMAT = 2
_COMMON_FILE = "common.pt"
_EXPERT_FILE = re.compile(r"experts-(\d+)-(\d+)\.pt")


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

    No rank goes on before all know whether all have written. While they write, the folder is called
    ``<path>.partial-<token>``, with a token from rank 0; one that a crash has left may be deleted.

    Args:
        path: must not exist; the same on every rank, in a folder that all ranks share.
        model: one `MoELayer` or more, with equally many experts, on one communicator; parts of
            layers of `crossdock.torch.tp` are put together by torch.distributed; every other
            parameter and buffer is taken from rank 0.
        optimizer: of parameters of ``model``.
        extra: from rank 0: step, random states and the like; numbers, strings, tensors, and lists
            and dicts of them.
        replicas: the ranks that hold the same experts as this one, as in `data_parallel`; None =
            those that this has been told of.

    Raises:
        FileExistsError: ``path`` exists.
        OSError: this rank could not write its part; nothing appears under ``path``.
        RuntimeError: another rank could not; likewise.
        ValueError: the model has no `MoELayer`, or layers with unequally many experts, or FSDP has
            sharded it, or layers of tensor parallelism are not over torch.distributed.
        CrossdockError: a rank is lost, or has not come in time.
    """
    path = Path(path)
    layer = _one_layer(model)
    _refuse_fsdp(model)
    group: Any = replicas if replicas is not None else layer.group.comm.replicas
    group = group.get_group() if hasattr(group, "get_group") else group
    parts = gather_parts(model, optimizer, keep=layer.group.comm.rank == 0)
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


def _write_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any] | None,
    layer: MoELayer,
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
    file = path / _COMMON_FILE
    common = _read(file, ("format",))
    if common["format"] != _FORMAT:
        raise ValueError(f"path: expected checkpoint format {_FORMAT}, got {common['format']}")
    _check_part(file, common, ("format", "model", "optimizer", "extra"))
    experts = expert_parameters(model)
    names = dict(model.named_parameters())
    sharded = {name: experts[p] for name, p in names.items() if p in experts}
    aliases = aliases_of(model, names)
    spread = {name: p for name, p in names.items() if p in spread_shares(model)}
    layer = _one_layer(model)
    shards = _Shards(path, layer.num_experts)

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
        _check_shape(file, name, saved, tuple(values[name].shape))
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
    layer: MoELayer,
    parts: Parts,
) -> None:
    """This rank's files."""
    part = _expert_part(model, optimizer, layer)
    write(folder / f"experts-{part['first']}-{part['end']}.pt", part)
    if layer.group.comm.rank == 0:
        write(folder / _COMMON_FILE, _common_part(model, optimizer, extra or {}, parts))


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


def _one_layer(model: nn.Module) -> MoELayer:
    """A layer that has the experts of all layers."""
    layers = list(expert_parameters(model).values())
    numbers = sorted({layer.num_experts for layer in layers})
    if len(numbers) != 1:
        raise ValueError(f"model: expected MoELayers with equally many experts, got {numbers}")
    return layers[0]


def _expert_part(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, layer: MoELayer
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
            key: parts[p][key] if p in parts else _own_part(value, p)
            for key, value in state.items()
        }
        for p, state in optimizer.state.items()
        if wanted(p)
    }
    return {
        "state": states,
        "shapes": {name: _shapes(state) for name, state in states.items()},
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            | {"names": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def _has_slices(value: Any, shape: torch.Size) -> bool:
    """Whether state of a parameter of experts, which has this shape, has a slice for each expert.

    It has as many dimensions, each of them whole or reduced to 1 (means of rows or of columns), and
    the first one whole.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == len(shape)
        and value.shape[0] == shape[0]
        and all(mine in (1, whole) for mine, whole in zip(value.shape, shape))
    )


def _own_part(value: Any, parameter: Any) -> Any:
    """This rank's part of a parameter's state: its own experts' slices if the state has slices.

    Means of rows and of columns are made by torch's optimisers whole on every rank, also of a
    parameter that is sharded.
    """
    if is_share(value) and is_share(parameter) and _has_slices(value, parameter.shape):
        value = value.redistribute(placements=parameter.placements)
    return local_tensor(value)


def _shapes(state: dict[str, Any]) -> dict[str, list[int] | None]:
    """The shape of each tensor of one parameter's state; None for what is none."""
    return {
        key: list(value.shape) if isinstance(value, torch.Tensor) else None
        for key, value in state.items()
    }


def _load_optimizer(
    path: Path,
    optimizer: torch.optim.Optimizer,
    names: dict[str, nn.Parameter],
    common: dict[str, Any] | None,
    sharded: dict[str, MoELayer],
    shards: _Shards,
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
        state[name] = {k: part_of_rank(v, spread[name]) for k, v in state[name].items()}
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


def _placed(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    """State of a rank's experts as the parameter lies; of all experts, whole on every rank."""
    if not is_share(parameter):
        return value
    value = value.to(parameter.device)
    if value.shape == parameter.to_local().shape:
        return like(value, parameter)
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate()] * parameter.device_mesh.ndim
    return DTensor.from_local(value, parameter.device_mesh, placements, run_check=False)


def _check_part(file: Path, part: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Refuses what is no part of a checkpoint, and one that is not as it was written."""
    _require_keys(file, part, keys)
    saved = part["optimizer"]
    values = part["model"].values() if isinstance(part["model"], dict) else [None]
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise ValueError(f"path: {file}: expected tensors by name as its model")
    if saved is None:
        return
    _require_keys(file, saved, ("state", "shapes", "groups"))
    for group in saved["groups"]:
        _require_keys(file, group, ("names",))
    _require_keys(file, saved["state"], tuple(saved["shapes"]))
    for name, shapes in saved["shapes"].items():
        state = saved["state"][name]
        _require_keys(file, state, tuple(shapes))
        if _shapes(state) != shapes:
            raise ValueError(
                f"path: {file}: expected the optimiser's state of {name} to have the shapes "
                f"{shapes}, got {_shapes(state)}"
            )


def _require_keys(file: Path, content: Any, keys: tuple[str, ...]) -> None:
    """Names what a dict of a file lacks, which is everything if it is none."""
    missing = [key for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise ValueError(f"path: {file} is no such part of a checkpoint: it lacks {missing}")


def _check_shape(file: Path, name: str, saved: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(saved.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, {file} has {tuple(saved.shape)}")


def _check_names(files: str, expected: set[str], got: set[str]) -> None:
    missing, unknown = sorted(expected - got), sorted(got - expected)
    if missing or unknown:
        raise ValueError(f"{files} is of another model: it lacks {missing}, and has {unknown} too")


class _Shards:
    """The expert files of a checkpoint, each read when first needed."""

    def __init__(self, path: Path, num_experts: int) -> None:
        self._path = path
        self._files = _expert_files(path)
        self._parts: dict[tuple[int, int], dict[str, Any]] = {}
        if not _covers(self._files, num_experts):
            raise FileNotFoundError(
                f"{path}: expected files of experts 0 to {num_experts - 1}, got "
                f"{[f'{first} to {end - 1}' for first, end in self._files]}"
            )

    def names(self, layer: MoELayer) -> tuple[Path, set[str]]:
        """The first file with some of the layer's own, and the parameters in it."""
        first, end, _ = self._files_of(layer)[0]
        return self._file(first, end), set(self._part(first, end)["model"])

    def gather(self, name: str, layer: MoELayer, shape: tuple[int, ...]) -> torch.Tensor:
        """The layer's own slices of a parameter, put together from all files that have some.

        Args:
            name: of the parameter.
            layer: whose it is.
            shape: of the slices together.
        """
        slices = []
        for first, end, mine in self._files_of(layer):
            model = self._part(first, end)["model"]
            _require_keys(self._file(first, end), model, (name,))
            _check_shape(self._file(first, end), name, model[name], (end - first, *shape[1:]))
            slices.append(model[name][mine])
        return torch.cat(slices)

    def optimizer(self, name: str, layer: MoELayer, parameter: Any) -> dict[str, Any] | None:
        """Optimiser state of one parameter, put together from all files that have some."""
        places = self._files_of(layer)
        parts = [(first, end, self._state(first, end, name)) for first, end, _ in places]
        first, end, state = parts[0]
        for other_first, other_end, other in parts[1:]:
            if (state is None) != (other is None):
                lacking = (first, end) if state is None else (other_first, other_end)
                _require_keys(self._file(*lacking), {}, (f"the optimiser's state of {name}",))
        if state is None:
            return None
        return {key: self._entry(name, key, places, parameter) for key in state}

    def _entry(
        self, name: str, key: str, places: list[tuple[int, int, slice]], parameter: Any
    ) -> Any:
        """One entry of a parameter's state: by experts if it has slices, otherwise as it is."""
        values = [self._value(first, end, name, key) for first, end, _ in places]
        shapes = [self._part(first, end)["model"][name].shape for first, end, _ in places]
        if not all(_has_slices(value, shape) for value, shape in zip(values, shapes)):
            first, end, mine = places[0]
            other_experts = len(places) > 1 or mine != slice(0, end - first)
            if isinstance(values[0], torch.Tensor) and values[0].numel() > 1 and other_experts:
                raise ValueError(
                    f"optimizer: {key!r} of {name} has shape {tuple(values[0].shape)} in "
                    f"{self._file(first, end)}, expected a slice for each of its {end - first} "
                    "experts: only as many ranks as have saved this state can load it"
                )
            return copy.copy(values[0])  # out of the mapped file
        if is_share(parameter) and values[0].shape[1:] != shapes[0][1:]:
            places = [(first, end, slice(0, end - first)) for first, end in self._files]
            values = [self._value(first, end, name, key) for first, end, _ in places]
        slices = [value[mine] for value, (_, _, mine) in zip(values, places)]
        return _placed(torch.cat(slices), parameter)

    def _value(self, first: int, end: int, name: str, key: str) -> Any:
        """One file's entry of a parameter's state."""
        state: Any = self._state(first, end, name)
        _require_keys(self._file(first, end), state, (key,))
        return state[key]

    def _state(self, first: int, end: int, name: str) -> dict[str, Any] | None:
        """One file's optimiser state of a parameter, None if that has none."""
        saved = self._part(first, end)["optimizer"]
        if saved is None:
            raise ValueError(
                f"path: {self._file(first, end)} lacks the optimiser's state, which "
                f"{_COMMON_FILE} has: they are of different checkpoints"
            )
        return saved["state"].get(name)

    def _files_of(self, layer: MoELayer) -> list[tuple[int, int, slice]]:
        """First expert and end of each file with some of the layer's own, and which of it."""
        begin, stop = layer.first_expert, layer.first_expert + layer.num_local_experts
        places = []
        for first, end in self._files:
            low, high = max(begin, first), min(stop, end)
            if low < high:
                places.append((first, end, slice(low - first, high - first)))
        return places

    def _file(self, first: int, end: int) -> Path:
        return self._path / f"experts-{first}-{end}.pt"

    def _part(self, first: int, end: int) -> dict[str, Any]:
        if (first, end) not in self._parts:
            file = self._file(first, end)
            # Mapped: experts of other ranks in the file are never read.
            part = _read(file, ("first", "end"), mapped=True)
            _check_part(file, part, ("first", "end", "model", "optimizer"))
            if (part["first"], part["end"]) != (first, end):
                raise ValueError(
                    f"path: {file} is of other experts: {part['first']} to {part['end'] - 1}"
                )
            self._parts[first, end] = part
        return self._parts[first, end]


# ---- Files ---------------------------------------------------------------------------------------


def _read(path: Path, keys: tuple[str, ...], *, mapped: bool = False) -> dict[str, Any]:
    """A part of a checkpoint, which has at least these keys."""
    try:
        # weights_only: no code runs.
        part = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except MemoryError:
        raise
    except Exception as error:  # torch may raise anything for a damaged file, also EINVAL
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise ValueError(f"path: {path} is damaged, or no part of a checkpoint: {error}") from error
    if not isinstance(part, dict):
        raise ValueError(f"path: {path} is no part of a checkpoint, but has other content")
    _require_keys(path, part, keys)
    return part


def _expert_files(path: Path) -> list[tuple[int, int]]:
    """(first expert, one past the last) of each file, in order."""
    matches = (_EXPERT_FILE.fullmatch(file.name) for file in path.iterdir())
    return sorted((int(match[1]), int(match[2])) for match in matches if match)


def _covers(files: list[tuple[int, int]], num_experts: int) -> bool:
    ends = [0] + [end for _, end in files]
    return ends[-1] == num_experts and all(first == end for (first, _), end in zip(files, ends))
