"""Megatron's dispatcher on GPUs: layers of equal losses, streams and graphs."""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable

import pytest

from support import Rank
from torch_ranks import gpu_ranks, process_group, run_on_gpus

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import test_megatron as cases  # noqa: E402
from megatron_layers import installed  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(installed() is None, reason="megatron-core is not installed"),
]


def on_nccl(me: Rank, body: Callable[..., None], release: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "process_group", functools.partial(process_group, "nccl"))
        body(me, release)


@pytest.mark.parametrize(
    "body",
    [
        cases.test_losses_are_those_of_the_all_to_all_dispatcher,
        cases.test_static_shapes_and_buffers_of_experts_give_equal_bits,
        cases.test_layers_share_the_buffers_of_experts_also_where_they_run_again,
        cases.test_on_another_stream_bits_are_equal,
        cases.test_an_error_that_no_host_waited_for_comes_with_a_later_dispatch,
    ],
    ids=lambda body: body.__name__,
)
def test_managers(body: Callable[..., None]) -> None:
    run_on_gpus(gpu_ranks()[-1], on_nccl, body, installed(), timeout=120)
