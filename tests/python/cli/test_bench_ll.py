"""crossdock bench ll: what it measures beside what, and what its numbers mean."""

from __future__ import annotations

import dataclasses

import pytest

from commands import report, wide_lines, workload
from crossdock.cli import _engine, _ll_report, _ll_steps, _rank
from crossdock.cli._engine import Share, Timed
from crossdock.cli._ll_steps import LOW_LATENCY, THREE_CALLS, Step

SMALL = "--device cpu --ranks 2 --tokens 1,1024 --hidden 128 --topk 2 --experts 4 --iters 3".split()


def steps(rows: str) -> list[Step]:
    """The steps of crossdock-bench ll, in its order."""
    found = [
        Step("dispatch", LOW_LATENCY, rows),
        Step("dispatch", LOW_LATENCY, "fp8"),
        Step("combine", LOW_LATENCY, rows),
        Step("dispatch + combine", LOW_LATENCY, rows),
        Step("dispatch, send half", LOW_LATENCY, rows),
        Step("dispatch, both halves", LOW_LATENCY, rows),
        Step("combine, send half", LOW_LATENCY, rows),
        Step("combine, both halves", LOW_LATENCY, rows),
        Step("prepare", THREE_CALLS, "-"),
        Step("dispatch", THREE_CALLS, rows),
        Step("combine", THREE_CALLS, rows),
        Step("prepare + dispatch + combine", THREE_CALLS, rows),
    ]
    return found if rows == "bf16" else [step for step in found if step.rows != "fp8"]


@pytest.mark.parametrize("through, rows", [("numpy", "fp32"), ("numpy", "bf16"), ("torch", "bf16")])
def test_measures_every_step_for_every_number_of_tokens(tmp_path, through, rows):
    pytest.importorskip(through if through == "torch" or rows == "fp32" else "ml_dtypes")
    options = ["--through", through, "--dtype", rows]
    found, said = report(tmp_path / "ll.json", "ll", *SMALL, *options)
    expected = [(tokens, *step) for tokens in (1, 1024) for step in steps(rows)]
    fields = ("tokens", *Step._fields)
    assert [tuple(row[field] for field in fields) for row in found["rows"]] == expected
    for row in found["rows"]:
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["clock"] == "call"
        assert f"\n{row['operation']} " in said
    assert wide_lines(said) == []
    assert found["workload"]["tokens"] == [1, 1024]
    for tokens in (1, 1024):
        assert f"\n{tokens} tokens per rank; a group takes " in said


def test_a_step_is_compared_with_the_calls_that_do_the_same():
    times = {step: [number + 1.0, number + 1.0, 100.0] for number, step in enumerate(steps("bf16"))}
    case = _ll_report.Case(workload(), times)
    ratios = {step: case.zero_copy_ratio(step) for step in times}
    assert {step: ratio for step, ratio in ratios.items() if ratio} == {
        Step("dispatch", LOW_LATENCY, "bf16"): 10.0,
        Step("dispatch", LOW_LATENCY, "fp8"): 10.0 / 2,
        Step("combine", LOW_LATENCY, "bf16"): 11.0 / 3,
        Step("dispatch + combine", LOW_LATENCY, "bf16"): 12.0 / 4,
    }


def test_what_follows_a_call_is_done_every_time_and_not_timed(monkeypatch):
    done: list[str] = []
    clock = iter(range(1000))
    monkeypatch.setattr(_engine.time, "perf_counter", lambda: float(next(clock)))

    def rest() -> None:
        done.append("rest")
        next(clock)  # a second that must not be counted

    timed = Timed(lambda: done.append("call"), rest)
    share = Share(warmup=2, iters=3)
    times = _engine.wall_times(share, lambda: done.append("start"), timed, lambda share: None)
    assert done == ["start", "call", "rest"] * 5
    assert times == [1.0] * 3
    done.clear()
    both = Timed(lambda: done.append("first"), rest, timed)
    times = _engine.wall_times(share, lambda: done.append("start"), both, lambda share: None)
    assert done == ["start", "first", "rest", "start", "call", "rest"] * 5
    assert times == [2.0] * 3


@pytest.mark.parametrize("iters, warmup", [(200, 20), (3, 2), (1, 0), (7, 11)])
def test_rounds_share_all_iterations(iters, warmup):
    shares = _engine.shares(workload(iters=iters, warmup=warmup), 5)
    assert sum(share.iters for share in shares) == iters
    assert sum(share.warmup for share in shares) >= min(warmup, len(shares))
    counts = [share.iters for share in shares]
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 1


def test_steps_take_turns_in_rounds():
    called: list[str] = []

    class Fake:
        def check(self):
            called.append("check")

        def operations(self):
            return {name: Timed(lambda name=name: called.append(name)) for name in "ab"}

        def time(self, timed, share, tell):
            for _ in range(share.iters):
                timed.call()
            return [float(len(called))] * share.iters

    rounds = _engine.shares(workload(iters=4, warmup=0), 2)
    times = _rank._times(Fake(), rounds, "", lambda done: done)
    assert called == ["check", "a", "a", "b", "b", "a", "a", "b", "b"]
    assert times == {"a": [3.0, 3.0, 7.0, 7.0], "b": [5.0, 5.0, 9.0, 9.0]}


def test_every_way_there_and_back_is_made_of_its_calls():
    done: list[str] = []

    def call(name: str):
        return lambda: (done.append(name), name)[1]

    names = [field.name for field in dataclasses.fields(_ll_steps.Calls)]
    calls = _ll_steps.Calls(**{name: call(name) for name in names})
    for way, made_of in (
        (calls.whole(), ["dispatch", "combine"]),
        (
            calls.in_halves(),
            ["dispatch_send", "dispatch_receive", "combine_send", "combine_receive"],
        ),
        (calls.three_calls(), ["prepare", "major_dispatch", "major_combine"]),
    ):
        done.clear()
        assert way() == made_of[-1]
        assert done == made_of
