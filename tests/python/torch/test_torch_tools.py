"""Torch's own tools on models with experts over ranks: right, or refused.

Four ranks, as two by two (two GPUs: as one by two): along one axis of the mesh ranks hold different
experts, along the other the same. Their common result is compared with one process that has the
whole batch.
"""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import crossdock.torch as xd
from moe_lm.plain_moe import PlainMoE
from support import Rank, on_ranks, run_ranks
from torch_support import in_mesh, load_all, normal, save_all, where, whole

HIDDEN, FFN, EXPERTS, TOPK, TOKENS = 16, 24, 8, 3, 6  # tokens: of each rank
SEED = 30
BATCHES = 2

DRAWN = torch.device("cpu")  # parameters are drawn here, also in tests on GPUs


class Model(nn.Module):
    """Experts between what every rank holds."""

    def __init__(self, make_experts: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        with DRAWN:
            self.first = nn.Linear(HIDDEN, HIDDEN)
            self.head = nn.Linear(HIDDEN, 5)
        self.experts = make_experts()
        self.register_buffer("scale", torch.ones(2, device=DRAWN))
        self.to(where())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(x + self.experts(x)[0])


def make_model(comm: xd.Comm, **options: Any) -> Model:
    options = {"aux_loss_weight": 0.0, "dtype": torch.float32} | options
    return Model(
        lambda: xd.MoELayer(
            HIDDEN, FFN, EXPERTS, TOPK, comm=comm, max_tokens_per_rank=TOKENS, **options
        )
    )


def make_plain() -> Model:
    def experts() -> nn.Module:
        with DRAWN:
            return PlainMoE(HIDDEN, FFN, EXPERTS, TOPK, aux_loss_weight=0.0)

    return Model(experts)


def batch(step: int, ranks: int) -> torch.Tensor:
    """[ranks, TOKENS, HIDDEN]."""
    return normal(SEED + 1 + step, ranks, TOKENS, HIDDEN)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def close(got: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, msg=lambda m: f"{name}: {m}")


def two_by_two(me: Rank) -> Any:
    """A mesh of a data axis and an expert axis of all ranks, and the latter's communicator."""
    return in_mesh((me.num_ranks // 2, 2), "data", "expert")


def train(me: Rank, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Steps with clipped gradients; the norms before."""
    norms = []
    for step in range(BATCHES):
        optimizer.zero_grad()
        loss_of(model, batch(step, me.num_ranks)[me.rank]).backward()
        xd.average_gradients(model)
        norms.append(xd.clip_grad_norm_(model, 0.1).item())
        optimizer.step()
    return norms


def train_plain(me: Rank) -> tuple[Model, list[float]]:
    """The same in this process alone."""
    plain, norms = make_plain(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(BATCHES):
        optimizer.zero_grad()
        loss_of(plain, batch(step, me.num_ranks).flatten(0, 1)).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item())
        optimizer.step()
    return plain, norms


def compare(model: nn.Module, plain: Model, what: Callable[[torch.Tensor], Any]) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        close(whole(what(parameter)), what(expected[name.removeprefix("module.")]), name)


def wrapped_in_ddp(model: Model, mesh: Any) -> nn.Module:
    return xd.data_parallel(model, mesh["data"])


def wrapped_in_fsdp(model: Model, mesh: Any) -> nn.Module:
    fully_shard(model.head, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


@on_ranks(4)
def test_ddp_and_fsdp_over_the_data_axis_train_as_one_process(me: Rank) -> None:
    with two_by_two(me) as (mesh, comm):
        plain, expected_norms = train_plain(me)
        for wrap in (wrapped_in_ddp, wrapped_in_fsdp):
            model = wrap(make_model(comm), mesh)
            optimizer = torch.optim.AdamW(xd.parameter_groups(model), lr=0.01)
            norms = train(me, model, optimizer)
            assert norms == pytest.approx(expected_norms, rel=1e-4), wrap
            assert min(norms) > 0.1  # so that clipping changes something
            compare(model, plain, lambda parameter: parameter.grad)
            # Adam makes a step of the rounding of a gradient near zero.
            for name, parameter in model.named_parameters():
                got = whole(parameter.detach())
                expected = plain.get_parameter(name.removeprefix("module."))
                torch.testing.assert_close(got, expected.detach(), rtol=1e-3, atol=2e-3)
            xd.assert_replicated(model)
            assert comm.replicas is None  # nothing of one model is left for the next


@on_ranks(4)
def test_norms_count_every_expert_once(me: Rank) -> None:
    with two_by_two(me) as (mesh, comm):
        model, plain = make_model(comm), make_plain()
        rows = batch(0, me.num_ranks)
        here = rows[comm.rank]
        loss_of(plain, rows[:2].flatten(0, 1)).backward()
        for order in (1.0, 2.0, torch.inf):
            model.zero_grad()
            loss_of(model, here).backward()
            xd.average_gradients(model)
            expected = copy.deepcopy(plain)
            for copied, parameter in zip(expected.parameters(), plain.parameters()):
                copied.grad = parameter.grad.clone()
            norm = xd.clip_grad_norm_(model, 0.01, order)
            close(norm, nn.utils.clip_grad_norm_(expected.parameters(), 0.01, order), str(order))
            compare(model, expected, lambda parameter: parameter.grad)
        # Torch's own cannot be silently wrong: told that plain tensors are equal on all ranks it is
        # right, and otherwise it raises.
        before = [whole(p.grad).clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        for parameter, gradient in zip(model.parameters(), before):
            assert torch.equal(whole(parameter.grad), gradient)
        with implicit_replication():
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        close(whole(norm), nn.utils.clip_grad_norm_(expected.parameters(), 1e-3), "norm")
        compare(model, expected, lambda parameter: parameter.grad)
        model.first.weight.grad[0, 0] = torch.nan
        with pytest.raises(RuntimeError, match="norm of order 2.0 is nan, expected a finite one"):
            xd.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        with pytest.raises(ValueError, match="norm_type: expected a number above 0, got 0"):
            xd.clip_grad_norm_(model, 1.0, 0)


@on_ranks(4)
def test_a_nan_in_one_ranks_experts_is_the_norm_on_all(me: Rank) -> None:
    """Backends' maximum of a NaN and a number is either: gloo's is the number."""
    with two_by_two(me) as (mesh, comm):
        for holder in range(comm.num_ranks):
            model = make_model(comm)
            loss_of(model, batch(0, me.num_ranks)[comm.rank]).backward()
            xd.average_gradients(model)
            if comm.rank == holder:
                xd.local_tensor(model.experts.experts.w_in.grad)[0, 0, 0] = torch.nan
            for order in (1.0, 2.0, torch.inf):
                expected = f"norm of order {order} is nan, expected a finite one"
                with pytest.raises(RuntimeError, match=expected):
                    xd.clip_grad_norm_(model, 1.0, order, error_if_nonfinite=True)
            assert xd.clip_grad_norm_(model, 1.0, torch.inf).isnan()
            assert all(whole(p.grad).isnan().all() for p in model.parameters())


@on_ranks(4)
def test_ddp_that_would_mix_experts_is_refused(me: Rank) -> None:
    """DDP that would send one rank's experts to others."""
    with two_by_two(me) as (mesh, comm):
        model = make_model(comm)
        before = [whole(p.detach()).clone() for p in model.parameters()]
        for group in (None, mesh["data"].get_group()):
            with pytest.raises(RuntimeError, match="DTensor"):
                DDP(model, process_group=group)
        # Experts in a dtype of their own travel in a bucket of their own.
        halves = make_model(comm, dtype=torch.bfloat16)
        with pytest.raises((RuntimeError, NotImplementedError)):
            DDP(halves.experts)
        for group in (None, mesh["expert"]):
            with pytest.raises(ValueError, match="replicas: expected ranks that hold the same"):
                xd.data_parallel(model, group or dist.group.WORLD)
        for parameter, values in zip(model.parameters(), before):
            assert torch.equal(whole(parameter.detach()), values)
        taken = DDP(make_model(comm), device_mesh=mesh["data"])
        with pytest.raises(RuntimeError, match="experts.w_in: expected a parameter of the layer"):
            taken(batch(0, me.num_ranks)[me.rank])


@on_ranks(4)
def test_what_should_be_equal_and_is_not_is_found(me: Rank) -> None:
    with two_by_two(me) as (mesh, comm):
        model = xd.data_parallel(make_model(comm), mesh["data"])
        xd.assert_replicated(model)

        def differs(name: str, tensor: torch.Tensor, rank: int) -> None:
            kept = tensor.detach().clone()
            rank %= me.num_ranks
            if me.rank == rank:
                tensor.detach().view(-1)[-1] += 1e-3
            with pytest.raises(RuntimeError, match="differ|expected equal values") as raised:
                xd.assert_replicated(model)
            if me.rank == rank:
                assert f"{name}: expected equal values on ranks" in str(raised.value)
            tensor.detach().copy_(kept)

        layer = model.module.experts
        differs("module.head.weight", model.module.head.weight, 1)
        differs("module.scale", model.module.scale, 3)
        if me.num_ranks == 4:  # it has a replica
            differs("module.experts.experts.w_out", layer.experts.w_out.to_local(), 2)
        bias = model.module.head.bias.requires_grad_(me.rank != 1)
        found = "head.bias.requires_grad: expected equal values on ranks"
        with pytest.raises(RuntimeError, match=found if me.rank == 1 else "differ|equal"):
            xd.assert_replicated(model)
        bias.requires_grad_(True)
        xd.assert_replicated(model)


@on_ranks(4)
def test_copies_and_moving_averages(me: Rank) -> None:
    with two_by_two(me) as (mesh, comm):
        model, x = make_model(comm), batch(0, 2)[comm.rank]
        expected = model(x)
        twin = copy.deepcopy(model)
        assert twin.experts.group is model.experts.group
        assert torch.equal(twin(x), expected)
        expected.sum().backward()
        twin = copy.deepcopy(model)
        # Torch copies the gradients of DTensors along, and those of its own parameters not.
        for parameter in twin.parameters():
            assert (parameter.grad is None) == (not hasattr(parameter, "to_local"))
        parallel = wrapped_in_ddp(make_model(comm), mesh)
        with pytest.raises(RuntimeError, match="default process group"):
            copy.deepcopy(parallel)
        assert copy.deepcopy(parallel.module).experts.group is parallel.module.experts.group
        with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
            copy.deepcopy(wrapped_in_fsdp(make_model(comm), mesh))
        twin.zero_grad()
        assert all(parameter.grad is None for parameter in twin.parameters())
        assert all(parameter.grad is not None for parameter in model.parameters())
        mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        with implicit_replication():
            mean.update_parameters(model)  # copies
        before = [whole(p.detach()).clone() for p in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            mean.update_parameters(model)
        mean.n_averaged.fill_(1)
        with implicit_replication():
            mean.update_parameters(model)
        for got, first in zip(mean.module.parameters(), before):
            close(whole(got.detach()), 2 * first, "mean")
        with pytest.raises(TypeError, match="cannot be pickled: save model.state_dict()"):
            torch.save(model, "/dev/null")


OPTIMISERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    # It has a mean of each row and of each column.
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def trainable(how: str, optimiser: str, comm: xd.Comm, mesh: Any) -> tuple[Any, Any]:
    """A model, wrapped as said, and its optimiser."""
    model = make_model(comm)
    model = wrapped_in_fsdp(model, mesh) if how == "fsdp" else model
    return model, OPTIMISERS[optimiser](xd.parameter_groups(model))


def meshed(me: Rank, how: str) -> Any:
    """Of data times experts; what FSDP does not shard also on experts alone."""
    return two_by_two(me) if how == "fsdp" else in_mesh((me.num_ranks,), "expert")


def check_saving(me: Rank, folder: pathlib.Path, how: str, optimiser: str) -> None:
    with meshed(me, how) as (mesh, comm):
        model, optimizer = trainable(how, optimiser, comm, mesh)
        train(me, model, optimizer)
        save_all(folder, model, optimizer)


def check_loading(me: Rank, folder: pathlib.Path, how: str, optimiser: str) -> None:
    with meshed(me, how) as (mesh, comm):
        model, optimizer = trainable(how, optimiser, comm, mesh)
        for group in optimizer.param_groups:
            group["lr"] = 7.0
        load_all(folder, model, optimizer)
        assert all(group["lr"] == 0.1 for group in optimizer.param_groups)
        train(me, model, optimizer)  # takes the state as it is


@pytest.mark.parametrize(
    "saved, loaded, optimiser",
    [
        (("plain", 4), ("plain", 2), "adafactor"),
        (("plain", 1), ("plain", 4), "adafactor"),
        (("fsdp", 4), ("plain", 1), "momentum"),
        (("plain", 2), ("fsdp", 4), "adam"),
        (("fsdp", 4), ("fsdp", 2), "adam"),
    ],
    ids=str,
)
def test_torchs_checkpoints_keep_every_state_on_other_ranks(
    saved: tuple[str, int], loaded: tuple[str, int], optimiser: str, tmp_path: pathlib.Path
) -> None:
    for check, (how, ranks) in ((check_saving, saved), (check_loading, loaded)):
        run_ranks(ranks, check, tmp_path, how, optimiser)


@on_ranks(4)
def test_state_dicts_of_dtensors_and_of_plain_tensors_are_loaded(
    me: Rank, tmp_path: pathlib.Path
) -> None:
    with two_by_two(me) as (mesh, comm):
        model = make_model(comm)
        expected = [whole(p.detach()).clone() for p in model.parameters()]
        share = {
            name: (value.to_local() if hasattr(value, "to_local") else value).clone()
            for name, value in model.state_dict().items()
        }
        full = {name: whole(value).clone() for name, value in model.state_dict().items()}
        # As each rank saves it for itself, as plain tensors of this rank, and of all ranks.
        torch.save(model.state_dict(), tmp_path / f"{me.rank}.pt")
        for state in (torch.load(tmp_path / f"{me.rank}.pt"), share, full):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(torch.nan)
            model.load_state_dict(state)
            for parameter, values in zip(model.parameters(), expected):
                assert torch.equal(whole(parameter.detach()), values)
        wrong = {**share, "experts.experts.w_in": torch.zeros(3, 2)}
        with pytest.raises((RuntimeError, ValueError), match="experts.experts.w_in"):
            model.load_state_dict(wrong)


@on_ranks(4)
def test_optimisers_take_experts_in_a_group_of_their_own(me: Rank) -> None:
    with two_by_two(me) as (mesh, comm):
        results = []
        for options in ({}, {"foreach": True}, {"fused": True}):
            model = make_model(comm)
            loss_of(model, batch(0, 2)[comm.rank]).backward()
            torch.optim.AdamW(xd.parameter_groups(model), lr=0.01, **options).step()
            results.append([whole(p.detach()) for p in model.parameters()])
        for other in results[1:]:
            for got, expected in zip(other, results[0]):
                torch.testing.assert_close(got, expected)
        assert len(xd.parameter_groups(model)) == 2
