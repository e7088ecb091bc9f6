"""8-bit rows: quantised on the way with a straight-through gradient, or given with their scales."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossdock.jax as xd
from jax_support import (
    EXPERTS,
    RANKS,
    TOPK,
    Batch,
    World,
    config_of,
    equal,
    everywhere,
    ranked,
    routing,
    whole,
)
from reference import QUANTISE_WAYS, Routing, quantised as rule

HIDDEN, TOKENS = 256, 7
LAYOUTS = ("expert_major", "rank_major")


def tailed(world: World, config: xd.EpConfig, rows: np.ndarray) -> np.ndarray:
    """The rows of a receive array with its zero tail, as float32."""
    padding = world.ep.group(config).rows - len(rows)
    return np.pad(rows.astype(np.float32), ((0, padding), (0, 0)))


def rows_of(layout: str) -> xd.EpConfig:
    return config_of(TOKENS, layout=layout, hidden=HIDDEN, dtype=jnp.bfloat16)


WAYS = [
    *itertools.product(("devices", "processes"), LAYOUTS, ["fp8_block128"]),
    *(("devices", "expert_major", name) for name in QUANTISE_WAYS if name != "fp8_block128"),
]


@pytest.mark.parametrize("where, layout, name", WAYS)
@ranked
def test_quantised_rows_and_their_gradient(world: World, layout: str, name: str) -> None:
    config = rows_of(layout)
    ids = routing(131, TOKENS, EXPERTS, TOPK, "skewed")
    expected = Routing(ids, EXPERTS, layout)
    rng = np.random.default_rng(132)
    x = [rng.normal(size=(TOKENS, HIDDEN)).astype(jnp.bfloat16) for _ in range(RANKS)]
    elements, scales = (list(values) for values in zip(*(rule(part, name) for part in x)))
    block = QUANTISE_WAYS[name][0]
    # Small whole numbers: sums of a few are exact in bfloat16.
    rows = world.ep.group(config).rows
    grads = [rng.integers(-3, 4, (rows, HIDDEN)).astype(np.float32) for _ in range(RANKS)]

    def wide(ids, x, grad):
        received = xd.ep_dispatch(xd.ep_prepare(config, ids), x, quantise=name).tokens
        return (received.dequantise(np.float32) * grad).sum(), received

    def both(ids, x, grad):
        slope, received = jax.grad(wide, 1, has_aux=True)(ids, x, grad)
        parts = (part.astype(np.float32) for part in (received.elements, received.scales))
        return slope, *parts, received.dequantise()

    slope, got, beside, product = world.on_ranks(both)(*map(world.put, (ids, x, grads)))
    sent = [expected.dispatch(r, elements).astype(np.float32) for r in range(RANKS)]
    factors = [expected.dispatch(r, scales).astype(np.float32) for r in range(RANKS)]
    world.equal(got, lambda r: tailed(world, config, sent[r]))
    scales_of = {r: part[: len(sent[r])] for r, part in world.parts(beside).items()}
    equal(scales_of, lambda r: factors[r])
    rounded = [(s * f.repeat(block, 1)).astype(jnp.bfloat16) for s, f in zip(sent, factors)]
    equal(
        {r: part.astype(np.float32) for r, part in world.parts(product).items()},
        lambda r: tailed(world, config, rounded[r]),
    )
    back = [grad[: len(s)].astype(jnp.bfloat16) for grad, s in zip(grads, sent)]
    world.equal(slope, lambda r: expected.combine(r, back))


@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_scales_travel_with_their_rows(world: World, layout: str) -> None:
    """Scales travel with their rows; weights have a gradient although the rows have none."""
    config = rows_of(layout)
    ids = routing(141, TOKENS, EXPERTS, TOPK, "uniform")
    expected = Routing(ids, EXPERTS, layout)
    rng = np.random.default_rng(142)
    elements, scales = (list(v) for v in zip(*(rule(w) for w in whole(rng, TOKENS, HIDDEN))))
    weights = whole(rng, TOKENS, TOPK)

    def send(ids, elements, scales, weights):
        plan = xd.ep_prepare(config, ids)
        received = xd.ep_dispatch(plan, xd.QuantisedRows(elements, scales), weights)
        assert received.tokens.link is None
        return (received.weights**2).sum() / 2, received.tokens.dequantise(np.float32)

    gradients = world.on_ranks(jax.grad(send, 3, has_aux=True))
    slope, rows = gradients(*map(world.put, (ids, elements, scales, weights)))
    products = [e.astype(np.float32) * s.repeat(128, 1) for e, s in zip(elements, scales)]
    world.equal(rows, lambda r: tailed(world, config, expected.dispatch(r, products)))
    kept = [expected.dispatch_weights(r, weights) for r in range(RANKS)]
    world.equal(slope, lambda r: expected.dispatch_bwd_weights(r, kept))


@everywhere
def test_rows_of_8_bit_integers(world: World) -> None:
    """8-bit integers move as they are; a loss on their weights alone leaves them alone."""
    config = rows_of("expert_major")
    batch = Batch(151, TOKENS, hidden=HIDDEN, dtype=np.int8)
    expected = Routing(batch.ids, EXPERTS)

    def send(ids, x):
        return xd.ep_dispatch(xd.ep_prepare(config, ids), x).tokens

    for function in (world.on_ranks(send), jax.jit(send)):
        rows = function(*batch.on(world)[:2])
        world.equal(
            rows, lambda r: tailed(world, config, expected.dispatch(r, batch.x)).astype(np.int8)
        )


def narrow(x: np.ndarray, columns: int) -> np.ndarray:
    return x[:, :columns].astype(jnp.bfloat16)


def given_as(x: np.ndarray, scales: np.ndarray) -> xd.QuantisedRows:
    return xd.QuantisedRows(x.astype(np.int8), scales)


@pytest.mark.parametrize(
    "tokens, quantise, error, text",
    [
        (lambda x, s: narrow(x, 96), True, ValueError, "bfloat16 with a multiple of 128 columns"),
        (lambda x, s: narrow(x, 48), "mxfp8", ValueError, "bfloat16 with a multiple of 32 columns"),
        (lambda x, s: x, "fp4", ValueError, "quantise: expected .*mxfp8, got 'fp4'"),
        (lambda x, s: x, 3, TypeError, "quantise: expected a bool or a str, got"),
        (lambda x, s: x, True, ValueError, "to be quantised; got float16"),
        (xd.QuantisedRows, False, TypeError, "tokens.elements: exp.* 8-bit"),
        (
            lambda x, s: given_as(x, s.astype(np.float16)),
            False,
            TypeError,
            "tokens.scales: expected float32, float8_e8m0fnu or uint8, got float16",
        ),
        (
            lambda x, s: given_as(x, s[:RANKS]),
            False,
            ValueError,
            "tokens.scales: expected a rank's part with shape",
        ),
    ],
)
def test_arguments_that_do_not_fit(world, tokens, quantise, error, text):
    plan = xd.ep_prepare(rows_of("expert_major"), np.zeros((RANKS * TOKENS, 1), np.int32))
    rows = np.zeros((RANKS * TOKENS, HIDDEN), np.float16)
    with pytest.raises(error, match=text):
        wrong = tokens(rows, np.ones((len(rows), 2), np.float32))
        xd.ep_dispatch(plan, wrong, quantise=quantise)


def test_scales_for_no_whole_number_of_columns():
    bad = xd.QuantisedRows(jnp.zeros((2, 8), np.int8), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="a divisor of 8 columns"):
        bad.dequantise()
