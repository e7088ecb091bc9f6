"""Where the ranks are: devices of this process, or processes of this host with one device each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import crossdock.launch

if TYPE_CHECKING:
    from jax.sharding import Mesh

_PORT = "MOE_MODEL_PORT"  # of a process started by run_processes


def started_rank() -> int | None:
    """This process's rank, if `run_processes` started it."""
    return int(os.environ["RANK"]) if _PORT in os.environ else None


def run_processes(ranks: int, main: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Runs ``main(arguments)`` in ``ranks`` processes; returns the first exit code that is not 0.

    Raises:
        crossdock.launch.RankFailed: a rank raised or died; the others have been ended.
    """
    port = str(crossdock.launch.free_port())
    codes = crossdock.launch.run(ranks, _run_rank, port, main, arguments)
    return next((code for code in codes if code), 0)


def _run_rank(rank: int, port: str, main: Callable[[list[str]], int], arguments: list[str]) -> int:
    os.environ[_PORT] = port
    try:
        return main(arguments)
    except SystemExit as error:  # a mistake that it has told
        return int(error.code or 0)


def set_up_jax(ranks: int, device: str) -> None:
    """Makes JAX see the devices of ``ranks`` ranks; to be called before anything else of it.

    Args:
        ranks: devices of the mesh.
        device: "cpu" or "gpu".

    Raises:
        ValueError: there are not so many.
    """
    rank = started_rank()
    if device == "cpu":
        # Keep what jax.checkpoint repeats behind the forward pass: see docs/jax.md, Order.
        flags = "--xla_disable_hlo_passes=cse_barrier_expander"
        if rank is None:  # a CPU has as many devices as it is told to have
            flags += f" --xla_force_host_platform_device_count={ranks}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    import jax  # reads the flags

    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[device])
    jax.config.update("jax_default_matmul_precision", "float32")  # also on GPUs
    if rank is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{os.environ[_PORT]}",
            num_processes=ranks,
            process_id=rank,
            local_device_ids=[rank] if device == "gpu" else None,
        )
    try:
        found = len(jax.devices())
    except (RuntimeError, AssertionError) as error:
        why = str(error) or "this JAX was installed for the CPU only"
        problem = f"expected {ranks} devices for the mesh, found none: {why}"
        raise ValueError(f"--device {device}: {problem}") from None
    if found < ranks:
        raise ValueError(f"--device {device}: expected {ranks} devices for the mesh, found {found}")


def meet(mesh: Mesh) -> None:
    """Lets the processes of a mesh connect for XLA's own collectives, which add up gradients.

    On the CPU they give up when another comes half a minute later, and compiling the model may keep
    processes that long apart. Now they are together.
    """
    import jax
    from jax.sharding import PartitionSpec as P

    if jax.process_count() == 1:
        return
    for axes in (mesh.axis_names, *mesh.axis_names):
        total = jax.shard_map(
            lambda axes=axes: jax.lax.psum(jax.lax.axis_index(mesh.axis_names), axes)[None],
            mesh=mesh,
            in_specs=(),
            out_specs=P(mesh.axis_names),
            check_vma=False,
        )
        jax.block_until_ready(jax.jit(total)())
