"""Batches for the torch tests, whose payloads are small integers: every sum is exact.

The model of these tests: local expert e multiplies its rows by e + 1.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import crossdock.torch as xd
from crossdock.errors import Mismatch
from crossdock.torch import tp
from reference import Routing
from support import Rank
from torch_ranks import process_group

# Tokens of each rank, by how many ranks there are.
_RAGGED = {4: (5, 0, 9, 1), 2: (9, 1), 1: (9,)}


def ragged(me: Rank, hidden: int = 32) -> tuple:
    """(tokens of each rank, experts, top-k, hidden): ranks with few tokens, one with nine."""
    return _RAGGED[me.num_ranks], 8, 3, hidden


def where() -> torch.device:
    """The device that the test computes on: torch's default device."""
    return torch.get_default_device()


def settle(group: xd.EpGroup | xd.LowLatencyGroup | tp.TpContext) -> None:
    """Raises, on a GPU, the error that the group's operations so far have met."""
    if group.comm.device.type == "cuda":
        torch.cuda.synchronize()
        group.check()


@contextmanager
def distributed(**options: Any) -> Iterator[None]:
    """This rank in torch.distributed."""
    with process_group("nccl" if where().type == "cuda" else "gloo", **options):
        yield


@contextmanager
def joined() -> Iterator[xd.Comm]:
    """This rank in torch.distributed and in a communicator of the same device."""
    options = {"device_id": where()} if where().type == "cuda" else {}
    with distributed(**options), xd.init(device=where()) as comm:
        yield comm


@contextmanager
def in_mesh(sizes: tuple[int, ...], *axes: str) -> Iterator[tuple[DeviceMesh, xd.Comm]]:
    """A mesh of all ranks, and a communicator along its last axis."""
    # No device_id: with it meshes split the group, and torch 2.11 crashes where a process does that
    # once more, for the next test.
    with distributed():
        mesh = init_device_mesh(where().type, sizes, mesh_dim_names=axes)
        with xd.init(mesh[axes[-1]], device=where()) as comm:
            yield mesh, comm


