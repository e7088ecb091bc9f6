"""Set-up of the tests of SGLang's dispatchers: its modules, a problem's parts, experts."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossdock import sglang as plugin
from engines import (
    BATCHES,
    EXPERTS,
    TOPK,
    NoStream,
    Problem,
    dequantise,
    modules_of,
    quantise,
)
from support import Rank

HIDDEN, ALIGNMENT = 256, 128
FORMS = ("prefill", "prefill by choice", "decode")  # of a layer by DeepEP 2
DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher"
UNUSED = ("IPython", "gguf", "loguru", "torchvision")
# SGLang imports these where there is CUDA: kernels, for which torch's functions stand here.
KERNELS = ("deep_gemm", "sgl_kernel")


@contextlib.contextmanager
def sglang(
    me: Rank, register: Callable[[], None] = plugin.register_deep_ep
) -> Iterator[SimpleNamespace]:
    """SGLang's modules with a plug-in, as a server has them that has DeepGEMM."""
    modules = {
        "first": f"{DISPATCHERS}.deepep",
        "second": f"{DISPATCHERS}.deepep_v2",
        "overlap": "sglang.srt.batch_overlap.two_batch_overlap",
        "single": "sglang.srt.batch_overlap.single_batch_overlap",
        "utils": "sglang.srt.layers.moe.utils",
        "context": "sglang.srt.runtime_context",
    }
    without = UNUSED + (KERNELS if torch.cuda.is_available() else ())
    with modules_of(me, register, modules, without) as parts:
        patch = parts.patch
        if not torch.cuda.is_available():
            device = SimpleNamespace(multi_processor_count=132)
            patch.setattr(torch.cuda, "get_device_properties", lambda *_, **__: device)
            patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        patch.setattr(parts.first.deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True)
        for name in ("DEEPGEMM_BLACKWELL", "DEEPGEMM_SCALE_UE8M0"):
            patch.setattr(parts.first.deep_gemm_wrapper, name, False)
        for module in (parts.first, parts.second):
            patch.setattr(module, "sglang_per_token_group_quant_fp8", quantise_rows)
        capacity = SimpleNamespace(attn_dp_size=me.num_ranks)
        patch.setattr(parts.second, "get_parallel", lambda: capacity)
        patch.setattr(parts.second, "_get_allow_hybrid_mode", lambda: False)
        patch.setattr(parts.first.DeepEPConfig, "_instance", None)
        moe = parts.context.get_flags().moe
        patch.setattr(moe, "a2a_backend", parts.utils.MoeA2ABackend.DEEPEP)
        patch.setattr(moe, "tbo_enabled", True)
        patch.setattr(moe, "deepep_config", "")
        patch.setenv("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "16")
        patch.setenv("SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "16")
        buffers = parts.context.get_resources().buffers
        buffers.clear()
        try:
            yield parts
        finally:
            buffers.clear()


@contextlib.contextmanager
def own(me: Rank) -> Iterator[SimpleNamespace]:
    """SGLang's modules, with Crossdock's classes in their places."""
    with sglang(me, plugin.register) as parts:
        parts.ours = importlib.import_module("crossdock.sglang._dispatchers")
        args = SimpleNamespace(chunked_prefill_size=-1, max_prefill_tokens=64)
        parts.patch.setattr(parts.ours, "get_server_args", lambda: args)
        yield parts


def begin(parts: SimpleNamespace, prefill: bool) -> None:
    """A batch of this kind is next."""
    for module in (parts.first, parts.second):
        parts.patch.setattr(module, "get_is_extend_in_batch", lambda: prefill)


def quantise_rows(x: torch.Tensor, block: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Does as SGLang's kernel, with scales row by row."""
    return quantise(x, block)


class Placed:
    """A problem whose experts have physical numbers, and this rank's part of them.

    Attributes:
        mine: the expert of `problem` that each local one is.
        given: hidden states, and what SGLang's router gives with them.
    """

    def __init__(
        self, parts: SimpleNamespace, seed: int, copies: bool, hidden: int = HIDDEN
    ) -> None:
        rank, ranks = parts.me.rank, parts.me.num_ranks
        logical = [*range(EXPERTS), *range(4 if copies else 0)]
        problem = self.problem = Problem.here(BATCHES[seed][:ranks], hidden, seed)
        self.num_experts, self.local = len(logical), len(logical) // ranks
        self.rank = rank
        self.mine = logical[rank * self.local : (rank + 1) * self.local]
        ids = problem.ids[rank].clone()
        ids[1::2] += EXPERTS * (ids[1::2] < self.num_experts - EXPERTS)
        topk = SimpleNamespace(topk_ids=ids.int(), topk_weights=problem.weights[rank])
        self.given = {"hidden_states": problem.x[rank], "topk_output": topk}

    def by_choice(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sums of rows [N,H] that have ids [N,K] of local experts."""
        out = torch.zeros(x.shape)
        for number, one in enumerate(self.mine):
            rows = (ids == number).any(1)
            share = weights.masked_fill(ids != number, 0).sum(1)[rows]
            out[rows] += share.unsqueeze(1) * self.problem.apply(one, x[rows])
        return out.bfloat16()

    def of_slots(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Results of the first rows of each local expert's slots, [L,S,H]."""
        out = torch.full(x.shape, torch.nan)
        for number, one in enumerate(self.mine):
            rows = int(counts[number])
            out[number, :rows] = self.problem.apply(one, x[number, :rows])
        return out.bfloat16()

    def in_order(self, x: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted results of rows in order of local experts, which begin at multiples."""
        out, first = torch.zeros(x.shape), 0
        for number, one in enumerate(self.mine):
            rows = slice(first, int(ends[number]))
            out[rows] = weights[rows].unsqueeze(1) * self.problem.apply(one, x[rows])
            first = -(-rows.stop // ALIGNMENT) * ALIGNMENT
        return out.bfloat16()

    def check(self, out: torch.Tensor, fp8: bool) -> None:
        self.problem.check(out, self.rank, fp8)


def dispatcher(parts: SimpleNamespace, placed: Placed, mode: str, fp8: bool) -> Any:
    """SGLang's dispatcher of two micro-batches, as its layer makes it."""
    kind = parts.utils.DispatcherOutputDtype
    chosen = kind.FP8 if fp8 else kind.BF16
    parts.patch.setattr(parts.first, "get_deepep_output_dtype", lambda _: chosen)
    return parts.overlap.MaybeTboDeepEPDispatcher(
        group=dist.group.WORLD,
        router_topk=TOPK,
        permute_fusion=True,
        num_experts=placed.num_experts,
        num_local_experts=placed.local,
        hidden_size=placed.problem.w1.shape[2],
        params_dtype=torch.bfloat16,
        deepep_mode=parts.utils.DeepEPMode(mode),
        async_finish=True,
        return_recv_hook=True,
    )


def computed(parts: SimpleNamespace, placed: Placed, got: Any) -> Any:
    """The experts' results for what a dispatcher gave, as its combine takes them."""
    x = got.hidden_states
    if got.hidden_states_scale is not None:
        x = dequantise(x, got.hidden_states_scale)
    if isinstance(got, parts.first.DeepEPLLDispatchOutput):
        made = placed.of_slots(x, got.masked_m)
        return parts.first.DeepEPLLCombineInput(made, got.topk_ids, got.topk_weights)
    rows = [int((got.topk_ids == one).any(1).sum()) for one in range(placed.local)]
    rounded = [-(-one // ALIGNMENT) * ALIGNMENT for one in rows]
    assert got.num_recv_tokens_per_expert == rounded
    made = placed.by_choice(x, got.topk_ids, got.topk_weights)
    return parts.first.DeepEPNormalCombineInput(made, got.topk_ids, got.topk_weights)


def layers_are_dense_sums(
    parts: SimpleNamespace, mode: str, fp8: bool, copies: bool, hidden: int = HIDDEN
) -> None:
    """Dispatchers of a mode, batch after batch, of prefill and of decode."""
    for seed in range(len(BATCHES)):
        placed = Placed(parts, seed, copies, hidden)
        made = dispatcher(parts, placed, mode, fp8)
        for prefill in (True, False):
            begin(parts, prefill)
            got = made.dispatch(**placed.given)
            few = mode == "low_latency" or (mode == "auto" and not prefill)
            assert isinstance(got, parts.first.DeepEPLLDispatchOutput) == few
            out = made.combine(combine_input=computed(parts, placed, got))
            placed.check(out, fp8)


def second_dispatcher(parts: SimpleNamespace, placed: Placed, fp8: bool) -> Any:
    """SGLang's dispatcher for DeepEP 2, with its buffer."""
    made = parts.second.DeepEPv2Dispatcher(
        group=dist.group.WORLD,
        router_topk=TOPK,
        num_experts=placed.num_experts,
        num_local_experts=placed.local,
        hidden_size=placed.problem.w1.shape[2],
        params_dtype=torch.bfloat16,
        use_fp8_dispatch=fp8,
    )
    made.prebuild()
    return made


def second_layer(parts: SimpleNamespace, placed: Placed, made: Any, form: str) -> torch.Tensor:
    """The output of a layer by that dispatcher, in one of its three forms."""
    got = made.dispatch(**placed.given)
    x = got.hidden_states
    if made.use_fp8_dispatch:
        x = dequantise(x, got.hidden_states_scale)
    expand = form != "prefill by choice"
    assert got.is_expanded == expand and got.use_masked_gemm == (form == "decode")
    if expand:
        rows = placed.in_order(x, got.psum_num_recv_tokens_per_expert, got.topk_weights)
    else:
        rows = placed.by_choice(x, got.topk_ids, got.topk_weights)
    out: torch.Tensor = made.combine(parts.second.DeepEPv2CombineInput(rows, None))
    return out


def second_layers_are_dense_sums(
    parts: SimpleNamespace, form: str, fp8: bool, hidden: int = HIDDEN
) -> None:
    """Dispatchers for DeepEP 2, batch after batch."""
    by_choice = form == "prefill by choice"
    parts.patch.setenv("SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND", str(not by_choice).lower())
    begin(parts, form != "decode")
    for copies in (False, True):
        for seed in range(len(BATCHES)):
            placed = Placed(parts, seed, copies, hidden)
            made = second_dispatcher(parts, placed, fp8)
            placed.check(second_layer(parts, placed, made, form), fp8)


def micro_batches_take_turns(parts: SimpleNamespace, mode: str) -> None:
    """The halves of two micro-batches, as two-batch overlap calls them."""
    begin(parts, mode == "normal")
    both = [Placed(parts, seed, False) for seed in range(2)]
    made = dispatcher(parts, both[0], mode, True)
    place = [{"tbo_subbatch_index": one} for one in range(2)]
    for _ in range(2):
        made.dispatch_a(**both[0].given, **place[0])
        made.dispatch_a(**both[1].given, **place[1])
        rows = made.dispatch_b(**place[0])
        made.combine_a(combine_input=computed(parts, both[0], rows), **place[0])
        rows = made.dispatch_b(**place[1])
        both[0].check(made.combine_b(**place[0]), True)
        made.combine_a(combine_input=computed(parts, both[1], rows), **place[1])
        both[1].check(made.combine_b(**place[1]), True)


def combine_overlaps_shared_experts_alone(parts: SimpleNamespace) -> None:
    """Combine takes SGLang's words of overlap, and refuses experts whose rows come one by one."""
    placed = Placed(parts, 2, False)
    for overlap in (False, True):
        made = dispatcher(parts, placed, "low_latency", False)
        stream = NoStream()
        device = SimpleNamespace(current_stream=lambda: stream)
        made._inners[0]._low_latency_dispatcher.device_module = device
        for _ in range(2):
            rows = computed(parts, placed, made.dispatch(**placed.given))
            given = parts.single.CombineOverlapArgs(
                overlap=overlap, stream=stream, wait_event=None, num_sms=20
            )
            made.set_overlap_args(given, {"block_m": 64, "threshold": 0})
            if overlap:
                with pytest.raises(ValueError, match="overlap: expected False, as all rows"):
                    made.combine(combine_input=rows)
                break
            placed.check(made.combine(combine_input=rows), False)
            made.clear_overlap_args()
