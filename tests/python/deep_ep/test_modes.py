"""Every mode of the Buffer on the CPU, compared bit by bit with a plain reference."""

from __future__ import annotations

import pytest

import deep_ep_cases as cases
import spread
from crossdock.deep_ep import Buffer
from support import Rank

SEED = 20


@pytest.mark.ranks(1, 2, 4, apart=(4,), representative=2)
@pytest.mark.parametrize("name", cases.MODES)
def test_mode_equals_reference(me: Rank, buffer: Buffer, name: str) -> None:
    print(f"seed {SEED}")
    assert buffer.num_rdma_ranks == len(set(spread.hosts(me.num_ranks)))
    getattr(cases, name)(buffer, SEED)


@pytest.mark.ranks(3, apart=(3,))
def test_modes_equal_reference_on_an_odd_number_of_ranks(me: Rank, buffer: Buffer) -> None:
    print(f"seed {SEED}")
    for name in cases.MODES:
        getattr(cases, name)(buffer, SEED)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("streams", cases.STREAMS, ids=cases.name_of)
def test_arguments_about_streams_change_no_result(
    me: Rank, buffer: Buffer, streams: dict[str, bool]
) -> None:
    print(f"seed {SEED}")
    for name in ("everything", "by_rank_alone", "worst_case"):
        getattr(cases, name)(buffer, SEED, **streams)
