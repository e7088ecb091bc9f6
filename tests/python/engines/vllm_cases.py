"""Set-up of the tests of vLLM's classes: its modules, and a layer's steps around experts."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from crossdock import vllm as plugin
from engines import (
    EXPERTS,
    TOPK,
    NoStream,
    Problem,
    dequantise,
    modules_of,
    quantise,
)
from support import Rank
from vllm_on_cpu import globalize

MOST = 16
HIDDEN = 2048  # of rows by DeepEP
LAYERS = "vllm.model_executor.layers.fused_moe"

BACKENDS = {
    "ht": "deepep_high_throughput",
    "ll": "deepep_low_latency",
    "v2": "deepep_v2",
    "v2 in graphs": "deepep_v2",
}
MANAGERS = {"ht": "DeepEPHTAll2AllManager", "ll": "DeepEPLLAll2AllManager"}


@contextlib.contextmanager
def engine(me: Rank, register: Callable[[], None]) -> Iterator[SimpleNamespace]:
    """vLLM's modules with a plug-in, and torch's functions in place of kernels for GPUs alone."""
    modules = {
        "chooser": f"{LAYERS}.all2all_utils",
        "kernel": f"{LAYERS}.modular_kernel",
        "config": f"{LAYERS}.config",
        "reduce": f"{LAYERS}.topk_weight_and_reduce",
        "batched": f"{LAYERS}.experts.fused_batched_moe",
        "managers": "vllm.distributed.device_communicators.all2all",
        "ubatching": "vllm.v1.worker.ubatching",
    }
    with modules_of(me, register, modules) as parts:
        parts.patch.setattr(parts.kernel, "PIN_MEMORY", False)
        parts.patch.setattr(parts.batched, "_is_capturing_or_compiling", lambda: False)
        yield parts


def quantise_input(x: torch.Tensor, scale: Any, quant_dtype: Any, **_: Any) -> Any:
    """Does as vLLM's function, in blocks of 128 or not at all."""
    return (x, scale) if quant_dtype is None else quantise(x)


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
        return self.parts.batched.NaiveBatchedExperts.dequant(self, x, scale.to(x.device))

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


def tell_tokens(parts: SimpleNamespace, user: Any, tokens: list[int]) -> None:
    """Lets vLLM's context of a step say how many tokens each rank has."""
    told = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens, device="cpu"))
    context = functools.partial(SimpleNamespace, dp_metadata=told)
    parts.patch.setattr(user, "get_forward_context", context)


def physical_ids(problem: Problem, rank: int, logical: list[int]) -> torch.Tensor:
    """A rank's ids of physical experts, some of which are copies."""
    ids = problem.ids[rank].clone()
    if len(logical) > EXPERTS:
        ids[1::2] += EXPERTS * (ids[1::2] < len(logical) - EXPERTS)
    return ids


def in_two_threads(
    parts: SimpleNamespace, compute: Callable[[int], torch.Tensor], times: int
) -> list[list[torch.Tensor]]:
    """Results of two micro-batches, each in a thread, of which vLLM lets one run at a time."""
    patch, stream = parts.patch, NoStream()
    patch.setattr(parts.ubatching, "current_stream", lambda: stream)
    patch.setattr(torch, "Event", NoStream)
    patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    ready = threading.Barrier(3)
    contexts = parts.ubatching.make_ubatch_contexts(2, stream, stream, [object(), object()], ready)
    outs: list[list[torch.Tensor]] = [[], []]

    def run(number: int) -> None:
        with contexts[number]:
            for _ in range(times):
                outs[number].append(compute(number))

    threads = [threading.Thread(target=run, args=(one,)) for one in range(2)]
    for thread in threads:
        thread.start()
    ready.wait()
    contexts[0].cpu_wait_event.set()
    for thread in threads:
        thread.join()
    return outs


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


