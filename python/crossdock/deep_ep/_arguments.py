"""Checks of a Buffer's arguments; every error says argument, expected, got and rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from crossdock._core import constants

from ._config import Config
from .utils import EventHandle, EventOverlap

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # or rows and scales
Bias = torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None

topk_idx_t = torch.int64
"""Type of the elements of topk_idx."""

# 4-bit numbers, two in a byte, from torch 2.8 on.
_FP4_TYPES = tuple(filter(None, [getattr(torch, "float4_e2m1fn_x2", None)]))
# Types of one byte, which may hold two numbers.
_BYTES = (torch.uint8, torch.int8, *_FP4_TYPES)
_BYTE_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, *_BYTES)
_SUMMABLE = (torch.bfloat16, torch.float16, torch.float32)
_ROW_TYPES = (*_SUMMABLE, *_BYTE_TYPES)
_SCALE_TYPES = (torch.float32, torch.int32)
_MOST = torch.iinfo(torch.int32).max


@dataclasses.dataclass(frozen=True)
class Checks:
    """Argument checks for one rank."""

    rank: int
    num_ranks: int
    device: torch.device  # where tensors must be

    def fail(self, name: str, expected: str, got: object) -> NoReturn:
        """Raises ValueError."""
        raise ValueError(f"{name}: expected {expected}, got {got} (rank {self.rank})")

    def tensor(
        self,
        value: Any,
        name: str,
        shape: tuple[int | str, ...],
        dtypes: tuple[torch.dtype, ...],
        strided: bool = False,
    ) -> torch.Tensor:
        """`value`, if it is such a tensor; a letter in `shape` stands for any extent."""
        if not isinstance(value, torch.Tensor):
            self.fail(name, f"a tensor {_described(shape, dtypes)}", _kind(value))
        extents = value.shape
        fits = extents == shape or (
            len(extents) == len(shape)
            and not [
                want for want, got in zip(shape, extents) if want != got and type(want) is not str
            ]
        )
        if not fits or value.dtype not in dtypes:
            self.fail(name, _described(shape, dtypes), _described(extents, (value.dtype,)))
        if value.device != self.device:
            self.fail(name, f"a tensor on {self.device}", f"one on {value.device}")
        if not strided and not value.is_contiguous():
            self.fail(name, "a contiguous tensor", f"strides {value.stride()}")
        return value

    def optional(
        self, value: Any, name: str, shape: tuple[int | str, ...], dtype: torch.dtype
    ) -> None:
        """Refuses `value` unless it is None or such a tensor."""
        if value is not None:
            self.tensor(value, name, shape, (dtype,))

    def at_least(self, value: Any, name: str, least: int, most: int = _MOST) -> int:
        """`value`, if it is an integer in this range."""
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fail(name, f"an integer of at least {least}", repr(value))
        if value > most:
            self.fail(name, f"at most {most}", value)
        return value

    def none(self, other: str, **values: Any) -> None:
        """Arguments that must not be given beside `other`."""
        for name, value in values.items():
            if value is not None:
                self.fail(name, f"None, as {other} is given", "a tensor")

    def events(
        self, previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool
    ) -> None:
        """The three arguments about streams."""
        if previous_event is not None and not isinstance(previous_event, EventOverlap):
            self.fail("previous_event", "an EventOverlap or None", _kind(previous_event))
        event = None if previous_event is None else previous_event.event
        if event is not None and not isinstance(event, EventHandle):
            self.fail("previous_event", "an EventOverlap of an EventHandle", _kind(event))
        if allocate_on_comm_stream and (previous_event is None or not async_finish):
            self.fail(
                "allocate_on_comm_stream",
                "previous_event and async_finish with it",
                f"previous_event={previous_event}, async_finish={async_finish}",
            )

    def num_sms(self, config: Any, default: int) -> int:
        """Multiprocessors that `config` allows."""
        if config is None:
            return default
        if not isinstance(config, Config):
            self.fail("config", "a Config or None", _kind(config))
        return config.num_sms

    def experts(self, num_experts: Any, name: str) -> int:
        """Experts of all ranks."""
        self.at_least(num_experts, name, 1, constants.MAX_EXPERTS)
        if num_experts % self.num_ranks != 0:
            self.fail(name, f"a multiple of the {self.num_ranks} ranks", num_experts)
        return num_experts

    def topk_idx(self, value: Any, tokens: int | str = "T") -> torch.Tensor:
        """[T,K] choices."""
        found = self.tensor(value, "topk_idx", (tokens, "K"), (topk_idx_t,))
        if not 1 <= found.shape[1] <= constants.MAX_TOPK:
            self.fail("topk_idx", f"1 to {constants.MAX_TOPK} columns", found.shape[1])
        return found


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The argument x of dispatch."""

    rows: torch.Tensor  # [T,H]
    scales: torch.Tensor | None  # [T], or [T,S] with any strides; float32 or int32

    @property
    def row_bytes(self) -> int:
        return self.rows.shape[1] * self.rows.element_size()

    @property
    def packed(self) -> int:
        """Numbers that an element may stand for."""
        return 2 if self.rows.dtype in _BYTES else 1

    @property
    def scale_columns(self) -> int:
        if self.scales is None:
            return 0
        return self.scales.shape[1] if self.scales.ndim == 2 else 1


