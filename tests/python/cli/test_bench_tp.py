"""bench/tp.py: which products it measures, and by what."""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import sys
from unittest import mock

import pytest

BENCH = pathlib.Path(__file__).resolve().parents[3] / "bench"
sys.path.append(str(BENCH))

from tp import set_up  # noqa: E402
from tp_problem import MODELS, read_shapes  # noqa: E402


def test_models_are_those_of_crossdock_bench():
    found = re.findall(r'Model\{"(\w+)", (\d+), (\d+)\}', (BENCH / "gemm" / "shape.cc").read_text())
    assert MODELS == {name: (int(hidden), int(inner)) for name, hidden, inner in found}


def test_sizes_are_those_of_a_rank():
    assert read_shapes("8b", 2) == [
        ("8b.qkv", "all_gather", 3072, 4096),
        ("8b.o_proj", "reduce_scatter", 4096, 2048),
        ("8b.fc1", "all_gather", 7168, 4096),
        ("8b.fc2", "reduce_scatter", 4096, 7168),
        ("8b.fc2_all_reduce", "all_reduce", 4096, 7168),
    ]
    assert read_shapes("70b.fc1", 4) == [("70b.fc1", "all_gather", 7168, 8192)]
    assert read_shapes("all_reduce:8x16", 3) == [("all_reduce:8x16", "all_reduce", 8, 16)]


@pytest.mark.parametrize(
    "text, ranks, error",
    [
        ("70b.fc3", 2, "expected 70b or 8b, .*got '70b.fc3'"),
        ("gather:8x8", 2, "got 'gather:8x8'"),
        ("8b", 3, "4096 columns cannot be dealt to 3 ranks"),
    ],
)
def test_shapes_that_there_are_not(text, ranks, error):
    with pytest.raises(ValueError, match=error):
        read_shapes(text, ranks)


def test_no_way_uses_multicast():
    with mock.patch.dict(os.environ, {"NCCL_NVLS_ENABLE": "1"}):
        set_up(argparse.Namespace(ranks=2, device="cuda"))
        assert os.environ["NCCL_NVLS_ENABLE"] == "0"
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert not re.search(r"multimem", (BENCH / "tp_torch.py").read_text())
