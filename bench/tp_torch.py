"""Ways to a product on torch tensors: the C API, crossdock.torch.tp, and torch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import crossdock.torch as xd
from crossdock.torch import tp
from crossdock.torch._calls import current_stream, spec
from tp_problem import Problem, Way

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# By their names of today, and of torch before 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
PRODUCT = "product alone"
APART = "one after the other"


@functools.lru_cache(maxsize=1)
def operands(p: Problem, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's ``a`` and its weight ``[N, K]``, on the CPU: ordinary numbers, small enough to sum.

    Zeros or whole numbers would let a GPU run at a higher clock than a model's data do. Each way of
    a problem asks for them, and nobody writes into them.
    """
    generator = torch.Generator("cpu").manual_seed(p.n + p.k + rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(DTYPES[p.dtype])

    return random(p.own if p.gathers else p.tokens, p.k), random(p.n, p.k)


class TorchWays:
    """One rank's tensors of a problem, and what multiplies them."""

    def __init__(self, p: Problem, comm: xd.Comm) -> None:
        self.p, self.device = p, comm.device
        self.cuda = comm.device.type == "cuda"
        self.a, self.weight = (matrix.to(comm.device) for matrix in operands(p, comm.rank))
        rows = p.own if p.operation == "reduce_scatter" else p.tokens
        self.out = self.a.new_empty(rows, p.n)
        self.whole = self.a.new_empty(p.tokens, p.k if p.gathers else p.n)
        self.context = tp.TpContext(
            max_tokens=p.own, max_k=max(p.n, p.k), max_n=p.n, dtype=self.a.dtype, comm=comm
        )

    def ways(self) -> Iterator[Way]:
        """All that run here; results agree, but for that of the product alone."""
        yield self._way(APART, self._apart)
        if self.p.gathers:
            all_gather(self.whole, self.a)
        yield self._way(PRODUCT, self._product)._replace(result=None)
        yield from self._both("C API", self._core)
        yield from self._both("torch", self._torch)
        if not self.cuda:
            return
        if self.p.operation != "all_reduce":
            yield from self._both("torch's fused", self._fused())
        else:
            for name, call in self._reduced().items():
                yield from self._both(name, call)

    def _way(self, name: str, call: Callable[[], Any]) -> Way:
        finish = (lambda _: torch.cuda.synchronize()) if self.cuda else (lambda _: None)
        return Way(name, call, finish, lambda found: found.float().cpu())

    def _both(self, name: str, call: Callable[[], torch.Tensor]) -> Iterator[Way]:
        """By calls, and on GPUs as a CUDA graph."""
        yield self._way(name, call)
        if self.cuda:
            yield self._way(f"{name}, graph", self._captured(call))

    def _core(self) -> torch.Tensor:
        getattr(self.context.core, self.p.operation)(
            {
                "a": spec(self.a),
                "b": spec(self.weight),
                "d": spec(self.out),
                "transpose_b": 1,
                "stream": current_stream(self.device),
            }
        )
        return self.out

    def _torch(self) -> torch.Tensor:
        call = {
            "all_gather": tp.all_gather_matmul,
            "reduce_scatter": tp.matmul_reduce_scatter,
            "all_reduce": tp.matmul_all_reduce,
        }[self.p.operation]
        return call(self.a, self.weight.t(), self.context)

    def _product(self) -> torch.Tensor:
        rows = self.whole if self.p.gathers else self.a
        return torch.matmul(rows, self.weight.t(), out=self.out if self.p.gathers else self.whole)

    def _apart(self) -> torch.Tensor:
        if self.p.gathers:
            all_gather(self.whole, self.a)
            return self._product()
        self._product()
        if self.p.operation == "all_reduce":
            dist.all_reduce(self.whole)
            return self.whole
        reduce_scatter(self.out, self.whole)
        return self.out

    def _fused(self) -> Callable[[], torch.Tensor]:
        import torch.distributed._symmetric_memory as symmetric_memory

        name, b = dist.group.WORLD.group_name, self.weight.t()
        symmetric_memory.enable_symm_mem_for_group(name)
        operators = torch.ops.symm_mem
        if self.p.gathers:
            return lambda: operators.fused_all_gather_matmul(self.a, [b], 0, name)[1][0]
        return lambda: operators.fused_matmul_reduce_scatter(self.a, b, "sum", 0, name)

    def _reduced(self) -> dict[str, Callable[[], torch.Tensor]]:
        """The product into symmetric memory of torch's, and its sums by loads of peers' memory.

        Operations by multicast are none of these, and set_up() has switched it off.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        name = dist.group.WORLD.group_name
        symmetric_memory.enable_symm_mem_for_group(name)
        shape = {"dtype": self.a.dtype, "device": self.device}
        partial = symmetric_memory.empty(self.p.tokens, self.p.n, **shape)
        symmetric_memory.rendezvous(partial, name)
        operators = torch.ops.symm_mem

        def product() -> torch.Tensor:
            return torch.matmul(self.a, self.weight.t(), out=partial)

        return {
            "torch's one-shot": lambda: operators.one_shot_all_reduce(product(), "sum", name),
            "torch's two-shot": lambda: operators.two_shot_all_reduce_(product(), "sum", name),
        }

    def _captured(self, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay
