"""The current groups of a Buffer, made when a call needs them."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

from crossdock import _core
from crossdock._core import constants
from crossdock.errors import CrossdockError, Mismatch, OutOfMemory
from crossdock.torch._calls import is_capturing

from ._agreement import (
    EqualNumber,
    FirstValues,
    Request,
    agree,
    equal_numbers,
    hash_of,
    mismatch,
    refuse,
    text_of,
)
from ._batch import Batch, GiveUp, Sizes
from ._dispatch import turns_of_new
from ._session import Session
from ._slot_group import Shape, SlotGroup

_T = TypeVar("_T")

_SETS = 2  # sets of receive tensors that symmetric memory has room for

# Kinds of groups of bulk operations, and of a rank's decision, above the bits of a hash.
_HASH = (1 << 28) - 1
_AGREES, _BY_RANK_ALONE, _BY_RANK, _BY_EXPERT, _FEW_BY_RANK, _FEW_BY_EXPERT = (
    number << 28 for number in range(6)
)
_WAITS = 1 << 31  # of a decision: hosts wait for the number of rows
_KIND = 7 << 28
_MOST_DECISIONS = 256  # kept of those so far


def _kind(request: Request) -> int:
    """The kind of group that serves it: for is_token_in_rank, or rows by rank or by expert."""
    if request.topk == 0:
        return _BY_RANK_ALONE
    if request.few:
        return _FEW_BY_EXPERT if request.zones else _FEW_BY_RANK
    return _BY_EXPERT if request.zones else _BY_RANK


class Groups:
    """The current groups of a session, of both kinds. Making this is collective.

    One of bulk operations is replaced when it has outgrown its sizes. One of low latency is not, as
    its results have the shape of its sizes: there is one for each.

    Attributes:
        session: which ends with this.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._batches: dict[int, Batch] = {}  # by kind
        self._used: weakref.WeakSet[Batch] = weakref.WeakSet()  # also those that handles keep
        self._decisions: dict[Request, int] = {}  # of these groups
        self._may_ask = False  # in this dispatch
        self._reserved = 0  # bytes of symmetric memory
        self._slots: dict[Shape, SlotGroup] = {}
        self._latest_slots: SlotGroup | None = None
        self._masked: set[int] = set()  # by the caller: what groups to come begin with
        # Between machines all ranks agree in each dispatch, whatever numbers they give.
        try:
            self._first_requests = None if session.apart else EqualNumber(session.host)
            self._first_asks = None if session.apart else FirstValues(session.host, 1)
        except CrossdockError:
            session.end()
            raise

    def close(self) -> None:
        """Ends all but groups of bulk operations that handles refer to. Waits for no peer."""
        self._batches.clear()
        for slots in self._slots.values():
            slots.close()
        self._slots.clear()
        self._latest_slots = None
        self.session.end()

    # ---- Bulk operations -------------------------------------------------------------------------

    def dispatch(self, request: Request, run: Callable[[Batch, GiveUp | None], _T]) -> _T:
        """Runs an uncached dispatch in its group, which is replaced if it has outgrown its sizes.

        On one machine ranks go straight to the group that the first of them has found. Where hosts
        wait for the number of rows, a rank that cannot go along asks for an agreement: it fails the
        group's prepare, so that all hear of it, and all agree then and run again.

        Args:
            run: given the group and what gives up its turns, as `Batch.turns` takes that.

        Raises:
            Mismatch: ranks disagree, in ``num_worst_tokens`` say, or a peer has refused.
            CrossdockError: an operation on the GPU has failed since the last agreement; its peers
                get Mismatch.
        """
        batch = self._agreed_before(request)
        hosts_wait = batch is None or request.worst_tokens == 0  # the peers' for this rank's
        if hosts_wait and self.session.cuda:  # on the CPU operations have raised their errors
            failures = [one.failure() for one in self._used]
            failure = next((one for one in failures if one is not None), None)
            if failure is not None:
                self._fail_with_peers(batch, f"an earlier operation: {failure}")
                raise failure
        if batch is None:
            return run(self._agreed_now(request), None)
        errors = batch.errors
        try:
            return run(batch, self._give_up)
        except BaseException as error:
            if not self._give_up(False):
                raise
            # The failed prepare is one error; others are of earlier work, or of this rank's.
            if not isinstance(error, Mismatch) or batch.errors > errors + 1:
                refuse(self.session.host, text_of(error))
                raise
        self._may_ask = False
        return run(self._agreed_now(request), None)

    def _give_up(self, ask: bool) -> bool:
        """Whether the ranks agree over their hosts in place of this dispatch, as one has asked.

        Args:
            ask: whether this rank asks, which has taken no turn. If it has taken some and there is
                an error, and none has asked until now, none will.
        """
        if not self._may_ask:
            return False
        assert self._first_requests is not None and self._first_asks is not None
        return self._first_asks.of(self._first_requests.calls, int(ask)) == 1

    def _join_failed(self, batch: Batch, text: str, experts: int = 0) -> bool:
        """Takes the turns of this dispatch with a failure, so that no peer waits.

        Args:
            batch: the group that the peers use.
            text: what is wrong.
            experts: of the request, if it is known. Others than the peers' are an error to these.

        Returns:
            Whether all ranks agree over their hosts then, where this rank can go on or refuse.

        Raises:
            CrossdockError: an earlier operation on the GPU has failed; peers have been told.
        """
        errors = batch.errors
        alone = self._batches.get(_BY_RANK_ALONE) is batch and self._may_ask
        turns = turns_of_new(batch, max(1, experts) if alone else 0, False, self._give_up)
        with contextlib.suppress(ValueError), turns:
            raise ValueError(text)
        failure = batch.forget() if self._may_ask else None
        given_up = self._give_up(False)
        if given_up and failure is not None and batch.errors > errors + 1:  # prepare is one
            refuse(self.session.host, f"an earlier operation: {failure}")
            raise failure
        return given_up

    def _agreed_now(self, request: Request) -> Batch:
        """The group for what all ranks request. Collective."""
        requests = agree(self.session.host, request._replace(heap_bytes=self.session.heap_bytes))
        kind, need = _kind(request), Sizes.of(requests)
        batch = self._batches.get(kind)
        if batch is not None and batch.sizes.serve(need):
            return batch
        sizes = need if batch is None else batch.sizes.grown_to(need)
        # Before the new group is made, so that two need not fit into memory.
        self._batches.pop(kind, None)
        self._decisions.clear()
        del batch
        if not sizes.few:  # low latency takes rows in any memory
            self._reserve(sizes, min(one.heap_bytes for one in requests))
        batch = self._batches[kind] = Batch(self.session, sizes)
        self.use(batch)
        return batch

    def use(self, batch: Batch) -> None:
        """An operation of this group, which may be another Buffer's, is about to run.

        From now on the next `dispatch` also tells of this group's failures.
        """
        self._used.add(batch)

    def _agreed_before(self, request: Request) -> Batch | None:
        """The group that all ranks use without an agreement; None = they agree over the host.

        The first rank of a call decides for all: it leaves its decision beside a hash of its
        numbers in shared memory, where no rank waits. It decides for a group whose sizes serve
        numbers that are equal on all ranks, so that the group does on each.

        Raises:
            Mismatch: that rank's numbers are others.
        """
        self._may_ask = False
        if self._first_requests is None:
            return None
        mine = self._decision(request)
        first, peer = self._first_requests.of_first(mine)
        batch = self._batches.get(first & _KIND)
        if batch is None:
            return None
        self._may_ask = bool(first & _WAITS)
        same = not (first ^ mine) & _HASH
        if first == mine or same and not self._may_ask:
            return batch
        text = f"another rank failed, and rank {self.session.rank} could not go along"
        if not same:
            text = (
                f"{equal_numbers(request)} on rank {self.session.rank} and other numbers on rank "
                f"{peer}, expected equal values"
            )
        if self._join_failed(batch, text, request.experts):
            return None
        raise mismatch("dispatch", text, self.session.rank, peer)

    def _decision(self, request: Request) -> int:
        """The kind of the group that serves `request`, if one does, or `_AGREES`; with its hash.

        Tokens, which differ by rank, play no part where the most of them is known.
        """
        known = self._decisions.get(request)
        if known is not None:
            return known
        decision, batch = _AGREES, self._batches.get(_kind(request))
        if batch is not None:
            sizes, alike = batch.sizes, request.worst_tokens or request.most_tokens
            of_all = request._replace(tokens=0) if alike else request
            need = Sizes.of([of_all] * self.session.num_ranks)
            mine = sizes.num_sms[self.session.rank] == request.num_sms
            if mine and sizes.serve(dataclasses.replace(need, num_sms=sizes.num_sms)):
                decision = _kind(request) | (0 if request.worst_tokens else _WAITS)
        if len(self._decisions) >= _MOST_DECISIONS:
            self._decisions.clear()
        decision |= hash_of(request) & _HASH
        self._decisions[request] = decision
        return decision

    def _reserve(self, sizes: Sizes, heap_bytes: int) -> None:
        """Sees to symmetric memory for receive tensors of these sizes. Collective."""
        self._reserved = max(self._reserved, heap_bytes)
        more, needed = 0, _SETS * sizes.set_bytes()
        if self._reserved < needed:
            # Geometrically, as a communicator can grow 4096 times only.
            more = self._reserved = max(needed, self._reserved * 5 // 4)
        # Where some rank has no memory left, tensors are ordinary ones, which are staged.
        with contextlib.suppress(OutOfMemory, Mismatch):
            self.session.memory.reserve(more, sizes.set_bytes())

    def refuse(self, text: str) -> None:
        """Tells peers in an uncached dispatch that this rank's arguments are bad: `text`."""
        batch = None
        if self._first_requests is not None:
            # Peers that find this rank's decision agree over the host.
            first, _ = self._first_requests.of_first(_AGREES)
            batch = self._batches.get(first & _KIND)
            self._may_ask = bool(first & _WAITS)
        self._fail_with_peers(batch, text)

    def _fail_with_peers(self, batch: Batch | None, text: str) -> None:
        """Takes part in a dispatch with a failure, so that no peer waits.

        Args:
            batch: the group that the peers use without an agreement; None = they agree first.
            text: what is wrong.
        """
        if batch is None or self._join_failed(batch, text):
            refuse(self.session.host, text)

    # ---- Low-latency operations ------------------------------------------------------------------

    def slots_for(self, shape: Shape) -> SlotGroup:
        """The group that serves the shape. Collective, blocking, if it has to be made.

        Raises:
            ValueError: it has to be made, and a CUDA graph is being captured.
        """
        slots = self._slots.get(shape)
        if slots is None:
            if is_capturing(self.session.device):
                raise ValueError(
                    "low_latency_dispatch: expected sizes that have been used before, in a capture "
                    f"of a CUDA graph, which can make no group; got {shape}"
                )
            slots = self._slots[shape] = SlotGroup(self.session, shape)
            for rank in self._masked:
                slots.set_mask(rank, True)
        self._latest_slots = slots
        return slots

    def has_slots(self, slots: SlotGroup) -> bool:
        """Whether it is one of these."""
        return self._slots.get(slots.shape) is slots

    def refuse_slots(self, shape: Shape | None, text: str) -> None:
        """Tells the peers that this rank's low-latency dispatch is bad.

        Args:
            shape: of the call; None = unknown. Peers are taken to have that of the call before.
            text: what is bad.
        """
        session = self.session
        slots = self._latest_slots if shape is None else self._slots.get(shape)
        if slots is not None:
            slots.join_failed(constants.LL_DISPATCH, text)
        elif not is_capturing(self.session.device):
            # The peers are about to make a group.
            with contextlib.suppress(CrossdockError):
                _core.LowLatencyGroup(session.comm, **Shape(-1, 1, 1, 1).sizes(session.shrink))

    def set_mask(self, rank: int, masked: bool) -> None:
        """Leaves out a rank in all groups, those to come included; or no longer."""
        for slots in self._slots.values():
            slots.set_mask(rank, masked)
        (self._masked.add if masked else self._masked.discard)(rank)

    def read_mask(self, status: torch.Tensor) -> None:
        """status, [W] int32, = 1 for each rank that some group leaves out."""
        status.zero_()
        for slots in self._slots.values():
            slots.add_mask(status)
        for rank in self._masked if not self._slots else ():
            status[rank] = 1

    def reset_slots(self, max_tokens: int, hidden: int, experts: int) -> None:
        """Clears the groups of such sizes. Collective over the ranks that are not left out."""
        for shape, slots in self._slots.items():
            if (shape.max_tokens, shape.hidden, shape.experts) == (max_tokens, hidden, experts):
                slots.reset()

    def reset_all_slots(self) -> None:
        """Clears all of them. Collective as `reset_slots`; groups are made in one order."""
        for slots in self._slots.values():
            slots.reset()
