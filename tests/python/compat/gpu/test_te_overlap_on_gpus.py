"""The products and transfers of the CPU's tests, on GPUs."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

from support import Rank, run_ranks

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import test_te_overlap as cases  # noqa: E402

pytestmark = pytest.mark.gpu

RANKS = max((ranks for ranks in (1, 2, 4) if ranks <= torch.cuda.device_count()), default=1)


def on_gpu(me: Rank, body) -> None:
    torch.cuda.set_device(me.rank)
    torch.set_default_device(torch.device("cuda", me.rank))
    try:
        body(me)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "body",
    [cases.gathers, cases.gelu, cases.scatters, cases.bulk, *cases.FP8_BODIES],
    ids=lambda body: body.__name__,
)
def test_products_are_those_of_one_process(body):
    run_ranks(RANKS, on_gpu, body, timeout=120)
