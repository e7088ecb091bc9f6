"""The handle that ElasticBuffer.dispatch returns."""

from __future__ import annotations

import dataclasses
import functools

import torch

from crossdock._core import constants

from ._arguments import Tokens
from ._dispatch import Received, dispatch_cached
from ._expand import Expansion
from ._handle import Handle, Routing


@dataclasses.dataclass(eq=False)
class EPHandle:
    """The routing of a batch, for combine and for further dispatches. R ranks, L local experts.

    Operations go by `inner` and `expansion`. Other fields are for callers, who may assign to them.
    DeepEP's ``token_metadata_at_forward`` and ``channel_linked_list`` describe its buffer, and are
    None.

    Attributes:
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of dispatch.
        topk_idx: [T,K] as given, a copy with ``do_handle_copy``.
        num_recv_tokens: N, rows received, one per token and rank; without ``do_cpu_sync``
            ``R * num_max_tokens_per_rank``.
        num_expanded_tokens: rows of recv_x with ``do_expand``, else 0.
        num_recv_tokens_per_expert_list: L numbers, each rounded up to the alignment; empty without
            ``do_cpu_sync``.
        num_unaligned_recv_tokens_per_expert: [L] int32: the true ones.
        psum_num_recv_tokens_per_expert: [L] int32: where the aligned rows of each expert end; with
            ``do_expand`` where its true rows end.
        psum_num_recv_tokens_per_scaleup_rank: [R] int32: rows from ranks up to each.
        inner: handle of the Buffer beneath.
        expansion: where rows lie with ``do_expand``, else None.
    """

    do_expand: bool = dataclasses.field(init=False)
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int = dataclasses.field(init=False)
    num_expanded_tokens: int = dataclasses.field(init=False)
    num_recv_tokens_per_expert_list: list[int]
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor = dataclasses.field(init=False)
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor = dataclasses.field(init=False)
    inner: Handle = dataclasses.field(repr=False)
    expansion: Expansion | None = dataclasses.field(repr=False)
    token_metadata_at_forward: None = dataclasses.field(default=None, repr=False)
    channel_linked_list: None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Derives fields from the others, on the current stream."""
        routing, unit = self.inner.routing, self.expert_alignment
        counts, expansion = self.num_unaligned_recv_tokens_per_expert, self.expansion
        aligned = (counts + (unit - 1)) // unit * unit
        self.do_expand = expansion is not None
        self.num_recv_tokens = routing.num_rows
        self.num_expanded_tokens = 0 if expansion is None else expansion.num_rows
        self.psum_num_recv_tokens_per_expert = (
            torch.cumsum(aligned, 0, dtype=torch.int32) if expansion is None else expansion.ends
        )
        mine = self.inner[0][:, routing.batch.session.rank]
        self.psum_num_recv_tokens_per_scaleup_rank = mine.contiguous()

    @functools.cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """[N,2+K] int32: where received rows come from, and where they lie. Collective at first.

        The first look at a handle's is a dispatch along it, by which the tokens' numbers travel:
        all ranks look, between the same operations. A line has ``source rank *
        num_max_tokens_per_rank + token``; ``source rank * K + k``, the first choice that is here;
        and for each choice its row of recv_x with ``do_expand``, -1 where it is not here or without
        ``do_expand``. Lines behind the last received row are -1.
        """
        routing, ends = self.inner.routing, self.inner[0]
        received = _numbered_tokens(routing, ends.device)
        choices = received.topk_idx
        assert choices is not None
        row = torch.arange(routing.num_rows, dtype=torch.int32, device=ends.device)
        mine = ends[:, routing.batch.session.rank].contiguous()
        source = torch.bucketize(row, mine, out_int32=True, right=True)
        first = (choices >= 0).to(torch.int32).argmax(1)
        out = row.new_full((len(row), 2 + routing.topk), -1)
        out[:, 0] = source * self.num_max_tokens_per_rank + received.rows.view(torch.int32)[:, 0]
        out[:, 1] = source * routing.topk + first
        if self.expansion is not None:
            slots = self.expansion.slots
            out[:, 2:] = slots.masked_fill(slots == self.expansion.num_rows, -1)
        return out.masked_fill_((source == len(ends))[:, None], -1)

    @functools.cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """[T,K] int32, for the rank of each choice in `topk_idx`: where this token comes there.

        ``this rank * num_max_tokens_per_rank`` + its place among this rank's tokens for that rank;
        -1 = no choice, or a rank that has the token by an earlier choice.
        """
        places = self.inner[5]
        rank, ranks = self.inner.routing.batch.session.rank, places.shape[1]
        to = torch.where(self.topk_idx < 0, -1, self.topk_idx // (self.num_experts // ranks))
        again = (to[:, :, None] == to[:, None, :]).tril(-1).any(2)
        slots = rank * self.num_max_tokens_per_rank + places.gather(1, to.clamp(min=0))
        return slots.masked_fill((to < 0) | again, -1)


def _numbered_tokens(routing: Routing, device: torch.device) -> Received:
    """The result of a dispatch whose rows are this rank's tokens' numbers, and their choices."""
    numbers = torch.arange(routing.num_tokens, dtype=torch.int32, device=device)
    copies = constants.ROW_ALIGNMENT // numbers.element_size()  # for the shortest row
    rows = numbers[:, None].repeat(1, copies).view(torch.uint8)
    with routing.batch.turns(constants.DISPATCH):
        received, _ = dispatch_cached(Tokens(rows, None), routing, (None, False), with_choices=True)
    return received
