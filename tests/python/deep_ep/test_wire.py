"""Buffer.combine_wire: sums that travel as float8 where the user says so, and only there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import torch

import low_latency_cases as cases
from crossdock.deep_ep import Buffer
from crossdock.deep_ep._wire import first_wire, formats_on, number_of_wire
from deep_ep_cases import on_buffers
from deep_ep_reference import make_batch

SEED = 140


@contextlib.contextmanager
def all_buffers(wire: str) -> Iterator[None]:
    """Has the class say so, of which a rank's process has only one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "combine_wire", wire)
        yield


@on_buffers(1, 3, **cases.LOW_LATENCY)
def test_few_tokens(buffer: Buffer) -> None:
    batch = cases.Batch(SEED, buffer)
    # Results that no code of 8 bits has, and sums of which bfloat16 has none.
    random = np.random.default_rng(SEED)
    batch.rows = [
        random.standard_normal(rows.shape).astype(ml_dtypes.bfloat16) for rows in batch.rows
    ]
    batch.x = batch.put(batch.rows[buffer.rank].astype(np.float32)).bfloat16()
    x, _, handle, _, _ = batch.dispatch(buffer)
    results = batch.experts_of(x)

    def sums(wire: str, **options: bool) -> torch.Tensor:
        with all_buffers(wire):
            out, _, hook = batch.combine(buffer, results, handle, **options)
            if hook is not None:
                hook()
        return out.float().cpu()

    def wanted(wire: str) -> torch.Tensor:
        want = batch.routing.sums(buffer.rank, batch.rows, batch.weights, wire)
        return torch.from_numpy(want.astype(np.float32))

    same = wanted("same")
    for wire in ("fp8_block128", "fp8_block128_pow2", "fp8_block128_e8m0"):
        coded = wanted(wire)
        assert len(same) == 0 or not torch.equal(coded, same)
        assert torch.equal(sums(wire), coded)
        assert torch.equal(sums(wire, return_recv_hook=True), coded)
    assert torch.equal(sums("same", use_logfmt=True), same)  # never in silence
    assert torch.equal(sums("logfmt"), same)
    assert torch.equal(sums("logfmt", use_logfmt=True), wanted("fp8_block128"))
    with pytest.raises(ValueError, match=r"combine_wire .*expected 'same', 'fp8', .*got 'fp4'"):
        sums("fp4")
    assert torch.equal(sums("same"), same)  # the Buffer is good


@on_buffers(2)
def test_many_tokens(buffer: Buffer) -> None:
    batch = make_batch(SEED, buffer.group_size, hidden=256)
    rank, device = buffer.rank, buffer._live().device
    x, ids = batch.x[rank].bfloat16().to(device), batch.topk_idx[rank].to(device)
    layout = buffer.get_dispatch_layout(ids, batch.num_experts)
    received, recv_ids, recv_weights, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=layout[0],
        is_token_in_rank=layout[3],
        num_tokens_per_expert=layout[2],
        topk_idx=ids,
        topk_weights=torch.ones(ids.shape, device=device),
    )
    generator = torch.Generator().manual_seed(SEED)
    outputs = [
        torch.randn(len(batch.rows(r)), 256, generator=generator).bfloat16()
        for r in range(buffer.group_size)
    ]
    bits = [one.float().numpy().astype(ml_dtypes.bfloat16) for one in outputs]
    mine = outputs[rank].to(device)
    with all_buffers("fp8"):
        out, _, _ = buffer.combine(mine, handle)
        # Gradients come with weights, and travel as ever.
        again, _, _ = buffer.combine(mine, handle, recv_weights)
    want = batch.routing.combine(rank, bits, None, "fp8_block128").astype(np.float32)
    assert torch.equal(out.float().cpu(), torch.from_numpy(want))
    assert torch.equal(again.cpu(), batch.combined(rank, outputs))


def test_the_environment_says_what_it_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_wire() == "same"
    monkeypatch.setenv("XD_DEEP_EP_COMBINE_WIRE", "logfmt")
    assert first_wire() == "logfmt"


def test_devices_of_several_machines_have_none() -> None:
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert formats_on(cuda, True) == 0
    assert formats_on(cuda) == formats_on(cpu, True) == formats_on(cpu) != 0
    assert number_of_wire("same", cuda, apart=True) == 0
    with pytest.raises(ValueError, match="expected 'same' on cuda:0 of several machines"):
        number_of_wire("fp8", cuda, apart=True)
    assert number_of_wire("fp8", cuda) == number_of_wire("fp8", cpu, apart=True) == 2
