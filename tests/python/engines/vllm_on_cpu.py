"""A platform of vLLM for machines without GPUs: its CPU workers, from a wheel for CUDA.

vLLM finds it as a plug-in (entry point ``vllm.platform_plugins``). The operators that its CPU wheel
has compiled are lines of torch here, experts are loops, and traffic between experts has the manager
that vLLM's communicator for CUDA would give it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

_LAYERS = "vllm.model_executor.layers.fused_moe"


def platform() -> str:
    """The entry point: the name of the class."""
    from crossdock import _core

    _core.built_with_cuda = True  # with a torch that has CUDA, which nothing here uses
    return f"{__name__}.Platform"


def __getattr__(name: str) -> Any:
    """Makes the classes, which are vLLM's, when they are asked for."""
    make = {"Platform": _make_platform, "Communicator": _make_communicator}.get(name)
    if make is None:
        raise AttributeError(name)
    made = globals()[name] = make()
    return made


def _make_platform() -> type:
    from vllm.platforms.cpu import CpuPlatform

    class Platform(CpuPlatform):
        """vLLM's, with the parts here in place of those that are compiled."""

        @classmethod
        def import_kernels(cls) -> None:
            """Defines operators in torch."""
            define_operators()

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            """Of a process group."""
            return f"{__name__}.Communicator"

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            """Does as vLLM does; a rank is a process, and layers are torch's."""
            super().check_and_update_config(vllm_config)
            vllm_config.parallel_config.distributed_executor_backend = "uni"
            vllm_config.compilation_config.custom_ops = ["none"]

    return Platform