def read_tokens(checks: Checks, x: Any) -> Tokens:
    """x as a tensor of rows, or as a pair of rows of bytes and scales."""
    if not isinstance(x, tuple):
        tokens = Tokens(checks.tensor(x, "x", ("T", "H"), _ROW_TYPES), None)
    else:
        if len(x) != 2:
            checks.fail("x", "a tensor, or a pair of rows and scales", f"{len(x)} items")
        rows = checks.tensor(x[0], "x[0]", ("T", "H"), _BYTE_TYPES)
        count = rows.shape[0]
        per_token = isinstance(x[1], torch.Tensor) and x[1].ndim == 1
        shape = (count,) if per_token else (count, "S")
        scales = checks.tensor(x[1], "x[1]", shape, _SCALE_TYPES, strided=True)
        tokens = Tokens(rows, scales)
        if tokens.scale_columns < 1:
            checks.fail("x[1]", "at least one scale per token", "none")
    if tokens.row_bytes < 1 or tokens.row_bytes % constants.ROW_ALIGNMENT != 0:
        checks.fail(
            "x",
            f"rows of a positive multiple of {constants.ROW_ALIGNMENT} bytes",
            f"{tokens.row_bytes} bytes",
        )
    return tokens


@dataclasses.dataclass(frozen=True)
class Choices:
    """Where the tokens of an uncached dispatch go."""

    experts: int  # E
    topk_idx: torch.Tensor | None  # [T,K]
    topk_weights: torch.Tensor | None  # [T,K] float32, iff topk_idx
    per_expert: torch.Tensor | None = None  # [E] int32, needed without topk_idx
    in_rank: torch.Tensor | None = None  # [T,W] bool, likewise
    per_rank: torch.Tensor | None = None  # [W] int32; follows from the others
    zones: int = 0  # alignment of experts' zones; 0 = rows by rank


