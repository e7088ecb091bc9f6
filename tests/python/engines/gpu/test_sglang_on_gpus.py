"""SGLang's dispatchers on Crossdock, a GPU for each rank: as on the CPU, and in graphs.

Experts are torch's: SGLang's kernels are not needed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from engines import on_gpus, on_gpus_with
from sglang_cases import (
    ALIGNMENT,
    FORMS,
    Placed,
    begin,
    computed,
    dispatcher,
    layers_are_dense_sums,
    micro_batches_take_turns,
    own,
    second_dispatcher,
    second_layer,
    second_layers_are_dense_sums,
    sglang,
)
from support import Rank

COLUMNS = {False: 2888, True: 2816}  # by whether rows are FP8: no size that DeepEP takes
DEEP_EP_COLUMNS = 2048

pytestmark = on_gpus_with("sglang")


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("mode", ["normal", "low_latency", "auto"])
@on_gpus
def test_a_layer_is_the_dense_sum(me: Rank, mode: str, fp8: bool) -> None:
    with own(me) as parts:
        for copies in (False, True):
            layers_are_dense_sums(parts, mode, fp8, copies, COLUMNS[fp8])


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@on_gpus
def test_two_micro_batches_take_turns(me: Rank, mode: str) -> None:
    with own(me) as parts:
        micro_batches_take_turns(parts, mode)


class OfAllSlots(Placed):
    """Experts that look at all slots, whether a batch fills them or not, so that no host waits."""

    def of_slots(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        each = [self.problem.apply(one, x[place]) for place, one in enumerate(self.mine)]
        return torch.stack(each).bfloat16()

    def in_order(self, x: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        row, first = torch.arange(len(x)), ends.new_zeros(())
        out = torch.zeros(x.shape)
        for number, one in enumerate(self.mine):
            here = (row >= first) & (row < ends[number])
            made = weights.unsqueeze(1) * self.problem.apply(one, x)
            out = torch.where(here.unsqueeze(1), made, out)
            first = (ends[number] + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return out.bfloat16()


def a_graph_follows_new_routing(
    placed: Placed, layer: Callable[[], torch.Tensor], fp8: bool
) -> None:
    placed.check(layer(), fp8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    mine = placed.problem.ids[placed.rank]
    first = mine.clone()
    ids = placed.given["topk_output"].topk_ids
    for number in range(20):
        mine.copy_((first + number) % placed.num_experts)
        ids.copy_(mine)
        out.fill_(torch.nan)
        graph.replay()
        placed.check(out, fp8)


def decode_in_a_graph(parts: SimpleNamespace, fp8: bool, columns: int) -> None:
    begin(parts, False)
    placed = OfAllSlots(parts, 2, False, columns)
    made = dispatcher(parts, placed, "low_latency", fp8)

    def layer() -> torch.Tensor:
        rows = computed(parts, placed, made.dispatch(**placed.given))
        out: torch.Tensor = made.combine(combine_input=rows)
        return out

    a_graph_follows_new_routing(placed, layer, fp8)


@pytest.mark.parametrize("fp8", [False, True])
@on_gpus
def test_a_graph_of_decode_follows_new_routing(me: Rank, fp8: bool) -> None:
    with own(me) as parts:
        decode_in_a_graph(parts, fp8, COLUMNS[fp8])


# SGLang's own classes, over crossdock.deep_ep. To import SGLang takes longer than a case of them.


@pytest.mark.parametrize("mode", ["normal", "low_latency", "auto"])
@on_gpus
def test_a_layer_by_deep_ep_is_the_dense_sum(me: Rank, mode: str) -> None:
    with sglang(me) as parts:
        for fp8, copies in itertools.product((False, True), repeat=2):
            parts.context.get_resources().buffers.clear()
            layers_are_dense_sums(parts, mode, fp8, copies, DEEP_EP_COLUMNS)


@on_gpus
def test_two_micro_batches_by_deep_ep_take_turns(me: Rank) -> None:
    with sglang(me) as parts:
        for mode in ("normal", "low_latency"):
            parts.context.get_resources().buffers.clear()
            micro_batches_take_turns(parts, mode)


@on_gpus
def test_a_layer_by_the_elastic_buffer_is_the_dense_sum(me: Rank) -> None:
    with sglang(me) as parts:
        for form, fp8 in itertools.product(FORMS, (False, True)):
            second_layers_are_dense_sums(parts, form, fp8, DEEP_EP_COLUMNS)


@on_gpus
def test_graphs_of_decode_by_deep_ep_follow_new_routing(me: Rank) -> None:
    with sglang(me) as parts:
        for fp8 in (False, True):
            parts.context.get_resources().buffers.clear()
            decode_in_a_graph(parts, fp8, DEEP_EP_COLUMNS)


@on_gpus
def test_graphs_of_decode_by_the_elastic_buffer_follow_new_routing(me: Rank) -> None:
    with sglang(me) as parts:
        begin(parts, False)
        for fp8 in (False, True):
            placed = OfAllSlots(parts, 2, False, DEEP_EP_COLUMNS)
            made = second_dispatcher(parts, placed, fp8)
            layer = functools.partial(second_layer, parts, placed, made, "decode")
            a_graph_follows_new_routing(placed, layer, fp8)
