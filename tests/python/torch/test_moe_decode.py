"""MoELayer with decode: the bits of the operations for many tokens, and what ranks hear."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import crossdock.torch as xd
from crossdock.errors import Mismatch
from crossdock.torch._direct import FUNCTIONS
from crossdock.torch.layers.decode import DecodePlan
from moe_formulas import CONFIGS, EXPERTS, FFN, HIDDEN, TOPK
from support import Rank, on_ranks
from torch_support import joined, normal, one_rank_errs, settle, where

MOST = 6  # tokens of a rank
TOKENS = ((4, 0, 6, 1), (1, 5, 0, 2), (0, 0, 0, 0), (6, 6, 6, 6))  # by batch and rank


def make_layer(comm: xd.Comm, **options: Any) -> xd.MoELayer:
    torch.manual_seed(5)
    sizes = {"max_tokens_per_rank": 16, "decode_tokens": MOST, "dtype": torch.float32}
    return xd.MoELayer(HIDDEN, FFN, EXPERTS, TOPK, comm=comm, **sizes | options)


def batches(me: Rank, dtype: torch.dtype) -> list[torch.Tensor]:
    return [normal(7 * me.rank + i, t[me.rank], HIDDEN, dtype=dtype) for i, t in enumerate(TOKENS)]


def check_equal(layer: xd.MoELayer, x: torch.Tensor) -> None:
    """Decodes x, and compares all bits with those of the operations for many tokens."""
    wanted = layer(x)
    calls = layer.group.stats().calls
    got = layer(x, decode=True)
    assert layer.group.stats().calls == calls  # it has taken another way
    assert torch.equal(got.hidden, wanted.hidden)
    assert torch.equal(got.load, wanted.load)
    assert got.aux_loss == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", CONFIGS)
@on_ranks(2, 4)
def test_models_decode_with_the_bits_of_many_tokens(
    me: Rank, model: str, dtype: torch.dtype
) -> None:
    with joined() as comm:
        torch.manual_seed(6)
        sizes = {"max_tokens_per_rank": 16, "decode_tokens": MOST, "dtype": dtype}
        layer = xd.model_layer(CONFIGS[model], comm=comm, **sizes).eval()
        if layer.router.bias is not None:
            layer.router.bias.copy_(0.3 * normal(8, EXPERTS))
        for mode in (torch.no_grad, torch.inference_mode):
            for x in batches(me, dtype):
                with mode():
                    check_equal(layer, x)
                    check_equal(layer, x[None])
        settle(layer.decode_group)


class Biased(nn.Module):
    """Experts that look up their rows' numbers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(normal(9, count, HIDDEN))
        self.plans: list[Any] = []

    def forward(self, rows: torch.Tensor, plan: Any) -> torch.Tensor:
        self.plans.append(plan)
        wide, narrow = (plan.row_experts(dtype) for dtype in (torch.int64, torch.int32))
        assert (wide.dtype, narrow.dtype) == (torch.int64, torch.int32)
        assert torch.equal(wide, narrow)
        return rows + xd.local_tensor(self.bias)[wide[: len(rows)]]


@on_ranks(1, 2)
def test_parts_of_the_callers_and_capacities_decode_alike(me: Rank) -> None:
    with joined() as comm, torch.no_grad():
        count = EXPERTS // me.num_ranks
        parts = {
            "experts": (experts := Biased(count)),
            "shared_experts": nn.Linear(HIDDEN, HIDDEN, device=where()),
        }
        bias = xd.GroupedExperts(
            count, HIDDEN, FFN, bias=True, gated=False, dtype=torch.float32, device=where()
        )
        for options in (parts, {"experts": bias, "capacity_factor": 1.0}):
            layer = make_layer(comm, **options).eval()
            for x in batches(me, torch.float32):
                check_equal(layer, x)
        many, few = experts.plans[:2]
        assert isinstance(many, xd.Plan) and isinstance(few, DecodePlan)
        assert torch.equal(few.offsets, many.offsets)
        rows = int(few.offsets[-1])
        assert torch.equal(few.row_experts()[:rows], many.row_experts()[:rows])
        assert (few.row_experts()[rows:] == -1).all()


@on_ranks(2)
def test_a_callers_group_lends_its_alignment_and_shares_memory(me: Rank) -> None:
    with joined() as comm, torch.no_grad():
        group = xd.EpGroup(
            num_experts=EXPERTS,
            hidden=HIDDEN,
            max_topk=TOPK,
            max_tokens_per_rank=16,
            dtype=torch.float32,
            alignment=4,
            comm=comm,
        )
        first, second = (make_layer(comm, group=group).eval() for _ in range(2))
        assert first.decode_group is second.decode_group
        other = make_layer(comm, group=group, decode_tokens=MOST + 1)
        assert other.decode_group is not first.decode_group
        x = batches(me, torch.float32)[0]
        for layer in (first, second, first):
            check_equal(layer, x)
        with pytest.raises(ValueError, match="decode: expected a layer made with decode_tokens"):
            make_layer(comm, group=group, decode_tokens=0)(x, decode=True)


class Broken(nn.Module):
    def forward(self, *_: Any) -> xd.Routing:
        raise KeyError("no such expert")


