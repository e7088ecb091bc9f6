#!/usr/bin/env python3
"""Estimates what dispatch and combine would take between machines.

    python3 tools/model/estimate.py --hosts 32 --host-limit 4

Both operations are simulated chunk by chunk; nothing is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence

import net_model


def number(least: int) -> Callable[[str], int]:
    """Parses whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            expected = f"expected a whole number from {least} on"
            raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
        return int(text)

    return parse


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--hosts", type=number(1), default=2, help="machines")
    parser.add_argument("--ranks-per-host", type=number(1), default=8, help="of each machine")
    parser.add_argument("--tokens", type=number(0), default=4096, help="of each rank")
    parser.add_argument("--topk", type=number(1), default=8, help="experts of a token")
    parser.add_argument("--experts", type=number(1), default=256, help="of all ranks together")
    parser.add_argument("--row-bytes", type=number(16), default=14336, help="of a token")
    parser.add_argument("--routing", default="uniform", help="uniform or zipf:S")
    parser.add_argument("--histogram", help="JSON file: how often a gate chose each expert")
    parser.add_argument(
        "--host-limit", type=number(0), default=0, help="hosts of a token's experts; 0 = any"
    )
    parser.add_argument("--wire-gb-per-s", type=float, default=45.0, help="of each interface")
    parser.add_argument("--near-gb-per-s", type=float, default=340.0, help="copied by a rank")
    parser.add_argument("--latency-us", type=float, default=12.0, help="of a smallest message")
    parser.add_argument("--slots", type=number(1), default=4, help="chunks under way per partner")
    parser.add_argument("--chunk-kib", type=number(1), default=512, help="of a chunk")
    parser.add_argument("--shared-wire", action="store_true", help="a host's ranks share one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Prints the estimates."""
    parser = make_parser()
    arguments = parser.parse_args(words)
    histogram: list[float] = []
    try:
        if arguments.histogram:
            with open(arguments.histogram) as file:
                histogram = [float(weight) for weight in json.load(file)]
        problem = net_model.Problem(
            hosts=arguments.hosts,
            ranks_per_host=arguments.ranks_per_host,
            tokens=arguments.tokens,
            topk=arguments.topk,
            experts=arguments.experts,
            row_bytes=arguments.row_bytes,
            routing=arguments.routing,
            histogram=histogram,
            host_limit=arguments.host_limit,
        )
        machines = net_model.Machines(
            wire=net_model.Wire(arguments.wire_gb_per_s * 1e9, arguments.latency_us * 1e-6),
            near_bytes_per_s=arguments.near_gb_per_s * 1e9,
            wire_per_rank=not arguments.shared_wire,
            slots=arguments.slots,
            chunk_bytes=arguments.chunk_kib << 10,
        )
        shares = net_model.shares_of(problem)
    except (OSError, ValueError, ZeroDivisionError) as error:
        parser.error(str(error))
    results = {
        operation: net_model.simulate(problem, machines, operation, shares)
        for operation in ("dispatch", "combine")
    }
    if arguments.json:
        print(json.dumps({name: dataclasses.asdict(r) for name, r in results.items()}, indent=1))
        return 0
    print(_heading(arguments))
    print(
        f"{'':10}{'us':>10}{'entry us':>10}{'rows us':>10}{'MB sent':>10}{'messages':>10}"
        f"{'GB/s':>10}  bound"
    )
    for name, r in results.items():
        times = "".join(f"{s * 1e6:10.0f}" for s in (r.seconds, r.entry_s, r.rows_s))
        sent = f"{r.wire_bytes * 1e-6:10.1f}{r.messages:10}{r.wire_bytes / r.seconds / 1e9:10.2f}"
        print(f"{name:10}{times}{sent}  {r.bound}")
    return 0


def _heading(of: argparse.Namespace) -> str:
    """Tells of what the numbers are."""
    routing = of.histogram or of.routing
    wire = "shared by a host's ranks" if of.shared_wire else "of each rank"
    return (
        f"estimated, not measured: {of.hosts} hosts of {of.ranks_per_host} ranks,"
        f" {of.tokens} tokens of each rank\nto {of.topk} of {of.experts} experts ({routing}),"
        f" rows of {of.row_bytes} bytes;\ninterfaces of {of.wire_gb_per_s:g} GB/s {wire};"
        " MB, messages and GB/s are the busiest interface's"
    )


if __name__ == "__main__":
    sys.exit(main())
