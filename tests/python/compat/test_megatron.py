"""Megatron's layers with Crossdock's token dispatcher, against its all-to-all: equal losses."""

from __future__ import annotations

import contextlib
import importlib
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from crossdock.errors import CapacityOverflow, InvalidArgument, Mismatch
from crossdock.torch import _calls
from megatron_layers import (
    EXPERTS,
    HIDDEN,
    NEWEST,
    RELEASES,
    TOKENS,
    TOPK,
    FusedExperts,
    config_of,
    losses,
    megatron_of,
    on_release,
    run_layer,
    use,
)
from support import Rank, on_ranks
from torch_ranks import process_group

SHARED = {"moe_shared_expert_intermediate_size": 16}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "0.16.1": [{}, {"moe_expert_capacity_factor": 0.75}],
    "0.19.2": [
        {"moe_flex_dispatcher_num_sms": 8},
        {"moe_expert_capacity_factor": 0.75},
        SHARED | {"moe_shared_expert_overlap": True},
    ],
}


@pytest.mark.parametrize("release", RELEASES)
@on_ranks(2, run=on_release)
def test_losses_are_those_of_the_all_to_all_dispatcher(me: Rank, release: str) -> None:
    with process_group(), megatron_of(me, release) as megatron:
        for options in OPTIONS[release]:
            megatron.install(max_tokens_per_rank=TOKENS)
            got = losses(me, "flex", **options)
            megatron.uninstall()
            expected = losses(me, "alltoall", **options)
            assert got == pytest.approx(expected, rel=1e-5), (got, expected, options)
        with pytest.raises(ValueError, match="max_tokens_per_rank: expected at least 1, got 0"):
            megatron.install(0)


def manager_of(me: Rank, **options: Any) -> Any:
    """The manager of one dispatcher for all ranks."""
    from crossdock.compat import megatron

    config = config_of(me.num_ranks, "flex", **options)
    local = EXPERTS // me.num_ranks
    return megatron.CrossdockManager(dist.group.WORLD, local, TOPK, EXPERTS, config)


STATIC = {
    "moe_flex_dispatcher_backend": "ncclep",
    "moe_expert_rank_capacity_factor": 2.0,  # of all rows that can arrive
    "moe_ncclep_static_shape": True,
    "use_transformer_engine_op_fuser": True,
    "moe_grouped_gemm": True,
}


@pytest.mark.parametrize("release", [NEWEST])
@on_ranks(2, run=on_release)
def test_static_shapes_and_buffers_of_experts_give_equal_bits(me: Rank, release: str) -> None:
    calls: dict[str, set[int]] = {}
    run = _calls.run

    def watched(core: Any, operation: str, like: Any, given: Any, **more: Any) -> Any:
        rows = given.get("expert_out" if operation == "combine" else "grad_recv_tokens")
        if rows is not None:
            calls.setdefault(operation, set()).add(rows.data_ptr())
        return run(core, operation, like, given, **more)

    layers = []

    def watch(layer: Any) -> None:
        layer.experts = FusedExperts(layer.experts)
        layers.append(layer)
        calls.clear()

    with (
        process_group(),
        megatron_of(me, release) as megatron,
        mock.patch.object(_calls, "run", watched),
    ):
        megatron.install(max_tokens_per_rank=TOKENS)
        expected = losses(me, "flex")
        assert losses(me, "flex", watch, **STATIC) == expected
        assert layers[-1].experts.addresses == [None, None]
        assert losses(me, "flex", watch, **STATIC, moe_ncclep_zero_copy=True) == expected
        (layer,) = layers[1:]
        out, grad = layer.experts.addresses
        assert calls == {"combine": {out}, "dispatch_bwd": {grad}}, (calls, out, grad)
        buffers = layer.token_dispatcher.get_expert_zero_copy_buffers()
        assert [one.data_ptr() for one in buffers] == [out, grad]
        pool = layer.token_dispatcher._comm_manager._group(buffers[0]).comm.pool
        assert all(pool.owns(one) for one in buffers)


