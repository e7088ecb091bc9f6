"""vLLM's own classes for DeepEP, on ranks of the CPU, against the dense sum over all experts."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossdock import deep_ep
from engines import BATCHES, EXPERTS, SECONDS, TOPK, Problem, installed, needs, plugged_in
from support import Rank, on_ranks
from vllm_cases import (
    HIDDEN,
    LAYERS,
    MOST,
    Experts,
    in_two_threads,
    layer,
    manager,
    physical_ids,
    placements,
    prepare_finalize,
    tell_tokens,
    vllm,
)

pytestmark = needs("vllm")


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", ["ll", "ht", "v2", "v2 in graphs"])
@on_ranks(2, 4, timeout=SECONDS)
def test_a_layer_is_the_dense_sum(me: Rank, kind: str, fp8: bool) -> None:
    with vllm(me) as parts:
        for logical, options in placements(kind, me.num_ranks):
            with prepare_finalize(parts, kind, fp8, len(logical), **options) as pf:
                for seed, tokens in enumerate(BATCHES):
                    tokens = tokens[: me.num_ranks]
                    problem = Problem(tokens, HIDDEN, EXPERTS, TOPK, seed)
                    tell_tokens(parts, parts.v2, tokens)
                    ids = physical_ids(problem, me.rank, logical)
                    experts = Experts(parts, problem, logical, fp8, batched=kind == "ll")
                    x, weights = problem.x[me.rank], problem.weights[me.rank]
                    problem.check(layer(parts, pf, experts, x, ids, weights), me.rank, fp8)


@pytest.mark.parametrize("kind", ["ll", "ht"])
@on_ranks(2, 4, timeout=SECONDS)
def test_two_micro_batches_take_turns(me: Rank, kind: str) -> None:
    with vllm(me) as parts:
        parts.patch.setattr(parts.ht, "_dbo_record_stream", lambda *_: None)
        problems = [
            Problem(tokens[: me.num_ranks], HIDDEN, EXPERTS, TOPK, seed)
            for seed, tokens in enumerate(BATCHES[:2])
        ]
        with prepare_finalize(parts, kind, False, EXPERTS) as pf:

            def compute(number: int) -> torch.Tensor:
                problem = problems[number]
                experts = Experts(parts, problem, list(range(EXPERTS)), False, kind == "ll")
                given = (problem.x[me.rank], problem.ids[me.rank], problem.weights[me.rank])
                return layer(parts, pf, experts, *given)

            outs = in_two_threads(parts, compute, 3)
        for problem, made in zip(problems, outs):
            assert len(made) == 3
            for out in made:
                problem.check(out, me.rank, False)


@on_ranks(2, timeout=SECONDS)
def test_vllm_finds_its_names_where_a_gpu_is(me: Rank) -> None:
    with vllm(me) as parts:
        imports = importlib.import_module("vllm.utils.import_utils")
        assert imports.has_deep_ep() and imports.has_deep_ep_v2()
        platform = importlib.import_module("vllm.platforms").current_platform
        parts.patch.setattr(type(platform), "is_cuda_alike", lambda _: True)
        parts.patch.delitem(sys.modules, f"{LAYERS}.all2all_utils")
        chooser = importlib.import_module(f"{LAYERS}.all2all_utils")
        assert chooser.DeepEPHTPrepareAndFinalize is parts.ht.DeepEPHTPrepareAndFinalize
        assert chooser.DeepEPLLPrepareAndFinalize is parts.ll.DeepEPLLPrepareAndFinalize
        assert chooser.DeepEPV2PrepareAndFinalize is parts.v2.DeepEPV2PrepareAndFinalize
        assert chooser.DEEPEP_QUANT_BLOCK_SHAPE == [128, 128]


@on_ranks(2, timeout=SECONDS)
def test_vllm_cleans_its_buffers_after_a_fault(me: Rank) -> None:
    with vllm(me) as parts:
        parts.patch.setattr(torch.accelerator, "synchronize", lambda: None)
        managers = parts.managers.DeepEPLLAll2AllManager
        made = manager(parts, "DeepEPLLAll2AllManager", support_fault_tolerance=True)
        parts.patch.setattr(managers, "_mask", torch.zeros(me.num_ranks, dtype=torch.int32))
        parts.patch.setattr(managers, "_last_mask", None)
        sizes = (MOST, HIDDEN, me.num_ranks, EXPERTS, EXPERTS // me.num_ranks)
        names = ("max_num_tokens_per_dp_rank", "token_hidden_size", "num_ep_ranks")
        names += ("num_global_experts", "num_local_experts")
        buffer = made.get_handle(dict(zip(names, sizes)))
        pf = parts.ll.DeepEPLLPrepareAndFinalize(buffer, MOST, me.num_ranks)
        problem = Problem([4] * me.num_ranks, HIDDEN, EXPERTS, TOPK)
        experts = Experts(parts, problem, list(range(EXPERTS)), False, batched=True)
        given = (problem.x[me.rank], problem.ids[me.rank], problem.weights[me.rank])
        problem.check(layer(parts, pf, experts, *given), me.rank, False)
        assert not made.query_fault()
        dist.barrier()
        if me.rank == 0:  # a step without its peer
            buffer.low_latency_update_mask_buffer(1, True)
            layer(parts, pf, experts, *given)
            assert made.query_fault() and made.query_active_mask().tolist() == [0, 1]
        made.clean_buffers()
        assert not made.query_fault() and made.query_active_mask().tolist() == [0, 0]
        for _ in range(3):
            problem.check(layer(parts, pf, experts, *given), me.rank, False)
        made.destroy()


@pytest.mark.parametrize("switch", ["deep_ep", "yes"])
@on_ranks(1, timeout=SECONDS, fresh=True)
def test_a_worker_loads_the_plug_in(me: Rank, tmp_path: Any, switch: str) -> None:
    with pytest.MonkeyPatch.context() as patch, plugged_in(lambda: None):
        patch.syspath_prepend(installed(tmp_path, "vllm.general_plugins"))
        patch.setenv("XD_ENGINE", switch)
        importlib.import_module("vllm.v1.worker.worker_base")
        load = importlib.import_module("vllm.plugins").load_general_plugins
        if switch == "yes":
            with pytest.raises(ValueError, match="XD_ENGINE: expected 0, 1 or deep_ep, got 'yes'"):
                load()
            return
        load()
        imports = importlib.import_module("vllm.utils.import_utils")
        assert imports.has_deep_ep() and imports.has_deep_ep_v2()
        assert importlib.import_module("deep_ep") is deep_ep
