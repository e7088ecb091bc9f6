"""A mixture-of-experts layer whose experts are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from crossdock._config import Overflow
from crossdock._core import constants

from ._comm import Comm
from ._group import EpGroup, Plan
from ._ops import combine, dispatch
from ._sharding import as_share, convert_loaded, is_share, local_tensor
from .grouped import grouped_mm
from .moe_router import balance_loss, expert_load, route


class MoEOutput(NamedTuple):
    """The result of `MoELayer`."""

    hidden: torch.Tensor  # shape and dtype of the input
    aux_loss: torch.Tensor  # [] float32, times aux_loss_weight: add it to the loss
    load: torch.Tensor  # [E] float32: share of all choices that went to each expert; no gradient
    order: torch.Tensor  # [1] float32, 0: stands for the layer's operations; see `after` of forward


class MoELayer(nn.Module):
    """Router, ``num_experts`` SwiGLU experts of which each token uses ``topk``, and shared experts.

    Rank d of W holds experts ``d * L .. d * L + L - 1`` (L = E / W) of the parameters
    ``experts_in`` ``[E, H, 2F]`` and ``experts_out`` ``[E, F, H]``. Where torch.distributed stands
    behind the communicator, these are DTensors, ``Shard(0)`` over `Comm.mesh`, so that
    torch's own tools know that ranks hold different experts; `local_tensor` gives this rank's
    slices. Elsewhere, and on one rank, they are plain tensors ``[L, ...]``. Router and shared
    experts are plain tensors, equal on every rank.

    Every rank calls forward and backward equally often, in one order, also without tokens; tokens
    per rank may differ. After backward call `average_gradients`.

    Ranks that had the same ``torch.manual_seed`` before they made the layer hold the same model,
    bit for bit, on any number of ranks: each expert has a seed of its own.

    In eager mode on the CPU the receive tensor is trimmed to its true rows. Elsewhere it has the
    group's capacity, so that nothing waits for the host and CUDA graphs can capture the layer
    (bfloat16, see `grouped_mm`).
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        topk: int,
        *,
        group: EpGroup | None = None,
        comm: Comm | None = None,
        max_tokens_per_rank: int | None = None,
        recv_capacity: int = 0,
        overflow: Overflow = "error",
        shared_experts: int = 0,
        aux_loss_weight: float = 0.01,
        normalize_weights: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the layer on the communicator's device. Collective if it makes its own group.

        Args:
            hidden: H, columns of a token.
            ffn: F, columns inside an expert.
            num_experts: E over all ranks, a multiple of the number of ranks.
            topk: K, experts per token.
            group: an ``EpGroup`` (expert-major) to use, which layers that run one after the other
                may share; or None, and the layer makes one from the four arguments that follow.
            comm: communicator of the group to make; None = the default one.
            max_tokens_per_rank: largest number of tokens per rank and call.
            recv_capacity: rows of the receive tensor; 0 = as many as can ever arrive.
            overflow: "error" or "drop", what happens when more arrive than fit.
            shared_experts: S; every token also passes one dense expert of ``S * ffn`` columns.
            aux_loss_weight: factor of the load-balancing loss; 0 = no such loss.
            normalize_weights: whether a token's K weights are scaled to sum to 1.
            dtype: of tokens, experts and shared experts; None = the group's, or torch's default.
                The router computes in float32.

        Raises:
            ValueError: sizes do not fit each other or the group.
        """
        super().__init__()
        if group is None:
            group = _make_group(
                hidden, num_experts, topk, comm, max_tokens_per_rank, recv_capacity, overflow, dtype
            )
        _check_group(group, hidden, num_experts, topk, dtype)
        self.group = group
        self.hidden, self.ffn, self.num_experts, self.topk = hidden, ffn, num_experts, topk
        self.aux_loss_weight, self.normalize_weights = aux_loss_weight, normalize_weights
        self.num_local_experts = num_experts // group.comm.num_ranks
        self.first_expert = group.comm.rank * self.num_local_experts

        self.router = self._empty(num_experts, hidden, dtype=torch.float32)
        self.experts_in = self._empty_experts(hidden, 2 * ffn)
        self.experts_out = self._empty_experts(ffn, hidden)
        self._shares = is_share(self.experts_in)
        shared = shared_experts * ffn
        self.shared_in = self._empty(hidden, 2 * shared) if shared else None
        self.shared_out = self._empty(shared, hidden) if shared else None
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_convert_loaded)

    def _empty_experts(self, *shape: int) -> nn.Parameter:
        """A parameter with one slice per expert, of which this rank has its own."""
        local = self._empty(self.num_local_experts, *shape).detach()
        return nn.Parameter(as_share(local, self.group.comm))

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """A parameter on the communicator's device, of the group's dtype unless told otherwise."""
        device = self.group.comm.device
        return nn.Parameter(torch.empty(shape, device=device, dtype=dtype or self.group.dtype))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new parameters; torch's default CPU generator decides which."""
        base = int(torch.randint(2**62, (), device="cpu"))
        matrices = zip(local_tensor(self.experts_in), local_tensor(self.experts_out))
        for expert, (w_in, w_out) in enumerate(matrices):
            generator = torch.Generator("cpu").manual_seed(base + self.first_expert + expert)
            _fill(w_in, generator)
            _fill(w_out, generator)
        # Experts do not draw from torch's generator, which moves on equally far on every rank, by
        # one draw.
        generator = torch.Generator("cpu").manual_seed(base + self.num_experts)
        _fill(self.router.t(), generator)
        for shared in (self.shared_in, self.shared_out):
            if shared is not None:
                _fill(shared, generator)

    if TYPE_CHECKING:  # what a call returns; for torch's stubs it is Any

        def __call__(
            self, x: torch.Tensor, *, after: Plan | torch.Tensor | None = None
        ) -> MoEOutput: ...

    def forward(self, x: torch.Tensor, *, after: Plan | torch.Tensor | None = None) -> MoEOutput:
        """Sends each token of ``x`` ``[..., H]`` through its experts.

        Args:
            x: tokens of any floating-point dtype; at most ``max_tokens_per_rank`` of them. 0 is
                fine, and takes part. ``torch.autocast`` does not reach into the layer.
            after: `MoEOutput.order` of a layer, or a plan, whose operations come before these
                although no data says so; see ``EpGroup.prepare``.

        Raises:
            TypeError, ValueError: a bad argument; no row has moved, and the peers get Mismatch.
                Where ``torch.compile(fullgraph=True)`` meets a bad x, its own error comes instead,
                and the peers wait until the timeout.
            CrossdockError: as ``EpGroup.prepare``, ``dispatch`` and ``combine``.
        """
        self._check_input(x)
        self._check_experts()
        with torch.autocast(x.device.type, enabled=False):  # dtypes are the layer's own
            return self._forward(x, after)

    def _forward(self, x: torch.Tensor, after: Plan | torch.Tensor | None) -> MoEOutput:
        tokens = x.reshape(-1, self.hidden).contiguous()
        logits = F.linear(tokens.float(), self.router.float())
        routing = route(logits, self.topk, normalize=self.normalize_weights)
        plan = self.group.prepare(routing.topk_idx, after=after)
        # Counted over ranks, so not before prepare has told whether all ranks are here.
        load = expert_load(routing.topk_idx, self.num_experts, self.group.comm.process_group)
        received = dispatch(
            plan,
            tokens.to(self.group.dtype),
            routing.topk_weights,
            exact=tokens.device.type == "cpu" and not torch.compiler.is_compiling(),
        )
        out = combine(plan, self._experts(received.tokens, plan.offsets), received.weights)
        if self.shared_in is not None and self.shared_out is not None:
            out = out + swiglu(tokens.to(out.dtype) @ self.shared_in) @ self.shared_out
        if self.aux_loss_weight:
            aux_loss = self.aux_loss_weight * balance_loss(routing.probabilities, load)
        else:
            aux_loss = torch.zeros_like(load[0])
        return MoEOutput(out.to(x.dtype).reshape(x.shape), aux_loss, load, plan.order)

    def _check_input(self, x: torch.Tensor) -> None:
        """Refuses an x that is no batch of tokens, before anything is sent."""
        kind: type[Exception]
        self.group.require_tensors(constants.PREPARE, x=x)
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            kind = ValueError
            problem = f"expected shape [..., {self.hidden}], got {tuple(x.shape)}"
        elif not x.is_floating_point():
            kind, problem = TypeError, f"expected a floating-point dtype, got {x.dtype}"
        else:
            return
        self.group.refuse(constants.PREPARE, kind, f"x: {problem}")

    def _check_experts(self) -> None:
        """Refuses parameters that a wrapper has taken away, and parameters of another dtype.

        No optimiser would see the first; the second must be of the group's dtype.
        """
        for name in ("experts_in", "experts_out"):
            parameter = self._parameters.get(name)
            if parameter is not None and parameter.dtype != self.group.dtype:
                problem = (
                    f"{name}: expected the group's dtype {self.group.dtype}, got "
                    f"{parameter.dtype}: it is fixed when the layer is made, by MoELayer(dtype=...)"
                )
                self.group.refuse(constants.PREPARE, TypeError, problem)
            if parameter is None:
                problem = (
                    f"{name}: expected a parameter of the layer, got none: what wraps the model, "
                    "such as DistributedDataParallel(device_mesh=...), has taken it away; use "
                    "crossdock.torch.data_parallel"
                )
                self.group.refuse(constants.PREPARE, RuntimeError, problem)

    def _experts(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """``[R, H]``, grouped by expert, through the experts that this rank holds."""
        handle = self.group.handle
        w_in: Any = self.experts_in
        w_out: Any = self.experts_out
        if self._shares:
            w_in, w_out = w_in.to_local(), w_out.to_local()
        inner = grouped_mm(rows, w_in, offsets, grad_group=handle)
        return grouped_mm(swiglu(inner), w_out, offsets, out_group=handle)

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of which ranks hold different slices, one slice per expert."""
        yield self.experts_in
        yield self.experts_out

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        last = self.first_expert + self.num_local_experts - 1
        return (
            f"hidden={self.hidden}, ffn={self.ffn}, num_experts={self.num_experts}, "
            f"topk={self.topk}, experts {self.first_expert} to {last} here"
        )


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """``[..., 2F]`` to ``[..., F]``: the first half gates the second."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def expert_parameters(model: nn.Module) -> dict[nn.Parameter, MoELayer]:
    """The parameters of ``model`` of which ranks hold different slices, and the layer of each."""
    return {
        parameter: layer
        for layer in model.modules()
        if isinstance(layer, MoELayer)
        for parameter in layer.expert_parameters()
    }


def _convert_loaded(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: plain tensors of experts become as the parameters are."""
    for name in ("experts_in", "experts_out"):
        if prefix + name in state:
            value, parameter = state[prefix + name], layer._parameters[name]
            state[prefix + name] = convert_loaded(value, parameter, layer.first_expert)


def _fill(matrix: torch.Tensor, generator: torch.Generator) -> None:
    """Normal values with variance 1 / rows; drawn on the CPU, so equal on every device."""
    values = torch.randn(matrix.shape, generator=generator, dtype=torch.float32, device="cpu")
    values /= math.sqrt(matrix.shape[0])
    matrix.copy_(values)


def _make_group(
    hidden: int,
    num_experts: int,
    topk: int,
    comm: Comm | None,
    max_tokens_per_rank: int | None,
    recv_capacity: int,
    overflow: Overflow,
    dtype: torch.dtype | None,
) -> EpGroup:
    if max_tokens_per_rank is None:
        raise ValueError("max_tokens_per_rank: expected a number, as no group is given; got None")
    dtype = dtype or torch.get_default_dtype()
    return EpGroup(
        num_experts=num_experts,
        hidden=hidden,
        max_topk=topk,
        max_tokens_per_rank=max_tokens_per_rank,
        dtype=dtype,
        recv_capacity=recv_capacity,
        overflow=overflow,
        # Torch's grouped kernel wants the start of every zone at 16 bytes also when rows are what
        # is summed over.
        alignment=8 if dtype == torch.bfloat16 else 1,
        comm=comm,
    )


def _check_group(
    group: EpGroup, hidden: int, num_experts: int, topk: int, dtype: torch.dtype | None
) -> None:
    if group.layout != "expert_major":
        raise ValueError(f"group: expected layout 'expert_major', got {group.layout!r}")
    if group.expert_ranks is not None:
        raise ValueError(
            "group: expected E / W experts on every rank, in order, as the layer's parameters have "
            "them; got a group with expert_ranks"
        )
    if group.num_experts != num_experts:
        expected = group.num_experts
        raise ValueError(f"num_experts: expected the group's {expected}, got {num_experts}")
    if hidden > group.hidden:
        raise ValueError(f"hidden: expected at most the group's {group.hidden}, got {hidden}")
    if not 1 <= topk <= num_experts:
        raise ValueError(f"topk: expected 1 to {num_experts}, the experts, got {topk}")
    if topk > group.max_topk:
        raise ValueError(f"topk: expected at most the group's {group.max_topk}, got {topk}")
    if dtype is not None and dtype != group.dtype:
        raise ValueError(f"dtype: expected the group's {group.dtype}, got {dtype}")
