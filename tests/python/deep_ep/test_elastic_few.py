"""ElasticBuffer with few tokens: the low-latency operations give every bit that the others give."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossdock.deep_ep import ElasticBuffer, EPHandle
from crossdock.errors import Mismatch
from deep_ep_cases import SECONDS, CountedRounds, one_rank_errs, same
from deep_ep_reference import Batch, make_batch
from support import Apart, Rank, on_ranks
from test_elastic import EXPERTS, HIDDEN, MOST, TOPK, elastic

SEED = 70
FIELDS = [
    "topk_idx",
    "num_unaligned_recv_tokens_per_expert",
    "psum_num_recv_tokens_per_expert",
    "psum_num_recv_tokens_per_scaleup_rank",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
]
NUMBERS = ["num_recv_tokens", "num_expanded_tokens", "num_recv_tokens_per_expert_list"]
ODD_WEIGHTS = [-0.0, torch.inf, -torch.inf, torch.nan, 1e-42, -3e38, 0.0]


def drawn(me: Rank, seed: int, dtype: torch.dtype) -> Batch:
    """A batch of any numbers, with an id that occurs twice."""
    tokens = ([5, 0, MOST, 1] * 2)[: me.num_ranks]
    local = EXPERTS // me.num_ranks
    batch = make_batch(seed, me.num_ranks, tokens, HIDDEN, TOPK, local, dtype)
    batch.topk_idx[0][0] = torch.tensor([1, 1, EXPERTS - 1])
    return batch


class Both:
    """Makes each call by the operations of many tokens, and then by those of few."""

    def __init__(self, buffer: ElasticBuffer) -> None:
        self.buffer = buffer
        self.handles: list[EPHandle] = []

    def dispatch(self, x: torch.Tensor, *args: Any, **options: Any) -> list[Any]:
        """The results of new dispatches; `handles` are theirs."""
        found = []
        for few in (0, MOST):
            self.buffer.few_tokens = few
            found.append(self.buffer.dispatch(x, *args, **options))
        self.handles = [one[3] for one in found]
        assert [one.few_tokens for one in self.handles] == [False, True]
        return [(*one[:3], one[3]) for one in found]

    def along(self, x: torch.Tensor, weights: torch.Tensor | None, **options: Any) -> list[Any]:
        return [
            self.buffer.dispatch(x, topk_weights=weights, handle=handle, **options)[:3]
            for handle in self.handles
        ]

    def combine(self, x: torch.Tensor, *args: Any) -> list[Any]:
        return [self.buffer.combine(x, handle, *args)[:2] for handle in self.handles]


def same_results(name: str, found: list[Any]) -> None:
    many, few = found
    for number, (want, got) in enumerate(zip(many, few, strict=True)):
        if isinstance(want, torch.Tensor):
            same(f"{name}, result {number}", got, want)
        elif not isinstance(want, EPHandle):
            assert want is None and got is None, (name, number)


def same_handles(name: str, handles: list[EPHandle]) -> None:
    many, few = handles
    for field in FIELDS:
        same(f"{name}, {field}", getattr(few, field), getattr(many, field))
    for field in NUMBERS:
        assert getattr(few, field) == getattr(many, field), (name, field)


def forms() -> Iterator[dict[str, Any]]:
    yield from ({"do_cpu_sync": waits} for waits in (True, False))
    for alignment, waits in itertools.product((1, 8, 6), (True, False)):
        yield {"do_expand": True, "expert_alignment": alignment, "do_cpu_sync": waits}


@on_ranks(1, 2, 4)
def test_few_tokens_bring_the_bits_of_many(me: Rank) -> None:
    generator = torch.Generator().manual_seed(SEED + me.rank)
    with elastic(me) as buffer:
        both = Both(buffer)
        types = (torch.bfloat16, torch.float16, torch.float32)
        for number, (form, dtype) in enumerate(zip(forms(), itertools.cycle(types))):
            batch = drawn(me, SEED + number, dtype)
            x, idx, weights = (
                part[me.rank] for part in (batch.x, batch.topk_idx, batch.topk_weights)
            )
            buffer.allow_multiple_reduction = number % 2 == 0
            name = f"{form}, {dtype}"
            given = None if number % 3 == 2 else weights
            found = both.dispatch(x, idx, given, num_experts=EXPERTS, **form)
            same_results(name, found)
            rows = len(found[0][0])
            for bias in (None, torch.randn(x.shape, generator=generator).to(dtype)):
                results = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
                same_results(f"{name}, combine", both.combine(results, None, bias))
                beside = torch.randn(rows, TOPK, generator=generator)
                if form.get("do_expand"):
                    beside = beside[:, 0].contiguous()
                    beside[: len(ODD_WEIGHTS)] = torch.tensor(ODD_WEIGHTS)[:rows]
                same_results(f"{name}, weights", both.combine(results, beside, bias))
            again = {"do_expand": form.get("do_expand", False)}
            same_results(f"{name}, again", both.along(2 * x, None, **again))
            same_results(f"{name}, weights again", both.along(x, 2 * weights, **again))
            same_results(f"{name}, by token", both.along(x, weights))
            same_handles(name, both.handles)


@on_ranks(2, Apart(2))
def test_few_tokens_need_no_agreement_before_they_travel(me: Rank) -> None:
    """And where low latency cannot serve a batch the operations of many tokens do."""
    batch = drawn(me, SEED, torch.bfloat16)
    x, idx = batch.x[me.rank], batch.topk_idx[me.rank]
    pair = x.to(torch.float8_e4m3fn), torch.ones(len(x), 1)
    with elastic(me) as buffer:
        buffer.few_tokens = MOST
        session, rounds = buffer._session(), list[int]()
        session.host = CountedRounds(session.host, rounds)
        apart = session.apart
        for changes, few, agreements in (
            ({}, True, 1),
            ({}, True, 0),
            ({"do_cpu_sync": False}, True, 0),
            ({"num_max_tokens_per_rank": MOST + 1}, False, 1),
            ({"x": pair}, False, 0),
            ({"do_expand": True, "expert_alignment": 8}, True, 1),
            ({"do_expand": True, "expert_alignment": 8}, True, 0),
            ({"do_expand": True, "expert_alignment": 4}, True, 1),
            ({}, True, 0),
        ):
            rounds.clear()
            given = {"x": x, "topk_idx": idx, "num_experts": EXPERTS} | changes
            *_, handle, _ = buffer.dispatch(**given)
            assert handle.few_tokens == (few and not apart), changes
            assert len(rounds) == 1 if apart else len(rounds) == agreements, changes


@on_ranks(2, 3)
def test_ranks_that_differ_about_few_tokens_all_hear_it(me: Rank) -> None:
    x, idx = torch.ones(5, HIDDEN, dtype=torch.bfloat16), torch.arange(10).view(5, 2) % 6
    good: dict[str, Any] = {"x": x, "topk_idx": idx, "num_experts": 6}
    with elastic(me) as buffer:
        for form in ({}, {"do_expand": True, "expert_alignment": 8}):
            for few in (0, MOST):
                buffer.few_tokens = few
                buffer.dispatch(**good, **form)
                for odd in range(me.num_ranks):
                    buffer.few_tokens = MOST - few if odd == me.rank else few
                    began = time.monotonic()
                    with pytest.raises(Mismatch, match="few_tokens"):
                        buffer.dispatch(**good, **form)
                    assert time.monotonic() - began < SECONDS
                buffer.few_tokens = few
                buffer.dispatch(**good, **form)


@on_ranks(2)
def test_mistakes_with_few_tokens(me: Rank) -> None:
    batch = drawn(me, SEED, torch.bfloat16)
    x, idx, weights = (part[me.rank] for part in (batch.x, batch.topk_idx, batch.topk_weights))
    good: dict[str, Any] = {"x": x, "topk_idx": idx, "num_experts": EXPERTS}
    with elastic(me) as buffer:
        buffer.few_tokens = 1025
        with pytest.raises(ValueError, match="few_tokens: expected at most 1024, got 1025"):
            buffer.dispatch(**good)
        buffer.few_tokens = MOST
        buffer.dispatch(**good)
        one_rank_errs(me, buffer.dispatch, good, [({"x": x.double()}, "x: expected")], says="")
        for expand in (False, True):
            rows, _, beside, handle, _ = buffer.dispatch(**good, do_expand=expand)
            for refused in (
                x.view(torch.uint8),
                (x.to(torch.float8_e4m3fn), torch.ones(len(x), 1)),
            ):
                text = "x: expected rows of bfloat16, float16 or float32, as the handle is one of"
                with pytest.raises(ValueError, match=text):
                    buffer.dispatch(refused, handle=handle, do_expand=expand)
            one_rank_errs(
                me,
                buffer.combine,
                {"x": rows, "handle": handle, "topk_weights": beside},
                [({"x": rows.new_zeros(99, HIDDEN)}, r"x: expected .* got \[99,32\]")],
            )
            for odd in range(2):
                with pytest.raises(Mismatch):
                    buffer.combine(rows, handle, beside if me.rank == odd else None)
            same_results(
                "after mistakes",
                [
                    buffer.dispatch(x, topk_weights=weights, handle=handle, do_expand=expand)[:1],
                    (rows,),
                ],
            )


@on_ranks(2)
def test_bad_ids_are_not_told_again_along_a_handle(me: Rank) -> None:
    """On GPUs a handle may have some, of which its dispatch has told."""
    batch = drawn(me, SEED, torch.bfloat16)
    x, idx, weights = (part[me.rank] for part in (batch.x, batch.topk_idx, batch.topk_weights))
    with elastic(me) as buffer:
        buffer.few_tokens = MOST
        rows, _, beside, handle, _ = buffer.dispatch(
            x, idx, weights, num_experts=EXPERTS, do_expand=True
        )
        _, home, _ = buffer.combine(rows, handle, beside)
        handle.topk_idx[handle.topk_idx < 0] = EXPERTS
        again, *_ = buffer.dispatch(x, handle=handle, do_expand=True)
        same("rows", again, rows)
        _, home_again, _ = buffer.combine(rows, handle, beside)
        same("weights", home_again, home)
        assert len(handle.recv_src_metadata) == len(batch.rows(me.rank))


@on_ranks(2)
def test_a_bad_id_of_one_rank_fails_on_all(me: Rank) -> None:
    batch = drawn(me, SEED, torch.bfloat16)
    x, idx = batch.x[me.rank], batch.topk_idx[me.rank].clone()
    with elastic(me) as buffer:
        for few in (0, MOST):
            buffer.few_tokens = few
            bad = idx.clone()
            if me.rank == 0:
                bad[0, 0] = EXPERTS
            with pytest.raises(ValueError, match="1 expert id"):
                buffer.dispatch(x, bad, num_experts=EXPERTS)
            buffer.dispatch(x, idx, num_experts=EXPERTS)
        dist.barrier()
