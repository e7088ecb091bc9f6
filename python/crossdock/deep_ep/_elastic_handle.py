"""The handle that ElasticBuffer.dispatch returns."""

from __future__ import annotations

import dataclasses

import torch

from crossdock._core import constants

from ._arguments import Tokens
from ._call import Call
from ._dispatch import Received, dispatch_cached
from ._expand import Expansion
from ._handle import Handle

__all__ = ["EPHandle"]


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
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    inner: Handle = dataclasses.field(repr=False)
    expansion: Expansion | None = dataclasses.field(repr=False)
    token_metadata_at_forward: None = dataclasses.field(default=None, repr=False)
    channel_linked_list: None = dataclasses.field(default=None, repr=False)
    _sources: torch.Tensor | None = dataclasses.field(default=None, init=False, repr=False)
    _slots: torch.Tensor | None = dataclasses.field(default=None, init=False, repr=False)

    @property
    def recv_src_metadata(self) -> torch.Tensor:
        """[N,2+K] int32: where received rows come from, and where they lie. Collective at first.

        The first look at a handle's is a dispatch along it, by which the tokens' numbers travel:
        all ranks look, between the same operations. A line has ``source rank *
        num_max_tokens_per_rank + token``; ``source rank * K + k``, the first choice that is here;
        and for each choice its row of recv_x with ``do_expand``, -1 where it is not here or without
        ``do_expand``. Lines behind the last received row are -1.
        """
        if self._sources is None:
            self._sources = _sources_of(self)
        return self._sources

    @recv_src_metadata.setter
    def recv_src_metadata(self, value: torch.Tensor) -> None:
        self._sources = value

    @property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """[T,K] int32, for the rank of each choice in `topk_idx`: where this token comes there.

        ``this rank * num_max_tokens_per_rank`` + its place among this rank's tokens for that rank;
        -1 = no choice, or a rank that has the token by an earlier choice.
        """
        if self._slots is None:
            self._slots = _slots_of(self)
        return self._slots

    @dst_buffer_slot_idx.setter
    def dst_buffer_slot_idx(self, value: torch.Tensor) -> None:
        self._slots = value


def _sources_of(handle: EPHandle) -> torch.Tensor:
    """Makes ``recv_src_metadata``. Collective."""
    routing, ends = handle.inner.routing, handle.inner[0]
    rank, ranks = routing.lease.home.comm.rank, len(ends)
    received = _numbered_tokens(handle)
    choices = received.topk_idx
    assert choices is not None
    row = torch.arange(routing.num_rows, dtype=torch.int32, device=ends.device)
    source = torch.bucketize(row, ends[:, rank].contiguous(), out_int32=True, right=True)
    token = received.rows.view(torch.int32)[:, 0]
    first = (choices >= 0).to(torch.int32).argmax(1)
    out = torch.full((routing.num_rows, 2 + routing.topk), -1, dtype=torch.int32, device=row.device)
    out[:, 0] = source * handle.num_max_tokens_per_rank + token
    out[:, 1] = source * routing.topk + first
    if handle.expansion is not None:
        slots = handle.expansion.slots
        out[:, 2:] = slots.masked_fill(slots == handle.expansion.num_rows, -1)
    return out.masked_fill_((source == ranks)[:, None], -1)


def _numbered_tokens(handle: EPHandle) -> Received:
    """The result of a dispatch whose rows are this rank's tokens' numbers, and their choices."""
    routing = handle.inner.routing
    device = handle.inner[0].device
    numbers = torch.arange(routing.num_tokens, dtype=torch.int32, device=device)
    copies = constants.ROW_ALIGNMENT // numbers.element_size()  # for the shortest row
    rows = numbers[:, None].repeat(1, copies).view(torch.uint8)
    with Call(routing.lease, constants.DISPATCH) as call:
        received, _ = dispatch_cached(
            call, Tokens(rows, None), routing, (None, False), with_choices=True
        )
    return received


def _slots_of(handle: EPHandle) -> torch.Tensor:
    """Makes ``dst_buffer_slot_idx``."""
    places = handle.inner[5]
    rank, ranks = handle.inner.routing.lease.home.comm.rank, places.shape[1]
    to = torch.where(handle.topk_idx < 0, -1, handle.topk_idx // (handle.num_experts // ranks))
    again = (to[:, :, None] == to[:, None, :]).tril(-1).any(2)
    slots = rank * handle.num_max_tokens_per_rank + places.gather(1, to.clamp(min=0))
    return slots.masked_fill((to < 0) | again, -1)
