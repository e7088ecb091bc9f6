"""Expert-parallel groups on NumPy arrays."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import NamedTuple

import numpy as np

from crossdock import _core
from crossdock._arrays import aligned_empty, describe
from crossdock._config import EpConfig
from crossdock._core import constants
from crossdock._dtypes import INDICES, PAYLOADS, SCALES, SUMMABLE, WEIGHTS, numpy_dtype
from crossdock._membership import EpStatus, Membership, of_kind, optional
from crossdock._plan import Plan
from crossdock._quantise import QuantiseWay, quantise_way
from crossdock._wire import Wire, wire_of_rows

__all__ = ["Dispatched", "EpGroup", "ExpertGrads"]


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """The rows that dispatch received. R rows, H columns, K choices, S scales per row."""

    tokens: np.ndarray  # [R,H]
    weights: np.ndarray | None  # float32: expert_major [R], rank_major [R,K]
    topk_idx: np.ndarray | None  # rank_major: [R,K] int64 local expert or -1
    scales: np.ndarray | None  # [R,S]


class ExpertGrads(NamedTuple):
    """The results of combine_bwd. R rows, H columns, S scales per row."""

    expert_out: np.ndarray  # [R,H]: the token's grad_out, times the weight if given; padding 0
    weights: np.ndarray | None  # [R] float32, given expert_out: dispatch_bwd's grad_recv_weights
    scales: np.ndarray | None  # [R,S] given grad_out_scales: the token's; padding 0


class EpGroup(Membership[EpConfig, EpStatus]):
    """Moves tokens of one kind (see EpConfig) between the ranks of a communicator on the CPU.

    A context manager. T is this rank's number of tokens, which may be 0 and differ per rank and
    call; K choices per token, H columns, R rows received, L local experts. All operations are
    collective: every rank calls them in the same order. A mistake in one rank's arguments raises
    there (TypeError, ValueError, or InvalidArgument) and Mismatch on the others, no row moves, and
    the group stays usable. Outputs that are not given as ``out`` lie in symmetric memory while it
    lasts, else in ordinary memory; arrays outside symmetric memory are staged.

    Args:
        comm: kept alive by the group.
        config: sizes.

    Raises:
        TypeError, ValueError: on the rank where Python finds a bad config, another layout among
            them; Mismatch on the others.
        InvalidArgument: on the rank with a bad config, and Mismatch on the others; Mismatch naming
            the field in which configs differ; OutOfMemory; Unsupported: `comm` is not on the CPU.
    """

    _MAKE = _core.Group
    _CONFIG = EpConfig
    _STATUS = EpStatus
    _SET_PLACEMENT = constants.SET_PLACEMENT
    _BREAKS = True

    def enter_view(self) -> None:
        """Goes on with the members of ``comm.view``. Collective over these; blocks.

        With ``on_peer_loss="resume"`` only. An operation that needs a rank which is lost raises
        PeerLost about one of those lost, on all ranks that are left alike, and so does each further
        one at once. Then every rank calls ``comm.agree``, then this for each of its groups; masks
        of low-latency groups, and their ``reset``, come behind. The step is made again from
        `prepare` on. Choices of experts on ranks that are gone count as -1 (`status` tells how
        many), and plans of before are InvalidArgument.

        Waits for ranks that are no members to end, up to the communicator's timeout. Does nothing
        in a view that the group has entered already.

        Raises:
            InvalidArgument: the config has ``on_peer_loss="fatal"``.
            PeerLost: a member has been lost meanwhile: agree again. (A member that had come to all
                others may still enter, and meets the loss in its next operation.) Or this rank is
                not in the view.
        """
        self._core.enter_view()

    def empty_plan(self) -> Plan:
        """A plan for prepare's ``out``, without routing."""
        ranks = self._comm.num_ranks
        local_experts = self._config.local_experts(self._comm.rank, ranks)
        return Plan(
            data=aligned_empty(self._plan_size, np.uint8),
            counts=aligned_empty(local_experts, np.int64),
            padded_counts=aligned_empty(local_experts, np.int64),
            offsets=aligned_empty(local_experts + 1, np.int64),
            total=aligned_empty(1, np.int64),
            rank_rows=aligned_empty((ranks, ranks), np.int64),
        )

    def prepare(
        self,
        topk_idx: np.ndarray,
        *,
        alignment: int = 0,
        parts: int = 1,
        replica_hint: np.ndarray | None = None,
        out: Plan | None = None,
    ) -> Plan:
        """Exchanges counts and makes the plan of a batch.

        Args:
            topk_idx: [T,K] int32 or int64: expert of each choice; -1 = none.
            alignment: of this plan's zones: a power of two up to the group's; 0 = the group's.
            parts: P, equal on all ranks: operations may be called in that many parts, each of which
                stands for a share of every rank's experts; up to 16 and the fewest experts of a
                rank, and 1 in rank_major.
            replica_hint: [T] int32 or int64, with logical experts: a number of each token that
                decides which replica it goes to, such as a hash of its request and position; None
                = its place in the batch.
            out: plan to overwrite; None = a new one.

        Raises:
            InvalidArgument: on every rank, if some rank has ids that are no experts, or an expert
                twice in a row (unless the config collapses those); `peer` is the lowest such rank.
                ``out`` is then complete, and such ids count as -1.
            CapacityOverflow: on every rank, if some rank would receive more than it can.
        """
        with self._joining(constants.PREPARE):
            ids = describe("topk_idx", topk_idx, INDICES)
            numbers = _numbers(alignment=alignment, parts=parts)
            plan = self.empty_plan() if out is None else of_kind("out", out, Plan)
            hint = optional("replica_hint", replica_hint, INDICES)
            given = {"topk_idx": ids, "plan": plan.place("out"), "replica_hint": hint}
            for name in ("counts", "padded_counts", "offsets", "total", "rank_rows"):
                given[name] = describe(f"out.{name}", getattr(plan, name), INDICES, write=True)
        self._core.prepare(given | numbers)
        return plan

    def dispatch(
        self,
        plan: Plan,
        tokens: np.ndarray,
        topk_weights: np.ndarray | None = None,
        *,
        scales: np.ndarray | None = None,
        quantise: bool | str = False,
        part: int = 0,
        out: Dispatched | None = None,
    ) -> Dispatched:
        """Copies each token's row to every rank that holds one of its experts.

        Args:
            plan: from prepare.
            tokens: [T,H] float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8 or uint8.
            topk_weights: [T,K] float32.
            scales: [T,S] float32, float8_e8m0fnu or uint8, travelling beside the tokens; of any
                strides, like ``out.scales``.
            quantise: receive bfloat16 tokens as float8_e4m3fn with scales: "fp8_block128" (or
                True), a float32 per 128 columns; "fp8_block128_pow2", powers of two; or as
                float8_e8m0fnu "fp8_block128_e8m0", and "mxfp8" per 32 columns.
            part: 0 = the whole operation; p = its p-th part, after which the rows of the experts
                of parts up to p are there. Call parts 1 to P in order, later ones with ``out=``
                what the first has returned.
            out: arrays to receive into; None = new ones.

        Which optional arrays are given must agree over the ranks.

        Raises:
            TypeError, ValueError: a bad argument that is found in Python, such as a dtype.
            InvalidArgument: one that the library finds, such as a shape, or another group's plan.
            Mismatch: the ranks' arguments disagree, or another rank's are bad.
            CapacityOverflow: the plan needs more rows than some rank's capacity.
            CrossdockError: a fatal one, after which the communicator is finished: Timeout, PeerLost
                or Aborted.
        """
        with self._joining(constants.DISPATCH):
            place = of_kind("plan", plan, Plan).place()
            way = quantise_way(quantise)
            fields = _part_of(part, out) | {
                "plan": place,
                "quantise": 0 if way is None else way.code,
                "tokens": describe("tokens", tokens, PAYLOADS),
                "scales": optional("scales", scales, SCALES, strided=True),
                "topk_weights": optional("topk_weights", topk_weights, WEIGHTS),
            }
            if out is None:
                out = self._new_dispatched(plan, tokens, topk_weights, scales, way)
            of_kind("out", out, Dispatched)
            fields |= {
                "recv_tokens": describe("out.tokens", out.tokens, PAYLOADS, write=True),
                "recv_scales": optional("out.scales", out.scales, SCALES, write=True, strided=True),
                "recv_weights": optional("out.weights", out.weights, WEIGHTS, write=True),
                "recv_topk_idx": optional("out.topk_idx", out.topk_idx, INDICES, write=True),
            }
        self._core.dispatch(fields)
        return out

    def combine(
        self,
        plan: Plan,
        expert_out: np.ndarray,
        weights: np.ndarray | None = None,
        *,
        wire: Wire = "same",
        part: int = 0,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Sums the experts' results per token, in float32, in one fixed order.

        Args:
            plan: from prepare.
            expert_out: [R,H] float32, float16 or bfloat16: row r is the result for received row r.
            weights: [R] float32, expert_major only: multiplies each row; usually dispatch's.
            wire: the form in which each rank's sum of a token's rows crosses, one of the config's
                wire_formats: ``"same"``: rounded to the rows' dtype; ``"float32"``: not rounded;
                ``"fp8"``, which is ``"fp8_block128"``, ``"fp8_block128_pow2"`` or
                ``"fp8_block128_e8m0"``: as float8_e4m3fn with a scale per 128 columns, H a multiple
                of them. ``crossdock/quantise.h`` (xd_ep_wire) defines every bit.
            part: 0 = the whole operation; p = its p-th part, which reads the rows of the experts of
                parts up to p. Call parts 1 to P in order, with nothing but prepare between them,
                and later ones with ``out=`` what the first has returned; the last one writes it.
            out: [T,H] array to write; None = a new one.

        Returns:
            [T,H], of expert_out's dtype; zero for a token without rows.

        Raises:
            As dispatch.
        """
        with self._joining(constants.COMBINE):
            place = of_kind("plan", plan, Plan).place()
            fields = _part_of(part, out) | {
                "plan": place,
                "expert_out": describe("expert_out", expert_out, SUMMABLE),
                "weights": optional("weights", weights, WEIGHTS),
                "wire": wire_of_rows(wire, self._config.wire_formats, expert_out.shape, "config"),
            }
            if out is None:
                out = self._empty((plan.num_tokens, *expert_out.shape[1:]), expert_out.dtype)
            fields["out"] = describe("out", out, SUMMABLE, write=True)
        self._core.combine(fields)
        return out

    def dispatch_bwd(
        self,
        plan: Plan,
        grad_recv_tokens: np.ndarray | None = None,
        grad_recv_weights: np.ndarray | None = None,
        *,
        part: int = 0,
        out: tuple[np.ndarray | None, np.ndarray | None] | None = None,
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The derivative of dispatch. At least one of the two gradients is given.

        Args:
            plan: from prepare.
            grad_recv_tokens: [R,H] float32, float16 or bfloat16.
            grad_recv_weights: float32, expert_major [R], rank_major [R,K].
            part: as combine's.
            out: arrays to write, as they are returned; None = new ones.

        Returns:
            grad_tokens [T,H], the sum over each token's rows, and grad_topk_weights [T,K] float32,
            0 for -1 and dropped rows; None for what was not given.

        Raises:
            As dispatch.
        """
        with self._joining(constants.DISPATCH_BWD):
            place = of_kind("plan", plan, Plan).place()
            fields = _part_of(part, out) | {
                "plan": place,
                "grad_recv_tokens": optional("grad_recv_tokens", grad_recv_tokens, SUMMABLE),
                "grad_recv_weights": optional("grad_recv_weights", grad_recv_weights, WEIGHTS),
            }
            info = plan.info()
            tokens, weights = (None, None) if out is None else out
            if grad_recv_tokens is not None and out is None:
                tokens = self._empty(
                    (info["num_tokens"], *grad_recv_tokens.shape[1:]), grad_recv_tokens.dtype
                )
            if grad_recv_weights is not None and out is None:
                weights = self._empty((info["num_tokens"], info["topk"]), np.float32)
            fields |= {
                "grad_tokens": optional("out[0]", tokens, SUMMABLE, write=True),
                "grad_topk_weights": optional("out[1]", weights, WEIGHTS, write=True),
            }
        self._core.dispatch_bwd(fields)
        return tokens, weights

    def combine_bwd(
        self,
        plan: Plan,
        grad_out: np.ndarray,
        expert_out: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        *,
        grad_out_scales: np.ndarray | None = None,
        part: int = 0,
        out: ExpertGrads | None = None,
    ) -> ExpertGrads:
        """The derivative of combine.

        Args:
            plan: from prepare.
            grad_out: [T,H] float32, float16 or bfloat16; without weights also float8_e4m3fn,
                float8_e5m2, int8 or uint8.
            expert_out: [R,H] as combine had it, for the gradient of weights.
            weights: [R] as combine had them, iff it had them.
            grad_out_scales: [T,S] float32, float8_e8m0fnu or uint8, travelling beside the rows of
                grad_out; of any strides. Without weights only.
            part: as dispatch's.
            out: arrays to write; None = new ones.

        Raises:
            As dispatch.
        """
        with self._joining(constants.COMBINE_BWD):
            fields = _part_of(part, out) | {
                "plan": of_kind("plan", plan, Plan).place(),
                "grad_out": describe("grad_out", grad_out, PAYLOADS),
                "expert_out": optional("expert_out", expert_out, SUMMABLE),
                "weights": optional("weights", weights, WEIGHTS),
                "grad_out_scales": optional(
                    "grad_out_scales", grad_out_scales, SCALES, strided=True
                ),
            }
            if out is None:
                out = self._new_expert_grads(plan, grad_out, expert_out, grad_out_scales)
            of_kind("out", out, ExpertGrads)
            fields |= {
                "grad_expert_out": describe("out.expert_out", out.expert_out, PAYLOADS, write=True),
                "grad_weights": optional("out.weights", out.weights, WEIGHTS, write=True),
                "grad_expert_out_scales": optional(
                    "out.scales", out.scales, SCALES, write=True, strided=True
                ),
            }
        self._core.combine_bwd(fields)
        return out

    def row_experts(self, plan: Plan, *, out: np.ndarray | None = None) -> np.ndarray:
        """The local expert of each received row, in expert_major. Local: peers need not call it.

        Args:
            plan: from prepare.
            out: int32 or int64 array of any length to write; None = a new one.

        Returns:
            int64 [R]: the zone that a row lies in, padding included; -1 past the last zone.

        Raises:
            InvalidArgument: the layout is rank_major, where dispatch's topk_idx says it, or the
                plan is another group's.
        """
        place = of_kind("plan", plan, Plan).place()
        if out is None:
            out = aligned_empty(plan.recv_rows, np.int64)
        rows = describe("out", out, INDICES, write=True)
        self._core.row_experts({"plan": place, "row_experts": rows})
        return out

    def loads(self, *, clear: bool = False) -> np.ndarray:
        """How often each logical expert was chosen, in all plans so far. Local; any thread.

        Equal on all ranks behind the same prepare, so that they may plan by it without a message.
        Choices that have no row are not counted (-1, bad ids, experts without a slot).

        Args:
            clear: count anew from 0.

        Returns:
            ``[ranks, num_logical_experts]`` int64, by the rank of the tokens.

        Raises:
            InvalidArgument: the group has no logical experts.
        """
        loads = np.empty((self._comm.num_ranks, self._config.num_logical_experts), np.int64)
        self._core.loads(describe("loads", loads, ("int64",), write=True), clear)
        return loads

    def _new_expert_grads(
        self,
        plan: Plan,
        grad_out: np.ndarray,
        expert_out: np.ndarray | None,
        grad_out_scales: np.ndarray | None,
    ) -> ExpertGrads:
        rows = plan.recv_rows
        grads = scales = None
        if expert_out is not None:
            grads = self._empty((rows,), np.float32)
        if grad_out_scales is not None:
            scales = self._new_scales("grad_out_scales", grad_out_scales, rows)
        return ExpertGrads(self._empty((rows, *grad_out.shape[1:]), grad_out.dtype), grads, scales)

    def _new_dispatched(
        self,
        plan: Plan,
        tokens: np.ndarray,
        topk_weights: np.ndarray | None,
        scales: np.ndarray | None,
        way: QuantiseWay | None,
    ) -> Dispatched:
        info = plan.info()
        rows, topk = info["recv_rows"], info["topk"]
        rank_major = self._config.layout == "rank_major"
        recv_scales = weights = topk_idx = None
        dtype = tokens.dtype
        if way is not None:
            dtype = numpy_dtype("float8_e4m3fn")
            columns = math.prod(tokens.shape[1:]) // way.block
            recv_scales = self._empty((rows, columns), numpy_dtype(way.scale))
        elif scales is not None:
            recv_scales = self._new_scales("scales", scales, rows)
        if topk_weights is not None:
            weights = self._empty((rows, topk) if rank_major else (rows,), np.float32)
        if rank_major:
            topk_idx = self._empty((rows, topk), np.int64)
        return Dispatched(
            self._empty((rows, *tokens.shape[1:]), dtype), weights, topk_idx, recv_scales
        )

    def _new_scales(self, name: str, given: np.ndarray, rows: int) -> np.ndarray:
        """Scales to receive into; refuses rows of them that are too long for the group."""
        row_bytes = math.prod(given.shape[1:]) * given.itemsize
        most = self._config.max_scale_bytes
        if row_bytes > most:
            raise ValueError(
                f"{name}: expected at most max_scale_bytes = {most} bytes of scales "
                f"beside a row, got {row_bytes}"
            )
        return self._empty((rows, *given.shape[1:]), given.dtype)


def _numbers(**given: int) -> dict[str, int]:
    """Arguments of 32 bits, which the library judges, of any type of integers but bool."""
    numbers = {}
    for name, value in given.items():
        if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}: expected an integer, got {type(value).__name__} {value!r}")
        numbers[name] = operator.index(value)
        if not -(1 << 31) <= numbers[name] < 1 << 31:
            raise ValueError(f"{name}: expected a number of 32 bits, got {value}")
    return numbers


def _part_of(part: int, out: object) -> dict[str, int]:
    """The part of an operation. Parts share their outputs, so that new ones are of the first."""
    numbers = _numbers(part=part)
    if numbers["part"] > 1 and out is None:
        raise ValueError(f"out: expected what part 1 has returned, got None with part = {part}")
    return numbers
