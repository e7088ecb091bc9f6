"""Products of spread matrices under torch.compile(fullgraph=True), and torch's checks of them."""

from __future__ import annotations

import itertools
import pathlib

import pytest
import torch
from torch.nn import functional as F

import crossdock.torch as xd
from crossdock.errors import Mismatch
from crossdock.torch import _handles, tp
from support import Rank, on_ranks
from torch_support import settle
from tp_support import context, equal, rows_of, whole

OPS = torch.ops.crossdock
SEED = 1700
HIDDEN, INNER = 8, 16


class Block:
    """A column-parallel product, ReLU, a row-parallel one: on ranks, and by one process."""

    def __init__(self, me: Rank, tokens: tuple[int, ...], seed: int) -> None:
        self.tokens, self.own = tokens, rows_of(tokens, me.rank)
        self.x = whole(seed, sum(tokens), HIDDEN)
        self.w_in = whole(seed + 1, INNER * me.num_ranks, HIDDEN)
        self.w_out = whole(seed + 2, HIDDEN, INNER * me.num_ranks)
        self.share = slice(me.rank * INNER, (me.rank + 1) * INNER)
        self.leaves = [
            part.clone().requires_grad_()
            for part in (self.x[self.own], self.w_in[self.share], self.w_out[:, self.share])
        ]

    def check(self, out: torch.Tensor, scale: float = 1) -> None:
        full = [part.clone().requires_grad_() for part in (self.x, self.w_in, self.w_out)]
        x, w_in, w_out = full
        want = F.linear(F.relu(F.linear(2 * x, w_in)), w_out) + x
        (scale * want.sum()).backward()
        equal("out", out, want[self.own])
        places = (self.own, self.share, (slice(None), self.share))
        for name, leaf, whole_leaf, place in zip("x in out".split(), self.leaves, full, places):
            equal(f"gradient of {name}", leaf.grad, whole_leaf.grad[place])
            leaf.grad = None


def block_of(where: tp.TpContext, save_gathered: bool = True):
    def block(x, w_in, w_out, tokens):
        inner = tp.all_gather_matmul(
            2 * x,
            w_in.t(),
            where,
            activation="relu",
            tokens_per_rank=tokens,
            save_gathered=save_gathered,
        )
        return tp.matmul_reduce_scatter(inner, w_out.t(), where, tokens_per_rank=tokens) + x

    return block


# 0 and 1 are special to the compiler, and a second number makes it compile for any.
STEPS = [(5, 0), (4, 3), (1, 7), (0, 1), (6, 9)]


@on_ranks(2, timeout=200)
def test_a_block_compiles_for_any_tokens(me: Rank) -> None:
    torch._dynamo.reset()
    with xd.init():
        where = context((16,), INNER, torch.float32)
        for save_gathered in (True, False):
            compiled = torch.compile(
                block_of(where, save_gathered), fullgraph=True, backend="aot_eager"
            )
            for number, tokens in enumerate(STEPS if save_gathered else STEPS[:2]):
                block = Block(me, tokens[: me.num_ranks], SEED + 10 * number)
                out = compiled(*block.leaves, list(block.tokens))
                out.sum().backward()
                settle(where)
                block.check(out)


@on_ranks(2, timeout=400)
def test_inductor_leaves_out_nothing_on_a_rank_without_tokens(me: Rank) -> None:
    """Also on a rank whose results have no elements, and which therefore could leave them out."""
    torch._dynamo.reset()
    tokens = (6, 0)[: me.num_ranks]
    with xd.init():
        where = context(tokens, INNER, torch.float32)
        block = Block(me, tokens, SEED)
        main = torch.ones_like(block.leaves[1], requires_grad=False)

        @torch.compile(fullgraph=True, backend="inductor")
        def both(x, w_in, w_out, main):
            """One of the weight gradients is added to main_grad by the backward pass."""
            given = {"tokens_per_rank": tokens}
            inner = tp.all_gather_matmul(x + x, w_in.t(), where, main_grad=main, **given).relu()
            return tp.matmul_reduce_scatter(inner, w_out.t(), where, **given) + x

        for step in (1, 2):
            out = both(*block.leaves, main)
            out.sum().backward()
            settle(where)
            block.leaves[1].grad = (main - 1) / step
            block.check(out)


def hits_of_caches() -> int:
    """How many compiled programs this process has found in torch's persistent caches."""
    counters = torch._dynamo.utils.counters
    return (
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )


