"""A group of the library, with what peers hear of a call of it that fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from crossdock import _core
from crossdock._core import constants
from crossdock.errors import CrossdockError, InvalidArgument, from_status
from crossdock.torch._calls import described, is_capturing

from ._agreement import Request, text_of
from ._memory import set_bytes
from ._session import Session
from ._wire import formats_on

# The operations of few tokens, by those of many.
_LOW_LATENCY = {
    constants.DISPATCH: constants.LL_DISPATCH,
    constants.COMBINE: constants.LL_COMBINE,
}

# Given whether the caller has taken none of its turns.
GiveUp = Callable[[bool], bool]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bounds of a group, equal on all ranks."""

    experts: int
    topk: int
    tokens: int
    row_bytes: int
    scale_bytes: int
    zones: int  # largest alignment of experts' zones, or of few tokens the one; 0 = rows by rank
    num_sms: tuple[int, ...]  # by rank
    few: bool = False  # whether its operations are those of low latency

    @classmethod
    def of(cls, requests: list[Request]) -> Sizes:
        """The sizes that all ranks' requests need."""
        first, ranks = requests[0], len(requests)
        tokens = max(
            max(one.tokens, one.most_tokens, -(-one.worst_tokens // ranks)) for one in requests
        )
        return cls(
            # Without choices of experts, each rank is one expert, and a token's ranks its choices.
            experts=first.experts if first.topk else ranks,
            topk=first.topk or ranks,
            tokens=max(1, tokens),
            row_bytes=first.row_bytes,
            scale_bytes=first.scale_bytes,
            zones=first.zones,
            num_sms=tuple(one.num_sms for one in requests),
            few=bool(first.few),
        )

    def serve(self, need: Sizes) -> bool:
        """Whether a group of these sizes is good enough."""
        return self.grown_to(need) == self

    def grown_to(self, need: Sizes) -> Sizes:
        """Sizes for `need` and for all that these serve; tokens grow geometrically."""
        tokens = self.tokens
        if tokens < need.tokens:
            tokens = max(need.tokens, tokens * 3 // 2)
        if self.few:
            tokens = min(tokens, constants.LL_MAX_TOKENS)
        return dataclasses.replace(
            need,
            tokens=tokens,
            topk=max(self.topk, need.topk),
            row_bytes=max(self.row_bytes, need.row_bytes),
            scale_bytes=max(self.scale_bytes, need.scale_bytes),
            zones=need.zones if self.few else max(self.zones, need.zones),
        )

    def set_bytes(self) -> int:
        """Memory for the receive tensors of a dispatch; of rows by expert for an even load."""
        rows = max(len(self.num_sms), self.topk if self.zones else 1) * self.tokens
        parts = self.row_bytes, self.scale_bytes, 4 * self.topk, 8 * self.topk
        return set_bytes([rows * part for part in parts])


_ANY = dict[str, Any]
_Group = _core.Group | _core.LowLatencyGroup


def _new_group(session: Session, sizes: Sizes) -> tuple[_Group, _ANY]:
    """A group of these sizes, and its config."""
    comm = session.comm
    config: _ANY = {
        "num_experts": sizes.experts,
        "max_topk": sizes.topk,
        "max_tokens_per_rank": sizes.tokens,
        "duplicate_ids": constants.DUPLICATE_IDS["collapse"],
        "num_sms": sizes.num_sms[comm.rank],
        "alignment": sizes.zones,
        "wire_formats": formats_on(session.device, session.apart),
    }
    if sizes.few:
        config |= {
            "hidden": sizes.row_bytes // torch.bfloat16.itemsize,
            "dtype": constants.DTYPES["bfloat16"],
            "receive": constants.RECEIVES["by_expert" if sizes.zones else "by_rank"],
        }
        return _core.LowLatencyGroup(comm, **config), config
    config |= {
        "hidden": sizes.row_bytes,
        "dtype": constants.DTYPES["uint8"],
        "max_scale_bytes": sizes.scale_bytes,
        "layout": constants.LAYOUTS["expert_major" if sizes.zones else "rank_major"],
        "zero_tail": 1,
        "net_buffer_bytes": session.net_buffer_bytes,
    }
    return _core.Group(comm, **config), config


class Batch:
    """A group of operations, and the turns of the call that is under way.

    It is closed when the Buffer and all handles have let go of it.

    Attributes:
        group: the ``crossdock._core.Group``, or of few tokens a ``LowLatencyGroup``.
        sizes: its bounds.
        plan_bytes: bytes of a plan.
        session: where its operations run.
        close: closes the group now.
        errors: how many operations on the GPU had met one at the last look.
    """

    def __init__(self, session: Session, sizes: Sizes) -> None:
        self.sizes = sizes
        self.group, config = _new_group(session, sizes)
        self._config = config | {"num_ranks": session.num_ranks}
        size = _core.ll_plan_size if sizes.few else _core.plan_size
        self.plan_bytes = size(**self._config)
        self.session = session
        self.errors = 0
        self.close = weakref.finalize(self, session.close_group, self.group)
        session.open_groups.add(self)

    @functools.cached_property
    def bounds(self) -> Callable[[int], int]:
        """The rows that a rank may receive of so many tokens of each; of few tokens."""
        return functools.cache(functools.partial(_core.ll_recv_bound, **self._config))

    def failure(self) -> CrossdockError | None:
        """The error that operations on the GPU have met since the last look; on the CPU they raise.

        Raises:
            CrossdockError: the communicator is finished.
        """
        if not self.session.cuda:
            return None
        comm = self.session.comm
        if comm.error() is not None:
            comm.mem_grow(0)  # a call that meets a fatal error raises all that is known
        errors = self.group.errors()
        if errors == self.errors:
            return None
        self.errors = errors
        status = self.group.status()
        if status["status"] == "XD_SUCCESS":
            return None
        return from_status(status | {"text": _in_callers_words(status["text"])}, comm.rank)

    def settled_failure(self) -> CrossdockError | None:
        """The error of operations so far, for which the host waits; None in a capture."""
        if not self.session.cuda or is_capturing(self.session.device):
            return None
        self.session.wait_for_host_data()
        return self.failure()

    def raise_failure(self) -> None:
        """Raises what `settled_failure` returns."""
        failure = self.settled_failure()
        if failure is not None:
            raise failure

    def turns(
        self,
        *turns: int | Callable[[], object],
        host_waits: bool = False,
        give_up: GiveUp | None = None,
    ) -> Turns:
        """A call, in which this rank takes all its turns, even after an error.

        If the body raises before it has run them all, the rank takes part in the others with its
        mistake, so that no peer waits for it. On the CPU that is the next one only, in which the
        peers raise, and none if they raise already. On CUDA peers enqueue all before they can know.

        Args:
            turns: in order, operations as ``constants`` names them. Or, where peers wait for
                something else, what tells them there that this rank has failed.
            host_waits: whether the caller hears of a failure before the last operation. It is not
                told again by later calls then.
            give_up: asked after an error: whether no rank takes the turns behind the first. None =
                all do.
        """
        self._owed: list[int | Callable[[], object]] = list(turns)
        self._num_turns = len(turns)
        self._in_call = False
        return Turns(self, host_waits, give_up)

    def begin(self) -> None:
        """The next turn, which is no operation, is being taken."""
        self._owed.pop(0)

    def run(self, operation: str, fields: dict[str, object]) -> None:
        """The next operation, by its name and the fields of its struct, `stream` among them."""
        turn = self._owed.pop(0)
        self._in_call = True  # the library itself takes this turn if arguments are bad
        try:
            getattr(self.group, operation)(described(fields))
        except CrossdockError as error:
            if isinstance(error, InvalidArgument):
                error.text = _in_callers_words(error.text)
                error.args = (error.text,)
            raise
        except Exception:  # an argument is none that the library can be given
            self._owed.insert(0, turn)
            self._in_call = False
            raise
        self._in_call = False

    def fail(self, text: str, give_up: GiveUp | None) -> None:
        """Takes the turns that peers wait in; in a capture none, which is never run then."""
        if is_capturing(self.session.device):
            return
        first = len(self._owed) == self._num_turns
        if give_up is not None and give_up(first):
            self._owed = self._owed[:1] if first else []
        elif not self.session.cuda:
            self._owed = [] if self._in_call else self._owed[:1]
        for turn in self._owed:
            # This gives the text again, or the communicator is finished and no rank waits.
            with contextlib.suppress(CrossdockError):
                if callable(turn):
                    turn()
                else:
                    number = _LOW_LATENCY[turn] if self.sizes.few else turn
                    self.group.join_failed(number, text, self.session.raw_stream)

    def forget(self) -> CrossdockError | None:
        """Clears what the group remembers of the failure that the caller hears of now; returns it.

        With an earlier one, of which the caller has not heard, there is more than one error.
        """
        if is_capturing(self.session.device):
            return None  # nothing may wait now
        self.session.wait_for_host_data()
        with contextlib.suppress(CrossdockError):
            return self.failure()
        return None


class Turns:
    """A call of a group's operations, as `Batch.turns` says. A context manager."""

    __slots__ = ("_batch", "_give_up", "_host_waits")

    def __init__(self, batch: Batch, host_waits: bool, give_up: GiveUp | None) -> None:
        self._batch, self._host_waits, self._give_up = batch, host_waits, give_up

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        self._batch.fail(text_of(error), self._give_up)
        if self._host_waits and isinstance(error, Exception):
            self._batch.forget()


def _in_callers_words(text: str) -> str:
    """An error of the library, about the Buffer's argument.

    Receive tensors are made with as many rows as there are, or as the caller says.
    """
    return text.replace("recv_tokens: has", "num_worst_tokens: recv_x has")
