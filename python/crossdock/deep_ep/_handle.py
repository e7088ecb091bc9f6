"""The handle that dispatch returns for later operations on the same batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ._batch import Batch

if TYPE_CHECKING:
    from typing_extensions import Self

_R = TypeVar("_R")

# By the first tensor of a handle: its routing.
_routings: Any = WeakTensorKeyDictionary()


@dataclasses.dataclass(eq=False)
class Routing:
    """The library's part of a handle."""

    batch: Batch  # the group that made the plan
    plan: torch.Tensor
    num_tokens: int  # T
    num_rows: int  # N, of receive tensors
    topk: int  # K; 0 = made without ``topk_idx``
    # Of few tokens, to send other rows the same way:
    topk_idx: torch.Tensor | None = None  # [T,K]
    most_tokens: int = 0  # T of any rank
    exact: bool = False  # whether there are as many rows as are needed

    @property
    def few(self) -> bool:
        """Whether its operations are those of low latency."""
        return self.batch.sizes.few

    @property
    def by_expert(self) -> bool:
        """Whether a row is for each expert here that the token has, in zones, or for the token."""
        return self.batch.sizes.zones > 0

    def __post_init__(self) -> None:
        self.batch.session.serve(self)


class RoutedTuple(tuple[Any, ...]):
    """A handle as DeepEP's; any tuple or list of its elements is good as one.

    Attributes:
        routing: the library's part, which operations go by.
    """

    routing: Any

    def __new__(cls, elements: tuple[Any, ...], routing: object) -> Self:
        handle = super().__new__(cls, elements)
        handle.routing = routing
        if elements[0] is not None:
            _routings[elements[0]] = routing
        return handle

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a handle of crossdock.deep_ep.Buffer serves in the process that made it "
            "only: it cannot be copied or pickled"
        )


def routing_of(handle: object, kind: type[_R], elements: int) -> _R | None:
    """The routing of a handle, or of a tuple or list of its elements; None if it is neither."""
    found: object = None
    if isinstance(handle, RoutedTuple):
        found = handle.routing
    elif (
        isinstance(handle, tuple | list) and len(handle) == elements and torch.is_tensor(handle[0])
    ):
        found = _routings.get(handle[0])
    return found if isinstance(found, kind) else None


class Handle(RoutedTuple):
    """Six tensors, as DeepEP's handle, and the routing that operations go by. W = ranks, N = rows.

    The tensors are:

        rank_prefix_matrix         [W,W]  rows for rank d (column) from all sources up to s (line)
        channel_prefix_matrix      [W,1]  tokens of this rank for each rank
        recv_channel_prefix_matrix [W,1]  0
        recv_src_idx               [N]    -1: which token of its source a row is, is not known
        is_token_in_rank           [T,W]  as it was given, bool
        send_head                  [T,W]  place among this rank's tokens for that rank, or -1

    All but one are int32. Where channels occur, there is one channel. Operations read none of the
    tensors; except for the fifth, and for the first of a dispatch whose host does not wait, they
    are made when they are first used.
    """

    routing: Routing
    _rank_rows: torch.Tensor

    @classmethod
    def of(
        cls,
        rank_rows: torch.Tensor,
        rank_prefix_matrix: torch.Tensor | None,
        is_token_in_rank: torch.Tensor,
        routing: Routing,
    ) -> Handle:
        """A handle without those tensors that are made when they are first used.

        Args:
            rank_rows: [W,W]: rows of each rank (line) for each; written by now where there is no
                `rank_prefix_matrix`.
        """
        elements = (rank_prefix_matrix, None, None, None, is_token_in_rank, None)
        handle = cls(elements, routing)
        handle._rank_rows = rank_rows
        return handle

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        return self._tensors[index]

    @functools.cached_property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        prefix, in_rank = super().__getitem__(0), super().__getitem__(4)
        if prefix is None:
            prefix = torch.cumsum(self._rank_rows, 0, dtype=torch.int32)
            _routings[prefix] = self.routing
        places = torch.cumsum(in_rank, 0, dtype=torch.int32)  # tokens for a rank up to each
        sent = prefix.new_empty(in_rank.shape[1], 1)
        torch.sum(in_rank, 0, dtype=torch.int32, out=sent.view(-1))
        unknown = prefix.new_full((self.routing.num_rows,), -1)
        head = places.mul_(in_rank).sub_(1)
        return prefix, sent, torch.zeros_like(sent), unknown, in_rank, head

    def __repr__(self) -> str:
        return f"Handle({self.routing.num_tokens} tokens, {self.routing.num_rows} rows)"
