"""Every mode of the Buffer on the CPU, compared bit by bit with a plain reference."""

from __future__ import annotations

from typing import Any

import pytest

import deep_ep_cases as cases
from support import run_ranks

SEED = 20


def run_case(me: Any, name: str, seed: int, streams: dict[str, bool]) -> None:
    with cases.buffer_of(me) as buffer:
        getattr(cases, name)(buffer, seed, **streams)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.representative), 3, 4])
@pytest.mark.parametrize(
    "name",
    [
        "everything",
        "by_rank_alone",
        "worst_case",
        "fp8_pairs",
        "plain_bytes",
        "repeated_ids",
        "slices",
        "outgrown",
    ],
)
def test_mode_equals_reference(name: str, num_ranks: int) -> None:
    print(f"seed {SEED}")
    run_ranks(num_ranks, run_case, name, SEED, {})


@pytest.mark.parametrize(
    "streams",
    [
        {"async_finish": True},
        {"previous": True},
        {"previous": True, "async_finish": True},
        {"previous": True, "async_finish": True, "allocate_on_comm_stream": True},
    ],
    ids=lambda streams: "+".join(streams),
)
def test_arguments_about_streams_change_no_result(streams: dict[str, bool]) -> None:
    print(f"seed {SEED}")
    for name in ("everything", "by_rank_alone", "worst_case"):
        run_ranks(2, run_case, name, SEED, streams)
