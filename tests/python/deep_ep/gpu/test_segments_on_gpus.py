"""Expandable segments of torch's allocator, which maps their memory piece by piece, on GPUs.

The ranks' processes are new ones, whose environment asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import test_elastic_on_gpus as elastic
import torch

import crossdock.torch as xd
import deep_ep_cases as cases
from crossdock import errors
from crossdock.deep_ep import Buffer, _memory
from deep_ep_cases import new_buffer, process_group
from deep_ep_reference import make_batch
from support import Rank, on_ranks, run_ranks
from torch_ranks import gpu_ranks

SETTING = "expandable_segments:True"
SEED = 95
LARGE = 96 << 20  # bytes: of several pieces

pytestmark = pytest.mark.gpu


def run_with_segments(num_ranks: int, test: Callable[..., Any], *args: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            patch.setenv(name, SETTING)
        run_ranks(num_ranks, _checked, test, *args, timeout=120, fresh=True)


def _checked(me: Rank, test: Callable[..., Any], *args: Any) -> None:
    torch.cuda.set_device(me.rank)
    kept = torch.ones(1 << 20, device="cuda")
    assert any(one["is_expandable"] for one in torch.cuda.memory_snapshot()), SETTING
    test(me, *args)
    del kept


on_gpus = on_ranks(gpu_ranks()[-1], run=run_with_segments)


def large_caller(buffer: Buffer) -> cases.Caller:
    ranks = buffer.group_size
    tokens = [500 - 3 * rank for rank in range(ranks)]
    return cases.Caller(buffer, make_batch(SEED, ranks, tokens=tokens, hidden=2048))


@on_gpus
def test_rows_are_right_also_where_memory_is_given_back_between_operations(me: Rank) -> None:
    told = list[str]()
    with pytest.MonkeyPatch.context() as patch, process_group("nccl"):
        patch.setattr(_memory._log, "warning", lambda text, *given: told.append(text % given))
        with new_buffer() as buffer:
            caller = large_caller(buffer)
            for number in range(4):
                handle = caller.dispatch_checked()
                torch.cuda.empty_cache()
                caller.cached_checked(handle)
                caller.combine_checked(handle, SEED + number)
                torch.cuda.empty_cache()
            rows, *_ = caller.dispatch(**caller.topk())
            owned = buffer._live().memory.owns(rows)
            print(f"rank {me.rank}: received rows lie in symmetric memory: {owned}; {told}")
            # A copy more is never made in silence.
            assert len(told) == (0 if owned else 1), told
            del rows


@on_gpus
def test_registration_takes_a_tensor_or_says_why_not(me: Rank) -> None:
    with xd.init(device=torch.device("cuda", me.rank)) as comm:
        tensor = torch.zeros(LARGE, dtype=torch.uint8, device="cuda")
        try:
            registration = comm.core.mem_register(tensor.data_ptr(), tensor.nbytes)
        except (errors.InvalidArgument, errors.Unsupported) as refused:
            print(f"rank {me.rank}: {refused}")
            assert re.search(
                "where the allocation of ptr ends|one allocation|cannot be shared", str(refused)
            )
        else:
            comm.core.mem_deregister(registration)
        comm.barrier()


# Rows in a graph's own pool.
test_graph_follows_new_routing = on_gpus(elastic.test_graph_follows_new_routing)
