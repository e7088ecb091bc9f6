"""Mistakes: what the rank that makes one says, what its peers hear, and that life goes on."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep_cases as cases
from crossdock.deep_ep import Buffer, Config, EventOverlap
from crossdock.errors import InvalidArgument, Mismatch
from deep_ep_cases import SECONDS, on_buffers, one_rank_errs
from deep_ep_reference import make_batch
from support import Apart

SEED = 40
TOKENS = [17, 9]
HIDDEN = 256

Arguments = dict[str, Any]
Mistakes = list[cases.Mistake]


def mistakes_in_x(x: torch.Tensor) -> Mistakes:
    tokens, hidden = x.shape
    fp8 = torch.zeros(tokens, hidden).to(torch.float8_e4m3fn)
    scales = torch.zeros(tokens, hidden // 128)
    return [
        ({"x": None}, r"x: expected a tensor \[T,H\] bfloat16 or .*, got None"),
        ({"x": x[:, 0]}, r"x: expected \[T,H\] .*, got \[17\] bfloat16"),
        ({"x": x.double()}, r"x: expected .*, got \[17,256\] float64"),
        ({"x": x.t().contiguous().t()}, r"x: expected a contiguous tensor, got strides \(1, 17\)"),
        ({"x": x[:, :3].contiguous()}, "x: expected rows of a positive multiple of 16 bytes"),
        ({"x": (fp8, scales, scales)}, r"x: expected a tensor, or a pair .*, got 3 items"),
        ({"x": (x, scales)}, r"x\[0\]: expected .*float8.*, got .*bfloat16"),
        ({"x": (fp8, scales[:2])}, r"x\[1\]: expected \[17,S\] float32 or int32, got \[2,2\]"),
        ({"x": (fp8, scales[:, :0])}, r"x\[1\]: expected at least one scale per token"),
    ]


def mistakes_about_streams() -> Mistakes:
    return [
        ({"config": 24}, "config: expected a Config or None, got a int"),
        ({"previous_event": 1}, "previous_event: expected an EventOverlap or None, got a int"),
        (
            {"previous_event": EventOverlap(3)},
            "previous_event: expected an EventOverlap of an EventHandle, got a int",
        ),
        (
            {"allocate_on_comm_stream": True, "previous_event": EventOverlap()},
            "allocate_on_comm_stream: expected previous_event and async_finish with it",
        ),
    ]


def mistakes_in_numbers(layout: Arguments) -> Mistakes:
    """Numbers that do not follow from topk_idx, of which ranks on the CPU hear."""
    per_rank, in_rank = layout["num_tokens_per_rank"], layout["is_token_in_rank"].clone()
    in_rank[:, 1] = ~in_rank[:, 1]
    to_both = f"{per_rank.tolist()}, as topk_idx has it, got {(per_rank + 1).tolist()}"
    return [
        (
            {"num_tokens_per_rank": per_rank + 1},
            f"num_tokens_per_rank: expected {re.escape(to_both)}",
        ),
        ({"is_token_in_rank": in_rank}, r"is_token_in_rank: expected true for \[.*\] tokens, as "),
    ]


def mistakes_in_routing(layout: Arguments, topk: Arguments) -> Mistakes:
    per_expert = layout["num_tokens_per_expert"]
    elsewhere = [
        ({name: tensor.to("meta")}, f"{name}: expected a tensor on cpu, got one on meta")
        for name, tensor in {**layout, **topk}.items()
        if tensor is not None
    ]
    return [
        *elsewhere,
        (
            {"num_tokens_per_rank": layout["num_tokens_per_rank"][:1].clone()},
            r"num_tokens_per_rank: expected \[2\] int32, got \[1\] int32",
        ),
        (
            {"is_token_in_rank": layout["is_token_in_rank"][1:].clone()},
            r"is_token_in_rank: expected \[17,2\] bool, got \[16,2\] bool",
        ),
        *mistakes_in_numbers(layout),
        ({"num_tokens_per_rank": None}, r"num_tokens_per_rank: expected a tensor \[2\] int32"),
        (
            {"num_tokens_per_rdma_rank": per_expert},
            r"num_tokens_per_rdma_rank: expected \[[12]\] int32, got \[4\] int32",
        ),
        (
            {"is_token_in_rank": layout["is_token_in_rank"].int()},
            r"is_token_in_rank: expected \[17,2\] bool, got \[17,2\] int32",
        ),
        (
            {"num_tokens_per_expert": per_expert.long()},
            r"num_tokens_per_expert: expected \[E\] int32, got \[4\] int64",
        ),
        (
            {"num_tokens_per_expert": per_expert[:3].clone()},
            "elements of num_tokens_per_expert: expected a multiple of the 2 ranks, got 3",
        ),
        ({"topk_idx": topk["topk_idx"].int()}, r"topk_idx: expected \[17,K\] int64, got .* int32"),
        ({"topk_idx": torch.full((17, 33), -1)}, "topk_idx: expected 1 to 32 columns, got 33"),
        (
            {"topk_weights": topk["topk_weights"].double()},
            r"topk_weights: expected \[17,3\] float32, got \[17,3\] float64",
        ),
        ({"topk_weights": None}, "topk_weights: expected a tensor, as topk_idx is given"),
        ({"topk_idx": None}, "topk_idx: expected a tensor, as topk_weights is given"),
        ({"expert_alignment": 0}, "expert_alignment: expected an integer of at least 1, got 0"),
        ({"num_worst_tokens": -1}, "num_worst_tokens: expected an integer of at least 0, got -1"),
    ]


def mistakes_in_cached(caller: cases.Caller) -> Mistakes:
    return [
        ({"topk_idx": caller.topk_idx}, "topk_idx: expected None, as handle is given"),
        ({"topk_weights": caller.topk_weights}, "topk_weights: expected None, as handle is given"),
        (
            {"x": caller.x.float()},
            "x: expected rows of at most 512 bytes, as the handle was made for, got 1024 bytes",
        ),
        ({"x": caller.x[:3]}, "x: expected 17 rows, as the handle was made for, got 3"),
    ]


def mistakes_in_combine(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> Mistakes:
    rows = len(x)
    return [
        ({"x": x[1:]}, rf"x: expected \[{rows},H\] .*, got \[{rows - 1},256\]"),
        ({"x": x.to(torch.float8_e4m3fn)}, "x: expected .*, got .* float8_e4m3fn"),
        (
            {"x": torch.zeros(rows, 264, dtype=x.dtype)},
            "x: expected a positive multiple of 8 columns and, .* at most 256, got 264",
        ),
        (
            {"x": torch.zeros(rows, 9, dtype=x.dtype), "bias": torch.zeros(17, 9, dtype=x.dtype)},
            "x: expected a positive multiple of 8 columns .*, got 9",
        ),
        ({"x": torch.zeros(rows, 260)}, "x: expected .* multiple of 8 columns .*, got 260"),
        ({"x": x[:, :0].contiguous()}, "x: expected a positive multiple of 8 columns .*, got 0"),
        ({"topk_weights": torch.zeros(rows, 33)}, "topk_weights: expected 1 to 32 columns, got 33"),
        ({"topk_weights": weights.double()}, r"topk_weights: expected .* float32, got .* float64"),
        ({"bias": bias.float()}, r"bias: expected \[17,256\] bfloat16, got \[17,256\] float32"),
        ({"bias": (bias, bias[1:])}, r"bias\[1\]: expected \[17,256\] bfloat16, got \[16,256\]"),
        ({"bias": (bias,) * 3}, "bias: expected None, a tensor, or a tuple of two, got a tuple of"),
    ]


def told_everywhere(buffer: Buffer, told: list[str]) -> list[tuple[str, ...]]:
    """The texts of all ranks for each mistake, from those that this rank has been told."""
    gathered: list[Any] = [None] * buffer.group_size
    dist.all_gather_object(gathered, told)
    return list(zip(*gathered))


@on_buffers(2, Apart(2))
def test_mistake_in_dispatch_is_told_to_all(buffer: Buffer) -> None:
    caller = cases.Caller(buffer, make_batch(SEED, 2, tokens=TOKENS, hidden=HIDDEN))
    layout, topk = caller.layout(), caller.topk()
    new = {"x": caller.x, **layout, **topk}
    of_any = mistakes_in_x(caller.x) + mistakes_about_streams()
    one_rank_errs(buffer, buffer.dispatch, new, of_any + mistakes_in_routing(layout, topk))
    cases.everything(buffer, SEED)

    cached = {"x": caller.x, "handle": caller.dispatch_checked()}
    one_rank_errs(buffer, buffer.dispatch, cached, of_any + mistakes_in_cached(caller))
    cases.everything(buffer, SEED)

    worst = {**new, "num_worst_tokens": sum(TOKENS)}
    buffer.dispatch(**worst)
    of_worst: Mistakes = [
        (
            {"topk_idx": None, "topk_weights": None},
            "topk_idx: expected a tensor, as num_worst_tokens is given",
        ),
        ({"num_worst_tokens": -1}, "num_worst_tokens: expected an integer of at least 0"),
        ({"num_worst_tokens": 0, "x": None}, "x: expected a tensor"),
    ]
    one_rank_errs(buffer, buffer.dispatch, worst, mistakes_in_x(caller.x) + of_worst)
    cases.everything(buffer, SEED)


@on_buffers(2, Apart(2))
def test_mistake_in_combine_is_told_to_all(buffer: Buffer) -> None:
    caller = cases.Caller(buffer, make_batch(SEED, 2, tokens=TOKENS, hidden=HIDDEN))
    handle = caller.dispatch_checked()
    rows = torch.zeros(len(caller.batch.rows(buffer.rank)), HIDDEN, dtype=torch.bfloat16)
    weights, bias = torch.zeros(len(rows), 3), torch.zeros_like(caller.x)
    mistakes = mistakes_in_combine(rows, weights, bias) + mistakes_about_streams()
    one_rank_errs(buffer, buffer.combine, {"x": rows, "handle": handle}, mistakes)
    cases.everything(buffer, SEED)


@on_buffers(Apart(2))
def test_tokens_per_host_are_checked_where_there_are_several(buffer: Buffer) -> None:
    caller = cases.Caller(buffer, make_batch(SEED, buffer.group_size))
    good = {"x": caller.x, **caller.layout(), **caller.topk()}
    three, floats = torch.zeros(3, dtype=torch.int32), torch.zeros(2)
    mistakes: Mistakes = [
        ({"num_tokens_per_rdma_rank": three}, r"num_tokens_per_rdma_rank: .*\[2\] int32"),
        ({"num_tokens_per_rdma_rank": floats}, "num_tokens_per_rdma_rank: .*got .* float32"),
    ]
    one_rank_errs(buffer, buffer.dispatch, good, mistakes)
    buffer.dispatch(**{**good, "num_tokens_per_rdma_rank": None})


@on_buffers(2, Apart(2))
def test_ranks_that_disagree_all_hear_in_what(buffer: Buffer) -> None:
    """Each rank's call is good by itself."""
    for sizes, text in (
        ({"hidden": 64 + 64 * buffer.rank}, "bytes of a row of x"),
        ({"topk": 2 + buffer.rank}, "columns of topk_idx"),
        ({"local_experts": 4 + buffer.rank}, "elements of num_tokens_per_expert"),
    ):
        caller = cases.Caller(buffer, make_batch(SEED, 2, **sizes))
        with pytest.raises(Mismatch, match=rf"{text}.* on rank 0 and .* on rank 1") as failed:
            caller.dispatch(**caller.topk())
        assert (failed.value.rank, failed.value.peer) == (buffer.rank, 1)
    caller = cases.Caller(buffer, make_batch(SEED, 2))
    with pytest.raises(Mismatch, match="num_worst_tokens"):
        caller.dispatch(**caller.topk(), num_worst_tokens=1000 + buffer.rank)
    with pytest.raises(Mismatch, match="columns of topk_idx"):
        caller.dispatch(**caller.topk() if buffer.rank == 0 else {})
    handle = caller.dispatch_checked()
    rows = caller.batch.received(buffer.rank, caller.batch.x)
    bias = torch.zeros_like(caller.x) if buffer.rank == 0 else None
    with pytest.raises(Mismatch):
        buffer.combine(rows, handle, bias=bias)
    caller.combine_checked(handle, SEED, 2)
    # Equal row bytes of different types are the library's to find.
    with pytest.raises(Mismatch):
        caller.dispatch(caller.x.half() if buffer.rank == 0 else caller.x, **caller.topk())
    cases.everything(buffer, SEED)


