"""Gradients on every rank, through layers, scan, remat and copies of plans."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossdock.jax as xd
from jax_support import (
    EXPERTS,
    HIDDEN,
    RANKS,
    TOPK,
    Batch,
    World,
    config_of,
    everywhere,
    routing,
    whole,
)

TOKENS = 13


@everywhere
@pytest.mark.parametrize("layout, kind", [("expert_major", "skewed"), ("rank_major", "uniform")])
def test_every_choice_has_its_own_weight_gradient(world: World, layout: str, kind: str) -> None:
    """loss = sum(c * y), experts square their rows: everything is whole numbers, so exact."""
    config = config_of(TOKENS, layout=layout)
    batch = Batch(51, TOKENS, kind=kind)
    ids, x = batch.ids, batch.x
    c = whole(np.random.default_rng(52), TOKENS, HIDDEN)

    def layer(ids, x, weights):
        plan = xd.ep_prepare(config, ids)
        received = xd.ep_dispatch(plan, x, weights)
        if config.rank_major:  # a row stands for all its choices here
            rows = received.tokens**2 * received.weights.sum(-1, keepdims=True)
            return xd.ep_combine(received.plan, rows)[0]
        return xd.ep_combine(received.plan, received.tokens**2, received.weights)[0]

    def gradients(ids, x, weights, c):
        return jax.grad(lambda x, w: (layer(ids, x, w) * c).sum(), (0, 1))(x, weights)

    arrays = *batch.on(world), world.put(c)
    for checked in (True, False):
        grad_x, grad_weights = world.on_ranks(gradients, check_vma=checked)(*arrays)
        world.equal(grad_x, lambda rank: 2 * x[rank] * c[rank] * batch.factors(rank))
        per_choice = [(x[r] ** 2 * c[r]).sum(1, keepdims=True) for r in range(RANKS)]
        world.equal(
            grad_weights, lambda rank: np.where(ids[rank] < 0, np.float32(0), per_choice[rank])
        )


def reference_layers(
    ids: list[np.ndarray], x: np.ndarray, weights: np.ndarray, scales: np.ndarray
) -> Any:
    """One rank's tokens through the layers: expert e of a layer scales by its scales[layer, e]."""
    for layer in range(len(ids)):
        chosen = jnp.where(ids[layer] < 0, 0.0, weights * scales[layer][ids[layer]])
        x = x + jnp.sin(x) * chosen.sum(1, keepdims=True)
    return x


def layer_of(config: xd.EpConfig, ids: Any, x: Any, weights: Any, scales: Any) -> Any:
    """The layer on the ranks; scales ``[L]`` belong to the rank's experts."""
    plan = xd.ep_prepare(config, ids)
    tokens, weights, _, plan = xd.ep_dispatch(plan, x, weights)
    rows = jnp.sin(tokens) * scales[plan.row_experts()][:, None]
    return x + xd.ep_combine(plan, rows, weights)[0]


