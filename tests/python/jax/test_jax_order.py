"""Operations that no data orders run in one order on all ranks, and no thread waits for a rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np

import crossdock.jax as xd
from jax_support import ON_GPUS, World, equal, everywhere, routing, run, whole

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 2, 16, 33
CONFIG = xd.EpConfig(
    num_experts=EXPERTS, hidden=HIDDEN, max_topk=TOPK, max_tokens_per_rank=TOKENS, dtype=np.float32
)
TARGET = re.compile(r'custom_call_target="crossdock_ep_(\w+)"')


def batches(count: int) -> list[tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]]:
    rng = np.random.default_rng(81)
    return [
        (
            routing(82 + n, TOKENS, EXPERTS, TOPK, "uniform"),
            whole(rng, TOKENS, HIDDEN),
            whole(rng, TOKENS, TOPK),
        )
        for n in range(count)
    ]


def expected(ids: np.ndarray, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return x**2 * np.where(ids < 0, 0, weights).sum(1, keepdims=True)


def delayed(array: jax.Array, steps: int) -> jax.Array:
    """The same array, after work that takes another time on every rank."""
    turns = steps * jax.lax.axis_index("ep")
    spent = jax.lax.fori_loop(0, turns, lambda _, z: jnp.sin(z) + 1, jnp.ones((256,)))
    return array + (spent.sum() > 1e9).astype(array.dtype)


def layer(ids, x, weights, after=None):
    plan = xd.ep_prepare(CONFIG, ids, after=after)
    tokens, weights, _, plan = xd.ep_dispatch(plan, x, weights)
    return xd.ep_combine(plan, tokens**2, weights)


def branches(world: World) -> None:
    """Two layers side by side; which one's inputs are ready first differs between the ranks."""
    first, second = batches(2)

    def both(first, second):
        def loss(x, y):
            one, plan = layer(delayed(first[0], 300), x, first[2])
            other, _ = layer(delayed(second[0], 0), y, second[2], after=plan)
            return one.sum() + other.sum(), (one, other)

        return jax.grad(loss, (0, 1), has_aux=True)(first[1], second[1])

    compiled = world.on_ranks(both, check_vma=False)
    inputs = [tuple(map(world.put, batch)) for batch in (first, second)]
    for _ in range(5):
        (grad_x, grad_y), (one, other) = compiled(*inputs)
        for got, (ids, x, w) in ((one, first), (other, second)):
            equal(world.parts(got), lambda rank: expected(ids[rank], x[rank], w[rank]))
        for got, (ids, x, w) in ((grad_x, first), (grad_y, second)):
            equal(
                world.parts(got),
                lambda r: (
                    2
                    * x[r]
                    * np.where(ids[r] < 0, np.float32(0), w[r]).sum(
                        1, keepdims=True, dtype=np.float32
                    )
                ),
            )
    if not ON_GPUS:  # where XLA puts operations into computations of their own
        assert_chain(compiled.lower(*inputs).compile().as_text())


def assert_chain(hlo: str) -> None:
    """Every operation of the program reaches every other one through operands."""
    operands: dict[str, list[str]] = {}
    calls = []
    for line in hlo.splitlines():
        found = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = .*", line)
        if not found:
            continue
        name = found[1]
        operands[name] = re.findall(r"%([\w.\-]+)", line.split(" = ", 1)[1])
        if TARGET.search(line):
            calls.append(name)
    assert len(calls) == 10  # two layers, forward and backward, of which prepare has no backward

    def reaches(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for operand in operands.get(waiting.pop(), ()):
                if operand not in seen:
                    seen.add(operand)
                    waiting.append(operand)
        return seen

    behind = sorted(len(reaches(call) & set(calls)) for call in calls)
    assert behind == list(range(len(calls))), "the operations are not one chain"


@everywhere
def test_branches_are_one_chain_forward_and_backward(where):
    run(where, branches)


def two_programs(world: World) -> None:
    """Launched back to back: the first one's operations come first on every rank."""
    first, second = batches(2)
    slow = world.on_ranks(lambda ids, x, w: layer(delayed(ids, 1000), x, w)[0], check_vma=False)
    fast = world.on_ranks(lambda ids, x, w: layer(ids, x, w)[0], check_vma=False)
    inputs = [tuple(map(world.put, batch)) for batch in (first, second)]
    slow(*inputs[0]), fast(*inputs[1])  # compiled
    for _ in range(5):
        outs = slow(*inputs[0]), fast(*inputs[1])
        for got, (ids, x, w) in zip(reversed(outs), (second, first)):
            equal(world.parts(got), lambda rank: expected(ids[rank], x[rank], w[rank]))


@everywhere
def test_two_programs_back_to_back(where):
    run(where, two_programs)


ONE_CORE = """
    import os
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import sys
    sys.path[:0] = PATHS
    import test_jax_order as tests
    from jax_support import run
    run("devices", tests.branches)
    run("devices", tests.two_programs)
    print("both done")
"""


def test_one_core_is_enough_for_four_devices():
    """XLA has as many threads as cores: a handler that waited on one of them would hang."""
    here = os.path.dirname(__file__)
    script = textwrap.dedent(ONE_CORE).replace("PATHS", repr([here, os.path.dirname(here)]))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("both done\n")
