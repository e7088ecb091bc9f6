"""vLLM's own classes for DeepEP, on ranks of the CPU, against the dense sum over all experts."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossdock import deep_ep, vllm as plugin
from engines import BATCHES, EXPERTS, SECONDS, TOPK, Problem, installed, needs, plugged_in
from support import Rank, on_ranks
from vllm_cases import (
    LAYERS,
    MOST,
    Experts,
    engine,
    in_two_threads,
    layer,
    physical_ids,
    placements,
    quantise_input,
    tell_tokens,
)
from vllm_on_cpu import globalize

pytestmark = needs("vllm")

HIDDEN = 2048


@contextlib.contextmanager
def vllm(me: Rank) -> Iterator[SimpleNamespace]:
    """vLLM's modules, with its own classes for DeepEP on Crossdock."""
    with engine(me, plugin.register_deep_ep) as parts:
        for name in ("ht", "ll", "v2"):
            module = f"{LAYERS}.prepare_finalize.deepep_{name}"
            setattr(parts, name, importlib.import_module(module))
        patch = parts.patch
        patch.setenv("VLLM_DEEPEP_BUFFER_SIZE_MB", "1")
        for module in (parts.ht, parts.v2):
            patch.setattr(module, "moe_kernel_quantize_input", quantise_input)
        patch.setattr(parts.v2, "_globalize_recv_topk_idx", globalize)
        yield parts


def manager(parts: SimpleNamespace, name: str, **options: Any) -> Any:
    """One of vLLM's managers as its constructor makes it, of ranks on one machine."""
    made = object.__new__(getattr(parts.managers, name))
    group = dist.group.WORLD
    vars(made).update(
        cpu_group=group,
        rank=parts.me.rank,
        world_size=parts.me.num_ranks,
        internode=False,
        handle_cache=parts.managers.Cache(),
        num_sms=20,
        support_fault_tolerance=False,
        _device_group=None,
        _num_sms=None,
        _gin_checked=True,  # it asks a GPU
    )
    vars(made).update(options)
    return made


@contextlib.contextmanager
def prepare_finalize(
    parts: SimpleNamespace, kind: str, fp8: bool, experts: int, **options: Any
) -> Iterator[Any]:
    """vLLM's class of this kind, with a buffer from its manager."""
    me, local = parts.me, experts // parts.me.num_ranks
    common = {"num_dispatchers": me.num_ranks}
    placed = common | {"dp_size": me.num_ranks, "rank_expert_offset": me.rank * local}
    if kind == "ht":
        made = manager(parts, "DeepEPHTAll2AllManager")
        made.set_num_sms(7)
        yield parts.ht.DeepEPHTPrepareAndFinalize(made.get_handle({}), **placed)
    elif kind == "ll":
        made = manager(parts, "DeepEPLLAll2AllManager")
        sizes = {
            "max_num_tokens_per_dp_rank": MOST,
            "token_hidden_size": HIDDEN,
            "num_ep_ranks": me.num_ranks,
            "num_global_experts": experts,
            "num_local_experts": local,
        }
        buffer = made.get_handle(sizes)
        yield parts.ll.DeepEPLLPrepareAndFinalize(
            buffer, max_tokens_per_rank=MOST, use_fp8_dispatch=fp8, **common, **options
        )
    else:
        made = manager(parts, "DeepEPV2All2AllManager")
        sizes = {"num_max_tokens_per_rank": MOST, "hidden": HIDDEN, "num_topk": TOPK}
        buffer = made.get_handle(sizes | {"num_experts": experts, "use_fp8_dispatch": fp8})
        yield parts.v2.DeepEPV2PrepareAndFinalize(
            buffer,
            num_experts=experts,
            num_topk=TOPK,
            use_fp8_dispatch=fp8,
            use_cudagraph=kind == "v2 in graphs",
            **placed,
        )
    made.destroy()


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
