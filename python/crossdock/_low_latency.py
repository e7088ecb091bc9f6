"""Groups for few tokens (serving, decode) on NumPy arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from crossdock import _core
from crossdock._arrays import Spec, aligned_empty, describe
from crossdock._comm import Comm
from crossdock._comm_arguments import number_of_32_bits
from crossdock._config import LowLatencyConfig
from crossdock._core import constants
from crossdock._dtypes import INDICES, PAYLOADS, SCALES, SUMMABLE, WEIGHTS, numpy_dtype
from crossdock._halves import Half, OpenHalves
from crossdock._membership import LowLatencyStatus, Membership, of_kind, optional
from crossdock._plan import SlotPlan
from crossdock._quantise import QuantiseWay, quantise_way
from crossdock._wire import Wire, wire_of_rows
from crossdock.errors import InvalidArgument

__all__ = ["LowLatencyGroup", "SentCombine", "SentDispatch", "Slots"]

_BOTH, _SEND, _RECEIVE = (constants.PHASES[half] for half in ("both", "send", "receive"))
_ELEMENT = "float8_e4m3fn"  # of rows that are quantised
_RECEIVED_SCALES = (*SCALES, "int32")
_PACKED = 4  # scales in an int32

# Tensors as crossdock._core takes them, by their names in the C header.
_Tensors = dict[str, Spec | None]


@dataclasses.dataclass(frozen=True)
class Slots:
    """The rows that dispatch of a LowLatencyGroup has received.

    L local experts with S slots each, H columns, W ranks. The rows of expert e lie in its slots 0
    to ``counts[e] - 1``, by source rank, then token. Slots behind them are left as they were.

    In a group with ``receive="by_expert"`` or ``"by_rank"`` there are no slots: rows lie in [N,H],
    zone by zone, or by source rank, and weights that dispatch was given beside them. Rows behind
    the last are left as they were.
    """

    tokens: np.ndarray  # [L,S,H], of any strides over L and S; or [N,H], of any over N
    # [L,S,H/128], of any strides; of packed ones int32 [L,S,H/512]; of scales that dispatch was
    # given [L,S,columns]
    scales: np.ndarray | None
    counts: np.ndarray  # [L] int32
    plan: SlotPlan
    source_ranges: np.ndarray | None = None  # [L,W] int64: first slot << 32 | rows of each source
    source_tokens: np.ndarray | None = None  # [L,S] int32: the row's token at its source
    # Where there are no slots:
    row_offsets: np.ndarray | None = None  # int64: where zones [L+1], or sources [W+1], begin
    weights: np.ndarray | None = None  # float32: of each row [N], or of its choices here [N,K]
    topk_idx: np.ndarray | None = None  # by rank, [N,K] int64: local experts; -1 = none


@dataclasses.dataclass
class _Sent:
    """The first half of an operation that has been called."""

    group: LowLatencyGroup
    _half: Half = dataclasses.field(default_factory=Half, init=False, repr=False)


@dataclasses.dataclass(frozen=True)
class _Beside:
    """The sizes beside those of rows from which the shapes of what is received follow."""

    topk: int
    weighted: bool
    max_tokens: int
    scales: tuple[int, np.dtype] | None

    @classmethod
    def of(
        cls,
        topk_idx: np.ndarray,
        topk_weights: np.ndarray | None,
        max_tokens: int,
        scales: np.ndarray | None,
    ) -> _Beside:
        """Of a dispatch's inputs."""
        most = number_of_32_bits("max_tokens", max_tokens)
        beside = None if scales is None else (scales.shape[-1], scales.dtype)
        return cls(topk_idx.shape[-1], topk_weights is not None, most, beside)

    def slots(
        self,
        group: LowLatencyGroup,
        columns: int,
        dtype: np.dtype,
        way: QuantiseWay | None,
        *,
        sources: bool,
    ) -> Slots:
        """New arrays to receive into."""
        rows: dict[str, Any] = {}
        if group.config.receive != "slots":
            names = ("topk", "weighted", "max_tokens")
            rows = {name: getattr(self, name) for name in names}
        return group.slots(columns, dtype, way, scales=self.scales, sources=sources, **rows)


