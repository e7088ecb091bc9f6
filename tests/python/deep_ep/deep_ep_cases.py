"""The part of every rank in the tests of the Buffer, on the CPU and on GPUs.

Each case makes its tensors where the Buffer is, calls it, and compares every bit with the
reference.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_ranks
from crossdock.deep_ep import Buffer
from crossdock.errors import Mismatch
from deep_ep_reference import Batch, expert_outputs, make_batch, make_bias
from support import Rank, on_ranks, run_ranks

SECONDS = 20  # much less than the timeout, which peers must not sit out
Mistake = tuple[dict[str, Any], str]  # arguments in place of those of a good call; the error's text

MODES = [
    "everything",
    "by_rank_alone",
    "worst_case",
    "fp8_pairs",
    "plain_bytes",
    "repeated_ids",
    "slices",
    "outgrown",
]
ASYNC = {"previous": True, "async_finish": True}
STREAMS = [
    {"async_finish": True},
    {"previous": True},
    ASYNC,
    {**ASYNC, "allocate_on_comm_stream": True},
]


def name_of(streams: dict[str, bool]) -> str:
    return "+".join(streams) or "waiting"


@contextlib.contextmanager
def process_group(backend: str = "gloo") -> Iterator[None]:
    """torch's process group of all ranks. With gloo the ranks see no GPU."""
    if backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with torch_ranks.process_group(backend):
        yield


@contextlib.contextmanager
def new_buffer(**options: Any) -> Iterator[Buffer]:
    """A Buffer over all ranks of torch's process group, destroyed at the end."""
    buffer = Buffer(dist.group.WORLD, explicitly_destroy=True, **options)
    yield buffer
    buffer.destroy()


def run_buffers(
    num_ranks: int,
    test: Callable[..., None],
    *args: Any,
    apart: bool = False,
    backend: str = "gloo",
    **options: Any,
) -> None:
    """Runs ``test(buffer, *args)`` on ranks that have a Buffer with these options.

    With gloo it is on the CPU; ranks of nccl have a GPU each.
    """
    run_ranks(num_ranks, _with_buffer, test, args, backend, options, apart=apart, timeout=180)


def _with_buffer(
    me: Rank,
    test: Callable[..., None],
    args: tuple[Any, ...],
    backend: str,
    options: dict[str, Any],
) -> None:
    if backend == "nccl":
        torch.cuda.set_device(me.rank)
    with process_group(backend), new_buffer(**options) as buffer:
        test(buffer, *args)


# Makes a function ``fn(buffer, *args)`` a test as on_ranks does; more options are the Buffer's.
on_buffers = functools.partial(on_ranks, run=run_buffers)


def on_gpus(*num_ranks: Any, **options: Any) -> Callable[..., Any]:
    """`on_buffers` with a GPU for each rank; without numbers the ranks are as many as possible."""
    most = torch_ranks.gpu_ranks()[-1:]
    return on_buffers(*num_ranks or most, backend="nccl", **options)


