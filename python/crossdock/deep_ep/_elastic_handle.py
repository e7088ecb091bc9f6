"""The handle that ElasticBuffer.dispatch returns."""

from __future__ import annotations

import dataclasses
import functools

import torch

from crossdock._core import constants

from ._arguments import Tokens
from ._dispatch import dispatch_cached
from ._expand import Expansion, counts_of, expansion_of
from ._handle import Handle


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

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int = dataclasses.field(init=False)
    num_expanded_tokens: int = dataclasses.field(init=False)
    num_recv_tokens_per_expert_list: list[int]
    num_unaligned_recv_tokens_per_expert: torch.Tensor = dataclasses.field(init=False)
    psum_num_recv_tokens_per_expert: torch.Tensor = dataclasses.field(init=False)
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor = dataclasses.field(init=False)
    inner: Handle = dataclasses.field(repr=False)
    expansion: Expansion | None = dataclasses.field(default=None, init=False, repr=False)
    recv_topk_idx: dataclasses.InitVar[torch.Tensor]
    token_metadata_at_forward: None = dataclasses.field(default=None, repr=False)
    channel_linked_list: None = dataclasses.field(default=None, repr=False)

    def __post_init__(self, recv_topk_idx: torch.Tensor) -> None:
        """Derives fields from the others and [N,K] local experts, on the current stream."""
        unit, ends = self.expert_alignment, self.inner[0]
        local = self.num_experts // len(ends)
        counts = counts_of(recv_topk_idx, local)
        aligned = (counts + (unit - 1)) // unit * unit
        self.num_recv_tokens, topk = recv_topk_idx.shape
        self.num_expanded_tokens = 0
        self.num_unaligned_recv_tokens_per_expert = counts
        self.psum_num_recv_tokens_per_expert = torch.cumsum(aligned, 0, dtype=torch.int32)
        mine = ends[:, self.inner.routing.batch.session.rank]
        self.psum_num_recv_tokens_per_scaleup_rank = mine.contiguous()
        if self.do_expand:
            rows = sum(self.num_recv_tokens_per_expert_list)
            if not self.num_recv_tokens_per_expert_list:  # room for any routing
                rows = self.num_recv_tokens * min(topk, local) + (unit - 1) * local
            self.expansion = expansion_of(recv_topk_idx, counts, unit, rows)
            self.num_expanded_tokens = rows
            self.psum_num_recv_tokens_per_expert = self.expansion.ends

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
        # Rows that are their tokens' numbers, as often as the shortest row has room for.
        numbers = torch.arange(routing.num_tokens, dtype=torch.int32, device=ends.device)
        copies = constants.ROW_ALIGNMENT // numbers.element_size()
        tokens = Tokens(numbers[:, None].repeat(1, copies).view(torch.uint8), None)
        with routing.batch.turns(constants.DISPATCH):
            received, _ = dispatch_cached(tokens, routing, (None, False), with_choices=True)
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