@dataclasses.dataclass
class SentDispatch(_Sent):
    """The rows that dispatch_send has sent. `receive` takes those that have come."""

    columns: int
    dtype: np.dtype
    way: QuantiseWay | None
    beside: _Beside

    def receive(
        self,
        *,
        sources: bool = False,
        expert_load: np.ndarray | None = None,
        wait_ns: np.ndarray | None = None,
        out: Slots | None = None,
    ) -> Slots:
        """The second half of dispatch, whose arguments these are.

        A bad one that is found in Python leaves this to be called again.

        Raises:
            ValueError: also where an older dispatch of the group waits for its second half.
        """
        halves = self.group._dispatches
        halves.require_oldest(self._half, "receive")
        with self.group._naming("receive"):
            if out is None:
                out = self.beside.slots(
                    self.group, self.columns, self.dtype, self.way, sources=sources
                )
            outputs = _outputs(out, expert_load, wait_ns)
        halves.take(self._half)
        self.group._dispatch(_RECEIVE, self.way, outputs, self.beside.max_tokens)
        return out


@dataclasses.dataclass
class SentCombine(_Sent):
    """The results that combine_send has sent. `receive` sums those that have come."""

    plan: SlotPlan
    columns: int
    dtype: np.dtype
    wire: int  # the library's number

    def receive(
        self, *, wait_ns: np.ndarray | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """The second half of combine, whose arguments these are.

        A bad one that is found in Python leaves this to be called again.

        Raises:
            ValueError: also where an older combine of the group waits for its second half.
        """
        halves = self.group._combines
        halves.require_oldest(self._half, "receive")
        with self.group._naming("receive"):
            if out is None:
                out = aligned_empty((self.plan.num_tokens, self.columns), self.dtype)
            sums = _sums(out, wait_ns)
        halves.take(self._half)
        self.group._core.combine(
            sums | {"phase": _RECEIVE, "plan": self.plan.place(), "wire": self.wire}
        )
        return out


class LowLatencyGroup(Membership[LowLatencyConfig, LowLatencyStatus]):
    """Moves few tokens at a time, without a prepare, as in decoding.

    A context manager. T is this rank's number of tokens, which may be 0 and differ per rank and
    call; K choices per token, H columns, L local experts with S = W * max_tokens_per_rank slots
    each, so that nothing can overflow. All ranks call the same operations of a kind in the same
    order. Each may be called in halves: `dispatch_send`, later `receive` of its result; other work,
    and other operations, may lie between. Second halves of a kind come in the order of the first
    ones: one out of order raises ValueError. ``config.in_flight`` operations of a kind may be
    between their halves; sending one more raises Busy. In both cases nothing has happened.

    A mistake in one rank's arguments of an operation, or of its first half, raises there
    (TypeError, ValueError, or InvalidArgument) and Mismatch where the others receive; no row moves,
    and the group stays usable. Peers do not hear of a mistake in a second half.

    Args:
        comm: kept alive by the group.
        config: sizes. With ``on_peer_loss="mask"`` the group goes on when a rank is late; and also
            when its process ends, if `comm` was made with ``on_peer_loss="mask"``, too. An
            operation that has been sent and meets the loss raises PeerLost, with what it was given
            as ``out`` complete but for that rank's share. Later ones leave the rank out.

    Raises:
        TypeError, ValueError: on the rank where Python finds a bad config; Mismatch on the others.
        InvalidArgument: on the rank with a bad config, and Mismatch on the others; Mismatch naming
            the field in which configs differ; OutOfMemory; Unsupported: `comm` is not on the CPU.
    """

    _MAKE = _core.LowLatencyGroup
    _CONFIG = LowLatencyConfig
    _STATUS = LowLatencyStatus
    _SET_PLACEMENT = constants.LL_SET_PLACEMENT

    def __init__(self, comm: Comm, config: LowLatencyConfig) -> None:
        super().__init__(comm, config)
        self._num_slots = config.num_slots(comm.num_ranks)
        self._local_experts = config.local_experts(comm.rank, comm.num_ranks)
        self._dispatches = OpenHalves(config.in_flight)
        self._combines = OpenHalves(config.in_flight)

    def slots(
        self,
        columns: int | None = None,
        dtype: npt.DTypeLike | None = None,
        quantise: bool | str | QuantiseWay | None = False,
        *,
        packed_scales: bool = False,
        scales: tuple[int, npt.DTypeLike] | None = None,
        sources: bool = False,
        topk: int | None = None,
        weighted: bool = True,
        max_tokens: int = 0,
    ) -> Slots:
        """Arrays to receive into, in ordinary memory, their content undefined.

        Args:
            columns: H; None = the config's.
            dtype: of the tokens that are sent; None = the config's.
            quantise: as in `dispatch`.
            packed_scales: "fp8_block128_e8m0": scales are int32, each four bytes of e8m0.
            scales: columns and dtype of those that dispatch is given.
            sources: with source_ranges and source_tokens.
            topk, weighted, max_tokens: without slots: K (None = max_topk), whether dispatch is
                given weights, and `max_tokens` of dispatch.
        """
        local, ranks = self._local_experts, self._comm.num_ranks
        places = self._places(max_tokens)
        columns = self._config.hidden if columns is None else columns
        dtype = numpy_dtype(self._config.dtype if dtype is None else dtype)
        way = quantise if isinstance(quantise, QuantiseWay) else quantise_way(quantise or False)
        if way is not None:
            dtype = numpy_dtype(_ELEMENT)
            width = columns // way.block // (_PACKED if packed_scales else 1)
            scales = width, "int32" if packed_scales else way.scale
        slots = Slots(
            aligned_empty((*places, columns), dtype),
            scales and aligned_empty((*places, scales[0]), numpy_dtype(scales[1])),
            aligned_empty(local, np.int32),
            SlotPlan(aligned_empty(self._plan_size, np.uint8)),
            aligned_empty((local, ranks), np.int64) if sources else None,
            aligned_empty((local, self._num_slots), np.int32) if sources else None,
        )
        if self._config.receive == "slots":
            return slots
        by_rank = self._config.receive == "by_rank"
        choices = (*places, self._config.max_topk if topk is None else topk)
        return dataclasses.replace(
            slots,
            row_offsets=aligned_empty((ranks if by_rank else local) + 1, np.int64),
            weights=aligned_empty(choices if by_rank else places, np.float32) if weighted else None,
            topk_idx=aligned_empty(choices, np.int64) if by_rank else None,
        )

    def _places(self, max_tokens: int) -> tuple[int, ...]:
        """Leading dimensions of received rows: [L,S], or [N]."""
        if self._config.receive == "slots":
            return self._local_experts, self._num_slots
        return (self._config.recv_bound(self._comm.num_ranks, max_tokens),)

    def dispatch(
        self,
        tokens: np.ndarray,
        topk_idx: np.ndarray,
        topk_weights: np.ndarray | None = None,
        *,
        scales: np.ndarray | None = None,
        quantise: bool | str = False,
        sources: bool = False,
        expert_load: np.ndarray | None = None,
        wait_ns: np.ndarray | None = None,
        max_tokens: int = 0,
        replica_hint: np.ndarray | None = None,
        out: Slots | None = None,
    ) -> Slots:
        """Copies each token's row to a slot of every expert that it has chosen.

        Or to its place without gaps, where ``config.receive`` says so.

        Args:
            tokens: [T,H] bfloat16, float16, float32, fp8, or 8-bit integers: any bytes, such as two
                FP4 numbers each. They arrive bit for bit.
            topk_idx: [T,K] int32 or int64: expert of each choice; -1 = none.
            topk_weights: [T,K] float32: for a combine that is given none; without slots they arrive
                beside the rows instead. On all ranks or on none.
            scales: [T,S] float32, float8_e8m0fnu, float8_e4m3fn or uint8, of any strides, which
                arrive beside the rows, bit for bit: those of rows that the caller has quantised.
                Both together have at most the bytes of the config's row. On all ranks or on none.
            quantise: receive bfloat16 tokens as float8_e4m3fn with scales: "fp8_block128" (or
                True), a float32 per 128 columns; "fp8_block128_pow2", powers of two; or as
                float8_e8m0fnu "fp8_block128_e8m0", which may be packed into int32 (see `slots`).
            sources: whether the result has source_ranges and source_tokens.
            expert_load: [L] int32 or int64, to which the counts are added.
            wait_ns: [W] int64, to which the nanoseconds are added until each source's rows began to
                come.
            max_tokens: without slots: the most tokens that a rank has in this call, which bounds N;
                0 = max_tokens_per_rank. Equal on all ranks.
            replica_hint: [T] int32 or int64: as of `EpGroup.prepare`.
            out: arrays to receive into; None = new ones, which are lost where the call raises.

        Raises:
            TypeError, ValueError: a bad argument that is found in Python, such as a dtype.
            InvalidArgument: one that the library finds, such as a shape. On every rank, if some
                rank has ids that are no experts, or an expert twice in a row (unless the config
                collapses those): ``out`` is then complete, and such ids count as -1.
            Mismatch: the ranks' arguments disagree, or another rank's are bad.
            Busy: too many operations are between their halves.
            PeerLost: see `LowLatencyGroup`; not fatal with ``on_peer_loss="mask"``, where ``out``
                lacks that rank's share.
            CrossdockError: a fatal one, after which the communicator is finished.
        """
        with self._joining(constants.LL_DISPATCH):
            way = quantise_way(quantise)
            inputs = _inputs(tokens, topk_idx, topk_weights, scales, replica_hint)
            beside = _Beside.of(topk_idx, topk_weights, max_tokens, scales)
            if out is None:
                out = beside.slots(self, tokens.shape[-1], tokens.dtype, way, sources=sources)
            outputs = _outputs(out, expert_load, wait_ns)
        self._dispatch(_BOTH, way, inputs | outputs, beside.max_tokens)
        return out

    def dispatch_send(
        self,
        tokens: np.ndarray,
        topk_idx: np.ndarray,
        topk_weights: np.ndarray | None = None,
        *,
        scales: np.ndarray | None = None,
        quantise: bool | str = False,
        max_tokens: int = 0,
        replica_hint: np.ndarray | None = None,
    ) -> SentDispatch:
        """The first half of `dispatch`: reads the arguments and sends.

        `receive` of the result is the second half.
        """
        with self._joining(constants.LL_DISPATCH):
            way = quantise_way(quantise)
            inputs = _inputs(tokens, topk_idx, topk_weights, scales, replica_hint)
            beside = _Beside.of(topk_idx, topk_weights, max_tokens, scales)
            sent = SentDispatch(self, tokens.shape[-1], tokens.dtype, way, beside)
        self._dispatch(_SEND, way, inputs, beside.max_tokens)
        self._dispatches.add(sent._half)
        return sent

    def combine(
        self,
        plan: SlotPlan,
        expert_out: np.ndarray,
        topk_weights: np.ndarray | None = None,
        *,
        wire: Wire = "same",
        wait_ns: np.ndarray | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Brings the experts' results back and sums them per token, in float32, in one fixed order.

        Args:
            plan: of the batch; it may be combined several times.
            expert_out: [L,S,H] float32, float16 or bfloat16, of any strides over L and S: the
                result for each row that was received; without slots [N,H], as many rows as came, or
                more.
            topk_weights: [T,K] float32, in place of those that dispatch had; without either a row
                counts once. On all ranks or on none. Not where rows came by rank.
            wire: the form in which sums cross, as of `EpGroup.combine`, with the same bits.
            wait_ns: as in `dispatch`.
            out: [T,H] array to write; None = a new one.

        Returns:
            [T,H], of expert_out's dtype; zero for a token without rows.

        Raises:
            As dispatch.
        """
        with self._joining(constants.LL_COMBINE):
            results = _results(self._config, plan, expert_out, topk_weights, wire)
            if out is None:
                out = aligned_empty((plan.num_tokens, expert_out.shape[-1]), expert_out.dtype)
            sums = _sums(out, wait_ns)
        self._core.combine(results | sums | {"phase": _BOTH})
        return out

    def combine_send(
        self,
        plan: SlotPlan,
        expert_out: np.ndarray,
        topk_weights: np.ndarray | None = None,
        *,
        wire: Wire = "same",
    ) -> SentCombine:
        """The first half of `combine`: reads the arguments and sends.

        `receive` of the result is the second half.
        """
        with self._joining(constants.LL_COMBINE):
            results = _results(self._config, plan, expert_out, topk_weights, wire)
            sent = SentCombine(self, plan, expert_out.shape[-1], expert_out.dtype, results["wire"])
        self._core.combine(results | {"phase": _SEND})
        self._combines.add(sent._half)
        return sent

    def mask(self) -> np.ndarray:
        """[W] int32: 1 where this rank has masked the rank: neither sends to it nor waits for it.

        Local. With ``on_peer_loss="mask"`` only.
        """
        found = aligned_empty(self._comm.num_ranks, np.int32)
        self._core.mask_get(describe("mask", found, ("int32",), write=True))
        return found

    def mask_set(self, rank: int, masked: bool = True) -> None:
        """Masks or unmasks a rank, in this rank's view, from the next operation on. Local.

        Raises:
            TypeError, ValueError: `rank` is no whole number.
            InvalidArgument: the own rank, no rank, or a group without ``on_peer_loss="mask"``.
        """
        self._core.mask_set(number_of_32_bits("rank", rank), int(bool(masked)))

    def reset(self) -> None:
        """Brings the ranks that are not masked back into step. Collective over those.

        Operations between their halves are forgotten; plans stay good. Needed when a rank has been
        unmasked on both sides. With ``on_peer_loss="mask"`` only. Where groups that resume enter a
        view (`EpGroup.enter_view`), that comes first.
        """
        try:
            self._core.reset()
        except InvalidArgument:  # nothing has happened
            raise
        except BaseException:
            self._forget_halves()
            raise
        self._forget_halves()

    def _forget_halves(self) -> None:
        self._dispatches.forget()
        self._combines.forget()

    def _dispatch(
        self, phase: int, way: QuantiseWay | None, tensors: _Tensors, max_tokens: int
    ) -> None:
        code = 0 if way is None else way.code
        numbers = {"phase": phase, "quantise": code, "max_tokens": max_tokens}
        self._core.dispatch(tensors | numbers)


def _inputs(
    tokens: np.ndarray,
    topk_idx: np.ndarray,
    topk_weights: np.ndarray | None,
    scales: np.ndarray | None,
    replica_hint: np.ndarray | None,
) -> _Tensors:
    return {
        "tokens": describe("tokens", tokens, PAYLOADS),
        "topk_idx": describe("topk_idx", topk_idx, INDICES),
        "topk_weights": optional("topk_weights", topk_weights, WEIGHTS),
        "scales": optional("scales", scales, SCALES, strided=True),
        "replica_hint": optional("replica_hint", replica_hint, INDICES),
    }


def _outputs(out: Slots, expert_load: np.ndarray | None, wait_ns: np.ndarray | None) -> _Tensors:
    of_kind("out", out, Slots)
    ranges, sources = out.source_ranges, out.source_tokens
    return {
        "plan": of_kind("out.plan", out.plan, SlotPlan).place("out.plan"),
        "recv_tokens": describe("out.tokens", out.tokens, PAYLOADS, write=True, strided=True),
        "recv_scales": optional(
            "out.scales", out.scales, _RECEIVED_SCALES, write=True, strided=True
        ),
        "counts": describe("out.counts", out.counts, ("int32",), write=True),
        "source_ranges": optional("out.source_ranges", ranges, ("int64",), write=True),
        "source_tokens": optional("out.source_tokens", sources, ("int32",), write=True),
        "expert_load": optional("expert_load", expert_load, INDICES, write=True),
        "wait_ns": optional("wait_ns", wait_ns, ("int64",), write=True),
        "row_offsets": optional("out.row_offsets", out.row_offsets, ("int64",), write=True),
        "recv_weights": optional("out.weights", out.weights, WEIGHTS, write=True),
        "recv_topk_idx": optional("out.topk_idx", out.topk_idx, INDICES, write=True),
    }


def _results(
    config: LowLatencyConfig,
    plan: SlotPlan,
    expert_out: np.ndarray,
    topk_weights: np.ndarray | None,
    wire: Wire,
) -> dict[str, Any]:
    return {
        "plan": of_kind("plan", plan, SlotPlan).place(),
        "expert_out": describe("expert_out", expert_out, SUMMABLE, strided=True),
        "topk_weights": optional("topk_weights", topk_weights, WEIGHTS),
        "wire": wire_of_rows(wire, config.wire_formats, expert_out.shape, "config"),
    }


def _sums(out: np.ndarray, wait_ns: np.ndarray | None) -> _Tensors:
    return {
        "out": describe("out", out, SUMMABLE, write=True),
        "wait_ns": optional("wait_ns", wait_ns, ("int64",), write=True),
    }
