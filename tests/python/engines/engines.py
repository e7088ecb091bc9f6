"""Serving engines themselves, where they can be imported: for ranks of the CPU.

They are taken from the environment, or from the folders in ``XD_TEST_ENGINES``, separated as those
of ``PYTHONPATH``: the engines' unpacked wheels, and what they import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossdock import _core
from support import Rank, on_ranks
from torch_ranks import gpu_ranks, process_group, run_on_gpus

EXPERTS, TOPK = 8, 3
BATCHES = ([5, 0, 7, 3], [0, 6, 1, 16], [2, 2, 2, 2])  # tokens of each rank
SECONDS = 400  # engines have thousands of files to import
PATHS = [path for path in os.environ.get("XD_TEST_ENGINES", "").split(os.pathsep) if path]


def needs(engine: str) -> pytest.MarkDecorator:
    """Leaves a module's tests out where there is no such engine."""
    here = importlib.machinery.PathFinder.find_spec(engine, [*PATHS, *sys.path])
    found = here is not None and here.origin is not None
    reason = f"{engine} is neither installed nor in XD_TEST_ENGINES"
    return pytest.mark.skipif(not found, reason=reason)


def on_gpus_with(engine: str) -> list[pytest.MarkDecorator]:
    """The marks of a module whose tests have a GPU for each rank."""
    several = pytest.mark.skipif(gpu_ranks()[-1] < 2, reason="peers need a second GPU")
    return [pytest.mark.gpu, needs(engine), several]


on_gpus = on_ranks(
    *([ranks for ranks in gpu_ranks() if ranks > 1] or [2]),
    run=run_on_gpus,
    timeout=SECONDS,
    fresh=True,
)
"""Runs a test on ranks with a GPU each."""


@contextmanager
def modules_of(
    me: Rank, register: Callable[[], None], modules: dict[str, str], without: Sequence[str] = ()
) -> Iterator[SimpleNamespace]:
    """An engine's modules by these names, beside `me` and `patch`, with its plug-in in them.

    Args:
        register, without: as of `plugged_in`.
    """
    with (
        plugged_in(register, without),
        pytest.MonkeyPatch.context() as patch,
        process_group(),
    ):
        found = {name: importlib.import_module(module) for name, module in modules.items()}
        yield SimpleNamespace(me=me, patch=patch, **found)


