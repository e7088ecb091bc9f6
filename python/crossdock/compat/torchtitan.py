"""A token dispatcher for torchtitan's mixture-of-experts layers.

One line on the command line (or in ``OverrideConfig(imports=[...])``):

    --override.imports crossdock.compat.torchtitan.use_crossdock

All layers' tokens then travel through Crossdock, whatever ``moe_comm_backend`` says. It needs
torchtitan, tested with 0.3.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import crossdock.torch as xd

from ._groups import Groups
from ._package import Package

with Package("crossdock.compat.torchtitan", "torchtitan", "0.3.0") as _package:
    from torchtitan.config import override
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.models.common import token_dispatcher as _dispatchers
    from torchtitan.models.common.token_dispatcher import (
        BaseEPTokenDispatcher,
        LocalTokenDispatcher,
    )

__all__ = ["CrossdockTokenDispatcher", "use_crossdock"]

_SIZES = ("hidden_dim", "num_max_tokens_per_rank")
_package.require(LocalTokenDispatcher, "Config", __init__="config")
_package.require(
    BaseEPTokenDispatcher,
    "Config",
    init_buffer="",
    wire_meshes="ep_mesh",
    dispatch="x_TD topk_scores_TK topk_expert_ids_TK num_local_tokens_per_expert_E",
    combine="routed_output_RD metadata x_TD",
)
_package.require(activation_checkpoint.SelectiveAC, get_save_ops="")
for _name, _more in (  # names that `use_crossdock` looks for in their configurations
    ("DeepEPTokenDispatcher", ("cudagraphable", *_SIZES)),
    ("HybridEPTokenDispatcher", ("non_blocking_capacity_factor", "pad_multiple", *_SIZES)),
    ("MinimalAsyncEPTokenDispatcher", ("dtype", *_SIZES)),
    ("TorchAOTokenDispatcher", ("pad_multiple",)),
):
    _package.require(_dispatchers, _name)
    _package.require(getattr(_dispatchers, _name).Config, *_more)

_groups = Groups()


def _with_ours(get_save_ops: Callable[[Any], set[Any]]) -> Callable[[Any], set[Any]]:
    """Torchtitan's list of operators that no backward pass repeats, and those that need peers."""
    if get_save_ops.__module__ == __name__:  # as when this module is loaded again
        return get_save_ops

    def get_more(self: Any) -> set[Any]:
        ours = torch.ops.crossdock
        return get_save_ops(self) | {
            one.default for one in (ours.prepare, ours.dispatch, ours.combine)
        }

    return get_more


