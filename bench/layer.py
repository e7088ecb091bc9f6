"""Times MoELayer with its schedules in turn: serial, and transfers beside products in parts.

    python bench/layer.py [--ranks 2] [--tokens 1024,4096] [--json FILE]

Layers share their weights and their group, so that only the schedule differs. Each time is that of
a pass among some in a row, of the slowest rank, the median of five rounds, in which the schedules
take turns. Outputs of all schedules are compared, bit for bit, before anything is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import crossdock.torch as xd
from crossdock import launch

SCHEDULES: dict[str, bool | xd.Overlap] = {
    "serial": False,
    "1 part": xd.Overlap(1),
    "2 parts": xd.Overlap(2),
    "4 parts": xd.Overlap(4),
}
ROUNDS, CALLS = 5, 8


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call, of the slowest rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    time = torch.tensor([begin.elapsed_time(end) / CALLS], device="cuda")
    dist.all_reduce(time, dist.ReduceOp.MAX)
    return time.item()


def in_turn(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    for call in calls.values():
        milliseconds(call)
    rounds = [{name: milliseconds(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: sorted(one[name] for one in rounds)[ROUNDS // 2] for name in calls}


def layers_of(options: argparse.Namespace, tokens: int, comm: xd.Comm) -> dict[str, xd.MoELayer]:
    """One layer for each schedule, on the first one's group and weights."""
    layers: dict[str, xd.MoELayer] = {}
    for name, overlap in SCHEDULES.items():
        first = next(iter(layers.values()), None)
        place = {"comm": comm, "max_tokens_per_rank": tokens} if first is None else {}
        if first is not None:
            place = {"group": first.group}
        layer = xd.MoELayer(
            options.hidden, options.ffn, options.experts, options.topk, overlap=overlap, **place
        )
        if first is not None:
            layer.router, layer.experts = first.router, first.experts
        layers[name] = layer
    return layers


def measure(options: argparse.Namespace, tokens: int, comm: xd.Comm) -> list[dict[str, object]]:
    torch.manual_seed(comm.rank)
    x = torch.randn(tokens, options.hidden, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    grad = torch.randn_like(x)
    layers = layers_of(options, tokens, comm)

    def forward(layer: xd.MoELayer) -> torch.Tensor:
        with torch.no_grad():
            return layer(x).hidden

    def both(layer: xd.MoELayer) -> None:
        layer(x).hidden.backward(grad)

    outputs = [forward(layer) for layer in layers.values()]
    assert all(torch.equal(outputs[0], one) for one in outputs[1:])
    del outputs
    records = []
    for kind, step in (("forward", forward), ("forward and backward", both)):
        times = in_turn({name: partial(step, layer) for name, layer in layers.items()})
        records.append({"pass": kind, "tokens": tokens, "ms": times})
        if comm.rank == 0:
            cells = [f"{one:.2f} ({one / times['serial']:.3f})" for one in times.values()]
            print(f"| {kind} | {tokens} | {' | '.join(cells)} |", flush=True)
    return records


def run_rank(rank: int, options: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    torch.set_default_dtype(torch.bfloat16)
    dist.init_process_group("nccl", device_id=device)
    if rank == 0:
        print(f"| pass | tokens | {' | '.join(f'{name}, ms' for name in SCHEDULES)} |")
        print("|---" * (2 + len(SCHEDULES)) + "|", flush=True)
    records = []
    with xd.init(device=device) as comm:
        for tokens in map(int, options.tokens.split(",")):
            records += measure(options, tokens, comm)
    if options.json and rank == 0:
        with open(options.json, "w") as file:
            json.dump(vars(options) | {"records": records}, file)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="1024,4096", help="of a rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--ffn", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64, help="of all ranks")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--json", help="file for the times")
    options = parser.parse_args()
    launch.run(options.ranks, run_rank, options)


if __name__ == "__main__":
    main()
