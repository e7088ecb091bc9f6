"""vLLM's own classes for DeepEP, on ranks of the CPU, against the dense sum over all experts."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossdock import deep_ep, vllm as plugin
from engines import Problem, dequantise, installed, needs, plugged_in, quantise
from support import Rank, on_ranks
from torch_ranks import process_group

pytestmark = needs("vllm")

HIDDEN, EXPERTS, TOPK, MOST = 2048, 8, 3, 16
BATCHES = ([5, 0, 7, 3], [0, 6, 1, 16], [2, 2, 2, 2])
LAYERS = "vllm.model_executor.layers.fused_moe"
SECONDS = 400  # vLLM has thousands of files to import


class NoStream:
    """Stands for a CUDA stream, and for an event in one, where there is no CUDA."""

    def wait_event(self, event: object) -> None: ...

    def record(self, stream: object = None) -> None: ...


@contextlib.contextmanager
def vllm(me: Rank) -> Iterator[SimpleNamespace]:
    """vLLM's modules, with torch's functions where it has kernels for GPUs alone."""
    with plugged_in(plugin.register), pytest.MonkeyPatch.context() as patch, process_group():
        parts = SimpleNamespace(me=me, patch=patch)
        for name, module in {
            "chooser": f"{LAYERS}.all2all_utils",
            "kernel": f"{LAYERS}.modular_kernel",
            "config": f"{LAYERS}.config",
            "reduce": f"{LAYERS}.topk_weight_and_reduce",
            "batched": f"{LAYERS}.experts.fused_batched_moe",
            "ht": f"{LAYERS}.prepare_finalize.deepep_ht",
            "ll": f"{LAYERS}.prepare_finalize.deepep_ll",
            "v2": f"{LAYERS}.prepare_finalize.deepep_v2",
            "managers": "vllm.distributed.device_communicators.all2all",
            "ubatching": "vllm.v1.worker.ubatching",
        }.items():
            setattr(parts, name, importlib.import_module(module))
        patch.setenv("VLLM_DEEPEP_BUFFER_SIZE_MB", "1")
        patch.setattr(parts.kernel, "PIN_MEMORY", False)
        for module in (parts.ht, parts.v2):
            patch.setattr(module, "moe_kernel_quantize_input", quantise_input)
        patch.setattr(parts.v2, "_globalize_recv_topk_idx", globalize)
        patch.setattr(parts.batched, "_is_capturing_or_compiling", lambda: False)
        yield parts


def quantise_input(x: torch.Tensor, scale: Any, quant_dtype: Any, **_: Any) -> Any:
    """Does as vLLM's function, in blocks of 128 or not at all."""
    return (x, scale) if quant_dtype is None else quantise(x)


def globalize(
    ids: torch.Tensor, rows_per_rank: torch.Tensor, first: int, experts: int
) -> torch.Tensor:
    """Does as vLLM's kernel: ids of all experts, and -1 in rows that are none."""
    row = torch.arange(len(ids)).unsqueeze(1)
    kept = (ids >= 0) & (ids + first < experts) & (row < rows_per_rank[-1])
    return torch.where(kept, ids + first, -1)


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


