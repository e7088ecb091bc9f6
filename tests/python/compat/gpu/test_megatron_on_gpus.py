"""Megatron's dispatcher on GPUs: layers of equal losses, streams, graphs, and overlap."""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from support import Rank
from torch_ranks import gpu_ranks, process_group, run_on_gpus

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import test_megatron as cases  # noqa: E402
import test_megatron_schedule as schedule  # noqa: E402
from megatron_layers import EXPERTS, HIDDEN, TOKENS, TOPK, installed, use  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(installed() is None, reason="megatron-core is not installed"),
]


def on_nccl(me: Rank, body: Callable[..., None], release: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules[body.__module__]
        patch.setattr(module, "process_group", functools.partial(process_group, "nccl"))
        body(me, release)


@pytest.mark.parametrize(
    "body",
    [
        cases.test_losses_are_those_of_the_all_to_all_dispatcher,
        cases.test_static_shapes_and_buffers_of_experts_give_equal_bits,
        cases.test_layers_share_the_buffers_of_experts_also_where_they_run_again,
        cases.test_on_another_stream_bits_are_equal,
        cases.test_an_error_that_no_host_waited_for_comes_with_a_later_dispatch,
        schedule.test_overlapped_micro_batches_give_equal_bits,
    ],
    ids=lambda body: body.__name__,
)
def test_managers(body: Callable[..., None]) -> None:
    run_on_gpus(gpu_ranks()[-1], on_nccl, body, installed(), timeout=120)


def operations_beside_a_product(me: Rank, release: str) -> None:
    """As `overlap_moe_expert_parallel_comm` calls: in a stream for transfers, beside products."""
    use(release)
    from crossdock.compat import megatron

    megatron.install(max_tokens_per_rank=TOKENS)
    shape = (TOKENS, me.num_ranks, EXPERTS // me.num_ranks)
    x, probs = torch.ones(TOKENS, HIDDEN), torch.ones(shape)
    routing = torch.arange(EXPERTS).roll(me.rank).expand(TOKENS, -1).reshape(shape) < TOPK
    matrix = torch.ones(8192, 8192, dtype=torch.bfloat16)
    transfers = torch.cuda.Stream()

    def step(manager: Any) -> torch.Tensor:
        transfers.wait_stream(torch.cuda.current_stream())
        for _ in range(8):  # a millisecond each, all multiprocessors but at its end
            matrix @ matrix
        with torch.cuda.stream(transfers):
            manager.setup_metadata(routing, probs)
            rows = manager.dispatch(x, async_finish=True, allocate_on_comm_stream=True)
            out = manager.combine(rows, async_finish=True, allocate_on_comm_stream=True)
        torch.cuda.synchronize()
        return out

    with process_group("nccl"), torch.no_grad():
        manager = cases.manager_of(me, **cases.STATIC)
        step(manager)
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            step(manager)
        dist.barrier()
    spans = [
        (
            event.name.replace("(anonymous namespace)::", ""),
            event.time_range.start,
            event.time_range.end,
        )
        for event in seen.events()
        if event.device_type == DeviceType.CUDA
    ]
    products = [
        (start, end) for name, start, end in spans if "xd::" not in name and end - start > 300
    ]
    for operation in ("prepare", "dispatch", "combine"):
        ours = [span for span in spans if f"xd::ep::cuda::{operation}_kernel" in span[0]]
        assert ours, spans
        for _, begun, ended in ours:
            assert any(start < ended and begun < end for start, end in products), (ours, products)
    megatron.uninstall()


def test_operations_run_beside_a_product() -> None:
    run_on_gpus(gpu_ranks()[-1], operations_beside_a_product, installed(), timeout=120)
