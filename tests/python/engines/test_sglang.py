"""SGLang's own dispatchers for DeepEP, on ranks of the CPU, against the dense sum over experts."""

from __future__ import annotations

import importlib
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossdock import deep_ep
from engines import dequantise, installed, needs, plugged_in
from sglang_cases import (
    BATCHES,
    DISPATCHERS,
    HIDDEN,
    SECONDS,
    TOPK,
    UNUSED,
    NoStream,
    Placed,
    begin,
    computed,
    dispatcher,
    sglang,
)
from support import Rank, on_ranks

pytestmark = needs("sglang")


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("mode", ["normal", "low_latency", "auto"])
@on_ranks(2, 4, timeout=SECONDS)
def test_a_layer_is_the_dense_sum(me: Rank, mode: str, fp8: bool) -> None:
    with sglang(me) as parts:
        for copies in (False, True):
            parts.context.get_resources().buffers.clear()
            for seed in range(len(BATCHES)):
                placed = Placed(parts, seed, copies)
                made = dispatcher(parts, placed, mode, fp8)
                for prefill in (True, False):
                    begin(parts, prefill)
                    got = made.dispatch(**placed.given)
                    few = mode == "low_latency" or (mode == "auto" and not prefill)
                    assert isinstance(got, parts.first.DeepEPLLDispatchOutput) == few
                    out = made.combine(combine_input=computed(parts, placed, got))
                    placed.check(out, fp8)


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@on_ranks(2, 4, timeout=SECONDS)
def test_two_micro_batches_take_turns(me: Rank, mode: str) -> None:
    with sglang(me) as parts:
        begin(parts, mode == "normal")
        both = [Placed(parts, seed, False) for seed in range(2)]
        made = dispatcher(parts, both[0], mode, True)
        place = [{"tbo_subbatch_index": one} for one in range(2)]
        for _ in range(2):
            made.dispatch_a(**both[0].given, **place[0])
            made.dispatch_a(**both[1].given, **place[1])
            rows = made.dispatch_b(**place[0])
            made.combine_a(combine_input=computed(parts, both[0], rows), **place[0])
            rows = made.dispatch_b(**place[1])
            both[0].check(made.combine_b(**place[0]), True)
            made.combine_a(combine_input=computed(parts, both[1], rows), **place[1])
            both[1].check(made.combine_b(**place[1]), True)


@on_ranks(2, timeout=SECONDS)
def test_what_combine_may_overlap_with(me: Rank) -> None:
    """Shared experts on another stream, but no experts whose rows come one by one."""
    with sglang(me) as parts:
        placed = Placed(parts, 2, False)
        for overlap in (False, True):
            made = dispatcher(parts, placed, "low_latency", False)
            stream = NoStream()
            device = SimpleNamespace(current_stream=lambda: stream)
            made._inners[0]._low_latency_dispatcher.device_module = device
            for _ in range(2):
                got = made.dispatch(**placed.given)
                rows = computed(parts, placed, got)
                given = parts.single.CombineOverlapArgs(
                    overlap=overlap, stream=stream, wait_event=None, num_sms=20
                )
                made.set_overlap_args(given, {"block_m": 64, "threshold": 0})
                if overlap:
                    with pytest.raises(ValueError, match="overlap: expected False, as all rows"):
                        made.combine(combine_input=rows)
                    break
                placed.check(made.combine(combine_input=rows), False)
                made.clear_overlap_args()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("form", ["prefill", "prefill by choice", "decode"])
@on_ranks(2, 4, timeout=SECONDS)
def test_a_layer_of_the_elastic_buffer_is_the_dense_sum(me: Rank, form: str, fp8: bool) -> None:
    with sglang(me) as parts:
        expand = form != "prefill by choice"
        parts.patch.setenv("SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND", str(expand).lower())
        begin(parts, form != "decode")
        for copies in (False, True):
            for seed in range(len(BATCHES)):
                placed = Placed(parts, seed, copies)
                made = parts.second.DeepEPv2Dispatcher(
                    group=dist.group.WORLD,
                    router_topk=TOPK,
                    num_experts=placed.num_experts,
                    num_local_experts=placed.local,
                    hidden_size=HIDDEN,
                    params_dtype=torch.bfloat16,
                    use_fp8_dispatch=fp8,
                )
                made.prebuild()
                got = made.dispatch(**placed.given)
                x = got.hidden_states
                if fp8:
                    x = dequantise(x, got.hidden_states_scale)
                assert got.is_expanded == expand and got.use_masked_gemm == (form == "decode")
                if expand:
                    rows = placed.in_order(x, got.psum_num_recv_tokens_per_expert, got.topk_weights)
                else:
                    rows = placed.by_choice(x, got.topk_ids, got.topk_weights)
                out = made.combine(parts.second.DeepEPv2CombineInput(rows, None))
                placed.check(out, fp8)


@pytest.mark.parametrize("switch", ["deep_ep", "yes"])
@on_ranks(1, timeout=SECONDS, fresh=True)
def test_a_scheduler_loads_the_plug_in_behind_its_dispatchers(
    me: Rank, tmp_path: Any, switch: str
) -> None:
    """With the DeepEP that SGLang has brought; an error ends the making of dispatchers."""
    other = types.ModuleType("deep_ep")
    vars(other).update(Buffer=object, Config=object, ElasticBuffer=object)
    with pytest.MonkeyPatch.context() as patch, plugged_in(lambda: None, UNUSED):
        patch.setitem(sys.modules, "deep_ep", other)
        patch.syspath_prepend(installed(tmp_path, "sglang.srt.plugins"))
        patch.setenv("XD_ENGINE", switch)
        importlib.import_module("sglang.srt.managers.scheduler")
        first = importlib.import_module(f"{DISPATCHERS}.deepep")
        assert first.Buffer is object
        importlib.import_module("sglang.srt.plugins").load_plugins()
        layer = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
        if switch == "deep_ep":
            assert first.Buffer is deep_ep.Buffer and first.Config is deep_ep.Config
            second = importlib.import_module(f"{DISPATCHERS}.deepep_v2")
            assert second.ElasticBuffer is deep_ep.ElasticBuffer
        else:
            assert first.Buffer is object
            with pytest.raises(
                RuntimeError, match="XD_ENGINE: expected 0, 1 or deep_ep, got 'yes'"
            ):
                layer.create_moe_dispatcher(None, None)
