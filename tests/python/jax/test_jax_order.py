"""Operations that no data orders run in one order on all ranks, and no thread waits for a rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import crossdock.jax as xd
from jax_support import ON_GPUS, Batch, World, config_of, everywhere, in_a_process
from programs import chain_of_calls

TOKENS = 33
CONFIG = config_of(TOKENS)


def delayed(array: jax.Array, steps: int) -> jax.Array:
    """The same array, after work that takes another time on every rank."""
    turns = steps * jax.lax.axis_index("ep")
    spent = jax.lax.fori_loop(0, turns, lambda _, z: jnp.sin(z) + 1, jnp.ones((256,)))
    return array + (spent.sum() > 1e9).astype(array.dtype)


def layer(ids, x, weights, after=None):
    plan = xd.ep_prepare(CONFIG, ids, after=after)
    tokens, weights, _, plan = xd.ep_dispatch(plan, x, weights)
    return xd.ep_combine(plan, tokens**2, weights)


@everywhere
def test_branches_are_one_chain_forward_and_backward(world: World) -> None:
    """Two layers side by side; which one's inputs are ready first differs between the ranks."""
    batches = [Batch(seed, TOKENS) for seed in (82, 83)]

    def both(first, second):
        def loss(x, y):
            one, plan = layer(delayed(first[0], 300), x, first[2])
            other, _ = layer(delayed(second[0], 0), y, second[2], after=plan)
            return one.sum() + other.sum(), (one, other)

        return jax.grad(loss, (0, 1), has_aux=True)(first[1], second[1])

    compiled = world.on_ranks(both, check_vma=False)
    inputs = [batch.on(world) for batch in batches]
    for _ in range(5):
        grads, outs = compiled(*inputs)
        for out, grad, batch in zip(outs, grads, batches):
            world.equal(out, lambda rank: batch.x[rank] ** 2 * batch.factors(rank))
            world.equal(grad, lambda rank: 2 * batch.x[rank] * batch.factors(rank))
    if not ON_GPUS:  # where XLA puts operations into computations of their own
        # Two layers, forward and backward, of which prepare has no backward.
        assert len(chain_of_calls(compiled.lower(*inputs).compile().as_text())) == 10


@everywhere
def test_two_programs_back_to_back(world: World) -> None:
    """Launched back to back: the first one's operations come first on every rank."""
    batches = [Batch(seed, TOKENS) for seed in (84, 85)]
    slow = world.on_ranks(lambda ids, x, w: layer(delayed(ids, 1000), x, w)[0], check_vma=False)
    fast = world.on_ranks(lambda ids, x, w: layer(ids, x, w)[0], check_vma=False)
    inputs = [batch.on(world) for batch in batches]
    slow(*inputs[0]), fast(*inputs[1])  # compiled
    for _ in range(5):
        outs = slow(*inputs[0]), fast(*inputs[1])
        for got, batch in zip(reversed(outs), reversed(batches)):
            world.equal(got, lambda rank: batch.x[rank] ** 2 * batch.factors(rank))


ONE_CORE = """
    import os
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import test_jax_order as tests
    from jax_support import run
    run("devices", tests.test_branches_are_one_chain_forward_and_backward)
    run("devices", tests.test_two_programs_back_to_back)
    print("both done")
"""


def test_one_core_is_enough_for_four_devices():
    """XLA has as many threads as cores: a handler that waited on one of them would hang."""
    assert in_a_process(ONE_CORE).endswith("both done\n")
