"""``crossdock bench``: expert parallelism measured through Python."""

from __future__ import annotations

import argparse
import dataclasses

from crossdock._core import constants
from crossdock.cli import _bench_gemm, _bench_options, _ll_report, _rank, _report
from crossdock.cli._ll_steps import SCALED_COLUMNS
from crossdock.cli._usage import OK, UsageError, add_number, numbers
from crossdock.cli._workload import LAYOUTS

_EP = """Times prepare, dispatch, combine and their backward passes over ranks that it
starts itself on this host, beside a copy of as many bytes in the same run. Before it measures, it
checks every element of one round trip."""
_LL = """Times low-latency dispatch and combine, whole and in halves, bf16 and quantised, over ranks
that it starts itself on this host. Beside them, on the same tokens: prepare, dispatch and combine
of the expert-major layout. Before it measures, it checks every element of a round trip of each."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``bench`` and its benchmarks to the commands."""
    bench = commands.add_parser(
        "bench", help="measure on this machine", description="Measures on this machine."
    )
    kinds = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_ep(kinds)
    _add_ll(kinds)
    _bench_gemm.add_command(kinds)


def _add_ep(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "ep", help="expert parallelism: dispatch and combine", description=_EP
    )
    defaults = _bench_options.Defaults(hidden=4096, experts=64, iters=50, warmup=5)
    sizes = _bench_options.add_options(parser, defaults)
    add_number(sizes, "--tokens", "T", "tokens of each rank", 1024)
    sizes.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="of received rows (default: %(default)s)",
    )
    parser.set_defaults(run=run_ep)


def _add_ll(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "ll", help="low latency: dispatch and combine of few tokens", description=_LL
    )
    defaults = _bench_options.Defaults(hidden=7168, experts=256, iters=200, warmup=20)
    sizes = _bench_options.add_options(parser, defaults)
    sizes.add_argument(
        "--tokens",
        type=numbers(1),
        default="1,8,16,32,64,128,256,512",
        metavar="T,T,...",
        help="tokens of each rank, one after another (default: %(default)s)",
    )
    parser.set_defaults(run=run_ll)


def run_ep(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes."""
    workload = _bench_options.workload(arguments, arguments.tokens, arguments.layout, {})
    _bench_options.check_outputs(arguments)
    results = _bench_options.measure("crossdock bench ep", workload.ranks, _rank.bench, workload)
    report = _report.make_report(workload, results)
    _report.show(report)
    if arguments.json:
        _report.write_json(_report.as_json(report), arguments.json)
    if arguments.plot:
        _report.draw(report, arguments.plot)
    return OK


def run_ll(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes."""
    limits = {"tokens": constants.LL_MAX_TOKENS, "ranks": constants.LL_MAX_RANKS}
    workload = _bench_options.workload(arguments, max(arguments.tokens), "expert_major", limits)
    if workload.hidden % SCALED_COLUMNS:
        raise UsageError(
            f"--hidden {workload.hidden}: expected a multiple of {SCALED_COLUMNS}, the columns of "
            "one scale"
        )
    _bench_options.check_outputs(arguments)
    cases = [dataclasses.replace(workload, tokens=tokens) for tokens in arguments.tokens]
    results = _bench_options.measure(
        "crossdock bench ll", workload.ranks, _rank.bench_low_latency, cases
    )
    report = _ll_report.make_report(cases, results)
    _ll_report.show(report)
    if arguments.json:
        _report.write_json(_ll_report.as_json(report), arguments.json)
    if arguments.plot:
        _ll_report.draw(report, arguments.plot)
    return OK
