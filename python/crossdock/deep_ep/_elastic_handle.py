"""The handle that ElasticBuffer.dispatch returns."""

from __future__ import annotations

import dataclasses

import torch

from ._expand import Expansion
from ._handle import Handle

__all__ = ["EPHandle"]


@dataclasses.dataclass(frozen=True, eq=False)
class EPHandle:
    """The routing of a batch, for combine and for further dispatches. R ranks, L local experts.

    DeepEP's other fields (``recv_src_metadata``, ``dst_buffer_slot_idx``,
    ``token_metadata_at_forward``, ``channel_linked_list``) describe its buffer, and are None.

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
    recv_src_metadata: None = dataclasses.field(default=None, repr=False)
    dst_buffer_slot_idx: None = dataclasses.field(default=None, repr=False)
    token_metadata_at_forward: None = dataclasses.field(default=None, repr=False)
    channel_linked_list: None = dataclasses.field(default=None, repr=False)
