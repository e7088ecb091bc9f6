"""torch's own checks of every operator: schema, tracing with symbolic sizes, autograd."""

from __future__ import annotations

import pytest
import torch

import crossdock.torch as xd
from torch_support import Batch

OPS = torch.ops.crossdock

# Without the comparison of compiled with eager values, which torch cannot do for fp8.
WITHOUT_VALUES = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.fixture(params=["expert_major", "rank_major"])
def prepared(request):
    batch = Batch(5, ((6,), 8, 3, 128), request.param)
    with xd.init():
        group = batch.group()
        yield batch, group, group.prepare(batch.local(0)[0])


def test_prepare(prepared):
    batch, group, _ = prepared
    for requires_grad in (False, True):
        order = torch.zeros(1, requires_grad=requires_grad)
        # No two plans are equal, as each says which prepare of its group made it.
        torch.library.opcheck(
            OPS.prepare.default,
            (batch.local(0)[0], order, group.handle, 0),
            test_utils=WITHOUT_VALUES,
        )


def test_local(prepared):
    batch, group, plan = prepared
    torch.library.opcheck(OPS.routing_layout.default, (batch.local(0)[0], group.handle))
    torch.library.opcheck(OPS.zone_ends.default, (plan.offsets,))
    if batch.layout == "expert_major":
        for wide in (False, True):
            torch.library.opcheck(OPS.row_experts.default, (plan.data, group.handle, wide))


@pytest.mark.parametrize("wanted", ["weights", "rows alone", "quantised", "scaled"])
def test_dispatch(prepared, wanted):
    _, group, plan = prepared
    _, x, weights, _ = prepared[0].local(0)
    weights = None if wanted == "rows alone" else weights
    scales = None
    if wanted == "quantised":
        group = prepared[0].group(torch.bfloat16)
        plan = group.prepare(prepared[0].local(0)[0])
        x = x.detach().bfloat16().requires_grad_()
    if wanted == "scaled":
        x, scales = x.detach().to(torch.int8), torch.ones(6, 1)
        weights = weights.detach()  # torch's check sums gradients of floats and integers alike
    arguments = (plan.data, x, weights, scales, plan.order, group.handle, 6, 3)
    if wanted == "quantised":
        torch.library.opcheck(OPS.dispatch.default, (*arguments, 1), test_utils=WITHOUT_VALUES)
    else:
        torch.library.opcheck(OPS.dispatch.default, (*arguments, 0))


def test_combine(prepared):
    batch, group, plan = prepared
    rows = torch.ones(group.rows, 128, requires_grad=True)
    weights = [None]
    if batch.layout == "expert_major":
        weights.append(torch.ones(group.rows, requires_grad=True))
    for given in weights:
        torch.library.opcheck(
            OPS.combine.default, (plan.data, rows, given, plan.order, group.handle, 6)
        )


def test_dispatch_bwd(prepared):
    batch, group, plan = prepared
    shape = (group.rows, 3) if batch.layout == "rank_major" else (group.rows,)
    rows, weights = torch.ones(group.rows, 128), torch.ones(shape)
    for pair in ((rows, weights), (rows, None), (None, weights)):
        torch.library.opcheck(
            OPS.dispatch_bwd.default, (plan.data, *pair, plan.order, group.handle, 6, 3)
        )


def test_combine_bwd(prepared):
    batch, group, plan = prepared
    grad, rows, weights = torch.ones(6, 128), torch.ones(group.rows, 128), torch.ones(group.rows)
    optional = [(None, None)]
    if batch.layout == "expert_major":
        optional += [(None, weights), (rows, weights)]
    for pair in optional:
        torch.library.opcheck(
            OPS.combine_bwd.default, (plan.data, grad, *pair, plan.order, group.handle, group.rows)
        )
