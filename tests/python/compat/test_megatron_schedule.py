"""A whole GPT model of Megatron in its 1F1B schedule, in which micro batches overlap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from crossdock.torch import _calls
from megatron_layers import EXPERTS, NEWEST, config_of, megatron_of, on_release
from support import Rank, on_ranks
from torch_ranks import process_group

LAYERS, VOCABULARY, LENGTH, MICRO_BATCHES = 3, 48, 12, 4
BATCH = 2  # sequences of a micro batch
OVERLAP = {"moe_flex_dispatcher_backend": "hybridep", "overlap_moe_expert_parallel_comm": True}


def make_model(me: Rank, kind: str, **options: Any) -> torch.nn.Module:
    """A language model in bfloat16 whose layers all have experts: the same numbers each time."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = config_of(
        me.num_ranks,
        kind,
        num_layers=LAYERS,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **options,
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS)
    model = GPTModel(config, spec, VOCABULARY, LENGTH)
    model.to(torch.get_default_device(), torch.bfloat16)
    generator = torch.Generator("cpu").manual_seed(7)
    shared = {name for name, _ in model.named_parameters() if "local_experts" not in name}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in shared:  # another rank's experts are other ones
                generator.manual_seed(1000 * me.rank + sum(map(ord, name)))
            drawn = torch.randn(parameter.shape, generator=generator, device="cpu")
            parameter.copy_(drawn * 0.2 + ("layernorm.weight" in name))
    return model


def batches(me: Rank) -> Iterator[dict[str, torch.Tensor]]:
    """Micro batches: other sentences on each rank."""
    generator = torch.Generator("cpu").manual_seed(11 + me.rank)
    device = torch.get_default_device()
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    for _ in range(MICRO_BATCHES):
        shape = (BATCH, LENGTH + 1)
        text = torch.randint(VOCABULARY, shape, generator=generator, device="cpu").to(device)
        yield {
            "input_ids": text[:, :-1].contiguous(),
            "position_ids": torch.arange(LENGTH, device=device).expand(BATCH, -1),
            "attention_mask": later.to(device),
            "labels": text[:, 1:].contiguous(),
        }


def a_step(me: Rank, kind: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Forward and backward of all micro batches: their losses, and the sums of gradients."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    model = make_model(me, kind, **options)

    def mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    def forward(data: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        run = model.build_schedule_plan if return_schedule_plan else model
        return run(**next(data)), mean

    told = forward_backward_no_pipelining(
        forward_step_func=forward,
        data_iterator=batches(me),
        model=model,
        num_microbatches=MICRO_BATCHES,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
    )
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return [one["loss"].item() for one in told], grads


def no_scale_of_others() -> Any:
    """The scale of auxiliary losses is the process's; other tests set one of another shape."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    return mock.patch.object(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)


def no_states_of_dropout() -> Any:
    """Megatron's random states are on a GPU; there is no dropout."""
    from megatron.core import tensor_parallel

    tracker = SimpleNamespace(fork=contextlib.nullcontext)
    return mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)


@pytest.mark.parametrize("release", [NEWEST])
@on_ranks(2, run=on_release)
def test_overlapped_micro_batches_give_equal_bits(me: Rank, release: str) -> None:
    streams: set[Any] = set()
    order: list[str] = []
    run = _calls.run

    def watched(core: Any, operation: str, *given: Any, **more: Any) -> Any:
        order.append(operation)
        streams.add(torch.cuda.current_stream())
        return run(core, operation, *given, **more)

    with (
        process_group(),
        megatron_of(me, release) as megatron,
        no_states_of_dropout(),
        no_scale_of_others(),
    ):
        from megatron.core.pipeline_parallel.utils import get_comp_stream

        megatron.install(max_tokens_per_rank=BATCH * LENGTH)
        expected, grads = a_step(me, "flex", moe_flex_dispatcher_backend="hybridep")
        with mock.patch.object(_calls, "run", watched):
            got, overlapped = a_step(me, "flex", **OVERLAP)
        assert got == expected
        assert len(got) == MICRO_BATCHES and len(set(got)) == MICRO_BATCHES
        assert overlapped.keys() == grads.keys() and len(grads) > LAYERS * EXPERTS // me.num_ranks
        for name, grad in grads.items():
            assert grad.any(), name
            torch.testing.assert_close(overlapped[name], grad, rtol=0, atol=0, msg=name)
        # A micro batch goes forward between the backward operations of the one before.
        first, last = order.index("combine_bwd"), len(order) - order[::-1].index("dispatch_bwd")
        assert order[first:last].count("dispatch") == LAYERS * (MICRO_BATCHES - 1), order
        if torch.get_default_device().type == "cuda":
            assert get_comp_stream() not in streams
        its_own, _ = a_step(me, "alltoall")
        assert got == pytest.approx(its_own, rel=2e-2), (got, its_own)
