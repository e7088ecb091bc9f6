"""Steps of training on models with layers of tensor parallelism are those of one process.

Each model is compared with plain layers of the same weights that have the tokens of all ranks.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn import functional as F

import crossdock.torch as xd
from crossdock.torch import tp
from support import Rank, on_ranks, run_ranks
from torch_support import in_mesh, load_all, normal, save_all, where, whole

HIDDEN, HEADS, EXPERTS, TOKENS = 16, 4, 4, 6  # tokens: of each rank
SEED = 90


def in_distributed(me: Rank) -> Any:
    """A mesh of all ranks and its communicator."""
    return in_mesh((me.num_ranks,), "tensor")


def data_times_tensor(me: Rank) -> Any:
    """A mesh of replicas and of parts, and the latter's communicator; also on one GPU."""
    return in_mesh((max(1, me.num_ranks // 2), min(2, me.num_ranks)), "data", "tensor")


class Model(nn.Module):
    """A norm, attention's projections with a norm of heads between, and perhaps experts."""

    def __init__(self, comm: xd.Comm, experts: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        sizes = {"max_tokens": TOKENS * comm.num_ranks, "sequence_dim": 1, "bias": True}
        options = {"comm": comm, "dtype": torch.float32} | sizes | options
        self.norm = nn.LayerNorm(HIDDEN, device=comm.device)
        self.attention = tp.TensorParallelAttentionProjections(HIDDEN, HEADS, **options)
        self.of_heads = nn.RMSNorm(HIDDEN // HEADS, device=comm.device)
        self.experts = None
        if experts:
            self.experts = xd.MoELayer(
                HIDDEN, 8, EXPERTS, 2, comm=comm, max_tokens_per_rank=TOKENS, aux_loss_weight=0.0
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention.qkv(self.norm(x))
        x = x + self.attention.out(self.of_heads(q * k) + v)
        return x if self.experts is None else x + self.experts(x).hidden


def plain_loss(model: Model, values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The loss of one process with these values of all ranks' parameters."""
    norm = F.layer_norm(x, (HIDDEN,), values["norm.weight"], values["norm.bias"])
    of = {kind: values[f"attention.linear_{kind}.weight"] for kind in ("qkv", "out")}
    biases = {kind: values[f"attention.linear_{kind}.bias"] for kind in ("qkv", "out")}
    both = F.linear(norm, of["qkv"], biases["qkv"])
    q, k, v = both.unflatten(-1, (HEADS, 3, HIDDEN // HEADS)).unbind(-2)
    inner = F.rms_norm(q * k, (HIDDEN // HEADS,), values["of_heads.weight"]) + v
    return (x + F.linear(inner.flatten(-2), of["out"], biases["out"])).square().mean()


def tokens(ranks: int, step: int = 0) -> torch.Tensor:
    """``[1, tokens of all ranks, hidden]``."""
    return normal(SEED + 1 + step, 1, TOKENS * ranks, HIDDEN)


def own(me: Rank, x: torch.Tensor) -> torch.Tensor:
    return x.narrow(1, me.rank * TOKENS, TOKENS)


def expected_gradients(me: Rank, model: Model) -> dict[str, torch.Tensor]:
    values = {name: whole(p).clone().requires_grad_() for name, p in model.named_parameters()}
    plain_loss(model, values, tokens(me.num_ranks)).backward()
    return {name: value.grad for name, value in values.items()}


def check_gradients(model: Model, expected: dict[str, torch.Tensor], factor: float = 1) -> None:
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if hasattr(parameter, "main_grad"):
            gradient = parameter.main_grad
            held = parameter.placements[0].dim
            gradient = torch.cat(gathered(gradient), held)
        torch.testing.assert_close(
            whole(gradient),
            factor * expected[name],
            rtol=1e-4,
            atol=1e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def gathered(part: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return parts


def check_norms(model: Model, expected: dict[str, torch.Tensor]) -> None:
    """Then gradients are as clipped."""
    for order in (1.0, torch.inf, 2.0):
        flat = torch.cat([gradient.flatten() for gradient in expected.values()])
        norm = torch.linalg.vector_norm(flat, order)
        got = xd.clip_grad_norm_(model, 1e6 if order != 2 else 0.5 * norm.item(), order)
        torch.testing.assert_close(got, norm, rtol=1e-4, atol=1e-6)
    check_gradients(model, expected, 0.5)


def check_average(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    xd.average_gradients(model)
    check_gradients(model, expected)
    check_norms(model, expected)


@on_ranks(2)
def test_gradients_and_norms_are_those_of_one_process(me: Rank) -> None:
    with in_distributed(me) as (mesh, comm):
        x = tokens(me.num_ranks)
        for fused_wgrad in (False, True):
            model = Model(comm, fused_wgrad=fused_wgrad)
            if fused_wgrad:
                for linear in (model.attention.linear_qkv, model.attention.linear_out):
                    linear.weight.main_grad = torch.zeros_like(
                        xd.local_tensor(linear.weight.detach())
                    )
            model(own(me, x)).square().mean().backward()
            xd.average_gradients(model)
            expected = expected_gradients(me, model)
            check_gradients(model, expected)
            check_norms(model, expected)
            assert [len(group["params"]) for group in xd.parameter_groups(model)] == [4, 3]
            xd.assert_replicated(model)


def check_between(model: Model) -> None:
    """A parameter that would be left out unseen is refused, and nothing is scaled."""
    before = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    heads = model.of_heads.weight
    for one in (heads, "of_heads.weight"):
        with pytest.raises(TypeError, match="between: expected .* as a list, got (Param|str)"):
            xd.average_gradients(model, between=one)
    for one, got in (
        ("of_heads.weight", "str 'of_heads.weight', which is none of it in place 1"),
        (heads.detach().clone(), r"Tensor \(4,\), which is none of it"),
        (model.attention.linear_out.weight, "attention.linear_out.weight in place 1"),
    ):
        with pytest.raises(ValueError, match=f"between: expected .* got {got}"):
            xd.average_gradients(model, between=[heads, one])
    heads.requires_grad_(False)
    with pytest.raises(ValueError, match="that require gradients, .* got of_heads.weight"):
        xd.average_gradients(model, between=[heads])
    heads.requires_grad_(True)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter.grad), before[name]), name


@on_ranks(2)
def test_parameters_between_layers_without_sequence_parallelism_are_told(me: Rank) -> None:
    """Without sequence parallelism."""
    with in_distributed(me) as (mesh, comm):
        x = tokens(me.num_ranks)
        model = Model(comm, sequence_parallel=False)
        model(x).square().mean().backward()
        if me.num_ranks > 1:
            with pytest.raises(ValueError, match="between: expected the parameters between layers"):
                xd.average_gradients(model)
        check_between(model)
        xd.average_gradients(model, between=model.of_heads.parameters())
        expected = expected_gradients(me, model)
        check_gradients(model, expected)
        check_norms(model, expected)


@on_ranks(2)
def test_sequence_parallel_norms_of_torchs_own(me: Rank) -> None:
    """DTensors of torch's own styles, whose gradients are sums over ranks as well."""
    with in_distributed(me) as (mesh, comm):
        model = Model(comm)
        expected = expected_gradients(me, model)
        parallelize_module(model.norm, mesh, SequenceParallel(use_local_output=True))
        model(own(me, tokens(me.num_ranks))).square().mean().backward()
        check_average(model, expected)
        groups = xd.parameter_groups(model)
        torch.optim.AdamW(groups, lr=0.01, fused=where().type == "cuda", foreach=None).step()


def run_backward(me: Rank, model: nn.Module) -> None:
    model(own(me, tokens(me.num_ranks))).square().mean().backward()


def on_a_mesh_without_wrapper(me: Rank) -> None:
    with data_times_tensor(me) as (mesh, comm):
        comm.replicas = mesh["data"].get_group()
        model = Model(comm)
        expected = expected_gradients(me, model)
        run_backward(me, model)
        check_average(model, expected)
        xd.assert_replicated(model)


def on_a_mesh_with_ddp(me: Rank) -> None:
    with data_times_tensor(me) as (mesh, comm):
        model = Model(comm)
        expected = expected_gradients(me, model)
        parallel = xd.data_parallel(model, mesh["data"])
        for given in (parallel, model):  # inside, DDP is not seen: averages are averaged again
            model.zero_grad()
            run_backward(me, parallel)
            xd.average_gradients(given)
            check_gradients(model, expected)
        check_norms(model, expected)


def on_a_mesh_with_fsdp(me: Rank) -> None:
    with data_times_tensor(me) as (mesh, comm):
        model = Model(comm)
        expected = expected_gradients(me, model)
        fully_shard(model, mesh=mesh["data"])
        run_backward(me, model)
        before = [xd.local_tensor(p.grad).clone() for p in model.parameters()]
        if me.num_ranks > 2:
            comm.replicas = mesh["data"].get_group()
            with pytest.raises(ValueError, match="attention.*: expected Comm.replicas to be None"):
                xd.average_gradients(model)
            comm.replicas = None
        for parameter, gradient in zip(model.parameters(), before):
            assert torch.equal(xd.local_tensor(parameter.grad), gradient)
        check_average(model, expected)


def on_a_mesh_with_hsdp(me: Rank) -> None:
    """Of the norm alone, over both axes: its second dimension is no tensor parallelism."""
    with data_times_tensor(me) as (mesh, comm):
        comm.replicas = mesh["data"].get_group()
        model = Model(comm)
        expected = expected_gradients(me, model)
        fully_shard(model.norm, mesh=mesh)
        run_backward(me, model)
        check_average(model, expected)
        assert [len(group["params"]) for group in xd.parameter_groups(model)] == [4, 3]
        xd.assert_replicated(model)


@pytest.mark.parametrize(
    "check",
    [on_a_mesh_without_wrapper, on_a_mesh_with_ddp, on_a_mesh_with_fsdp, on_a_mesh_with_hsdp],
)
def test_on_a_mesh_gradients_are_averaged_over_all_ranks(check: Any) -> None:
    run_ranks(4, check)


@on_ranks(2)
def test_what_would_be_wrong_is_refused(me: Rank) -> None:
    with in_distributed(me) as (mesh, comm):
        both = nn.ModuleList([Model(comm), Model(comm, sequence_parallel=False)])
        with pytest.raises(ValueError, match="either with sequence_parallel or without"):
            xd.average_gradients(both, between=())
        with pytest.raises(
            ValueError, match="model: expected a MoELayer in it, or experts .*, or layers"
        ):
            xd.average_gradients(nn.Linear(2, 2))
        with xd.init(mesh, device=where()) as other:
            two = nn.ModuleList([Model(comm), Model(other)])
            with pytest.raises(ValueError, match="got layers on 2 communicators"):
                xd.clip_grad_norm_(two, 1.0)
            other.replicas = dist.group.WORLD
            two = nn.ModuleList([Model(other), Model(comm, experts=True).experts])
            ranks = f"the {me.num_ranks} ranks .* got {me.num_ranks**2}"
            with pytest.raises(ValueError, match=f"replicas: expected .* to be {ranks}"):
                xd.average_gradients(two)


# ---- Checkpoints ---------------------------------------------------------------------------------


class Twice(nn.Module):
    """A model under two names."""

    def __init__(self, comm: xd.Comm) -> None:
        super().__init__()
        self.first = Model(comm, experts=True)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x)


def train_step(me: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(own(me, tokens(me.num_ranks, step))).square().mean().backward()
    xd.average_gradients(model)
    optimizer.step()


def saved(me: Rank, folder: pathlib.Path) -> None:
    """Two fused steps, with a checkpoint after the first: from it the second is the same."""
    with in_distributed(me) as (mesh, comm):
        model = Twice(comm)
        optimizer = torch.optim.AdamW(xd.parameter_groups(model), lr=0.01, fused=True)
        train_step(me, model, optimizer, 0)
        save_all(folder, model, optimizer)
        train_step(me, model, optimizer, 1)
        again = Twice(comm)
        other = torch.optim.AdamW(xd.parameter_groups(again), lr=1.0, fused=True)
        load_all(folder, again, other)
        train_step(me, again, other, 1)
        for (name, got), expected in zip(again.named_parameters(), model.parameters()):
            assert torch.equal(whole(got), whole(expected)), name
            assert type(got) is type(expected), name
            for key, value in optimizer.state[expected].items():
                assert torch.equal(whole(other.state[got][key]), whole(value)), (name, key)
        values = {name: whole(p).cpu() for name, p in model.named_parameters()}
        if me.rank == 0:
            torch.save((me.num_ranks, values), folder / "end.pt")


def loaded(me: Rank, folder: pathlib.Path) -> None:
    """On another number of ranks: the second step over both ranks' tokens."""
    with in_distributed(me) as (mesh, comm):
        model = Twice(comm)
        optimizer = torch.optim.AdamW(xd.parameter_groups(model), lr=1.0, fused=True)
        load_all(folder, model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.01
        for parameter in model.parameters():
            state = optimizer.state[parameter]
            assert state["exp_avg"].shape == parameter.shape and float(state["step"]) == 1
        ranks, expected = torch.load(folder / "end.pt")
        optimizer.zero_grad()
        for part in tokens(ranks, 1).split(TOKENS, 1):
            (model(part).square().mean() / ranks).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            # Adam turns the rounding of a gradient near zero into a step of any sign.
            torch.testing.assert_close(whole(parameter).cpu(), expected[name], rtol=1e-4, atol=2e-3)


def test_checkpoints_carry_parts_to_another_number_of_ranks(tmp_path: pathlib.Path) -> None:
    run_ranks(2, saved, tmp_path)
    run_ranks(1, loaded, tmp_path)