activation_checkpoint.SelectiveAC.get_save_ops = _with_ours(
    activation_checkpoint.SelectiveAC.get_save_ops
)


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
        """num_experts E, top_k K, and what follows, equal on all ranks.

        Attributes:
            max_tokens_per_rank: the largest T of any rank.
            hidden_dim: D, for which the group is made with the model's meshes; None = that of the
                first batch, which makes it.
            dtype: of the rows, likewise.
            cudagraphable: without gradients R is the most that can arrive, and no host waits.
            pad_multiple: of each expert's rows, a power of two.
        """

        max_tokens_per_rank: int
        hidden_dim: int | None = None
        dtype: torch.dtype = torch.bfloat16
        cudagraphable: bool = False
        pad_multiple: int = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.max_tokens_per_rank < 1:
            raise ValueError(
                f"max_tokens_per_rank: expected at least 1, got {config.max_tokens_per_rank}"
            )
        self.max_tokens_per_rank = config.max_tokens_per_rank
        self.hidden_dim, self.dtype = config.hidden_dim, config.dtype
        self.cudagraphable, self.pad_multiple = config.cudagraphable, config.pad_multiple

    def init_buffer(self) -> None:
        """Makes the group, if D is known. Collective over the EP mesh, and called with it."""
        if self.ep_mesh is not None and self.hidden_dim is not None:
            device = torch.device(self.ep_mesh.device_type)
            if device.type == "cuda":
                device = torch.device("cuda", torch.cuda.current_device())
            self._group(device, self.hidden_dim, self.dtype)

    def dispatch(
        self,
        x_TD: torch.Tensor,  # noqa: N803
        topk_scores_TK: torch.Tensor,  # noqa: N803
        topk_expert_ids_TK: torch.Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: torch.Tensor,  # noqa: N803
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """``[T, D]`` to ``[R, D]``, the ``[e]`` rows of each expert here, and what combine needs.

        Rows of padding, which are zero, count as the expert's. Waits for the number of rows, but
        not under ``torch.compile``, nor without gradients if it is `cudagraphable`: there R is the
        most that can arrive, and rows behind the last expert's are zero.
        """
        if self.ep_mesh is None:
            if self.pad_multiple != 1:
                raise ValueError(
                    "expert_parallel_degree: expected 2 or more, as rows are not padded "
                    f"to pad_multiple = {self.pad_multiple} otherwise; got 1"
                )
            return super(BaseEPTokenDispatcher, self).dispatch(
                x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        group = self._group(x_TD.device, x_TD.shape[-1], x_TD.dtype)
        plan = group.prepare(topk_expert_ids_TK.contiguous())
        static = self.cudagraphable and not torch.is_grad_enabled()
        received = xd.dispatch(
            plan,
            x_TD.contiguous(),
            topk_scores_TK.float().contiguous(),
            exact=not (static or torch.compiler.is_compiling()),
        )
        assert received.weights is not None
        return received.tokens, plan.padded_counts, DispatchMetadata(plan, received.weights)

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

    def _group(self, device: torch.device, hidden: int, dtype: torch.dtype) -> xd.EpGroup:
        """The group for such tokens. Collective the first time."""
        mesh: Any = self.ep_mesh
        return _groups.of(
            mesh.get_group(),
            device,
            mesh,
            num_experts=self.num_experts,
            max_topk=self.top_k,
            hidden=hidden,
            dtype=dtype,
            max_tokens_per_rank=self.max_tokens_per_rank,
            alignment=self.pad_multiple,
        )


@override(
    target=LocalTokenDispatcher.Config,
    description="Tokens travel to experts through Crossdock.",
)
def use_crossdock(
    cfg: LocalTokenDispatcher.Config,
    *,
    max_tokens_per_rank: int | None = None,
    dtype: str | None = None,
    cudagraphable: bool | None = None,
) -> CrossdockTokenDispatcher.Config:
    """Makes a layer's dispatcher Crossdock's.

    Args:
        cfg: the configuration that the model has.
        max_tokens_per_rank: the most tokens of any rank in one layer; equal on all. None = what
            torchtitan has found, as it does for any ``moe_comm_backend`` but "standard".
        dtype: of the rows, such as "float32"; None = what `cfg` says, or bfloat16. Others travel
            all the same, in a group that the first batch makes.
        cudagraphable: whether shapes are static where there are no gradients, as generators need;
            None = as in `cfg`, or False.

    Raises:
        ValueError: no `max_tokens_per_rank` here and in `cfg`; no dtype of torch; a
            ``non_blocking_capacity_factor`` in `cfg`.
    """
    if (factor := getattr(cfg, "non_blocking_capacity_factor", None)) is not None:
        raise ValueError(
            f"non_blocking_capacity_factor: expected None, got {factor}: with cudagraphable=True "
            "there is room for all rows where there are no gradients"
        )
    if max_tokens_per_rank is None:
        max_tokens_per_rank = getattr(cfg, "num_max_tokens_per_rank", None)
    if max_tokens_per_rank is None:
        raise ValueError(
            "max_tokens_per_rank: expected a number, as this moe_comm_backend has none, got None: "
            'give it, or set moe_comm_backend to "deepep", which needs no DeepEP here'
        )
    rows: Any = getattr(cfg, "dtype", None) or torch.bfloat16
    if dtype is not None:
        rows = getattr(torch, dtype, None)
    if not isinstance(rows, torch.dtype):
        raise ValueError(f"dtype: expected the name of one of torch's, got {dtype!r}")
    if cudagraphable is None:
        cudagraphable = getattr(cfg, "cudagraphable", False)
    return CrossdockTokenDispatcher.Config(
        num_experts=cfg.num_experts,
        top_k=cfg.top_k,
        max_tokens_per_rank=max_tokens_per_rank,
        hidden_dim=getattr(cfg, "hidden_dim", None),
        dtype=rows,
        cudagraphable=cudagraphable,
        pad_multiple=getattr(cfg, "pad_multiple", None) or 1,
    )
