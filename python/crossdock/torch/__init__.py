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

from ._comm import Comm, default_comm, empty_symmetric, init
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
from ._sharding import local_tensor
from .checkpoint import load_checkpoint, save_checkpoint
from .grouped import grouped_mm
from .moe import MoELayer, MoEOutput, expert_parameters
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
    "LowLatencyGroup",
    "MoELayer",
    "MoEOutput",
    "Plan",
    "RoutingLayout",
    "SentCombine",
    "SentDispatch",
    "SlotPlan",
    "Slots",
    "assert_replicated",
    "average_gradients",
    "clip_grad_norm_",
    "combine",
    "data_parallel",
    "default_comm",
    "dequantise",
    "dispatch",
    "empty_symmetric",
    "expert_parameters",
    "grouped_mm",
    "init",
    "ll_combine",
    "ll_combine_send",
    "ll_dispatch",
    "ll_dispatch_send",
    "load_checkpoint",
    "local_tensor",
    "parameter_groups",
    "save_checkpoint",
]
