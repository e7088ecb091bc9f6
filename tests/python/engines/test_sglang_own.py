"""Crossdock's classes in SGLang's dispatcher, on ranks of the CPU, against the dense sum."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines import SECONDS, installed, needs, plugged_in
from sglang_cases import (
    DISPATCHERS,
    UNUSED,
    Placed,
    begin,
    combine_overlaps_shared_experts_alone,
    dispatcher,
    layers_are_dense_sums,
    micro_batches_take_turns,
    own,
)
from support import Rank, on_ranks

pytestmark = needs("sglang")

# Processes of their own: those of test_sglang.py have SGLang's classes.
APART: dict[str, Any] = {"timeout": SECONDS, "among": 6}
COLUMNS = {False: 264, True: 256}  # by whether rows are FP8: rows of 528 bytes fit DeepEP nowhere


def number_of_groups(parts: SimpleNamespace) -> int:
    return sum(map(len, parts.context.get_resources().buffers["crossdock"].values()))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("mode", ["normal", "low_latency", "auto"])
@on_ranks(2, 4, **APART)
def test_a_layer_is_the_dense_sum(me: Rank, mode: str, fp8: bool) -> None:
    """With one group for all batches of a kind, and without a buffer of DeepEP's."""
    with own(me) as parts:
        for copies in (False, True):
            layers_are_dense_sums(parts, mode, fp8, copies, COLUMNS[fp8])
            assert number_of_groups(parts) == (1 + copies) * (1 + (mode == "auto"))
        assert "deepep_ep_state" not in parts.context.get_resources().buffers


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@on_ranks(2, 4, **APART)
def test_two_micro_batches_take_turns(me: Rank, mode: str) -> None:
    with own(me) as parts:
        micro_batches_take_turns(parts, mode)
        assert number_of_groups(parts) == 1


@on_ranks(2, **APART)
def test_combine_may_run_beside_shared_experts_but_not_beside_experts(me: Rank) -> None:
    with own(me) as parts:
        combine_overlaps_shared_experts_alone(parts)


@on_ranks(2, **APART)
def test_packed_scales_travel_as_they_are(me: Rank) -> None:
    """As SGLang's quantiser makes them for Blackwell: four bytes in an int32."""
    with own(me) as parts:
        begin(parts, True)
        placed = Placed(parts, 2, False, 1024)
        made = dispatcher(parts, placed, "normal", True)
        packed = torch.arange(4, dtype=torch.int32).view(2, 2) + (me.rank + 1 << 24)

        def quantise(x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return x.to(torch.float8_e4m3fn), packed.t().contiguous().t()

        parts.patch.setattr(parts.first, "sglang_per_token_group_quant_fp8", quantise)
        got = made.dispatch(**placed.given)
        sources = [
            (row, rank)
            for rank in range(2)
            for row, ids in enumerate(placed.problem.ids[rank].tolist())
            if {me.rank * 4 <= one < me.rank * 4 + 4 for one in ids} != {False}
        ]
        want = [[2 * row + (rank + 1 << 24) + i for i in range(2)] for row, rank in sources]
        assert got.hidden_states_scale.dtype == torch.int32
        assert got.hidden_states_scale.tolist() == want
        rows = torch.zeros(got.hidden_states.shape, dtype=torch.bfloat16)
        given = parts.first.DeepEPNormalCombineInput(rows, got.topk_ids, got.topk_weights)
        assert not made.combine(combine_input=given).any()


@on_ranks(1, timeout=SECONDS, fresh=True)
def test_a_scheduler_loads_the_plug_in_behind_its_dispatchers(me: Rank, tmp_path: Any) -> None:
    with pytest.MonkeyPatch.context() as patch, plugged_in(lambda: None, UNUSED):
        patch.syspath_prepend(installed(tmp_path, "sglang.srt.plugins"))
        importlib.import_module("sglang.srt.managers.scheduler")
        first = importlib.import_module(f"{DISPATCHERS}.deepep")
        importlib.import_module("sglang.srt.plugins").load_plugins()
        assert first._DeepEPDispatcherImplNormal.__name__ == "CrossdockNormal"
        assert first._DeepEPDispatcherImplLowLatency.__name__ == "CrossdockLowLatency"
