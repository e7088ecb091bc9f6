"""The products and transfers of the CPU's tests, on GPUs."""

from __future__ import annotations

import pathlib
import sys

import pytest

from torch_ranks import gpu_ranks, run_on_gpus

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import test_te_overlap as cases  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "body",
    [cases.gathers, cases.gelu, cases.scatters, cases.bulk, *cases.FP8_BODIES],
    ids=lambda body: body.__name__,
)
def test_products_are_those_of_one_process(body):
    run_on_gpus(gpu_ranks()[-1], body, timeout=120)
