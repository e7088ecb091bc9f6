"""`ep_moe`, a layer's experts in one call: a dense layer's values, the C call's bits, mistakes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import crossdock
import crossdock.jax as xd
from crossdock._arrays import aligned_empty, describe
from crossdock._core import constants
from crossdock.jax import _calls
from jax_support import (
    EXPERTS,
    HIDDEN,
    ON_GPUS,
    RANKS,
    TOPK,
    UNEQUAL,
    World,
    config_of,
    on_devices,
    routing,
)
from programs import all_same, compiled, placed, same, with_gradients
from support import Rank, run_threads

TOKENS, FFN, SEED = 12, 8, 300
LOCAL = EXPERTS // RANKS
# Sums of bfloat16 rows are rounded, unless they are small: fewer, smaller numbers on GPUs.
DTYPE = np.dtype(jnp.bfloat16 if ON_GPUS else np.float32)
NAMES = ("tokens", "topk_weights", "w_in", "w_out")
CHAIN = ["prepare", "moe_forward", "moe_backward"]


def config(**options: Any) -> xd.EpConfig:
    return config_of(TOKENS, **{"dtype": DTYPE} | options)


class Numbers:
    """Arguments of all ranks together: whole numbers, of which every sum is exact, or any."""

    def __init__(self, dtype: np.dtype = DTYPE, whole: bool = True) -> None:
        rng = np.random.default_rng(SEED)
        most = 1 if dtype == jnp.bfloat16 else 3

        def draw(*shape: int, most: int = 1, dtype: Any = dtype) -> np.ndarray:
            drawn = rng.integers(-most, most + 1, shape) if whole else rng.standard_normal(shape)
            return drawn.astype(dtype)

        self.ids = np.concatenate(routing(SEED, TOKENS, EXPERTS, TOPK, "skewed"))
        tokens = RANKS * TOKENS
        self.arrays = [
            draw(tokens, HIDDEN, most=most),
            draw(tokens, TOPK, most=most, dtype=np.float32),
            draw(EXPERTS, HIDDEN, 2 * FFN),
            draw(EXPERTS, FFN, HIDDEN),
        ]
        if whole and dtype == jnp.bfloat16:  # columns of few numbers, so that products stay small
            for array in self.arrays[2:]:
                array[:, 2:] = 0
        self.grad = draw(tokens, HIDDEN)
        if whole and dtype == jnp.bfloat16:
            self.grad[:, 2:] = 0

    def dense(self, *arrays: Any) -> Any:
        """The layer on one device, each expert on all tokens."""
        tokens, weights, w_in, w_out = (jnp.asarray(one, np.float32) for one in arrays)
        out = jnp.zeros_like(tokens)
        for expert in range(EXPERTS):
            gate, up = jnp.split(tokens @ w_in[expert], 2, axis=-1)
            factors = jnp.where(self.ids == expert, weights, 0).sum(-1, keepdims=True)
            out += (jax.nn.relu(gate) * up) @ w_out[expert] * factors
        return out

    def expected(self) -> Any:
        """The layer's output, and the gradients of the arrays, in their dtypes."""
        given = [np.asarray(one, np.float32) for one in self.arrays]
        out, grads = with_gradients(self.dense)(np.asarray(self.grad, np.float32), *given)
        cast = [
            np.asarray(grad).astype(one.dtype) for grad, one in zip(grads, self.arrays, strict=True)
        ]
        return np.asarray(out).astype(self.grad.dtype), tuple(cast)


def layer(ids: Any, *arrays: Any, expert_ranks: Any = None, **options: Any) -> jax.Array:
    sizes = config(expert_ranks=expert_ranks)
    return xd.ep_moe(sizes, ids, *arrays, **{"activation": "relu"} | options)[0]


