"""Calls without gradients go past torch's dispatcher, unless something of torch looks at them."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import crossdock.torch as xd
from crossdock.torch import _derivatives, _direct, _ops, tp
from crossdock.torch.tp import _functions
from support import Rank, on_ranks
from torch_support import Batch, assert_equal, joined, layer, where

OPERATORS = ["crossdock.dispatch.default", "crossdock.combine.default"]


@pytest.fixture
def inputs() -> Iterator[tuple[xd.Plan, torch.Tensor, torch.Tensor]]:
    """A plan, tokens and weights of one rank: those of `batch()`."""
    device = where()
    with usual_device(), xd.init(device=device):
        topk_idx, x, weights, _ = batch().local(0, device=device)
        yield batch().group().prepare(topk_idx), x.detach(), weights.detach()


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of this test that have gone through the dispatcher."""
    return watched_operators(monkeypatch, _ops)


def watched_operators(patch: pytest.MonkeyPatch, caller: Any) -> list[str]:
    names: list[str] = []

    def call(operator: Any, *args: Any) -> Any:
        names.append(str(operator))
        return _derivatives.call(operator, *args)

    patch.setattr(caller, "call", call)
    return names


@contextlib.contextmanager
def usual_device() -> Iterator[None]:
    """Takes back torch's default device, which is a mode."""
    device = where()
    if device.type == "cpu":
        yield
        return
    torch.set_default_device(None)
    try:
        yield
    finally:
        torch.set_default_device(device)


def batch(*tokens: int) -> Batch:
    return Batch(41, (tokens or (7,), 4, 2, 32))


