"""The cases of the CPU on GPUs, each as one process per GPU and as one process with all of them.

As many ranks as there are GPUs, 4 or 2. XLA puts operations into command buffers. Tests of the CPU
that take its devices in their own process run in another one here.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest


def gpus() -> int:
    """GPUs of this host, counted without JAX, which would take their memory."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    driver.cuInit(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


# For this process's children; before jax_support is imported.
if gpus() > 1:
    os.environ["XD_JAX_GPUS"] = str(4 if gpus() >= 4 else 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(int(os.environ["XD_JAX_GPUS"]))))
    os.environ["JAX_PLATFORMS"] = "cuda"
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.1"
    os.environ["XD_GEMM_TUNE"] = "0"  # contexts of tests are many, and do not live long
    os.environ["XLA_FLAGS"] = (
        "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    )

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
pytest.importorskip("crossdock.jax", exc_type=ImportError)

import jax  # noqa: E402
import numpy as np  # noqa: E402

import crossdock.jax as xd  # noqa: E402
import test_hlo as hlo  # noqa: E402
import test_jax_fp8 as fp8  # noqa: E402
import test_jax_gradients as gradients  # noqa: E402
import test_jax_life as life  # noqa: E402
import test_jax_low_latency as low_latency  # noqa: E402
import test_jax_ops as ops  # noqa: E402
import test_jax_order as order  # noqa: E402
import test_moe as moe  # noqa: E402
import test_sharding as sharding  # noqa: E402
import test_tp as tp  # noqa: E402
import test_tp_fp8 as tp_fp8  # noqa: E402
import test_tp_programs as tp_programs  # noqa: E402
import test_train as train  # noqa: E402
from crossdock import _jax, errors  # noqa: E402
from jax_support import RANKS, World, equal, everywhere, routing, run, whole  # noqa: E402

jax_for_cuda = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpus() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(not jax_for_cuda, reason="needs JAX for CUDA: pip install 'jax[cuda13]'"),
]


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
@pytest.mark.parametrize("kind", ["uniform", "skewed"])
def test_round_trip(where, layout, kind):
    run(where, ops.round_trip, layout, kind, "bfloat16", 13, 1, "int32")


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_latency_round_trip(where, dtype):
    run(where, low_latency.round_trip, dtype)


@everywhere
def test_low_latency_halves(where):
    run(where, low_latency.halves)


def test_low_latency_fp8():
    run("devices", low_latency.fp8)


@everywhere
def test_leading_dimensions_and_global_arrays(where):
    run(where, ops.three_dimensions)


@everywhere
def test_overflow_drops_the_last_rows(where):
    run(where, ops.drop, 5, 8)


@everywhere
def test_two_groups_in_one_program(where):
    run(where, ops.two_groups)


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_every_choice_has_its_own_weight_gradient(where, layout):
    run(where, gradients.weight_gradients, layout, "skewed")


@everywhere
@pytest.mark.parametrize("how", ["loop", "scan", "remat"])
def test_layers(where, how):
    run(where, gradients.layers, how)


@everywhere
def test_plans_are_ordinary_arrays(where):
    run(where, gradients.plans_are_data)


@everywhere
def test_no_tail_reaches_a_gradient(where):
    run(where, gradients.no_garbage)


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_quantised_rows(where, layout):
    run(where, fp8.quantised, layout)


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_given_scales(where, layout):
    run(where, fp8.given, layout)


@everywhere
def test_branches_are_one_chain(where):
    run(where, order.branches)


@everywhere
def test_two_programs_back_to_back(where):
    run(where, order.two_programs)


def elsewhere(world: World, test: Callable[..., None], *args: Any) -> None:
    """A test that makes ranks of its own, in a process that may take GPUs."""
    world.ep.close()
    with jax.default_matmul_precision("float32"):  # not TF32, in what is compared with
        test(*args)


@pytest.mark.parametrize(
    "mesh, spelling, layout",
    [
        (0, "automatic", "expert_major"),
        (1, "shard_map", "expert_major"),
        (1, "automatic", "rank_major"),
    ],
)
def test_no_collective_but_ours_forward_and_backward(mesh, spelling, layout):
    run(
        "devices",
        elsewhere,
        hlo.test_no_collective_but_ours_forward_and_backward,
        hlo.MESHES[mesh],
        spelling,
        layout,
    )