@pytest.mark.parametrize("release", [NEWEST])
@on_ranks(2, run=on_release)
def test_layers_share_the_buffers_of_experts_also_where_they_run_again(
    me: Rank, release: str
) -> None:
    layers = []

    def watch(layer: Any) -> None:
        layer.experts = FusedExperts(layer.experts)
        layers.append(layer)

    def again(reentrant: bool, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(run_layer, layer, x, use_reentrant=reentrant)

    with process_group(), megatron_of(me, release) as megatron:
        megatron.install(max_tokens_per_rank=TOKENS)
        expected = losses(me, "flex", watch, num_layers=2, **STATIC)
        for run in (run_layer, partial(again, True), partial(again, False)):
            layers.clear()
            got = losses(
                me, "flex", watch, num_layers=2, run=run, **STATIC, moe_ncclep_zero_copy=True
            )
            assert got == expected, run
            one, other = (layer.experts.addresses for layer in layers)
            assert one == other and None not in one


@pytest.mark.parametrize("release", [NEWEST])
@on_ranks(2, run=on_release)
def test_on_another_stream_bits_are_equal(me: Rank, release: str) -> None:
    """On GPUs that is, where `gpu` runs this: on CPUs operations have ended when they return."""
    use(release)
    from crossdock.compat import megatron

    megatron.install(max_tokens_per_rank=TOKENS)
    torch.manual_seed(me.rank)
    shape = (TOKENS, me.num_ranks, EXPERTS // me.num_ranks)
    x, probs = torch.randn(TOKENS, HIDDEN), torch.rand(shape)
    routing = torch.arange(EXPERTS).roll(me.rank).expand(TOKENS, -1).reshape(shape) < TOPK

    def step(manager: Any, beside: bool) -> tuple[torch.Tensor, ...]:
        # A capture must find no node of a graph on another stream, also none of a leaf.
        leaves = x.detach().requires_grad_(), probs.detach().requires_grad_()
        manager.setup_metadata(routing, leaves[1])
        rows = manager.dispatch(leaves[0], async_finish=beside, allocate_on_comm_stream=beside)
        rows, weights = manager.get_permuted_hidden_states_by_experts(rows)
        out = manager.combine(rows * weights.unsqueeze(-1), beside, beside)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    with process_group():
        for options in (STATIC, {}):
            manager = manager_of(me, **options)
            expected = step(manager, False)
            for _ in range(4):  # in memory that is used again
                for one, other in zip(step(manager, True), expected):
                    assert torch.equal(one, other)
            if not (options and x.is_cuda):
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = step(manager, True)
            x *= 2
            routing.logical_and_(torch.rand(shape) < 0.7)
            expected = step(manager, False)
            graph.replay()
            for one, other in zip(got, expected):
                assert torch.equal(one, other)
            del graph, got
    megatron.uninstall()


class Event:
    """Stands for the CUDA event of a schedule."""

    def wait(self, stream: object) -> None: ...

    def record(self, stream: object) -> None: ...


@pytest.mark.parametrize("release", [NEWEST])
@on_ranks(2, run=on_release)
def test_rows_that_an_overlapped_schedule_frees_are_not_missed(me: Rank, release: str) -> None:
    with process_group(), megatron_of(me, release) as megatron:
        from megatron.core.models.common.utils import should_free_input
        from megatron.core.pipeline_parallel.utils import ScheduleNode

        megatron.install(max_tokens_per_rank=TOKENS)
        manager = manager_of(me, **STATIC)
        torch.manual_seed(me.rank)
        probs = torch.rand(TOKENS, 2, EXPERTS // 2)
        routing = (torch.arange(EXPERTS) % 3 == me.rank).expand(TOKENS, -1).view_as(probs)
        routing = routing & (routing.flatten(1).cumsum(1).view_as(probs) <= TOPK)
        tokens = torch.randn(TOKENS, HIDDEN)
        freed = []

        def dispatch(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
            manager.token_probs = weights
            return manager.dispatch(x, True, True), manager.dispatched_probs

        def experts(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            manager.dispatched_probs = weights
            rows, weights = manager.get_permuted_hidden_states_by_experts(rows)
            return rows * rows * weights.unsqueeze(-1)  # which are all needed in the backward pass

        def combine(rows: torch.Tensor) -> torch.Tensor:
            return manager.combine(rows, True, True)

        def begin() -> tuple[torch.Tensor, torch.Tensor]:
            manager.setup_metadata(routing, probs)
            x, weights = tokens.clone(), manager.token_probs.clone()
            return x.requires_grad_(), weights.requires_grad_()

        inputs = begin()
        out = combine(experts(*dispatch(*inputs)))
        expected = out, *torch.autograd.grad(out.sum(), inputs)

        manager.config.overlap_moe_expert_parallel_comm = True
        nodes, given = [], begin()
        with mock.patch.object(torch.Tensor, "record_stream", lambda *_: None):
            for name, run in (
                ("moe_dispatch", dispatch),
                ("mlp", experts),
                ("moe_combine", combine),
            ):
                frees = should_free_input(name, True, manager.config, EXPERTS // 2)
                freed.extend([name] * frees)
                nodes.append(ScheduleNode(run, object(), Event(), free_input=frees, name=name))
                given = nodes[-1].forward(given)
            grads = torch.ones_like(given)
            for node in reversed(nodes):
                grads = node.backward(grads)
        assert freed == ["moe_combine"]
        for one, other in zip((given, *grads), expected):
            assert torch.equal(one, other)


@pytest.mark.parametrize("release", [NEWEST])
@on_ranks(2, run=on_release)
def test_rows_over_the_budget_are_dropped_and_told(me: Rank, release: str) -> None:
    use(release)
    from crossdock.compat import megatron

    megatron.install(max_tokens_per_rank=TOKENS)
    dispatcher = object.__new__(megatron.CrossdockTokenDispatcher)  # without groups of Megatron's
    balanced, all_rows = TOKENS * TOPK, 2 * TOKENS * TOPK
    probs = torch.rand(TOKENS, 2, EXPERTS // 2)
    to_rank_0 = (torch.arange(EXPERTS) < TOPK).expand(TOKENS, -1).view_as(probs)

    def batch(factor: float | None) -> tuple[int, int]:
        """The rows that this rank is given, and those of them that are an expert's."""
        manager.moe_expert_rank_capacity_factor = factor
        manager.setup_metadata(to_rank_0, probs)
        rows = manager.dispatch(torch.ones(TOKENS, HIDDEN))
        assert manager.dispatched_probs is not None and len(manager.dispatched_probs) == len(rows)
        found = len(rows), int(manager.get_number_of_tokens_per_expert().sum())
        total = manager.combine(rows)[:, 0].sum()
        dist.all_reduce(total)
        counted = torch.tensor(found[1])
        dist.all_reduce(counted)
        assert total == counted
        return found

    with process_group():
        first = me.rank == 0
        options = STATIC | {"moe_expert_rank_capacity_factor": 1.0}
        manager = dispatcher._comm_manager = manager_of(me, **options)
        # As Megatron runs a step again, which is not for this backend.
        assert dispatcher.check_over_budget() is None
        with pytest.raises(CapacityOverflow):
            batch(None)
        # Megatron wants TransformerEngine beside it.
        manager.config.moe_flex_dispatcher_backend = "hybridep"
        manager.config.moe_ncclep_static_shape = False
        assert batch(2.0) == (all_rows, all_rows * first)
        assert not dispatcher.check_over_budget()
        assert batch(1.0) == (balanced, balanced * first)
        assert bool(dispatcher.check_over_budget()) == first
        assert batch(2.0) == (all_rows, all_rows * first)
        assert bool(dispatcher.check_over_budget()) == first  # until it is reset
        dispatcher.reset_over_budget()
        assert not dispatcher.check_over_budget()
        # As Megatron runs a step again.
        assert batch(None) == (all_rows * first,) * 2
        assert not dispatcher.check_over_budget()
    megatron.uninstall()


@pytest.mark.parametrize("release", [NEWEST])
@on_ranks(2, run=on_release)
def test_what_a_dispatcher_would_lose_is_refused_on_all_ranks(me: Rank, release: str) -> None:
    use(release)
    from crossdock.compat import megatron

    megatron.install(max_tokens_per_rank=TOKENS)
    probs = torch.rand(TOKENS, 2, EXPERTS // 2)
    routing = torch.arange(EXPERTS).roll(me.rank).expand(TOKENS, -1) < TOPK

    def dispatch(manager: Any, x: torch.Tensor, chosen: torch.Tensor = routing) -> torch.Tensor:
        manager.setup_metadata(chosen.view_as(probs), probs)
        return manager.dispatch(x)

    x = torch.arange(TOKENS * HIDDEN).reshape(TOKENS, HIDDEN).float()
    with process_group():
        # Two micro batches in one layer: on rank 1 alone, as rank 0's second one has its own.
        one, other = manager_of(me), manager_of(me)
        dispatch(one, x)
        again, kind, says = other, Mismatch, "rank 1: its call failed"
        if me.rank == 1:
            again, kind, says = one, ValueError, "expected a combine of the earlier dispatch first"
        with pytest.raises(kind, match=says):
            dispatch(again, x)
        # In a layer for each they are right.
        one, other = manager_of(me), manager_of(me)
        rows, others = dispatch(one, x), dispatch(other, -x)
        assert torch.equal(one.combine(rows), TOPK * x)
        assert torch.equal(other.combine(others), -TOPK * x)
        # A token of rank 0 has an expert more than the router chooses.
        more = routing.clone()
        more[3, EXPERTS - 1] |= me.rank == 0
        kind, says = InvalidArgument, "2 expert ids .*the lowest rank with some is 0"
        if me.rank == 0:
            kind, says = ValueError, "routing_map: .* router_topk = 2 .* more for 1 of 10 tokens"
        with pytest.raises(kind, match=says):
            dispatch(one, x, more)
        assert torch.equal(one.combine(dispatch(one, x)), TOPK * x)
    megatron.uninstall()


@pytest.mark.parametrize("release", [NEWEST])
@on_ranks(2, run=on_release)
def test_an_error_that_no_host_waited_for_comes_with_a_later_dispatch(
    me: Rank, release: str
) -> None:
    """It is a real one where `gpu` runs this; on CPUs operations raise their own."""
    use(release)
    from crossdock.compat import megatron

    megatron.install(max_tokens_per_rank=TOKENS)
    probs = torch.rand(TOKENS, me.num_ranks, EXPERTS // me.num_ranks)
    tokens, experts = torch.arange(TOKENS)[:, None], torch.arange(EXPERTS)
    too_many = (experts < TOPK).expand(TOKENS, -1).view_as(probs)  # for rank 0
    spread = ((experts // TOPK == tokens) & (tokens < EXPERTS // TOPK)).view_as(probs)
    x = torch.arange(TOKENS * HIDDEN).reshape(TOKENS, HIDDEN).float()

    def step(routing: torch.Tensor) -> None:
        manager.setup_metadata(routing, probs)
        out = manager.combine(manager.dispatch(x))
        if routing is spread:
            assert torch.equal(out, torch.where(tokens < EXPERTS // TOPK, TOPK * x, 0))

    with process_group():
        manager = manager_of(me, **STATIC | {"moe_expert_rank_capacity_factor": 0.75})
        step(spread)
        with contextlib.ExitStack() as stack:
            if x.is_cuda:
                step(too_many)
                torch.cuda.synchronize()
            else:
                error = CapacityOverflow("rank 0 would receive more")
                check = mock.patch.object(manager._group(x), "check", side_effect=error)
                stack.enter_context(check)
            with pytest.raises(CapacityOverflow, match="rank 0 would receive"):
                step(spread)
        step(spread)
    megatron.uninstall()


@pytest.mark.parametrize("release", [NEWEST])
@on_ranks(2, run=on_release)
def test_a_layer_lives_as_long_as_the_installation_that_built_it(me: Rank, release: str) -> None:
    use(release)
    from crossdock.compat import megatron

    probs = torch.ones(TOKENS, 2, EXPERTS // 2)
    routing = (torch.arange(EXPERTS) < TOPK).expand(TOKENS, -1).view_as(probs)
    x = torch.arange(TOKENS * HIDDEN).reshape(TOKENS, HIDDEN).float()

    def dispatch(manager: Any) -> torch.Tensor:
        manager.setup_metadata(routing, probs)
        return manager.dispatch(x)

    with process_group():
        with pytest.raises(RuntimeError, match="expected a call of .*install first"):
            manager_of(me)
        megatron.install(max_tokens_per_rank=TOKENS)
        manager = manager_of(me, **STATIC, moe_ncclep_zero_copy=True)
        megatron.install(max_tokens_per_rank=1)  # for layers that are built later
        # A rank without memory for the buffers of experts tells its peers.
        group = manager._group(x)
        assert group.max_tokens_per_rank == TOKENS
        error, make = torch.OutOfMemoryError if me.rank else None, group.comm.empty_symmetric
        with mock.patch.object(group.comm, "empty_symmetric", wraps=make, side_effect=error):
            with pytest.raises(error or Mismatch, match="buffers of experts|rank 1: its call fail"):
                dispatch(manager)
        rows = dispatch(manager)
        counts = manager.get_number_of_tokens_per_expert()
        assert counts.tolist() == [2 * TOKENS * (me.rank == 0)] * TOPK + [0] * (4 - TOPK)
        assert manager.get_number_of_tokens_per_expert() is counts
        assert torch.equal(manager.combine(rows), TOPK * x)
        megatron.uninstall()
        megatron.install(max_tokens_per_rank=TOKENS)
        with pytest.raises(RuntimeError, match="groups: .* have been closed: build the model anew"):
            dispatch(manager)
    megatron.uninstall()


@pytest.mark.parametrize("release", [NEWEST])
@on_ranks(2, run=on_release)
def test_options_that_cannot_be_honoured_are_refused(me: Rank, release: str) -> None:
    use(release)
    from megatron.core.models.common.utils import should_free_input

    from crossdock.compat import megatron

    overlap = {"overlap_moe_expert_parallel_comm": True}
    offloaded = {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["moe_act", "expert_fc1"],
    }
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"moe_pad_expert_input_to_capacity": True},
            "moe_pad_expert_input_to_capacity: expected F",
        ),
        ({"moe_flex_dispatcher_num_sms": 0}, "moe_flex_dispatcher_num_sms: expected .* got 0"),
        ({"moe_expert_rank_capacity_factor": -1.0}, "rank_capacity_factor: expected .* got -1.0"),
        ({"moe_ncclep_zero_copy": True}, "zero_copy: expected moe_ncclep_static_shape beside it"),
        (overlap, "moe_flex_dispatcher_backend: expected hybridep or ncclep .* got deepep"),
        (overlap | STATIC | {"moe_ncclep_zero_copy": True}, "zero_copy: expected False beside"),
        (overlap | STATIC | {"fp8": "e4m3"}, "fp8: expected None beside .* got e4m3"),
        (overlap | STATIC | {"fp4": "e2m1"}, "fp4: expected None beside .* got e2m1"),
        (STATIC | {"moe_flex_dispatcher_backend": "hybridep"}, "expected ncclep .* got hybridep"),
        (STATIC | {"moe_grouped_gemm": False}, "moe_grouped_gemm: expected True beside"),
        (STATIC | {"use_transformer_engine_op_fuser": False}, "op_fuser: expected True beside"),
        (offloaded, "offload_modules: expected none .* got expert_fc1$"),
        (offloaded | {"offload_modules": ["fused_group_mlp"]}, "got fused_group_mlp$"),
    ]
    config = config_of(me.num_ranks, "flex")
    for options, problem in refused:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in options.items():
                patch.setattr(config, name, value)
            if "fp8" in options or "fp4" in options:
                assert should_free_input("mlp", True, config, EXPERTS // 2)
            with pytest.raises(ValueError, match=problem):
                megatron.CrossdockManager(None, EXPERTS // 2, TOPK, EXPERTS, config)
    megatron.install(max_tokens_per_rank=TOKENS)
    with process_group():
        manager = manager_of(me, moe_flex_dispatcher_num_sms=4097)
        probs = torch.ones(TOKENS, 2, EXPERTS // 2)
        manager.setup_metadata(probs.cumsum(-1) + 4 * torch.arange(2)[:, None] <= TOPK, probs)
        with pytest.raises(InvalidArgument, match="num_sms = 4097, expected 0 to 4096"):
            manager.dispatch(torch.ones(TOKENS, HIDDEN))
    megatron.uninstall()


@pytest.mark.parametrize("release", [NEWEST])
@on_ranks(1, run=on_release)
def test_a_release_without_a_name_is_refused(me: Rank, release: str) -> None:
    use(release)
    from megatron.core.transformer.moe import token_dispatcher

    from crossdock.compat import megatron

    known = rf"\(megatron-core: found {release}, tested with 0.16.1 and 0.19.2\)"
    layer, manager = token_dispatcher.MoEFlexTokenDispatcher, token_dispatcher._DispatchManager
    for owner, name, value, problem in (
        (token_dispatcher, "_DispatchManager", None, "cannot import name '_DispatchManager' .*"),
        (manager, "combine", None, "_DispatchManager has no combine "),
        (
            layer,
            "token_combine",
            lambda self, hidden_states, stream: None,
            "parameters of MoEFlexTokenDispatcher.token_combine: expected .hidden_states, "
            "async_finish, allocate_on_comm_stream., got .hidden_states, stream. ",
        ),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if value is None:
                patch.delattr(owner, name)
            else:
                patch.setattr(owner, name, value)
            with pytest.raises(ImportError, match=f"crossdock.compat.megatron: {problem}{known}"):
                importlib.reload(megatron)
