"""A decode layer of SGLang for engines.py, by the set-up that the tests of SGLang have."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from crossdock import sglang as plugin

PLUG_INS = {"A": plugin.register_deep_ep, "B": plugin.register}  # in this order in one process


class Sglang:
    """SGLang's dispatcher of decode steps, as its layer makes it once a plug-in is registered."""

    def __init__(self, options: argparse.Namespace, cases: Any, parts: Any, experts: Any) -> None:
        placed = SimpleNamespace(
            num_experts=options.experts,
            local=options.experts // options.ranks,
            problem=SimpleNamespace(w1=torch.empty(0, 0, options.hidden)),
        )
        self._dispatcher = cases.dispatcher(parts, placed, "low_latency", options.fp8)
        self._combine_input = parts.first.DeepEPLLCombineInput
        self.experts = experts

    def step(self, batch: Any) -> torch.Tensor:
        topk = SimpleNamespace(topk_ids=batch.ids32, topk_weights=batch.weights)
        got = self._dispatcher.dispatch(hidden_states=batch.x, topk_output=topk)
        rows = self.experts(got.hidden_states, got.hidden_states_scale)
        given = self._combine_input(rows, got.topk_ids, got.topk_weights)
        out: torch.Tensor = self._dispatcher.combine(combine_input=given)
        return out


@contextlib.contextmanager
def layers(
    options: argparse.Namespace, rank: int, make_experts: Callable[[], Any]
) -> Iterator[dict[str, Sglang]]:
    """A layer of each rung, in torch's process group, which is begun here."""
    tests = pathlib.Path(__file__).parents[1] / "tests/python"
    sys.path[:0] = [str(tests / "engines"), str(tests)]  # before the script's folder
    cases = importlib.import_module("sglang_cases")
    me = SimpleNamespace(rank=rank, num_ranks=options.ranks)
    with cases.sglang(me, PLUG_INS["A"]) as parts:
        most = str(max(options.tokens))
        parts.patch.setenv("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", most)
        cases.begin(parts, False)
        made = {}
        for name, register in PLUG_INS.items():
            register()
            made[name] = Sglang(options, cases, parts, make_experts())
        names = {
            name: type(one._dispatcher._inners[0]._low_latency_dispatcher).__name__
            for name, one in made.items()
        }
        if names != {"A": "_DeepEPDispatcherImplLowLatency", "B": "CrossdockLowLatency"}:
            raise SystemExit(f"rank {rank}: unexpected classes: {names}")
        yield made
