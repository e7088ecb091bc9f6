"""Names, argument order and defaults, and what needs no ranks."""

from __future__ import annotations

import inspect
import typing

import pytest
import torch

from crossdock import deep_ep
from crossdock.deep_ep import Buffer, Config, ElasticBuffer, EventHandle, EventOverlap

LAYOUT_TAIL = "previous_event=None, async_finish=False, allocate_on_comm_stream=False"
# DeepEP 1.2 and 2.1, as their callers see them.
OF_BUFFER = {
    "__init__": "self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, "
    "num_qps_per_rank=24, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, "
    "use_fabric=False, explicitly_destroy=False, enable_shrink=False, comm=None",
    "destroy": "self",
    "clean_low_latency_buffer": "self, num_max_dispatch_tokens_per_rank, hidden, num_experts",
    "is_sm90_compiled": "",
    "set_num_sms": "new_num_sms",
    "capture": "",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_low_latency_rdma_size_hint": "max_tokens, hidden, num_ranks, num_experts",
    "get_comm_stream": "self",
    "get_local_buffer_tensor": "self, dtype, size=None, offset=0, use_rdma_buffer=False",
    "get_dispatch_layout": f"self, topk_idx, num_experts, {LAYOUT_TAIL}",
    "dispatch": "self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, "
    "is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, "
    "topk_weights=None, expert_alignment=1, num_worst_tokens=0, config=None, "
    f"{LAYOUT_TAIL}",
    "combine": f"self, x, handle, topk_weights=None, bias=None, config=None, {LAYOUT_TAIL}",
    "low_latency_dispatch": "self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
    "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True, "
    "round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False",
    "low_latency_combine": "self, x, topk_idx, topk_weights, handle, use_logfmt=False, "
    "zero_copy=False, async_finish=False, return_recv_hook=False, out=None, "
    "combine_wait_recv_cost_stats=None",
    "get_next_low_latency_combine_buffer": "self, handle",
    "low_latency_update_mask_buffer": "self, rank_to_mask, mask=False",
    "low_latency_query_mask_buffer": "self, mask_status",
    "low_latency_clean_mask_buffer": "self",
}
OF_ELASTIC_BUFFER = {
    "__init__": "self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, "
    "hidden=0, num_topk=0, use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, "
    "allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=3, "
    "num_allocated_qps=0, num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, "
    "explicitly_destroy=False",
    "dispatch": "self, x, topk_idx=None, topk_weights=None, "
    "cumulative_local_expert_recv_stats=None, num_experts=None, num_max_tokens_per_rank=None, "
    "expert_alignment=None, num_sms=0, num_qps=0, previous_event=None, "
    "previous_event_before_epilogue=None, async_with_compute_stream=False, "
    "allocate_on_comm_stream=False, handle=None, do_handle_copy=True, do_cpu_sync=None, "
    "do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False",
    "combine": "self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, "
    "previous_event=None, previous_event_before_epilogue=None, async_with_compute_stream=False, "
    "allocate_on_comm_stream=False",
    "barrier": "self, use_comm_stream=True, with_cpu_sync=False, sequential=True",
}
SIGNATURES = {Buffer: OF_BUFFER, ElasticBuffer: OF_ELASTIC_BUFFER}


def written(function: typing.Callable[..., object]) -> str:
    """The parameters as they are written, without types."""
    parameters = inspect.signature(function).parameters.values()
    assert all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
    return ", ".join(
        one.name if one.default is one.empty else f"{one.name}={one.default!r}"
        for one in parameters
    )


@pytest.mark.parametrize(
    "owner, name", [(owner, name) for owner, methods in SIGNATURES.items() for name in methods]
)
def test_methods_take_what_deep_ep_takes(owner: type, name: str) -> None:
    assert written(getattr(owner, name)) == SIGNATURES[owner][name]


def test_static_methods_need_no_buffer() -> None:
    for name, taken in OF_BUFFER.items():
        is_static = isinstance(inspect.getattr_static(Buffer, name), staticmethod)
        assert is_static == (not taken.startswith("self")), name


def test_package_has_the_names_that_callers_import() -> None:
    from crossdock.deep_ep import utils

    assert set(deep_ep.__all__) == {
        "Buffer",
        "Config",
        "EPHandle",
        "ElasticBuffer",
        "EventHandle",
        "EventOverlap",
        "install",
        "topk_idx_t",
    }
    assert (utils.EventHandle, utils.EventOverlap) == (EventHandle, EventOverlap)
    assert deep_ep.topk_idx_t is torch.int64


