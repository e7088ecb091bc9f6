"""Crossdock for PyTorch: dispatch and combine as differentiable operators.

    import crossdock.torch as xd

    xd.init()                                     # ranks of torch.distributed or of torchrun
    group = xd.EpGroup(num_experts=64, hidden=1024, max_topk=8,
                       max_tokens_per_rank=4096)
    plan = group.prepare(topk_idx)                # [T, K]
    received = xd.dispatch(plan, x, topk_weights) # rows grouped by local expert
    y = experts(received.tokens, plan.offsets)
    out = xd.combine(plan, y, received.weights)   # [T, H]

Operations use the current CUDA stream and, on a GPU, return before they have run. Receive tensors
have a static number of rows; `Plan.counts` and `Plan.offsets` say which are real.
"""

try:
    import torch as _torch_package  # noqa: F401
except ImportError as error:
    raise ImportError(
        "crossdock.torch needs PyTorch 2.6 or newer: pip install torch, or 'crossdock[torch]'"
    ) from error

from crossdock._overlap import Overlap
from crossdock._router import RouterOptions

from ._comm import Comm, default_comm, empty_symmetric, init, join
from ._experts import expert_parameters, mark_experts
from ._group import EpGroup, Plan, RoutingLayout
from ._low_latency import LowLatencyGroup, SlotPlan, Slots
from ._low_latency_ops import (
    SentCombine,
    SentDispatch,
    ll_combine,
    ll_combine_send,
    ll_dispatch,
    ll_dispatch_send,
)
from ._ops import Dispatched, combine, dequantise, dispatch
from ._placement import ExpertMove, move_experts
from ._sharding import local_tensor
from .gated import gated_fp8
from .grad_scaler import GradScaler
from .grouped import grouped_mm
from .grouped_fp8 import grouped_mm_fp8, grouped_mm_scaled
from .layers.balance import update_router_bias
from .layers.experts import GroupedExperts, SharedExperts
from .layers.layer import MoELayer, MoEOutput
from .layers.models import load_pretrained, model_layer
from .layers.overlap import moe
from .layers.rebalance import Rebalance, rebalance
from .layers.router import Router, Routing, balance_loss, drop_over_capacity, route, z_loss
from .training import (
    assert_replicated,
    average_gradients,
    clip_grad_norm_,
    data_parallel,
    parameter_groups,
)

__all__ = [
    "Comm",
    "Dispatched",
    "EpGroup",
    "ExpertMove",
    "GradScaler",
    "GroupedExperts",
    "LowLatencyGroup",
    "MoELayer",
    "MoEOutput",
    "Overlap",
    "Plan",
    "Rebalance",
    "Router",
    "RouterOptions",
    "Routing",
    "RoutingLayout",
    "SentCombine",
    "SentDispatch",
    "SharedExperts",
    "SlotPlan",
    "Slots",
    "assert_replicated",
    "average_gradients",
    "balance_loss",
    "clip_grad_norm_",
    "combine",
    "data_parallel",
    "default_comm",
    "dequantise",
    "dispatch",
    "drop_over_capacity",
    "empty_symmetric",
    "expert_parameters",
    "gated_fp8",
    "grouped_mm",
    "grouped_mm_fp8",
    "grouped_mm_scaled",
    "init",
    "join",
    "ll_combine",
    "ll_combine_send",
    "ll_dispatch",
    "ll_dispatch_send",
    "load_pretrained",
    "local_tensor",
    "mark_experts",
    "model_layer",
    "moe",
    "move_experts",
    "parameter_groups",
    "rebalance",
    "route",
    "update_router_bias",
    "z_loss",
]
