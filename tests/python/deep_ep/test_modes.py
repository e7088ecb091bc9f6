"""Every mode of the Buffer on the CPU, compared bit by bit with a plain reference."""

from __future__ import annotations

import pytest
import torch

import deep_ep_cases as cases
import low_latency_cases
import spread
from crossdock import _core
from crossdock.deep_ep import Buffer
from crossdock.torch import _calls
from deep_ep_cases import on_buffers
from support import Apart

SEED = 20


@on_buffers(1, 2, 4, Apart(4))
@pytest.mark.parametrize("name", cases.MODES)
def test_mode_equals_reference(buffer: Buffer, name: str) -> None:
    assert buffer.num_rdma_ranks == len(set(spread.hosts(buffer.group_size)))
    getattr(cases, name)(buffer, SEED)


@on_buffers(3, Apart(3))
def test_modes_equal_reference_on_an_odd_number_of_ranks(buffer: Buffer) -> None:
    for name in cases.MODES:
        getattr(cases, name)(buffer, SEED)


@on_buffers(2, low_latency_mode=True)
def test_modes_equal_reference_with_a_torch_that_c_code_does_not_read(buffer: Buffer) -> None:
    """As torch is before release 2.10."""
    assert _core.reads(torch.Tensor) == hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert not _core.reads(int)
    _calls._READS = False
    for name in cases.MODES:
        getattr(cases, name)(buffer, SEED)
    for name in low_latency_cases.CASES:
        getattr(low_latency_cases, name)(buffer, SEED)


@on_buffers(2)
@pytest.mark.parametrize("streams", cases.STREAMS, ids=cases.name_of)
def test_arguments_about_streams_change_no_result(buffer: Buffer, streams: dict[str, bool]) -> None:
    for name in ("everything", "by_rank_alone", "worst_case"):
        getattr(cases, name)(buffer, SEED, **streams)
