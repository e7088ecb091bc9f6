"""Programs that XLA makes of the operations: no collective but ours, forward and backward."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import crossdock.jax as xd
from jax_support import EXPERTS, RANKS, Batch, config_of, whole

TOKENS = 32
COLLECTIVES = re.compile(
    r"\b((?:all-gather|all-to-all|ragged-all-to-all|all-reduce|reduce-scatter|collective-permute|"
    r"collective-broadcast)(?:-start|-done)?)\("
)
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
        self.mesh = Mesh(devices, names)
        self.ep = xd.init(self.mesh, "expert", data_axes=data)
        self.axes = (*data, "expert")
        parts = int(np.prod([self.mesh.shape[axis] for axis in self.axes]))
        self.config = config_of(TOKENS // parts, layout=layout)
        batch = Batch(3, TOKENS // RANKS)
        self.ids, self.x, self.weights = batch.together()
        self.grad = np.concatenate(whole(np.random.default_rng(4), *batch.x[0].shape))
        self.factors = np.concatenate([batch.factors(rank) for rank in range(RANKS)])

    def args(self):
        """The arguments of `round_trip`, split over the token axes."""
        along = NamedSharding(self.mesh, P(self.axes))
        return jax.device_put((self.x, self.ids, self.weights, self.grad), along)

    def round_trip(self, x, topk_idx, topk_weights, grad):
        """A number whose gradients need every operation; experts negate their rows."""
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

    def forward_and_backward(self, spelling):
        """A jitted function of `args`: output and gradients."""
        trip = self.round_trip
        if spelling == "shard_map":
            trip = jax.shard_map(
                trip, mesh=self.mesh, in_specs=P(self.axes), out_specs=P(self.axes)
            )

        def step(x, topk_idx, topk_weights, grad):
            out, backward = jax.vjp(lambda x, w: trip(x, topk_idx, w, grad), x, topk_weights)
            return out, backward(grad)

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
    args = world.args()
    compiled = world.forward_and_backward(spelling).lower(*args).compile()
    text = compiled.as_text()
    assert COLLECTIVES.findall(text) == []
    assert chain_of_calls(text) == [*FORWARD, *BACKWARD]

    def same(got, expected):
        for shard in got.addressable_shards:  # on all ranks
            np.testing.assert_array_equal(shard.data, expected[shard.index])

    jax.tree.map(same, compiled(*args), world.expected())


def test_collectives_would_be_found():
    world = World(*MESHES[0])
    everywhere = NamedSharding(world.mesh, P())
    gather = jax.jit(lambda x: x, out_shardings=everywhere)
    assert COLLECTIVES.findall(gather.lower(world.args()[0]).compile().as_text())


def test_order_of_two_independent_branches_is_in_the_program():
    world = World(*MESHES[0])

    def branches(x, topk_idx, topk_weights, grad):
        def both(x, topk_weights):
            first = xd.ep_prepare(world.config, topk_idx)
            received = xd.ep_dispatch(first, x, topk_weights)
            left, last = xd.ep_combine(received.plan, received.tokens, received.weights)
            second = xd.ep_prepare(world.config, EXPERTS - 1 - topk_idx, after=last)
            received = xd.ep_dispatch(second, x, topk_weights)
            right, _ = xd.ep_combine(received.plan, 2 * received.tokens, received.weights)
            return left + right

        return jax.vjp(both, x, topk_weights)[1](grad)

    text = jax.jit(branches).lower(*world.args()).compile().as_text()
    assert chain_of_calls(text) == [*FORWARD, *FORWARD, *BACKWARD, *BACKWARD]


def chain_of_calls(text: str) -> list[str]:
    """Operations in the order that their operands force; fails if it leaves a choice."""
    operands = dependencies(text)
    call = r'^ *(?:ROOT )?(%[\w.-]+) = .*custom_call_target="crossdock_(?:ep|gemm)_(\w+)"'
    calls = dict(re.findall(call, text, re.MULTILINE))

    def before(name: str, seen: set[str]) -> set[str]:
        for operand in operands.get(name, []):
            if operand not in seen:
                seen.add(operand)
                before(operand, seen)
        return seen

    needs = {name: before(name, set()) & calls.keys() for name in calls}
    order = sorted(calls, key=lambda name: len(needs[name]))
    assert [len(needs[name]) for name in order] == list(range(len(order)))
    return [calls[name] for name in order]


def dependencies(text: str) -> dict[str, list[str]]:
    """The instructions before each one, also across calls, as of command buffers."""
    operands, parameters, roots, called = {}, {}, {}, []
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?(%[\w.-]+) .*\{$", line):
            parameters[computation := header[1]] = {}
        elif instruction := re.match(r" *(ROOT )?(%[\w.-]+) = (.*)$", line):
            root, name, rest = instruction.groups()
            operands[name] = re.findall(r"%[\w.-]+", rest)
            if root:
                roots[computation] = name
            if number := re.search(r" parameter\((\d+)\)", rest):
                parameters[computation][int(number[1])] = name
            if call := re.search(r" call\((.*?)\), to_apply=(%[\w.-]+)", rest):
                called.append((name, re.findall(r"%[\w.-]+", call[1]), call[2]))
    for name, given, computation in called:
        operands[name].append(roots[computation])
        for number, parameter in parameters[computation].items():
            operands[parameter].append(given[number])
    return operands


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
    lowered = rematerialised(world, policy).lower(*world.args())
    calls = re.findall(r"@crossdock_ep_(\w+)", lowered.as_text())
    assert calls == [*FORWARD, *again, *BACKWARD]


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_saved_order_keeps_what_is_repeated_between_forward_and_backward(layout):
    """By rank, combine has no weights: its gradient needs nothing that is repeated."""
    world = World(*MESHES[0], layout=layout)
    args = world.args()
    # The pass that drops the barrier between them.
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    compiled = rematerialised(world, ORDER_SAVED).lower(*args).compile(options)
    assert chain_of_calls(compiled.as_text()) == [*FORWARD, *FORWARD[:-1], *BACKWARD]
    jax.tree.map(np.testing.assert_array_equal, compiled(*args), world.expected())


def rematerialised(world, policy):
    """Like `forward_and_backward`; the gradient of the output waits for nothing."""

    def step(x, topk_idx, topk_weights, grad):
        trip = jax.checkpoint(lambda x, w: world.round_trip(x, topk_idx, w, grad), policy=policy)
        out, backward = jax.vjp(trip, x, topk_weights)
        return out, backward(grad)

    return jax.jit(step)
