"""Modules that parallelize_module has spread, beside one process without ranks."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from crossdock.torch.tp import dtensor
from support import Rank, on_ranks
from test_tp_layers import HIDDEN, INNER, Full
from torch_support import in_mesh, where
from tp_support import equal


@on_ranks(2)
def test_plans_spread_modules_as_those_of_torch(me: Rank) -> None:
    with in_mesh((me.num_ranks,), "tp") as (mesh, comm):
        rows = 4 * me.num_ranks
        for spread in (True, False):
            full = Full(rows)
            own = slice(4 * me.rank, 4 * me.rank + 4) if spread else slice(None)
            layout = Shard(0) if spread else Replicate()
            model = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.ReLU(), nn.Linear(INNER, HIDDEN)).to(
                where()
            )
            model.load_state_dict(full.model.state_dict())
            parallelize_module(
                model,
                mesh["tp"],
                {
                    "0": dtensor.ColwiseParallel(input_layouts=layout, max_tokens=4),
                    "2": dtensor.RowwiseParallel(output_layouts=layout, max_tokens=4),
                },
            )
            assert len(comm.contexts) == 1  # both have room in one
            x = full.x[own].detach().clone().requires_grad_()
            out = model(x)
            out.backward(full.grad[own])
            equal("out", out, full.out[own])
            equal("gradient of x", x.grad, full.x.grad[own])
            for name, parameter in model.named_parameters():
                want = full.model.get_parameter(name).grad
                equal(f"gradient of {name}", parameter.grad.full_tensor(), want)
            assert model[0].weight.placements == (Shard(0),)
            assert model[2].weight.placements == (Shard(1),)
            assert model[2].bias.placements == (Replicate(),)
            assert list(model.state_dict()) == list(full.model.state_dict())
        with pytest.raises(TypeError, match="module: expected an nn.Linear, got ReLU"):
            parallelize_module(nn.ReLU(), mesh, dtensor.ColwiseParallel(max_tokens=4))
        if me.num_ranks > 1:
            with pytest.raises(ValueError, match="out_features: expected a multiple of"):
                plan = dtensor.ColwiseParallel(max_tokens=4)
                parallelize_module(nn.Linear(8, 9), mesh, plan)


def test_plans_refuse_what_they_do_not_do():
    for kind, options, text in (
        (
            dtensor.ColwiseParallel,
            {"output_layouts": Replicate()},
            "output_layouts: expected Shard",
        ),
        (
            dtensor.ColwiseParallel,
            {"input_layouts": Shard(-1)},
            "input_layouts: expected Replicate",
        ),
        (dtensor.RowwiseParallel, {"input_layouts": Replicate()}, "input_layouts: expected Shard"),
        (dtensor.RowwiseParallel, {"use_local_output": False}, "use_local_output: expected True"),
    ):
        with pytest.raises(ValueError, match=text):
            kind(max_tokens=4, **options)
    with pytest.raises(ValueError, match="max_tokens: expected a number"):
        dtensor.RowwiseParallel()
