"""Releases of Megatron that the tests know, and its layers on any device, for ranks' processes."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from support import Rank, run_ranks

HIDDEN, EXPERTS, TOPK, TOKENS = 32, 8, 2, 10

# By release: the folder that has it; None = that of the environment's packages. A process has one
# of them: the newest, unless it is fresh.
BESIDE = pathlib.Path(sys.prefix) / "beside"  # tools/requirements-beside.txt
RELEASES = {"0.19.2": BESIDE, "0.16.1": None}
NEWEST, *_ = RELEASES


def on_release(num_ranks: int, fn: Callable[..., Any], release: str, *args: Any) -> list[Any]:
    """Runs a function as `run_ranks` does, in processes that may `use` the release."""
    folder = RELEASES[release]
    if not ((folder / "megatron").is_dir() if folder else importlib.util.find_spec("megatron")):
        pytest.skip(f"megatron-core {release} is not installed")
    return run_ranks(num_ranks, fn, release, *args, fresh=release != NEWEST)


def installed() -> str | None:
    """The newest release that there is here, whether the tests know it or not."""
    if (BESIDE / "megatron").is_dir():
        return NEWEST
    return version("megatron-core") if importlib.util.find_spec("megatron") else None


def use(release: str) -> None:
    """Imports what the tests need of that release."""
    if "megatron.core" not in sys.modules:
        if folder := RELEASES.get(release):
            sys.path.insert(0, str(folder))
        importlib.import_module("torch._dynamo")  # which must know that there is no Triton
        with mock.patch.object(builtins, "__import__", _import_without_triton):
            from megatron.core.models.gpt import moe_module_specs  # noqa: F401
    import megatron.core
    from megatron.core.transformer.moe import moe_utils

    # For fused experts it is 256, of kernels that are not there: more than a test's rows.
    moe_utils.get_align_size_for_quantization = lambda config: 0
    # Within a git repository it adds the commit of that to its version.
    assert megatron.core.__version__.partition("+")[0] == release


_import = builtins.__import__
_triton = mock.MagicMock(__version__="3.4.0")


def _import_without_triton(name: str, globals: Any = None, *args: Any, **named: Any) -> Any:
    """Gives Megatron something in Triton's place if that is not there: no test runs kernels."""
    user = (globals or {}).get("__name__", "")
    if name.split(".")[0] == "triton" and user.startswith("megatron."):
        if importlib.util.find_spec("triton") is None:
            return _triton
    return _import(name, globals, *args, **named)


class NoStream:
    """Stands for a CUDA stream, and for an event in one, where there is no CUDA."""

    def wait_stream(self, other: object) -> None: ...

    def record_event(self) -> NoStream:
        return self

    def record(self, other: object) -> None: ...

    def wait(self, other: object) -> None: ...

    def synchronize(self) -> None: ...


