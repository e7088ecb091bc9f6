"""Groups of ranks that exchange tokens, and the plans of their batches.

A group is found again by its number from inside torch operators.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from crossdock import _core
from crossdock._config import DuplicateIds, EpPeerLoss, Layout, OnError, Overflow, Staging
from crossdock._core import constants
from crossdock._quantise import widest_scale_bytes
from crossdock._wire import Wire
from crossdock.errors import InvalidArgument

from ._calls import current_stream, spec
from ._comm import Comm, default_comm
from ._config import read_config
from ._direct import FUNCTIONS, unobserved
from ._handles import new_handle
from ._membership import Membership
from ._placement import PlacedGroup, require_uncaptured
from ._pool import SymmetricPool, block_bytes

__all__ = [
    "EpGroup",
    "Plan",
    "PlanParts",
    "RoutingLayout",
    "group_of",
    "keep_prepared",
    "order_after",
    "pool_of",
]

_ALIGNED = 4  # int32 elements in 16 bytes, where every part begins

_groups: weakref.WeakValueDictionary[int, EpGroup] = weakref.WeakValueDictionary()


def group_of(handle: int) -> EpGroup:
    """The group with this handle.

    Raises:
        RuntimeError: it is gone; plans and models must keep their group.
    """
    group = _groups.get(handle)
    if group is None:
        raise RuntimeError(f"group: expected the handle of a living EpGroup, got {handle}")
    return group


# Attribute of an exception of prepare: the plan's tensors, which are complete all the same.
_PREPARED = "_prepared"


def keep_prepared(error: InvalidArgument, *parts: torch.Tensor) -> None:
    """Lets `EpGroup.prepare` have the tensors of a plan that is complete beside bad ids.

    Args:
        error: what the operation has raised, in its call.
        parts: plan, info, offsets. The plan's bytes were no plan before.
    """
    if not parts[0].is_cpu:
        return  # its call has failed before it began: bad ids are told later
    try:
        _core.plan_info(parts[0].data_ptr(), parts[0].numel())
    except InvalidArgument:  # another mistake: nothing has been written
        return
    setattr(error, _PREPARED, parts)


def order_after(
    member: Membership, operation: int, after: Plan | torch.Tensor | None
) -> torch.Tensor | None:
    """The order of a plan, or one that was given, behind which `operation` comes; None = none."""
    order = after.order if isinstance(after, Plan) else after
    if order is None:
        return None
    member.require_tensors(operation, after=order)
    if order.shape != (1,) or order.dtype != torch.float32:
        expected = "expected a plan or an order, which is torch.float32 of shape (1,)"
        got = f"got {order.dtype} of shape {tuple(order.shape)}"
        member.refuse(operation, ValueError, f"after: {expected}; {got}")
    return order


def pool_of(handle: int) -> SymmetricPool:
    """The pool that the tensors of this group come from."""
    return group_of(handle).comm.pool


class RoutingLayout(NamedTuple):
    """Where the tokens of one rank go. W ranks, E experts, T tokens.

    Attributes:
        rows_per_rank: ``[W]`` int32: tokens that go to each rank.
        rows_per_expert: ``[E]`` int32: tokens that go to each expert.
        token_in_rank: ``[T, W]`` bool.
        bad_ids: ``[1]`` int32: ids below -1, or E and more.
    """

    rows_per_rank: torch.Tensor
    rows_per_expert: torch.Tensor
    token_in_rank: torch.Tensor
    bad_ids: torch.Tensor


class EpGroup(PlacedGroup):
    """Sizes and memory of one kind of expert-parallel traffic between the ranks.

    With W ranks and E experts, rank d holds the experts ``d * E / W`` to ``(d + 1) * E / W - 1``,
    unless `expert_ranks` says which rank holds which. The operations of a group are collective and
    form one sequence, the same on all ranks, also on a rank that has no tokens. Keep the group as
    long as plans, compiled functions and captured graphs use it.

    Attributes:
        comm: its Comm.
        handle: a number by which operators find it.
        rows: R, the rows of every receive tensor of this rank.
        max_scale_bytes: the largest row of scales beside a token's.
        num_local_experts: L, the experts of this rank.
        num_experts, expert_ranks, hidden, max_topk, max_tokens_per_rank, layout, dtype, alignment,
            duplicate_ids, on_error, wire_formats, num_logical_experts: as given.
        config: what `core` was made with, but for the bytes of scales.
        core: the group of the extension.
    """

    _SET_PLACEMENT = constants.SET_PLACEMENT
    _BREAKS = True

    def __init__(
        self,
        *,
        num_experts: int,
        max_topk: int,
        max_tokens_per_rank: int,
        hidden: int,
        layout: Layout = "expert_major",
        dtype: torch.dtype = torch.bfloat16,
        recv_capacity: int = 0,
        overflow: Overflow = "error",
        alignment: int = 1,
        duplicate_ids: DuplicateIds = "error",
        on_error: OnError = "status",
        staging: Staging = "auto",
        zero_tail: bool = True,
        num_sms: int = 0,
        symmetric_tensors: int = 4,
        expert_ranks: Sequence[int] | None = None,
        net_buffer_bytes: int = 0,
        wire_formats: Sequence[Wire] = (),
        max_scale_bytes: int | None = None,
        num_logical_experts: int = 0,
        on_peer_loss: EpPeerLoss = "fatal",
        comm: Comm | None = None,
    ) -> None:
        """Makes the group. Collective, blocking.

        Equal on all ranks but for `recv_capacity`, `staging`, `zero_tail`, `num_sms` and
        `symmetric_tensors`.

        Args:
            num_experts: E; without `expert_ranks` a multiple of the number of ranks.
            max_topk: largest number of experts per token, 1 to 32.
            max_tokens_per_rank: largest number of tokens of a rank.
            hidden: largest row, in elements of `dtype`.
            layout: ``"expert_major"``: receive tensors have one row per (token, expert), grouped by
                expert; ``"rank_major"``: one per (token, rank), grouped by source.
            dtype: widest payload: bfloat16, float16, float32, fp8, 8-bit integer or
                float4_e2m1fn_x2, of which `hidden` counts bytes.
            recv_capacity: R in rows; 0 = enough for any routing. Rows over a multiple of a
                plan's alignment stay empty.
            overflow: ``"error"``: a batch that needs more rows than a capacity moves nothing and
                raises CapacityOverflow; ``"drop"``: its last rows are dropped.
            alignment: of each expert's rows, a power of two; padding rows are zero. A plan may have
                a smaller one.
            duplicate_ids: what an expert's second and later mentions by one token are, beside
                counting as -1: ``"error"``: bad ids; ``"collapse"``: nothing to mention.
            on_error: ``"status"``: after an error of an operation the next call works;
                ``"fatal"``: the communicator is finished with it.
            staging: ``"auto"``: the group has memory through which receive tensors in ordinary
                memory go; ``"none"``: it has not, and they are refused.
            zero_tail: zero the rows past the last one in every receive tensor that is written. Keep
                it where whole receive tensors go through further arithmetic.
            num_sms: CUDA: multiprocessors to use; 0 = chosen by the library.
            symmetric_tensors: by how many tensors ``[R, hidden]`` the communicator's pool grows.
            expert_ranks: the rank of each expert; None = equally many on every rank, in order. A
                rank's local experts are its own in ascending order; it may hold none. Replicas of
                an expert are experts of their own, among which your router chooses.
            net_buffer_bytes: several machines: about how many bytes of buffers a rank has for rows
                to and from other machines; see ``crossdock.EpConfig``.
            wire_formats: the wires that calls of `combine` may name beside "same"; on GPUs where
                all ranks are on one host.
            max_scale_bytes: the largest row of scales that `dispatch` is given beside a token's;
                None = a float32 per 128 columns, hidden / 32. Of N numbers NVFP4 has N / 16 bytes,
                and MXFP4 N / 32.
            num_logical_experts: ids name so many logical experts, which `set_placement` places in
                the num_experts slots of all ranks; 0 = they name experts. On the CPU.
            on_peer_loss: what the loss of a rank does that an operation needs: ``"fatal"``: it
                finishes the communicator; ``"resume"``: the operation raises PeerLost on all ranks
                that are left, and the group goes on without the rank after `enter_view`. Needs a
                `comm` with ``on_peer_loss="mask"`` (``init(on_peer_loss=)``), on the CPU of one
                machine.
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
            _core.Group,
            num_experts=num_experts,
            hidden=hidden,
            max_topk=max_topk,
            max_tokens_per_rank=max_tokens_per_rank,
            layout=layout,
            dtype=dtype,
            recv_capacity=recv_capacity,
            overflow=overflow,
            alignment=alignment,
            duplicate_ids=duplicate_ids,
            on_error=on_error,
            staging=staging,
            zero_tail=zero_tail,
            num_sms=num_sms,
            symmetric_tensors=symmetric_tensors,
            expert_ranks=expert_ranks,
            net_buffer_bytes=net_buffer_bytes,
            wire_formats=wire_formats,
            num_logical_experts=num_logical_experts,
            on_peer_loss=on_peer_loss,
        )
        self.num_experts, self.num_logical_experts = num_experts, num_logical_experts
        self.expert_ranks: tuple[int, ...] | None = config["expert_ranks"]
        self.wire_formats = tuple(wire_formats)
        self.hidden = hidden
        self.max_topk = max_topk
        self.max_tokens_per_rank = max_tokens_per_rank
        self.layout, self.alignment = layout, alignment
        self.dtype = dtype
        self.duplicate_ids, self.on_error = duplicate_ids, on_error
        if max_scale_bytes is None:
            max_scale_bytes = widest_scale_bytes(hidden)
        self.max_scale_bytes = max_scale_bytes
        self._create(config | {"max_scale_bytes": self.max_scale_bytes})
        self.comm.provide(symmetric_tensors * self._tensor_bytes())
        self.config = config
        device = self.comm.device
        self.first_order = torch.zeros(1, dtype=torch.float32, device=device)
        # See _ops.py: what keeps the operations of a rank without tokens in a compiled graph.
        self.anchor = torch.zeros(1, dtype=torch.float32, device=device)
        self.order_leaf = torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)
        self.order_leaf.register_post_accumulate_grad_hook(_drop_grad)
        ranks = (self.comm.rank, self.comm.num_ranks)
        self._place_first(expert_ranks)
        self.handle = new_handle(ranks, self.rows, self.plan_bytes, sorted(config.items()))
        _groups[self.handle] = self

    def enter_view(self) -> None:
        """Goes on with the members of ``comm.view``, after ranks were lost. Collective over these.

        With ``on_peer_loss="resume"`` only; ``crossdock.EpGroup.enter_view`` says more, and which
        errors it raises. Outputs and gradients of the step that met the loss are not to be used.
        """
        self.core.enter_view(current_stream(self.comm.device))

    def _create(self, config: dict[str, Any]) -> None:
        """Makes the extension's group and asks for its sizes."""
        self.core = _core.Group(self.comm.core, **config)
        num_ranks = self.comm.num_ranks
        self.rows: int = config["recv_capacity"] or _core.recv_bound(num_ranks=num_ranks, **config)
        self.plan_bytes: int = _core.plan_size(num_ranks=num_ranks, **config)
        self.num_local_experts: int = _core.local_experts(
            self.comm.rank, num_ranks=num_ranks, **config
        )
        self.plan_parts = PlanParts(self.num_local_experts, num_ranks)

    def prepare(
        self,
        topk_idx: torch.Tensor,
        *,
        alignment: int | None = None,
        parts: int = 1,
        after: Plan | torch.Tensor | None = None,
        out: Plan | None = None,
    ) -> Plan:
        """Exchanges counts and makes the plan of a batch. Collective.

        Args:
            topk_idx: ``[T, K]`` int32 or int64, the expert of each choice; -1 = none. Contiguous.
                T may differ per rank, and be 0; K is equal.
            alignment: of this plan's rows per expert, a power of two up to the group's, equal on
                all ranks; None = the group's.
            parts: P, equal on all ranks: `dispatch` and `combine` may be called in that many parts,
                each of which stands for a share of every rank's experts. Up to 16 and the fewest
                experts of a rank; 1 in rank_major and on CUDA.
            after: a plan whose operations, so far, come before those of this one, and whose
                backward operations come after, although no data says so; or the order of such a
                plan (``Plan.order``, ``MoEOutput.order``). Needed under ``torch.compile`` for
                branches that do not depend on one another. Both belong to one backward pass.
            out: a plan of the same shape to overwrite. A backward pass that still needs what it
                held raises RuntimeError. Beside bad ids it is complete, and they count as -1.

        Returns:
            The plan: for any number of `dispatch` and `combine` of this group.

        Raises:
            TypeError, ValueError: a bad argument; the peers get Mismatch.
            InvalidArgument, CapacityOverflow: on all ranks, expert ids out of range or repeated
                anywhere; more rows than some capacity. On CUDA `check` raises them.
        """
        if not self.has(topk_idx):
            self.require_tensors(constants.PREPARE, topk_idx=topk_idx)
        order = order_after(self, constants.PREPARE, after)
        if order is None:
            order = self.first_order
        if alignment is None:
            alignment = 0
        elif type(alignment) is not int or not 0 < alignment < 1 << 31:
            problem = f"alignment: expected a power of two, or None; got {alignment!r}"
            self.refuse(constants.PREPARE, ValueError, problem)
        if type(parts) is not int or not 0 < parts < 1 << 31:  # bool is no number here
            problem = f"parts: expected an int of 1 or more, got {parts!r}"
            self.refuse(constants.PREPARE, ValueError, problem)
        if torch.compiler.is_compiling():
            plan = self._prepared(topk_idx, order, alignment, parts)
            return plan if out is None else out.overwrite(plan)
        try:
            plan = self._prepared(topk_idx, order, alignment, parts)
        except InvalidArgument as error:
            made = error.__dict__.pop(_PREPARED, None)
            if made is not None and out is not None and out.has_shape_of(self, topk_idx):
                data, info, offsets = made
                num_tokens, topk = topk_idx.shape
                out.overwrite(Plan(self, data, info, offsets, order, num_tokens, topk, parts))
            else:
                _tell_no_plan(error)
            raise
        return plan if out is None else out.overwrite(plan)

    def _prepared(
        self, topk_idx: torch.Tensor, order: torch.Tensor, alignment: int, parts: int
    ) -> Plan:
        given = (self.handle, alignment, parts)
        recorded = order.requires_grad and torch.is_grad_enabled()
        if not recorded and unobserved(order, order, topk_idx):
            data, info, offsets, _ = FUNCTIONS["prepare"](topk_idx, None, *given)
            order = order.detach() if order.requires_grad else order
        else:
            operator = torch.ops.crossdock.prepare.default
            data, info, offsets, order = operator(topk_idx, order, *given)
        num_tokens, topk = topk_idx.shape
        return Plan(self, data, info, offsets, order, num_tokens, topk, parts)

    def loads(self, *, clear: bool = False) -> torch.Tensor:
        """How often each logical expert was chosen, in all plans so far. Local; any thread.

        ``[ranks, num_logical_experts]`` int64, by the rank of the tokens, on the CPU; equal on all
        ranks behind the same prepare. On GPUs it waits for the current stream, which is the one of
        the prepares, and is not captured. See ``crossdock.EpGroup.loads``.

        Args:
            clear: count anew from 0.
        """
        shape = (self.comm.num_ranks, self.num_logical_experts)
        device = self.comm.device
        require_uncaptured(device, "loads")
        loads = torch.empty(shape, dtype=torch.int64, device=device)
        self.core.loads(spec(loads), clear, current_stream(device))
        return loads.cpu()

    def routing_layout(self, topk_idx: torch.Tensor) -> RoutingLayout:
        """Counts where this rank's tokens go, without a plan. Local: peers need not call it.

        Args:
            topk_idx: ``[T, K]`` int32 or int64, any T, K up to 32; -1 = none. An expert's second
                and later mentions in a row, and ids out of range, count as none.

        Raises:
            TypeError, InvalidArgument: a bad argument.
            ValueError: a group with logical experts, whose slots it does not know.
        """
        if self.num_logical_experts:
            problem = "routing_layout: expected a group without num_logical_experts, got one with"
            self.refuse(None, ValueError, problem)
        return RoutingLayout(*torch.ops.crossdock.routing_layout.default(topk_idx, self.handle))

    def __repr__(self) -> str:
        return (
            f"EpGroup({self.num_experts} experts on {self.comm.num_ranks} ranks, "
            f"hidden={self.hidden}, max_topk={self.max_topk}, "
            f"max_tokens_per_rank={self.max_tokens_per_rank}, rows={self.rows}, "
            f"layout={self.layout!r}, dtype={self.dtype})"
        )

    def _tensor_bytes(self) -> int:
        """Symmetric memory for a receive tensor and for what lies beside it."""
        beside = self.max_topk if self.layout == "rank_major" else 1
        rows = block_bytes(self.rows * self.hidden * self.dtype.itemsize)
        return rows + block_bytes(self.rows * 4 * beside)


