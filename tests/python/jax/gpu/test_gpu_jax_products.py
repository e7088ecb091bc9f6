"""Products' cases of the CPU on GPUs: one process per GPU, and one with all.

As many ranks as there are GPUs, 4 or 2. XLA puts operations into command buffers.
"""

from __future__ import annotations

import pytest

from gpu_jax import MARKS  # isort: skip (before JAX is imported)

import test_tp as tp
import test_tp_fp8 as tp_fp8
import test_tp_programs as tp_programs
import tp_support as support
from crossdock import _jax
from jax_support import World, everywhere, run
from programs import all_same

pytestmark = MARKS


both = pytest.mark.parametrize("where", ["devices", "processes"])
test_products_and_experts_are_one_chain = tp_programs.test_products_and_experts_are_one_chain


@both
@pytest.mark.parametrize("spelling", ["shard_map", "automatic"])
def test_products_and_all_gradients_are_those_of_one_process(where, spelling):
    run(where, tp.test_values_and_all_gradients_are_those_of_one_process, spelling, 1)


@both
@pytest.mark.parametrize(
    "test",
    [
        tp_fp8.test_products_are_exact_with_scales_of_every_kind,
        tp_fp8.test_operands_made_fp8_and_all_gradients_are_exact_for_whole_numbers,
        tp.test_ranks_may_have_different_numbers_of_tokens,
    ],
    ids=["scaled", "made fp8", "unequal"],
)
def test_products_of_fp8_and_of_unequal_ranks(where, test):
    run(where, test, "shard_map")


@both
@pytest.mark.parametrize("counts, fp8", [(None, False), (tp.COUNTS, True)])
def test_gathered_rows_are_returned_and_have_gradients(where, counts, fp8):
    run(where, tp.returned, "shard_map", True, counts, fp8)


@both
def test_products_in_a_scan_with_remat(where):
    run(where, tp.blocks, "order", "relu")


@everywhere
def test_command_buffers_replay_products(world: World) -> None:
    """A program that runs often calls the handlers seldom, and its values stay right."""
    world.ep.close()
    before, runs = _jax.calls(), 30
    with support.joined() as mesh:
        layer = support.LAYERS[0]
        step, args = support.trained(mesh, layer, "shard_map")
        out, grads = layer.expected()
        for _ in range(runs):
            all_same(step(*args), (out, tuple(grads.values())))
        made, run = _jax.calls() - before, 2 * runs * len(mesh.devices)
        print(f"{made} calls of handlers for {run} operations")
        assert made < run / 2
        mesh.check()
