"""Every field of a struct in the C API's headers is an argument, without another list of them."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable

import pytest

import crossdock
from crossdock import _core

ROOT = pathlib.Path(__file__).resolve().parents[3]
NO_ARGUMENTS = ("struct_size", "reserved")
FROZEN = re.compile(r"^FROZEN_FIELD\((\w+), (\w+), \d+\);", re.MULTILINE)


def fields_of(struct: str) -> list[str]:
    """The names that the test of the binary interface has of a struct."""
    texts = [(ROOT / "tests/abi" / name).read_text() for name in ("frozen.h", "frozen_moe.h")]
    found = [one for text in texts for one in FROZEN.findall(text)]
    return [field for of, field in found if of == struct and field not in NO_ARGUMENTS]


def operations(comm: _core.Comm) -> dict[str, Callable[[dict[str, object]], None]]:
    """The function that takes each struct."""
    sizes = {"num_experts": 2, "max_topk": 1, "max_tokens_per_rank": 1, "hidden": 8}
    bulk, slots = _core.Group(comm, **sizes), _core.LowLatencyGroup(comm, **sizes)
    context = _core.GemmContext(comm, max_tokens=8, max_k=8, max_n=8)
    config = lambda function: lambda fields: function(**fields)  # noqa: E731
    return {
        "xd_ep_config": config(_core.plan_size),
        "xd_ep_prepare_args": bulk.prepare,
        "xd_ep_dispatch_args": bulk.dispatch,
        "xd_ep_combine_args": bulk.combine,
        "xd_ep_dispatch_bwd_args": bulk.dispatch_bwd,
        "xd_ep_combine_bwd_args": bulk.combine_bwd,
        "xd_ep_plan_row_experts_args": bulk.row_experts,
        "xd_moe_forward_args": bulk.moe_forward,
        "xd_moe_backward_args": bulk.moe_backward,
        "xd_ep_routing_layout_args": comm.routing_layout,
        "xd_gated_args": comm.gated,
        "xd_gated_bwd_args": comm.gated_bwd,
        "xd_grouped_product_args": comm.grouped_product,
        "xd_grouped_outer_args": comm.grouped_outer,
        "xd_ll_config": config(_core.ll_plan_size),
        "xd_ll_dispatch_args": slots.dispatch,
        "xd_ll_combine_args": slots.combine,
        "xd_gemm_config": config(_core.gemm_memory),
        "xd_gemm_args": functools.partial(context.explain, 0),
        "xd_gemm_bulk_args": context.bulk,
        "xd_gemm_gather_args": context.start_all_gather,
    }


def test_every_field_of_a_struct_is_an_argument_that_errors_name() -> None:
    with crossdock.Comm(crossdock.unique_id(), rank=0, num_ranks=1) as comm:
        for struct, call in operations(comm.core()).items():
            names = fields_of(struct)
            assert names
            for name in names:
                with pytest.raises(TypeError, match=f"^{name}: expected .*, got <object"):
                    call({name: object()})
            with pytest.raises(TypeError, match=f"^unknown field of {struct}: another$"):
                call({"another": 1})
