"""SGLang's own dispatchers for DeepEP, on ranks of the CPU, against the dense sum over experts."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest

from crossdock import deep_ep
from engines import SECONDS, installed, needs, plugged_in
from sglang_cases import (
    DISPATCHERS,
    FORMS,
    UNUSED,
    combine_overlaps_shared_experts_alone,
    layers_are_dense_sums,
    micro_batches_take_turns,
    second_layers_are_dense_sums,
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
            layers_are_dense_sums(parts, mode, fp8, copies)


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@on_ranks(2, 4, timeout=SECONDS)
def test_two_micro_batches_take_turns(me: Rank, mode: str) -> None:
    with sglang(me) as parts:
        micro_batches_take_turns(parts, mode)


@on_ranks(2, timeout=SECONDS)
def test_what_combine_may_overlap_with(me: Rank) -> None:
    """Shared experts on another stream, but no experts whose rows come one by one."""
    with sglang(me) as parts:
        combine_overlaps_shared_experts_alone(parts)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("form", FORMS)
@on_ranks(2, 4, timeout=SECONDS)
def test_a_layer_of_the_elastic_buffer_is_the_dense_sum(me: Rank, form: str, fp8: bool) -> None:
    with sglang(me) as parts:
        second_layers_are_dense_sums(parts, form, fp8)


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
