"""Times `xd.MoELayer` as programs call it: forward passes, training steps, and decode steps.

    python bench/moe_layer.py [--ranks 2] [--shapes C,B] [--decode 64] [--json FILE]

A time is that of one of many passes in a row, from a barrier until the device has ended, over their
number, of the slowest rank, p50 over rounds in which all passes take turns. So it has the host's
time in it where that is the longer; `host` is the time until the last call has returned. Passes:

    forward          without gradients
    training         forward and backward, also to the tokens; gradients are given up before
    decode           few tokens without gradients, by prepare, dispatch and combine
    decode, few      the same by `layer(x, decode=True)`, with low-latency operations
    .., graph        a CUDA graph of one pass, on GPUs; its result is compared with the eager one's

Shapes are those of bench/layer.py, and C, which has half as many experts as B. Routing is that of
the layer's own router, of random tokens. `bench/layer.py` times schedules and parts of a layer.
`--device cpu --shapes tiny` shows that the program works, not times.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import crossdock.torch as xd
from crossdock import launch
from crossdock.cli import _console, _host, _report
from layer import SHAPES

SHAPES = SHAPES | {"C": (4096, 8, 32, 7168, 2048)}
COLUMNS = ("shape", "pass", "tokens", "us", "host_us")
Pass = Callable[[], torch.Tensor]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", default="C,B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--decode", type=int, default=64, help="tokens of a rank, at most 1024")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="in a row, in each round")
    parser.add_argument("--json", type=pathlib.Path, help="file for the times")
    options = parser.parse_args()
    options.shapes = options.shapes.split(",")
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"--shapes: expected some of {', '.join(SHAPES)}, got {', '.join(unknown)}")
    return options


def passes_of(name: str, decode: int, comm: xd.Comm) -> tuple[xd.MoELayer, dict[str, Pass]]:
    """A layer, and its passes by name; each gives results of all tokens."""
    tokens, topk, experts, hidden, ffn = SHAPES[name]
    torch.manual_seed(1)  # the same model on all ranks
    layer = xd.MoELayer(
        hidden,
        ffn,
        experts,
        topk,
        comm=comm,
        max_tokens_per_rank=max(tokens, decode),
        decode_tokens=decode,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(2 + comm.rank)
    x, grad = torch.randn(2, tokens, hidden, device=comm.device, dtype=torch.bfloat16)
    few = torch.randn(decode, hidden, device=comm.device, dtype=torch.bfloat16)
    leaf = x.clone().requires_grad_()

    def inferred(x: torch.Tensor, by_few: bool = False) -> Pass:
        return torch.no_grad()(lambda: layer(x, decode=by_few).hidden)

    def train() -> torch.Tensor:
        leaf.grad = None
        layer.zero_grad(set_to_none=True)
        out = layer(leaf)
        torch.autograd.backward([out.hidden, out.aux_loss], [grad, None])
        return out.hidden.detach()

    return layer, {
        "forward": inferred(x),
        "training": train,
        "decode": inferred(few),
        "decode, few": inferred(few, True),
    }


def captured(call: Pass) -> Pass:
    """A graph's replay, which gives the bits of the call."""
    wanted = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    out.fill_(torch.nan)
    if not torch.equal(replay(), wanted):
        raise SystemExit(f"rank {dist.get_rank()}: wrong result of a graph")
    return replay


def check(passes: dict[str, Pass]) -> None:
    """Both ways of the few tokens, and of all of them, have one result."""
    for ways in (("forward", "training"), ("decode", "decode, few")):
        results = [passes[name]() for name in ways]
        if not torch.equal(*results) or not torch.isfinite(results[0]).all():
            raise SystemExit(f"rank {dist.get_rank()}: results of {' and '.join(ways)} differ")


def times_of(call: Pass, steps: int, cuda: bool) -> list[float]:
    """Microseconds of a pass, and of its host, on this rank."""
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        call()
    returned = time.perf_counter()
    if cuda:
        torch.cuda.synchronize()
    return [(end - began) / steps * 1e6 for end in (time.perf_counter(), returned)]


def measure(name: str, options: argparse.Namespace, comm: xd.Comm) -> list[dict[str, object]]:
    layer, passes = passes_of(name, options.decode, comm)
    check(passes)
    cuda = comm.device.type == "cuda"
    if cuda:
        without = [way for way in passes if way != "training"]
        passes |= {f"{way}, graph": captured(passes[way]) for way in without}
    mine: dict[str, list[list[float]]] = {way: [] for way in passes}
    for _ in range(options.rounds + 1):  # the first warms up
        for way, call in passes.items():
            mine[way].append(times_of(call, options.steps, cuda))
    slowest = torch.tensor([times[1:] for times in mine.values()], device=comm.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    rows: list[dict[str, object]] = []
    for way, times in zip(passes, slowest.tolist()):
        us, host_us = (statistics.median(of) for of in zip(*times))
        tokens = options.decode if way.startswith("decode") else SHAPES[name][0]
        rows.append({"shape": name, "pass": way, "tokens": tokens, "us": us, "host_us": host_us})
    layer.group.close()
    if layer.decode_group is not None:
        layer.decode_group.close()
    return rows


def run_rank(rank: int, options: argparse.Namespace) -> list[dict[str, object]]:
    device = torch.device(f"cuda:{rank}" if options.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    with xd.init(device=device) as comm:
        rows = [row for name in options.shapes for row in measure(name, options, comm)]
    dist.destroy_process_group()
    return rows


def main() -> None:
    options = parse()
    doubts = _host.doubts(options.ranks, options.device)
    rows = launch.run(options.ranks, run_rank, options)[0]
    title = f"bench/moe_layer.py: {options.ranks} ranks, {options.device}, bfloat16"
    versions = {"torch": torch.__version__}
    _report.show_head(title, versions, doubts)
    cells = [[f"{v:.1f}" if isinstance(v, float) else str(v) for v in r.values()] for r in rows]
    _console.table(COLUMNS, cells, right=3)
    if options.json:
        head = {"title": title, "machine": _host.processor(), "doubts": doubts}
        head |= {"date": datetime.date.today().isoformat(), "versions": versions}
        _report.write_json({**head, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
