"""Starts the ranks of a run: as processes of this host, or as torchrun has started them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import crossdock.launch


def num_gpus() -> int:
    """GPUs that both PyTorch and Crossdock can use here."""
    return torch.cuda.device_count() if crossdock.feature_available("cuda") else 0


def pick_device(device: str, ranks: int) -> str:
    """The device of the ranks: "cuda" if there is a GPU for each, else "cpu".

    Raises:
        ValueError: `device` is "cuda", and there are fewer GPUs.
    """
    gpus = num_gpus()
    if device == "cuda" and gpus < ranks:
        raise ValueError(f"--device cuda: expected a GPU for each of {ranks} ranks, found {gpus}")
    if device == "auto":
        return "cuda" if gpus >= ranks else "cpu"
    return device


def run_ranks(ranks: int, device: str, main: Callable[..., Any], *args: Any) -> None:
    """Runs ``main(torch.device, *args)`` on new processes, joined in torch.distributed.

    Raises:
        crossdock.launch.RankFailed: a rank raised or died; the others have been ended.
    """
    # The port is one that the store has already bound: no other process can take it first.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    crossdock.launch.run(ranks, _run_rank, ranks, store.port, device, main, args)


def _run_rank(
    rank: int, ranks: int, port: int, device: str, main: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # All ranks are on this host: the name of the host need not mean an address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "OMP_NUM_THREADS" not in os.environ:
        # The model is small: more threads would mostly wait for each other.
        torch.set_num_threads(1)
    _run(main, args, device, rank, store=store, rank=rank, world_size=ranks)


def run_launched(device: str, main: Callable[..., Any], *args: Any) -> None:
    """Runs ``main(torch.device, *args)`` on this process, one of those that torchrun started."""
    _run(main, args, device, int(os.environ["LOCAL_RANK"]))


def _run(
    main: Callable[..., Any], args: tuple[Any, ...], kind: str, local_rank: int, **join: Any
) -> None:
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", **join)
    try:
        main(device, *args)
    finally:
        dist.destroy_process_group()