def same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Fails unless type, shape and every bit are equal."""
    assert got.dtype == want.dtype, f"{name}: expected {want.dtype}, got {got.dtype}"
    assert got.shape == want.shape, f"{name}: expected {list(want.shape)}, got {list(got.shape)}"
    assert got.is_contiguous(), name
    if got.numel() == 0:
        return
    got, want = got.cpu().flatten().view(torch.uint8), want.cpu().flatten().view(torch.uint8)
    differing = (got != want).nonzero()
    assert len(differing) == 0, f"{name}: {len(differing)} bytes differ, first {differing[0]}"


class Caller:
    """One rank's calls for one batch.

    Args:
        buffer: whose methods are called.
        batch: of all ranks.
        streams: the arguments about streams, for every call.
    """

    def __init__(self, buffer: Buffer, batch: Batch, **streams: bool) -> None:
        self.buffer = buffer
        self.batch = batch
        self.rank = buffer.rank
        self.device = buffer._live().device
        self.streams = streams
        self.x = self.on_device(batch.x[self.rank])
        self.topk_idx = self.beside_rows(batch.topk_idx[self.rank])
        self.topk_weights = self.beside_rows(batch.topk_weights[self.rank])

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def beside_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """An argument that is no rows: choices, weights or scales."""
        return self.on_device(tensor)

    def events(self) -> dict[str, Any]:
        """Arguments about streams."""
        events = dict(self.streams)
        if events.pop("previous", False):
            events["previous_event"] = self.buffer.capture()
        return events

    def wait(self, event: Any) -> None:
        if self.streams.get("async_finish"):
            event.current_stream_wait()
        else:
            assert event.event is None

    def layout(self) -> dict[str, torch.Tensor]:
        """get_dispatch_layout, checked; as keyword arguments of dispatch."""
        per_rank, per_rdma_rank, per_expert, in_rank, event = self.buffer.get_dispatch_layout(
            self.topk_idx, self.batch.num_experts, **self.events()
        )
        self.wait(event)
        per_host = self.batch.per_host(self.rank)
        if per_host is None:
            assert per_rdma_rank is None
        else:
            same("per host", per_rdma_rank, per_host)
        for name, got, want in zip(
            ("per rank", "per expert", "in rank"),
            (per_rank, per_expert, in_rank),
            self.batch.layout(self.rank),
        ):
            same(name, got, want)
        return {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_rdma_rank": per_rdma_rank,
            "num_tokens_per_expert": per_expert,
            "is_token_in_rank": in_rank,
        }

    def topk(self) -> dict[str, torch.Tensor]:
        return {"topk_idx": self.topk_idx, "topk_weights": self.topk_weights}

    def dispatch(self, x: Any = None, **arguments: Any) -> tuple[Any, ...]:
        """dispatch without a handle, its event waited for."""
        result = self.buffer.dispatch(
            self.x if x is None else x, **self.layout(), **arguments, **self.events()
        )
        self.wait(result[-1])
        return result

    def dispatch_checked(self, alignment: int = 1) -> Any:
        """dispatch with top-k, everything compared; returns the handle."""
        x, idx, weights, per_expert, handle, _ = self.dispatch(
            **self.topk(), expert_alignment=alignment
        )
        self.check_rows(x)
        want_idx, want_weights = self.batch.received_topk(self.rank)
        same("recv_topk_idx", idx, want_idx)
        same("recv_topk_weights", weights, want_weights)
        assert per_expert == self.batch.per_expert(self.rank, alignment)
        assert isinstance(handle, tuple)
        same("rank_prefix_matrix", handle[0], self.batch.prefix())
        return handle

    def check_rows(self, x: torch.Tensor) -> None:
        same("recv_x", x, self.batch.received(self.rank, self.batch.x))

    def cached_checked(self, handle: Any) -> None:
        """dispatch along a handle, compared."""
        x, *middle, event = self.buffer.dispatch(self.x, handle, **self.events())
        self.wait(event)
        assert middle == [None] * 4
        self.check_rows(x)

    def combine_checked(
        self,
        handle: Any,
        seed: int,
        biases: int = 0,
        weights: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """combine of random rows, compared; with no bias, a tensor, or a pair.

        Args:
            weights: columns of weights to be summed; 0 = none.
            dtype: of rows and biases; None = that of the batch.
        """
        outputs = expert_outputs(seed, self.batch, dtype)
        bias = make_bias(seed, self.batch, self.rank, dtype)[:biases]
        given: Any = tuple(self.on_device(one) for one in bias)
        if biases < 2:
            given = given[0] if given else None
        row_weights, all_weights = None, row_weights_of(seed, self.batch, weights)
        if weights:
            row_weights = self.beside_rows(all_weights[self.rank])
        out, combined_weights, event = self.buffer.combine(
            self.on_device(outputs[self.rank]), handle, row_weights, given, **self.events()
        )
        self.wait(event)
        same("combined_x", out, self.batch.combined(self.rank, outputs, bias))
        if not weights:
            assert combined_weights is None
            return
        same("combined_topk_weights", combined_weights, self.batch.combined(self.rank, all_weights))


def row_weights_of(seed: int, batch: Batch, columns: int) -> list[torch.Tensor]:
    """Weights of every rank's rows, also at choices that are no expert of that rank."""
    generator = torch.Generator().manual_seed(seed + 3000)
    return [
        torch.rand(len(batch.rows(rank)), columns, generator=generator)
        for rank in range(batch.num_ranks)
    ]


