"""MoELayer on GPUs: the grouped kernel, whole layers, and CUDA graphs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import crossdock.torch as xd
from crossdock.torch import grouped, grouped_fp8
from crossdock.torch.layers import layer as moe_layer
from support import Rank, on_ranks
from torch_ranks import gpu_ranks, process_group

pytestmark = pytest.mark.gpu

HIDDEN, FFN, EXPERTS, TOPK, TOKENS = 64, 32, 8, 2, 48
COUNTS, TAIL = (8, 0, 24, 16), 16  # rows of zones, in multiples of 8; rows of nobody


on_gpus = on_ranks(gpu_ranks()[-1], timeout=200)


@contextmanager
def joined(me: Rank) -> Iterator[xd.Comm]:
    """This rank in torch.distributed and in a communicator, with a GPU of its own."""
    device = torch.device("cuda", me.rank)
    torch.cuda.set_device(device)
    with process_group("nccl", device_id=device), xd.init(device=device) as comm:
        yield comm


def small_integers(*shape: int, seed: int) -> torch.Tensor:
    """Sums of up to 64 products are exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to("cuda", torch.bfloat16)


@contextmanager
def products_of(library: bool, me: Rank) -> Iterator[None]:
    """Products are the library's, as there is a communicator; or torch's, as there is none."""
    if not library:
        torch.cuda.set_device(me.rank)
        yield
        return
    with joined(me), mock.patch.object(grouped, "run_product", wraps=grouped.run_product) as run:
        with mock.patch.object(grouped_fp8, "run_product", run):
            yield
        assert run.call_count > 0


@contextmanager
def no_host_asked() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_ranks(1)
@pytest.mark.parametrize(
    ("library", "dtype"),
    [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)],
)
def test_grouped_kernel_asks_no_host_and_reads_no_tail(
    me: Rank, library: bool, dtype: torch.dtype
) -> None:
    with products_of(library, me):
        x = small_integers(sum(COUNTS) + TAIL, 16, seed=1).to(dtype)
        grad = small_integers(sum(COUNTS) + TAIL, 24, seed=3).to(dtype)
        x[-TAIL:] = grad[-TAIL:] = torch.nan
        x.requires_grad_()
        weight = small_integers(len(COUNTS), 16, 24, seed=2).to(dtype).requires_grad_()
        offsets = torch.tensor([0, *COUNTS]).cumsum(0).to("cuda", torch.int32)
        xd.grouped_mm(x, weight, offsets).backward(grad)  # a first call may set up things
        x.grad = weight.grad = None
        with no_host_asked():
            y = xd.grouped_mm(x, weight, offsets)
            y.backward(grad)
        first = 0
        for expert, rows in enumerate(COUNTS):
            zone = slice(first, first + rows)
            first += rows
            assert torch.equal(y[zone], x[zone] @ weight[expert])
            assert torch.equal(x.grad[zone], grad[zone] @ weight[expert].t())
            assert torch.equal(weight.grad[expert], x[zone].t() @ grad[zone])


@on_ranks(1)
def test_the_librarys_kernel_has_the_bits_of_torchs(me: Rank) -> None:
    generator = torch.Generator().manual_seed(5)
    with joined(me):
        for counts in ((64, 0, 24, 168), (3, 0, 25, 1000)):
            x = torch.randn(sum(counts), 520, generator=generator).to("cuda", torch.bfloat16)
            weight = torch.randn(len(counts), 520, 1032, generator=generator)
            weight = weight.to("cuda", torch.bfloat16)
            offsets = torch.tensor([0, *counts]).cumsum(0).to("cuda", torch.int32)
            for matrices in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
                assert torch.equal(
                    xd.grouped_mm(x, matrices, offsets),
                    grouped._GROUPED_MM(x, matrices, offs=offsets[1:]),
                )


