"""Times products of experts' rows by the library beside torch's kernels, on one GPU.

    python bench/grouped.py [--rows 16,64,256] [--shapes ds-in,mixtral-in] [--kinds gated]
                            [--json FILE]

Both multiply the same random operands, in turn: some calls of the one, some of the other, five
times over; a time is the median of these, between two events around the calls. `uniform` zones have
all the same number of rows, `skewed` ones any number up to twice as many. torch's kernels are those
of `torch.nn.functional.grouped_mm` and, in fp8 with scales of rows and columns, of
`torch._scaled_grouped_mm` without fast accumulation, which like the library adds up float32. The
library's fp8 with scales of blocks of 128 stands beside its own with scales of rows and columns.

Gated activations, of the first products' results, stand beside their floor: the time in which a
copy on the device moves as many bytes, as measured in turn with them. `fp8` is the forward call
whose result is fp8.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
from collections.abc import Callable

import torch

import crossdock.torch as xd
from crossdock._quantise import WAYS
from crossdock.launch import free_port
from crossdock.torch import grouped
from crossdock.torch.gated import FUSED

SHAPES = {  # local experts, columns of rows, columns of results
    "ds-in": (32, 7168, 4096),
    "ds64-in": (64, 7168, 4096),
    "ds-out": (32, 2048, 7168),
    "mixtral-in": (4, 4096, 28672),
    "qwen3-in": (32, 2048, 1536),
}
ROUNDS = 5


def microseconds(call: Callable[[], object], number: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(number):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / number


def in_turn(*calls: Callable[[], object], flops: int = 0) -> list[float]:
    number = max(3, min(30, int(2.5e12 / max(flops, 1))))
    for call in calls:
        microseconds(call, 3)
    rounds = [[microseconds(call, number) for call in calls] for _ in range(ROUNDS)]
    return [sorted(times)[ROUNDS // 2] for times in zip(*rounds)]


def rows_of_zones(experts: int, rows: int, skewed: bool, random: torch.Generator) -> torch.Tensor:
    counts = torch.full((experts,), rows)
    if skewed:
        counts = torch.randint(0, 2 * rows + 1, (experts,), generator=random)
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to("cuda", torch.int32)


def measure(
    comm: xd.Comm, name: str, rows: int, skewed: bool, random: torch.Generator
) -> dict[str, object]:
    """The library's and torch's times of the product in bf16 and fp8, and of the outer product."""
    experts, inner, outer = SHAPES[name]
    offsets = rows_of_zones(experts, rows, skewed, random)
    ends, total = offsets[1:], int(offsets[-1])
    flops = 2 * total * inner * outer
    torch.manual_seed(rows)
    x = torch.randn(total, inner, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(total, outer, device="cuda", dtype=torch.bfloat16)
    matrices = torch.randn(experts, outer, inner, device="cuda", dtype=torch.bfloat16)
    matrices = matrices.transpose(1, 2)
    codes = x.to(torch.float8_e4m3fn), matrices.to(torch.float8_e4m3fn)
    scales = torch.rand(total, device="cuda"), torch.rand(experts, outer, device="cuda")
    of_rows = torch.rand(total, -(-inner // 128), device="cuda")
    of_blocks = torch.rand(experts, -(-outer // 128), -(-inner // 128), device="cuda")
    gradient = torch.empty(experts, inner, outer, device="cuda", dtype=torch.bfloat16)
    assert grouped._GROUPED_MM is not None
    by_torch = grouped._GROUPED_MM

    def scaled() -> object:
        return torch._scaled_grouped_mm(*codes, *scales, offs=ends, out_dtype=torch.bfloat16)

    def product_fp8() -> object:
        return grouped.run_product(comm, *codes, offsets, a_scale=scales[0], b_scale=scales[1])

    def in_blocks() -> object:
        return grouped.run_product(comm, *codes, offsets, a_scale=of_rows, b_scale=of_blocks)

    def outer_product() -> None:
        given = {"a": x, "b": y, "offsets": offsets, "d": gradient}
        grouped._calls.run(comm.core, "grouped_outer", x, given)

    bf16 = in_turn(
        lambda: grouped.run_product(comm, x, matrices, offsets),
        lambda: by_torch(x, matrices, offs=ends),
        flops=flops,
    )
    fp8 = in_turn(product_fp8, scaled, in_blocks, flops=flops)
    outers = in_turn(outer_product, lambda: by_torch(x.t(), y, offs=ends), flops=flops)
    sizes = {"shape": name, "rows": rows, "zones": "skewed" if skewed else "uniform"}
    blocks = [fp8[2], fp8[0]]
    return sizes | {"bf16": bf16, "fp8": fp8[:2], "fp8 in blocks": blocks, "outer": outers}


def print_products(
    comm: xd.Comm, shapes: list[str], rows: list[int], random: torch.Generator
) -> list[dict[str, object]]:
    records = []
    kinds = ("bf16", "fp8", "fp8 in blocks", "outer")
    peers = ("torch", "torch", "by rows", "torch")
    heads = (f"{kind} µs | {peer} / it |" for kind, peer in zip(kinds, peers, strict=True))
    print("| shape | rows | zones |", *heads)
    print("|---" * (3 + 2 * len(kinds)) + "|")
    for name, count, skewed in itertools.product(shapes, rows, (False, True)):
        record = measure(comm, name, count, skewed, random)
        records.append(record)
        pairs = [record[kind] for kind in kinds]
        cells = [f"{ours:.0f} | {torchs / ours:.2f}" for ours, torchs in pairs]
        print(f"| {name} | {count} | {record['zones']} | {' | '.join(cells)} |", flush=True)
    return records


def measure_gated(comm: xd.Comm, name: str, rows: int, activation: str) -> dict[str, object]:
    """Times of the activation and its derivative, each with that of a copy of as many bytes."""
    experts, _, outer = SHAPES[name]
    offsets = torch.arange(experts + 1, device="cuda", dtype=torch.int32) * rows
    total, columns = experts * rows, outer // 2
    torch.manual_seed(rows)
    inner = torch.randn(total, outer, device="cuda", dtype=torch.bfloat16)
    grad_out = torch.randn(total, columns, device="cuda", dtype=torch.bfloat16)
    out, grad_inner = torch.empty_like(grad_out), torch.empty_like(inner)
    halves = dict(zip(("gate", "up"), inner.chunk(2, dim=-1))) | {"offsets": offsets}
    gradients = dict(zip(("grad_gate", "grad_up"), grad_inner.chunk(2, dim=-1)))
    fields = {"activation": FUSED[activation]}

    def forward() -> None:
        grouped._calls.run(comm.core, "gated", inner, halves | {"out": out}, **fields)

    def backward() -> None:
        given = halves | gradients | {"grad_out": grad_out}
        grouped._calls.run(comm.core, "gated_bwd", inner, given, **fields)

    codes = torch.empty_like(out, dtype=torch.float8_e4m3fn)
    scales = torch.empty(total, columns // 128, device="cuda")

    def in_fp8() -> None:
        given = halves | {"out": codes, "out_scales": scales}
        grouped._calls.run(
            comm.core, "gated", inner, given, quantise=WAYS["fp8_block128"].code, **fields
        )

    def copies(tensors: float) -> Callable[[], object]:
        """A copy that reads and writes the bytes of so many tensors like `out`."""
        source = torch.empty(int(tensors * out.numel()), device="cuda", dtype=torch.uint8)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    pairs = {
        "forward": (forward, copies(3)),
        "fp8": (in_fp8, copies(2.5 + 1 / 64)),
        "backward": (backward, copies(5)),
    }
    times = {kind: in_turn(*pair) for kind, pair in pairs.items()}
    return {"shape": name, "rows": rows, "activation": activation} | times


def print_gated(comm: xd.Comm, shapes: list[str], rows: list[int]) -> list[dict[str, object]]:
    records = []
    kinds = ("forward", "fp8", "backward")
    print("| columns of | rows | activation |", *(f"{kind}, µs | of a copy |" for kind in kinds))
    print("|---" * (3 + 2 * len(kinds)) + "|")
    for name in (name for name in shapes if name.endswith("-in")):
        for count in rows:
            for activation in ("silu", "gelu_tanh"):
                record = measure_gated(comm, name, count, activation)
                records.append(record)
                pairs = [record[kind] for kind in kinds]
                cells = [f"{time:.0f} | {time / copy:.2f}" for time, copy in pairs]
                print(f"| {name} | {count} | {activation} | {' | '.join(cells)} |", flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", default="16,64,128,256,512,1024", help="of a zone, on average")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--kinds", default="products,gated")
    parser.add_argument("--json", help="file for the times")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place, MASTER_PORT=str(free_port()))
    random = torch.Generator().manual_seed(1)
    records = []
    shapes, rows = options.shapes.split(","), [int(one) for one in options.rows.split(",")]
    with xd.init(device="cuda") as comm:
        if "products" in options.kinds:
            records += print_products(comm, shapes, rows, random)
        if "gated" in options.kinds:
            records += print_gated(comm, shapes, rows)
    if options.json:
        head = {"title": "bench/grouped.py", "date": datetime.date.today().isoformat()}
        head |= {"gpus": {"name": torch.cuda.get_device_name(), "count": 1}}
        with open(options.json, "w") as file:
            json.dump(head | {"torch": torch.__version__, "rows": records}, file, indent=0)


if __name__ == "__main__":
    main()
