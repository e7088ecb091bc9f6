"""TransformerEngine's collective GEMM in JAX: mapped, exact, and what is not there refused."""

from __future__ import annotations

import functools
import inspect
import pathlib
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from crossdock.compat import te_jax as te
from jax_support import RANKS, World, ranked
from programs import COLLECTIVES, all_same, placed, same, with_gradients

PAGE = pathlib.Path(__file__).parents[3] / "docs/transformer_engine.md"
AG, RS = te.CollectiveOp.ALL_GATHER, te.CollectiveOp.REDUCE_SCATTER
BATCH, K, N = 2, 32, 64
JOB = {"num_total_devices": RANKS, "num_devices_per_process": RANKS, "process_id": 0}


def bootstrap(size: int = RANKS, **options):
    return te.collective_gemm_bootstrap(
        num_total_devices=jax.device_count(),
        num_devices_per_process=jax.local_device_count(),
        process_id=jax.process_index(),
        tensor_parallel_size=size,
        **options,
    )


@pytest.mark.parametrize(
    "where, size", [("devices", RANKS), ("devices", RANKS // 2), ("processes", RANKS // 2)]
)
@ranked
def test_layers_and_all_gradients_are_those_of_one_process(world: World, size: int) -> None:
    """The layouts of TransformerEngine's own example, and gradients, against one process."""
    world.ep.close()
    joined = bootstrap(size)
    mesh = joined.mesh
    rng = np.random.default_rng(15)
    try:
        for op, x_at, w_at, bias_at, y_at in (
            (AG, P("dp", "tpsp", None), P(None, "tpsp"), P("tpsp"), P("dp", None, "tpsp")),
            (RS, P("dp", None, "tpsp"), P("tpsp", None), P(None), P("dp", "tpsp", None)),
        ):
            shapes = (BATCH, 3 * RANKS, K), (K, N), (N,), (BATCH, 3 * RANKS, N)
            x, w, bias, grad = (rng.integers(-2, 3, s).astype(np.float32) for s in shapes)
            ops = te.CollectiveOpSet.create(op)

            layer = functools.partial(te.dense, collective_op_set=ops)
            args = placed(mesh, (grad, x, w, bias), (y_at, x_at, w_at, bias_at))
            program = with_gradients(layer).lower(*args).compile()
            # Gradients of weights over dp, also where that has one index.
            found = COLLECTIVES.findall(program.as_text())
            assert {kind.removesuffix("-start") for kind in found} <= {"all-reduce"}
            of_w = x.reshape(-1, K).T @ grad.reshape(-1, N)
            all_same(program(*args), (x @ w + bias, (grad @ w.T, of_w, grad.sum((0, 1)))))
    finally:
        joined.close()


def test_ways_to_store_operands():
    joined = bootstrap()
    rng = np.random.default_rng(16)
    x = rng.integers(-2, 3, (2 * RANKS, BATCH, K)).astype(np.float32)  # sequence, batch
    w = rng.integers(-2, 3, (N, K)).astype(np.float32)
    try:
        out = te.gemm(x, w, ((-1,), (1,)), transpose_batch_sequence=True, collective_op=AG)
        same("out", out, x @ w.T)
        plain = te.gemm(x, w, ((2,), (1,)), bias=np.ones(N, np.float32))
        same("plain", plain, x @ w.T + 1)
    finally:
        joined.close()


@pytest.mark.parametrize(
    "change, text",
    [
        ({"num_total_devices": 3}, f"num_total_devices: expected {RANKS}, as JAX says, got 3"),
        ({"num_devices_per_process": 1}, f"num_devices_per_process: expected {RANKS}, as JAX"),
        ({"process_id": 1}, "process_id: expected 0, as JAX says, got 1"),
        ({"tensor_parallel_size": 3}, f"tensor_parallel_size: .*divisor of {RANKS} devices, got 3"),
        ({"use_ce": False}, "use_ce: expected True, as rows are moved by copy engines, got False"),
        ({"use_cublasmp": True}, "use_cublasmp: expected False"),
    ],
)
def test_options_that_are_not_there(change, text):
    with pytest.raises(ValueError, match=text):
        te.collective_gemm_bootstrap(**JOB | {"tensor_parallel_size": RANKS} | change)


def test_arguments_that_are_not_there():
    x, w = np.ones((4, K), "f4"), np.ones((K, N), "f4")
    for change, text in (
        ({"lhs_quantizer": 3}, "lhs_quantizer: expected None, as there is no fp8, got 3"),
        ({"contracting_dims": ((0,), (0,))}, r"contracting_dims: expected the last dimension of"),
    ):
        with pytest.raises(ValueError, match=text):
            te.gemm(x, w, collective_op=AG, **change)
    with pytest.raises(TypeError, match="collective_op: expected a CollectiveOp, got 'ag'"):
        te.gemm(x, w, collective_op="ag")
    with pytest.raises(ValueError, match="kernel_axes: expected None, got"):
        te.dense(x, w, kernel_axes=("a", "b"))
    with pytest.raises(
        ValueError, match="collective_op_set: expected CollectiveOp.REDUCE_SCATTER b"
    ):
        te.dense(x, w, collective_op_set=te.CollectiveOpSet(AG, AG))


def test_arguments_have_transformer_engines_names_and_defaults():
    given = inspect.signature(te.collective_gemm_bootstrap).parameters.values()
    theirs = [p for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in theirs[:4]] == [
        "num_total_devices",
        "num_devices_per_process",
        "process_id",
        "tensor_parallel_size",
    ]
    assert {p.name: p.default for p in theirs[4:]} == {
        "num_max_streams": 3,
        "compute_stream_priority": 0,
        "communication_stream_priority": 0,
        "num_sm_for_communication": 2,
        "use_ce": True,
        "aggregate_all_gather": False,
        "use_cublasmp": False,
    }
    assert (AG.is_all_gather, RS.is_reduce_scatter, te.CollectiveOp.NONE.is_none) == (True,) * 3
    assert te.CollectiveOpSet.create(RS).backward is AG


@pytest.mark.parametrize(
    "function", [te.collective_gemm_bootstrap, te.gemm, te.dense], ids=lambda f: f.__name__
)
def test_the_page_says_of_every_option_what_becomes_of_it(function):
    title = re.escape(f"### `{function.__name__}(...)`")
    (section,) = re.findall(rf"{title}\n(.*?)(?:\n##|\Z)", PAGE.read_text(), re.DOTALL)
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    named = {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}
    assert named == set(inspect.signature(function).parameters)