@on_ranks(1)
def test_operands_that_no_kernel_takes_are_multiplied_all_the_same(me: Rank) -> None:
    """Rows of other than 16 bytes, or that begin elsewhere; one expert's matrix for all."""
    with joined(me):
        offsets = torch.tensor([0, *COUNTS]).cumsum(0).to("cuda", torch.int32)
        wide = small_integers(sum(COUNTS), 25, seed=1)
        weight = small_integers(len(COUNTS), 25, 24, seed=2)
        for x, matrices in (
            (wide[:, 1:], weight[:, 1:]),
            (wide[:, :20], weight[:, :20]),
            (wide[:, :16].contiguous(), weight[:1, :16].contiguous().expand(4, 16, 24)),
        ):
            y = xd.grouped_mm(x, matrices, offsets)
            bounds = offsets.tolist()
            for expert, (first, end) in enumerate(zip(bounds, bounds[1:])):
                assert torch.equal(y[first:end], x[first:end] @ matrices[expert])


@on_ranks(1)
@pytest.mark.parametrize("library", [False, True])
def test_grouped_fp8_kernel_is_the_cpus_arithmetic(me: Rank, library: bool) -> None:
    """As on the CPU, where elements are rounded alike; also zones that begin at odd rows."""
    with products_of(library, me):
        for counts in (COUNTS, (3, 0, 25, 16)):
            generator = torch.Generator().manual_seed(4)
            x = torch.randn(sum(counts) + TAIL, 64, generator=generator).bfloat16()
            weight = torch.randn(len(counts), 64, 48, generator=generator).bfloat16()
            offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
            x[-TAIL:] = torch.nan
            wanted = xd.grouped_mm_fp8(x, weight, offsets)[:-TAIL]
            ours = [tensor.cuda() for tensor in (x, weight, offsets)]
            xd.grouped_mm_fp8(*ours)  # a first call may set up things
            with no_host_asked():
                got = xd.grouped_mm_fp8(*ours)
            torch.testing.assert_close(got[:-TAIL].cpu(), wanted, rtol=2**-7, atol=1e-2)


def make_layer(comm: xd.Comm, **options) -> xd.MoELayer:
    sizes = {"max_tokens_per_rank": TOKENS}
    return xd.MoELayer(HIDDEN, FFN, EXPERTS, TOPK, comm=comm, **sizes, **options)


class Watched(torch.autograd.Function):
    """The identity, which notes the streams of its forward and its backward pass."""

    @staticmethod
    def forward(ctx, x, streams):
        ctx.streams = streams
        streams.append(torch.cuda.current_stream(x.device))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.streams.append(torch.cuda.current_stream(grad.device))
        return grad, None


@on_gpus
def test_shared_experts_run_in_a_stream_of_their_own(me: Rank) -> None:
    with joined(me) as comm:
        streams: list[torch.cuda.Stream] = []

        class Shared(torch.nn.Module):
            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                return Watched.apply(tokens, streams)

        layer = make_layer(comm, shared_experts=Shared(), dtype=torch.float32)
        x = torch.randn(TOKENS, HIDDEN, device="cuda").requires_grad_()
        layer(x).hidden.sum().backward()
        forward, backward = streams
        assert forward == backward != torch.cuda.current_stream()


@on_gpus
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_shared_experts_beside_have_the_bits_of_a_sequence(
    me: Rank, reentrant: bool | None
) -> None:
    """Forward and backward, also where activation checkpointing computes the layer twice."""
    with joined(me) as comm:
        layer = make_layer(comm, shared_experts=2, dtype=torch.bfloat16)

        def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if reentrant is None:
                return tuple(layer(x))
            return checkpoint(lambda x: tuple(layer(x)), x, use_reentrant=reentrant)

        x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        beside = [step(layer, x, run) for _ in range(5)]
        with mock.patch.object(moe_layer, "Beside", InSequence):
            wanted = step(layer, x, run)
        for found in beside:
            for got, expected in zip(found, wanted, strict=True):
                assert torch.equal(got, expected)


