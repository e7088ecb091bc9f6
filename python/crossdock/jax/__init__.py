"""Expert parallelism for JAX: XLA custom calls with derivatives, inside ``jit`` and ``shard_map``.

    ep = crossdock.jax.init(mesh, "expert")          # joins the mesh's ranks
    config = EpConfig(num_experts=64, hidden=1024, max_topk=4,
                      max_tokens_per_rank=2048)

    plan = ep_prepare(config, topk_idx)              # exchanges counts
    tokens, weights, _, plan = ep_dispatch(plan, x, topk_weights)
    y, plan = ep_combine(plan, experts(tokens, plan), weights)

Needs jaxlib at build time (its headers) and jax at run time.
"""

try:
    import jax as _jax_package  # noqa: F401
except ImportError as error:
    raise ImportError(
        "crossdock.jax needs JAX 0.10 or newer: pip install jax, on GPUs 'jax[cuda13]'"
    ) from error

try:
    from crossdock import _jax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "crossdock.jax needs the extension crossdock._jax, which is built where jaxlib is "
        "installed: pip install jax nanobind scikit-build-core, then, in Crossdock's source "
        "folder, pip install --no-build-isolation ."
    ) from error

from crossdock._overlap import Overlap
from crossdock._router import RouterOptions, capacity_rows

from ._config import EpConfig, LowLatencyConfig
from ._experts import ep_moe
from ._low_latency import (
    SentCombine,
    SentDispatch,
    SlotPlan,
    Slots,
    ll_combine,
    ll_combine_receive,
    ll_combine_send,
    ll_dispatch,
    ll_dispatch_receive,
    ll_dispatch_send,
)
from ._mesh import EpMesh, init
from ._moves import move_experts
from ._ops import ep_combine, ep_dispatch, ep_prepare
from ._plan import Dispatched, EpPlan
from ._quantised import QuantisedRows
from .moe import MoEOutput, MoEParams, moe_layer
from .moe_router import Routing, drop_over_capacity, route, update_router_bias, z_loss

__all__ = [
    "Dispatched",
    "EpConfig",
    "LowLatencyConfig",
    "EpMesh",
    "EpPlan",
    "MoEOutput",
    "MoEParams",
    "Overlap",
    "QuantisedRows",
    "RouterOptions",
    "Routing",
    "SentCombine",
    "SentDispatch",
    "SlotPlan",
    "Slots",
    "capacity_rows",
    "drop_over_capacity",
    "ep_combine",
    "ep_dispatch",
    "ep_moe",
    "ep_prepare",
    "init",
    "ll_combine",
    "ll_combine_receive",
    "ll_combine_send",
    "ll_dispatch",
    "ll_dispatch_receive",
    "ll_dispatch_send",
    "move_experts",
    "moe_layer",
    "route",
    "update_router_bias",
    "z_loss",
]
