"""Programs that XLA makes of the operations: no collective but ours, forward and backward."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import crossdock.jax as xd
from jax_support import EXPERTS, RANKS, Batch, config_of, whole
from programs import (
    COLLECTIVES,
    KEEPING_BARRIERS,
    all_same,
    chain_of_calls,
    compiled,
    place,
    spelled,
    with_gradients,
)

TOKENS = 32
MESHES = [
    ((RANKS,), ("expert",), ()),
    ((RANKS // 2, 2), ("data", "expert"), ("data",)),
    ((2, RANKS // 2), ("expert", "data"), ("data",)),
    ((RANKS // 2, 2), ("tensor", "expert"), ()),
]
FORWARD, BACKWARD = ["prepare", "dispatch", "combine"], ["combine_bwd", "dispatch_bwd"]


class World:
    """A mesh, the operations' arguments on it, and a round trip."""

    def __init__(self, sizes, names, data, layout="expert_major"):
        devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
        self.ep = xd.init(Mesh(devices, names), "expert", data_axes=data)
        self.along = P((*data, "expert"))
        parts = int(np.prod([self.ep.mesh.shape[axis] for axis in (*data, "expert")]))
        self.config = config_of(TOKENS // parts, layout=layout)
        batch = Batch(3, TOKENS // RANKS)
        self.ids, self.x, self.weights = batch.together()
        self.grad = np.concatenate(whole(np.random.default_rng(4), *batch.x[0].shape))
        self.factors = np.concatenate([batch.factors(rank) for rank in range(RANKS)])

    def args(self):
        """Choices, the gradient of the output, rows and weights, split over the token axes."""
        arrays = self.ids, self.grad, self.x, self.weights
        return [place(self.ep, array, self.along) for array in arrays]

    def trip(self, topk_idx, x, topk_weights):
        """Rows to experts, which negate them, and back."""
        plan = xd.ep_prepare(self.config, topk_idx)
        received = xd.ep_dispatch(plan, x, topk_weights)
        rows, weights = -received.tokens, received.weights
        if self.config.rank_major:
            rows, weights = rows * weights.sum(-1, keepdims=True), None
        return xd.ep_combine(received.plan, rows, weights)[0]

    def expected(self):
        """Output, gradients of x and of topk_weights."""
        each = -(self.x * self.grad).sum(-1, keepdims=True)
        of_weights = np.where(self.ids < 0, np.float32(0), each)
        return -self.x * self.factors, (-self.grad * self.factors, of_weights)


def forward_and_backward(trip, policy=None, remat=False):
    """A compiled function of `World.args`: the output of a round trip, and gradients."""

    def step(topk_idx, *args):
        function = functools.partial(trip, topk_idx)
        return with_gradients(jax.checkpoint(function, policy=policy) if remat else function)(*args)

    return jax.jit(step)


# Every mesh and every spelling with each layout.
CASES = [
    (mesh, spelling, ("expert_major", "rank_major")[(place + turn) % 2])
    for place, mesh in enumerate(MESHES)
    for turn, spelling in enumerate(("shard_map", "automatic"))
]


@pytest.mark.parametrize("mesh, spelling, layout", CASES, ids=str)
def test_no_collective_but_ours_forward_and_backward(mesh, spelling, layout):
    world = World(*mesh, layout=layout)
    trip = spelled(world.ep, spelling, world.trip, world.along, world.along)
    args = world.args()
    program = compiled(forward_and_backward(trip), args, [*FORWARD, *BACKWARD])
    all_same(program(*args), world.expected())


def test_collectives_would_be_found():
    world = World(*MESHES[0])
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(world.ep.mesh, P()))
    assert COLLECTIVES.findall(gather.lower(world.args()[1]).compile().as_text())


def test_order_of_two_independent_branches_is_in_the_program():
    world = World(*MESHES[0])

    def both(topk_idx, x, topk_weights):
        first = xd.ep_prepare(world.config, topk_idx)
        received = xd.ep_dispatch(first, x, topk_weights)
        left, last = xd.ep_combine(received.plan, received.tokens, received.weights)
        second = xd.ep_prepare(world.config, EXPERTS - 1 - topk_idx, after=last)
        received = xd.ep_dispatch(second, x, topk_weights)
        right, _ = xd.ep_combine(received.plan, 2 * received.tokens, received.weights)
        return left + right

    chain = [*FORWARD, *FORWARD, *BACKWARD, *BACKWARD]
    compiled(forward_and_backward(both), world.args(), chain)


def test_order_is_followed_into_computations_that_are_called():
    text = """
%buffer (a: f32[1], b: f32[1]) -> f32[1] {
  %b = f32[1] parameter(1)
  %a = f32[1] parameter(0)
  ROOT %second = f32[1] custom-call(FIRST), custom_call_target="crossdock_ep_dispatch"
}

ENTRY %main (p: f32[1]) -> f32[1] {
  %p = f32[1] parameter(0)
  %first = f32[1] custom-call(%p), custom_call_target="crossdock_ep_prepare"
  %call = f32[1] call(%p, %first), to_apply=%buffer
  ROOT %third = f32[1] custom-call(%call), custom_call_target="crossdock_ep_combine"
}
"""
    assert chain_of_calls(text.replace("FIRST", "%b")) == ["prepare", "dispatch", "combine"]
    with pytest.raises(AssertionError):
        chain_of_calls(text.replace("FIRST", "%a"))


ORDER_SAVED = jax.checkpoint_policies.save_only_these_names("crossdock_order")


@pytest.mark.parametrize(
    "policy, again",
    [(None, FORWARD), (ORDER_SAVED, FORWARD[:-1])],
    ids=["nothing saved", "order saved"],
)
def test_remat_repeats_combine_only_for_its_order(policy, again):
    world = World(*MESHES[0])
    lowered = forward_and_backward(world.trip, policy, remat=True).lower(*world.args())
    calls = re.findall(r"@crossdock_ep_(\w+)", lowered.as_text())
    assert calls == [*FORWARD, *again, *BACKWARD]


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_saved_order_keeps_what_is_repeated_between_forward_and_backward(layout):
    """By rank, combine has no weights: its gradient needs nothing that is repeated."""
    world = World(*MESHES[0], layout=layout)
    args = world.args()
    step = forward_and_backward(world.trip, ORDER_SAVED, remat=True)
    program = compiled(step, args, [*FORWARD, *FORWARD[:-1], *BACKWARD], KEEPING_BARRIERS)
    all_same(program(*args), world.expected())