@contextlib.contextmanager
def own(me: Rank) -> Iterator[SimpleNamespace]:
    """vLLM's modules, with the classes here in their places."""
    with engine(me, plugin.register) as parts:
        parts.own = importlib.import_module("crossdock.vllm._manager")
        parts.standard = importlib.import_module("crossdock.vllm._standard")
        layers = importlib.import_module("crossdock.vllm._layers")
        state = importlib.import_module("vllm.distributed.parallel_state")
        parts.patch.setattr(layers, "moe_kernel_quantize_input", quantise_input)
        dp = SimpleNamespace(rank_in_group=me.rank, world_size=me.num_ranks)
        for name in ("get_dp_group", "get_tp_group"):
            parts.patch.setattr(state, name, lambda: dp)
        near = lambda group, source_rank: [True]  # noqa: E731
        parts.patch.setattr(state, "in_the_same_node_as", near)
        yield parts


def configure(parts: SimpleNamespace, kind: str, most: int = MOST, masks: bool = False) -> None:
    """Lets vLLM's configuration be that of a backend."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            all2all_backend=BACKENDS[kind], enable_fault_tolerance=masks
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=most),
        model_config=SimpleNamespace(enforce_eager=kind != "v2 in graphs"),
    )
    for user in (parts.own, parts.chooser):
        parts.patch.setattr(user, "get_current_vllm_config", lambda: config)


@contextlib.contextmanager
def own_manager(parts: SimpleNamespace, kind: str, **options: Any) -> Iterator[Any]:
    """The manager that vLLM's communicator makes for a backend."""
    configure(parts, kind, **options)
    name = MANAGERS.get(kind, "DeepEPV2All2AllManager")
    group = dist.group.WORLD
    beside = {} if kind in MANAGERS else {"device_group": group}
    made = getattr(parts.managers, name)(group, None, **beside)
    try:
        yield made
    finally:
        made.destroy()


def made_by_vllm(
    parts: SimpleNamespace,
    made: Any,
    kind: str,
    quant: Any,
    hidden: int,
    experts: int,
    most: int = MOST,
    tables: Any = None,
) -> Any:
    """The class of a layer, as vLLM chooses and makes it where a GPU is."""
    for name in ("HT", "LL", "V2"):
        attribute = f"DeepEP{name}PrepareAndFinalize"
        module = f"{LAYERS}.prepare_finalize.deepep_{name.lower()}"
        found = getattr(importlib.import_module(module), attribute)
        parts.patch.setattr(parts.chooser, attribute, found, raising=False)
    block = importlib.import_module(f"{LAYERS}.prepare_finalize.deepep_ll")
    parts.patch.setattr(
        parts.chooser, "DEEPEP_QUANT_BLOCK_SHAPE", block.DEEPEP_QUANT_BLOCK_SHAPE, raising=False
    )
    ranks = parts.me.num_ranks
    parallel = SimpleNamespace(use_passthrough_all2all=False, use_all2all_kernels=True, sp_size=1)
    moe = SimpleNamespace(
        moe_parallel_config=parallel,
        use_deepep_ht_kernels=kind == "ht",
        use_deepep_ll_kernels=kind == "ll",
        use_deepep_v2_kernels=kind.startswith("v2"),
        dp_size=ranks,
        num_experts=experts,
        num_local_experts=experts // ranks,
        experts_per_token=TOPK,
        hidden_dim=hidden,
        max_num_tokens=most,
    )
    return parts.chooser.maybe_make_prepare_finalize(moe, quant, tables, all2all_manager=made)


def run_layer(
    parts: SimpleNamespace,
    pf: Any,
    problem: Problem,
    kind: str,
    fp8: bool,
    logical: list[int],
    dtype: torch.dtype = torch.int64,
) -> None:
    """Checks a layer's output with experts that are whole."""
    rank = parts.me.rank
    experts = Experts(parts, problem, logical, fp8, batched=kind == "ll")
    ids = physical_ids(problem, rank, logical).to(dtype)
    given = (problem.x[rank], ids, problem.weights[rank])
    problem.check(layer(parts, pf, experts, *given), rank, fp8)


def quant_config(parts: SimpleNamespace, fp8: bool) -> Any:
    if not fp8:
        return parts.config.FUSED_MOE_UNQUANTIZED_CONFIG
    scale = Experts.w1_scale
    return parts.config.fp8_w8a8_moe_quant_config(scale, scale, block_shape=[128, 128])