@contextmanager
def plugged_in(register: Callable[[], None], without: Sequence[str] = ()) -> Iterator[None]:
    """Has the engine's modules on this process's path, and its plug-in in them.

    Args:
        register: of the plug-in.
        without: packages that the engine imports and the test does not use, which may be missing.
    """
    missing = {name for name in without if not _is_here(name)}
    finder = _Missing(missing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XD_ENGINE", "1")
        patch.setenv("XD_TIMEOUT_MS", "600000")
        patch.setattr(_core, "built_with_cuda", True)
        sys.path[:0] = [path for path in PATHS if path not in sys.path]
        sys.meta_path.append(finder)
        try:
            register()
            yield
        finally:
            sys.meta_path.remove(finder)


def installed(folder: pathlib.Path, group: str) -> str:
    """A folder of ``sys.path`` where a plug-in is found as in an environment that has Crossdock."""
    text = (pathlib.Path(__file__).parents[3] / "pyproject.toml").read_text()
    table = re.search(
        rf'^\[project\.entry-points\."{re.escape(group)}"\]\n(\w+) = "([\w.:]+)"$',
        text,
        re.MULTILINE,
    )
    assert table is not None
    write_distribution(folder, "crossdock", entry=(group, table[1], table[2]))
    return str(folder)


def write_distribution(
    folder: pathlib.Path, name: str, version: str = "0", entry: tuple[str, str, str] | None = None
) -> None:
    """Lets importlib.metadata find a package in `folder`; entry: group, name and object."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry is not None:
        group, called, value = entry
        (info / "entry_points.txt").write_text(f"[{group}]\n{called} = {value}\n")


def _is_here(name: str) -> bool:
    return importlib.machinery.PathFinder.find_spec(name, [*PATHS, *sys.path]) is not None


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages whose content nobody uses."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Unused(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


class _Unused(types.ModuleType):
    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Unused,), {})(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


class NoStream:
    """Stands for a CUDA stream, and for an event in one, where there is no CUDA."""

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def record(self, stream: object = None) -> None: ...


def quantise(x: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """[M,H] as e4m3 with a float32 scale for each block of columns, [M, H/block]."""
    blocks = x.float().reshape(len(x), x.shape[1] // block, block)
    scales = blocks.abs().amax(2).clamp(min=1e-10) / 448
    codes = (blocks / scales.unsqueeze(2)).to(torch.float8_e4m3fn)
    return codes.reshape(x.shape), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[...,H] float32 of such codes and scales."""
    blocks = codes.float().unflatten(-1, (scales.shape[-1], codes.shape[-1] // scales.shape[-1]))
    return (blocks * scales.unsqueeze(-1)).reshape(codes.shape)


class Problem:
    """A layer's experts, and tokens of each rank: the same numbers on all ranks.

    Attributes:
        x, ids, weights: of each rank, [M,H] bfloat16, [M,K] int64 ids of `experts`, float32.
        w1, w2: [E,2N,H] and [E,H,N] bfloat16.
    """

    def __init__(
        self, tokens: Sequence[int], hidden: int, experts: int, topk: int, seed: int = 5
    ) -> None:
        inner = 128
        draw = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(shape, generator=draw)  # noqa: E731
        self.experts, self.topk = experts, topk
        self.x = [normal(rows, hidden).bfloat16() for rows in tokens]
        order = [torch.rand(rows, experts, generator=draw).argsort(1) for rows in tokens]
        self.ids = [one[:, :topk].contiguous() for one in order]
        self.weights = [torch.rand(rows, topk, generator=draw) for rows in tokens]
        self.w1 = (normal(experts, 2 * inner, hidden) / hidden**0.5).bfloat16()
        self.w2 = (normal(experts, hidden, inner) / inner**0.5).bfloat16()

    @classmethod
    def here(cls, tokens: Sequence[int], hidden: int, seed: int) -> Problem:
        """The same numbers on all ranks, on torch's default device."""
        device = torch.get_default_device()
        with torch.device("cpu"):
            made = cls(tokens, hidden, EXPERTS, TOPK, seed)
        return made._on(device)

    def _on(self, device: torch.device) -> Problem:
        for name in ("x", "ids", "weights"):
            setattr(self, name, [one.to(device) for one in getattr(self, name)])
        self.w1, self.w2 = self.w1.to(device), self.w2.to(device)
        return self

    def apply(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """[n,H] float32: what an expert makes of rows."""
        gate, up = (rows.float() @ self.w1[expert].float().T).chunk(2, 1)
        inner = torch.nn.functional.silu(gate) * up
        return inner.bfloat16().float() @ self.w2[expert].float().T

    def sums(self, rank: int, fp8: bool) -> torch.Tensor:
        """[M,H] float32: the sum over all experts for a rank's tokens."""
        x = self.x[rank].float()
        if fp8:
            x = dequantise(*quantise(x))
        share = torch.zeros(len(x), self.experts).scatter_add_(
            1, self.ids[rank], self.weights[rank]
        )
        each = torch.stack([self.apply(expert, x) for expert in range(self.experts)], 1)
        return (share.unsqueeze(2) * each).sum(1)

    def check(self, out: torch.Tensor, rank: int, fp8: bool) -> None:
        """Asserts that these are a rank's sums, but for roundings to bfloat16."""
        want = self.sums(rank, fp8)
        torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.05)
        if len(want):
            assert want.abs().amax() > 0.3  # against tolerances that everything meets
