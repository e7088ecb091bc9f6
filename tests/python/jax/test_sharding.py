"""Arrays that lie on the mesh otherwise than the operations take them are refused, not moved."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import crossdock.jax as xd
import jax_support as support
from jax_support import HIDDEN, RANKS, config_of

TOKENS, TOPK = 32, 4
ALONG = P(("data", "expert"))
WRONG = [P(), P(None, "expert")]
if RANKS > 2:  # else "data" is of length 1, and ranks along "expert" are all
    WRONG += [
        P("expert"),
        P("data"),
        P(("expert", "data")),
        P("data", "expert"),
        P(None, ("data", "expert")),
    ]


def make_mesh() -> Mesh:
    mesh = Mesh(np.array(jax.devices()[:RANKS]).reshape(-1, 2), ("data", "expert"))
    xd.init(mesh, "expert", data_axes="data")
    return mesh


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh()


CONFIG = config_of(TOKENS // RANKS, max_topk=TOPK)


def arrays(mesh: Mesh, **specs: P) -> dict[str, jax.Array]:
    """topk_idx, x, topk_weights, along the token axes except those in `specs`."""
    host = {
        "topk_idx": np.tile(np.int32([0, 3, 5, 6]), (TOKENS, 1)),
        "tokens": np.ones((TOKENS, HIDDEN), np.float32),
        "topk_weights": np.ones((TOKENS, TOPK), np.float32),
    }
    return {
        name: jax.device_put(array, NamedSharding(mesh, specs.get(name, ALONG)))
        for name, array in host.items()
    }


def round_trip(topk_idx, tokens, topk_weights):
    return support.round_trip(CONFIG, topk_idx, tokens, topk_weights)


def refusal(name: str, spec: P) -> str:
    return re.escape(f"{name}: expected {ALONG}, ") + ".*" + re.escape(f"got {spec}")


@pytest.mark.parametrize("name", ["topk_idx", "tokens", "topk_weights"])
@pytest.mark.parametrize("spec", WRONG, ids=str)
def test_arrays_that_lie_otherwise_are_refused(mesh, name, spec):
    given = arrays(mesh, **{name: spec})
    with pytest.raises(ValueError, match=refusal(name, spec)):
        round_trip(**given)
    with pytest.raises(jax.errors.JaxRuntimeError, match=refusal(name, spec)):
        jax.jit(round_trip)(**given)


def test_refused_gradients_too(mesh):
    given = arrays(mesh, tokens=P(None, "expert"))
    gradient = jax.jit(jax.grad(lambda x, i, w: round_trip(i, x, w).sum()))
    with pytest.raises(jax.errors.JaxRuntimeError, match=refusal("tokens", P(None, "expert"))):
        gradient(given["tokens"], given["topk_idx"], given["topk_weights"])


def test_constraint_splits_what_a_program_computes(mesh):
    given = arrays(mesh, tokens=P(None, "expert"))

    def constrained(topk_idx, tokens, topk_weights):
        tokens = jax.lax.with_sharding_constraint(tokens, NamedSharding(mesh, ALONG))
        return round_trip(topk_idx, tokens, topk_weights)

    np.testing.assert_array_equal(jax.jit(constrained)(**given), np.full((TOKENS, HIDDEN), TOPK))


def test_arrays_that_are_nowhere_yet_are_split(mesh):
    host = {name: np.asarray(array) for name, array in arrays(mesh).items()}
    out = round_trip(**host)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, ALONG), 2)
    np.testing.assert_array_equal(out, np.full((TOKENS, HIDDEN), TOPK))


def eager(function):
    return function


def of_jax(array: np.ndarray) -> jax.Array:
    """On one device, but not committed to it."""
    return jax.numpy.asarray(array)


@pytest.mark.parametrize(
    "how, kind",
    [
        (eager, np.asarray),
        (eager, of_jax),
        (jax.jit, np.asarray),
        (jax.jit, of_jax),
        (jax.checkpoint, of_jax),
    ],
)
def test_derivatives_of_arrays_that_are_nowhere_yet(mesh, how, kind):
    host = {name: kind(np.asarray(array)) for name, array in arrays(mesh).items()}

    def loss(x, topk_idx, topk_weights):
        out = round_trip(topk_idx, x, topk_weights)
        return (out * out).sum() / 2

    grad = jax.grad(how(loss), (0, 2))
    grad_x, grad_weights = grad(host["tokens"], host["topk_idx"], host["topk_weights"])
    np.testing.assert_array_equal(grad_x, np.full((TOKENS, HIDDEN), TOPK * TOPK))
    np.testing.assert_array_equal(grad_weights, np.full((TOKENS, TOPK), TOPK * HIDDEN))


@pytest.mark.parametrize("spec", WRONG, ids=str)
def test_eager_derivatives_of_arrays_that_lie_otherwise_are_refused(mesh, spec):
    given = arrays(mesh, tokens=spec)
    with pytest.raises(ValueError, match=refusal("tokens", spec)):
        jax.grad(lambda x, i, w: round_trip(i, x, w).sum())(
            *(given[name] for name in ("tokens", "topk_idx", "topk_weights"))
        )


@pytest.mark.parametrize(
    "how, error, text",
    [
        (eager, ValueError, "tokens: expected .* got SingleDevice"),
        (jax.checkpoint, Exception, "incompatible devices|DeviceAssignmentMismatch"),  # JAX's own
    ],
)
def test_eager_derivatives_of_an_array_on_one_device_are_refused(mesh, how, error, text):
    given = arrays(mesh)
    x = jax.device_put(np.ones((TOKENS, HIDDEN), np.float32), jax.devices()[0])
    with pytest.raises(error, match=text):
        jax.grad(how(lambda x: round_trip(given["topk_idx"], x, given["topk_weights"]).sum()))(x)


@pytest.mark.parametrize("axis", ["expert", "data"])
def test_shard_map_over_some_axes_is_refused(mesh, axis):
    for checked in (True, False):
        options = {"axis_names": {axis}, "check_vma": checked}
        mapped = jax.shard_map(
            round_trip, mesh=mesh, in_specs=P(axis), out_specs=P(axis), **options
        )
        with pytest.raises(ValueError, match="shard_map: expected one over all axes of the mesh"):
            jax.jit(mapped)(*arrays(mesh).values())


def test_shard_map_over_another_mesh_or_with_tokens_that_are_not_split_is_refused(mesh):
    other = Mesh(mesh.devices.reshape(4, 1), ("data", "expert"))
    for over, text in (
        (other, "expected the mesh of crossdock.jax.init, {'data': 2, 'expert': 2}"),
        (mesh, r"replicated along \('expert',\): name them in in_specs"),
    ):
        mapped = jax.shard_map(round_trip, mesh=over, in_specs=P("data"), out_specs=P("data"))
        for function in (mapped, jax.jit(mapped)):
            with pytest.raises(ValueError, match=text):
                function(*map(np.asarray, arrays(mesh).values()))
