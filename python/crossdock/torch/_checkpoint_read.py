"""The files of a checkpoint, read and checked."""

from __future__ import annotations

import copy
import errno
import re
from pathlib import Path
from typing import Any

import torch

from ._checkpoint_parts import has_slices, state_shapes
from ._experts import ExpertHome
from ._sharding import is_share, like

__all__ = ["COMMON_FILE", "Shards", "check_part", "check_shape", "read"]

COMMON_FILE = "common.pt"
_EXPERT_FILE = re.compile(r"experts-(\d+)-(\d+)\.pt")


class Shards:
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

    def names(self, layer: ExpertHome) -> tuple[Path, set[str]]:
        """The first file with some of the layer's own, and the parameters in it."""
        first, end, _ = self._files_of(layer)[0]
        return self._file(first, end), set(self._part(first, end)["model"])

    def gather(self, name: str, layer: ExpertHome, shape: tuple[int, ...]) -> torch.Tensor:
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
            check_shape(self._file(first, end), name, model[name], (end - first, *shape[1:]))
            slices.append(model[name][mine])
        return torch.cat(slices)

    def optimizer(self, name: str, layer: ExpertHome, parameter: Any) -> dict[str, Any] | None:
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
        if not all(has_slices(value, shape) for value, shape in zip(values, shapes)):
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
        saved: Any = self._part(*places[0][:2])["optimizer"]
        if key in saved.get("own", {}).get(name, ()):  # plain tensors, each rank its own
            return torch.cat(slices)
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
                f"{COMMON_FILE} has: they are of different checkpoints"
            )
        return saved["state"].get(name)

    def _files_of(self, layer: ExpertHome) -> list[tuple[int, int, slice]]:
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
            part = read(file, ("first", "end"), mapped=True)
            check_part(file, part, ("first", "end", "model", "optimizer"))
            if (part["first"], part["end"]) != (first, end):
                raise ValueError(
                    f"path: {file} is of other experts: {part['first']} to {part['end'] - 1}"
                )
            self._parts[first, end] = part
        return self._parts[first, end]


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


def read(path: Path, keys: tuple[str, ...], *, mapped: bool = False) -> dict[str, Any]:
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


def check_part(file: Path, part: dict[str, Any], keys: tuple[str, ...]) -> None:
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
        if state_shapes(state) != shapes:
            raise ValueError(
                f"path: {file}: expected the optimiser's state of {name} to have the shapes "
                f"{shapes}, got {state_shapes(state)}"
            )


def _require_keys(file: Path, content: Any, keys: tuple[str, ...]) -> None:
    """Names what a dict of a file lacks, which is everything if it is none."""
    missing = [key for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise ValueError(f"path: {file} is no such part of a checkpoint: it lacks {missing}")


def check_shape(file: Path, name: str, saved: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(saved.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, {file} has {tuple(saved.shape)}")
