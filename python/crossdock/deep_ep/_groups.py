"""The current groups of a Buffer, made when a call needs them."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref

import torch

from crossdock import _core
from crossdock._core import constants
from crossdock.errors import CrossdockError, Mismatch, OutOfMemory
from crossdock.torch._calls import is_capturing

from ._agreement import EqualNumber, Request, agree, equal_numbers, hash_of, mismatch, refuse
from ._batch import Batch, Sizes
from ._session import Session
from ._slot_group import Shape, SlotGroup

_SETS = 2  # sets of receive tensors that symmetric memory has room for

# Kinds of groups of bulk operations, and of a rank's decision, above the bits of a hash.
_HASH = (1 << 30) - 1
_AGREES, _BY_RANK_ALONE, _BY_RANK, _BY_EXPERT = (number << 30 for number in range(4))


def _kind(request: Request) -> int:
    """The kind of group that serves it: for is_token_in_rank, or rows by rank or by expert."""
    if request.topk == 0:
        return _BY_RANK_ALONE
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
        self._reserved = 0  # bytes of symmetric memory
        self._slots: dict[Shape, SlotGroup] = {}
        self._latest_slots: SlotGroup | None = None
        self._masked: set[int] = set()  # by the caller: what groups to come begin with
        # Between machines all ranks agree in each dispatch, whatever numbers they give.
        try:
            self._first_requests = None if session.apart else EqualNumber(session.host)
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

    def batch_for(self, request: Request) -> Batch:
        """The group for an uncached dispatch; replaced here if it has outgrown its sizes.

        Collective, unless all ranks know it already and are on one machine.

        Raises:
            Mismatch: ranks disagree, in ``num_worst_tokens`` say, or a peer has refused.
            CrossdockError: an operation on the GPU has failed since the last agreement; its peers
                get Mismatch.
        """
        batch = self._agreed_before(request)
        if batch is None or request.worst_tokens == 0:  # the peers' hosts wait for this rank's
            failures = [one.failure() for one in self._used]
            failure = next((one for one in failures if one is not None), None)
            if failure is not None:
                self._fail_with_peers(batch, f"an earlier operation: {failure}")
                raise failure
        return batch or self._agreed_now(request)

    def _agreed_now(self, request: Request) -> Batch:
        """The group for what all ranks request. Collective."""
        requests = agree(
            self.session.host, dataclasses.replace(request, heap_bytes=self.session.heap_bytes)
        )
        kind, need = _kind(request), Sizes.of(requests)
        batch = self._batches.get(kind)
        if batch is not None and batch.sizes.serve(need):
            return batch
        sizes = need if batch is None else batch.sizes.grown_to(need)
        # Before the new group is made, so that two need not fit into memory.
        self._batches.pop(kind, None)
        del batch
        self._reserve(sizes, min(one.heap_bytes for one in requests))
        batch = self._batches[kind] = Batch(self.session, sizes)
        self.use(batch)
        return batch

    def use(self, batch: Batch) -> None:
        """An operation of this group, which may be another Buffer's, is about to run.

        From now on the next `batch_for` also tells of this group's failures.
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
        if self._first_requests is None:
            return None
        mine = self._decision(request) | hash_of(request) & _HASH
        first, peer = self._first_requests.of_first(mine)
        batch = self._batches.get(first & ~_HASH)
        if batch is not None and (first ^ mine) & _HASH:
            text = (
                f"{equal_numbers(request)} on rank {self.session.rank} and other numbers on rank "
                f"{peer}, expected equal values"
            )
            self._fail_with_peers(batch, text)
            raise mismatch("dispatch", text, self.session.rank, peer)
        return batch

    def _decision(self, request: Request) -> int:
        """The kind of the group that serves `request`, if one does, or `_AGREES`.

        Tokens, which differ by rank, play no part where the most of them is known.
        """
        batch = self._batches.get(_kind(request))
        if batch is None or max(request.worst_tokens, request.most_tokens) < 1:
            return _AGREES
        sizes = batch.sizes
        need = Sizes.of([dataclasses.replace(request, tokens=0)] * self.session.num_ranks)
        mine = sizes.num_sms[self.session.rank] == request.num_sms
        serves = mine and sizes.serve(dataclasses.replace(need, num_sms=sizes.num_sms))
        return _kind(request) if serves else _AGREES

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
            batch = self._batches.get(self._first_requests.of_first(_AGREES)[0] & ~_HASH)
        self._fail_with_peers(batch, text)

    def _fail_with_peers(self, batch: Batch | None, text: str) -> None:
        """Takes part in a dispatch with a failure, so that no peer waits.

        Args:
            batch: the group that the peers use without an agreement; None = they agree first.
            text: what is wrong.
        """
        if batch is None:
            refuse(self.session.host, text)
            return
        turns = batch.turns(constants.PREPARE, constants.DISPATCH)
        with contextlib.suppress(ValueError), turns:
            raise ValueError(text)

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
