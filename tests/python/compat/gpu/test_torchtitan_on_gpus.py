"""torchtitan's layers on GPUs: equal losses, and a generator's layer in a CUDA graph."""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable

import pytest
import torch

from support import Rank
from torch_ranks import gpu_ranks, process_group, run_on_gpus

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import test_torchtitan as cases  # noqa: E402
from test_torchtitan import TOKENS, TOPK  # noqa: E402

pytestmark = pytest.mark.gpu
# torchtitan's own dispatcher asks for it.
needs_newer_torch = pytest.mark.skipif(
    not hasattr(torch.compiler, "_is_non_strict_tracing"), reason="torch is too old for torchtitan"
)


def on_nccl(me: Rank, body: Callable[..., None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "process_group", functools.partial(process_group, "nccl"))
        body(me)


def graph_of_a_generator(me: Rank) -> None:
    """Replays follow the routing, with rows that belong to nobody behind the last expert's."""
    with cases.crossdock_dispatcher(), torch.no_grad():
        layer = cases.Layer(me, "deepep", {"cudagraphable": True})
        dispatcher = layer.experts.token_dispatcher
        dispatcher.wire_meshes(ep_mesh=cases.mesh_of(me))
        torch.manual_seed(me.rank)
        x, weights = torch.randn(TOKENS, cases.HIDDEN), torch.rand(TOKENS, TOPK)
        ids = torch.zeros(TOKENS, TOPK, dtype=torch.int64)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            counts = torch.zeros(cases.EXPERTS, dtype=torch.int64)
            counts.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))
            rows, per_expert, metadata = dispatcher.dispatch(x, weights, ids, counts)
            return dispatcher.combine(rows, metadata, x), per_expert

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, per_expert = step()
        for _ in range(20):
            ids.copy_(torch.rand(TOKENS, cases.EXPERTS).argsort(1)[:, :TOPK])
            x.normal_()
            graph.replay()
            expected, expected_counts = step()
            assert torch.equal(out, expected) and torch.equal(per_expert, expected_counts)
            assert out.any()
        torch.cuda.synchronize()
        del graph, out, per_expert


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            cases.test_losses_are_those_of_the_all_to_all_dispatcher, marks=needs_newer_torch
        ),
        cases.test_selective_checkpointing_repeats_no_operation,
        cases.test_without_gradients_shapes_may_be_static,
        graph_of_a_generator,
    ],
    ids=lambda body: getattr(body, "__name__", None),
)
@pytest.mark.skipif(gpu_ranks()[-1] < 2, reason="two GPUs are needed")
def test_layers(body: Callable[..., None]) -> None:
    run_on_gpus(2, on_nccl, body, timeout=120)