@pytest.mark.parametrize(
    "test",
    [
        hlo.test_collectives_would_be_found,
        hlo.test_order_of_two_independent_branches_is_in_the_program,
        life.test_operations_outside_of_jit_keep_nothing,
        life.test_what_is_closed_cannot_be_compiled,
        life.test_another_mesh_takes_over,
        moe.test_layer_inside_shard_map_is_the_layer_on_global_arrays,
        moe.test_layers_in_scan_with_remat_have_the_gradients_of_one_device,
        moe.test_bfloat16_layer_is_near_float32,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_as_on_the_cpu(test):
    run("devices", elsewhere, test)


@everywhere
def test_another_init_while_an_executable_lives(where):
    run(where, life.again)


@everywhere
def test_groups_that_are_dropped_leave_nothing(where):
    run(where, life.many)


def test_a_process_ends_with_everything_alive():
    life.test_a_process_ends_with_everything_alive()


def test_layer_and_all_gradients_are_those_of_one_device():
    run(
        "devices",
        elsewhere,
        moe.test_layer_and_all_gradients_are_those_of_one_device,
        moe.MESHES[1],
        (4, 7),
    )


def test_layers_side_by_side_are_chained():
    run("devices", elsewhere, moe.test_layers_side_by_side_are_chained, True)


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
def test_products_in_a_scan_with_remat(where):
    run(where, tp.blocks, "order")


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


def layouts() -> None:
    """Wrong ones are refused, eagerly and when XLA compiles; arrays that are nowhere are split."""
    mesh = sharding.make_mesh()
    for name in ("topk_idx", "tokens"):
        for spec in sharding.WRONG[:2]:
            sharding.test_arrays_that_lie_otherwise_are_refused(mesh, name, spec)
    sharding.test_refused_gradients_too(mesh)
    sharding.test_constraint_splits_what_a_program_computes(mesh)
    sharding.test_arrays_that_are_nowhere_yet_are_split(mesh)
    for how in (sharding.eager, jax.jit):
        sharding.test_derivatives_of_arrays_that_are_nowhere_yet(mesh, how, sharding.of_jax)


def test_layouts():
    run("devices", elsewhere, layouts)


@pytest.mark.parametrize(
    "where",
    [[], ["--processes"], ["--tensor-parallel"], ["--tensor-parallel", "--processes"]],
    ids=["devices", "processes", "devices-product", "processes-product"],
)
def test_training_agrees_with_one_device(where, tmp_path):
    command = [
        str(train.EXAMPLES / "train_moe.py"),
        "--check",
        "--device",
        "gpu",
        "--data",
        "1",
        "--experts-axis",
        str(RANKS),
        *train.SMALL,
        *where,
        "--folder",
        str(tmp_path),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ended = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    text = ended.stdout + ended.stderr
    assert ended.returncode == 0 and " agrees" in text and "DISAGREES" not in text, text


CONFIG = xd.EpConfig(
    num_experts=8, hidden=128, max_topk=2, max_tokens_per_rank=64, dtype=np.float32
)


def round_trips(world: World, batches: int, runs: int, config: xd.EpConfig = CONFIG) -> None:
    """One program on one batch after another, some times each."""

    def trip(ids, x, weights):
        tokens, weights, _, plan = xd.ep_dispatch(xd.ep_prepare(config, ids), x, weights)
        return xd.ep_combine(plan, tokens * 2, None if config.rank_major else weights)[0]

    def factors(ids, weights):
        """For each token of a rank, its weights' sum, or the number of ranks that it goes to."""
        if not config.rank_major:
            return np.where(ids < 0, np.float32(0), weights).sum(1, keepdims=True)
        owners = np.where(ids < 0, -1, ids // (config.num_experts // RANKS))
        return (owners[:, :, None] == np.arange(RANKS)).any(1).sum(1, keepdims=True)

    function = world.on_ranks(trip)
    rng = np.random.default_rng(111)
    for seed in range(batches):
        ids = routing(seed, 64, 8, 2, "uniform")
        x, weights = whole(rng, 64, 128), whole(rng, 64, 2)
        inputs = world.put(ids), world.put(x), world.put(weights)
        expected = [
            2 * x[rank] * factors(ids[rank], weights[rank]).astype(np.float32)
            for rank in range(RANKS)
        ]
        for _ in range(runs):
            equal(world.parts(function(*inputs)), lambda rank: expected[rank])
    world.ep.check()


def replays(world: World) -> None:
    before = _jax.calls()
    round_trips(world, 3, 20)
    made, run = _jax.calls() - before, 3 * 20 * 3 * len(world.ep.devices)
    print(f"{made} calls of handlers for {run} operations")
    assert made < run / 2


@everywhere
def test_command_buffers_replay_operations(where):
    """Most runs do not call the handlers again, and their values are right nevertheless."""
    run(where, replays)


def bad_ids(world: World) -> None:
    """Found on the device: told by check(), and the group stays usable."""
    ids = [np.zeros((64, 1), np.int32) for _ in range(RANKS)]
    ids[-1][5] = 8
    prepare = world.on_ranks(lambda ids: xd.ep_prepare(CONFIG, ids))
    jax.block_until_ready(prepare(world.put(ids)))
    with pytest.raises(errors.InvalidArgument, match=f"lowest rank with some is {RANKS - 1}"):
        world.ep.check()
    round_trips(world, 1, 1)


@everywhere
def test_bad_expert_ids(where):
    run(where, bad_ids)


def in_place(world: World, layout: str) -> None:
    """A group without memory to stage rows takes XLA's buffers, once its pool is registered."""
    config = dataclasses.replace(CONFIG, staging="none", layout=layout)
    with pytest.raises(jax.errors.JaxRuntimeError, match="outside symmetric memory"):
        round_trips(world, 1, 1, config)
    world.ep.check()  # what calls have raised is not told again
    world.ep.register_memory()
    round_trips(world, 5, 2, config)


@everywhere
@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_memory_pool_of_xla_in_place(where, layout):
    run(where, in_place, layout)
