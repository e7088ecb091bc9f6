"""A small all-gather between the processes of all ranks, by an operation of the CPU executor."""

from __future__ import annotations

from typing import Any

import torch

from crossdock import _core
from crossdock._core import constants
from crossdock.torch import _calls

_BYTES: dict[str, Any] = {"dtype": torch.uint8, "device": "cpu"}  # under any defaults of torch


class HostExchange:
    """Gathers a few bytes from every rank, without a GPU.

    Each gathering is one dispatch of a group whose plan never changes: every rank sends one row to
    all ranks, and receives the rows of all by ascending rank. This takes microseconds where all are
    on one machine, and goes over the network where they are not.

    Args:
        comm: a communicator on the CPU. Making the exchange is collective.
        row_bytes: longest row to begin with.
    """

    def __init__(self, comm: _core.Comm, row_bytes: int) -> None:
        self._comm = comm
        self._make(row_bytes)

    def _make(self, row_bytes: int) -> None:
        """Makes group, plan and tensors for rows of at least `row_bytes` bytes. Collective."""
        ranks = self._comm.num_ranks
        topk = min(ranks, constants.MAX_TOPK)
        copies = -(-ranks // topk)  # tokens, each for `topk` of the ranks
        width = -(-row_bytes // constants.ROW_ALIGNMENT) * constants.ROW_ALIGNMENT
        sizes = {
            "num_experts": ranks,
            "max_topk": topk,
            "max_tokens_per_rank": copies,
            "hidden": width,
            "dtype": _calls.DTYPE_CODES[torch.uint8],
            "layout": constants.LAYOUTS["rank_major"],
            "net_buffer_bytes": 1,  # as few as there can be: rows are short
        }
        self._group = _core.Group(self._comm, **sizes)
        self._plan = torch.empty(_core.plan_size(num_ranks=ranks, **sizes), **_BYTES)
        readers = torch.arange(copies * topk, dtype=torch.int32, device="cpu").view(copies, topk)
        _calls.prepare(self._group, readers.masked_fill_(readers >= ranks, -1), self._plan)
        self._sent = torch.zeros(copies, width, **_BYTES)
        self._received = torch.empty(ranks, width, **_BYTES)

    def all_gather(self, row: bytes) -> list[bytes]:
        """The objects that every rank has sent, by rank. Collective; blocks without the GIL.

        Args:
            row: equally long on all ranks, at least one byte.

        Raises:
            Timeout, PeerLost, Aborted: a rank did not come. Fatal for the exchange.
        """
        if len(row) > self._sent.shape[1]:
            self._make(2 * len(row))
        self._sent[:, : len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        _calls.dispatch(self._group, self._plan, self._sent, self._received)
        return [bytes(line) for line in self._received[:, : len(row)].numpy()]

    def close(self) -> None:
        """Frees the group; the communicator stays its owner's."""
        self._group.close()
