"""Groups for few tokens (serving, decode), and what their dispatch gives."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from crossdock import _core
from crossdock._comm_arguments import number_of_32_bits
from crossdock._config import DuplicateIds, OnError, PeerLoss, Receive
from crossdock._core import as_dlpack, constants
from crossdock._halves import OpenHalves
from crossdock._quantise import QuantiseWay, quantise_way
from crossdock._wire import Wire
from crossdock.errors import InvalidArgument

from ._calls import DTYPE_CODES, E8M0, current_stream, spec
from ._comm import Comm, default_comm
from ._config import read_config
from ._handles import new_handle
from ._placement import PlacedGroup

__all__ = ["LowLatencyGroup", "SlotPlan", "Slots", "low_latency_group_of"]

_PACKED = 4  # scales in an int32

_groups: weakref.WeakValueDictionary[int, LowLatencyGroup] = weakref.WeakValueDictionary()


def low_latency_group_of(handle: int) -> LowLatencyGroup:
    """The group with this handle.

    Raises:
        RuntimeError: it is gone; plans and models must keep their group.
    """
    group = _groups.get(handle)
    if group is None:
        raise RuntimeError(f"group: expected the handle of a living LowLatencyGroup, got {handle}")
    return group


class SlotPlan:
    """The routing of one batch that `ll_dispatch` has received: for any number of `ll_combine`.

    Attributes:
        group: its LowLatencyGroup, which it keeps alive.
        data: the routing, opaque, uint8.
        num_tokens: T of this rank.
        topk: K.
    """

    def __init__(
        self, group: LowLatencyGroup, data: torch.Tensor, num_tokens: int = 0, topk: int = 0
    ) -> None:
        self.group = group
        self.data = data
        self.num_tokens = num_tokens
        self.topk = topk


class Slots(NamedTuple):
    """The rows that `ll_dispatch` has received.

    L local experts with S = ``LowLatencyGroup.num_slots`` slots each, W ranks. The rows of expert e
    lie in its slots 0 to ``counts[e] - 1``, by source rank, then token. Slots behind them are left
    as they were.

    In a group with ``receive="by_expert"`` or ``"by_rank"`` there are no slots: rows lie in
    ``[N, H]``, zone by zone, or by source rank, and weights that dispatch was given beside them.
    Rows behind the last are left as they were.

    Attributes:
        tokens: ``[L, S, H]`` in the dtype of those sent, or float8_e4m3fn when quantised.
        scales: ``[L, S, H / 128]`` float32 or float8_e8m0fnu, or packed int32 ``[L, S, H / 512]``;
            of scales that dispatch was given their columns and dtype; else None.
        counts: ``[L]`` int32: rows of each expert.
        plan: for `ll_combine`.
        source_ranges: ``[L, W]`` int64: first slot << 32 | rows of each source; None unless asked
            for.
        source_tokens: ``[L, S]`` int32: the row's token at its source; None unless asked for.
        row_offsets: without slots: int64, where zones ``[L + 1]``, or source ranks ``[W + 1]``,
            begin, and where the last ends.
        weights: without slots, where dispatch was given some: float32, of each row ``[N]``, or by
            rank of its choices here ``[N, K]``, 0 elsewhere.
        topk_idx: by rank, ``[N, K]`` int64: local experts; -1 elsewhere and past the last row.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    plan: SlotPlan
    source_ranges: torch.Tensor | None = None
    source_tokens: torch.Tensor | None = None
    row_offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None


