"""Crossdock's classes in SGLang's dispatcher, a GPU for each rank: as on the CPU, and in graphs.

Experts are torch's: SGLang's kernels are not needed.
"""

from __future__ import annotations

import pytest
import torch

from engines import on_gpus, on_gpus_with
from sglang_cases import (
    Placed,
    begin,
    computed,
    dispatcher,
    layers_are_dense_sums,
    micro_batches_take_turns,
    own,
)
from support import Rank

COLUMNS = {False: 2888, True: 2816}  # by whether rows are FP8: no size that DeepEP takes

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


@pytest.mark.parametrize("fp8", [False, True])
@on_gpus
def test_a_graph_of_decode_follows_new_routing(me: Rank, fp8: bool) -> None:
    with own(me) as parts:
        begin(parts, False)
        placed = OfAllSlots(parts, 2, False, COLUMNS[fp8])
        made = dispatcher(parts, placed, "low_latency", fp8)

        def layer() -> torch.Tensor:
            rows = computed(parts, placed, made.dispatch(**placed.given))
            out: torch.Tensor = made.combine(combine_input=rows)
            return out

        placed.check(layer(), fp8)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer()
        ids = placed.given["topk_output"].topk_ids
        for number in range(20):
            turned = (placed.problem.ids[me.rank] + number) % placed.num_experts
            placed.problem.ids[me.rank].copy_(turned)
            ids.copy_(turned)
            graph.replay()
            placed.check(out, fp8)
