"""An MLP whose tokens and weights are spread over devices, trained, and compared with plain JAX."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # where there is no GPU

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from crossdock.jax import tp

HIDDEN, INNER, BATCH, LENGTH = 32, 128, 4, 16

mesh = jax.make_mesh((2, 2), ("data", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
tp.init(mesh, "tp", data_axes="data")


def mlp(params, x):  # x [batch, length, hidden], its length split over "tp"
    gate = tp.all_gather_matmul(x, params["gate"], activation="gelu", gather_dim=1)
    # Nothing but `after` says which of the two comes first.
    up = tp.all_gather_matmul(x, params["up"], gather_dim=1, after=gate)
    # The inner dimension is split now, and every rank has all of the length.
    hidden = gate.out * up.out
    return tp.matmul_reduce_scatter(hidden, params["down"], bias=params["bias"], scatter_dim=1).out


def plain(params, x):
    gate = jax.nn.gelu(x @ params["gate"], approximate=True)
    return (gate * (x @ params["up"])) @ params["down"] + params["bias"]


PLACES = {"gate": P(None, "tp"), "up": P(None, "tp"), "down": P("tp"), "bias": P()}
keys = jax.random.split(jax.random.key(1), 4)
start = {
    "gate": jax.random.normal(keys[0], (HIDDEN, INNER)) / 6,
    "up": jax.random.normal(keys[1], (HIDDEN, INNER)) / 6,
    "down": jax.random.normal(keys[2], (INNER, HIDDEN)) / 12,
    "bias": jnp.zeros(HIDDEN),
}
tokens = jax.random.normal(keys[3], (BATCH, LENGTH, HIDDEN))


def trained(layer, params, x):
    """The losses of a few steps, the first step's gradients, and the text of its program."""

    @jax.jit
    def step(params, x):
        def loss(params):
            return jnp.mean((layer(params, x) - x[..., ::-1]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return value, gradients, jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients)

    program = step.lower(params, x).compile().as_text()
    value, first, params = step(params, x)
    losses = [float(value)]
    for _ in range(40):
        value, _, params = step(params, x)
        losses.append(float(value))
    return losses, first, program


with jax.default_matmul_precision("float32"):
    expected, wanted, _ = trained(plain, start, tokens)
spread = {name: jax.device_put(start[name], NamedSharding(mesh, PLACES[name])) for name in start}
x = jax.device_put(tokens, NamedSharding(mesh, P("data", "tp")))
losses, gradients, program = trained(mlp, spread, x)

for name in start:
    np.testing.assert_allclose(gradients[name], wanted[name], rtol=1e-4, atol=1e-6)
np.testing.assert_allclose(losses, expected, rtol=1e-4)
assert "all-gather(" not in program and "reduce-scatter(" not in program
print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; agrees with plain JAX")
