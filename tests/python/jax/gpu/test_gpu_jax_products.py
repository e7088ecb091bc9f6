"""Products' cases of the CPU on GPUs: one process per GPU, and one with all.

As many ranks as there are GPUs, 4 or 2. XLA puts operations into command buffers. Tests of the CPU
that take its devices in their own process run in another one here.
"""

from __future__ import annotations

import pytest

from gpu_jax import MARKS, elsewhere  # isort: skip (before JAX is imported)

import test_tp as tp
import test_tp_fp8 as tp_fp8
import test_tp_programs as tp_programs
from crossdock import _jax
from jax_support import RANKS, World, everywhere, run

pytestmark = MARKS


@everywhere
@pytest.mark.parametrize("spelling", ["shard_map", "automatic"])
def test_products_and_all_gradients_are_those_of_one_process(where, spelling):
    run(where, tp.layers, spelling, 1)


@everywhere
@pytest.mark.parametrize(
    "body",
    [tp_fp8.products, tp_fp8.made_fp8, tp_fp8.block_scales, tp.unequal],
    ids=lambda body: body.__name__,
)
def test_products_of_fp8_and_of_unequal_ranks(where, body):
    run(where, body, "shard_map")


@everywhere
def test_products_of_fp8_of_unequal_ranks(where):
    run(where, tp_fp8.unequal)


@everywhere
@pytest.mark.parametrize("counts, fp8", [(None, False), ((3, 0, 5, 1)[:RANKS], True)])
def test_gathered_rows_are_returned_and_have_gradients(where, counts, fp8):
    run(where, tp.returned, "shard_map", True, counts, fp8)


@everywhere
def test_products_in_a_scan_with_remat(where):
    run(where, tp.blocks, "order", "relu")


@everywhere
def test_products_and_experts_are_one_chain(where):
    run(where, tp_programs.experts_too)


@pytest.mark.parametrize("layer", tp.LAYERS[::2], ids=lambda layer: layer.operation)
def test_no_collective_beside_products(layer):
    run(
        "devices",
        elsewhere,
        tp_programs.test_no_collective_but_ours_forward_and_backward,
        layer,
        "automatic",
    )


def products_again(world: World) -> None:
    """A program that runs often calls the handlers seldom, and its values stay right."""
    world.ep.close()
    before, runs = _jax.calls(), 30
    with tp.joined() as mesh:
        layer = tp.LAYERS[0]
        step, args = tp.trained(mesh, layer, "shard_map")
        wanted, wanted_grads = layer.expected()
        for _ in range(runs):
            out, grads = step(*args)
            tp.same("out", out, wanted)
            for name, grad in grads.items():
                tp.same(name, grad, wanted_grads[name])
        made, run = _jax.calls() - before, 2 * runs * len(mesh.devices)
        print(f"{made} calls of handlers for {run} operations")
        assert made < run / 2
        mesh.check()


@everywhere
def test_command_buffers_replay_products(where):
    run(where, products_again)
