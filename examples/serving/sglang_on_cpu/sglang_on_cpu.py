"""Parts of SGLang that have no code for ranks of the CPU, as lines of torch.

A plug-in of SGLang (entry point ``sglang.srt.plugins``), which it finds where this folder is on
``PYTHONPATH``. It is for trying Crossdock without a GPU: experts are loops.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

_LAYERS = "sglang.srt.layers"


def plug() -> None:
    """The entry point: experts are loops, and kernels of Triton copies."""
    from crossdock import _core

    _core.built_with_cuda = True  # with a torch that has CUDA, which nothing here uses
    found: dict[str, Any] = {
        name: importlib.import_module(f"{_LAYERS}.{name}")
        for name in (
            "attention.torch_native_backend",
            "dp_attention",
            "moe.ep_moe.layer",
            "moe.token_dispatcher.deepep",
            "quantization.unquant",
            "rotary_embedding.base",
        )
    }
    layers = found["moe.ep_moe.layer"].DeepEPMoE
    made = layers.__init__

    def make(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.deprecate_flag = True  # it asks `apply`, as it does with DeepGEMM

    layers.__init__ = make
    found["moe.token_dispatcher.deepep"].deep_gemm_wrapper = SimpleNamespace(
        ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_BLACKWELL=False, DEEPGEMM_SCALE_UE8M0=False
    )
    found["quantization.unquant"].UnquantizedFusedMoEMethod.apply = apply
    found["rotary_embedding.base"]._is_cpu = True
    found["dp_attention"].memcpy_func = found["dp_attention"].memcpy_cpu
    attention = found["attention.torch_native_backend"].TorchNativeAttnBackend
    attention.get_cpu_graph_seq_len_fill_value = lambda self: 1
    batches: Any = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
    batches._is_cpu = True


def apply(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Sums of rows over this rank's experts, or of slots what each makes of them."""
    dispatchers = f"{_LAYERS}.moe.token_dispatcher"
    deepep: Any = importlib.import_module(f"{dispatchers}.deepep")
    standard: Any = importlib.import_module(f"{dispatchers}.standard")
    x, form = dispatch_output.hidden_states, dispatch_output.format
    experts = range(len(layer.w13_weight))
    if form.is_deepep_ll():
        given = dispatch_output
        slots = torch.full_like(x, torch.nan)
        for one in experts:
            rows = int(given.masked_m[one])
            slots[one, :rows] = _expert(layer, one, x[one, :rows]).to(x.dtype)
        return deepep.DeepEPLLCombineInput(slots, given.topk_ids, given.topk_weights)
    given = dispatch_output if form.is_deepep_normal() else dispatch_output.topk_output
    sums = torch.zeros(x.shape)
    for one in experts:
        row, place = (given.topk_ids == one).nonzero(as_tuple=True)
        share = given.topk_weights[row, place].unsqueeze(1).float()
        sums.index_add_(0, row, share * _expert(layer, one, x[row]))
    if form.is_deepep_normal():
        return deepep.DeepEPNormalCombineInput(sums.to(x.dtype), given.topk_ids, given.topk_weights)
    return standard.StandardCombineInput(sums.to(x.dtype))


def _expert(layer: Any, one: int, rows: torch.Tensor) -> torch.Tensor:
    gate, up = (rows @ layer.w13_weight[one].T).chunk(2, -1)
    return ((F.silu(gate) * up) @ layer.w2_weight[one].T).float()