def read_choices(
    checks: Checks,
    num_tokens: int,
    per_rank: Any,
    in_rank: Any,
    per_expert: Any,
    topk_idx: Any,
    topk_weights: Any,
) -> Choices:
    """The tensors from get_dispatch_layout, and the top-k pair."""
    ranks = checks.num_ranks
    checks.tensor(per_rank, "num_tokens_per_rank", (ranks,), (torch.int32,))
    checks.tensor(in_rank, "is_token_in_rank", (num_tokens, ranks), (torch.bool,))
    checks.tensor(per_expert, "num_tokens_per_expert", ("E",), (torch.int32,))
    experts = checks.experts(per_expert.numel(), "elements of num_tokens_per_expert")
    if (topk_idx is None) != (topk_weights is None):
        given, other = "topk_idx", "topk_weights"
        if topk_idx is None:
            given, other = other, given
        checks.fail(other, f"a tensor, as {given} is given", None)
    if topk_idx is not None:
        checks.topk_idx(topk_idx, num_tokens)
        checks.tensor(topk_weights, "topk_weights", tuple(topk_idx.shape), (torch.float32,))
    elif ranks > constants.MAX_TOPK:
        needed = f"a tensor, as there are more than {constants.MAX_TOPK} ranks"
        checks.fail("topk_idx", needed, None)
    return Choices(experts, topk_idx, topk_weights, per_expert, in_rank, per_rank)


def require_layout(checks: Checks, choices: Choices, sent: torch.Tensor) -> None:
    """Refuses tokens for each rank, [W], other than those that prepare has found; on the CPU."""
    if choices.per_rank is None or choices.in_rank is None:
        return
    expected, got = sent.tolist(), choices.per_rank.tolist()
    if got != expected:
        checks.fail("num_tokens_per_rank", f"{expected}, as topk_idx has it", got)
    in_rank = choices.in_rank.sum(0).tolist()
    if in_rank != expected:
        expected_tokens = f"true for {expected} tokens, as topk_idx has it"
        checks.fail("is_token_in_rank", expected_tokens, in_rank)


def read_results(
    checks: Checks, x: Any, num_rows: int, row_bytes: int, pieces: int
) -> torch.Tensor:
    """The rows of combine: as many as dispatch gave, and of no more bytes than the group takes.

    Args:
        pieces: in how many operations they travel; as float32 if in several.
    """
    found = checks.tensor(x, "x", (num_rows, "H"), _SUMMABLE)
    size = torch.float32.itemsize if pieces > 1 else found.element_size()
    unit, most = (one * pieces // size for one in (constants.ROW_ALIGNMENT, row_bytes))
    if found.shape[1] % unit != 0 or not 0 < found.shape[1] <= most:
        expected = f"a positive multiple of {unit} columns and, as the handle was made for,"
        checks.fail("x", f"{expected} at most {most}", found.shape[1])
    return found


def read_weights(checks: Checks, weights: Any, num_rows: int, by_expert: bool) -> None:
    """The weights of combine: [N,K] float32 with any K that a group knows; by expert [N]."""
    if by_expert:
        checks.tensor(weights, "topk_weights", (num_rows,), (torch.float32,))
        return
    found = checks.tensor(weights, "topk_weights", (num_rows, "K"), (torch.float32,))
    if not 1 <= found.shape[1] <= constants.MAX_TOPK:
        checks.fail("topk_weights", f"1 to {constants.MAX_TOPK} columns", found.shape[1])


def read_bias(
    checks: Checks, bias: Any, shape: tuple[int, int], dtype: torch.dtype
) -> list[torch.Tensor]:
    """None, a tensor, or a pair of which each may be None, as a list of the tensors."""
    if bias is None:
        return []
    if isinstance(bias, torch.Tensor):
        return [checks.tensor(bias, "bias", shape, (dtype,))]
    if not isinstance(bias, tuple) or len(bias) != 2:
        checks.fail("bias", "None, a tensor, or a tuple of two", _kind(bias))
    for place, one in enumerate(bias):
        checks.optional(one, f"bias[{place}]", shape, dtype)
    return [one for one in bias if one is not None]


def as_payload(rows: torch.Tensor) -> torch.Tensor:
    """Rows in a type that the library knows; it moves them without reading them."""
    return rows.view(torch.uint8) if rows.dtype in _FP4_TYPES else rows


def _described(shape: Iterable[int | str], dtypes: Iterable[torch.dtype]) -> str:
    """Shape and dtypes in words, such as ``[T,256] bfloat16 or float16``."""
    types = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"[{','.join(map(str, shape))}] {types}"


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
