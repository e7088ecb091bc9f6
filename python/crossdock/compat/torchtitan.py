"""A token dispatcher for torchtitan's mixture-of-experts layers.

One line on the command line (or in ``OverrideConfig(imports=[...])``):

    --override.imports 'crossdock.compat.torchtitan.use_crossdock={"max_tokens_per_rank": 4096}'

All layers' tokens then travel through Crossdock, whatever ``moe_comm_backend`` says. Written
against torchtitan 0.3.0, which it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torchtitan.config import override
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher

import crossdock.torch as xd

__all__ = ["CrossdockTokenDispatcher", "use_crossdock"]

# Groups of all layers alike, which run one after the other: one for each kind of traffic.
_groups: dict[tuple[Any, ...], xd.EpGroup] = {}
_comms: dict[Any, xd.Comm] = {}


class DispatchMetadata(NamedTuple):
    """The facts about a dispatch that its combine needs."""

    plan: xd.Plan
    weights: torch.Tensor  # [R] float32, by received row


class CrossdockTokenDispatcher(BaseEPTokenDispatcher):
    """Dispatch and combine over the ranks of the EP mesh; without one, torchtitan's local ones.

    T tokens of this rank, D columns, K choices of E experts, e of them on each rank, R received
    rows: those of an expert follow one another, by source rank, then token.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """num_experts E, top_k K, and the largest T of any rank, equal on all."""

        max_tokens_per_rank: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.max_tokens_per_rank < 1:
            raise ValueError(
                f"max_tokens_per_rank: expected at least 1, got {config.max_tokens_per_rank}"
            )
        self.max_tokens_per_rank = config.max_tokens_per_rank

    def dispatch(
        self,
        x_TD: torch.Tensor,  # noqa: N803
        topk_scores_TK: torch.Tensor,  # noqa: N803
        topk_expert_ids_TK: torch.Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: torch.Tensor,  # noqa: N803
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """``[T, D]`` to ``[R, D]``, the ``[e]`` rows of each expert here, and what combine needs.

        Waits for the number of rows, but not under ``torch.compile``: there R is the most that can
        arrive, and rows behind the last expert's are zero.
        """
        if self.ep_mesh is None:
            return super(BaseEPTokenDispatcher, self).dispatch(
                x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        plan = self._group(x_TD).prepare(topk_expert_ids_TK.contiguous())
        received = xd.dispatch(
            plan,
            x_TD.contiguous(),
            topk_scores_TK.float().contiguous(),
            exact=not torch.compiler.is_compiling(),
        )
        assert received.weights is not None
        return received.tokens, plan.counts, DispatchMetadata(plan, received.weights)

    def combine(
        self,
        routed_output_RD: torch.Tensor,  # noqa: N803
        metadata: Any,
        x_TD: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """``[R, D]`` to ``[T, D]``: the sum of each token's rows, weighted by their scores."""
        if not isinstance(metadata, DispatchMetadata):
            return super(BaseEPTokenDispatcher, self).combine(routed_output_RD, metadata, x_TD)
        return xd.combine(metadata.plan, routed_output_RD.contiguous(), metadata.weights)

    def _group(self, tokens: torch.Tensor) -> xd.EpGroup:
        """The group for such tokens. Collective the first time."""
        mesh: Any = self.ep_mesh
        sizes: dict[str, Any] = {
            "num_experts": self.num_experts,
            "max_topk": self.top_k,
            "hidden": tokens.shape[-1],
            "dtype": tokens.dtype,
            "max_tokens_per_rank": self.max_tokens_per_rank,
        }
        key = (mesh.get_group(), *sizes.values())
        if key not in _groups:
            if key[0] not in _comms:
                _comms[key[0]] = xd.init(mesh, tokens.device)
            _groups[key] = xd.EpGroup(comm=_comms[key[0]], **sizes)
        return _groups[key]


@override(
    target=LocalTokenDispatcher.Config,
    description="Tokens travel to experts through Crossdock.",
)
def use_crossdock(
    cfg: LocalTokenDispatcher.Config, *, max_tokens_per_rank: int
) -> CrossdockTokenDispatcher.Config:
    """Makes a layer's dispatcher Crossdock's.

    Args:
        cfg: the configuration that the model has.
        max_tokens_per_rank: the most tokens of any rank in one layer; equal on all.
    """
    return CrossdockTokenDispatcher.Config(
        num_experts=cfg.num_experts, top_k=cfg.top_k, max_tokens_per_rank=max_tokens_per_rank
    )
