"""Times a call of crossdock.torch on the host, beside an empty operator of the same signature.

    python bench/python_overhead.py [--device cpu|cuda] [--json]

One rank with a handful of tokens, so that the operations themselves take little. On CUDA the calls
return before the operations have run: the device is synchronised between batches of calls, and its
time is not counted. The empty operator is made by torch.library.custom_op, with a derivative, as
one would write it without further thought. The smallest mean of a batch counts, since disturbances
of the host only add time. On the CPU with one thread it is this thread's own time, in which other
programs are not.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import crossdock.torch as xd
from crossdock.cli import _console
from crossdock.torch import tp

BATCHES, CALLS = 100, 100
TOKENS, HIDDEN, EXPERTS, TOPK = 4, 64, 4, 2
TARGET_US = 25.0


@torch.library.custom_op("crossdock_bench::dispatch", mutates_args=())
def _empty_dispatch(
    plan: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    scales: Tensor | None,
    order: Tensor,
    group: int,
    num_tokens: int,
    topk: int,
    quantise: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(0) for _ in range(6))


@torch.library.custom_op("crossdock_bench::combine", mutates_args=())
def _empty_combine(
    plan: Tensor,
    expert_out: Tensor,
    weights: Tensor | None,
    order: Tensor,
    group: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    return expert_out.new_empty(0), expert_out.new_empty(0)


@torch.library.custom_op("crossdock_bench::matmul", mutates_args=())
def _empty_matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    order: Tensor,
    context: int,
    tokens: list[int] | None,
    epilogue: int,
    algo: int,
    keep_gathered: bool,
    keep_activation: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return a.new_empty(0), a.new_empty(0), a.new_empty(0)


def _save_plan(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])


_empty_dispatch.register_autograd(lambda ctx, *grads: (None,) * 9, setup_context=_save_plan)
_empty_combine.register_autograd(lambda ctx, *grads: (None,) * 6, setup_context=_save_plan)
_empty_matmul.register_autograd(lambda ctx, *grads: (None,) * 11, setup_context=_save_plan)


def microseconds(
    calls: Iterable[Callable[[], object]],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Of each the mean time in its fastest batch of calls; they take batches in turn."""
    calls = list(calls)
    best = [float("inf")] * len(calls)
    for _ in range(BATCHES + 1):  # the first warms up
        for i, call in enumerate(calls):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = clock()
            for _ in range(CALLS):
                call()
            best[i] = min(best[i], (clock() - began) / CALLS * 1e6)
    return best


def measure(device: torch.device) -> list[dict[str, object]]:
    """One row per operation, without and with gradients."""
    with xd.init(device=device):
        group = xd.EpGroup(
            num_experts=EXPERTS,
            hidden=HIDDEN,
            max_topk=TOPK,
            max_tokens_per_rank=TOKENS,
            dtype=torch.float32,
        )
        topk_idx = torch.arange(TOKENS * TOPK, device=device).view(TOKENS, TOPK) % EXPERTS
        x = torch.randn(TOKENS, HIDDEN, device=device)
        weights = torch.rand(TOKENS, TOPK, device=device)
        base = group.prepare(topk_idx)
        received = xd.dispatch(base, x, weights)
        dispatch_empty = torch.ops.crossdock_bench.dispatch.default
        combine_empty = torch.ops.crossdock_bench.combine.default
        found = []
        for grad in (False, True):
            x.requires_grad_(grad)
            rows = received.tokens.detach().requires_grad_(grad)
            # A plan's order grows a chain of gradients: each call starts from the same plan.
            pairs = {
                "dispatch": (
                    lambda: xd.dispatch(base.detach(), x, weights),
                    lambda: dispatch_empty(
                        base.data, x, weights, None, base.order, group.handle, TOKENS, TOPK, False
                    ),
                ),
                "combine": (
                    lambda rows=rows: xd.combine(base.detach(), rows, received.weights),
                    lambda rows=rows: combine_empty(
                        base.data, rows, received.weights, base.order, group.handle, TOKENS
                    ),
                ),
            }
            found += [_row(name, grad, *pair, device) for name, pair in pairs.items()]
    return found


def _row(
    name: str,
    grad: bool,
    call: Callable[[], object],
    empty: Callable[[], object],
    device: torch.device,
) -> dict[str, object]:
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    ours, least = microseconds((call, empty), device, clock)
    times = {"call_us": ours, "empty_us": least, "beyond_us": ours - least}
    return {"op": name, "grad": grad, **times}


def measure_products(device: torch.device) -> list[dict[str, object]]:
    """The same of products of spread matrices; the algorithm is named, lest one rank call torch."""
    with xd.init(device=device):
        context = tp.TpContext(max_tokens=TOKENS, max_k=HIDDEN, max_n=HIDDEN, dtype=torch.float32)
        x = torch.randn(TOKENS, HIDDEN, device=device)
        weight = torch.randn(HIDDEN, HIDDEN, device=device)
        number = context.order, context.handle
        empty = torch.ops.crossdock_bench.matmul.default
        found = []
        for grad in (False, True):
            x.requires_grad_(grad)
            for call in (tp.all_gather_matmul, tp.matmul_reduce_scatter, tp.matmul_all_reduce):
                found.append(
                    _row(
                        call.__name__,
                        grad,
                        lambda call=call: call(x, weight.t(), context, algo="sequential"),
                        lambda: empty(x, weight.t(), None, None, *number, None, 0, 0, False, False),
                        device,
                    )
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="cpu or cuda; default: CUDA if it is there")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args()
    device = None if options.device is None else torch.device(options.device)
    with xd.init(device=device) as comm:
        device = comm.device
    rows = measure(device) + measure_products(device)
    if options.json:
        for row in rows:
            print(json.dumps({"device": str(device), "torch": torch.__version__, **row}))
        return
    print(
        f"host time per call in microseconds; {device}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
    cells = [
        [row["op"], "yes" if row["grad"] else "no"]
        + [f"{row[key]:.1f}" for key in ("call_us", "empty_us", "beyond_us")]
        for row in rows
    ]
    header = ("operation", "gradients", "call", "empty operator", "beyond it")
    _console.table(header, cells, right=3)
    worst = max(row["beyond_us"] for row in rows)
    print(f"{'met' if worst <= TARGET_US else 'MISSED'}: at most {TARGET_US:.0f} beyond it")


if __name__ == "__main__":
    main()