class SlicingCaller(Caller):
    """Gives contiguous slices of larger tensors, which begin anywhere."""

    def beside_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        larger = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=self.device)
        slice_of_it = larger[1:].view(tensor.shape)
        slice_of_it.copy_(tensor)
        assert tensor.numel() == 0 or slice_of_it.data_ptr() % 16 != 0
        return slice_of_it


def everything(buffer: Buffer, seed: int, **streams: bool) -> None:
    """A batch through all modes: new, cached, combined in every way."""
    batch = make_batch(seed, buffer.group_size)
    caller = Caller(buffer, batch, **streams)
    handle = caller.dispatch_checked()
    caller.cached_checked(handle)
    for biases in (0, 1, 2):
        caller.combine_checked(handle, seed, biases)
    for columns in (3, 8, 32):
        caller.combine_checked(handle, seed, weights=columns)
    caller.combine_checked(handle, seed, 2, weights=3)
    # Rows twice as long as those that were dispatched.
    caller.combine_checked(handle, seed, dtype=torch.float32)
    caller.combine_checked(handle, seed, 2, weights=3, dtype=torch.float32)


def by_rank_alone(buffer: Buffer, seed: int, **streams: bool) -> None:
    """Without top-k the routing is is_token_in_rank, and counts come from the layout."""
    caller = Caller(buffer, make_batch(seed, buffer.group_size), **streams)
    x, idx, weights, per_expert, handle, _ = caller.dispatch(expert_alignment=4)
    caller.check_rows(x)
    assert idx is None and weights is None
    assert per_expert == caller.batch.per_expert(caller.rank, 4)
    same("rank_prefix_matrix", handle[0], caller.batch.prefix())
    caller.cached_checked(handle)
    caller.combine_checked(handle, seed, 1, weights=5)


def worst_case(buffer: Buffer, seed: int, **streams: bool) -> None:
    """num_worst_tokens: that many rows, the real ones first, the rest zero with indices -1."""
    batch = make_batch(seed, buffer.group_size)
    caller = Caller(buffer, batch, **streams)
    rows = buffer.group_size * 17
    for _ in range(3):
        x, idx, weights, per_expert, handle, _ = caller.dispatch(
            **caller.topk(), num_worst_tokens=rows
        )
        real = len(batch.rows(caller.rank))
        want_idx, want_weights = batch.received_topk(caller.rank)
        assert per_expert == []
        assert len(x) == len(idx) == len(weights) == rows
        caller.check_rows(x[:real])
        same("recv_topk_idx", idx[:real], want_idx)
        same("recv_topk_weights", weights[:real], want_weights)
        same("rank_prefix_matrix", handle[0], batch.prefix())
        assert (idx[real:] == -1).all() and (weights[real:] == 0).all() and (x[real:] == 0).all()
        combined, *_ = buffer.combine(x, handle)
        outputs = [batch.received(rank, batch.x) for rank in range(buffer.group_size)]
        same("combined_x", combined, batch.combined(caller.rank, outputs))
        # The next round's tensors take the place of these.
        x.fill_(float("nan"))
        idx.fill_(77)
        weights.fill_(float("nan"))
        del x, idx, weights, combined


