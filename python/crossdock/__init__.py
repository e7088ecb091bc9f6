"""Crossdock: expert parallelism and products overlapped with transfers, on NumPy arrays.

A communicator joins ranks (threads, or processes of one host), a group moves tokens to the ranks
that hold their experts and brings the results back:

    with crossdock.Comm.from_environment() as comm:
        config = crossdock.EpConfig(num_experts=8, max_topk=2, max_tokens_per_rank=64, hidden=256,
                                    dtype="float32")
        with crossdock.EpGroup(comm, config) as group:
            plan = group.prepare(topk_idx)                        # [T, K] expert ids
            received = group.dispatch(plan, tokens, topk_weights)  # rows per local expert
            expert_out = apply_experts(received.tokens, plan.offsets)
            out = group.combine(plan, expert_out, received.weights)  # [T, H]

`GemmContext` multiplies matrices that are spread over the ranks, as in tensor parallelism.
``crossdock.torch`` is the same for PyTorch, with autograd, on CPUs and GPUs. Every call that can
wait for a peer releases the GIL, is bounded by the communicator's timeout, and raises a class of
``crossdock.errors``.
"""

from __future__ import annotations

try:
    import crossdock._core as _core
except ImportError as error:
    raise ImportError(
        f"crossdock's extension cannot be loaded: {error}. If a library is missing, such as "
        "libsodium or libhwy: the system's packages bring it (Debian: libsodium23, libhwy1), and "
        "wheels of 'make wheel' contain it. If crossdock._core is missing, it was built for "
        "another version of Python, or not at all: pip install ."
    ) from error
from crossdock._comm import Comm, MemoryInfo, RoutingLayout, unique_id
from crossdock._config import EpConfig, GroupMemory, LowLatencyConfig
from crossdock._gemm import GemmArgs, GemmContext, GemmPlan, GemmStatus, gemm_local_size
from crossdock._gemm_config import GemmConfig, GemmMemory
from crossdock._group import Dispatched, EpGroup, ExpertGrads
from crossdock._low_latency import LowLatencyGroup, SentCombine, SentDispatch, Slots
from crossdock._membership import EpStatus, LowLatencyStatus
from crossdock._moves import ExpertMove, move_experts
from crossdock._placement import Move, Placement, placement_moves, plan_placement
from crossdock._plan import Plan, SlotPlan
from crossdock._stats import GroupStats
from crossdock._view import View
from crossdock.errors import (
    Aborted,
    Busy,
    CapacityOverflow,
    CrossdockError,
    Internal,
    InvalidArgument,
    Mismatch,
    OutOfMemory,
    PeerLost,
    SystemFailure,
    Timeout,
    Unsupported,
)

__version__: str = _core.version


def feature_available(name: str) -> bool:
    """Whether a part of the library can be used in this process now.

    Args:
        name: ``"cpu"``, ``"cuda"``, ``"network"``, ``"gemm"``, ``"cublasmp"``, ``"cuda_wire"``,
            ``"cuda_placement"`` or ``"cuda_ll_machines"``; anything else is a ValueError.
    """
    return _core.feature_available(name)


def feature_reason(name: str) -> str:
    """Why a part of the library (see feature_available) cannot be used here, or ``"available"``."""
    return _core.feature_reason(name)


__all__ = [
    "Aborted",
    "Busy",
    "CapacityOverflow",
    "Comm",
    "CrossdockError",
    "Dispatched",
    "EpConfig",
    "EpGroup",
    "EpStatus",
    "ExpertGrads",
    "ExpertMove",
    "GemmArgs",
    "GemmConfig",
    "GemmContext",
    "GemmMemory",
    "GemmPlan",
    "GemmStatus",
    "GroupMemory",
    "GroupStats",
    "Internal",
    "InvalidArgument",
    "LowLatencyConfig",
    "LowLatencyGroup",
    "LowLatencyStatus",
    "MemoryInfo",
    "Mismatch",
    "Move",
    "OutOfMemory",
    "PeerLost",
    "Placement",
    "Plan",
    "RoutingLayout",
    "SentCombine",
    "SentDispatch",
    "SlotPlan",
    "Slots",
    "SystemFailure",
    "Timeout",
    "Unsupported",
    "View",
    "__version__",
    "feature_available",
    "feature_reason",
    "gemm_local_size",
    "move_experts",
    "placement_moves",
    "plan_placement",
    "unique_id",
]