def of_parts(
    ids: Any, tokens: Any, weights: Any, w_in: Any, w_out: Any, expert_ranks: Any = None
) -> jax.Array:
    """The same layer of single operations, and of products of JAX."""
    plan = xd.ep_prepare(config(expert_ranks=expert_ranks), ids)
    received = xd.ep_dispatch(plan, tokens, weights)
    inner = jax.lax.ragged_dot(received.tokens, w_in, plan.padded_counts)
    gate, up = jnp.split(inner, 2, axis=-1)
    rows = jax.lax.ragged_dot(jax.nn.relu(gate) * up, w_out, plan.padded_counts)
    return xd.ep_combine(received.plan, rows, received.weights)[0]


def trained(world: World, function: Callable[..., Any], **options: Any) -> tuple[Any, Any, Any]:
    """A step of a layer on the ranks, its arguments, and what it gives."""
    numbers = Numbers()
    args = placed(world.mesh, (numbers.ids, numbers.grad, *numbers.arrays), [P("ep")] * 6)
    mapped = world.on_ranks(function, **options)

    def step(ids, *rest):
        return with_gradients(functools.partial(mapped, ids))(*rest)

    return jax.jit(step), args, numbers.expected()


@on_devices
def test_values_and_all_gradients_are_those_of_a_dense_layer(world: World) -> None:
    """Also of the layer that is made of single operations; with one chain of calls."""
    for function, chain, options in (
        (layer, CHAIN, {}),
        (functools.partial(layer, overlap=xd.Overlap(LOCAL)), CHAIN, {"check_vma": False}),
        (of_parts, None, {}),
    ):
        step, args, expected = trained(world, function, **options)
        all_same(compiled(step, args, chain)(*args), expected)


@on_devices
def test_ranks_with_unequal_experts_have_the_gradients_of_a_dense_layer(world: World) -> None:
    """One rank has no expert. Matrices behind a rank's own are not read; their gradients are 0."""
    numbers = Numbers()
    out, grads = numbers.expected()
    most = config(expert_ranks=UNEQUAL).local_experts(RANKS)

    def spread(matrices: np.ndarray, fill: float) -> np.ndarray:
        found = np.full((RANKS, most, *matrices.shape[1:]), fill, matrices.dtype)
        for rank in range(RANKS):
            own = matrices[np.array(UNEQUAL) == rank]
            found[rank, : len(own)] = own
        return found.reshape(-1, *matrices.shape[1:])

    expected = out, (*grads[:2], *(spread(grad, 0) for grad in grads[2:]))
    # One part is as the whole. JAX's grouped product on the CPU multiplies the rest by zeros.
    in_one_part = functools.partial(layer, overlap=xd.Overlap(1))
    for function, fill in ((layer, np.nan), (in_one_part, np.nan), (of_parts, 9)):
        matrices = [spread(array, fill) for array in numbers.arrays[2:]]
        given = (numbers.ids, numbers.grad, *numbers.arrays[:2], *matrices)
        ids, *rest = placed(world.mesh, given, [P("ep")] * 6)
        mapped = world.on_ranks(functools.partial(function, expert_ranks=UNEQUAL))
        all_same(with_gradients(functools.partial(mapped, ids))(*rest), expected)


