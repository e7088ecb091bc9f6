"""Set-up of ranks that use torch: their process group, and a GPU for each."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from support import Rank, run_ranks


@contextmanager
def process_group(backend: str = "gloo", **options: Any) -> Iterator[None]:
    """Has this rank in torch.distributed with all ranks."""
    dist.init_process_group(backend, **options)
    try:
        yield
    finally:
        gc.collect()  # NCCL waits below until no graph holds one of its operations
        dist.destroy_process_group()


def gpu_ranks() -> list[int]:
    """Numbers of ranks that there are GPUs for, ascending: of 1, 2 and 4."""
    return [ranks for ranks in (1, 2, 4) if ranks <= torch.cuda.device_count()] or [1]


@contextmanager
def computing_on(gpu: int) -> Iterator[None]:
    """Has that GPU as torch's current device and its default one."""
    torch.cuda.set_device(gpu)
    torch.set_default_device(torch.device("cuda", gpu))
    try:
        yield
    finally:
        torch.set_default_device(None)


def run_on_gpus(num_ranks: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Runs a function as `run_ranks` does, each rank of which computes on a GPU of its own."""
    return run_ranks(num_ranks, _on_gpu, fn, *args, **options)


def _on_gpu(me: Rank, fn: Callable[..., Any], *args: Any) -> Any:
    with computing_on(me.rank):
        return fn(me, *args)