def _tell_no_plan(error: InvalidArgument) -> None:
    """Lets the error of a call that returns no plan promise none."""
    promise = "they count as -1 and the plan is usable"
    without = "there is no plan (with out= it would be complete, and they would count as -1)"
    error.text = error.text.replace(promise, without)
    error.args = (error.text,)


def _drop_grad(leaf: torch.Tensor) -> None:
    leaf.grad = None


class PlanParts:
    """Where a plan's counts lie in one int32 tensor."""

    def __init__(self, num_local_experts: int, num_ranks: int) -> None:
        sizes = (num_local_experts, num_local_experts, 1, num_ranks**2)
        places = [(size + _ALIGNED - 1) // _ALIGNED * _ALIGNED for size in sizes]
        starts = [0, *itertools.accumulate(places)]
        self.num_elements = starts[-1]
        self.num_ranks = num_ranks
        self.counts, self.padded_counts, self.total, self.rank_rows = (
            slice(start, start + size) for start, size in zip(starts, sizes)
        )


class Plan:
    """The plan that `EpGroup.prepare` makes: the place of every row of a batch.

    A plan carries the order of its operations: each one takes `order` and leaves a new one where
    autograd or compilers look, so that they see one chain. A caller that reads counts on a GPU
    waits for the device.

    Attributes:
        group: its EpGroup, which it keeps alive.
        data: the routing, opaque, uint8.
        info: all counts below, int32.
        offsets: ``[L + 1]`` int32: first row of each expert's zone, and the end of the last.
        order: 1 element float32 that stands for the operations so far; its value is 0.
        num_tokens: T of this rank.
        topk: K.
        parts: P, in which operations may be called.
    """

    def __init__(
        self,
        group: EpGroup,
        data: torch.Tensor,
        info: torch.Tensor,
        offsets: torch.Tensor,
        order: torch.Tensor,
        num_tokens: int,
        topk: int,
        parts: int = 1,
    ) -> None:
        self.group = group
        self.data = data
        self.info = info
        self.offsets = offsets
        self.order = order
        self.num_tokens = num_tokens
        self.topk = topk
        self.parts = parts

    @property
    def counts(self) -> torch.Tensor:
        """``[L]`` int32: rows per local expert without padding (rank_major: pairs)."""
        return self.info[self.group.plan_parts.counts]

    @property
    def padded_counts(self) -> torch.Tensor:
        """``[L]`` int32: rows per local expert with padding."""
        return self.info[self.group.plan_parts.padded_counts]

    @property
    def ends(self) -> torch.Tensor:
        """``[L]`` int32: one past the last row of each expert's zone; ``offsets[1:]``, copied.

        The boundaries for ``torch.bucketize`` and ``torch.searchsorted``, which torch 2.11 compiles
        wrongly for slices; `row_experts` is what they would compute.
        """
        return torch.ops.crossdock.zone_ends.default(self.offsets)

    @property
    def total(self) -> torch.Tensor:
        """``[1]`` int32: rows that this rank needs, padding included, before any are dropped."""
        return self.info[self.group.plan_parts.total]

    @property
    def rank_rows(self) -> torch.Tensor:
        """``[W, W]`` int32: rows that source s puts into the receive tensor of destination d."""
        parts = self.group.plan_parts
        return self.info[parts.rank_rows].view(parts.num_ranks, parts.num_ranks)

    def row_experts(self, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """``[R]``: the local expert of each row of a receive tensor, padding included, else -1.

        In expert_major; in rank_major `Dispatched.topk_idx` says it. Local, without a gradient;
        also under ``torch.compile`` and in CUDA graphs.

        Args:
            dtype: torch.int64 or torch.int32.

        Raises:
            ValueError: the layout is rank_major, or another dtype.
        """
        if self.group.layout == "rank_major":
            raise ValueError(
                "row_experts: expected a plan of an expert_major group, got one of rank_major, "
                "where a row stands for several experts; Dispatched.topk_idx has them"
            )
        if dtype not in (torch.int32, torch.int64):
            raise ValueError(f"dtype: expected torch.int64 or torch.int32, got {dtype}")
        wide = dtype == torch.int64
        return torch.ops.crossdock.row_experts.default(self.data, self.group.handle, wide)

    def detach(self) -> Plan:
        """The same routing with an order of its own.

        For another backward pass over a plan: without it, the second would go through the
        operations of the first.
        """
        order = self.order.detach()
        counts, sizes = (self.info, self.offsets), (self.num_tokens, self.topk, self.parts)
        return Plan(self.group, self.data, *counts, order, *sizes)

    def has_shape_of(self, group: EpGroup, topk_idx: torch.Tensor) -> bool:
        """Whether a plan of these choices in the group may overwrite this one."""
        return self.group is group and (self.num_tokens, self.topk) == tuple(topk_idx.shape)

    def overwrite(self, other: Plan) -> Plan:
        """Puts `other` into the memory of this plan.

        Raises:
            ValueError: it has another shape or group.
        """
        mine = (self.group.handle, self.num_tokens, self.topk)
        theirs = (other.group.handle, other.num_tokens, other.topk)
        if mine != theirs:
            raise ValueError(
                f"out: expected a plan with (group, tokens, topk) = {theirs}, got {mine}"
            )
        # In place: the version counters of these tensors tell a backward pass that saved them.
        self.data.copy_(other.data)
        self.info.copy_(other.info)
        self.offsets.copy_(other.offsets)
        self.order, self.parts = other.order, other.parts
        return self