@on_ranks(2, timeout=400)
def test_ranks_share_a_cache_of_compiled_programs(me: Rank, tmp_path: pathlib.Path) -> None:
    """Of an earlier run too each rank finds the program for its own rows, and no other."""
    tokens = (3, 1)[: me.num_ranks]
    a, weight = whole(1, sum(tokens), HIDDEN), whole(2, HIDDEN, HIDDEN)
    want = (me.num_ranks * (a @ weight.t()) @ weight)[rows_of(tokens, me.rank)]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        for found in (0, 1):
            # Nothing that a process knows of an earlier run; its handles are numbered alike.
            torch._dynamo.reset()
            patch.setattr(_handles, "_numbers", itertools.count(1 << 20))
            before = hits_of_caches()
            with xd.init():
                where = context(tokens, INNER, torch.float32)
                call = torch.compile(
                    # No code in C++, whose compiler takes longer than all the rest.
                    lambda a, w, where=where: (
                        tp.matmul_reduce_scatter(a, w.t(), where, tokens_per_rank=tokens) @ w
                    ),
                    fullgraph=True,
                )
                equal("result", call(a, weight), want)
                settle(where)
            assert hits_of_caches() - before >= found


@on_ranks(2, timeout=200)
def test_mistakes_inside_compiled_code_reach_the_peers(me: Rank) -> None:
    """Checks run where operations run, so that peers hear of mistakes inside compiled code too."""
    torch._dynamo.reset()
    with xd.init(), torch.no_grad():
        where = context((4,), INNER, torch.float32)
        x, weight = whole(1, 4, HIDDEN), whole(2, INNER, HIDDEN)
        call = torch.compile(
            lambda x, w: tp.all_gather_matmul(x, w.t(), where), fullgraph=True, backend="aot_eager"
        )
        want = call(x, weight)
        if me.num_ranks > 1 and x.device.type == "cpu":
            kind, words = (ValueError, "a: has 5 tokens") if me.rank == 0 else (Mismatch, "rank 0")
            with pytest.raises(kind, match=words):
                call(whole(1, 5, HIDDEN) if me.rank == 0 else x, weight)
        equal("again", call(x, weight), want)


@pytest.fixture
def alone():
    with xd.init():
        yield context((8,), 16, torch.float32)


@pytest.mark.parametrize(
    "name", ["tp_all_gather_matmul", "tp_matmul_reduce_scatter", "tp_matmul_all_reduce"]
)
def test_opcheck_of_products(alone, name):
    bias = whole(3, 8).requires_grad_()
    tokens = None if name == "tp_matmul_all_reduce" else [4]
    for b in (whole(2, 8, 16).requires_grad_().t(), whole(2, 16, 8).requires_grad_()):
        keep = name == "tp_all_gather_matmul"
        a = whole(1, 4, 16).requires_grad_()
        for options in ((tokens, 3, 0, keep, 7), (None, 0, 0, False, 3)):
            torch.library.opcheck(
                getattr(OPS, name).default,
                (a, b, bias, None, alone.order, alone.handle, *options),
            )


def test_opcheck_of_others(alone):
    a, b = whole(1, 4, 16), whole(2, 8, 16).t()
    leaf = a.clone().requires_grad_()
    torch.library.opcheck(
        OPS.tp_replicated_matmul.default, (leaf, b, None, None, alone.order, alone.handle, 1)
    )
    total = torch.zeros(4, 8, device=a.device)
    for options in ((a, b, None), (None, None, None), (a, b, total)):
        for reduces in (False, True):
            torch.library.opcheck(
                OPS.tp_bulk.default,
                (a, *options, alone.order, alone.handle, None, reduces),
            )


def test_opcheck_of_fp8(alone):
    fp8, numbers = torch.float8_e4m3fn, whole(1, 1)
    a, b = whole(1, 16, 16).to(fp8)[:8], whole(2, 16, 16).to(fp8).t()
    torch.library.opcheck(
        OPS.tp_scaled_matmul.default,
        (
            *(a, b, numbers, numbers, None, None, alone.order, alone.handle),
            *(None, 16, 0, 0, True, torch.bfloat16, False),
        ),
        # torch compares no values in fp8, which the others do.
        test_utils=("test_autograd_registration", "test_faketensor"),
    )


def test_second_derivatives_are_refused(alone):
    x, w = whole(1, 4, 16).requires_grad_(), whole(2, 8, 16).requires_grad_()
    out = OPS.tp_all_gather_matmul(
        x, w.t(), None, None, alone.order, alone.handle, None, 0, 0, True, 3
    )[0]
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="expected first derivatives only"):
        grad.sum().backward()
