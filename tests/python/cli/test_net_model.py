"""tools/model, expert parallelism between machines: what it must say by arithmetic alone."""

import dataclasses
import json
import math
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "tools/model"))

import estimate  # noqa: E402  (of this tree)
from net_model import Machines, Problem, Wire, shares_of, simulate  # noqa: E402

PROBLEM = Problem(2, 2, tokens=1024, experts=32)
MACHINES = Machines(Wire(1e9, 10e-6), near_bytes_per_s=1e12)


def test_shares_of_uniform_routing_are_exact():
    shares = shares_of(PROBLEM)
    other_host = 1 - math.comb(16, 8) / math.comb(32, 8)
    one_rank = 1 - math.comb(24, 8) / math.comb(32, 8)
    assert shares.hosts == pytest.approx([other_host] * 2)
    assert shares.ranks_if_any == pytest.approx([2 * one_rank / other_host] * 2)


def test_drawn_shares_are_near_the_exact_ones():
    exact = shares_of(PROBLEM)
    drawn = shares_of(dataclasses.replace(PROBLEM, histogram=[1.0] * 32), samples=4000)
    assert drawn.hosts == pytest.approx(exact.hosts, rel=0.02)
    assert drawn.ranks_if_any == pytest.approx(exact.ranks_if_any, rel=0.03)


def test_experts_that_are_never_chosen_get_no_rows():
    shares = shares_of(dataclasses.replace(PROBLEM, histogram=[1.0] * 16 + [0.0] * 16))
    assert shares.hosts == [pytest.approx(1.0), 0.0]


def test_skew_fills_the_first_host_more():
    shares = shares_of(Problem(4, 1, tokens=64, experts=32, topk=2, routing="zipf:1"))
    assert shares.hosts == sorted(shares.hosts, reverse=True)


def test_a_limit_bounds_the_hosts_of_a_token():
    shares = shares_of(Problem(8, 8, experts=256, host_limit=4))
    assert sum(shares.hosts) <= 4.0 + 1e-9


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_slow_wire_is_nearly_full(operation):
    result = simulate(PROBLEM, MACHINES, operation)
    assert result.bound == "wire"
    least = result.wire_bytes / MACHINES.wire.bytes_per_s
    # Credits wait behind chunks that go the same way.
    assert least < result.seconds < 1.04 * least


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_half_the_wire_takes_twice_as_long(operation):
    half = dataclasses.replace(MACHINES, wire=Wire(0.5e9, 10e-6))
    ratio = (
        simulate(PROBLEM, half, operation).seconds / simulate(PROBLEM, MACHINES, operation).seconds
    )
    assert ratio == pytest.approx(2, rel=0.02)


def test_ranks_that_share_a_wire_take_as_much_longer():
    shared = dataclasses.replace(MACHINES, wire_per_rank=False)
    ratio = simulate(PROBLEM, shared).seconds / simulate(PROBLEM, MACHINES).seconds
    assert ratio == pytest.approx(2, rel=0.02)


def test_slow_processors_are_named():
    assert simulate(PROBLEM, dataclasses.replace(MACHINES, near_bytes_per_s=1e8)).bound == "near"


def test_no_tokens_cost_latency_alone():
    result = simulate(dataclasses.replace(PROBLEM, tokens=0), MACHINES)
    # An entry, an empty last chunk, and its slot.
    assert result.seconds == pytest.approx(30e-6, rel=0.01)
    assert result.bound == "latency"


def test_one_slot_waits_for_its_credit_in_between():
    one = dataclasses.replace(MACHINES, slots=1, wire=Wire(1e9, 1e-3), chunk_bytes=1 << 20)
    result = simulate(PROBLEM, one)
    chunks = math.ceil(1024 * shares_of(PROBLEM).hosts[1] / ((1 << 20) // (14336 + 32)))
    least = result.wire_bytes / 1e9 + chunks * 2e-3
    assert least < result.seconds < 1.05 * least


def test_credits_do_not_wait_behind_chunks_for_others():
    # With those of three others before them, a combine would take 1.13 of the wire.
    slow = dataclasses.replace(MACHINES, wire=Wire(24e6, 20e-6), wire_per_rank=False, slots=2)
    result = simulate(Problem(4, 1, tokens=512, experts=32), slow, "combine")
    assert result.seconds < 1.08 * result.wire_bytes / 24e6


def test_bytes_and_messages_are_those_of_the_routing():
    result = simulate(PROBLEM, MACHINES)
    items = round(1024 * shares_of(PROBLEM).hosts[1])
    assert result.wire_bytes == items * (14336 + 4 * 8)
    assert result.messages == 2 * math.ceil(items / ((256 << 10) // (14336 + 32)))


def test_incast_costs_what_it_is_told_to_cost():
    # All hosts send to the first one.
    problem = Problem(4, 1, tokens=1024, experts=32, histogram=[1.0] * 8 + [0.0] * 24)
    crowded = dataclasses.replace(MACHINES, wire=Wire(1e9, 10e-6, incast_penalty=0.5))
    assert simulate(problem, crowded).seconds > 1.2 * simulate(problem, MACHINES).seconds


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="expected a multiple of 4"):
        shares_of(dataclasses.replace(PROBLEM, experts=30))
    with pytest.raises(ValueError, match="histogram has 3 experts, expected 32"):
        shares_of(dataclasses.replace(PROBLEM, histogram=[1.0] * 3))
    with pytest.raises(ValueError, match="expected uniform or zipf:S"):
        shares_of(dataclasses.replace(PROBLEM, routing="hot"))
    with pytest.raises(ValueError, match="expected dispatch or combine"):
        simulate(PROBLEM, MACHINES, "prepare")


def test_the_command_prints_estimates(capsys):
    assert estimate.main(["--hosts", "2", "--ranks-per-host", "2", "--experts", "32"]) == 0
    printed = capsys.readouterr().out
    assert "estimated, not measured: 2 hosts of 2 ranks, 4096 tokens" in printed
    assert "8 of 32 experts (uniform)" in printed
    assert "interfaces of 45 GB/s of each rank" in printed
    assert estimate.main(["--hosts", "4", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["dispatch"]["bound"] in ("wire", "near", "latency")


def test_the_command_says_what_it_cannot_do(capsys):
    with pytest.raises(SystemExit) as ended:
        estimate.main(["--experts", "30"])
    assert ended.value.code == 2
    assert "expected a multiple of 16" in capsys.readouterr().err
