"""vLLM's seams on Crossdock, a GPU for each rank: layers as on the CPU, and graphs.

Experts are torch's: vLLM's kernels are not needed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines import (
    BATCHES,
    EXPERTS,
    Problem,
    dequantise,
    on_gpus,
    on_gpus_with,
)
from support import Rank
from vllm_cases import (
    BACKENDS,
    HIDDEN,
    MOST,
    Experts,
    layer,
    made_by_vllm,
    own,
    own_manager,
    prepare_finalize,
    quant_config,
    run_layer,
    tell_tokens,
    vllm,
)

COLUMNS = {False: 2880, True: 2816}  # by whether rows are FP8: no size that DeepEP takes

pytestmark = on_gpus_with("vllm")


class StaticExperts(Experts):
    """Experts that look at all rows, whether a batch has them or not, so that no host waits."""

    def __call__(self, x: Any, scale: Any, meta: Any, ids: Any, weights: Any) -> torch.Tensor:
        if scale is not None:
            x = dequantise(x, scale)
        if self.batched:
            each = [self.problem.apply(self.logical[one], x[i]) for i, one in enumerate(self.mine)]
            return torch.stack(each).bfloat16()
        out = torch.zeros(x.shape)
        for one in self.mine:
            share = weights.masked_fill(ids != one, 0).sum(1, keepdim=True)
            out += torch.where(share > 0, share * self.problem.apply(self.logical[one], x), 0)
        return out.bfloat16()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", BACKENDS)
@on_gpus
def test_a_layer_is_the_dense_sum(me: Rank, kind: str, fp8: bool) -> None:
    with own(me) as parts, own_manager(parts, kind) as made:
        quant, logical = quant_config(parts, fp8), list(range(EXPERTS))
        pf = made_by_vllm(parts, made, kind, quant, COLUMNS[fp8], EXPERTS)
        for seed, tokens in enumerate(BATCHES):
            tokens = tokens[: me.num_ranks]
            tell_tokens(parts, parts.standard, tokens)
            problem = Problem.here(tokens, COLUMNS[fp8], seed)
            for dtype in (torch.int64, torch.int32):
                run_layer(parts, pf, problem, kind, fp8, logical, dtype)
        assert len(made.traffic) == 1


def a_graph_follows_new_routing(
    parts: SimpleNamespace, pf: Any, hidden: int, fp8: bool, batched: bool
) -> None:
    me = parts.me
    tokens = [MOST] * me.num_ranks
    problems = [Problem.here(tokens, hidden, seed) for seed in range(4)]
    for one in problems[1:]:  # the same experts
        one.w1, one.w2 = problems[0].w1, problems[0].w2
    batches = [(one.x[me.rank], one.ids[me.rank], one.weights[me.rank]) for one in problems]
    given = tuple(part.clone() for part in batches[0])
    experts = StaticExperts(parts, problems[0], list(range(EXPERTS)), fp8, batched)
    problems[0].check(layer(parts, pf, experts, *given), me.rank, fp8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(parts, pf, experts, *given)
    for number in range(20):
        for part, value in zip(given, batches[number % 4]):
            part.copy_(value)
        out.fill_(torch.nan)
        graph.replay()
        problems[number % 4].check(out, me.rank, fp8)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", ["ll", "v2 in graphs"])
@on_gpus
def test_a_graph_follows_new_routing(me: Rank, kind: str, fp8: bool) -> None:
    with own(me) as parts, own_manager(parts, kind) as made:
        pf = made_by_vllm(parts, made, kind, quant_config(parts, fp8), COLUMNS[fp8], EXPERTS)
        tell_tokens(parts, parts.standard, [MOST] * me.num_ranks)
        a_graph_follows_new_routing(parts, pf, COLUMNS[fp8], fp8, kind == "ll")


# vLLM's own classes, over crossdock.deep_ep. To import vLLM takes longer than a case of them.


@pytest.mark.parametrize("kind", BACKENDS)
@on_gpus
def test_a_layer_by_deep_ep_is_the_dense_sum(me: Rank, kind: str) -> None:
    with vllm(me) as parts:
        for fp8 in (False, True):
            with prepare_finalize(parts, kind, fp8, EXPERTS) as pf:
                for seed, tokens in enumerate(BATCHES):
                    tokens = tokens[: me.num_ranks]
                    tell_tokens(parts, parts.v2, tokens)
                    problem = Problem.here(tokens, HIDDEN, seed)
                    run_layer(parts, pf, problem, kind, fp8, list(range(EXPERTS)))


@pytest.mark.parametrize("kind", ["ll", "v2 in graphs"])
@on_gpus
def test_a_graph_by_deep_ep_follows_new_routing(me: Rank, kind: str) -> None:
    with vllm(me) as parts:
        tell_tokens(parts, parts.v2, [MOST] * me.num_ranks)
        for fp8 in (False, True):
            with prepare_finalize(parts, kind, fp8, EXPERTS) as pf:
                a_graph_follows_new_routing(parts, pf, HIDDEN, fp8, kind == "ll")
