"""The current groups of a Buffer, made when a call needs them."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import NoReturn, cast

import torch

from crossdock import _core
from crossdock._core import constants
from crossdock.errors import CrossdockError, Mismatch, OutOfMemory
from crossdock.torch._calls import is_capturing

from ._agreement import EqualNumber, Request, agree, mismatch, refuse
from ._batch import Batch, Sizes
from ._session import Session
from ._slot_group import Shape, SlotGroup

_SETS = 2  # sets of receive tensors that symmetric memory has room for


class Groups:
    """The current groups of a session, of both kinds. Making this is collective.

    One of bulk operations is replaced when it has outgrown its sizes. One of low latency is not, as
    its results have the shape of its sizes: there is one for each.

    Attributes:
        session: which ends with this.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        # By whether they take choices of experts, or is_token_in_rank.
        self._batches: dict[bool, Batch] = {}
        self._used: weakref.WeakSet[Batch] = weakref.WeakSet()  # also those that handles keep
        self._reserved = 0  # bytes of symmetric memory
        self._slots: dict[Shape, SlotGroup] = {}
        self._latest_slots: SlotGroup | None = None
        self._masked: set[int] = set()  # by the caller: what groups to come begin with
        # Between machines all ranks agree in each dispatch, whatever number they give.
        try:
            self._worst_tokens = None if session.apart else EqualNumber(session.host)
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
        if self._worst_tokens is not None:
            first, peer = self._worst_tokens.of_first(request.worst_tokens)
            if first != request.worst_tokens:
                self._refuse_unequal(request, first, peer)
            batch = self._agreed_before(request)
            if batch is not None:
                return batch
        failures = [one.failure() for one in self._used]
        failure = next((one for one in failures if one is not None), None)
        if failure is not None:
            refuse(self.session.host, f"an earlier operation: {failure}")
            raise failure
        requests = agree(
            self.session.host, dataclasses.replace(request, heap_bytes=self.session.heap_bytes)
        )
        by_experts, need = request.topk > 0, Sizes.of(requests)
        batch = self._batches.get(by_experts)
        if batch is not None and batch.sizes.serve(need):
            return batch
        sizes = need if batch is None else batch.sizes.grown_to(need)
        # Before the new group is made, so that two need not fit into memory.
        self._batches.pop(by_experts, None)
        del batch
        self._reserve(sizes, min(one.heap_bytes for one in requests))
        batch = self._batches[by_experts] = Batch(self.session, sizes)
        self.use(batch)
        return batch

    def use(self, batch: Batch) -> None:
        """An operation of this group, which may be another Buffer's, is about to run.

        From now on the next `batch_for` also tells of this group's failures.
        """
        self._used.add(batch)

    def _agreed_before(self, request: Request) -> Batch | None:
        """The group that serves `request` by what was agreed before, if it does.

        All ranks come to the same answer, as ``num_worst_tokens`` is equal on all, and as long as
        ``config.num_sms`` changes on all at once: tokens, which differ, play no part.
        """
        batch = self._batches.get(request.topk > 0)
        if batch is None or request.worst_tokens < 1:
            return None
        sizes = batch.sizes
        need = Sizes.of([dataclasses.replace(request, tokens=0)] * self.session.num_ranks)
        mine = sizes.num_sms[self.session.rank] == request.num_sms
        serves = mine and sizes.serve(dataclasses.replace(need, num_sms=sizes.num_sms))
        return batch if serves else None

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

    def refuse(self, worst_tokens: object, text: str) -> None:
        """Tells peers in an uncached dispatch that this rank's arguments are bad.

        Args:
            worst_tokens: the argument ``num_worst_tokens``.
            text: what is bad.
        """
        batch = None
        if self._worst_tokens is not None:
            known = isinstance(worst_tokens, int) and worst_tokens >= 0
            first, _ = self._worst_tokens.of_first(cast(int, worst_tokens) if known else 0)
            # A guess, as this rank's own request is no good: peers use it if they need not agree.
            batch = self._batches.get(True)
            if batch and not 1 <= first <= batch.sizes.tokens * self.session.num_ranks:
                batch = None
        self._fail_with_peers(batch, text)

    def _refuse_unequal(self, request: Request, first: int, peer: int) -> NoReturn:
        """Ends a dispatch to which `peer` has come with `first` as ``num_worst_tokens``."""
        text = (
            f"num_worst_tokens = {request.worst_tokens} on rank {self.session.rank} and {first} on "
            f"rank {peer}, expected equal values"
        )
        batch = self._agreed_before(dataclasses.replace(request, worst_tokens=first))
        self._fail_with_peers(batch, text)
        raise mismatch("dispatch", text, self.session.rank, peer)

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