@on_buffers(2, 3, Apart(3))
def test_weights_of_combine_on_some_ranks_only_are_told_to_all(buffer: Buffer) -> None:
    """The rank without weights has no operation in which it could learn of them later."""
    caller = cases.Caller(buffer, make_batch(SEED, buffer.group_size))
    handle = caller.dispatch_checked()
    rows = caller.batch.received(buffer.rank, caller.batch.x)
    told = []
    for columns in ((3, 0), (0, 3), (2, 3)):
        mine = columns[buffer.rank % 2]
        weights = torch.ones(len(rows), mine) if mine else None
        began = time.monotonic()
        with pytest.raises(Mismatch, match="columns of topk_weights|its call failed") as found:
            buffer.combine(rows, handle, topk_weights=weights)
        assert found.value.peer != buffer.rank and time.monotonic() - began < SECONDS
        told.append(str(found.value))
    cases.everything(buffer, SEED)
    # Some rank is told of the weights themselves, and another one of the rank that failed.
    for texts in told_everywhere(buffer, told):
        of_weights = ["columns of topk_weights" in text for text in texts]
        assert any(of_weights) and not all(of_weights), texts


@on_buffers(3, Apart(3))
def test_ids_that_are_no_experts_are_told_to_all(buffer: Buffer) -> None:
    batch = make_batch(SEED, buffer.group_size, tokens=[17, 9, 4])
    caller = cases.Caller(buffer, batch)
    layout, topk = caller.layout(), caller.topk()
    for bad in (batch.num_experts, -2):
        wrong = caller.topk_idx.clone()
        if buffer.rank == 1:
            wrong[3, 1] = bad
        for worst in (0, 51):
            with pytest.raises(InvalidArgument, match="lowest rank with some is 1"):
                buffer.dispatch(
                    caller.x, **layout, **{**topk, "topk_idx": wrong}, num_worst_tokens=worst
                )
    cases.everything(buffer, SEED)


