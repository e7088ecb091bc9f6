"""bench/moe_layer.py: it measures every pass of a layer, and none whose results are wrong."""

from __future__ import annotations

import argparse
import pathlib
import sys

import pytest
import torch

from support import Rank, on_ranks
from torch_support import joined

sys.path.append(str(pathlib.Path(__file__).resolve().parents[3] / "bench"))

import moe_layer  # noqa: E402

OPTIONS = argparse.Namespace(decode=8, rounds=1, steps=1)


@on_ranks(2)
def test_measures_every_pass(me: Rank) -> None:
    with joined() as comm:
        rows = moe_layer.measure("tiny", OPTIONS, comm)
    assert [(row["pass"], row["tokens"]) for row in rows] == [
        ("forward", 64),
        ("training", 64),
        ("decode", 8),
        ("decode, few", 8),
    ]
    assert all(0 < row["host_us"] <= row["us"] for row in rows)


@on_ranks(1)
def test_measures_nothing_where_results_differ(me: Rank) -> None:
    ones = torch.ones(2)
    right = {"forward": ones, "training": ones, "decode": ones, "decode, few": ones}
    with joined():
        for way in right:
            for wrong in (torch.zeros(2), torch.full((2,), torch.nan)):
                passes = {name: lambda x=x: x for name, x in (right | {way: wrong}).items()}
                with pytest.raises(SystemExit, match=f"results of .*{way}.* differ"):
                    moe_layer.check(passes)
