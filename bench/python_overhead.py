"""Times a call of crossdock.torch on the host, beside an empty operator of the same signature.

    python bench/python_overhead.py [--device cpu|cuda] [--json]

One rank with a handful of tokens, so that the operations themselves take little. On CUDA the calls
return before the operations have run: the device is synchronised between batches of calls, and its
time is not counted. The empty operator is made by torch.library.custom_op, with a derivative, as
one would write it without further thought. The smallest mean of a batch counts, since disturbances
of the host only add time.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

import torch
from torch import Tensor

import crossdock.torch as xd
from crossdock.cli import _console

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


def _save_plan(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])


_empty_dispatch.register_autograd(lambda ctx, *grads: (None,) * 9, setup_context=_save_plan)
_empty_combine.register_autograd(lambda ctx, *grads: (None,) * 6, setup_context=_save_plan)


def microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Mean time of a call in the fastest of some batches of calls."""
    best = float("inf")
    for _ in range(BATCHES + 1):  # the first warms up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - began) / CALLS * 1e6)
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
            for name, (call, empty) in pairs.items():
                ours, least = microseconds(call, device), microseconds(empty, device)
                found.append(
                    {
                        "op": name,
                        "grad": grad,
                        "call_us": ours,
                        "empty_us": least,
                        "beyond_us": ours - least,
                    }
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
    rows = measure(device)
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
