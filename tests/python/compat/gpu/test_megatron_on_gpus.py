"""Megatron's dispatcher on GPUs, where there are streams and graphs."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import pytest

from torch_ranks import gpu_ranks, run_on_gpus

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import test_megatron as cases  # noqa: E402
from megatron_layers import installed  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(installed() is None, reason="megatron-core is not installed"),
]


@pytest.mark.parametrize(
    "body",
    [
        cases.test_on_another_stream_bits_are_equal,
        cases.test_an_error_that_no_host_waited_for_comes_with_a_later_dispatch,
    ],
    ids=lambda body: body.__name__,
)
def test_managers(body: Callable[..., None]) -> None:
    run_on_gpus(gpu_ranks()[-1], body, installed(), timeout=120)
