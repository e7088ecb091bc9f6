"""The tokens that a rank has received along a routing, and the rows of each.

N = received tokens, K = choices of each, R = ranks, M = rows of a receive tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from crossdock._core import constants

from ._arguments import Tokens, topk_idx_t
from ._expand import Padding
from ._few import dispatch_along
from ._handle import Routing

_NUMBERS = constants.ROW_ALIGNMENT // torch.int32.itemsize  # in the shortest row


class TokenRows(NamedTuple):
    """Received tokens by source rank, then token, as ``EPHandle.recv_src_metadata`` has them."""

    metadata: torch.Tensor  # [N,2+K] int32
    ends: torch.Tensor  # [R] int32: received tokens of ranks up to each

    def one_each(self, rows: torch.Tensor) -> torch.Tensor:
        """[N,...]: one row of each token, of rows by expert [M,...]; zero where there is none."""
        # Types that torch does not index are moved as bytes.
        moved = rows.view(torch.uint8) if rows.element_size() == 1 else rows
        row = self.metadata[:, 2:].amax(1)
        out = moved.index_select(0, row.clamp(min=0))
        return out.masked_fill_((row < 0).view(-1, *[1] * (out.dim() - 1)), 0).view(rows.dtype)

    def experts(self, starts: torch.Tensor) -> torch.Tensor:
        """[N,K]: the local expert of each choice, -1 elsewhere; starts: [L] of their zones."""
        rows = self.metadata[:, 2:].contiguous()
        found = torch.bucketize(rows, starts[1:].contiguous(), right=True)
        return found.masked_fill_(rows < 0, -1).to(topk_idx_t)

    def weights(self, weights: torch.Tensor) -> torch.Tensor:
        """[N,K] from the weights [M] of rows by expert; 0 where a choice is not here."""
        rows = self.metadata[:, 2:].long()
        found = torch.nn.functional.pad(weights, (0, 1))[rows]  # also where there is no row
        return found.masked_fill_(rows < 0, 0)


def token_rows_of(
    routing: Routing, most_tokens: int, exact: bool, padding: Padding | None
) -> TokenRows:
    """Dispatches the tokens' numbers along a routing, as one of its turns.

    Args:
        most_tokens: of any rank.
        exact: whether N is the number of tokens, for which the host waits, or R * `most_tokens`.
        padding: of rows by expert, if they are told with another one than the routing.

    Raises:
        CrossdockError: the dispatch has failed. Where none may wait for that, in a capture, numbers
            are brought into range: a failed dispatch leaves anything.
    """
    session = routing.batch.session
    numbers = torch.zeros(routing.num_tokens, _NUMBERS, dtype=torch.int32, device=session.device)
    # 0 is for rows of no token.
    numbers[:, 0] = torch.arange(1, routing.num_tokens + 1, device=session.device)
    numbers[:, 1] = session.rank
    choice = None
    if routing.by_expert:
        choice = torch.arange(routing.topk, dtype=torch.float32, device=session.device)
        choice = choice.expand(routing.num_tokens, -1).contiguous()
    tokens = Tokens(numbers.view(torch.uint8), None)
    received, _ = dispatch_along(tokens, routing, (None, False), choice, choice is None)
    routing.batch.raise_failure()
    number, source = received.rows.view(torch.int32)[:, :2].long().unbind(1)
    lines = session.num_ranks * most_tokens
    line = torch.where(number > 0, source * most_tokens + number - 1, lines).clamp(0, lines)
    here = torch.zeros(lines + 1, dtype=torch.bool, device=session.device)
    here[line] = True
    here = here[:lines]
    ends = here.view(session.num_ranks, most_tokens).sum(1).cumsum(0).to(torch.int32)
    # One more line, for rows of no token.
    tokens_here = int(ends[-1]) if exact else lines
    out = ends.new_full((tokens_here + 1, 2 + routing.topk), -1)
    place = torch.nn.functional.pad(torch.cumsum(here, 0) - 1, (0, 1), value=tokens_here)[line]
    out[place, 0] = line.to(torch.int32)
    if received.topk_idx is not None:
        first = (received.topk_idx >= 0).int().argmax(1)
        out[place, 1] = (source * routing.topk + first).to(torch.int32)
    else:
        assert received.topk_weights is not None
        row = torch.arange(len(place), dtype=torch.int32, device=session.device)
        row = row if padding is None else padding.places.to(torch.int32)
        choice_of = received.topk_weights.long().clamp(0, routing.topk - 1)
        out[place, 2 + choice_of] = row
        first = (out[:, 2:] >= 0).int().argmax(1)
        out[:, 1] = out[:, 0] // most_tokens * routing.topk + first
    out[-1] = -1
    out = out[:tokens_here]
    return TokenRows(out.masked_fill_((out[:, :1] < 0), -1), ends)
