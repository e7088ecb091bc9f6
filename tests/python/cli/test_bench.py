"""crossdock bench ep: what it measures, how it ends when something is wrong."""

from __future__ import annotations

import os
import re
import signal

import numpy as np
import pytest

from commands import (
    QUICK,
    SMALL,
    alive,
    children,
    report,
    run,
    start,
    wait_until,
    wide_lines,
    workload,
)
from crossdock.cli import _engine, _rank, _report
from crossdock.cli._launch import run_ranks
from crossdock.cli._usage import CommandError
from crossdock.cli._workload import choices, sum_of_copies, volume

OPERATIONS = ["copy", "prepare", "dispatch", "combine", "combine_bwd", "dispatch_bwd"]
ENDLESS = ["bench", "ep", *QUICK, "--iters", "100000000"]


@pytest.mark.parametrize(
    "through, layout, dtype",
    [
        ("numpy", "rank_major", "fp32"),
        ("torch", "expert_major", "bf16"),
    ],
)
def test_measures_every_operation(tmp_path, through, layout, dtype):
    if through == "torch":
        pytest.importorskip("torch")
    options = f"--through {through} --layout {layout} --dtype {dtype} --iters 3"
    found, said = report(tmp_path / "ep.json", "ep", *SMALL, *options.split())
    assert [row["operation"] for row in found["rows"]] == OPERATIONS
    for row in found["rows"]:
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert f"\n{row['operation']} " in said
    assert wide_lines(said) == []
    given = {name: found["workload"][name] for name in ("ranks", "tokens", "through", "layout")}
    assert given == {"ranks": 2, "tokens": 16, "through": through, "layout": layout}
    assert through in found["versions"]


def test_every_choice_that_help_lists_runs():
    help = run("bench", "ep", "--help").stdout
    options = ("--layout", "--routing", "--dtype")
    choices = [re.search(rf"{option} {{([^}}]+)}}", help)[1].split(",") for option in options]
    for number in range(max(map(len, choices))):  # each choice at least once
        chosen = [of_one[number % len(of_one)] for of_one in choices]
        words = [word for pair in zip(options, chosen) for word in pair]
        ended = run("bench", "ep", *QUICK, *words, "--iters", "1", "--warmup", "0")
        assert ended.returncode == 0, (chosen, ended.stderr)


@pytest.mark.parametrize("benchmark, options", [("ep", []), ("ll", ["--hidden", "128"])])
def test_draws_a_plot(tmp_path, benchmark, options):
    pytest.importorskip("matplotlib")
    path = tmp_path / "drawn.png"
    ended = run("bench", benchmark, *QUICK, *options, "--plot", str(path))
    assert ended.returncode == 0, ended.stderr
    assert path.read_bytes().startswith(b"\x89PNG")


def test_one_rank_and_a_hot_expert():
    ended = run("bench", "ep", *QUICK, "--ranks", "1", "--routing", "hot")
    assert ended.returncode == 0, ended.stderr
    assert "a rank sends 0.00 MB to others" in ended.stdout


KILLED = "crossdock: rank 1: ended by SIGKILL (is memory short?)\n"


@pytest.mark.parametrize(
    "hit, number, end, said",
    [
        ("command", signal.SIGINT, 130, ""),
        ("rank 1", signal.SIGKILL, 1, KILLED),
    ],
)
def test_a_signal_ends_it_in_few_words_and_leaves_no_rank(hit, number, end, said):
    bench = start(*ENDLESS)
    wait_until(lambda: len(children(bench.pid)) == 2)
    ranks = children(bench.pid)
    os.kill(bench.pid if hit == "command" else max(ranks), number)  # the second one started
    out, err = bench.communicate(timeout=20)
    assert (bench.returncode, out, err) == (end, "", said)
    wait_until(lambda: not any(map(alive, ranks)))


def test_the_error_of_a_rank_is_told():
    uneven = workload(ranks=2, experts=3, routing="hot", topk=1)
    with pytest.raises(CommandError, match=r"^rank [01]: InvalidArgument: .*num_experts"):
        run_ranks(2, _rank.trial, uneven, limit=30)


def test_a_rank_that_does_not_answer_is_named():
    alone = workload(ranks=2)
    with pytest.raises(CommandError, match="no answer in time from rank 0, 1"):
        run_ranks(2, _rank.trial, alone, limit=0)


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
@pytest.mark.parametrize("routing", ["uniform", "zipf", "hot"])
def test_volume_counts_the_rows_one_by_one(layout, routing):
    w = workload(layout=layout, routing=routing)
    received, wire, everything = [0] * 4, [0] * 4, [0] * 4
    for source in range(4):
        for experts in choices(w, source).tolist():
            assert len(set(experts)) == 3
            holders = [expert // 2 for expert in experts]
            everything[source] += len(set(holders))
            wire[source] += len(set(holders) - {source})
            for rank in holders if layout == "expert_major" else set(holders):
                received[rank] += 1
    counted = volume(w)
    assert (counted.received, counted.wire_rows, counted.all_rows) == (received, wire, everything)


def test_routings_are_what_they_are_called():
    hot = choices(workload(routing="hot", tokens=100), 0)
    assert (hot == 0).any(axis=1).all()
    loads = np.bincount(choices(workload(routing="zipf", tokens=2000), 0).ravel(), minlength=8)
    assert loads[0] > 2 * loads[7]


def test_copies_are_rows_of_the_layout():
    ids = choices(workload(), 1)
    assert sum_of_copies(workload(), 1).tolist() == [3] * 9
    distinct = [len(set(row)) for row in (ids // 2).tolist()]
    assert sum_of_copies(workload(layout="rank_major"), 1).tolist() == distinct


def test_a_wrong_element_is_found_and_shown():
    w = workload()
    good = _engine.expected_sums(w, 2)
    _engine.require_equal(w, 2, good)
    bad = good.copy()
    bad[4, 5] += 1
    with pytest.raises(RuntimeError, match="1 of 72 elements, the first at token 4, column 5"):
        _engine.require_equal(w, 2, bad)


def test_times_are_of_the_slowest_rank_of_each_iteration():
    assert _report.slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 1.0]]) == [3.0, 5.0, 2.0]
    values = [float(value) for value in range(100, 0, -1)]
    assert _report.percentile(values, 0.5) == 50
    assert _report.percentile(values, 0.99) == 99
    assert _report.percentile([7.0], 0.99) == 7
