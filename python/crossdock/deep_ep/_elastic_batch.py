"""A batch of ElasticBuffer: its checked arguments, and its received rows in the form asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ._arguments import Checks, Choices, Rows, Tokens, read_tokens
from ._config import require_sms
from ._dispatch import Dispatched, Received
from ._elastic_handle import EPHandle
from ._expand import Padding, zones_of

_TMA_UNIT = 4  # scales of 4 bytes in the 16 that a TMA descriptor's stride is a multiple of


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The arguments of a dispatch that are equal on all ranks, not checked yet."""

    num_experts: Any
    most_tokens: Any
    alignment: Any
    num_sms: Any
    few_sms: Any  # of few tokens; 0 = the library's choice
    do_expand: bool
    host_waits: bool


def read_batch(
    checks: Checks,
    numbers: Numbers,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    stats: Any,
) -> tuple[Tokens, Choices]:
    """The checked arguments of a dispatch without a handle."""
    experts = numbers.num_experts
    if topk_idx is None or experts is None:
        given = f"topk_idx={type(topk_idx).__name__}, num_experts={experts}"
        checks.fail("topk_idx, num_experts", "both, as no handle is given", given)
    checks.topk_idx(topk_idx)
    checks.experts(experts, "num_experts")
    least = max(1, topk_idx.shape[0])
    checks.at_least(numbers.most_tokens, "num_max_tokens_per_rank", least)
    checks.at_least(numbers.alignment, "expert_alignment", 1)
    require_sms(numbers.num_sms, "num_sms")
    name, local = "cumulative_local_expert_recv_stats", experts // checks.num_ranks
    checks.optional(stats, name, (local,), torch.int32)
    tokens = read_tokens(checks, x)
    checks.topk_idx(topk_idx, tokens.rows.shape[0])
    checks.optional(topk_weights, "topk_weights", tuple(topk_idx.shape), torch.float32)
    zones = zones_of(numbers.alignment) if numbers.do_expand else 0
    return tokens, Choices(experts, topk_idx, topk_weights, zones=zones)


def handle_of(found: Dispatched, numbers: Numbers, topk_idx: torch.Tensor) -> EPHandle:
    """The handle of a dispatch; its tensors are the current stream's work."""
    return EPHandle(
        do_expand=numbers.do_expand,
        num_experts=numbers.num_experts,
        expert_alignment=numbers.alignment,
        num_max_tokens_per_rank=numbers.most_tokens,
        num_sms=numbers.num_sms,
        topk_idx=topk_idx,
        num_recv_tokens_per_expert_list=found.per_expert,
        routing=found.routing,
        sums=found.sums,
    )


def with_padding(padding: Padding | None, received: Received) -> Received:
    """Rows by expert, with the padding that their zones lack."""
    if padding is None:
        return received
    rows, scales, _, weights = received
    return Received(
        padding.around(rows),
        None if scales is None else padding.around(scales),
        None,
        None if weights is None else padding.around(weights),
    )


def by_token(handle: EPHandle, received: Received) -> Received:
    """Rows by token, of rows by expert."""
    found, (rows, scales, _, weights) = handle.look(), received
    return Received(
        found.one_each(rows),
        None if scales is None else found.one_each(scales),
        found.experts(handle.starts),
        None if weights is None else found.weights(weights),
    )


def parts_of(rows: Rows) -> tuple[torch.Tensor, ...]:
    return rows if isinstance(rows, tuple) else (rows,)


def column_major(rows: Rows) -> Rows:
    """The scales, if there are some, with strides (1, N rounded up to 16 bytes)."""
    if not isinstance(rows, tuple):
        return rows
    values, scales = rows
    length = -(-scales.shape[0] // _TMA_UNIT) * _TMA_UNIT
    columns = scales.new_empty(scales.shape[1], length)
    return values, columns.t()[: scales.shape[0]].copy_(scales)