@on_buffers(2)
def test_num_worst_tokens_bounds_the_tokens_of_a_rank(buffer: Buffer) -> None:
    small = cases.Caller(buffer, make_batch(SEED, 2, tokens=[8, 8]))
    small.dispatch(**small.topk(), num_worst_tokens=16)
    large = cases.Caller(buffer, make_batch(SEED, 2, tokens=[9, 3]))
    # Rank 0 has more tokens than half of num_worst_tokens, which ranks do not compare again.
    kind, text = (
        (ValueError, r"num_worst_tokens: expected at least W \* T = 18, got 16"),
        (Mismatch, "rank 0"),
    )[buffer.rank]
    with pytest.raises(kind, match=text):
        large.dispatch(**large.topk(), num_worst_tokens=16)
    large.dispatch_checked()
    cases.everything(buffer, SEED)


@on_buffers(2, Apart(2))
def test_too_few_worst_tokens_are_an_error_on_all_ranks(buffer: Buffer) -> None:
    batch = make_batch(SEED, 2, tokens=[17, 17])
    caller = cases.Caller(buffer, batch)
    most = max(len(batch.rows(rank)) for rank in range(2))
    full = len(batch.rows(buffer.rank)) == most
    for _ in range(2):
        text = f"num_worst_tokens: recv_x has {most - 1} rows, expected at least {most}"
        with pytest.raises(InvalidArgument if full else Mismatch, match=text if full else ""):
            caller.dispatch(**caller.topk(), num_worst_tokens=most - 1)
    x, *_ = caller.dispatch(**caller.topk(), num_worst_tokens=most)
    caller.check_rows(x[: len(batch.rows(buffer.rank))])
    cases.everything(buffer, SEED)