def test_config_takes_positions_and_both_kinds_of_names() -> None:
    assert Config() == Config(20, 6, 256, 6, 256)
    assert Config(24, 8, 512, 16, 128) == Config(
        num_sms=24,
        nvl_send_tokens=8,
        nvl_recv_tokens=512,
        rdma_send_tokens=16,
        rdma_recv_tokens=128,
    )
    assert Config(24, 8, 512, 16, 128) == Config(
        24,
        num_max_nvl_chunked_send_tokens=8,
        num_max_nvl_chunked_recv_tokens=512,
        num_max_rdma_chunked_send_tokens=16,
        num_max_rdma_chunked_recv_tokens=128,
    )


def test_config_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="num_sms: expected an even number from 0 to 4096, got 7"):
        Config(7)
    with pytest.raises(ValueError, match="nvl_recv_tokens: expected at least 1, got 0"):
        Config(nvl_recv_tokens=0)
    with pytest.raises(TypeError, match="'chunks'"):
        Config(chunks=3)
    with pytest.raises(TypeError, match="nvl_send_tokens: given twice, also as num_max_nvl_chu"):
        Config(nvl_send_tokens=1, num_max_nvl_chunked_send_tokens=2)
    with pytest.raises(TypeError, match="multiple values for argument 'nvl_send_tokens'"):
        Config(20, 6, num_max_nvl_chunked_send_tokens=2)


def test_size_hints() -> None:
    assert Config(20, 6, 256).get_nvl_buffer_size_hint(14336, 4) == 256 * 4 * 14336
    for ranks, other_hosts in ((1, 0), (4, 0), (8, 0), (9, 1), (16, 1), (64, 7)):
        assert Config().get_rdma_buffer_size_hint(14336, ranks) == other_hosts << 21
    assert Config().get_rdma_buffer_size_hint(1 << 20, 16) == 8 << 20
    sizes = {"hidden": 7168, "num_ranks": 4, "num_experts": 256}
    for name in ("max_tokens", "num_max_dispatch_tokens_per_rank"):
        assert Buffer.get_low_latency_rdma_size_hint(**{name: 128}, **sizes) > 0
        with pytest.raises(ValueError, match="max_tokens: expected at least 1, got 0"):
            Buffer.get_low_latency_rdma_size_hint(**{name: 0}, **sizes)
    with pytest.raises(TypeError, match="max_tokens: given twice"):
        Buffer.get_low_latency_rdma_size_hint(
            max_tokens=1, num_max_dispatch_tokens_per_rank=1, **sizes
        )
    with pytest.raises(ValueError, match="hidden_bytes: expected at least 1, got 0"):
        Config().get_nvl_buffer_size_hint(0, 4)
    with pytest.raises(ValueError, match="num_experts: expected at least 1, got 0"):
        Buffer.get_low_latency_rdma_size_hint(128, 7168, 4, 0)


def test_number_of_multiprocessors_is_that_of_default_configs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Buffer, "num_sms", 20)
    Buffer.set_num_sms(24)
    assert Buffer.num_sms == 24
    for ranks in (1, 3, 4, 160):
        assert Buffer.get_dispatch_config(ranks).num_sms == 24
        assert Buffer.get_combine_config(ranks).num_sms == 24
    with pytest.raises(TypeError, match="new_num_sms: expected a whole number, got 2.0"):
        Buffer.set_num_sms(2.0)
    with pytest.raises(ValueError, match="new_num_sms: expected an even number"):
        Buffer.set_num_sms(23)
    assert Buffer.num_sms == 24


def test_empty_event_cannot_be_waited_for() -> None:
    with pytest.raises(ValueError, match="event: expected one"):
        EventOverlap().current_stream_wait()
    with EventOverlap() as event:  # as code does that sometimes has one
        assert event.event is None


def test_event_keeps_tensors_alive() -> None:
    tensors = (torch.zeros(1),)
    event = EventOverlap(EventHandle(), tensors)
    assert event.extra_tensors is tensors
    event.current_stream_wait()
    with event:
        pass


def test_refused_arguments_are_refused_before_ranks_meet() -> None:
    with pytest.raises(ValueError, match="group: expected a process group, or comm"):
        Buffer(None)
    with pytest.raises(ValueError, match="num_nvl_bytes: expected at least 0, got -1"):
        Buffer(None, -1)