class LowLatencyGroup(PlacedGroup):
    """Sizes and memory of traffic of few tokens between the ranks, as in decoding.

    For `ll_dispatch` and `ll_combine`, which need no plan beforehand, no counts on the host, and no
    more than a few trips over the link. All ranks call the same operations of a kind in the same
    order, also a rank without tokens. Keep the group as long as plans, compiled functions and
    captured graphs use it. With W ranks and E experts, rank d holds the experts ``d * E / W`` to
    ``(d + 1) * E / W - 1``, unless `expert_ranks` says which rank holds which.

    On a GPU the operations of a group belong on one stream, or on streams that wait for one
    another.

    Attributes:
        comm: its Comm.
        handle: its number in this process, by which operators find it.
        num_slots: S, W * max_tokens_per_rank: the slots of each expert, which cannot overflow.
        plan_bytes: bytes of a plan.
        num_local_experts: L, the experts of this rank.
        num_experts, max_topk, max_tokens_per_rank, hidden, dtype, receive, wire_formats: as given.
        dispatch_halves, combine_halves: the operations that are between their halves.
        order: stands for the operations so far, so that compilers keep them, in their order.
        core: the group of the extension.
    """

    _SET_PLACEMENT = constants.LL_SET_PLACEMENT

    def __init__(
        self,
        *,
        num_experts: int,
        max_topk: int,
        max_tokens_per_rank: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        duplicate_ids: DuplicateIds = "error",
        on_error: OnError = "status",
        num_sms: int = 0,
        in_flight: int = 0,
        on_peer_loss: PeerLoss = "fatal",
        wait_timeout_ms: int = 0,
        receive: Receive = "slots",
        alignment: int = 1,
        expert_ranks: Sequence[int] | None = None,
        wire_formats: Sequence[Wire] = (),
        num_logical_experts: int = 0,
        comm: Comm | None = None,
    ) -> None:
        """Makes the group. Collective, blocking. Equal on all ranks but for `num_sms`.

        Args:
            num_experts: E; without `expert_ranks` a multiple of the number of ranks.
            max_topk: largest number of experts per token, 1 to 32.
            max_tokens_per_rank: largest number of tokens of a rank, up to 1024.
            hidden: largest row, in elements of `dtype`.
            dtype: widest payload: bfloat16, float16 or float32.
            duplicate_ids, on_error, num_sms: as of `EpGroup`.
            in_flight: operations of a kind that may be between their halves, 2 to 4; 0 = 2.
            on_peer_loss: ``"fatal"``: the loss of a rank finishes the communicator; ``"mask"``: the
                group goes on without a rank that is late, and without one whose process has ended
                if `comm` was made with ``on_peer_loss="mask"``, too (``init(on_peer_loss=)``). An
                operation that meets the loss reports PeerLost, and its results are complete but for
                that rank's share: where it raises, those that it was given as ``out``.
            wait_timeout_ms: longest wait for a peer; 0 = the communicator's.
            receive: where rows lie that are received: ``"slots"``: in slots of their expert; or
                without gaps, ``"by_expert"`` as layout "expert_major" of `EpGroup` has them,
                ``"by_rank"`` as "rank_major".
            alignment: "by_expert": of zones, in rows, a power of two; padding rows are zero.
            expert_ranks, wire_formats, num_logical_experts: as of `EpGroup`.
            comm: None = the default communicator.

        Raises:
            TypeError, ValueError: a bad argument, on this rank; InvalidArgument where the library
                finds it.
            Mismatch: sizes differ between ranks, or another rank's argument is bad.
            OutOfMemory: no memory left here (Mismatch on the others).
        """
        self.comm = default_comm() if comm is None else comm
        config = read_config(
            self.comm.core,
            _core.LowLatencyGroup,
            num_experts=num_experts,
            max_topk=max_topk,
            max_tokens_per_rank=max_tokens_per_rank,
            hidden=hidden,
            dtype=dtype,
            duplicate_ids=duplicate_ids,
            on_error=on_error,
            num_sms=num_sms,
            in_flight=in_flight,
            on_peer_loss=on_peer_loss,
            wait_timeout_ms=wait_timeout_ms,
            receive=receive,
            alignment=alignment,
            expert_ranks=expert_ranks,
            wire_formats=wire_formats,
            num_logical_experts=num_logical_experts,
        )
        self.num_experts, self.num_logical_experts = num_experts, num_logical_experts
        self.max_topk = max_topk
        self.max_tokens_per_rank = max_tokens_per_rank
        self.hidden, self.dtype = hidden, dtype
        self.receive: Receive = receive
        self.wire_formats = tuple(wire_formats)
        self.core = _core.LowLatencyGroup(self.comm.core, **config)
        self._sizes = sizes = config | {"num_ranks": self.comm.num_ranks}
        self.num_slots: int = self.comm.num_ranks * max_tokens_per_rank
        self.plan_bytes: int = _core.ll_plan_size(**sizes)
        self.num_local_experts: int = _core.ll_local_experts(self.comm.rank, **sizes)
        # By max_tokens; that of 0 is there before a compiler looks, which cannot call _core.
        self._bounds: dict[int, int] = {}
        self.rows()
        self.order = torch.zeros(1, dtype=torch.float32, device=self.comm.device)
        self.dispatch_halves = OpenHalves(in_flight)
        self.combine_halves = OpenHalves(in_flight)
        shapes = (self.num_slots, self.plan_bytes, self.num_local_experts)
        ranks = (self.comm.rank, self.comm.num_ranks)
        self._place_first(expert_ranks)
        self.handle: int = new_handle(ranks, shapes, sorted(config.items()))
        _groups[self.handle] = self

    def slots(
        self,
        hidden: int | None = None,
        dtype: torch.dtype | None = None,
        quantise: bool | str | QuantiseWay | None = False,
        *,
        packed_scales: bool = False,
        column_major_scales: bool = False,
        scales: tuple[int, torch.dtype] | None = None,
        sources: bool = False,
        topk: int | None = None,
        weighted: bool = True,
        max_tokens: int = 0,
    ) -> Slots:
        """Tensors for the ``out`` of `ll_dispatch`, their content undefined.

        Args:
            hidden: H; None = the group's.
            dtype: of the tokens that are sent; None = the group's.
            quantise: as of `ll_dispatch`.
            packed_scales: with "fp8_block128_e8m0": int32 scales, each four bytes of e8m0.
            column_major_scales: the slots of an expert are contiguous for each block of columns, as
                DeepGEMM takes scales; else the scales of each slot are.
            scales: columns and dtype of those that dispatch is given.
            sources: with source_ranges and source_tokens.
            topk, weighted, max_tokens: without slots: K (None = the group's), whether dispatch is
                given weights, and its `max_tokens`.
        """
        local, device = self.num_local_experts, self.comm.device
        places = self.rows(max_tokens)
        hidden = self.hidden if hidden is None else hidden
        dtype = self.dtype if dtype is None else dtype
        way = quantise if isinstance(quantise, QuantiseWay) else quantise_way(quantise or False)
        received = ranges = tokens = None
        if way is not None:
            dtype = torch.float8_e4m3fn
            scales = hidden // way.block, torch.float32 if way.scale == "float32" else E8M0
            if packed_scales:
                scales = scales[0] // _PACKED, torch.int32
        if scales is not None:
            width, kind = scales
            *outer, rows = places
            shape = (*outer, width, rows) if column_major_scales else (*places, width)
            received = torch.empty(shape, dtype=kind, device=device)
            if column_major_scales:
                received = received.transpose(-2, -1)
        if sources:
            ranks = self.comm.num_ranks
            ranges = torch.empty(local, ranks, dtype=torch.int64, device=device)
            tokens = torch.empty(local, self.num_slots, dtype=torch.int32, device=device)
        offsets, weights, experts = self._beside(places, topk, weighted)
        return Slots(
            torch.empty(*places, hidden, dtype=dtype, device=device),
            received,
            torch.empty(local, dtype=torch.int32, device=device),
            SlotPlan(self, torch.empty(self.plan_bytes, dtype=torch.uint8, device=device)),
            ranges,
            tokens,
            offsets,
            weights,
            experts,
        )

    def rows(self, max_tokens: int = 0) -> tuple[int, ...]:
        """The leading dimensions of received rows: ``(L, S)``, or without slots ``(N,)``.

        Args:
            max_tokens: as of `ll_dispatch`.

        Raises:
            InvalidArgument: it is more than the group's, or negative.
        """
        if self.receive == "slots":
            return self.num_local_experts, self.num_slots
        known = self._bounds.get(max_tokens) if type(max_tokens) is int else None
        if known is None:
            number = number_of_32_bits("max_tokens", max_tokens)
            known = self._bounds[number] = _core.ll_recv_bound(number, **self._sizes)
        return (known,)

    def _beside(
        self, places: tuple[int, ...], topk: int | None, weighted: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The row_offsets, weights and topk_idx of `Slots` without slots; else nothing."""
        if self.receive == "slots":
            return None, None, None
        device, by_rank = self.comm.device, self.receive == "by_rank"
        zones = self.comm.num_ranks if by_rank else self.num_local_experts
        choices = (*places, self.max_topk if topk is None else topk)
        shape = choices if by_rank else places
        return (
            torch.empty(zones + 1, dtype=torch.int64, device=device),
            torch.empty(shape, dtype=torch.float32, device=device) if weighted else None,
            torch.empty(choices, dtype=torch.int64, device=device) if by_rank else None,
        )

    @property
    def faults(self) -> torch.Tensor:
        """``[1]`` int64 on the device: the count of `errors`, to be read only.

        An operation that ends with an error, such as the loss of a rank, raises it before its
        launch ends. So a step that copies it first and compares it last learns on the device, also
        in a captured graph, whether its results may lack a share. Operations sent without a rank
        that is masked already do not count. Good until the group is closed.
        """
        core = self.comm.core
        place = (core.device_type, core.device_id)
        word = as_dlpack(self.core.fault_word(), [1], DTYPE_CODES[torch.int64], *place, self.core)
        return from_dlpack(word)

    def mask(self) -> torch.Tensor:
        """``[W]`` int32: 1 where this rank has masked the rank: neither sends nor waits.

        Local, in the order of the current stream; it may be captured. With ``on_peer_loss="mask"``
        only.
        """
        device = self.comm.device
        found = torch.empty(self.comm.num_ranks, dtype=torch.int32, device=device)
        self.core.mask_get(spec(found), current_stream(device))
        return found

    def mask_set(self, rank: int, masked: bool = True) -> None:
        """Masks or unmasks a rank, in this rank's view, from the next operation on. Local.

        Raises:
            TypeError, ValueError: `rank` is no whole number.
            InvalidArgument: the own rank, no rank, or a group without ``on_peer_loss="mask"``.
        """
        number = number_of_32_bits("rank", rank)
        self.core.mask_set(number, int(bool(masked)), current_stream(self.comm.device))

    def reset(self) -> None:
        """Brings the ranks that are not masked back into step. Collective over those.

        Operations between their halves are forgotten; plans stay good. Needed when a rank has been
        unmasked on both sides. With ``on_peer_loss="mask"`` only. Where groups that resume enter a
        view (`EpGroup.enter_view`), that comes first.
        """
        try:
            self.core.reset(current_stream(self.comm.device))
        except InvalidArgument:  # nothing has happened
            raise
        except BaseException:
            self._forget_halves()
            raise
        self._forget_halves()

    def _forget_halves(self) -> None:
        self.dispatch_halves.forget()
        self.combine_halves.forget()

    def __repr__(self) -> str:
        return (
            f"LowLatencyGroup({self.num_experts} experts on {self.comm.num_ranks} ranks, "
            f"max_topk={self.max_topk}, max_tokens_per_rank={self.max_tokens_per_rank}, "
            f"hidden={self.hidden}, dtype={self.dtype})"
        )
