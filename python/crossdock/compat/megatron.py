"""A token dispatcher for Megatron-LM's mixture-of-experts layers.

One line, before the model is built:

    from crossdock.compat import megatron

    megatron.install(max_tokens_per_rank=4096)  # sequence * micro batch / (TP * CP)

Layers whose ``moe_token_dispatcher_type`` is "flex" then send their tokens through Crossdock,
whatever ``moe_flex_dispatcher_backend`` says. It needs megatron-core, tested with 0.16.1 and
0.19.2; docs/frameworks.md says which of its options are honoured.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import crossdock.torch as xd
from crossdock._core import constants
from crossdock.errors import InvalidArgument
from crossdock.torch._calls import is_capturing

from ._groups import Groups
from ._package import Package

with Package("crossdock.compat.megatron", "megatron-core", "0.16.1", "0.19.2") as _package:
    from megatron.core.transformer.moe import moe_layer, moe_utils
    from megatron.core.transformer.moe.token_dispatcher import (
        MoEFlexTokenDispatcher,
        MoETokenDispatcher,
        _DispatchManager,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["CrossdockManager", "CrossdockTokenDispatcher", "install", "uninstall"]

_LAYER = "num_local_experts local_expert_indices config pg_collection"
_package.require(moe_layer, MoEFlexTokenDispatcher=_LAYER)
_package.require(moe_utils, get_align_size_for_quantization="config")
_package.require(MoETokenDispatcher, __init__="config pg_collection")
_package.require(
    MoEFlexTokenDispatcher,
    dispatch_preprocess="hidden_states routing_map probs",
    token_dispatch="hidden_states probs async_finish allocate_on_comm_stream",
    token_combine="hidden_states async_finish allocate_on_comm_stream",
)
_package.require(
    _DispatchManager,
    setup_metadata="routing_map probs",
    dispatch="hidden_states",
    combine="hidden_states",
    get_permuted_hidden_states_by_experts="hidden_states",
    get_restored_hidden_states_by_experts="hidden_states",
)
_package.require(
    TransformerConfig,
    "moe_flex_dispatcher_backend",
    "moe_pad_expert_input_to_capacity",
    "moe_router_dtype",
    "moe_router_padding_for_quantization",
    "moe_router_topk",
    "num_moe_experts",
    "overlap_moe_expert_parallel_comm",
)
# Names that came together, between the two releases.
_NEWER_OPTIONS = (
    "moe_expert_rank_capacity_factor",
    "moe_flex_dispatcher_num_sms",
    "moe_ncclep_static_shape",
    "moe_ncclep_zero_copy",
)
if any(hasattr(TransformerConfig, name) for name in _NEWER_OPTIONS):
    _package.require(TransformerConfig, *_NEWER_OPTIONS)
    _package.require(moe_utils, skip_routed_expert_padding="config")
    _package.require(
        MoEFlexTokenDispatcher,
        check_over_budget="",
        get_expert_zero_copy_buffers="",
        reset_over_budget="",
    )


class _Installation(Groups):
    """The groups that layers share which are built between `install` and `uninstall`.

    Attributes:
        max_tokens_per_rank: of layers that are built from now on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.max_tokens_per_rank = 0
        self._buffers: dict[xd.EpGroup, tuple[torch.Tensor, torch.Tensor]] = {}

    def buffers_of(self, group: xd.EpGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """``[R, H]`` in symmetric memory, where peers read what experts write: two for all layers.

        One has experts' results until their combine, which comes before the next layer's experts;
        the other gradients of experts' inputs, likewise.

        Raises:
            RuntimeError, MemoryError: this rank has no memory left; the peers' dispatches fail.
        """
        if group not in self._buffers:
            shape = (group.rows, group.hidden)
            try:
                one, other = (group.comm.empty_symmetric(shape, group.dtype) for _ in range(2))
            except (MemoryError, RuntimeError) as error:
                group.refuse(constants.PREPARE, type(error), f"buffers of experts: {error}")
            self._buffers[group] = one, other
        return self._buffers[group]

    def close(self) -> None:
        """Closes groups and communicators."""
        self._buffers.clear()
        super().close()


_installed: _Installation | None = None


def install(max_tokens_per_rank: int) -> None:
    """Lets flex token dispatchers that are built from now on be Crossdock's.

    Dispatchers that have been built keep their number.

    Args:
        max_tokens_per_rank: the most tokens of any rank in one layer and micro batch; equal on all.

    Raises:
        ValueError: no positive number.
    """
    global _installed
    if max_tokens_per_rank < 1:
        raise ValueError(f"max_tokens_per_rank: expected at least 1, got {max_tokens_per_rank}")
    _installed = _installed or _Installation()
    _installed.max_tokens_per_rank = max_tokens_per_rank
    moe_layer.MoEFlexTokenDispatcher = CrossdockTokenDispatcher


def uninstall() -> None:
    """Ends what `install` began, and closes groups and communicators.

    Layers that have been built end with it: their next dispatch is a RuntimeError.
    """
    global _installed
    moe_layer.MoEFlexTokenDispatcher = MoEFlexTokenDispatcher
    if _installed is not None:
        _installed.close()
        _installed = None


def _option(config: Any, name: str) -> Any:
    """An option of a ``TransformerConfig``; None in releases without it."""
    return getattr(config, name, None)


def _check_options(config: Any) -> None:
    """Refuses, on all ranks alike, what would be wrong or ignored."""
    for problem in (_pad_problem(config), _static_problem(config), _freed_problem(config)):
        if problem is not None:
            raise ValueError(problem)
    for name in ("moe_flex_dispatcher_num_sms", "moe_expert_rank_capacity_factor"):
        value = _option(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name}: expected None or more than 0, got {value}")


def _pad_problem(config: Any) -> str | None:
    if _option(config, "moe_pad_expert_input_to_capacity"):
        return "moe_pad_expert_input_to_capacity: expected False, as no rows are padded; got True"
    return None


def _static_problem(config: Any) -> str | None:
    """Of the options of the backend ncclep, as Megatron checks them."""
    if not _option(config, "moe_ncclep_static_shape"):
        if _option(config, "moe_ncclep_zero_copy"):
            return "moe_ncclep_zero_copy: expected moe_ncclep_static_shape beside it, got False"
        return None
    if (backend := config.moe_flex_dispatcher_backend) != "ncclep":
        return (
            "moe_ncclep_static_shape: expected ncclep as moe_flex_dispatcher_backend beside it, "
            f"got {backend}"
        )
    for name in ("use_transformer_engine_op_fuser", "moe_grouped_gemm"):
        if not _option(config, name):
            return (
                f"{name}: expected True beside moe_ncclep_static_shape, as other experts than "
                "TransformerEngine's fused ones want no rows behind the last expert's; got False"
            )
    return None


def _freed_problem(config: Any) -> str | None:
    """Of options with which Megatron frees rows that others need, or that torch cannot free."""
    modules = set(_option(config, "offload_modules") or ())
    offloaded = sorted({"expert_fc1", "fused_group_mlp"} & modules)
    if offloaded and _option(config, "fine_grained_activation_offloading"):
        return (
            "offload_modules: expected none that frees dispatched rows, which lie in symmetric "
            f"memory; got {' and '.join(offloaded)}"
        )
    if not _option(config, "overlap_moe_expert_parallel_comm"):
        return None
    beside = "beside overlap_moe_expert_parallel_comm, whose schedule frees the rows that"
    backend = _option(config, "moe_flex_dispatcher_backend")
    if backend not in ("hybridep", "ncclep"):
        return (
            f"moe_flex_dispatcher_backend: expected hybridep or ncclep {beside} experts have kept "
            f"otherwise; got {backend}"
        )
    for name in ("fp8", "fp4"):
        if (value := _option(config, name)) is not None:
            return f"{name}: expected None {beside} experts have cast; got {value}"
    if _option(config, "moe_ncclep_zero_copy"):
        return f"moe_ncclep_zero_copy: expected False {beside} combine reads; got True"
    return None


def _alignment(config: Any) -> int:
    """Of each expert's rows: 1 where Megatron's experts pad them themselves, if need be."""
    pads = config.moe_router_padding_for_quantization
    if hasattr(moe_utils, "skip_routed_expert_padding"):
        pads = moe_utils.skip_routed_expert_padding(config)
    return max(1, moe_utils.get_align_size_for_quantization(config)) if pads else 1


class CrossdockManager(_DispatchManager):
    """Dispatches along a routing map, and combines: what Megatron's flex dispatcher calls.

    Rows arrive grouped by expert, so that nothing is left to permute. E experts of the group's R
    ranks, L of them here, T tokens of this rank.

    Attributes:
        moe_expert_rank_capacity_factor: that of `config`; None = no row is dropped. Megatron sets
            it to None, to run a step again in which the backend hybridep has dropped rows; other
            backends keep that of `config`.
        over_budget: ``[1]`` bool on the device: whether rows for this rank have been dropped since
            it was last set to zero. Not there before the first dispatch that may drop some.

    Args:
        group: of tensor and expert parallelism.
        num_local_experts: L.
        router_topk: most experts of a token, those of all tensor-parallel ranks counted.
        num_experts: E, likewise.
        config: the ``TransformerConfig``.

    Raises:
        ValueError: an option of `config` that cannot be honoured.
        RuntimeError: nothing is installed.
    """

    over_budget: torch.Tensor
    # Where experts shall write, under the names that MoEFlexTokenDispatcher looks for.
    _zc_fwd_token_buf: torch.Tensor | None = None
    _zc_bwd_token_buf: torch.Tensor | None = None

    def __init__(
        self,
        group: Any,
        num_local_experts: int,
        router_topk: int,
        num_experts: int,
        config: Any,
    ) -> None:
        _check_options(config)
        if _installed is None:
            raise RuntimeError("expected a call of crossdock.compat.megatron.install first")
        self._installed, self._max_tokens_per_rank = _installed, _installed.max_tokens_per_rank
        self.group, self.config = group, config
        self.num_local_experts, self.num_experts = num_local_experts, num_experts
        self.router_topk = router_topk
        self.moe_expert_rank_capacity_factor: float | None = _option(
            config, "moe_expert_rank_capacity_factor"
        )
        self.alignment = _alignment(config)
        self.token_probs: torch.Tensor | None = None
        self.token_indices: torch.Tensor | None = None
        self.dispatched_probs: torch.Tensor | None = None
        self._plan: xd.Plan | None = None
        self._counts: torch.Tensor | None = None  # [L] rows of each expert, beside the plan
        self._stream: torch.cuda.Stream | None = None  # of the caller of dispatch

    @property
    def _factor(self) -> float | None:
        """The capacity, over the rows of a rank if all get equally many; None = any routing's."""
        if self.config.moe_flex_dispatcher_backend == "hybridep":
            return self.moe_expert_rank_capacity_factor
        return _option(self.config, "moe_expert_rank_capacity_factor")

    @property
    def _drops(self) -> bool:
        """Whether rows over the budget are dropped, as the backend hybridep does it."""
        return self.config.moe_flex_dispatcher_backend == "hybridep" and self._factor is not None

    @property
    def _is_static(self) -> bool:
        """Whether all rows that there is room for go to the experts, without a wait of the host."""
        return self._drops or bool(_option(self.config, "moe_ncclep_static_shape"))

    def setup_metadata(self, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        """Takes where tokens go: both ``[T, R, L]``, bool and floating-point.

        A token has at most ``router_topk`` experts; `dispatch` raises otherwise, on all ranks.
        """
        routing_map = routing_map.reshape(-1, self.num_experts)
        chosen = probs.reshape(-1, self.num_experts).masked_fill(~routing_map, float("-inf"))
        best, indices = torch.topk(chosen, self.router_topk, dim=-1)
        dropped = best == float("-inf")
        self.token_probs = best.masked_fill(dropped, 0)
        indices = indices.masked_fill(dropped, -1)
        # Ids that are no experts let prepare fail on all ranks, and no host waits for them here.
        too_many = routing_map.sum(-1, keepdim=True) > self.router_topk
        self.token_indices = indices.masked_fill(too_many, self.num_experts)

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> torch.Tensor:
        """``[T, H]`` to ``[rows, H]``, grouped by local expert.

        Waits for the number of rows, unless they are static: then it is that of the most rows that
        can arrive, or of the capacity, and those behind the last expert's are zero.

        Args:
            hidden_states: the tokens.
            async_finish: on a GPU: run on a stream of high priority, for which the current one
                waits. Elsewhere, and in CUDA graphs, there is no other stream.
            allocate_on_comm_stream: nothing: rows come from the stream that the operation runs on.

        Raises:
            ValueError: the earlier dispatch has not been combined, and is forgotten now; or the
                routing map has more than ``router_topk`` experts of a token.
            CapacityOverflow: more rows than the budget, where they are not dropped.
            CrossdockError: on a GPU, what an earlier operation has met since the last look.
        """
        assert self.token_indices is not None and self.token_probs is not None
        group = self._group(hidden_states)
        if not is_capturing(group.comm.device):
            group.check()
        if self._plan is not None:
            self._plan = self._counts = None
            problem = (
                "expected a combine of the earlier dispatch first, got another dispatch: a "
                "dispatcher has one micro batch at a time, so those that overlap need layers of "
                "their own"
            )
            group.refuse(constants.PREPARE, ValueError, problem)
        if _option(self.config, "moe_ncclep_zero_copy"):
            buffers = self._installed.buffers_of(group)
            self._zc_fwd_token_buf, self._zc_bwd_token_buf = buffers
        tokens, probs = hidden_states.contiguous(), self.token_probs.float()
        try:
            with _side_stream(group, async_finish) as made:
                plan = group.prepare(self.token_indices)
                received = xd.dispatch(plan, tokens, probs, exact=not self._is_static)
                assert received.weights is not None
                counts = plan.offsets.diff().to(torch.int64)
                made += [received.tokens, received.weights, plan.data, plan.info, plan.offsets]
                made.append(counts)
                self._counts = counts if self._is_static else counts.cpu()
        except InvalidArgument as error:
            self._explain(error)
            raise
        if self._drops:
            self._count_over(plan)
        if _option(self.config, "overlap_moe_expert_parallel_comm"):
            plan = plan.detach()  # dispatch and combine have backward passes of their own there
        self._plan, self.dispatched_probs = plan, received.weights
        if tokens.is_cuda:
            self._stream = torch.cuda.current_stream(tokens.device)
        return received.tokens

    def combine(
        self,
        hidden_states: torch.Tensor,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> torch.Tensor:
        """``[rows, H]`` to ``[T, H]``: the weighted rows of each token, summed; see `dispatch`."""
        assert self._plan is not None
        plan, self._plan, self._counts = self._plan, None, None
        rows = hidden_states.contiguous()
        with _side_stream(plan.group, async_finish) as made:
            made.append(xd.combine(plan, rows))
        return made[0]

    def get_permuted_hidden_states_by_experts(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows as they arrived, and the weight of each."""
        assert self._plan is not None and self._counts is not None
        assert self.dispatched_probs is not None
        probs = self.dispatched_probs
        if self._stream is not None:
            stream = torch.cuda.current_stream(hidden_states.device)
            if stream != self._stream:
                _record(self._plan.group, (hidden_states, probs, self._counts), stream)
        return hidden_states, probs.double() if self.config.moe_router_dtype == "fp64" else probs

    def get_restored_hidden_states_by_experts(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows as they are."""
        return hidden_states

    def get_number_of_tokens_per_expert(self) -> torch.Tensor:
        """``[L]`` int64, until combine: rows of each expert, those of padding counted.

        On the host, unless the number of rows is static.
        """
        assert self._counts is not None
        return self._counts

    def _count_over(self, plan: xd.Plan) -> None:
        """Keeps whether this rank needed more rows than it has."""
        over = plan.total > plan.group.rows
        if not hasattr(self, "over_budget"):
            self.over_budget = torch.zeros_like(over)
        self.over_budget |= over

    def _explain(self, error: InvalidArgument) -> None:
        """Raises what is wrong in the words of `setup_metadata`, if it is this rank's mistake."""
        assert self.token_indices is not None
        tokens = int((self.token_indices == self.num_experts).any(-1).sum())
        if tokens:
            raise ValueError(
                f"routing_map: expected at most router_topk = {self.router_topk} experts of a "
                f"token, got more for {tokens} of {len(self.token_indices)} tokens"
            ) from error

    def _group(self, hidden_states: torch.Tensor) -> xd.EpGroup:
        """The group for such tokens. Collective the first time."""
        capacity = 0
        if self._factor is not None:
            capacity = max(1, int(self._max_tokens_per_rank * self.router_topk * self._factor))
            capacity += -capacity % self.alignment
        zero_copy = bool(_option(self.config, "moe_ncclep_zero_copy"))
        return self._installed.of(
            self.group,
            hidden_states.device,
            num_experts=self.num_experts,
            max_topk=self.router_topk,
            hidden=hidden_states.shape[-1],
            dtype=hidden_states.dtype,
            alignment=self.alignment,
            max_tokens_per_rank=self._max_tokens_per_rank,
            recv_capacity=capacity,
            overflow="drop" if self._drops else "error",
            num_sms=_option(self.config, "moe_flex_dispatcher_num_sms") or 0,
            symmetric_tensors=6 if zero_copy else 4,  # two are those of buffers_of
        )


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@contextlib.contextmanager
def _side_stream(group: xd.EpGroup, wanted: bool) -> Iterator[list[torch.Tensor]]:
    """Runs operations on a stream of high priority, if wanted, and so their backward passes.

    It waits for the current stream, which then waits for it. Yields a list for the tensors that are
    made there, which the current stream is going to use.
    """
    made: list[torch.Tensor] = []
    device = group.comm.device
    if not wanted or device.type != "cuda" or is_capturing(device):
        yield made
        return
    current, beside = torch.cuda.current_stream(device), _stream_beside(device)
    beside.wait_stream(current)
    try:
        with torch.cuda.stream(beside):
            yield made
    finally:
        current.wait_stream(beside)
    _record(group, made, current)


def _record(group: xd.EpGroup, tensors: Iterable[torch.Tensor], stream: torch.cuda.Stream) -> None:
    """Tells whoever frees these tensors that the stream uses them."""
    if not is_capturing(group.comm.device):
        for tensor in filter(operator.attrgetter("is_cuda"), tensors):
            group.comm.record_stream(tensor, stream)


class CrossdockTokenDispatcher(MoEFlexTokenDispatcher):
    """Megatron's flex token dispatcher with `CrossdockManager` in it, for one rank or more."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any = None,
    ) -> None:
        MoETokenDispatcher.__init__(self, config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self._comm_manager = CrossdockManager(
            group=self.tp_ep_group,
            num_local_experts=num_local_experts,
            router_topk=self.tp_size * config.moe_router_topk,
            num_experts=self.tp_size * config.num_moe_experts,
            config=config,
        )
        self.cudagraph_attrs = ["_comm_manager.token_probs", "_comm_manager.token_indices"]
