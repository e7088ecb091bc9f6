"""moe_layer on a mesh against the layer of one device, which shares no code with it."""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import crossdock.jax as xd
from jax_support import EXPERTS, HIDDEN, ON_GPUS, RANKS, TOPK, config_of

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
sys.path[:0] = [str(EXAMPLES / "jax"), str(EXAMPLES / "torch")]  # their settings are shared

from moe_model.plain_layers import plain_moe  # noqa: E402

FFN = 24
SEED = 20
TOKENS = 28
MESHES = [
    ((RANKS,), ("expert",), ()),
    ((RANKS // 2, 2), ("data", "expert"), ("data",)),
    ((2, RANKS // 2), ("expert", "data"), ("data",)),
    ((1, 2, RANKS // 2), ("data", "a", "b"), ("data",)),
]
TOLERANCE = 1e-4 if ON_GPUS else 2e-5


def make_mesh(sizes: tuple[int, ...], names: tuple[str, ...], data: tuple[str, ...]) -> xd.EpMesh:
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    ep_axes = tuple(name for name in names if name not in data)
    return xd.init(Mesh(devices, names), ep_axes, data_axes=data)


def values(*leading: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Parameters, tokens ``[*leading, H]``, gradient of the output; the first expert is liked."""
    rng = np.random.default_rng(SEED)

    def drawn(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    params = {
        "router": drawn(HIDDEN, EXPERTS),
        "experts_in": drawn(EXPERTS, HIDDEN, 2 * FFN),
        "experts_out": drawn(EXPERTS, FFN, HIDDEN),
    }
    params["router"][:, 0] = np.abs(params["router"][:, 0])
    x, grad = (rng.standard_normal((*leading, HIDDEN)).astype(np.float32) for _ in range(2))
    return params, x + 0.5, grad


def close(got, expected, tolerance: float = TOLERANCE) -> None:
    """Compares each device's part, so that a rank's mistake shows, on any rank."""
    expected = np.asarray(expected)
    for shard in got.addressable_shards:
        np.testing.assert_allclose(
            np.asarray(shard.data, np.float32),
            expected[shard.index],
            rtol=tolerance,
            atol=tolerance,
        )


@jax.jit
def plain(params: dict[str, np.ndarray], x: np.ndarray, grad: np.ndarray):
    """(output, loss, load), (gradients of params, of x), of one device."""

    def objective(params, x):
        out, aux_loss, load = plain_moe(params, x, topk=TOPK, aux_loss_weight=0.5)
        return (out * grad).sum() + aux_loss, (out, aux_loss, load)

    gradients, outputs = jax.grad(objective, (0, 1), has_aux=True)(params, x)
    return outputs, gradients


def on_mesh(ep: xd.EpMesh, params, x, grad, layer):
    """The same of ``layer(params, x) -> MoEOutput`` on global arrays."""
    experts = P(ep.ep_axes)
    batch = P(tuple(a for a in ep.mesh.axis_names if a not in ep.ep_axes) + ep.ep_axes)
    place = lambda array, spec: jax.device_put(array, NamedSharding(ep.mesh, spec))  # noqa: E731
    params = xd.MoEParams(
        place(params["router"], P()),
        place(params["experts_in"], experts),
        place(params["experts_out"], experts),
    )

    def objective(params, x, grad):
        out = layer(params, x)
        return (out.hidden * grad).sum() + 0.5 * out.aux_loss, out

    step = jax.jit(jax.grad(objective, (0, 1), has_aux=True))
    gradients, out = step(params, place(x, batch), place(grad, batch))
    of_params = gradients[0]._asdict()
    assert of_params.pop("router_bias") is None  # there is none
    return (out.hidden, 0.5 * out.aux_loss, out.load), (of_params, gradients[1])


def in_a_map(ep: xd.EpMesh, layer: Callable[..., xd.MoEOutput]) -> Callable[..., xd.MoEOutput]:
    """The layer inside of shard_map over axes of data and of experts."""
    along, experts = P(("data", "expert")), P("expert")
    return jax.shard_map(
        layer,
        mesh=ep.mesh,
        in_specs=(xd.MoEParams(P(), experts, experts), along),
        out_specs=xd.MoEOutput(along, P(), P(), along),
    )


@pytest.mark.parametrize(
    "mesh, leading, overlap",
    [
        *zip(MESHES, [(TOKENS,), (4, 7), (4, 3, 2), (TOKENS,)], [False] * 4),
        (MESHES[1], (4, 7), xd.Overlap(3)),
    ],
    ids=str,
)
def test_layer_and_all_gradients_are_those_of_one_device(mesh, leading, overlap):
    batch = values(*leading)
    ep = make_mesh(*mesh)
    config = config_of(int(np.prod(leading)) // RANKS)
    layer = functools.partial(xd.moe_layer, config, overlap=overlap)
    jax.tree.map(close, on_mesh(ep, *batch, layer), plain(*batch))


# The experts in the slots of two ranks, -1 = none: with replicas, and with 7 on one rank.
IN_SLOTS = {
    "replicas": [[*range(6)], [6, 7, 0, 3, -1, 0]],
    "unequal": [[0, 1, 2, 4, 5, 6, 7], [3, -1, -1, -1, -1, -1, -1]],
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", IN_SLOTS)
def test_a_layer_of_experts_in_slots_has_the_gradients_of_one_device(kind, overlap):
    """Gradients of replicas add up to those of their expert. There are axes of data, too."""
    params, x, grad = values(TOKENS)
    ep = make_mesh(*MESHES[1])
    slots = np.ravel(IN_SLOTS[kind])
    if kind == "replicas":
        sizes = {"num_experts": slots.size, "num_logical_experts": EXPERTS}
    else:
        sizes = {"expert_ranks": [int(e == 3) for e in range(EXPERTS)]}
    config = config_of(TOKENS // RANKS, **sizes)
    if kind == "replicas":
        ep.set_placement(config, IN_SLOTS[kind])
    by_slot = {name: array if name == "router" else array[slots] for name, array in params.items()}
    layer = functools.partial(xd.moe_layer, config, overlap=overlap)
    outputs, (of_params, of_x) = on_mesh(ep, by_slot, x, grad, layer)

    wanted_outputs, (wanted, wanted_x) = plain(params, x, grad)
    jax.tree.map(close, outputs, wanted_outputs)
    close(of_x, wanted_x)
    close(of_params["router"], wanted["router"])
    for name in ("experts_in", "experts_out"):
        of_slots, of_experts = np.asarray(of_params[name]), np.zeros_like(params[name])
        np.add.at(of_experts, slots[slots >= 0], of_slots[slots >= 0])
        np.testing.assert_allclose(of_experts, wanted[name], TOLERANCE, TOLERANCE)
        assert not of_slots[slots < 0].any()


def test_layer_inside_shard_map_is_the_layer_on_global_arrays():
    batch = values(TOKENS)
    ep = make_mesh(*MESHES[1])
    config = config_of(TOKENS // RANKS)
    layer = in_a_map(ep, lambda params, x: xd.moe_layer(config, params, x))
    jax.tree.map(close, on_mesh(ep, *batch, layer), plain(*batch))


def test_gradients_outside_jit_of_arrays_that_are_nowhere_yet():
    params, x, grad = values(TOKENS)
    make_mesh(*MESHES[1])
    config = config_of(TOKENS // RANKS)

    def objective(params, x):
        out = xd.moe_layer(config, xd.MoEParams(**params), x)
        return (out.hidden * grad).sum() + 0.5 * out.aux_loss

    got = jax.grad(objective, (0, 1))(jax.tree.map(jnp.asarray, params), jnp.asarray(x))
    jax.tree.map(close, got, plain(params, x, grad)[1])


@pytest.mark.parametrize("overlap", [False, True])
def test_layers_in_scan_with_remat_have_the_gradients_of_one_device(overlap):
    params, x, grad = values(TOKENS)
    stacked = {name: np.stack([array, array[..., ::-1]]) for name, array in params.items()}
    ep = make_mesh(*MESHES[1])
    config = config_of(TOKENS // RANKS)

    def layers(layer, params, x):
        @jax.checkpoint
        def block(x, p):
            return x + layer(p, x), None

        return jax.lax.scan(block, x, params)[0]

    def objective(layer):
        return lambda params, x, grad: (layers(layer, params, x) * grad).sum()

    expected = jax.jit(
        jax.grad(objective(lambda p, x: plain_moe(p, x, topk=TOPK, aux_loss_weight=0)[0]), (0, 1))
    )(stacked, x, grad)
    specs = {name: P() if name == "router" else P(None, "expert") for name in stacked}
    sharded = {
        name: jax.device_put(array, NamedSharding(ep.mesh, specs[name]))
        for name, array in stacked.items()
    }
    along = NamedSharding(ep.mesh, P(("data", "expert")))

    def layer(p, x):
        return xd.moe_layer(config, xd.MoEParams(**p), x, overlap=overlap).hidden

    got = jax.jit(jax.grad(objective(layer), (0, 1)))(
        sharded, jax.device_put(x, along), jax.device_put(grad, along)
    )
    jax.tree.map(close, got, expected)


@pytest.mark.parametrize("mapped", [False, True], ids=["global", "shard_map"])
def test_layers_side_by_side_are_chained(mapped):
    params, x, grad = values(TOKENS)
    ep = make_mesh(*MESHES[1])
    config = config_of(TOKENS // RANKS)

    def both(params, x):
        first = xd.moe_layer(config, params, x)
        second = xd.moe_layer(config, params, -x, after=first.order)
        return second._replace(
            hidden=first.hidden + second.hidden, aux_loss=first.aux_loss + second.aux_loss
        )

    layer = in_a_map(ep, both) if mapped else both
    (out, aux_loss, _), (got, _) = on_mesh(ep, params, x, grad, layer)
    left, right = plain(params, x, grad), plain(params, -x, grad)
    close(out, left[0][0] + right[0][0])
    close(aux_loss, left[0][1] + right[0][1])
    jax.tree.map(lambda got, one, other: close(got, one + other), got, left[1][0], right[1][0])


@pytest.mark.parametrize("overlap", [False, xd.Overlap(EXPERTS // RANKS)])
def test_bfloat16_layer_is_near_float32(overlap):
    batch = values(TOKENS)
    ep = make_mesh(*MESHES[0])
    config = config_of(TOKENS // RANKS, dtype=jnp.bfloat16, alignment=8)
    (out, _, _), _ = on_mesh(
        ep,
        *batch,
        lambda params, x: xd.moe_layer(config, params, x.astype(jnp.bfloat16), overlap=overlap),
    )
    assert out.dtype == jnp.bfloat16
    close(out, plain(*batch)[0][0], tolerance=0.06)


def test_weights_as_the_router_gives_them():
    params, x, grad = values(TOKENS)
    ep = make_mesh(*MESHES[0])
    options = {"router": xd.RouterOptions(normalize=False)}
    layer = functools.partial(xd.moe_layer, config_of(TOKENS // RANKS), **options)
    (got, _, _), _ = on_mesh(ep, params, x, grad, layer)
    odds = jax.nn.softmax(x @ params["router"])
    kept = jax.lax.top_k(odds, TOPK)[0].sum(-1, keepdims=True)
    close(got, kept * plain(params, x, grad)[0][0])


def test_what_does_not_fit_is_named():
    params, x, _ = values(TOKENS)
    ep = make_mesh(*MESHES[1])
    layer = xd.MoEParams(**params)
    config = config_of(TOKENS // RANKS)
    by_rank = config_of(TOKENS // RANKS, layout="rank_major")
    wrong = jax.device_put(x, NamedSharding(ep.mesh, P("expert")))
    few, narrow = params["router"][:, :4], params["experts_in"][:, :, :24]
    for text, given in (
        ("layout 'expert_major', got 'rank_major'", (by_rank, layer, x)),
        (
            r"params.router: expected shape \(16, 8\) on a rank, got \(16, 4\)",
            (config, layer._replace(router=few), x),
        ),
        (
            r"params.experts_in: expected shape \(4, 16, 48\)",
            (config, layer._replace(experts_in=narrow), x),
        ),
        (
            r"x: .*multiple of 4, the ranks along \('data', 'expert'\), got shape \(27, 16\)",
            (config, layer, x[:27]),
        ),
        (
            r"x: expected P\(\('data', 'expert'\),\), .*; got P\('expert'",
            (config, layer, wrong),
        ),
    ):
        with pytest.raises(ValueError, match=text):
            xd.moe_layer(*given)
