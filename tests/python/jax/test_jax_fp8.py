"""8-bit rows: quantised on the way with a straight-through gradient, or given with their scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossdock.jax as xd
from jax_support import RANKS, World, equal, everywhere, routing, run, whole
from reference import QUANTISE_WAYS, Routing, quantised as rule

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 3, 256, 7
LAYOUTS = ("expert_major", "rank_major")


def tailed(world: World, config: xd.EpConfig, rows: np.ndarray) -> np.ndarray:
    """The rows of a receive array with its zero tail, as float32."""
    padding = world.ep.group(config).rows - len(rows)
    return np.pad(rows.astype(np.float32), ((0, padding), (0, 0)))


def config_of(layout: str) -> xd.EpConfig:
    return xd.EpConfig(
        num_experts=EXPERTS, hidden=HIDDEN, max_topk=TOPK, max_tokens_per_rank=TOKENS, layout=layout
    )


def quantised(world: World, layout: str, name: str = "fp8_block128") -> None:
    config = config_of(layout)
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
    equal(world.parts(got), lambda r: tailed(world, config, sent[r]))
    scales_of = {r: part[: len(sent[r])] for r, part in world.parts(beside).items()}
    equal(scales_of, lambda r: factors[r])
    rounded = [(s * f.repeat(block, 1)).astype(jnp.bfloat16) for s, f in zip(sent, factors)]
    equal(
        {r: part.astype(np.float32) for r, part in world.parts(product).items()},
        lambda r: tailed(world, config, rounded[r]),
    )
    back = [grad[: len(s)].astype(jnp.bfloat16) for grad, s in zip(grads, sent)]
    equal(world.parts(slope), lambda r: expected.combine(r, back))


@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantised_rows_and_their_gradient(where, layout):
    run(where, quantised, layout)


@pytest.mark.parametrize("name", [name for name in QUANTISE_WAYS if name != "fp8_block128"])
def test_other_ways_to_quantise(name):
    run("devices", quantised, "expert_major", name)


def given(world: World, layout: str) -> None:
    """Scales travel with their rows; weights have a gradient although the rows have none."""
    config = config_of(layout)
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
    equal(world.parts(rows), lambda r: tailed(world, config, expected.dispatch(r, products)))
    kept = [expected.dispatch_weights(r, weights) for r in range(RANKS)]
    equal(world.parts(slope), lambda r: expected.dispatch_bwd_weights(r, kept))


@everywhere
@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_scales_travel_with_their_rows(where, layout):
    run(where, given, layout)


def integers(world: World) -> None:
    """8-bit integers move as they are; a loss on their weights alone leaves them alone."""
    config = config_of("expert_major")
    ids = routing(151, TOKENS, EXPERTS, TOPK, "uniform")
    expected = Routing(ids, EXPERTS)
    x = whole(np.random.default_rng(152), TOKENS, HIDDEN, dtype=np.int8)

    def send(ids, x):
        return xd.ep_dispatch(xd.ep_prepare(config, ids), x).tokens

    for function in (world.on_ranks(send), jax.jit(send)):
        rows = function(world.put(ids), world.put(x))
        equal(
            world.parts(rows),
            lambda r: tailed(world, config, expected.dispatch(r, x)).astype(np.int8),
        )


@everywhere
def test_rows_of_8_bit_integers(where):
    run(where, integers)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            lambda x, s: dict(tokens=x[:, :96].astype(jnp.bfloat16), quantise=True),
            ValueError,
            "bfloat16 with a multiple of 128 columns",
        ),
        (
            lambda x, s: dict(tokens=x[:, :48].astype(jnp.bfloat16), quantise="mxfp8"),
            ValueError,
            "bfloat16 with a multiple of 32 columns",
        ),
        (
            lambda x, s: dict(tokens=x, quantise="fp4"),
            ValueError,
            "quantise: expected .*mxfp8, got 'fp4'",
        ),
        (
            lambda x, s: dict(tokens=x, quantise=3),
            TypeError,
            "quantise: expected a bool or a str, got",
        ),
        (lambda x, s: dict(tokens=x, quantise=True), ValueError, "to be quantised; got float16"),
        (
            lambda x, s: dict(tokens=xd.QuantisedRows(x, s)),
            TypeError,
            "tokens.elements: exp.* 8-bit",
        ),
        (
            lambda x, s: dict(tokens=xd.QuantisedRows(x.astype(np.int8), s.astype(np.float16))),
            TypeError,
            "tokens.scales: expected float32, float8_e8m0fnu or uint8, got float16",
        ),
        (
            lambda x, s: dict(tokens=xd.QuantisedRows(x.astype(np.int8), s[:RANKS])),
            ValueError,
            "tokens.scales: expected a rank's part with shape",
        ),
    ],
    ids=[
        "columns",
        "columns of mxfp8",
        "way",
        "way's type",
        "type",
        "elements",
        "scale type",
        "scale rows",
    ],
)
def test_arguments_that_do_not_fit(change, error, text):
    world = World()
    try:
        plan = xd.ep_prepare(config_of("expert_major"), np.zeros((RANKS * TOKENS, 1), np.int32))
        rows = np.zeros((RANKS * TOKENS, HIDDEN), np.float16)
        with pytest.raises(error, match=text):
            xd.ep_dispatch(plan, **change(rows, np.ones((len(rows), 2), np.float32)))
        bad = xd.QuantisedRows(jnp.zeros((2, 8), np.int8), jnp.ones((2, 3)))
        with pytest.raises(ValueError, match="a divisor of 8 columns"):
            bad.dequantise()
    finally:
        world.ep.close()
        jax.clear_caches()
