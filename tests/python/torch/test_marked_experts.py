"""Layers of the user's own, whose experts are marked: training steps and checkpoints know them.

Results are compared with one process that has the whole batch.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crossdock.torch as xd
from support import Rank, on_ranks, run_ranks
from torch_support import (
    distributed,
    in_mesh,
    joined,
    load_all,
    normal,
    save_all,
    where,
    whole,
)

HIDDEN, EXPERTS, TOPK, TOKENS = 16, 8, 2, 6  # tokens: of each rank
SEED = 50


class Block(nn.Module):
    """Experts of one matrix and one bias each, by the operations."""

    def __init__(self, comm: xd.Comm) -> None:
        super().__init__()
        self.group = xd.EpGroup(
            num_experts=EXPERTS,
            hidden=HIDDEN,
            max_topk=TOPK,
            max_tokens_per_rank=TOKENS,
            dtype=torch.float32,
            comm=comm,
        )
        here = slice(comm.rank * EXPERTS // comm.num_ranks, None)
        count = self.group.num_local_experts
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False, device=where())
        self.router.weight.detach().copy_(normal(SEED, EXPERTS, HIDDEN))
        self.experts = nn.ParameterDict(
            {"matrix": normal(SEED + 1, EXPERTS, HIDDEN, HIDDEN)[here][:count].clone()}
        )
        self.experts["bias"] = normal(SEED + 2, EXPERTS, 1, HIDDEN)[here][:count].clone()
        assert xd.mark_experts(self.experts, self.group) is self.experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOPK)
        plan = self.group.prepare(chosen)
        received = xd.dispatch(plan, x, weights)
        out = xd.grouped_mm(received.tokens, self.experts["matrix"], plan.offsets)
        ones = torch.ones_like(received.tokens[:, :1])
        out = out + xd.grouped_mm(ones, self.experts["bias"], plan.offsets)
        return xd.combine(plan, out, received.weights)


class Plain(nn.Module):
    """The same in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False, device=where())
        self.router.weight.detach().copy_(normal(SEED, EXPERTS, HIDDEN))
        self.experts = nn.ParameterDict(
            {
                "matrix": normal(SEED + 1, EXPERTS, HIDDEN, HIDDEN),
                "bias": normal(SEED + 2, EXPERTS, 1, HIDDEN),
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOPK)
        results = torch.einsum("th,ehf->tef", x, self.experts["matrix"])
        results = results + self.experts["bias"][:, 0]
        spread = torch.zeros_like(results[..., 0]).scatter(1, chosen, weights)
        return torch.einsum("te,teh->th", spread, results)


def batch(step: int, ranks: int) -> torch.Tensor:
    """[ranks, TOKENS, HIDDEN]."""
    return normal(SEED + 10 + step, ranks, TOKENS, HIDDEN)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, clip: Any) -> Any:
    optimizer.zero_grad()
    F.mse_loss(model(x), x.flip(-1)).backward()
    norm = clip()
    optimizer.step()
    return norm


def train(
    me: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> list[float]:
    """Norms before they are clipped."""

    def clip() -> float:
        xd.average_gradients(model)
        return xd.clip_grad_norm_(model, 0.1).item()

    return [step_of(model, optimizer, batch(one, 4)[me.rank], clip) for one in steps]


def train_plain(steps: range) -> tuple[Plain, list[float]]:
    plain = Plain()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)

    def clip() -> float:
        return nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()

    norms = [step_of(plain, optimizer, batch(one, 4).flatten(0, 1), clip) for one in steps]
    return plain, norms


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(xd.parameter_groups(model), lr=0.5, momentum=0.9)


def compare(model: nn.Module, plain: Plain) -> None:
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name.removeprefix("module."))
        torch.testing.assert_close(
            whole(parameter),
            expected.detach(),
            rtol=1e-4,
            atol=1e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@on_ranks(4)
def test_own_layers_train_as_one_process(me: Rank) -> None:
    plain, wanted = train_plain(range(2))
    with joined() as comm:
        model = Block(comm)
        assert train(me, model, optimizer_of(model), range(2)) == pytest.approx(wanted, rel=1e-4)
        compare(model, plain)
        xd.assert_replicated(model)
        assert [len(group["params"]) for group in xd.parameter_groups(model)] == [1, 2]


@on_ranks(4)
def test_own_layers_train_beside_replicas(me: Rank) -> None:
    plain, wanted = train_plain(range(2))
    with in_mesh((me.num_ranks // 2, 2), "data", "expert") as (mesh, comm):
        model = xd.data_parallel(Block(comm), mesh["data"])
        assert train(me, model, optimizer_of(model), range(2)) == pytest.approx(wanted, rel=1e-4)
        compare(model, plain)


def save(me: Rank, folder: pathlib.Path) -> None:
    with joined() as comm:
        model = Block(comm)
        optimizer = optimizer_of(model)
        train(me, model, optimizer, range(1))
        save_all(folder, model, optimizer)


def load(me: Rank, folder: pathlib.Path) -> None:
    """On fewer ranks, each of which has the tokens of two."""
    plain, _ = train_plain(range(2))
    with joined() as comm:
        model = Block(comm)
        optimizer = optimizer_of(model)
        load_all(folder, model, optimizer)
        optimizer.zero_grad()
        for half in batch(1, 4).view(2, 2, TOKENS, HIDDEN)[me.rank]:
            (F.mse_loss(model(half), half.flip(-1)) / 2).backward()
        xd.average_gradients(model)
        xd.clip_grad_norm_(model, 0.1)
        optimizer.step()
        compare(model, plain)
        full = {name: whole(value).clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        model.load_state_dict(full)
        compare(model, plain)


def test_checkpoints_of_own_layers_are_read_by_other_ranks(tmp_path: pathlib.Path) -> None:
    run_ranks(4, save, tmp_path)
    run_ranks(2, load, tmp_path)


@on_ranks(2)
def test_what_cannot_be_marked_is_named(me: Rank) -> None:
    with distributed(), xd.init(device=where()) as comm:
        block = Block(comm)
        with pytest.raises(ValueError, match="module: expected one that has not been marked"):
            xd.mark_experts(block, block.group)
        wrong = nn.Linear(HIDDEN, 3)
        before = dict(wrong.named_parameters())
        with pytest.raises(ValueError, match="module.weight: expected a slice for each of the 4"):
            xd.mark_experts(wrong, block.group)
        assert all(wrong.get_parameter(name) is old for name, old in before.items())
        with pytest.raises(TypeError, match="expected a torch.nn.Module and an EpGroup, got Param"):
            xd.mark_experts(wrong.weight, block.group)
        anywhere = xd.EpGroup(
            num_experts=4,
            hidden=HIDDEN,
            max_topk=1,
            max_tokens_per_rank=1,
            expert_ranks=[0, 1, 0, 1],
            comm=comm,
        )
        with pytest.raises(ValueError, match="group: expected E / W experts on every rank"):
            xd.mark_experts(nn.Linear(2, 2), anywhere)
