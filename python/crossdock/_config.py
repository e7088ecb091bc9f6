"""Sizes of expert-parallel traffic."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy.typing as npt

from crossdock import _core
from crossdock._comm_arguments import PeerLoss, parse_device
from crossdock._core import constants
from crossdock._dtypes import dtype_name, pack
from crossdock._experts import ranks_of_experts
from crossdock._wire import Wire, wire_formats
from crossdock.errors import CrossdockError

__all__ = [
    "EP_WORDS",
    "WORDS",
    "DuplicateIds",
    "EpConfig",
    "EpPeerLoss",
    "GroupMemory",
    "Layout",
    "LowLatencyConfig",
    "OnError",
    "Overflow",
    "PeerLoss",
    "Receive",
    "Staging",
    "fail_group",
    "number_of",
]

Layout = Literal["expert_major", "rank_major"]
Overflow = Literal["error", "drop"]
DuplicateIds = Literal["error", "collapse"]
OnError = Literal["status", "fatal"]
Staging = Literal["auto", "none"]
Receive = Literal["slots", "by_expert", "by_rank"]
EpPeerLoss = Literal["fatal", "resume"]

# By the field of a config: its words, and the library's numbers for them.
WORDS: dict[str, dict[str, int]] = {
    "layout": constants.LAYOUTS,
    "overflow": constants.OVERFLOWS,
    "duplicate_ids": constants.DUPLICATE_IDS,
    "on_error": constants.ON_ERROR,
    "staging": constants.STAGINGS,
    "on_peer_loss": constants.PEER_LOSSES,
    "receive": constants.RECEIVES,
}
# The same for the fields of EpConfig.
EP_WORDS = WORDS | {"on_peer_loss": constants.EP_PEER_LOSSES}


def number_of(field: str, word: Any, words: dict[str, dict[str, int]] = WORDS) -> int:
    """The library's number for a word of a config's field.

    Raises:
        ValueError: there is no such word.
    """
    known = words[field]
    if not isinstance(word, str) or word not in known:
        raise ValueError(f"{field}: expected {' or '.join(map(repr, known))}, got {word!r}")
    return known[word]


def fail_group(
    core: _core.Comm,
    make: type[_core.Group] | type[_core.LowLatencyGroup],
    field: str = "hidden",
) -> None:
    """Takes this rank's part in the making of a group whose config is bad: peers get Mismatch.

    Args:
        make: the kind of group that the peers make.
        field: of the config: it is what the peers are told.
    """
    good: dict[str, Any] = {
        "num_experts": core.num_ranks,
        "max_topk": 1,
        "max_tokens_per_rank": 1,
        "hidden": 16,
        "dtype": pack("float32"),
    }
    bad = {"expert_ranks": [-1] * core.num_ranks, "wire_formats": 1 << 31}.get(field, -1)
    with contextlib.suppress(CrossdockError):  # the caller has to hear of the mistake
        make(core, **(good | {field: bad}))


@dataclasses.dataclass(frozen=True)
class GroupMemory:
    """Memory that a group takes on one rank, in bytes, to within a page and a few kilobytes."""

    symmetric_bytes: int  # shared with the peers: flags, counts and staging
    private_bytes: int  # working memory of this rank
    staging_bytes: int = 0  # the part of symmetric_bytes that staging="none" would save


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Fields that the configs of both kinds of groups have in common."""

    num_experts: int
    max_topk: int
    max_tokens_per_rank: int
    hidden: int
    dtype: npt.DTypeLike = "bfloat16"
    duplicate_ids: DuplicateIds = "error"
    on_error: OnError = "status"
    num_sms: int = 0
    expert_ranks: Sequence[int] | None = None
    wire_formats: Sequence[Wire] = ()
    num_logical_experts: int = 0
    _WORDS: ClassVar[dict[str, dict[str, int]]] = WORDS

    def __post_init__(self) -> None:
        ranks = ranks_of_experts(self.expert_ranks, self.num_experts)
        object.__setattr__(self, "expert_ranks", ranks)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        self._numbers()

    def options(self) -> dict[str, Any]:
        """The keyword arguments of crossdock._core's functions."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return found | self._numbers() | {"dtype": pack(self.dtype)}

    def _numbers(self) -> dict[str, int]:
        """The library's numbers for the fields that are words."""
        names = [field.name for field in dataclasses.fields(self)]
        known = self._WORDS
        words = {
            name: number_of(name, getattr(self, name), known) for name in names if name in known
        }
        return words | {"wire_formats": wire_formats(self.wire_formats)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpConfig(_Sizes):
    """Sizes of one kind of traffic.

    Equal on all ranks, except for recv_capacity, staging, zero_tail and num_sms.

    Attributes:
        num_experts: over all ranks, at most 65536; without `expert_ranks` a multiple of the number
            of ranks.
        max_topk: largest number of choices per token, 1 to 32.
        max_tokens_per_rank: largest number of tokens of a rank in one batch.
        hidden: largest row, in elements of `dtype`.
        dtype: widest payload: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8 or
            uint8, as a dtype or by name.
        max_scale_bytes: largest row of scales given beside a token's, in bytes; 0 = none. Rows that
            are quantised need none.
        layout: of receive arrays. ``"expert_major"``: one row per (token, expert), a zone per local
            expert; ``"rank_major"``: one row per (token, rank). In a zone by source rank, then
            token.
        alignment: of zones, in rows: a power of two, the largest that a plan may have; padding rows
            are zero.
        recv_capacity: rows that this rank can receive, which a plan rounds down to a multiple of
            its alignment; 0 = what no routing can exceed.
        overflow: what happens to a batch that exceeds a capacity: ``"error"``: nothing moves and
            all ranks raise CapacityOverflow; ``"drop"``: the last rows in zone order are dropped.
        duplicate_ids: what an expert's second and later mentions in a row of topk_idx are, beside
            counting as -1: ``"error"``: bad ids; ``"collapse"``: nothing to mention.
        on_error: ``"status"``: after an error of an operation the next call works; ``"fatal"``: the
            communicator is finished with it.
        staging: ``"auto"``: arrays outside symmetric memory are copied through memory of the group;
            ``"none"``: no such memory, and receive arrays outside are InvalidArgument.
        zero_tail: rows past the last one are zeroed in every receive array that is written. (Of a
            C config that is not the default.)
        num_sms: CUDA: multiprocessors to use; 0 = the library chooses.
        expert_ranks: the rank of each expert, a number per expert; None = equally many on every
            rank, in order. A rank's local experts are its own in ascending order; it may hold none.
            Replicas of an expert are experts of their own, among which your router chooses.
        wire_formats: the wires that calls of combine may name beside "same"; on CUDA of one host.
        num_logical_experts: ids in topk_idx name so many logical experts, up to num_experts, which
            `EpGroup.set_placement` places in the num_experts slots of all ranks; 0 = they name
            experts. On the CPU.
        net_buffer_bytes: several machines: about how many bytes of buffers a rank has for rows to
            and from other machines, each of which gets eight equal pieces of 64 KiB to 512 KiB, or
            of one row if that is longer; 0 = of 256 KiB.
        on_peer_loss: what the loss of a rank does that an operation needs: ``"fatal"``: it finishes
            the communicator; ``"resume"``: the operation raises PeerLost on all ranks that are
            left, and the group goes on without the rank after `EpGroup.enter_view`. Needs a
            communicator with ``on_peer_loss="mask"``, on the CPU of one machine.

    Raises:
        TypeError, ValueError: a dtype or a word that does not exist, or another number of ranks
            than of experts. Other numbers are checked by the calls that use them.
    """

    max_scale_bytes: int = 0
    layout: Layout = "expert_major"
    alignment: int = 1
    recv_capacity: int = 0
    overflow: Overflow = "error"
    staging: Staging = "auto"
    zero_tail: bool = True
    net_buffer_bytes: int = 0
    on_peer_loss: EpPeerLoss = "fatal"
    _WORDS = EP_WORDS

    def options(self) -> dict[str, Any]:
        """The keyword arguments of crossdock._core's functions."""
        return super().options() | {"zero_tail": int(self.zero_tail)}

    def local_experts(self, rank: int, num_ranks: int) -> int:
        """The number of experts that a rank holds."""
        return _core.local_experts(rank, num_ranks=num_ranks, **self.options())

    def recv_bound(self, num_ranks: int) -> int:
        """The smallest recv_capacity that no routing can overflow, in rows."""
        return _core.recv_bound(num_ranks=num_ranks, **self.options())

    def plan_size(self, num_ranks: int) -> int:
        """Bytes of a plan."""
        return _core.plan_size(num_ranks=num_ranks, **self.options())

    def group_memory(self, num_ranks: int, device: str = "cpu") -> GroupMemory:
        """The memory that a group with this config will take on one rank with `device`."""
        return GroupMemory(
            **_core.group_memory(
                num_ranks=num_ranks, device_type=parse_device(device)[0], **self.options()
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowLatencyConfig(_Sizes):
    """Sizes of one kind of traffic of few tokens, for `LowLatencyGroup`.

    Equal on all ranks, except for num_sms.

    Attributes:
        num_experts, max_topk, expert_ranks, wire_formats, num_logical_experts: as of `EpConfig`.
        max_tokens_per_rank: largest number of tokens of a rank in one batch, up to 1024.
        hidden: largest row, in elements of `dtype`.
        dtype: widest payload: float32, float16 or bfloat16, as a dtype or by name.
        duplicate_ids, on_error, num_sms: as of `EpConfig`.
        in_flight: operations of a kind that may be between their halves, 2 to 4; 0 = 2.
        on_peer_loss: what the loss of a rank does: ``"fatal"``: it finishes the communicator;
            ``"mask"``: the group goes on without a rank that is late, and without one whose process
            has ended if the communicator has ``on_peer_loss="mask"``, too.
        wait_timeout_ms: longest wait for a peer; 0 = the communicator's.
        receive: where received rows lie: ``"slots"``: in slots of their expert; or without gaps,
            ``"by_expert"`` as layout "expert_major" of `EpConfig` has them, ``"by_rank"`` as
            "rank_major".
        alignment: "by_expert": of zones, in rows, a power of two; padding rows are zero.

    Raises:
        TypeError, ValueError: as of `EpConfig`.
    """

    in_flight: int = 0
    on_peer_loss: PeerLoss = "fatal"
    wait_timeout_ms: int = 0
    receive: Receive = "slots"
    alignment: int = 1

    def local_experts(self, rank: int, num_ranks: int) -> int:
        """The number of experts that a rank holds."""
        return _core.ll_local_experts(rank, num_ranks=num_ranks, **self.options())

    def recv_bound(self, num_ranks: int, max_tokens: int = 0) -> int:
        """The most rows that a rank can receive where they lie without gaps.

        Args:
            max_tokens: the most tokens of a rank in the call; 0 = max_tokens_per_rank.
        """
        return _core.ll_recv_bound(max_tokens, num_ranks=num_ranks, **self.options())

    def num_slots(self, num_ranks: int) -> int:
        """S, the slots of each expert, which no routing can overflow."""
        return num_ranks * self.max_tokens_per_rank

    def plan_size(self, num_ranks: int) -> int:
        """Bytes of a plan."""
        return _core.ll_plan_size(num_ranks=num_ranks, **self.options())

    def group_memory(self, num_ranks: int, device: str = "cpu") -> GroupMemory:
        """The memory that a group with this config will take on one rank with `device`."""
        return GroupMemory(
            **_core.ll_group_memory(
                num_ranks=num_ranks, device_type=parse_device(device)[0], **self.options()
            )
        )
