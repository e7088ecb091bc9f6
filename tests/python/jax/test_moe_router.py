"""The router's choices of moe_layer, against formulas on one device, and by hand-made numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import crossdock.jax as xd
from jax_support import EXPERTS, RANKS, TOPK, config_of
from test_moe import MESHES, TOKENS, close, make_mesh, values

GROUPS, TOPK_GROUPS, SCALE = 4, 2, 2.5
OPTIONS = xd.RouterOptions("sigmoid", True, SCALE, GROUPS, TOPK_GROUPS, "top2", bias=True)
BIAS = np.linspace(-0.3, 0.3, EXPERTS, dtype=np.float32)


def chosen_experts(params, x):
    """[T,E] bool: of the best groups the best experts, chosen token by token."""
    scores = 1 / (1 + np.exp(-x @ params["router"]))
    chosen = np.zeros(scores.shape, bool)
    size = EXPERTS // GROUPS
    for row, biased in enumerate(scores + BIAS):
        best = np.argsort(-np.sort(biased.reshape(GROUPS, -1))[:, -2:].sum(-1))[:TOPK_GROUPS]
        allowed = [g * size + i for g in best for i in range(size)]
        chosen[row, sorted(allowed, key=lambda e: -biased[e])[:TOPK]] = True
    return chosen


def deepseek_v3(params, x, chosen):
    """arXiv:2412.19437, equations 12 to 16, by every expert for every token; z-loss beside."""
    logits = x @ params["router"]
    scores = jax.nn.sigmoid(logits)
    kept = jnp.where(chosen, scores, 0)
    factors = SCALE * kept / kept.sum(-1, keepdims=True)
    gate, up = jnp.split(jnp.einsum("th,ehf->etf", x, params["experts_in"]), 2, axis=-1)
    results = jnp.einsum("etf,efh->eth", jax.nn.silu(gate) * up, params["experts_out"])
    z = (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()
    probabilities = scores / scores.sum(-1, keepdims=True)
    load = chosen.mean(0) / TOPK
    balance = EXPERTS * load @ probabilities.mean(0)
    return jnp.einsum("te,eth->th", factors, results), balance + 0.25 * z, load


@pytest.mark.parametrize("mesh", [MESHES[0], MESHES[1]], ids=str)
def test_groups_sigmoid_and_bias_are_those_of_one_device(mesh):
    params, x, grad = values(3 * RANKS)
    ep = make_mesh(*mesh)
    config = config_of(3)
    chosen = chosen_experts(params, x)

    def plain_objective(params, x):
        out, aux_loss, load = deepseek_v3(params, x, chosen)
        return (out * grad).sum() + 0.5 * aux_loss, (out, aux_loss, load)

    gradients, expected = jax.jit(jax.grad(plain_objective, (0, 1), has_aux=True))(params, x)
    experts, batch = P(ep.ep_axes), P(ep.mesh.axis_names)
    place = lambda array, spec: jax.device_put(array, NamedSharding(ep.mesh, spec))  # noqa: E731
    layer = xd.MoEParams(
        place(params["router"], P()),
        place(params["experts_in"], experts),
        place(params["experts_out"], experts),
        place(BIAS, P()),
    )

    def objective(params, x, grad):
        out = xd.moe_layer(config, params, x, router=OPTIONS, z_loss_weight=0.25)
        return (out.hidden * grad).sum() + 0.5 * out.aux_loss, out

    step = jax.jit(jax.grad(objective, (0, 1), has_aux=True))
    got, out = step(layer, place(x, batch), place(grad, batch))
    for found, wanted in zip((out.hidden, out.aux_loss, out.load), expected):
        close(found, wanted)
    for name, wanted in gradients[0].items():
        close(getattr(got[0], name), wanted)
    close(got[1], gradients[1])
    assert not np.asarray(got[0].router_bias).any()  # it gets no gradient
    moved = xd.update_router_bias(BIAS, out.load, 0.5)
    np.testing.assert_allclose(moved, BIAS + 0.5 * np.sign(1 / EXPERTS - expected[2]), atol=1e-6)


def test_an_expert_keeps_its_heaviest_tokens():
    idx = jnp.array([[0, 1], [0, 2], [0, -1], [1, 0]])
    weights = jnp.array([[0.2, 0.8], [0.7, 0.3], [0.7, 0.0], [0.6, 0.4]])
    kept = xd.drop_over_capacity(xd.Routing(idx, weights, None), 3, 2)
    assert kept.topk_idx.tolist() == [[-1, 1], [0, 2], [0, -1], [1, -1]]
    np.testing.assert_allclose(kept.topk_weights[0], [0, 0.8])
    one = xd.drop_over_capacity(xd.Routing(idx, weights, None), 3, 1)
    assert one.topk_idx.tolist() == [[-1, 1], [0, 2], [-1, -1], [-1, -1]]


def test_a_capacity_factor_leaves_out_the_lightest():
    params, x, grad = values(TOKENS)  # the first expert is liked
    ep = make_mesh(*MESHES[0])
    tokens = TOKENS // RANKS
    room = xd.capacity_rows(1.0, tokens, TOPK, EXPERTS, RANKS)
    assert room < tokens * RANKS * min(TOPK, EXPERTS // RANKS)
    config = config_of(tokens, recv_capacity=room)  # with overflow="error"
    along = NamedSharding(ep.mesh, P(ep.ep_axes))
    layer = xd.MoEParams(**{k: jnp.asarray(v) for k, v in params.items()})
    limit = lambda p, x: xd.moe_layer(config, p, x, capacity_factor=1.0)  # noqa: E731

    def router(logits):
        routing = xd.route(logits, TOPK)
        return xd.drop_over_capacity(routing, EXPERTS, -(-tokens * TOPK // EXPERTS))

    own = lambda p, x: xd.moe_layer(config, p, x, router=router)  # noqa: E731
    x = jax.device_put(x, along)
    limited, same = jax.jit(limit)(layer, x), jax.jit(own)(layer, x)
    np.testing.assert_allclose(limited.hidden, same.hidden, rtol=2e-5, atol=2e-6)
    free = jax.jit(lambda p, x: xd.moe_layer(config_of(tokens), p, x))(layer, x)
    assert np.abs(np.asarray(free.hidden - limited.hidden)).max() > 1e-3
    np.testing.assert_allclose(limited.load, free.load)  # before any is dropped


def test_what_does_not_fit_is_named():
    params, x, _ = values(TOKENS)
    make_mesh(*MESHES[0])
    layer, config = xd.MoEParams(**params), config_of(TOKENS // RANKS)

    def refused(text: str, layer: xd.MoEParams = layer, **options) -> None:
        with pytest.raises(ValueError, match=text):
            xd.moe_layer(config, layer, x, **options)

    refused("params.router_bias: expected an array, as RouterOptions.bias is set", router=OPTIONS)
    refused("params.router_bias: expected None, got", layer._replace(router_bias=BIAS))
    refused("capacity_factor: expected a positive number, got 0", capacity_factor=0)
    refused("topk: expected 1 to 2,", router=xd.RouterOptions(num_groups=4))