def splits_as_lists(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Does as Megatron's method on a GPU: numbers of rows are the host's."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if isinstance(value := getattr(dispatcher, name, None), torch.Tensor):
            setattr(dispatcher, name, value.tolist())
    return tokens_per_expert


@contextlib.contextmanager
def megatron_of(me: Rank, release: str) -> Any:
    """Has Megatron compute on torch's default device, with its experts over all ranks."""
    use(release)
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    from crossdock.compat import megatron

    with (
        pytest.MonkeyPatch.context() as patch,
        # Its fused functions are compiled by torch, which takes long and changes no dispatcher.
        torch._dynamo.config.patch(disable=True),
    ):
        if torch.get_default_device().type == "cpu":
            _expect_no_gpu(patch)
        # A name that is not there without TransformerEngine.
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        parallel_state.initialize_model_parallel(expert_model_parallel_size=me.num_ranks)
        try:
            yield megatron
        finally:
            megatron.uninstall()
            parallel_state.destroy_model_parallel()


def _expect_no_gpu(patch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    stream, zeros = NoStream(), torch.zeros

    def zeros_here(*shape: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return zeros(*shape, device=None if device == "cuda" else device, **options)

    patch.setattr(torch, "zeros", zeros_here)
    patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    patch.setattr(torch.cuda, "Event", lambda *_, **__: stream)
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(torch.cuda, "Stream", lambda *_, **__: stream)
    patch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    its_own = token_dispatcher.MoEAlltoAllTokenDispatcher
    patch.setattr(its_own, "_maybe_dtoh_and_synchronize", splits_as_lists)


def config_of(num_ranks: int, kind: str, **options: Any) -> Any:
    """A model of one MoE layer, or of `num_layers`, with that kind of dispatcher."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=options.pop("num_layers", 1),
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        expert_model_parallel_size=num_ranks,
        moe_token_dispatcher_type=kind,
        use_cpu_initialization=True,
        add_bias_linear=False,
        **options,
    )


def make_layer(me: Rank, kind: str, **options: Any) -> Any:
    """One MoE layer: of the same numbers for any dispatcher."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.spec_utils import build_module

    config = config_of(me.num_ranks, kind, **options)
    make = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    if isinstance(make, functools.partial):  # as newer releases have it
        layer = make(config=config, pg_collection=get_default_pg_collection())
    else:
        layer = build_module(make, config=config)
    local = EXPERTS // me.num_ranks
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            seed, first = sum(map(ord, name)), 0
            if "local_experts" in name:
                number = int(name.split(".local_experts.")[1].split(".")[0])
                first = me.rank * local + number
                seed = sum(map(ord, name.replace(f".{number}.", ".")))
            generator = torch.Generator("cpu").manual_seed(1000 * first + seed)
            drawn = torch.randn(parameter.shape, generator=generator, device="cpu")
            parameter.copy_(drawn / HIDDEN**0.5)
    return layer


class Into(torch.autograd.Function):
    """Puts rows into a buffer, and behind them what nobody may read."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.rows = len(rows)
        ctx.mark_dirty(buffer)
        buffer.fill_(torch.nan)[: ctx.rows] = rows
        return buffer

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[: ctx.rows], None


class GradientInto(torch.autograd.Function):
    """Takes the first rows of a tensor, and puts their gradient into a buffer as `Into` does."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, real: int, buffer: torch.Tensor) -> torch.Tensor:
        ctx.buffer = buffer
        return rows[:real].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.buffer.fill_(torch.nan)[: len(grad)] = grad
        return ctx.buffer, None, None


class FusedExperts(torch.nn.Module):
    """Stands for TransformerEngine's fused experts, which take rows of which some are none's.

    Args:
        experts: Megatron's own, which compute.

    Attributes:
        addresses: of the buffers that it was given last.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = experts

    def forward(
        self,
        rows: torch.Tensor,
        counts: torch.Tensor,
        probs: torch.Tensor,
        output_buffer: torch.Tensor | None = None,
        grad_input_buffer: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        self.addresses = [
            None if one is None else one.data_ptr() for one in (output_buffer, grad_input_buffer)
        ]
        into = torch.empty_like(rows, requires_grad=False)
        real = int(counts.sum())
        used = GradientInto.apply(
            rows, real, torch.empty_like(into) if grad_input_buffer is None else grad_input_buffer
        )
        out, _ = self.experts(used, counts, probs[:real])
        return Into.apply(out, into if output_buffer is None else output_buffer), None


def run_layer(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The layer's result."""
    return layer(x)[0]


def losses(
    me: Rank,
    kind: str,
    change: Callable[[Any], None] | None = None,
    num_layers: int = 1,
    run: Callable[[Any, torch.Tensor], torch.Tensor] = run_layer,
    **options: Any,
) -> Any:
    """Of a few steps, whose last bits differ if anything does, and sizes of gradients.

    Args:
        kind: of dispatcher.
        change: is given each layer before the first step.
        num_layers: one behind the other.
        run: calls a layer.
        options: of the layers.
    """
    layers = torch.nn.ModuleList([make_layer(me, kind, **options) for _ in range(num_layers)])
    for layer in layers if change else ():
        change(layer)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    generator = torch.Generator("cpu").manual_seed(2 + me.rank)
    found = []
    for _ in range(4):
        drawn = torch.randn(TOKENS // 2, 2, HIDDEN, generator=generator, device="cpu")
        x = drawn.to(torch.get_default_device()).requires_grad_()
        out = functools.reduce(lambda rows, layer: run(layer, rows), layers, x)
        loss = (out - x.detach().flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for layer in layers:
            dist.all_reduce(layer.router.weight.grad)
        optimizer.step()
        assert x.grad is not None
        found += [loss.item(), x.grad.norm().item()]
    return found