def test_global_arrays_over_axes_of_data_and_of_experts() -> None:
    """Two sets of ranks: gradients of matrices are summed over them. There are no weights."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]).reshape(2, -1), ("data", "ep"))
    ep = xd.init(mesh, "ep", data_axes="data")
    numbers = Numbers()
    numbers.arrays[1][:] = 1
    out, (of_tokens, _, of_in, of_out) = numbers.expected()
    batch, experts = P(("data", "ep")), P("ep")
    given = (numbers.ids, numbers.grad, numbers.arrays[0], *numbers.arrays[2:])
    args = placed(mesh, given, [batch, batch, batch, experts, experts])

    def step(ids, grad, *arrays):
        def function(tokens, *matrices):
            return layer(ids, tokens, None, *matrices, overlap=xd.Overlap(2))

        return with_gradients(function)(grad, *arrays)

    try:
        all_same(jax.jit(step)(*args), (out, (of_tokens, of_in, of_out)))
        ids, _, *arrays = args
        same("outside jit", layer(ids, arrays[0], None, *arrays[1:]), out)
    finally:
        ep.close()


@on_devices
def test_eager_code_in_shard_map_has_values_and_gradients(world: World) -> None:
    numbers = Numbers()
    args = placed(world.mesh, (numbers.ids, numbers.grad, *numbers.arrays), [P("ep")] * 6)
    spec = {"in_specs": P("ep"), "out_specs": P("ep")}
    mapped = jax.shard_map(layer, mesh=world.mesh, **spec)
    expected = numbers.expected()
    ids, grad, *arrays = args
    same("out", mapped(ids, *arrays), expected[0])
    out, backward = jax.vjp(functools.partial(mapped, ids), *arrays)
    all_same((out, backward(grad)), expected)


# ---- The C call ---------------------------------------------------------------------------------


def in_c(me: Rank, numbers: Numbers, parts: int) -> tuple[np.ndarray, ...]:
    """One rank's output and gradients by ``xd_moe_forward`` and ``xd_moe_backward``."""

    def part(array: np.ndarray) -> np.ndarray:
        made = aligned_empty((array.shape[0] // RANKS, *array.shape[1:]), array.dtype)
        made[:] = np.split(array, RANKS)[me.rank]
        return made

    sizes = {"max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "dtype": "float32"}
    options = crossdock.EpConfig(num_experts=EXPERTS, max_topk=TOPK, **sizes)
    with me.comm() as comm, crossdock.EpGroup(comm, options) as group:
        plan = group.prepare(part(numbers.ids), parts=max(parts, 1))
        rows = options.recv_bound(RANKS)
        tokens, weights, w_in, w_out = map(part, numbers.arrays)
        numbers_of = {"activation": constants.ACTIVATIONS["silu"], "parts": parts}

        def run(call: Any, **arrays: np.ndarray) -> None:
            specs = {name: describe(name, one, (one.dtype.name,)) for name, one in arrays.items()}
            call(specs | numbers_of | {"plan": plan.place()})

        def empty(**columns: int) -> dict[str, np.ndarray]:
            return {name: aligned_empty((rows, n), np.float32) for name, n in columns.items()}

        kept = empty(recv_tokens=HIDDEN, inner=2 * FFN, activated=FFN, expert_out=HIDDEN)
        kept["recv_weights"] = aligned_empty(rows, np.float32)
        given = {"offsets": plan.offsets, "w_in": w_in, "w_out": w_out}
        out = aligned_empty(tokens.shape, np.float32)
        run(group._core.moe_forward, tokens=tokens, topk_weights=weights, out=out, **given, **kept)
        way = empty(grad_expert_out=HIDDEN, grad_activated=FFN, grad_inner=2 * FFN)
        way |= empty(grad_recv_tokens=HIDDEN)
        way["grad_recv_weights"] = aligned_empty(rows, np.float32)
        grads = {
            f"grad_{name}": aligned_empty(one.shape, one.dtype)
            for name, one in zip(NAMES, (tokens, weights, w_in, w_out))
        }
        grad_out = part(numbers.grad)
        run(group._core.moe_backward, grad_out=grad_out, **given, **kept, **way, **grads)
        return out, *grads.values()


@on_devices
def test_bits_are_those_of_the_call_in_c(world: World) -> None:
    """In parts, and of the C call's serial schedule, which is PyTorch's call as well."""
    numbers = Numbers(np.dtype(np.float32), whole=False)
    args = placed(world.mesh, (numbers.ids, numbers.grad, *numbers.arrays), [P("ep")] * 6)

    def step(ids, grad, *arrays):
        given = functools.partial(layer, ids, activation="silu", overlap=xd.Overlap(LOCAL))
        return with_gradients(given)(grad, *arrays)

    out, grads = world.on_ranks(step)(*args)
    expected = run_threads(RANKS, in_c, numbers, 0)
    for number, (name, array) in enumerate(zip(("out", *NAMES), (out, *grads))):
        for rank, part in world.parts(array).items():
            assert np.isfinite(part).all() and part.any(), name
            np.testing.assert_array_equal(part, expected[rank][number], err_msg=f"{name} {rank}")


def raw_forward(world: World, parts: int, plan: Any, *arrays: Any) -> tuple[Any, ...]:
    """All results of the custom call, on one rank's arrays."""
    group = world.ep.group(config())
    numbers = _calls.Layer(constants.ACTIVATIONS["relu"], parts, 0)
    inputs = _calls.LayerInputs(*_calls.uniform(*arrays, plan.order))
    return _calls.moe_forward(group, numbers, plan.shape, inputs)


def test_buffers_of_xla_are_all_memory_that_a_pass_keeps(world):
    numbers = Numbers()

    def kept(ids, *arrays):
        plan = xd.ep_prepare(config(), ids)
        return raw_forward(world, 0, plan, plan.data, plan.offsets, *arrays)[:5]

    found = jax.eval_shape(world.on_ranks(kept), numbers.ids, *numbers.arrays)
    all_bytes = sum(math.prod(one.shape) * one.dtype.itemsize for one in found)
    assert all_bytes == RANKS * config().moe_bytes(RANKS, FFN)
    with pytest.raises(ValueError, match="ffn"):
        config().moe_bytes(RANKS, 3)


# By the argument that has a gradient: arguments and results that the custom call is without.
GIVEN = {
    "tokens": ("recv_tokens activated expert_out", "grad_topk_weights grad_w_in grad_w_out"),
    "topk_weights": ("recv_tokens activated", "grad_w_in grad_w_out"),
    "w_in": ("activated expert_out", "grad_topk_weights grad_w_out"),
    "w_out": ("recv_tokens expert_out", "grad_topk_weights grad_w_in"),
}


def test_nothing_is_computed_for_a_gradient_that_nobody_asks_for(world):
    numbers = Numbers()

    def loss(ids, *arrays):
        return layer(ids, *arrays).astype(np.float32).sum()

    for number, name in enumerate(NAMES):
        slope = world.on_ranks(jax.grad(loss, number + 1))
        text = slope.lower(numbers.ids, *numbers.arrays).as_text()
        (call,) = (line for line in text.splitlines() if "@crossdock_ep_moe_backward(" in line)
        words = set(re.findall(r"\w+", call))
        assert {"inner", "recv_weights", "grad_tokens"} <= words
        missing = [set(group.split()) & words for group in GIVEN[name]]
        assert missing == [set(), set()], name


# ---- Mistakes -----------------------------------------------------------------------------------

NARROW = jnp.bfloat16 if not ON_GPUS else np.float16
MISTAKES = [
    ("activation", lambda _: "tanh", ValueError, "activation: expected one of 'silu', .* 'tanh'"),
    (
        "overlap",
        lambda _: xd.Overlap(LOCAL + 1),
        ValueError,
        f"overlap: expected at most {LOCAL} parts, .*parts={LOCAL + 1}",
    ),
    ("overlap", lambda _: 2, TypeError, "overlap: expected a bool, 'auto' or an Overlap, got 2"),
    ("overlap", lambda _: "serial", TypeError, "overlap: expected a bool, .* got 'serial'"),
    ("alignment", lambda _: 3, ValueError, "alignment: expected a power of two"),
    ("topk_idx", lambda a: a[:, 0], ValueError, "topk_idx: expected"),
    ("tokens", lambda a: a.astype(np.int8), TypeError, "tokens: expected bfloat16, float16 or "),
    ("tokens", lambda a: a[:, :-1], ValueError, "tokens: expected rows of a positive multiple "),
    ("tokens", lambda a: a[:-RANKS], ValueError, r"tokens: expected a rank's part with shape \(12"),
    ("topk_weights", lambda a: a.astype(np.float16), TypeError, "topk_weights: expected float32"),
    ("topk_weights", lambda a: a[:, 1:], ValueError, r"topk_weights: expected .* \(12, 3\)"),
    ("w_in", lambda a: a.astype(NARROW), TypeError, f"w_in: expected {DTYPE}, as tokens, got "),
    ("w_in", lambda a: a[..., 1:], ValueError, rf"w_in: expected shape \({LOCAL}, 16, 16\) on a "),
    ("w_in", lambda a: a[:-1], ValueError, "w_in: expected dimension 0 to be a multiple of"),
    ("w_out", lambda a: a[:, 0], ValueError, rf"w_out: expected shape \({LOCAL}, F, 16\) on a "),
    ("w_out", lambda a: a[:RANKS], ValueError, rf"w_out: expected shape \({LOCAL}, F, 16\) on a "),
]


def test_a_mistake_is_named_while_tracing(world):
    numbers = Numbers()
    good = dict(zip(("topk_idx", *NAMES), (numbers.ids, *numbers.arrays)))
    for name, change, error, text in MISTAKES:
        with pytest.raises(error, match=text):
            xd.ep_moe(config(), **good | {name: change(good.get(name))})


def test_other_mistakes_are_named_while_tracing(world):
    numbers = Numbers()
    tokens, weights, w_in, w_out = numbers.arrays
    few = (numbers.ids, tokens, weights, w_in[..., :6], w_out[:, :3])
    with pytest.raises(ValueError, match="w_out: expected rows .* multiple of 16 bytes, got F = 3"):
        xd.ep_moe(config(), *few)
    by_rank = config(layout="rank_major")
    with pytest.raises(ValueError, match="config: expected layout 'expert_major', got 'rank_"):
        xd.ep_moe(by_rank, numbers.ids, *numbers.arrays)
    params = xd.MoEParams(np.zeros((HIDDEN, EXPERTS), DTYPE), w_in, w_out)
    with pytest.raises(TypeError, match="overlap: expected a bool, 'auto' or .* got None"):
        xd.moe_layer(config(), params, tokens, overlap=None)
    given = numbers.arrays[1:]
    with pytest.raises(NotImplementedError, match="ep_moe: there is no jvp through it"):
        jax.jvp(lambda x: layer(numbers.ids, x, *given), (tokens,), (tokens,))
    with pytest.raises(NotImplementedError, match="ep_moe: there is no vmap over it"):
        jax.vmap(lambda x: layer(numbers.ids, x, *given))(tokens[None])


def with_a_broken_plan(world: World) -> tuple[Callable[[int], jax.Array], np.ndarray]:
    """A layer in parts as a function of whether the last rank has no plan; and its output."""
    numbers = Numbers()
    args = placed(world.mesh, (numbers.ids, *numbers.arrays), [P("ep")] * 5)

    def step(broken, ids, *arrays):
        plan = xd.ep_prepare(config(), ids)
        here = broken[0] * (jax.lax.axis_index("ep") == RANKS - 1).astype(np.uint8)
        return raw_forward(world, 1, plan, plan.data * (1 - here), plan.offsets, *arrays)[-2]

    function = world.on_ranks(step)
    words = [world.put([np.array([one], np.uint8)] * RANKS) for one in (0, 1)]
    return lambda broken: function(words[broken], *args), numbers.expected()[0]


@on_devices
def test_a_rank_that_fails_in_the_call_fails_it_on_all_ranks(world: World) -> None:
    """No rank waits for it, and the next call works."""
    run, out = with_a_broken_plan(world)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="plan|XD_ERROR_MISMATCH"):
            jax.block_until_ready(run(1))
        same("out", run(0), out)
