"""The choice of experts, what it may cost an expert, and the losses that keep the choice even."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from crossdock._router import LEAST_SUM, RouterOptions

from .._autocast import autocast_dtype, cast

__all__ = [
    "Router",
    "Routing",
    "balance_loss",
    "count_choices",
    "drop_over_capacity",
    "expert_load",
    "route",
    "z_loss",
]


class Routing(NamedTuple):
    """Where the T tokens of a rank go: what a router returns.

    Attributes:
        topk_idx: ``[T, K]`` int64 or int32: experts; -1 = none. `route` gives the best first.
        topk_weights: ``[T, K]`` float32, differentiable: factors of the experts' results.
        probabilities: ``[T, E]`` float32, differentiable, for `balance_loss`; None = no such loss.
        loss: ``[]`` float32, differentiable: a further loss, which the layer adds to its own.
    """

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    probabilities: torch.Tensor | None = None
    loss: torch.Tensor | None = None


class Router(nn.Module):
    """Linear scores of E experts, and the choice of K by `RouterOptions`.

    Attributes:
        weight: parameter ``[E, H]`` float32.
        bias: buffer ``[E]`` float32, with ``options.bias``, else None: added to scores for the
            choice alone; see `update_router_bias`.
        load: buffer ``[E]`` float32, with a bias: how often this rank's tokens have chosen each
            expert in training since the bias has moved. Not saved.

    Args:
        hidden: H.
        num_experts: E.
        topk: K.
        options: how to choose.
        z_loss_weight: factor of `z_loss`; 0 = no such loss.
        device: of weight and bias.
    """

    bias: torch.Tensor | None
    load: torch.Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        options: RouterOptions | None = None,
        *,
        z_loss_weight: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.options = RouterOptions() if options is None else options
        self.options.check(num_experts, topk)
        self.topk, self.z_loss_weight = topk, z_loss_weight
        floats: Any = {"dtype": torch.float32, "device": device}
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, **floats))
        with_bias = self.options.bias
        self.register_buffer("bias", torch.zeros(num_experts, **floats) if with_bias else None)
        load = torch.zeros(num_experts, **floats) if with_bias else None
        self.register_buffer("load", load, persistent=False)

    def forward(self, tokens: torch.Tensor, *, losses: bool = True) -> Routing:
        """Chooses experts for ``tokens`` ``[T, H]``; computes in float32.

        Args:
            tokens: of any floating-point dtype.
            losses: whether the result has what losses are made of: ``probabilities`` and ``loss``.
        """
        bias = self.bias
        if bias is not None and bias.dtype != torch.float32:
            # It moves by a thousandth at a time, which a number of 16 bits may be too short for.
            raise TypeError(f"bias: expected the router's in torch.float32, got {bias.dtype}")
        logits = _logits(tokens, self.weight)
        if not losses:
            return Routing(*_choose(logits, self.topk, self.options, bias)[:2])
        routing = route(logits, self.topk, self.options, bias)
        if self.z_loss_weight:
            routing = routing._replace(loss=self.z_loss_weight * z_loss(logits))
        return routing

    @torch.no_grad()
    def note_load(self, counts: torch.Tensor) -> None:
        """Adds the ``[E]`` choices of a forward pass of training, for `update_router_bias`."""
        if self.load is None or not self.training:
            return
        if self.load.dtype != torch.float32:  # model.bfloat16(), in which counts get lost
            self.load = self.load.float()
        self.load.add_(counts)

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        experts, hidden = self.weight.shape
        return f"hidden={hidden}, num_experts={experts}, topk={self.topk}, {self.options}"


def checked_router(
    router: RouterOptions | Callable[[torch.Tensor], Routing] | None,
    num_experts: int,
    topk: int,
    z_loss_weight: float,
) -> RouterOptions | Callable[[torch.Tensor], Routing]:
    """The router of a layer, or its options, if they fit the other arguments."""
    router = RouterOptions() if router is None else router
    if isinstance(router, RouterOptions):
        router.check(num_experts, topk)
    elif z_loss_weight:
        problem = "expected 0 beside a router of the caller's, whose losses are its Routing.loss"
        raise ValueError(f"z_loss_weight: {problem}; got {z_loss_weight}")
    return router


def route(
    logits: torch.Tensor,
    topk: int,
    options: RouterOptions | None = None,
    bias: torch.Tensor | None = None,
) -> Routing:
    """Chooses ``topk`` experts of each token.

    Args:
        logits: ``[T, E]`` of any floating-point dtype; the choice is computed in float32.
        topk: experts per token.
        options: how; None = by softmax, with weights that sum to 1.
        bias: ``[E]`` float32, added to scores for the choice; None = none.

    Returns:
        With ``probabilities``: the scores, scaled to sum to 1 for each token.
    """
    options = RouterOptions() if options is None else options
    idx, weights, scores = _choose(logits.float(), topk, options, bias)
    if options.scores == "sigmoid":
        scores = scores / scores.sum(dim=-1, keepdim=True).clamp(min=LEAST_SUM)
    return Routing(idx, weights, scores)


def _logits(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``[T, E]`` in float32, also under autocast."""
    if autocast_dtype(tokens.device) is None:
        return F.linear(cast(tokens, torch.float32), cast(weight, torch.float32))
    with torch.autocast(tokens.device.type, enabled=False):
        return F.linear(tokens.float(), weight.float())