@on_ranks(2)
def test_ranks_that_cannot_decode_alike_hear_it_at_once(me: Rank) -> None:
    """A rank that records gradients, or has too many tokens: Mismatch on its peer."""
    with joined() as comm:
        layer = make_layer(comm).eval()
        good, too_many = normal(11, 3, HIDDEN), normal(12, MOST + 1, HIDDEN)

        def call(x: torch.Tensor, gradients: bool = False, **options: Any) -> xd.MoEOutput:
            with contextlib.nullcontext() if gradients else torch.no_grad():
                return layer(x, decode=True, **options)

        expected = call(good).hidden
        mistakes: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (ValueError, r"decode: expected torch.no_grad\(\)", {"gradients": True}),
            (
                ValueError,
                "x: expected at most decode_tokens = 6, got 7",
                {"x": too_many},
            ),
            (ValueError, r"x: expected shape \[..., 16\], got \(3, 8\)", {"x": good[:, :8]}),
            (TypeError, "after: expected a tensor, got int 3", {"after": 3}),
        ]
        for mistake in mistakes:
            one_rank_errs(me, 0, layer.decode_group, call, {"x": good}, mistake)
            assert torch.equal(call(good).hidden, expected)
        fine = layer.router
        if me.rank == 0:
            layer.router = Broken()
        mistake = (KeyError, "no such expert", {})
        one_rank_errs(me, 0, layer.decode_group, call, {"x": good}, mistake)
        layer.router = fine
        assert torch.equal(call(good).hidden, expected)
        experts = layer.experts
        layer._expert_names = []
        if me.rank == 0:
            layer.experts = Broken()
        one_rank_errs(me, 0, layer.decode_group, call, {"x": good}, mistake)
        layer.experts = experts
        assert torch.equal(call(good).hidden, expected)


@on_ranks(1)
def test_routers_whose_choices_a_hook_takes_away_count_the_others(me: Rank) -> None:
    with joined() as comm, torch.no_grad():
        layer = make_layer(comm).eval()
        x = normal(15, 4, HIDDEN)
        kept = torch.tensor([True, False, True, False], device=where())[:, None]

        def drop(router: Any, given: Any, routing: xd.Routing) -> xd.Routing:
            return routing._replace(topk_idx=routing.topk_idx.masked_fill(~kept, -1))

        wanted = layer(x)
        layer.router.register_forward_hook(drop)
        check_equal(layer, x)
        got = layer(x)
        # Products of fewer rows may round otherwise.
        torch.testing.assert_close(got.hidden, wanted.hidden * kept, rtol=2e-5, atol=2e-6)
        assert got.load.sum() == 1


@on_ranks(2)
def test_ranks_of_which_one_decodes_are_out_of_step(me: Rank) -> None:
    with joined() as comm, torch.no_grad():
        layer = make_layer(comm).eval()
        began = time.monotonic()
        with pytest.raises(Mismatch, match="waits in xd_ll_dispatch") as raised:
            layer(normal(13, 2, HIDDEN), decode=me.rank == 0)
        assert raised.value.fatal
        assert time.monotonic() - began < 20, "told late"


@on_ranks(2, timeout=200)
def test_decoding_compiles_into_one_graph(me: Rank) -> None:
    with joined() as comm, torch.no_grad():
        left, right = (make_layer(comm, shared_experts=1).eval() for _ in range(2))
        x = normal(12 + me.rank, MOST - 4 * me.rank, HIDDEN)

        def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            one = left(x, decode=True)
            return one.hidden, right(x, decode=True, after=one.order).hidden

        wanted = both(x)
        torch._dynamo.reset()
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            for got, expected in zip(compiled(x), wanted, strict=True):
                torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


class Dispatched(TorchDispatchMode):
    """Torch's operators, each of which costs the host a few microseconds, on a GPU a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def direct_calls() -> Iterator[list[str]]:
    """The operators that are run past torch's dispatcher, which does not look into this table."""
    names: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            names.append(name)
            return function(*args)

        return call

    with mock.patch.dict(FUNCTIONS, {n: noting(n, function) for n, function in FUNCTIONS.items()}):
        yield names


# Of an inference pass for many tokens, and of one that decodes; views and empty tensors among them.
MOST_OPERATORS = {"mixtral": (25, 24), "qwen3_moe": (23, 22), "deepseek_v3": (48, 44)}


@pytest.mark.parametrize("model", CONFIGS)
@on_ranks(1)
def test_a_step_needs_few_operators(me: Rank, model: str) -> None:
    with joined() as comm, torch.inference_mode():
        sizes = {"max_tokens_per_rank": 16, "decode_tokens": MOST, "dtype": torch.float32}
        layer = xd.model_layer(CONFIGS[model], comm=comm, **sizes).eval()
        x = normal(14, 4, HIDDEN)
        for decode, most in zip((False, True), MOST_OPERATORS[model], strict=True):
            before, after = ["prepare", "dispatch"], ["combine"]
            if decode:
                before, after = ["ll_dispatch"], ["ll_combine"]
            ours = [*before, "grouped_mm", "gated", "grouped_mm", *after]
            with Dispatched() as seen, direct_calls() as called:
                layer(x, decode=decode)
            assert len(seen.names) <= most, seen.names
            names = [name.split(".") for name in seen.names]
            assert [name for space, name, _ in names if space == "crossdock"] == ours
            assert not called
            with direct_calls() as called:  # nothing of torch looks
                layer(x, decode=decode)
            assert called == ours
