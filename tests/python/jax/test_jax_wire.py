"""Wires of combine: sums that cross in another form, with the gradient of those that do not."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import crossdock.jax as xd
from jax_support import (
    EXPERTS,
    RANKS,
    TOPK,
    World,
    config_of,
    equal,
    everywhere,
    low_latency_config_of,
    on_devices,
    routing,
)
from reference import Routing

HIDDEN, TOKENS, SEED = 128, 5, 170
WIRES = ("float32", "fp8_block128", "fp8_block128_pow2", "fp8_block128_e8m0")


@everywhere
def test_sums_and_their_gradient(world: World) -> None:
    config = config_of(TOKENS, hidden=HIDDEN, wire_formats=WIRES)
    ids = routing(SEED, TOKENS, EXPERTS, TOPK, "uniform")
    expected = Routing(ids, EXPERTS)
    rng = np.random.default_rng(SEED)
    rows = world.ep.group(config).rows
    outputs = [rng.standard_normal((rows, HIDDEN)).astype(np.float32) for _ in range(RANKS)]
    given = [one[: expected.total(rank)] for rank, one in enumerate(outputs)]
    slopes = {}
    for wire in ("same", *WIRES):

        def combined(ids, rows, wire=wire):
            return xd.ep_combine(xd.ep_prepare(config, ids), rows, wire=wire)[0]

        def slope(ids, rows, wire=wire):
            return jax.grad(lambda rows: (combined(ids, rows, wire) * 3).sum())(rows)

        arrays = world.put(ids), world.put(outputs)
        world.equal(
            world.on_ranks(combined)(*arrays),
            lambda rank, wire=wire: expected.combine(rank, given, None, wire),
        )
        slopes[wire] = world.parts(world.on_ranks(slope)(*arrays))
        equal(slopes[wire], lambda rank: slopes["same"][rank])


@on_devices
def test_few_tokens_whole_and_in_halves(world: World) -> None:
    config = low_latency_config_of(TOKENS, hidden=HIDDEN, receive="by_rank", wire_formats=("fp8",))
    ids = routing(SEED, TOKENS, EXPERTS, TOPK, "uniform")
    expected = Routing(ids, EXPERTS, "rank_major")
    rng = np.random.default_rng(SEED)
    rows = RANKS * TOKENS
    outputs = [rng.standard_normal((rows, HIDDEN)).astype(np.float32) for _ in range(RANKS)]
    given = [one[: expected.total(rank)] for rank, one in enumerate(outputs)]
    tokens = [np.zeros((TOKENS, HIDDEN), np.float32) for _ in range(RANKS)]

    def both(ids, tokens, rows):
        plan = xd.ll_dispatch(config, tokens, ids).plan
        whole, plan = xd.ll_combine(plan, rows, wire="fp8")
        sent = xd.ll_combine_send(plan, rows, wire="fp8")
        return whole, xd.ll_combine_receive(sent)[0]

    results = world.on_ranks(both)(world.put(ids), world.put(tokens), world.put(outputs))
    for out in results:
        world.equal(out, lambda rank: expected.combine(rank, given, None, "fp8_block128"))


def test_a_wire_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="wire_formats: expected one of"):
        config_of(TOKENS, wire_formats=("logfmt",))


def test_a_wire_that_the_group_has_not_is_refused_while_tracing(world: World) -> None:
    """By rows in slots as well, and rows that no scale of fp8 fits."""
    ids = np.concatenate(routing(SEED, TOKENS, EXPERTS, TOPK, "uniform"))
    for sizes in ({"hidden": HIDDEN}, {"hidden": HIDDEN + 64, "wire_formats": ("fp8",)}):
        config, few = config_of(TOKENS, **sizes), low_latency_config_of(TOKENS, **sizes)
        columns = sizes["hidden"]
        plan = xd.ep_prepare(config, ids)
        rows = np.zeros((RANKS * world.ep.group(config).rows, columns), np.float32)
        slots = xd.ll_dispatch(few, np.zeros((RANKS * TOKENS, columns), np.float32), ids)
        lacking = "float32" if "wire_formats" in sizes else "fp8"
        text = rf"wire: expected 'same' or one of .* wire_formats = \(.*\), got '{lacking}'"
        with pytest.raises(ValueError, match=text):
            xd.ep_combine(plan, rows, wire=lacking)
        with pytest.raises(ValueError, match=text):
            xd.ll_combine(slots.plan, slots.tokens, wire=lacking)
    text = "expert_out: expected a multiple of 128 columns with wire = 'fp8', got shape .* 192"
    with pytest.raises(ValueError, match=text):
        xd.ep_combine(plan, rows, wire="fp8")
    with pytest.raises(ValueError, match=text):
        xd.ll_combine(slots.plan, slots.tokens, wire="fp8")