class Experts:
    """This rank's experts, as vLLM's kernel of a layer has them.

    Args:
        logical: the expert of `problem` that each physical one is.
    """

    expects_unquantized_inputs = False
    w1_scale = w2_scale = torch.ones(EXPERTS * 2, 1, 1)

    def __init__(
        self, parts: SimpleNamespace, problem: Problem, logical: list[int], fp8: bool, batched: bool
    ) -> None:
        self.parts, self.problem, self.logical = parts, problem, logical
        self.batched = batched
        self.quant_config = parts.config.FUSED_MOE_UNQUANTIZED_CONFIG
        if fp8:
            self.quant_config = parts.config.fp8_w8a8_moe_quant_config(
                self.w1_scale, self.w2_scale, block_shape=[128, 128]
            )
        local = len(logical) // parts.me.num_ranks
        self.mine = range(parts.me.rank * local, (parts.me.rank + 1) * local)

    def finalize_weight_and_reduce_impl(self) -> Any:
        reduce = self.parts.reduce
        if self.batched:
            return reduce.TopKWeightAndReduceDelegate()
        return reduce.TopKWeightAndReduceNoOP()

    def activation(self, _: Any, out: torch.Tensor, x: torch.Tensor) -> None:
        gate, up = x.float().chunk(2, 1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    def dequant(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.parts.batched.NaiveBatchedExperts.dequant(self, x, scale)

    def __call__(self, x: Any, scale: Any, meta: Any, ids: Any, weights: Any) -> torch.Tensor:
        if self.batched:
            return self.of_slots(x, scale, meta)
        counts = meta.expert_num_tokens if meta is not None else None
        if counts is not None:
            rows = [int((ids == one).any(1).sum()) for one in self.mine]
            assert counts.tolist() == rows == meta.expert_num_tokens_cpu.tolist()
        if scale is not None:
            x = dequantise(x, scale)
        out = torch.zeros(x.shape)
        for one in self.mine:
            share = weights.masked_fill(ids != one, 0).sum(1)
            rows = (ids == one).any(1)
            made = self.problem.apply(self.logical[one], x[rows])
            out[rows] += share[rows].unsqueeze(1) * made
        return out.bfloat16()

    def of_slots(self, x: torch.Tensor, scale: Any, meta: Any) -> torch.Tensor:
        """Lets vLLM's reference of batched experts compute."""
        logical = [self.logical[one] for one in self.mine]
        w1, w2 = self.problem.w1[logical], self.problem.w2[logical]
        out = torch.full(x.shape, torch.nan, dtype=torch.bfloat16)
        room = torch.empty(x.shape[1], w1.shape[1], dtype=torch.bfloat16)
        given: list[Any] = [out, x, w1, w2, None, None, None, len(self.logical), None]
        given += [scale, None, None, room, meta, False]
        self.parts.batched.NaiveBatchedExperts.apply(self, *given)
        return out


def layer(parts: SimpleNamespace, pf: Any, experts: Experts, x: Any, ids: Any, weights: Any) -> Any:
    """A layer's output, by vLLM's own steps around the experts."""
    implementation = parts.kernel.FusedMoEKernelModularImpl
    kernel = SimpleNamespace(
        prepare_finalize=pf, fused_experts=experts, _maybe_apply_shared_experts=lambda *_: None
    )
    number = len(experts.logical)
    rows, scale, meta, ids, weights = implementation._prepare(
        kernel, x, weights, ids, number, None, False
    )
    made = experts(rows, scale, meta, ids, weights)
    out = torch.full(x.shape, torch.nan, dtype=torch.bfloat16)
    return implementation._finalize(kernel, out, made, x, weights, ids, False, None, None)


def placements(kind: str, num_ranks: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Each placement's expert of every physical one, and options of vLLM's class."""
    found: list[tuple[list[int], dict[str, Any]]] = [
        (list(range(EXPERTS)), {}),
        ([*range(EXPERTS), 0, 1, 2, 3], {}),  # the router chooses among copies
    ]
    if kind == "ll":
        local = EXPERTS // num_ranks
        physical = [(one % num_ranks) * local + one // num_ranks for one in range(EXPERTS)]
        inverse = [physical.index(one) for one in range(EXPERTS)]
        found.append((inverse, {"global_to_physical": torch.tensor(physical, dtype=torch.int32)}))
    return found


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
                    told = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens))
                    parts.patch.setattr(
                        parts.v2,
                        "get_forward_context",
                        functools.partial(SimpleNamespace, dp_metadata=told),
                    )
                    ids = problem.ids[me.rank].clone()
                    if len(logical) > EXPERTS:
                        ids[1::2] += EXPERTS * (ids[1::2] < len(logical) - EXPERTS)
                    experts = Experts(parts, problem, logical, fp8, batched=kind == "ll")
                    x, weights = problem.x[me.rank], problem.weights[me.rank]
                    problem.check(layer(parts, pf, experts, x, ids, weights), me.rank, fp8)


@pytest.mark.parametrize("kind", ["ll", "ht"])
@on_ranks(2, 4, timeout=SECONDS)
def test_two_micro_batches_take_turns(me: Rank, kind: str) -> None:
    """Each has a thread, of which vLLM lets one run at a time."""
    with vllm(me) as parts:
        patch, stream = parts.patch, NoStream()
        patch.setattr(parts.ubatching, "current_stream", lambda: stream)
        patch.setattr(torch, "Event", NoStream)
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        patch.setattr(parts.ht, "_dbo_record_stream", lambda *_: None)
        problems = [
            Problem(tokens[: me.num_ranks], HIDDEN, EXPERTS, TOPK, seed)
            for seed, tokens in enumerate(BATCHES[:2])
        ]
        ready = threading.Barrier(3)
        contexts = parts.ubatching.make_ubatch_contexts(
            2, stream, stream, [object(), object()], ready
        )
        outs: list[list[Any]] = [[], []]
        with prepare_finalize(parts, kind, False, EXPERTS) as pf:

            def compute(number: int) -> None:
                problem = problems[number]
                experts = Experts(parts, problem, list(range(EXPERTS)), False, kind == "ll")
                given = (problem.x[me.rank], problem.ids[me.rank], problem.weights[me.rank])
                with contexts[number]:
                    for _ in range(3):
                        outs[number].append(layer(parts, pf, experts, *given))

            threads = [threading.Thread(target=compute, args=(one,)) for one in range(2)]
            for thread in threads:
                thread.start()
            ready.wait()
            contexts[0].cpu_wait_event.set()
            for thread in threads:
                thread.join()
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


@pytest.mark.parametrize("switch", ["1", "yes"])
@on_ranks(1, timeout=SECONDS, fresh=True)
def test_a_worker_loads_the_plug_in(me: Rank, tmp_path: Any, switch: str) -> None:
    with pytest.MonkeyPatch.context() as patch, plugged_in(lambda: None):
        patch.syspath_prepend(installed(tmp_path, "vllm.general_plugins"))
        patch.setenv("XD_ENGINE", switch)
        importlib.import_module("vllm.v1.worker.worker_base")
        load = importlib.import_module("vllm.plugins").load_general_plugins
        if switch == "yes":
            with pytest.raises(ValueError, match="XD_ENGINE: expected 0 or 1, got 'yes'"):
                load()
            return
        load()
        imports = importlib.import_module("vllm.utils.import_utils")
        assert imports.has_deep_ep() and imports.has_deep_ep_v2()
        assert importlib.import_module("deep_ep") is deep_ep
