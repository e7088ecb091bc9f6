"""Crossdock's classes at the seams of vLLM, on ranks of the CPU, against the dense sum."""

from __future__ import annotations

import importlib
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import crossdock.torch as xd
from engines import BATCHES, EXPERTS, SECONDS, TOPK, Problem, installed, needs, plugged_in
from support import Rank, on_ranks
from vllm_cases import (
    BACKENDS,
    LAYERS,
    Experts,
    in_two_threads,
    layer,
    made_by_vllm,
    own,
    own_manager,
    placements,
    quant_config,
    run_layer,
    tell_tokens,
)

pytestmark = needs("vllm")

# Processes of their own: those of test_vllm.py have changed their vLLM in the other way.
APART: dict[str, Any] = {"timeout": SECONDS, "among": 5}
BF16, FP8 = 264, 256  # columns: rows of 528 bytes have no size that DeepEP takes
COPIES = {"copy_", "clone", "_to_copy", "contiguous", "cat", "index_select"}


class Operations(TorchDispatchMode):
    """The names of the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def without_copies(pf: Any) -> Any:
    """The same, whose finalize may copy nothing."""
    finalize, names = pf.finalize_async, []

    def counted(*args: Any) -> Any:
        with Operations() as found:
            begun = finalize(*args)
        hook, end = begun if isinstance(begun, tuple) else (lambda: None, begun)

        def ended(step: Any) -> None:
            with Operations() as later:
                step()
            names.extend([*found.names, *later.names])
            assert not COPIES.intersection(names), names

        return lambda: ended(hook), lambda: ended(end)

    pf.finalize_async = counted
    return pf


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", BACKENDS)
@on_ranks(2, 4, **APART)
def test_a_layer_is_the_dense_sum(me: Rank, kind: str, fp8: bool) -> None:
    """Without copies in finalize, and with one group for all batches of an expert placement."""
    hidden = FP8 if fp8 else BF16
    with own(me) as parts, own_manager(parts, kind) as made:
        quant = quant_config(parts, fp8)
        for number, (logical, options) in enumerate(placements(kind, me.num_ranks)):
            tables = None
            if options:
                tables = (options["global_to_physical"], None, None)
            given = (made, kind, quant, hidden, len(logical))
            pf = without_copies(made_by_vllm(parts, *given, tables=tables))
            for seed, tokens in enumerate(BATCHES):
                tokens = tokens[: me.num_ranks]
                tell_tokens(parts, parts.standard, tokens)
                problem = Problem(tokens, hidden, EXPERTS, TOPK, seed)
                for dtype in (torch.int64, torch.int32):
                    run_layer(parts, pf, problem, kind, fp8, logical, dtype)
                assert len(made.traffic) == min(number, 1) + 1


@on_ranks(2, **APART)
def test_rows_in_graphs_depend_on_nothing_but_the_largest_number_of_tokens(me: Rank) -> None:
    """As many as the next power of two allows, few of them or many, and -1 behind the last."""
    hidden, most = 64, 700
    with own(me) as parts, own_manager(parts, "v2 in graphs", most=most) as made:
        quant = quant_config(parts, False)
        pf = made_by_vllm(parts, made, "v2 in graphs", quant, hidden, EXPERTS, most)
        receive, seen = pf._received, []

        def received(*args: Any) -> Any:
            seen.append(receive(*args))
            return seen[-1]

        pf._received = received
        sizes = {(5, 0): 8, (3, 600): 700, (0, 0): 1, (2, 300): 512, (1, 1): 1}
        for seed, (tokens, bound) in enumerate(sizes.items()):
            tell_tokens(parts, parts.standard, list(tokens))
            problem = Problem(tokens, hidden, EXPERTS, TOPK, seed)
            run_layer(parts, pf, problem, "v2 in graphs", False, list(range(EXPERTS)))
            rows, _, meta, ids, _ = seen[-1]
            mine = range(me.rank * 4, me.rank * 4 + 4)
            here = [sum(1 for row in each.tolist() if set(row) & set(mine)) for each in problem.ids]
            assert len(rows) == len(ids) == 2 * bound
            assert meta.psum_recv_per_rank.tolist() == [here[0], sum(here)]
            assert meta.expert_num_tokens is None and meta.expert_num_tokens_cpu is None
            assert (ids[sum(here) :] == -1).all() and ids.max() <= mine[-1]
            assert (ids[: sum(here)] >= mine[0]).any(1).all()
            assert len(made.traffic) == 2


@pytest.mark.parametrize("kind", ["ll", "ht"])
@on_ranks(2, 4, **APART)
def test_two_micro_batches_take_turns(me: Rank, kind: str) -> None:
    with own(me) as parts, own_manager(parts, kind) as made:
        quant = quant_config(parts, False)
        pf = without_copies(made_by_vllm(parts, made, kind, quant, BF16, EXPERTS))
        problems = [
            Problem(tokens[: me.num_ranks], BF16, EXPERTS, TOPK, seed)
            for seed, tokens in enumerate(BATCHES[:2])
        ]

        def compute(number: int) -> torch.Tensor:
            problem = problems[number]
            experts = Experts(parts, problem, list(range(EXPERTS)), False, kind == "ll")
            given = (problem.x[me.rank], problem.ids[me.rank], problem.weights[me.rank])
            return layer(parts, pf, experts, *given)

        for problem, outs in zip(problems, in_two_threads(parts, compute, 3)):
            assert len(outs) == 3
            for out in outs:
                problem.check(out, me.rank, False)
        assert len(made.traffic) == 1


@on_ranks(2, **APART)
def test_scales_are_packed_where_experts_take_that(me: Rank) -> None:
    hidden, tokens = 512, [5, 3]
    with own(me) as parts, own_manager(parts, "ll") as made:
        quant = quant_config(parts, True)
        pf = made_by_vllm(parts, made, "ll", quant, hidden, EXPERTS)
        taker = SimpleNamespace(supports_packed_ue8m0_act_scales=lambda: True)
        pf.post_init_setup(taker)
        problem = Problem(tokens, hidden, EXPERTS, TOPK)
        x, ids, weights = problem.x[me.rank], problem.ids[me.rank], problem.weights[me.rank]
        rows, scale, meta, *_ = pf.prepare(x, weights, ids, EXPERTS, None, False, quant)
        slots = rows.shape[1]
        assert scale.dtype == torch.int32 and scale.shape == (4, slots, 1)
        assert scale.stride()[1] == 1
        powers = torch.exp2((scale >> torch.arange(0, 32, 8) & 255).float() - 127)
        values = rows.float().unflatten(-1, (4, 128)) * powers.unsqueeze(-1)
        experts = Experts(parts, problem, list(range(EXPERTS)), False, batched=True)
        results = experts.of_slots(values.flatten(2).bfloat16(), None, meta)
        out = torch.full(x.shape, torch.nan, dtype=torch.bfloat16)
        delegate = experts.finalize_weight_and_reduce_impl()
        pf.finalize(out, results, weights, ids, False, delegate)
        want = problem.sums(me.rank, False)  # but for scales that are up to twice as large
        torch.testing.assert_close(out.float(), want, rtol=0.05, atol=0.12)
        assert want.abs().amax() > 1


@pytest.mark.parametrize("kind", ["ll", "ht"])
@on_ranks(2, **APART)
def test_weights_may_go_to_the_input(me: Rank, kind: str) -> None:
    """With one expert for each token."""
    with own(me) as parts, own_manager(parts, kind) as made:
        pf = made_by_vllm(parts, made, kind, quant_config(parts, False), 64, EXPERTS)
        problem = Problem([4, 2], 64, EXPERTS, 1)
        x, ids, weights = problem.x[me.rank], problem.ids[me.rank], problem.weights[me.rank]
        experts = Experts(parts, problem, list(range(EXPERTS)), False, batched=kind == "ll")
        quant = experts.quant_config
        *rows, given_ids, given = pf.prepare(x, weights, ids, EXPERTS, None, True, quant)
        made_rows = experts(*rows, given_ids, None if given is None else torch.ones_like(given))
        out = torch.full(x.shape, torch.nan, dtype=torch.bfloat16)
        reduce = experts.finalize_weight_and_reduce_impl()
        pf.finalize(out, made_rows, weights, ids, True, reduce)
        scaled = x * weights.bfloat16()
        want = [problem.apply(int(one), row[None]) for one, row in zip(ids, scaled)]
        torch.testing.assert_close(out.float(), torch.cat(want), rtol=0.02, atol=0.03)
        with pytest.raises(ValueError, match="apply_router_weight_on_input: expected False for"):
            wide = weights.repeat(1, 2)
            pf.prepare(x, wide, ids.repeat(1, 2), EXPERTS, None, True, quant)


@on_ranks(2, **APART)
def test_results_may_lie_where_peers_read_them(me: Rank) -> None:
    with own(me) as parts, own_manager(parts, "ht") as made:
        quant = quant_config(parts, False)
        pf = made_by_vllm(parts, made, "ht", quant, BF16, EXPERTS)
        problem = Problem([5, 3], BF16, EXPERTS, TOPK)
        x, ids, weights = problem.x[me.rank], problem.ids[me.rank], problem.weights[me.rank]
        rows, *rest = pf.prepare(x, weights, ids, EXPERTS, None, False, quant)
        experts = Experts(parts, problem, list(range(EXPERTS)), False, batched=False)
        done = parts.reduce.TopKWeightAndReduceNoOP()
        delegate = parts.reduce.TopKWeightAndReduceDelegate()
        shape = tuple(rows.shape)
        assert pf.allocate_fused_expert_output(shape, rows.dtype, rows.device, delegate) is None
        results = pf.allocate_fused_expert_output(shape, rows.dtype, rows.device, done)
        assert results.shape == shape
        results.copy_(experts(rows, *rest))
        out = torch.full(x.shape, torch.nan, dtype=torch.bfloat16)
        pf.finalize(out, results, weights, ids, False, done)
        problem.check(out, me.rank, False)


@pytest.mark.parametrize("kind", BACKENDS)
@on_ranks(2, **APART)
def test_a_layer_keeps_no_rows(me: Rank, kind: str) -> None:
    """Each has a class of its own, whose finalize without a prepare is an error."""
    with own(me) as parts, own_manager(parts, kind) as made:
        tell_tokens(parts, parts.standard, [5, 3])
        quant, logical = quant_config(parts, False), list(range(EXPERTS))
        problem = Problem([5, 3], BF16, EXPERTS, TOPK)
        x, ids, weights = problem.x[me.rank], problem.ids[me.rank], problem.weights[me.rank]
        pfs = [made_by_vllm(parts, made, kind, quant, BF16, EXPERTS) for _ in range(3)]
        kept = []
        for pf in pfs:
            experts = Experts(parts, problem, logical, False, batched=kind == "ll")
            prepared = pf.prepare(x, weights, ids, EXPERTS, None, False, quant)
            rows, scale, meta, here, shares = prepared
            kept.append(weakref.ref(rows))
            results = experts(rows, scale, meta, here, shares)
            del prepared, rows, scale, meta
            assert kept[-1]() is None
            out = torch.full(x.shape, torch.nan, dtype=torch.bfloat16)
            given = (weights, ids) if here is None else (shares, here)
            finalize = (out, results, *given, False, experts.finalize_weight_and_reduce_impl())
            pf.finalize(*finalize)
            problem.check(out, me.rank, False)
            with pytest.raises(RuntimeError, match="finalize: expected a prepare before, got none"):
                pf.finalize(*finalize)
        assert len(made.traffic) == 1


@pytest.mark.parametrize("kind", BACKENDS)
@on_ranks(2, **APART)
def test_peers_hear_that_a_rank_has_no_memory(me: Rank, kind: str) -> None:
    with own(me) as parts, own_manager(parts, kind) as made:
        tell_tokens(parts, parts.standard, [5, 3])
        pf = made_by_vllm(parts, made, kind, quant_config(parts, False), BF16, EXPERTS)
        problem = Problem([5, 3], BF16, EXPERTS, TOPK)
        steps = (parts, pf, problem, kind, False, list(range(EXPERTS)))
        run_layer(*steps)

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no memory is left")

        with pytest.MonkeyPatch.context() as patch:
            traffic = importlib.import_module("crossdock.compat._traffic")
            if me.rank == 1:
                patch.setattr(traffic, "_memory", fail)
                patch.setattr(xd.LowLatencyGroup, "slots", fail)
            says = "no memory is left" if me.rank == 1 else "rank 1: its call failed"
            with pytest.raises(RuntimeError, match=says):
                run_layer(*steps)
        run_layer(*steps)


@on_ranks(2, **APART)
def test_multiprocessors_are_those_of_groups_to_come(me: Rank) -> None:
    """Steps of both kinds have a group each, and keep it."""
    with own(me) as parts, own_manager(parts, "ht") as made:
        quant = quant_config(parts, False)
        pf = made_by_vllm(parts, made, "ht", quant, 64, EXPERTS)
        problem = Problem([4, 2], 64, EXPERTS, TOPK)
        assert made.max_sms_used() is None
        for _ in range(2):
            for given, used in ((7, 6), (20, 20)):
                made.set_num_sms(given)
                assert made.num_sms == used
                run_layer(parts, pf, problem, "ht", False, list(range(EXPERTS)))
        assert len(made.traffic) == 2
        with pytest.raises(ValueError, match="num_sms: expected at least 2, got 1"):
            made.set_num_sms(1)


@on_ranks(2, **APART)
def test_low_latency_needs_no_multiprocessors_and_takes_few_tokens(me: Rank) -> None:
    with own(me) as parts, own_manager(parts, "ll") as made:
        assert made.max_sms_used() == 0
        with pytest.raises(ValueError, match="--max-num-batched-tokens: expected at most 1024"):
            made.get_handle({"max_num_tokens_per_dp_rank": 1025})


@on_ranks(2, **APART)
def test_a_layer_goes_on_without_a_rank_and_gets_it_back(me: Rank) -> None:
    with own(me) as parts, own_manager(parts, "ll", masks=True) as made:
        assert made.support_fault_tolerance and not made.query_fault()
        quant = quant_config(parts, False)
        pf = made_by_vllm(parts, made, "ll", quant, BF16, EXPERTS)
        problem = Problem([4] * me.num_ranks, BF16, EXPERTS, TOPK)
        steps = (parts, pf, problem, "ll", False, list(range(EXPERTS)))
        run_layer(*steps)
        assert not made.query_fault() and made.query_active_mask().tolist() == [0, 0]
        dist.barrier()
        if me.rank == 0:  # a step without its peer
            [group] = made.traffic._masking()
            group.mask_set(1, True)
            with pytest.raises(AssertionError):
                run_layer(*steps)
            assert made.query_fault() and made.query_active_mask().tolist() == [0, 1]
        made.clean_buffers()
        assert not made.query_fault() and made.query_active_mask().tolist() == [0, 0]
        for _ in range(3):
            run_layer(*steps)


@on_ranks(2, **APART)
def test_rows_keep_their_size_if_it_is_a_multiple_of_16_bytes(me: Rank) -> None:
    with own(me) as parts:
        parts.patch.setattr(parts.chooser, "DeepEPHTPrepareAndFinalize", None, raising=False)
        for kind in BACKENDS:
            with own_manager(parts, kind) as made:
                made_by_vllm(parts, made, kind, quant_config(parts, False), 64, EXPERTS)
            flags = {f"use_{one}_kernels": False for one in ("deepep_ht", "deepep_ll", "deepep_v2")}
            flags |= {"use_nixl_ep_kernels": False, f"use_deepep_{kind[:2]}_kernels": True}
            flags = SimpleNamespace(**flags)
            round_up = parts.chooser.maybe_roundup_layer_hidden_size
            for given, used in ((2880, 2880), (2048, 2048), (2881, 2888), (9000, 9000)):
                assert round_up(given, torch.bfloat16, flags) == used


@on_ranks(2, **APART)
def test_vllm_finds_the_classes_where_a_gpu_is(me: Rank) -> None:
    """Whether it looks before the plug-in is loaded, or behind it."""
    with own(me) as parts:
        imports = importlib.import_module("vllm.utils.import_utils")
        assert imports.has_deep_ep() and imports.has_deep_ep_v2()
        platform = importlib.import_module("vllm.platforms").current_platform
        parts.patch.setattr(type(platform), "is_cuda_alike", lambda _: True)
        parts.patch.delitem(sys.modules, f"{LAYERS}.all2all_utils")
        chooser = importlib.import_module(f"{LAYERS}.all2all_utils")
        batched = importlib.import_module("crossdock.vllm._batched").CrossdockBatched
        standard = parts.standard.CrossdockStandard
        assert chooser.DeepEPHTPrepareAndFinalize is standard
        assert chooser.DeepEPV2PrepareAndFinalize is standard
        assert chooser.DeepEPLLPrepareAndFinalize is batched
        assert chooser.DEEPEP_QUANT_BLOCK_SHAPE == [128, 128]
        abstract = parts.kernel.FusedMoEPrepareAndFinalizeModular
        for one in (standard, batched):
            assert issubclass(one, abstract) and not one.__abstractmethods__
        assert "deep_ep" not in sys.modules


@on_ranks(1, timeout=SECONDS, fresh=True)
def test_a_worker_loads_the_plug_in(me: Rank, tmp_path: Any) -> None:
    with pytest.MonkeyPatch.context() as patch, plugged_in(lambda: None):
        patch.syspath_prepend(installed(tmp_path, "vllm.general_plugins"))
        importlib.import_module("vllm.v1.worker.worker_base")
        importlib.import_module("vllm.plugins").load_general_plugins()
        managers = importlib.import_module("vllm.distributed.device_communicators.all2all")
        for name in ("HT", "LL", "V2"):
            found = getattr(managers, f"DeepEP{name}All2AllManager")
            assert found.__name__ == "CrossdockAll2AllManager"
