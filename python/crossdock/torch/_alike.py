"""Whether ranks come to a collective step alike, of which all hear before any waits for others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ._calls import is_capturing
from ._comm import Comm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["axes_of", "require_alike"]


def axes_of(
    comms: Iterable[Comm], replicas: Callable[[Comm], ProcessGroup | None]
) -> list[ProcessGroup]:
    """The process groups of communicators with several ranks, and of their replicas."""
    axes: dict[tuple[int, ...], ProcessGroup] = {}
    for comm in comms:
        for group in (comm.process_group if comm.num_ranks > 1 else None, replicas(comm)):
            if group is not None:
                axes.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return list(axes.values())


def require_alike(
    what: str,
    axes: list[ProcessGroup],
    lines: list[str],
    failure: Exception | None,
    device: torch.device,
) -> None:
    """Compares what ranks are about to do. Collective; a CUDA graph that is captured leaves it out.

    Numbers travel from the host where torch.distributed has a backend for it, and else from the
    device, on which the host waits for them.

    Args:
        what: the step, which error texts begin with.
        axes: of a mesh of ranks, all of which are to hear.
        lines: what has to be equal on all of them, in order.
        failure: what has gone wrong here.

    Raises:
        Exception: `failure`.
        RuntimeError: lines differ, or another rank has a failure: names it, and the first line that
            differs, on those that compared them.
    """
    if is_capturing(device):
        axes = []
    text = "" if failure is None else str(failure)
    mine = _digest(lines)
    # There and back, so that the last axis is heard of along the first one.
    for group in axes + axes[-2::-1]:
        where = device if _backend_of_cpu(group) is None else torch.device("cpu")
        row = torch.tensor([mine, int(bool(text))], dtype=torch.int64, device=where)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, row, group=group)
        found = torch.stack(rows).tolist()
        if any(other != [mine, 0] for other in found):
            text = _told(group, lines, text) or text
    if failure is not None:
        raise failure
    if text:
        raise RuntimeError(f"{what}: {text}")


def _digest(lines: list[str]) -> int:
    found = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def _backend_of_cpu(group: ProcessGroup) -> str | None:
    """The backend that takes tensors of the host, if there is one."""
    pairs = dist.get_backend_config(group).split(",")
    return dict(pair.split(":") for pair in pairs if ":" in pair).get("cpu")


def _told(group: ProcessGroup, lines: list[str], text: str) -> str:
    """The mistake, by the first rank of a group that says so; else the first difference."""
    ranks = dist.get_process_group_ranks(group)
    told: list[Any] = [None] * len(ranks)
    dist.all_gather_object(told, (lines, text), group=group)
    for rank, (_, problem) in zip(ranks, told):
        if problem:
            return problem if problem.startswith("rank ") else f"rank {rank}: {problem}"
    expected = told[0][0]
    for rank, (other, _) in zip(ranks, told):
        for one, got in zip(expected + [""], other + [""]):
            if one != got:
                return (
                    f"rank {rank}: expected the same on ranks {ranks}, got {got or 'no more'!r} "
                    f"where rank {ranks[0]} has {one or 'no more'!r}"
                )
    return ""