def _choose(
    logits: torch.Tensor, topk: int, options: RouterOptions, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts ``[T, K]``, their weights, and all scores ``[T, E]``."""
    softmax = options.scores == "softmax"
    scores = torch.softmax(logits, dim=-1) if softmax else torch.sigmoid(logits)
    least = LEAST_SUM
    if bias is None and options.num_groups == 1:
        weights, idx = torch.topk(scores, topk, dim=-1)
        if softmax:
            least = 0  # their sum is K / E at least
    else:
        rank_by = scores.detach() if bias is None else scores.detach() + bias
        if options.num_groups > 1:
            rank_by = _in_best_groups(rank_by, options)
        idx = torch.topk(rank_by, topk, dim=-1).indices
        weights = scores.gather(1, idx)
    if options.normalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total.clamp(min=least) if least else total)
    if options.scale != 1:
        weights = weights * options.scale
    return idx, weights, scores


def _in_best_groups(scores: torch.Tensor, options: RouterOptions) -> torch.Tensor:
    """``[T, E]``: the scores of experts of the token's best groups, and -inf for the others."""
    groups = scores.unflatten(1, (options.num_groups, -1))
    best = groups.topk(2 if options.group_score == "top2" else 1, dim=-1).values.sum(dim=-1)
    chosen = best.topk(options.topk_groups, dim=-1).indices
    left_out = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
    return groups.masked_fill(left_out[:, :, None], float("-inf")).flatten(1)


def drop_over_capacity(routing: Routing, num_experts: int, capacity: int) -> Routing:
    """Keeps, for each expert, the ``capacity`` choices of this rank with the largest weights.

    As in Switch Transformers (arXiv:2101.03961, section 2.2), but by weight rather than position;
    of equal weights the earlier token's is kept. A dropped choice becomes -1, with weight 0; the
    weights that are kept stay as they are.
    """
    experts = routing.topk_idx.reshape(-1).long()
    experts = torch.where((experts < 0) | (experts >= num_experts), num_experts, experts)
    heaviest = torch.argsort(
        routing.topk_weights.detach().reshape(-1), stable=True, descending=True
    )
    order = heaviest[torch.argsort(experts[heaviest], stable=True)]  # expert by expert
    counts = experts.new_zeros(num_experts + 1).scatter_add(0, experts, torch.ones_like(experts))
    begins = counts.cumsum(0) - counts
    place = torch.arange(experts.numel(), device=experts.device) - begins[experts[order]]
    kept = torch.zeros_like(experts, dtype=torch.bool).scatter(0, order, place < capacity)
    kept = kept.view(routing.topk_idx.shape)
    return routing._replace(
        topk_idx=routing.topk_idx.masked_fill(~kept, -1),
        topk_weights=routing.topk_weights.masked_fill(~kept, 0),
    )


def count_choices(topk_idx: torch.Tensor, num_experts: int, real: bool = False) -> torch.Tensor:
    """``[E]`` float32: how many choices of this rank's tokens went to each expert.

    Args:
        topk_idx: ``[T, K]``. Ids that are no experts do not count.
        num_experts: E.
        real: whether all ids are known to be experts, which saves looking at them.
    """
    choices = cast(topk_idx.reshape(-1), torch.int64)
    counts = torch.zeros(num_experts, dtype=torch.float32, device=choices.device)
    if real:
        return counts.scatter_(0, choices, 1.0, reduce="add")
    experts = (choices >= 0) & (choices < num_experts)
    return counts.scatter_add_(0, choices.masked_fill(~experts, 0), experts.float())


def expert_load(counts: torch.Tensor, total: int | None = None) -> torch.Tensor:
    """``[E]`` float32: the share of all choices that went to each expert; sums to 1.

    Args:
        counts: from `count_choices`; sums over ranks give the load of these.
        total: of counts, where the host knows it; None = it is computed.
    """
    return counts / (counts.sum().clamp(min=1) if total is None else max(total, 1))


def balance_loss(probabilities: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
    """``E * sum_e load[e] * mean_t probabilities[t, e]``: 1 where all experts are used alike.

    The loss of Switch Transformers (arXiv:2101.03961, section 2.2).
    With the load of this rank's tokens it keeps these even. With that of all ranks it is linear in
    what each rank adds, so the average of the ranks' losses (of equally many tokens) is the loss of
    the whole batch, and the same holds for gradients.

    Args:
        probabilities: ``[T, E]`` float32; T = 0 gives 0.
        load: ``[E]``, from `expert_load`; no gradient.
    """
    tokens = max(probabilities.shape[0], 1)
    return probabilities.shape[1] * torch.dot(load, probabilities.sum(dim=0) / tokens)


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """``mean_t (log sum_e exp logits[t, e])^2``, which keeps logits small; T = 0 gives 0.

    This is the z-loss of ST-MoE (arXiv:2202.08906, section 2.2).
    """
    return torch.logsumexp(logits, dim=-1).square().sum() / max(logits.shape[0], 1)