def fp8_pairs(buffer: Buffer, seed: int, **streams: bool) -> None:
    """fp8 rows with scales in every form, new and cached, and bfloat16 rows back."""
    hidden = 256
    batch = make_batch(seed, buffer.group_size, hidden=hidden)
    generator = torch.Generator().manual_seed(seed)
    fp8 = [
        torch.randint(0, 120, one.shape, dtype=torch.uint8, generator=generator).view(
            torch.float8_e4m3fn
        )
        for one in batch.x
    ]
    scales = [torch.rand(len(one), hidden // 128, generator=generator) for one in batch.x]
    caller = Caller(buffer, batch, **streams)
    forms = {
        "row-major": lambda tensor: tensor,
        "column-major": lambda tensor: tensor.t().contiguous().t(),
        "packed": lambda tensor: tensor.view(torch.int32),
        "packed, column-major": lambda tensor: tensor.view(torch.int32).t().contiguous().t(),
        "columns with gaps": lambda tensor: (
            torch.cat([tensor, tensor]).t().contiguous().t()[: len(tensor)]
        ),
        "one for all": lambda tensor: tensor[:1].sum().expand(len(tensor), 3),
        "one per token": lambda tensor: tensor[:, 0],
    }
    as_bytes = [one.view(torch.uint8) for one in fp8]
    handle = caller.dispatch_checked()
    x, got = buffer.dispatch(
        (caller.on_device(fp8[caller.rank]), caller.on_device(scales[caller.rank])), handle
    )[0]
    same(
        "recv_x on a handle of bfloat16", x.view(torch.uint8), batch.received(caller.rank, as_bytes)
    )
    same("recv_scales on a handle of bfloat16", got, batch.received(caller.rank, scales))
    for name, form in forms.items():
        pair = (caller.on_device(fp8[caller.rank]), form(caller.on_device(scales[caller.rank])))
        (x, got), *_, handle, _ = caller.dispatch(pair, **caller.topk())
        want = batch.received(caller.rank, [form(one) for one in scales])
        same(f"recv_x {name}", x.view(torch.uint8), batch.received(caller.rank, as_bytes))
        same(f"recv_scales {name}", got, want)
        (x, got), *_, event = buffer.dispatch(pair, handle=handle, **caller.events())
        caller.wait(event)
        same(f"cached recv_x {name}", x.view(torch.uint8), batch.received(caller.rank, as_bytes))
        same(f"cached recv_scales {name}", got, want)
        caller.combine_checked(handle, seed, 2)
        caller.combine_checked(handle, seed, dtype=torch.float32)
        caller.cached_checked(handle)  # bfloat16 rows, as in the backward of combine


def plain_bytes(buffer: Buffer, seed: int, **streams: bool) -> None:
    """Rows of bytes without scales, such as pairs of 4-bit numbers, and rows of numbers back."""
    batch = make_batch(seed, buffer.group_size, hidden=256)
    caller = Caller(buffer, batch, **streams)
    generator = torch.Generator().manual_seed(seed)
    packed = [
        torch.randint(0, 256, (len(one), 128), dtype=torch.uint8, generator=generator)
        for one in batch.x
    ]
    want = batch.received(caller.rank, packed)
    names = ("uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")
    for dtype in (getattr(torch, name) for name in names if hasattr(torch, name)):
        x = caller.on_device(packed[caller.rank]).view(dtype)
        got, *_, handle, _ = caller.dispatch(x, **caller.topk())
        assert got.dtype == dtype
        same(f"recv_x {dtype}", got.view(torch.uint8), want)
        got, *_, event = buffer.dispatch(x, handle, **caller.events())
        caller.wait(event)
        same(f"cached recv_x {dtype}", got.view(torch.uint8), want)
        if dtype != torch.float8_e5m2:  # one number in a byte; it fits by what came before
            caller.combine_checked(handle, seed)
    scales = [torch.rand(len(one), 16, generator=generator) for one in batch.x]
    pair = caller.on_device(packed[caller.rank]), caller.on_device(scales[caller.rank])
    (got, got_scales), *_ = caller.dispatch(pair, **caller.topk())
    same("recv_x beside scales", got, want)
    same("recv_scales", got_scales, batch.received(caller.rank, scales))


def repeated_ids(buffer: Buffer, seed: int, **streams: bool) -> None:
    """Experts drawn with replacement: what a row names again counts once."""
    batch = make_batch(seed, buffer.group_size, topk=6, local_experts=2)
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for idx in batch.topk_idx:
        idx.copy_(torch.randint(-1, batch.num_experts, idx.shape, generator=generator))
        drawn.append(idx.clone())
        for row in idx:
            for k in range(1, len(row)):
                if row[k] in row[:k]:
                    row[k] = -1
    caller = Caller(buffer, batch, **streams)
    caller.topk_idx = caller.on_device(drawn[caller.rank])
    assert not buffer.rank == 0 or (caller.topk_idx.cpu() != batch.topk_idx[0]).any()
    handle = caller.dispatch_checked()
    caller.cached_checked(handle)
    caller.combine_checked(handle, seed, weights=6)


def slices(buffer: Buffer, seed: int, **streams: bool) -> None:
    """Choices, weights and scales that are slices of larger tensors."""
    batch = make_batch(seed, buffer.group_size, hidden=256)
    caller = SlicingCaller(buffer, batch, **streams)
    handle = caller.dispatch_checked()
    for columns in (3, 4):
        caller.combine_checked(handle, seed, weights=columns)
    generator = torch.Generator().manual_seed(seed)
    scales = [torch.rand(len(one), 2, generator=generator) for one in batch.x]
    x = caller.x.to(torch.float8_e4m3fn)
    (_, got), *_, event = buffer.dispatch(
        (x, caller.beside_rows(scales[caller.rank])), handle, **caller.events()
    )
    caller.wait(event)
    same("recv_scales", got, batch.received(caller.rank, scales))


def outgrown(buffer: Buffer, seed: int, **streams: bool) -> None:
    """More tokens, columns, choices or experts than before; earlier handles go on."""
    ranks = buffer.group_size
    small = make_batch(seed, ranks, tokens=3, hidden=16, topk=1)
    kept = Caller(buffer, small, **streams)
    handle = kept.dispatch_checked()
    growths = (
        {"tokens": 40},
        {"tokens": 41},
        {"hidden": 520},
        {"topk": 5, "local_experts": 4},
        {"local_experts": 3},
        {"dtype": torch.float32, "hidden": 520},
        {"tokens": 1},
    )
    for number, growth in enumerate(growths):
        caller = Caller(buffer, make_batch(seed + number, ranks, **growth), **streams)
        grown = caller.dispatch_checked()
        caller.combine_checked(grown, seed, weights=3)
        kept.cached_checked(handle)
        kept.combine_checked(handle, seed, 1, weights=1)


class CountedRounds:
    """A communicator whose all-gathers are counted."""

    def __init__(self, comm: Any, rounds: list[int]) -> None:
        self._comm, self._rounds = comm, rounds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_gather(self, row: bytes) -> list[bytes]:
        self._rounds.append(len(row))
        gathered: list[bytes] = self._comm.all_gather(row)
        return gathered


def one_rank_errs(
    me: Any,
    call: Callable[..., Any],
    good: dict[str, Any],
    mistakes: list[Mistake],
    says: str = "rank 0",
    has_peer: bool = True,
) -> None:
    """Rank 0 makes every mistake in turn, while its peers make the good call and hear of it.

    Args:
        me: has this rank's number.
        call, good, mistakes: of this rank.
        says: a part of all texts beside the one that the mistake has.
        has_peer: whether the peers' error has the rank not only in its text.
    """
    for wrong, text in mistakes:
        began = time.monotonic()
        if me.rank == 0:
            with pytest.raises(ValueError, match=text) as found:
                call(**{**good, **wrong})
            assert says in str(found.value)
        else:
            with pytest.raises(Mismatch) as failed:
                call(**good)
            assert failed.value.peer == (0 if has_peer else None), failed.value
            assert has_peer or "rank 0" in str(failed.value)
        assert time.monotonic() - began < SECONDS
