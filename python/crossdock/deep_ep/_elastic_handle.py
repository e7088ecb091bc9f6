"""The handle that ElasticBuffer.dispatch returns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from crossdock._core import constants

from ._dispatch import Sums
from ._expand import Padding, zones_of
from ._handle import Routing
from ._token_rows import TokenRows, token_rows_of


@dataclasses.dataclass(eq=False)
class EPHandle:
    """The routing of a batch, for combine and for further dispatches. R ranks, L local experts.

    Operations go by `routing`. Other fields are for callers, who may assign to them. With
    ``do_expand`` the first look at one of `num_recv_tokens` (with ``do_cpu_sync``),
    `psum_num_recv_tokens_per_scaleup_rank` and `recv_src_metadata` is collective, as is a first
    dispatch along the handle without it: the tokens' numbers travel by a dispatch, so all ranks
    look, between the same operations. DeepEP's ``token_metadata_at_forward`` and
    ``channel_linked_list`` describe its buffer, and are None.

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
        routing: the library's part.
        starts: with ``do_expand`` [L] int32: where the rows of each expert begin.
        padding: of zones, with ``do_expand`` and an alignment that is no power of two; else None.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens_per_expert_list: list[int]
    routing: Routing = dataclasses.field(repr=False)
    sums: dataclasses.InitVar[Sums]
    num_expanded_tokens: int = dataclasses.field(default=0, init=False)
    num_unaligned_recv_tokens_per_expert: torch.Tensor = dataclasses.field(init=False)
    psum_num_recv_tokens_per_expert: torch.Tensor = dataclasses.field(init=False)
    padding: Padding | None = dataclasses.field(default=None, init=False, repr=False)
    token_metadata_at_forward: None = dataclasses.field(default=None, repr=False)
    channel_linked_list: None = dataclasses.field(default=None, repr=False)

    def __post_init__(self, sums: Sums) -> None:
        """Derives fields from the others, on the current stream."""
        unit, rows = self.expert_alignment, self.routing.num_rows
        counts, offsets = sums.counts, sums.offsets
        assert counts is not None
        self.num_unaligned_recv_tokens_per_expert = counts
        self._found: TokenRows | None = None
        self._most = self.num_max_tokens_per_rank
        # Whether there are as many rows as are needed, and not as many as may be.
        self._exact = bool(self.num_recv_tokens_per_expert_list)
        if offsets is None:
            aligned = (counts + (unit - 1)) // unit * unit
            self.psum_num_recv_tokens_per_expert = torch.cumsum(aligned, 0, dtype=torch.int32)
            self.psum_num_recv_tokens_per_scaleup_rank = self._ends(sums)
            self.num_recv_tokens = rows
            return
        offsets = offsets.to(torch.int32)
        self.starts, self.num_expanded_tokens = offsets[:-1], rows
        if zones_of(unit) != unit:
            most = rows + (unit - 1) * len(counts)
            with_padding = sum(self.num_recv_tokens_per_expert_list) if self._exact else most
            self.padding = Padding(counts, offsets, unit, (rows, with_padding))
            self.starts, self.num_expanded_tokens = self.padding.starts, with_padding
        self.psum_num_recv_tokens_per_expert = self.starts + counts

    def _ends(self, sums: Sums) -> torch.Tensor:
        """[R] int32: rows by rank from ranks up to each."""
        if sums.ends is not None:
            return sums.ends.to(torch.int32)
        assert sums.rank_rows is not None
        mine = sums.rank_rows[:, self.routing.batch.session.rank]
        return torch.cumsum(mine, 0, dtype=torch.int32)

    @property
    def few_tokens(self) -> bool:
        """Whether the low-latency operations have brought the rows, and bring the results back."""
        return self.routing.few

    # These two are fields of handles without do_expand.

    @functools.cached_property
    def num_recv_tokens(self) -> int:
        if not self._exact:
            return self.routing.batch.session.num_ranks * self._most
        return len(self._token_rows().metadata)

    @functools.cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        return self._token_rows().ends.clone()

    @functools.cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """[N,2+K] int32: where received rows come from, and where they lie. Collective at first.

        A line has ``source rank * num_max_tokens_per_rank + token``; ``source rank * K + k``, the
        first choice that is here; and for each choice its row of recv_x with ``do_expand``, -1
        where it is not here or without ``do_expand``. Lines behind the last received row are -1.
        """
        return self._token_rows().metadata.clone()

    def _token_rows(self) -> TokenRows:
        with self.routing.batch.turns(*[constants.DISPATCH] * (not self.has_looked)):
            return self.look()

    @property
    def has_looked(self) -> bool:
        """Whether the tokens' numbers have travelled."""
        return self._found is not None

    def look(self) -> TokenRows:
        """The received tokens, and the rows of each; the first time by a turn of the caller's.

        An error of an earlier operation, which this rank alone may know so far, is raised behind
        that: all ranks have looked then.
        """
        if self._found is None:
            earlier = self.routing.batch.settled_failure()
            self._found = token_rows_of(self.routing, self._most, self._exact, self.padding)
            if earlier is not None:
                raise earlier
        return self._found

    def tensors(self) -> Iterator[object]:
        """All that an operation has made for it, and other fields."""
        yield from vars(self).values()
        if self._found is not None:
            yield from self._found
        if self.padding is not None:
            yield from vars(self.padding).values()

    @functools.cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """[T,K] int32, for the rank of each choice in `topk_idx`: where this token comes there.

        ``this rank * num_max_tokens_per_rank`` + its place among this rank's tokens for that rank;
        -1 = no choice, or a rank that has the token by an earlier choice.
        """
        session = self.routing.batch.session
        rank, ranks = session.rank, session.num_ranks
        to = torch.where(self.topk_idx < 0, -1, self.topk_idx // (self.num_experts // ranks))
        again = (to[:, :, None] == to[:, None, :]).tril(-1).any(2)
        goes = (to[:, :, None] == torch.arange(ranks, device=to.device)).any(1)  # [T,R]
        places = torch.cumsum(goes, 0, dtype=torch.int32) - 1
        slots = rank * self.num_max_tokens_per_rank + places.gather(1, to.clamp(min=0))
        return slots.masked_fill((to < 0) | again, -1)