def through(plan: xd.Plan, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """dispatch and combine alone."""
    received = xd.dispatch(plan, x, weights)
    return xd.combine(plan, received.tokens, received.weights)


class SeenByDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class SeenByFunction(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Plain(torch.Tensor):
    """A subclass whose functions and methods torch asks first."""


class Wrapped(torch.Tensor):
    """A subclass that only the dispatcher asks."""

    names: list[str] = []
    plain: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.names.append(str(func))
        plain = [one.plain if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


def ours(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("crossdock")]


# ---- Nothing looks ------------------------------------------------------------------------------


def test_calls_without_gradients_need_no_dispatcher_and_fill_no_tensor(
    inputs, dispatched, monkeypatch
):
    plan, x, weights = inputs
    expected = through(plan, x, weights)
    order = plan.order

    def zeros_like(*_: object) -> None:
        raise AssertionError("a tensor has been filled")

    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    assert torch.equal(through(plan, x, weights), expected)
    assert plan.order is order and float(order) == 0
    monkeypatch.undo()
    assert not dispatched
    with torch.no_grad():
        out = layer(plan, torch.nn.Parameter(x), weights)
    assert not dispatched
    assert_equal("out", out, batch().expected(0)[0])


def test_order_of_a_call_without_gradients_has_none(inputs, dispatched):
    plan, x, weights = inputs
    received = xd.dispatch(plan, x.requires_grad_(), weights)
    chained = plan.order
    assert chained.requires_grad
    with torch.no_grad():
        xd.combine(plan, received.tokens, received.weights)
    assert dispatched == OPERATORS[:1]
    assert not plan.order.requires_grad and chained.requires_grad and float(plan.order) == 0
    xd.combine(plan, received.tokens, received.weights).sum().backward()
    assert x.grad is not None


def test_results_in_inference_mode_are_inference_tensors(inputs, dispatched):
    plan, x, weights = inputs
    expected = through(plan, x, weights)
    with torch.inference_mode():
        received = xd.dispatch(plan, x, weights)
        out = xd.combine(plan, received.tokens, received.weights)
    assert not dispatched
    assert torch.equal(out, expected)
    assert out.is_inference() and received.tokens.is_inference()


# ---- Something looks ----------------------------------------------------------------------------


def all_threads(*_: object) -> Any:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(experimental_config=config)


OBSERVERS: dict[str, Callable[[torch.device], Any]] = {
    "dispatch_mode": lambda _: SeenByDispatch(),
    "function_mode": lambda _: SeenByFunction(),
    "default_device": lambda device: device,
    "autocast": lambda device: torch.autocast(device.type, dtype=torch.bfloat16),
    "profiler": lambda _: torch.profiler.profile(),
    "profiler_of_all_threads": all_threads,
    "autograd_profiler": lambda _: torch.autograd.profiler.profile(),
    "legacy_profiler": lambda _: torch.autograd.profiler_legacy.profile(),
}


@pytest.mark.parametrize("observer", OBSERVERS)
def test_observers_see_operators(inputs, dispatched, observer):
    plan, x, weights = inputs
    expected = through(plan, x, weights)
    with OBSERVERS[observer](x.device) as seen:
        got = through(plan, x, weights)
    assert dispatched == OPERATORS
    assert torch.equal(got, expected)
    if hasattr(seen, "names"):
        assert ours(seen.names) == OPERATORS
    if observer == "profiler":
        assert {"crossdock::dispatch", "crossdock::combine"} <= {one.name for one in seen.events()}
    through(plan, x, weights)
    assert dispatched == OPERATORS


def test_profiler_of_another_thread_sees_operators(inputs, dispatched):
    plan, x, weights = inputs
    with all_threads() as profiler:
        thread = threading.Thread(target=through, args=(plan, x, weights))
        thread.start()
        thread.join()
    assert dispatched == OPERATORS
    assert {"crossdock::dispatch", "crossdock::combine"} <= {one.name for one in profiler.events()}


def test_recorded_calls_go_through_the_dispatcher(inputs, dispatched):
    plan, x, weights = inputs
    through(plan, x.requires_grad_(), weights)
    assert dispatched == OPERATORS


def test_subclasses_see_operators(inputs, dispatched):
    plan, x, weights = inputs
    expected = xd.dispatch(plan, x, weights)
    got = xd.dispatch(plan.detach(), x.as_subclass(Plain), weights)
    assert torch.equal(got.tokens, expected.tokens)
    assert dispatched == OPERATORS[:1]
    wrapped = torch.Tensor._make_subclass(Wrapped, weights)
    wrapped.plain = weights
    Wrapped.names.clear()
    got = xd.dispatch(plan.detach(), x, wrapped)
    assert torch.equal(got.weights, expected.weights)
    assert dispatched == OPERATORS[:1] * 2
    assert ours(Wrapped.names) == OPERATORS[:1]


def test_compilers_and_tracers_see_operators(inputs):
    plan, x, weights = inputs
    expected = through(plan, x, weights)

    def traced(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return through(plan.detach(), x, weights)

    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        compiled.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    assert torch.equal(torch.compile(traced, backend=backend, fullgraph=True)(x, weights), expected)
    assert ours(compiled) == OPERATORS
    graph = make_fx(traced)(x, weights)
    assert ours([str(node.target) for node in graph.graph.nodes]) == OPERATORS
    assert torch.equal(graph(x, weights), expected)
    rows = xd.dispatch(plan, x).tokens
    recorded = torch.jit.trace(lambda rows: xd.combine(plan.detach(), rows), rows)
    assert "crossdock::combine" in {node.kind() for node in recorded.graph.nodes()}


def test_fake_tensors_move_no_rows(inputs, dispatched):
    plan, x, weights = inputs
    operations = plan.group.stats().calls
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        received = xd.dispatch(plan.detach(), fake.from_tensor(x), weights)
    outside = xd.dispatch(plan.detach(), fake.from_tensor(x), fake.from_tensor(weights))
    for made in received.tokens, outside.tokens:
        assert isinstance(made, FakeTensor) and made.shape == (plan.group.rows, x.shape[1])
    assert dispatched == OPERATORS[:1] * 2
    assert plan.group.stats().calls == operations


def test_transforms_see_operators(inputs, dispatched):
    plan, x, weights = inputs
    expected = through(plan, x, weights)
    with pytest.raises(RuntimeError, match=r"vmap|[Bb]atching rule"):
        torch.vmap(lambda rows: xd.dispatch(plan.detach(), rows, weights).tokens)(x[None])
    assert dispatched == OPERATORS[:1]
    made = torch.func.functionalize(lambda x: through(plan.detach(), x, weights))(x)
    assert torch.equal(made, expected)
    assert dispatched == [OPERATORS[0], *OPERATORS]


def test_tensors_that_are_not_their_memory_are_made_so(inputs, dispatched):
    plan, x, weights = inputs
    negated, expected = torch._neg_view, xd.dispatch(plan, x, weights)
    assert torch.equal(xd.dispatch(plan, negated(x)).tokens, -expected.tokens)
    assert torch.equal(xd.dispatch(plan, x, negated(weights)).weights, -expected.weights)
    out = xd.combine(plan, expected.tokens)
    assert torch.equal(xd.combine(plan, negated(expected.tokens)), -out)
    assert dispatched == [OPERATORS[0], *OPERATORS]
    assert not _direct.unobserved(plan.data, torch._efficientzerotensor((2,), device=x.device))


# ---- Calls that are no operators ----------------------------------------------------------------

PORTIONS = {"num_sms": {"num_sms": 1}, "part": {"part": 1}}


def wrapped(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.Tensor._make_subclass(Wrapped, tensor)
    made.plain = tensor
    return made


NO_MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a negated": torch._neg_view,
    "a negated .*conjugated": lambda tensor: torch.complex(tensor, tensor).conj(),
    "a negated or": lambda tensor: torch.complex(tensor, tensor).conj().imag,
    "a Plain": lambda tensor: tensor.as_subclass(Plain),
    "a Wrapped": wrapped,
    "one of .*ZeroTensor": lambda tensor: torch._efficientzerotensor(
        tensor.shape, dtype=tensor.dtype, device=tensor.device
    ),
}


@pytest.mark.parametrize("portion", PORTIONS.values(), ids=PORTIONS)
def test_parts_take_tensors_only_that_are_their_memory(inputs, portion):
    plan, x, weights = inputs
    received = xd.dispatch(plan, x, weights)
    rows, beside = received.tokens, received.weights
    out = xd.combine(plan, rows, beside)
    for words, made in NO_MEMORY.items():
        into = received._replace(weights=made(beside))
        calls: dict[str, Callable[[], object]] = {
            "tokens": lambda: xd.dispatch(plan, made(x), weights, **portion),
            "topk_weights": lambda: xd.dispatch(plan, x, made(weights), **portion),
            "out.weights": lambda: xd.dispatch(plan, x, weights, out=into, **portion),
            "expert_out": lambda: xd.combine(plan, made(rows), beside, **portion),
            "weights": lambda: xd.combine(plan, rows, made(beside), **portion),
            "out": lambda: xd.combine(plan, rows, beside, out=made(out.clone()), **portion),
        }
        for name, call in calls.items():
            with pytest.raises(ValueError, match=f" {name}: expected .* in memory, got {words}"):
                call()
    parameter = torch.nn.Parameter(x)
    with torch.no_grad():
        assert torch.equal(xd.dispatch(plan, parameter, weights, **portion).tokens, rows)
    assert torch.equal(xd.combine(plan, rows, beside, **portion), out)


@pytest.mark.parametrize("portion", PORTIONS.values(), ids=PORTIONS)
def test_parts_are_refused_where_operators_have_to_be_seen(inputs, portion):
    plan, x, weights = inputs
    received = xd.dispatch(plan, x, weights)
    plan = plan.detach()

    def parts(x: torch.Tensor) -> torch.Tensor:
        return xd.dispatch(plan, x, weights, **portion).tokens

    def sums(rows: torch.Tensor) -> torch.Tensor:
        return xd.combine(plan, rows, **portion)

    def in_mode(mode: Any) -> Callable[..., Any]:
        def call(function: Any, given: torch.Tensor) -> None:
            with mode:
                function(given)

        return call

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    observers = (
        lambda function, given: make_fx(function)(given),
        torch.jit.trace,
        lambda function, given: torch.func.functionalize(function)(given),
        lambda function, given: torch.vmap(function)(given[None]),
        in_mode(SeenByDispatch()),
        in_mode(SeenByFunction()),
        in_mode(fake),
        lambda function, given: function(fake.from_tensor(given)),
    )
    for call in observers:
        for function, given in ((parts, x), (sums, received.tokens)):
            with pytest.raises(ValueError, match="in modes, tracers and|that is its elements"):
                call(function, given)
    assert torch.equal(parts(x), received.tokens)


@pytest.mark.parametrize("observer", list(OBSERVERS)[2:])
def test_other_observers_let_parts_go_on(inputs, dispatched, observer):
    plan, x, weights = inputs
    expected = through(plan, x, weights)
    with OBSERVERS[observer](x.device) as seen:
        received = xd.dispatch(plan, x, weights, part=1)
        got = xd.combine(plan, received.tokens, received.weights, num_sms=1)
    assert torch.equal(got, expected)
    if observer == "profiler":
        assert {"crossdock::dispatch", "crossdock::combine"} <= {one.name for one in seen.events()}
    assert not dispatched


class Layer(torch.nn.Module):
    """Scales tokens and takes them through an exchange."""

    def __init__(self, plan: xd.Plan) -> None:
        super().__init__()
        self.plan = plan
        self.scale = torch.nn.Parameter(torch.ones(1, device=plan.data.device))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return layer(self.plan.detach(), x * self.scale, weights)


@on_ranks(2)
def test_hooks_of_ddp_are_as_ever(me: Rank) -> None:
    device = where()
    case = batch(*range(3, 3 + me.num_ranks))
    with joined(), usual_device(), pytest.MonkeyPatch.context() as patch:
        names = watched_operators(patch, _ops)
        topk_idx, x, weights, grad_out = case.local(me.rank, device=device)
        group = case.group()
        model = DistributedDataParallel(Layer(group.prepare(topk_idx)))
        hooked: list[int] = []

        def hook(_, bucket):
            hooked.append(bucket.index())
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, hook)
        expected, grad_x, _ = case.expected(me.rank)
        with torch.no_grad():
            assert_equal("out", model(x, weights), expected)
        assert not names and not hooked
        out = model(x, weights)
        out.backward(grad_out)
        assert_equal("out", out.detach(), expected)
        assert_equal("gradient", x.grad, grad_x)
        assert names == OPERATORS and hooked == [0]


# ---- Products -----------------------------------------------------------------------------------


PRODUCTS = {
    "tp_all_gather_matmul": tp.all_gather_matmul,
    "tp_matmul_reduce_scatter": tp.matmul_reduce_scatter,
    "tp_matmul_all_reduce": tp.matmul_all_reduce,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_without_gradients_need_no_dispatcher(monkeypatch, name):
    device, product = where(), PRODUCTS[name]
    with usual_device(), xd.init(device=device):
        operators = watched_operators(monkeypatch, _functions)
        context = tp.TpContext(max_tokens=4, max_k=16, max_n=16, dtype=torch.float32)
        x, weight = (torch.ones(rows, 16, device=device) for rows in (4, 8))
        weight = torch.nn.Parameter(weight)

        def multiplied(x: torch.Tensor) -> torch.Tensor:
            return product(x, weight.t(), context, algo="sequential")

        with torch.no_grad():
            assert float(multiplied(x).sum()) == 16 * 4 * 8
            assert not operators
            with SeenByDispatch() as seen:
                assert float(multiplied(x).sum()) == 16 * 4 * 8
            assert ours(seen.names) == operators == [f"crossdock.{name}.default"]
            with pytest.raises(TypeError, match="float64"):
                multiplied(x.double())
        multiplied(x).sum().backward()
        assert operators == [f"crossdock.{name}.default"] * 2
        assert weight.grad is not None and float(weight.grad[0, 0]) == 4
        context.close()


# ---- Another torch ------------------------------------------------------------------------------


def loaded_again() -> Any:
    """The module as another torch would find it."""
    spec = importlib.util.spec_from_file_location("crossdock.torch._again", _direct.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_this_torch_is_trusted(inputs):
    assert loaded_again().unobserved(inputs[0].data, inputs[1])


NAMES = (
    "_C.DispatchKeySet",
    "_C._dispatch_tls_local_include_set",
    "_C._dispatch_keys",
    "_C._is_any_autocast_enabled",
    "_C._autograd._profiler_enabled",
    "autograd.profiler._is_profiler_enabled",
)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_name_of_torch_every_call_is_dispatched(inputs, monkeypatch, name):
    monkeypatch.delattr(f"torch.{name}")
    assert not loaded_again().unobserved(inputs[0].data, inputs[1])


@pytest.mark.parametrize("name", NAMES[1:])
def test_names_that_tell_something_else_are_not_trusted(inputs, monkeypatch, name):
    none = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    other = {"_keys": lambda _: none, "include_set": lambda: none}
    other["_enabled"] = lambda: False
    if "profiler" in name:  # a count of profilers, say
        other = {"_profiler_enabled": lambda: 0, "_is_profiler_enabled": 0}
    found = next(value for end, value in other.items() if name.endswith(end))
    monkeypatch.setattr(f"torch.{name}", found)
    assert not loaded_again().unobserved(inputs[0].data, inputs[1])
