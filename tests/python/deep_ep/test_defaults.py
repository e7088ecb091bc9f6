"""A Buffer that is made and used while torch's default device and dtype are others."""

from __future__ import annotations

import pytest
import torch

import deep_ep_cases as cases
import low_latency_cases
from support import Rank, on_ranks
from torch_defaults import OtherDefaults

SEED = 25


@pytest.mark.parametrize("name", [*cases.MODES, *low_latency_cases.CASES])
@on_ranks(2)
def test_results_are_the_same_under_other_defaults(me: Rank, name: str) -> None:
    case = vars(cases if name in cases.MODES else low_latency_cases)[name]
    options = {} if name in cases.MODES else low_latency_cases.LOW_LATENCY
    with cases.process_group(), OtherDefaults("meta", torch.float64):
        with cases.new_buffer(**options) as buffer:
            case(buffer, SEED)
            assert buffer.get_local_buffer_tensor(torch.int32).device.type == "cpu"
