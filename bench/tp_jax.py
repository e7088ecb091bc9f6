"""Ways to a product by crossdock.jax.tp: a program of one, and a program of several in a row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from crossdock.jax import tp
from tp_problem import Problem, Way
from tp_torch import operands

FUNCTIONS = {
    "all_gather": tp.all_gather_matmul,
    "reduce_scatter": tp.matmul_reduce_scatter,
    "all_reduce": tp.matmul_all_reduce,
}
# How a, the weight [N, K] and the result lie on the mesh.
SPECS = {
    "all_gather": (P("tp"), P("tp"), P(None, "tp")),
    "reduce_scatter": (P(None, "tp"), P(None, "tp"), P("tp")),
    "all_reduce": (P(None, "tp"), P(None, "tp"), P()),
}


class JaxRanks:
    """This process's device in a mesh of all ranks, one per process."""

    def __init__(self, device: str, rank: int, ranks: int, port: int) -> None:
        if ranks > 1:
            own = [rank] if device == "cuda" else None
            jax.distributed.initialize(f"127.0.0.1:{port}", ranks, rank, local_device_ids=own)
        self.rank = rank
        self.mesh = Mesh(np.array(jax.devices()[:ranks]), ("tp",))
        self.tp = tp.init(self.mesh, "tp")

    def close(self) -> None:
        """Leaves; the contexts go with the programs."""
        self.tp.close()

    def ways(self, p: Problem, calls: int) -> Iterator[Way]:
        """Programs of one product, and of `calls` of them."""
        for name, products in (("jax", 1), (f"jax, {calls} in a program", calls)):
            yield Way(name, self._program(p, products), jax.block_until_ready, _own_part, products)

    def _program(self, p: Problem, products: int) -> Callable[[], Any]:
        """Runs a compiled program. The order that it returns is the next call's.

        So the products of two calls never run beside each other, as in a model.
        """
        in_a, in_b, out = SPECS[p.operation]

        def several(order: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
            for _ in range(products):
                found = FUNCTIONS[p.operation](a, b, transpose_b=True, after=order)
                order = found.order
            return order, found.out

        mapped = jax.shard_map(
            several, mesh=self.mesh, in_specs=(P("tp"), in_a, in_b), out_specs=(P("tp"), out)
        )
        a, b = operands(p, self.rank)
        order = self._place(torch.zeros(1), P("tp"))
        given = self._place(a, in_a), self._place(b, in_b)
        program = jax.jit(mapped).lower(order, *given).compile()

        def call() -> Any:
            nonlocal order
            order, found = program(order, *given)
            return found

        return call

    def _place(self, own: torch.Tensor, spec: P) -> jax.Array:
        """The global array of which each rank has such a part."""
        sharding = NamedSharding(self.mesh, spec)
        split = [i for i, axes in enumerate(spec) if axes]
        shape = [n * self.mesh.size if i in split else n for i, n in enumerate(own.shape)]
        part = jax.device_put(_numpy(own), sharding.addressable_devices.copy().pop())
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [part])


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jax.numpy.bfloat16)
    return tensor.numpy()


def _own_part(found: jax.Array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(found.addressable_data(0)).astype(np.float32))


def host_calls(p: Problem) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Of one rank: a call of a compiled program of one product, and of one that adds arrays.

    XLA would not run a program that does nothing.
    """
    a, b = map(_numpy, operands(p, 0))
    given = jax.device_put((a, b))
    order = jax.numpy.zeros(1)
    product = jax.jit(functools.partial(FUNCTIONS[p.operation], transpose_b=True))
    empty = jax.jit(lambda a, b, after: (a + a, after + after))
    return lambda: product(*given, after=order), lambda: empty(*given, order)