@on_buffers(3, Apart(3))
def test_unequal_num_worst_tokens_are_told_to_all_at_once(buffer: Buffer) -> None:
    caller = cases.Caller(buffer, make_batch(SEED, buffer.group_size, tokens=[17, 9, 4]))
    known = 17 * buffer.group_size
    caller.dispatch(**caller.topk(), num_worst_tokens=known)
    told = []
    # Ranks that wait for the host, ranks that the group serves as it is, and ranks that want a
    # larger one: each alone, and each among others.
    for one, others in (
        (0, known),
        (known, 0),
        (known, known - 1),
        (known, 9 * known),
        (9 * known, known),
        (0, 9 * known),
    ):
        for odd in range(buffer.group_size):
            began = time.monotonic()
            worst = one if buffer.rank == odd else others
            with pytest.raises(Mismatch) as failed:
                caller.dispatch(**caller.topk(), num_worst_tokens=worst)
            assert time.monotonic() - began < SECONDS
            told.append(str(failed.value))
        caller.dispatch(**caller.topk(), num_worst_tokens=known)
    cases.everything(buffer, SEED)
    # Between hosts every rank hears of the numbers.
    enough = any if buffer.num_rdma_ranks == 1 else all
    for texts in told_everywhere(buffer, told):
        assert enough("num_worst_tokens = " in text for text in texts), texts


@on_buffers(1)
def test_a_handle_is_what_dispatch_returned(buffer: Buffer) -> None:
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    for handle in ((1, 2, 3), [x], "handle"):
        for call in (buffer.dispatch, buffer.combine):
            with pytest.raises(ValueError, match="handle: expected what dispatch"):
                call(x, handle)
    with pytest.raises(ValueError, match="num_experts: expected an integer of at least 1"):
        buffer.get_dispatch_layout(torch.zeros(3, 2, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match="topk_idx: expected .*int64, got .*int32"):
        buffer.get_dispatch_layout(torch.zeros(3, 2, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="config: expected"):
        buffer.dispatch(
            x,
            num_tokens_per_rank=torch.ones(1, dtype=torch.int32),
            is_token_in_rank=torch.ones(3, 1, dtype=torch.bool),
            num_tokens_per_expert=torch.ones(1, dtype=torch.int32),
            config=Config,
        )
    cases.everything(buffer, SEED)
