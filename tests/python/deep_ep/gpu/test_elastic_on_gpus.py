"""ElasticBuffer on GPUs, one rank per GPU: the CPU's tests, and a CUDA graph with other routing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import test_elastic as cases
import test_elastic_few as few_tokens
from crossdock.deep_ep import ElasticBuffer
from deep_ep_cases import process_group, same
from deep_ep_reference import Batch
from support import Apart, Rank, on_ranks, run_ranks
from torch_ranks import gpu_ranks

RANKS = gpu_ranks()
MOST = RANKS[-1]
REPLAYS = 50

pytestmark = pytest.mark.gpu
needs_peers = pytest.mark.skipif(MOST < 2, reason="peers need a second GPU")


class FromHost:
    """An ElasticBuffer whose arguments go to the device, and whose results come back."""

    def __init__(self, buffer: ElasticBuffer) -> None:
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_buffer":
            super().__setattr__(name, value)
        else:
            setattr(self._buffer, name, value)

    def dispatch(self, *args: Any, **options: Any) -> Any:
        return self._call(self._buffer.dispatch, args, options)

    def combine(self, *args: Any, **options: Any) -> Any:
        return self._call(self._buffer.combine, args, options)

    def _call(self, method: Callable[..., Any], args: Any, options: dict[str, Any]) -> Any:
        moved = list[tuple[torch.Tensor, torch.Tensor]]()
        *results, event = method(
            *(_moved(one, moved) for one in args),
            **{name: _moved(one, moved) for name, one in options.items()},
        )
        if options.get("async_with_compute_stream"):
            event.current_stream_wait()
        for host, device in moved:
            host.copy_(device)  # statistics are added to, and nothing else may have changed
        return *(_back(one) for one in results), event


def _moved(value: Any, moved: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(one, moved) for one in value)
    if not isinstance(value, torch.Tensor) or value.is_cuda:
        return value
    moved.append((value, value.cuda()))
    return moved[-1][1]


def _back(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_back(one) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    host = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return host.copy_(value)


@contextlib.contextmanager
def elastic_on_gpu(me: Rank, **options: Any) -> Iterator[Any]:
    torch.cuda.set_device(me.rank)
    with process_group("nccl"):
        options = {"num_max_tokens_per_rank": cases.MOST, "hidden": cases.HIDDEN} | options
        buffer = ElasticBuffer(dist.group.WORLD, explicitly_destroy=True, **options)
        yield FromHost(buffer)
        buffer.destroy()


def run_on_gpus(num_ranks: int, test: Callable[..., Any], *args: Any, **options: Any) -> None:
    run_ranks(num_ranks, _on_gpu, test, *args, timeout=180, **options)


def _on_gpu(me: Rank, test: Callable[..., Any], *args: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (cases, few_tokens):
            patch.setattr(module, "elastic", elastic_on_gpu)
        test(me, *args)


# The CPU's tests, each with its parameters, and the ranks that run them here. Mistakes in combine
# are left out: peers on GPUs hear of them behind that call.
TAKEN = {
    cases.test_rows_and_handles: (MOST, Apart(MOST)),
    cases.test_rows_by_expert: (MOST, Apart(MOST)),
    cases.test_sums_of_rows_by_expert: (MOST, Apart(MOST)),
    cases.test_scales_travel_and_lie_as_asked: (2,),
    cases.test_ranks_agree_over_the_host_once: (2,),
    cases.test_ranks_with_other_numbers_all_hear_it_at_once: (2,),
    few_tokens.test_few_tokens_bring_the_bits_of_many: (MOST,),
}
for _case, _launches in TAKEN.items():
    globals()[_case.__name__] = needs_peers(on_ranks(*_launches, run=run_on_gpus)(_case))


@needs_peers
@on_ranks(MOST, run=run_on_gpus)
@pytest.mark.parametrize("do_expand", [False, True])
def test_graph_follows_new_routing(me: Rank, do_expand: bool) -> None:
    batches = [cases.drawn(me, seed) for seed in (11, 12, 13)]
    torch.cuda.set_device(me.rank)
    device = [[part[me.rank].cuda() for part in parts(one)] for one in batches]
    given = [one.clone() for one in device[0]]
    with elastic_on_gpu(me) as from_host:
        buffer = from_host._buffer

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            rows, _, _, handle, _ = buffer.dispatch(
                *given, num_experts=cases.EXPERTS, do_cpu_sync=False, do_expand=do_expand
            )
            combined, *_ = buffer.combine(rows, handle)
            return rows, combined

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows, combined = step()
        for number in range(REPLAYS):
            batch = batches[number % len(batches)]
            for argument, value in zip(given, device[number % len(batches)]):
                argument.copy_(value)
            graph.replay()
            received = batch.received(me.rank, batch.x)
            if not do_expand:
                same("rows", rows[: len(received)], received)
                same("combined", combined, cases.once_per_rank(batch, me.rank))
                continue
            order = [row for zone in cases.zones(batch, me.rank) for row, _ in zone]
            same("rows", rows[: len(order)], received[order])
            chosen = (batch.topk_idx[me.rank] >= 0).sum(1)[:, None]
            x = batch.x[me.rank]
            same("combined", combined, (x.float() * chosen).to(x.dtype))
        torch.cuda.synchronize()
        del graph


def parts(batch: Batch) -> tuple[list[torch.Tensor], ...]:
    return batch.x, batch.topk_idx, batch.topk_weights