def _make_communicator() -> type:
    from vllm.distributed.device_communicators import all2all
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    managers = {
        "deepep_high_throughput": "DeepEPHTAll2AllManager",
        "deepep_low_latency": "DeepEPLLAll2AllManager",
        "deepep_v2": "DeepEPV2All2AllManager",
    }

    class Communicator(CpuCommunicator):
        """vLLM's, whose traffic between experts is what the flag says."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            put_layers_in_place()
            name = managers.get(self.all2all_backend)
            if self.use_all2all and name is not None:
                self.all2all_manager = getattr(all2all, name)(self.cpu_group)

        def all_gatherv(self, input_: Any, dim: int = 0, sizes: Any = None) -> Any:
            """The rows of all ranks, of each as many as it has."""
            if isinstance(input_, list):
                return [self.all_gatherv(one, dim, sizes) for one in input_]
            sizes = sizes or [len(input_)] * self.world_size
            padded = F.pad(input_, (0, 0, 0, max(sizes) - len(input_)))
            parts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(parts, padded.contiguous(), group=self.cpu_group)
            return torch.cat([part[:size] for part, size in zip(parts, sizes)])

        def reduce_scatterv(self, input_: Any, dim: int = -1, sizes: Any = None) -> Any:
            """The sum over all ranks of this rank's rows."""
            sizes = sizes or [len(input_) // self.world_size] * self.world_size
            total = input_.clone()
            dist.all_reduce(total, group=self.cpu_group)
            return total.split(sizes)[self.rank_in_group].contiguous()

    return Communicator


def globalize(
    ids: torch.Tensor, rows_per_rank: torch.Tensor, first: int, experts: int
) -> torch.Tensor:
    """Does as vLLM's kernel: ids of all experts, and -1 in rows that are none."""
    row = torch.arange(len(ids)).unsqueeze(1)
    kept = (ids >= 0) & (ids + first < experts) & (row < rows_per_rank[-1])
    return torch.where(kept, ids + first, -1)


_LIBRARIES: list[Any] = []


def define_operators() -> None:
    """The operators of vLLM's CPU workers that a dense attention calls."""
    if _LIBRARIES:
        return
    library = torch.library.Library("_C", "FRAGMENT")
    _LIBRARIES.append(library)
    for schema, function in {
        "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
        "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
        "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, "
        "Tensor(a!) slots, int block) -> ()": _slots,
        "get_scheduler_metadata(int n, int heads, int kv_heads, int dim, Tensor lens, ScalarType t,"
        " Tensor starts, bool causal, int window, str isa, bool split, Tensor? dynamic, str kv) "
        "-> Tensor": lambda *_: torch.zeros(1, dtype=torch.int8),
        "cpu_attn_reshape_and_cache(Tensor k, Tensor v, Tensor(a!) kc, Tensor(b!) vc, "
        "Tensor slots, str isa, float ks, float vs, str kv) -> ()": _cache,
        "cpu_attention_with_kv_cache(Tensor q, Tensor kc, Tensor vc, Tensor(a!) out, Tensor starts,"
        " Tensor lens, float scale, bool causal, Tensor? alibi, int window, Tensor table, "
        "float softcap, Tensor meta, Tensor? sinks, Tensor? dynamic, float ks, float vs, str kv) "
        "-> ()": _attend,
    }.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def _slots(
    starts: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    block: int,
) -> None:
    slots.fill_(-1)
    for one in range(len(starts) - 1):
        begin, end = int(starts[one]), int(starts[one + 1])
        place = positions[begin:end]
        slots[begin:end] = table[one, place // block].long() * block + place % block


def _cache(
    k: torch.Tensor,
    v: torch.Tensor,
    kc: torch.Tensor,
    vc: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> None:
    kept = slots[: len(k)] >= 0
    block = kc.shape[2]
    where, place = slots[: len(k)][kept] // block, slots[: len(k)][kept] % block
    kc[where, :, place] = k[kept]
    vc[where, :, place] = v[kept]


def _attend(
    q: torch.Tensor,
    kc: torch.Tensor,
    vc: torch.Tensor,
    out: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    causal: bool,
    alibi: Any,
    window: int,
    table: torch.Tensor,
    *_: Any,
) -> None:
    block = kc.shape[2]
    for one in range(len(starts) - 1):
        begin, end = int(starts[one]), int(starts[one + 1])
        total = int(lens[one])
        if begin == end:
            continue
        blocks = table[one, : -(-total // block)].long()
        k, v = (part[blocks].transpose(1, 2).flatten(0, 1)[:total] for part in (kc, vc))
        mask = torch.ones(end - begin, total, dtype=torch.bool).tril(total - (end - begin))
        made = F.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1).float(),
            k.transpose(0, 1).float(),
            v.transpose(0, 1).float(),
            attn_mask=mask if causal else None,
            scale=scale,
            enable_gqa=True,
        )
        out[begin:end] = made.transpose(0, 1).to(out.dtype).reshape(out[begin:end].shape)


def put_layers_in_place() -> None:
    """Lets linear layers be torch's, experts loops, and gives layers their classes for DeepEP.

    vLLM imports these where it finds CUDA alone. Its plug-ins have been loaded before.
    """
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe import all2all_utils, modular_kernel
    from vllm.utils.import_utils import has_deep_ep

    modular_kernel.PIN_MEMORY = False
    utils.check_cpu_sgl_kernel = lambda *_: False  # type: ignore[assignment]
    if has_deep_ep():
        for module, names in {
            "deepep_ht": ["DeepEPHTPrepareAndFinalize"],
            "deepep_ll": ["DeepEPLLPrepareAndFinalize", "DEEPEP_QUANT_BLOCK_SHAPE"],
            "deepep_v2": ["DeepEPV2PrepareAndFinalize"],
        }.items():
            found = importlib.import_module(f"{_LAYERS}.prepare_finalize.{module}")
            for name in names:
                setattr(all2all_utils, name, getattr(found, name))
            if hasattr(found, "_globalize_recv_topk_idx"):
                found._globalize_recv_topk_idx = globalize  # type: ignore[attr-defined]
        all2all.DeepEPV2All2AllManager._check_gin_support = lambda *_: None  # type: ignore
    _put_experts_in_place()


def _put_experts_in_place() -> None:
    """Lets vLLM's CPU backend of experts be loops in torch, for both forms of rows."""
    from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    if getattr(unquantized, "_has_loops", False):
        return
    classes = _experts_of_torch()
    fused_batched_moe._is_capturing_or_compiling = lambda: False  # type: ignore[assignment]
    unquantized._has_loops = True  # type: ignore[attr-defined]
    unquantized.backend_to_kernel_cls = lambda _: classes  # type: ignore[assignment]


class _Supported:
    """Says yes to what is asked before a class is used."""

    @staticmethod
    def is_supported_config(cls: Any, moe: Any, weights: Any, rows: Any, form: Any) -> Any:
        """Whether rows have this form."""
        return form == cls.activation_format(), "rows have another form"

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leaves weights as they are."""

    def activation(self, activation: Any, output: torch.Tensor, input: torch.Tensor) -> None:
        """The one of this model."""
        gate, up = input.chunk(2, -1)
        output.copy_(F.silu(gate) * up)


def _experts_of_torch() -> list[type]:
    """Classes of experts, of rows one below the other and of rows in slots."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceNoOP,
    )

    class Batched(_Supported, fused_batched_moe.NaiveBatchedExperts):
        """vLLM's reference."""

    class Standard(_Supported, mk.FusedMoEExpertsModular):
        """A loop over experts."""

        expects_unquantized_inputs = False
        _supports_current_device = staticmethod(lambda: True)
        _supports_no_act_and_mul = staticmethod(lambda: False)
        _supports_quant_scheme = staticmethod(lambda *_: True)
        _supports_activation = staticmethod(lambda *_: True)
        _supports_parallel_config = staticmethod(lambda *_: True)
        apply = _apply_one_by_one

        @staticmethod
        def activation_format() -> Any:
            """Rows one below the other."""
            return mk.FusedMoEActivationFormat.Standard

        def finalize_weight_and_reduce_impl(self) -> Any:
            """None: sums are weighted here."""
            return TopKWeightAndReduceNoOP()

        def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> Any:
            """Of the two that are not used, and of the output."""
            return (1,), (1,), (M, K)

    return [Standard, Batched]


def _apply_one_by_one(
    experts: Any,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    global_num_experts: int,
    expert_map: Any,
    **_: Any,
) -> None:
    """The weighted sum over this rank's experts."""
    made = torch.zeros(output.shape, dtype=torch.float32)
    for one in range(global_num_experts):
        local = one if expert_map is None else int(expert_map[one])
        rows, place = (topk_ids == one).nonzero(as_tuple=True)
        if local < 0 or not len(rows):
            continue
        inner = torch.empty(len(rows), w2.shape[2], dtype=w1.dtype)
        experts.activation(activation, inner, hidden_states[rows] @ w1[local].T)
        share = topk_weights[rows, place].unsqueeze(1).float()
        made.index_add_(0, rows, share * (inner @ w2[local].T).float())
    output.copy_(made)