@everywhere
@pytest.mark.parametrize("how", ["loop", "scan", "remat"])
def test_layers(world: World, how: str) -> None:
    """Each layer has routing of its own, so a plan taken for another's shows."""
    config = config_of(TOKENS, alignment=4)
    rng = np.random.default_rng(61)
    depth = 3
    ids = [routing(62 + layer, TOKENS, EXPERTS, TOPK, "skewed") for layer in range(depth)]
    x = [rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32) for _ in range(RANKS)]
    weights = [rng.random((TOKENS, TOPK), np.float32) for _ in range(RANKS)]
    scales = rng.random((depth, EXPERTS), np.float32)

    def step(x, layer):
        return layer_of(config, layer["ids"], x, layer["weights"], layer["scales"]), None

    def model(x, weights, ids, scales):
        stacked = {
            "ids": ids[0],
            "scales": scales[0],
            "weights": jnp.broadcast_to(weights, (depth, *weights.shape)),
        }
        if how == "loop":
            for layer in range(depth):
                x, _ = step(x, jax.tree.map(lambda part: part[layer], stacked))
            return x
        body = jax.checkpoint(step) if how == "remat" else step
        return jax.lax.scan(body, x, stacked)[0]

    def gradients(x, weights, ids, scales):
        def loss(x, weights, scales):
            y = model(x, weights, ids, scales)
            return (y**2).sum(), y

        return jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, scales)

    local = EXPERTS // RANKS
    arrays = [
        world.put(x),
        world.put(weights),
        world.put([np.stack([ids[d][r] for d in range(depth)])[None] for r in range(RANKS)]),
        world.put([scales[None, :, r * local : (r + 1) * local] for r in range(RANKS)]),
    ]
    (grad_x, grad_weights, grad_scales), y = world.on_ranks(gradients)(*arrays)

    def reference(x, weights, scales):
        ys = [reference_layers([i[r] for i in ids], x[r], weights[r], scales) for r in range(RANKS)]
        return sum((y**2).sum() for y in ys), ys

    (gx, gw, gs), ys = jax.jit(jax.grad(reference, (0, 1, 2), has_aux=True))(x, weights, scales)
    for got, expected in ((y, ys), (grad_x, gx), (grad_weights, gw)):
        for rank, part in world.parts(got).items():
            np.testing.assert_allclose(part, expected[rank], rtol=2e-5, atol=2e-5)
    for rank, part in world.parts(grad_scales).items():
        np.testing.assert_allclose(
            part[0], gs[:, rank * local : (rank + 1) * local], rtol=1e-4, atol=1e-4
        )


@everywhere
def test_plans_are_ordinary_arrays(world: World) -> None:
    """Plans through jit's boundary, donated, copied, and stacked as residuals."""
    config = config_of(TOKENS)
    batches = [Batch(71 + n, TOKENS) for n in range(2)]
    make = world.on_ranks(lambda ids: xd.ep_prepare(config, ids))
    plans = [make(world.put(batch.ids)) for batch in batches]
    copies = jax.tree.map(lambda array: array + 0, plans)
    for array in jax.tree.leaves(plans):
        array.delete()

    def use(plan, x, weights):
        tokens, weights, _, plan = xd.ep_dispatch(plan, x, weights)
        return xd.ep_combine(plan, tokens, weights)[0]

    spec = jax.sharding.PartitionSpec("ep")
    mapped = jax.shard_map(
        lambda plan, x, w: (jax.grad(lambda x: use(plan, x, w).sum())(x), plan),
        mesh=world.mesh,
        in_specs=spec,
        out_specs=spec,
    )
    donating = jax.jit(mapped, donate_argnums=0)
    for plan, batch in zip(reversed(copies), reversed(batches)):  # the older one last
        for _ in range(2):
            grad, plan = donating(plan, *batch.on(world)[1:])
            world.equal(grad, lambda rank: np.broadcast_to(batch.factors(rank), (TOKENS, HIDDEN)))


@everywhere
def test_no_tail_reaches_a_gradient(world: World) -> None:
    """Experts that turn zero rows into infinities: rows past the last one reach no gradient."""
    config = config_of(TOKENS, alignment=8)
    ids = [np.full((TOKENS, TOPK), -1, np.int32) for _ in range(RANKS)]
    for part in ids:
        part[0, 0] = 1
    x = [np.ones((TOKENS, HIDDEN), np.float32) for _ in range(RANKS)]

    def gradient(ids, x):
        def loss(x):
            tokens, _, _, plan = xd.ep_dispatch(xd.ep_prepare(config, ids), x)
            return xd.ep_combine(plan, 1 / tokens)[0].sum()

        return jax.grad(loss)(x)

    grad = world.on_ranks(gradient)(world.put(ids), world.put(x))
    expected = np.zeros((TOKENS, HIDDEN), np.float32)
    expected[0] = -1
    world.equal(grad, lambda rank: expected)
