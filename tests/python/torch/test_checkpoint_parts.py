"""Checkpoints of parts of tensor parallelism: nothing of a rank's state is lost, none waits."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import crossdock.torch as xd
from support import Rank, on_ranks, run_ranks
from test_tp_training import Model, data_times_tensor, in_distributed
from torch_support import whole


def parts_of(model: nn.Module) -> dict[str, Any]:
    """The weights of tensor parallelism, and those of experts, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if "linear_" in name and "out.bias" not in name or "experts_" in name
    }


def numbered(model: nn.Module) -> torch.optim.Optimizer:
    """State of plain tensors of each rank's own part: copies, and sums of the other columns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for name, parameter in parts_of(model).items():
        own = xd.local_tensor(parameter.detach())
        state = {"master": 3 * own, "steps": torch.tensor(4.0), "count": 7}
        if own.ndim == 2:
            state["sums"] = own.sum(1 if "qkv" in name else 0, keepdim=True)
        optimizer.state[parameter] = state
    return optimizer


def save_own(me: Rank, folder: pathlib.Path) -> None:
    with in_distributed(me) as (mesh, comm):
        model = Model(comm, experts=True)
        xd.save_checkpoint(folder / "saved", model, numbered(model))


def load_own(me: Rank, folder: pathlib.Path) -> None:
    with in_distributed(me) as (mesh, comm):
        model = Model(comm, experts=True)
        expected = numbered(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        xd.load_checkpoint(folder / "saved", model, optimizer)
        for name, parameter in parts_of(model).items():
            state = optimizer.state[parameter]
            wanted = expected.state[parameter]
            assert state.keys() == wanted.keys(), name
            for key, value in wanted.items():
                if not isinstance(value, torch.Tensor):
                    assert state[key] == value
                    continue
                assert type(state[key]) is type(value), (name, key)
                assert torch.equal(state[key], value), (name, key)


def test_plain_state_of_every_ranks_part_is_kept(tmp_path: pathlib.Path) -> None:
    run_ranks(2, save_own, tmp_path)
    run_ranks(2, load_own, tmp_path)
    run_ranks(1, load_own, tmp_path)


@on_ranks(2)
def test_state_that_cannot_be_put_together_is_refused(me: Rank, tmp_path: pathlib.Path) -> None:
    """State of which nothing says how ranks share it."""
    with in_distributed(me) as (mesh, comm):
        model = Model(comm, experts=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        weight = model.attention.linear_qkv.weight
        for value in (torch.ones(3), torch.ones(1, weight.shape[1]), torch.ones(2, 2)):
            optimizer.state[weight] = {"codes": value}
            with pytest.raises(ValueError, match="'codes' of attention.linear_qkv.weight to be"):
                xd.save_checkpoint(tmp_path / "saved", model, optimizer)
        assert not list(tmp_path.iterdir())


def disagreeing(me: Rank, folder: pathlib.Path) -> None:
    """One rank that would send less than the others wait for, or that cannot save at all."""
    with in_distributed(me) as (mesh, comm):
        model = Model(comm, experts=True)
        stepped = numbered(model)
        fresh = torch.optim.SGD(model.parameters(), lr=0.5)
        foreign = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
        text = "model, optimizer: expected the same parameters .* others on rank 1"
        with pytest.raises(RuntimeError, match=text):
            xd.save_checkpoint(folder / "saved", model, fresh if me.rank == 1 else stepped)
        kind, text = RuntimeError, "path: another rank cannot save: rank 1"
        if me.rank == 1:
            kind, text = ValueError, "optimizer: expected parameters of the model, got 1"
        with pytest.raises(kind, match=text):
            xd.save_checkpoint(folder / "saved", model, foreign if me.rank == 1 else stepped)
        assert not list(folder.iterdir())
        xd.save_checkpoint(folder / "saved", model, stepped)


def test_a_rank_that_cannot_save_keeps_nobody_waiting(tmp_path: pathlib.Path) -> None:
    run_ranks(2, disagreeing, tmp_path)
    run_ranks(2, load_own, tmp_path)


def disagreeing_replicas(me: Rank, folder: pathlib.Path) -> None:
    with data_times_tensor(me) as (mesh, comm):
        comm.replicas = mesh["data"].get_group()
        model = Model(comm, experts=True)
        fresh = torch.optim.SGD(model.parameters(), lr=0.5)
        if me.num_ranks == 4:
            with pytest.raises(RuntimeError, match="expected the same on all replicas"):
                xd.save_checkpoint(
                    folder / "saved", model, numbered(model) if me.rank < 2 else fresh
                )
            dist.barrier()
            assert not list(folder.iterdir())
        xd.save_checkpoint(folder / "saved", model, numbered(model))
        assert all(whole(p).isfinite().all() for p in model.parameters())


def test_replicas_that_disagree_are_told(tmp_path: pathlib.Path) -> None:
    run_ranks(4, disagreeing_replicas, tmp_path)
    run_ranks(2, load_own, tmp_path)
