"""A token dispatcher for Megatron-LM's mixture-of-experts layers.

One line, before the model is built:

    from crossdock.compat import megatron

    megatron.install(max_tokens_per_rank=4096)  # sequence * micro batch / (TP * CP)

Layers whose ``moe_token_dispatcher_type`` is "flex" then send their tokens through Crossdock,
whatever ``moe_flex_dispatcher_backend`` says. Written against megatron-core 0.16.1, which it needs.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.moe.token_dispatcher import (
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
    _DispatchManager,
)

import crossdock.torch as xd
from crossdock._core import constants
from crossdock.errors import InvalidArgument

__all__ = ["CrossdockManager", "CrossdockTokenDispatcher", "install", "uninstall"]

_max_tokens_per_rank: int | None = None
# Groups of all layers alike, which run one after the other: one for each kind of traffic.
_groups: dict[tuple[Any, ...], xd.EpGroup] = {}
_comms: dict[Any, xd.Comm] = {}


def install(max_tokens_per_rank: int) -> None:
    """Lets flex token dispatchers that are built from now on be Crossdock's.

    Args:
        max_tokens_per_rank: the most tokens of any rank in one layer and micro batch; equal on all.

    Raises:
        ValueError: no positive number.
    """
    global _max_tokens_per_rank
    if max_tokens_per_rank < 1:
        raise ValueError(f"max_tokens_per_rank: expected at least 1, got {max_tokens_per_rank}")
    _max_tokens_per_rank = max_tokens_per_rank
    moe_layer.MoEFlexTokenDispatcher = CrossdockTokenDispatcher


def uninstall() -> None:
    """Ends what `install` began, and closes groups and communicators: their layers end with it."""
    moe_layer.MoEFlexTokenDispatcher = MoEFlexTokenDispatcher
    while _groups:
        _groups.popitem()[1].close()
    while _comms:
        _comms.popitem()[1].close()


class CrossdockManager(_DispatchManager):
    """Dispatches along a routing map, and combines: what Megatron's flex dispatcher calls.

    Rows arrive grouped by expert, so that nothing is left to permute. E experts of the group's R
    ranks, L of them here, T tokens of this rank.

    Args:
        group: of tensor and expert parallelism.
        num_local_experts: L.
        router_topk: most experts of a token, those of all tensor-parallel ranks counted.
        num_experts: E, likewise.
        config: the ``TransformerConfig``.
    """

    def __init__(
        self,
        group: Any,
        num_local_experts: int,
        router_topk: int,
        num_experts: int,
        config: Any,
    ) -> None:
        self.group, self.config = group, config
        self.num_local_experts, self.num_experts = num_local_experts, num_experts
        self.router_topk = router_topk
        self.alignment = 1
        if config.moe_router_padding_for_quantization:
            self.alignment = get_align_size_for_quantization(config)
        self.token_probs: torch.Tensor | None = None
        self.token_indices: torch.Tensor | None = None
        self.dispatched_probs: torch.Tensor | None = None
        self._plan: xd.Plan | None = None

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
        """``[T, H]`` to ``[rows, H]``, grouped by local expert. Waits for the number of rows.

        Raises:
            ValueError: the earlier dispatch has not been combined, and is forgotten now; or the
                routing map has more than ``router_topk`` experts of a token.
        """
        assert self.token_indices is not None and self.token_probs is not None
        group = self._group(hidden_states)
        if self._plan is not None:
            self._plan = None
            problem = (
                "expected a combine of the earlier dispatch first, got another dispatch: a "
                "dispatcher has one micro batch at a time, so those that overlap need layers of "
                "their own"
            )
            group.refuse(constants.PREPARE, ValueError, problem)
        try:
            plan = group.prepare(self.token_indices)
            received = xd.dispatch(
                plan, hidden_states.contiguous(), self.token_probs.float(), exact=True
            )
        except InvalidArgument as error:
            self._explain(error)
            raise
        self._plan, self.dispatched_probs = plan, received.weights
        return received.tokens

    def combine(
        self,
        hidden_states: torch.Tensor,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> torch.Tensor:
        """``[rows, H]`` to ``[T, H]``: the weighted rows of each token, summed."""
        assert self._plan is not None
        plan, self._plan = self._plan, None
        return xd.combine(plan, hidden_states.contiguous())

    def get_permuted_hidden_states_by_experts(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows as they arrived, and the weight of each."""
        assert self.dispatched_probs is not None
        probs = self.dispatched_probs
        return hidden_states, probs.double() if self.config.moe_router_dtype == "fp64" else probs

    def get_restored_hidden_states_by_experts(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows as they are."""
        return hidden_states

    def get_number_of_tokens_per_expert(self) -> torch.Tensor:
        """``[L]`` int64 on the host: rows of each expert, those of padding counted."""
        assert self._plan is not None
        return self._plan.offsets.diff().to("cpu", torch.int64)

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
        assert _max_tokens_per_rank is not None
        sizes: dict[str, Any] = {
            "num_experts": self.num_experts,
            "max_topk": self.router_topk,
            "hidden": hidden_states.shape[-1],
            "dtype": hidden_states.dtype,
            "alignment": self.alignment,
            "max_tokens_per_rank": _max_tokens_per_rank,
        }
        key = (self.group, *sizes.values())
        if key not in _groups:
            if self.group not in _comms:
                _comms[self.group] = xd.init(self.group, hidden_states.device)
            _groups[key] = xd.EpGroup(comm=_comms[self.group], **sizes)
        return _groups[key]


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