def whole(tensor: Any) -> torch.Tensor:
    """All ranks' parts of a DTensor, or a plain tensor, without its history."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))


def save_all(folder: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Saves with torch.distributed.checkpoint, and the whole values beside it."""
    dcp.save(states_of(model, optimizer), checkpoint_id=folder / "saved")
    expected = whole_states(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")


def load_all(folder: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Loads what `save_all` has saved over NaNs, and compares it with the whole values."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    states = states_of(model, optimizer)
    dcp.load(states, checkpoint_id=folder / "saved")
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    expected, got = torch.load(folder / "expected.pt"), whole_states(model, optimizer)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    assert len({group["lr"] for group in optimizer.param_groups}) == 1


def whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All ranks' parts of each parameter, and of each tensor in the optimiser's state of it."""
    states = {}
    for name, parameter in model.named_parameters():
        of_optimizer = optimizer.state[parameter].items()
        tensors = {"": parameter} | {k: v for k, v in of_optimizer if torch.is_tensor(v)}
        assert len(tensors) > 1, f"{name} has no state"
        states |= {f"{name} {key}": whole(value).cpu() for key, value in tensors.items()}
    return states


@contextmanager
def reported(
    group: xd.EpGroup | xd.LowLatencyGroup, kind: type[Exception], match: str = ""
) -> Iterator[pytest.ExceptionInfo]:
    """Expects an operation to fail: in its call, or on a GPU also after it."""
    with pytest.raises(kind, match=match) as raised:
        yield raised
        settle(group)
    if not getattr(raised.value, "fatal", False):
        settle(group)  # an error that a call has raised is told once


def one_rank_errs(
    me: Rank,
    bad: int,
    group: xd.EpGroup | xd.LowLatencyGroup,
    call: Callable[..., object],
    good: dict[str, Any],
    mistake: tuple[type[Exception], str, dict[str, Any]],
) -> None:
    """One rank makes a mistake and is told of it; its peers make the good call and hear at once.

    Args:
        bad: that rank.
        group: of the operation that `call` calls.
        good: arguments.
        mistake: error, text, and arguments in place of good ones.
    """
    kind, text, wrong = mistake
    began = time.monotonic()
    if me.rank == bad:
        with reported(group, kind, text):
            call(**good | wrong)
    else:
        with reported(group, Mismatch) as raised:
            call(**good)
        assert raised.value.peer == bad or f"rank {bad}" in str(raised.value)
    assert time.monotonic() - began < 20, "told late"


def integers(seed: int, *shape: int) -> np.ndarray:
    """float32 whole numbers from -4 to 4."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed numbers, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(where(), dtype)


class Batch:
    """One batch of all ranks, which each rank computes from the seed alone."""

    def __init__(
        self, seed: int, case: tuple, layout: str = "expert_major", alignment: int = 1
    ) -> None:
        self.tokens, self.num_experts, self.topk, self.hidden = case
        self.layout, self.alignment = layout, alignment
        self.topk_idx = [self._ids(seed + r, t) for r, t in enumerate(self.tokens)]
        self.routing = Routing(self.topk_idx, self.num_experts, layout, alignment)
        self.x = [integers(seed + 1000 + r, t, self.hidden) for r, t in enumerate(self.tokens)]
        self.weights = [integers(seed + 2000 + r, t, self.topk) for r, t in enumerate(self.tokens)]
        self.grad_out = [
            integers(seed + 3000 + r, t, self.hidden) for r, t in enumerate(self.tokens)
        ]

    def _ids(self, seed: int, tokens: int) -> np.ndarray:
        """[T, K] different experts, about one choice in six missing."""
        rng = np.random.default_rng(seed)
        ids = [rng.permutation(self.num_experts)[: self.topk] for _ in range(tokens)]
        ids = np.array(ids, np.int64).reshape(tokens, self.topk)
        ids[rng.random(ids.shape) < 1 / 6] = -1
        return ids

    def group(self, dtype: torch.dtype = torch.float32, **options) -> xd.EpGroup:
        sizes = {
            "num_experts": self.num_experts,
            "hidden": self.hidden,
            "max_topk": self.topk,
            "max_tokens_per_rank": max(self.tokens),
            "layout": self.layout,
            "alignment": self.alignment,
        }
        return xd.EpGroup(**sizes | options, dtype=dtype)

    def local(
        self,
        rank: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        """topk_idx, x, topk_weights, grad_out of a rank; x and topk_weights require grad."""
        device = device or where()
        return (
            torch.from_numpy(self.topk_idx[rank]).to(device),
            torch.from_numpy(self.x[rank]).to(device, dtype).requires_grad_(),
            torch.from_numpy(self.weights[rank]).to(device).requires_grad_(),
            torch.from_numpy(self.grad_out[rank]).to(device, dtype),
        )

    def factors(self, rank: int) -> np.ndarray:
        """[T, K] float32: by what the expert of each choice multiplies; 0 for none."""
        per_rank = self.num_experts // len(self.tokens)
        ids = self.topk_idx[rank]
        return np.where(ids < 0, 0, ids % per_rank + 1).astype(np.float32)

    def expected(self, rank: int, weighted: bool = True) -> tuple[np.ndarray, ...]:
        """out, and the gradients of x and topk_weights, of a rank, in float32."""
        x, grad_out = self.x[rank], self.grad_out[rank]
        factors = self.factors(rank)
        scale = (factors * self.weights[rank] if weighted else factors).sum(1, keepdims=True)
        return x * scale, grad_out * scale, factors * (x * grad_out).sum(1, keepdims=True)

    def check(
        self, rank: int, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, what: str = ""
    ) -> None:
        """Compares a result, and the gradients that its inputs have."""
        names = ("out", "gradient of x", "gradient of topk_weights")
        for name, got, want in zip(names, (out, x.grad, weights.grad), self.expected(rank)):
            assert_equal(f"{name} {what}", got, want)

    def check_layer(self, rank: int, on: xd.EpGroup | xd.Plan, what: str = "", **options) -> None:
        """Runs the layer of `rank` forward and backward, by a plan or by one of a group."""
        dtype = options.pop("dtype", torch.float32)
        topk_idx, x, weights, grad_out = self.local(rank, dtype)
        plan = on.prepare(topk_idx) if isinstance(on, xd.EpGroup) else on
        out = layer(plan, x, weights, **options)
        out.backward(grad_out)
        self.check(rank, out, x, weights, what)


def experts(plan: xd.Plan, received: xd.Dispatched) -> torch.Tensor:
    """The model's experts on a whole receive tensor, its tail included."""
    tokens = received.tokens
    if plan.group.layout == "rank_major":
        factor = (received.topk_idx + 1) * received.weights  # idx -1: no expert
        return tokens * factor.sum(1, keepdim=True).to(tokens.dtype)
    factor = plan.row_experts()[: tokens.shape[0]] + 1
    return tokens * factor.to(tokens.dtype)[:, None]


def layer(plan: xd.Plan, x: torch.Tensor, weights: torch.Tensor, **options) -> torch.Tensor:
    """dispatch, experts, combine, weighted in either layout."""
    received = xd.dispatch(plan, x, weights, **options)
    beside = None if plan.group.layout == "rank_major" else received.weights
    return xd.combine(plan, experts(plan, received), beside)


def assert_equal(name: str, got: torch.Tensor, expected: np.ndarray) -> None:
    """Compares bit for bit, except for the sign of zero; shows the first difference."""
    got = got.detach().to("cpu", torch.float32).numpy()
    if got.shape != expected.shape:
        raise AssertionError(f"{name}: expected shape {expected.shape}, got {got.shape}")
    wrong = np.argwhere(~(got == expected))
    if len(wrong):
        at = tuple(wrong[0])
        raise AssertionError(
            f"{name}: {len(wrong)} of {got.size} elements differ, first at {at}: "
            f"expected {expected[at]}, got {got[at]}"
        )


def eager_and_compiled(
    function: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    modules: Iterable[torch.nn.Module],
    x: torch.Tensor,
    loss: Callable[[Any], torch.Tensor],
    backend: Any = "aot_eager",
    before: Callable[[], object] = lambda: None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of an eager function's results and gradients, and of the compiled one's.

    Args:
        function: of x.
        modules: whose parameters have gradients besides x.
        loss: of the results.
        backend: of torch.compile.
        before: is called before each of the two.
    """
    torch._dynamo.reset()
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend=backend)):
        before()
        part = x.clone().requires_grad_()
        for module in modules:
            module.zero_grad()
        outputs = call(part)
        loss(outputs).backward()
        parameters = (p for module in modules for p in module.parameters())
        gradients = [part.grad, *(xd.local_tensor(p.grad).clone() for p in parameters)]
        results.append([one.detach() for one in outputs] + gradients)
    return zip(*results, strict=True)


def recording(chains: list[list[str]]) -> Any:
    """A backend of torch.compile, which appends the operations of each graph to `chains`.

    Each operation must depend on the one before by the data that they take.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiled(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        calls = [
            node for node in graph_module.graph.nodes if str(node.target).startswith("crossdock.")
        ]
        # These take no turn.
        local = ("row_experts", "grouped", "gated")
        operations = [node for node in calls if not any(name in str(node.target) for name in local)]
        for earlier, later in zip(operations, operations[1:]):
            assert earlier in _ancestors(later), f"{later} does not depend on {earlier}"
        chains.append([str(node.target).split(".")[1] for node in operations])
        return make_boxed_func(graph_module.forward)

    return aot_autograd(fw_compiler=compiled, bw_compiler=compiled)


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    found, todo = set(), [node]
    while todo:
        new = set(todo.pop().all_input_nodes) - found
        found |= new
        todo += new
    return found


def poison(comm: xd.Comm) -> None:
    """Fills the symmetric memory that the heap has left with NaN (of every float type)."""
    filled = []
    while (free := comm.core.mem_info()["largest_free_bytes"]) >= 512:
        granule = 512 if free < 1 << 20 else 1 << 16  # sizes that the pool does not round up
        block = comm.empty_symmetric((free - free % granule,), torch.uint8)
        if not comm.pool.owns(block):
            raise AssertionError(f"expected {free} free bytes in the heap")
        filled.append(block.fill_(0xFF))
