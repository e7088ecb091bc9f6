"""Wires of combine, on NumPy arrays: every bit equals the model's, by bulk and by low latency."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import crossdock
from core_support import Case, config_of, dtype_of
from crossdock.errors import Mismatch
from reference import Routing
from support import Rank, on_ranks

SEED = 47
WIRES = ("float32", "fp8_block128", "fp8_block128_pow2", "fp8_block128_e8m0")
HIDDEN = 256
QUIET = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}


def rows_of(routing: Routing, rank: int, dtype: np.dtype) -> np.ndarray:
    """[R,H] results of the experts of a rank: large and small numbers, and some special ones."""
    random = np.random.default_rng((SEED, rank))
    shape = (routing.total(rank), HIDDEN)
    rows = random.standard_normal(shape) * np.exp2(random.integers(-9, 9, shape))
    rows[:, ::97] = 0
    rows[random.random(shape) < 0.002] = np.nan
    rows[random.random(shape) < 0.002] = np.inf
    return rows.astype(np.float32).astype(dtype)


def same_bits(got: np.ndarray, want: np.ndarray, name: str) -> None:
    """Every bit, but for those of a NaN; NaNs are quiet, without sign and payload."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    bits = np.dtype(f"uint{8 * got.itemsize}")
    quiet = QUIET[got.dtype.name]
    wanted = np.where(np.isnan(want.astype(np.float32)), quiet, want.view(bits))
    different = got.view(bits) != wanted
    assert not different.any(), f"{name}: {different.sum()} elements differ"


@on_ranks(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_bit_is_that_of_the_model(me: Rank, dtype: str) -> None:
    case = Case((5, 0, 7), 6, 3, HIDDEN, dtype)
    ids, ranks = case.ids(SEED), range(me.num_ranks)
    weights = [
        np.random.default_rng((SEED, 9, rank)).standard_normal(one.shape).astype(np.float32)
        for rank, one in enumerate(ids)
    ]
    forms = {"expert_major": "by_expert", "rank_major": "by_rank"}
    with me.comm() as comm:
        for layout, form in forms.items():
            routing = Routing(ids, case.experts, layout)
            rows = [rows_of(routing, rank, dtype_of(dtype)) for rank in ranks]
            of_rows = None
            if layout == "expert_major":
                of_rows = [routing.dispatch_weights(rank, weights) for rank in ranks]
            options = {"wire_formats": WIRES}
            config = dataclasses.replace(case, layout=layout).config(**options)
            few = case.low_latency_config(receive=form, **options)
            with (
                crossdock.EpGroup(comm, config) as group,
                crossdock.LowLatencyGroup(comm, few) as few_group,
            ):
                plan = group.prepare(ids[me.rank])
                received = few_group.dispatch(
                    np.zeros((len(ids[me.rank]), HIDDEN), dtype_of(dtype)), ids[me.rank]
                )
                for wire in WIRES:
                    with np.errstate(invalid="ignore", over="ignore"):
                        want = routing.combine(me.rank, rows, of_rows, wire)
                    own = None if of_rows is None else of_rows[me.rank]
                    out = group.combine(plan, rows[me.rank], own, wire=wire)
                    same_bits(out, want, f"{layout}, {wire}")
                    topk_weights = None if of_rows is None else weights[me.rank]
                    sums = few_group.combine(received.plan, rows[me.rank], topk_weights, wire=wire)
                    same_bits(sums, want, f"{form}, {wire}")
                    sent = few_group.combine_send(
                        received.plan, rows[me.rank], topk_weights, wire=wire
                    )
                    same_bits(sent.receive(), want, f"{form} in halves, {wire}")


@on_ranks(2)
def test_mistakes_are_told(me: Rank) -> None:
    with me.comm() as comm:
        with pytest.raises(ValueError, match="wire_formats: expected one of .*, got 'logfmt'"):
            config_of(wire_formats=["logfmt"])
        with pytest.raises(
            TypeError, match="wire_formats: expected a sequence of wires, got 'fp8'"
        ):
            config_of(wire_formats="fp8")
        config = config_of(hidden=128, wire_formats=["fp8"])
        with crossdock.EpGroup(comm, config) as group:
            plan = group.prepare(np.zeros((1, 1), np.int64))
            rows = np.ones((2 * (me.rank == 0), 128), np.float32)
            problem = "wire: expected one of" if me.rank == 0 else "rank 0"
            with pytest.raises(ValueError if me.rank == 0 else Mismatch, match=problem):
                group.combine(plan, rows, wire="fp16" if me.rank == 0 else "fp8")
            text = r"combine: wire: expected .* of the config's .* = \('fp8',\), got 'float32'"
            with pytest.raises(ValueError, match=text):
                group.combine(plan, rows, wire="float32")
            with pytest.raises(Mismatch, match="wire"):
                group.combine(plan, rows, wire="fp8" if me.rank == 0 else "same")
            assert group.combine(plan, rows, wire="fp8").tolist() == [[1.0] * 128]


def test_the_feature_is_that_of_gpus() -> None:
    for say in (crossdock.feature_available, crossdock.feature_reason):
        assert say("cuda_wire") == say("cuda")