class InSequence:
    """A stand-in for `Beside` without a stream."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        self.result = lambda: function(x)


def step(layer, x: torch.Tensor, run=None) -> list[torch.Tensor]:
    """Forward and backward; output and all gradients, copied."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    hidden, aux_loss, load, _ = (run or layer)(x)
    (hidden.float().square().sum() + aux_loss).backward()
    found = [hidden, aux_loss, load, x.grad, *(p.grad for p in layer.parameters())]
    return [xd.local_tensor(tensor.detach()).clone() for tensor in found]


@on_gpus
def test_autocast_asks_a_callers_group_for_the_kernels_alignment(me: Rank) -> None:
    """Torch's kernel would end the process of whoever trains with zones that begin elsewhere."""
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "max_topk": TOPK}
    with joined(me) as comm:
        x = torch.randn(TOKENS, HIDDEN, device="cuda")
        for alignment in (8, 4):
            group = xd.EpGroup(
                **sizes,
                max_tokens_per_rank=TOKENS,
                dtype=torch.float32,
                alignment=alignment,
                comm=comm,
            )
            layer = xd.MoELayer(HIDDEN, FFN, EXPERTS, TOPK, group=group)
            with torch.autocast("cuda", torch.bfloat16):
                if alignment == 8:
                    layer(x).hidden.sum().backward()
                    continue
                with pytest.raises(ValueError, match="group: expected an alignment in multiples"):
                    layer(x)


@on_gpus
def test_inference_is_captured_whatever_the_backend_of_the_group(me: Rank) -> None:
    """Gloo's operations on a GPU's tensors could not be."""
    device = torch.device("cuda", me.rank)
    torch.cuda.set_device(device)
    with process_group("gloo"), xd.init(device=device) as comm, torch.no_grad():
        layer = make_layer(comm, dtype=torch.bfloat16).eval()
        x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
        expected = layer(x).hidden
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layer(x).hidden
        graph.replay()
        torch.cuda.synchronize()
        layer.group.check()
        assert torch.equal(got, expected)


@on_gpus
def test_decoding_is_captured_and_follows_the_routing(me: Rank) -> None:
    """Graphs of batches of several sizes, whose replays have the bits of the bulk operations."""
    with joined(me) as comm, torch.no_grad():
        options = {"shared_experts": 1, "decode_tokens": 8, "dtype": torch.bfloat16}
        layer = make_layer(comm, **options).eval()
        for tokens in (1, 8):
            x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
            layer(x, decode=True)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = layer(x, decode=True).hidden
            for _ in range(3):
                x.normal_()
                wanted = layer(x).hidden
                got.fill_(torch.nan)
                graph.replay()
                torch.cuda.synchronize()
                layer.decode_group.check()
                assert torch.equal(got, wanted)


@on_gpus
def test_layer_eager_and_in_graphs_with_changing_routing(me: Rank) -> None:
    with joined(me) as comm:
        for fp8 in (False, True):
            check_graphs(me, comm, fp8)


def check_graphs(me: Rank, comm: xd.Comm, fp8: bool) -> None:
    """The bfloat16 layer, eager against graphs."""
    place = {"dtype": torch.bfloat16, "device": comm.device}
    layer = make_layer(
        comm,
        experts=xd.GroupedExperts(EXPERTS // me.num_ranks, HIDDEN, FFN, fp8=fp8, **place),
        shared_experts=1,
        aux_loss_weight=0.1,
        dtype=torch.bfloat16,
    )
    generator = torch.Generator("cuda").manual_seed(7 + me.rank)
    batches = [
        torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator).bfloat16() for _ in range(3)
    ]
    batches.append(batches[0][:1].expand(TOKENS, -1).contiguous())  # two experts get all tokens
    expected = [step(layer, batch) for batch in batches]
    graphed = torch.cuda.make_graphed_callables(layer, (batches[0].clone().requires_grad_(),))
    for _ in range(2):
        for batch, wanted in zip(batches, expected):
            for got, tensor in zip(step(graphed, batch), wanted):
                assert torch.isfinite(got).all()
                torch.testing.assert_close(got, tensor, rtol=2e-2, atol=2e-2)
    layer.group.check()
