"""Layers whose weights are spread over the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from crossdock._gemm_config import whole_number

from .._comm import Comm, default_comm
from .._held import Held
from .._sharding import as_share, convert_loaded, is_share
from ._agreed import agreed_context, told_to_peers
from ._arguments import require_fitting
from ._context import TpContext
from ._functions import Activation
from ._linear import column_parallel_linear, row_parallel_linear
from ._operands import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "SequenceParallelMLP",
    "TensorParallelAttentionProjections",
]


def held_by_linear(
    context: TpContext, dim: int, bias: Any, sequence_parallel: bool, fused_wgrad: bool
) -> dict[str, Held]:
    """How ranks hold the parameters of a linear layer whose weight is spread along `dim`."""
    held = {"weight": Held(context.comm, dim, sequence_parallel, fused_wgrad)}
    if bias is not None:
        held["bias"] = Held(context.comm, 0 if dim == 0 else None, sequence_parallel, False)
    return held


class _Spread(nn.Module):
    """A linear layer of which each rank has a part of the weight."""

    _DIM: int  # of the weight, along which ranks have their parts
    _SPREADS_BIAS: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        context: TpContext | None = None,
        comm: Comm | None = None,
        max_tokens: int | None = None,
        sequence_parallel: bool = True,
        sequence_dim: int = 0,
        activation: Activation | None = None,
        fused_wgrad: bool = False,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or (torch.get_default_dtype() if context is None else context.dtype)
        sizes = [out_features, in_features]
        ranks = (context or comm or default_comm()).num_ranks
        with told_to_peers(context, comm):
            if sizes[self._DIM] % ranks:
                name = ("out_features", "in_features")[self._DIM]
                problem = f"expected a multiple of {ranks} ranks, got {sizes[self._DIM]}"
                raise ValueError(f"{name}: {problem}")
            if max_tokens is not None:
                whole_number("max_tokens", max_tokens, 31)
            bounds = self._bounds(in_features, out_features, ranks)
            self.context = context or agreed_context(comm, max_tokens, *bounds, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.activation: Activation | None = activation
        self.fused_wgrad, self.fp8 = fused_wgrad, fp8
        self.max_tokens = max_tokens
        self.share = sizes[self._DIM] // ranks
        self.first = self.context.rank * self.share
        local = list(sizes)
        local[self._DIM] = self.share
        self.weight = self._parameter(local, dtype, self._DIM)
        self.bias: nn.Parameter | None = None
        if bias:
            size = self.share if self._SPREADS_BIAS else out_features
            self.bias = self._parameter([size], dtype, 0 if self._SPREADS_BIAS else None)
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_convert_loaded)

    @staticmethod
    def _bounds(in_features: int, out_features: int, ranks: int) -> tuple[int, int]:
        """max_k and max_n of a context for the layer, forward and backward."""
        raise NotImplementedError

    def _parameter(self, shape: list[int], dtype: torch.dtype, dim: int | None) -> nn.Parameter:
        comm = self.context.comm
        local = torch.empty(shape, dtype=dtype, device=comm.device)
        return nn.Parameter(local if dim is None else as_share(local, comm, dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new parameters, those of an ``nn.Linear`` of all ranks on the CPU.

        Ranks that had the same ``torch.manual_seed`` hold parts of the same layer, on any number of
        ranks.
        """
        dtype = self.weight.dtype
        full = torch.empty(self.out_features, self.in_features, dtype=dtype, device="cpu")
        nn.init.kaiming_uniform_(full, a=math.sqrt(5))
        self._take("weight", full)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            full = torch.empty(self.out_features, dtype=dtype, device="cpu")
            self._take("bias", nn.init.uniform_(full, -bound, bound))

    def spread_parameters(self) -> dict[str, int]:
        """The dimension along which ranks have their parts, by the name of the parameter."""
        spread = {"weight": self._DIM}
        return spread | {"bias": 0} if self._SPREADS_BIAS and self.bias is not None else spread

    def held_parameters(self) -> dict[str, Held]:
        """How ranks hold its parameters, for `average_gradients`, by their names."""
        return held_by_linear(
            self.context, self._DIM, self.bias, self.sequence_parallel, self.fused_wgrad
        )

    def own_part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter of all ranks; of another shape it is left as it is."""
        dim = self.spread_parameters().get(name)
        sizes = (self.out_features, self.in_features)[: full.dim()]
        if dim is None or tuple(full.shape) != sizes:
            return full
        return full.narrow(dim, self.first, self.share)

    def _take(self, name: str, full: torch.Tensor) -> None:
        parameter: Any = getattr(self, name)
        local = parameter.to_local() if is_share(parameter) else parameter
        local.copy_(self.own_part(name, full))

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, ranks={self.context.num_ranks}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


class ColumnParallelLinear(_Spread):
    """A linear layer of which each rank has some of the outputs: see `column_parallel_linear`.

    ``weight`` has rows ``rank * out / W`` and the next ones, ``bias`` likewise. Where
    torch.distributed stands behind the communicator they are DTensors over `Comm.mesh`, so that
    torch's own tools know that ranks hold different parts; elsewhere plain tensors. A state dict
    may have this rank's parts or those of all ranks.
    """

    _DIM = 0
    _SPREADS_BIAS = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        context: TpContext | None = None,
        comm: Comm | None = None,
        max_tokens: int | None = None,
        sequence_parallel: bool = True,
        sequence_dim: int = 0,
        activation: Activation | None = None,
        save_gathered: bool = True,
        fused_wgrad: bool = False,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the layer on the communicator's device. Collective if it makes its context.

        Args:
            in_features, out_features, bias: as of ``nn.Linear``; out_features a multiple of W.
            context: whose operations the layer uses, which layers that run one after the other may
                share; None = one of `comm` that has room for `max_tokens`, made if there is none.
            comm: None = the default communicator.
            max_tokens: largest number of tokens of a rank, counted over all dimensions but the
                last. Without sequence parallelism: of all tokens, divided by W. A bound of this
                layer, also where the context has room for more; None beside `context` = its own.
            sequence_parallel, sequence_dim, activation, save_gathered, fused_wgrad, fp8: as of
                `column_parallel_linear`.
            dtype: None = the context's, or torch's default.

        Raises:
            ValueError: sizes do not fit each other.
        """
        super().__init__(
            in_features,
            out_features,
            bias,
            context=context,
            comm=comm,
            max_tokens=max_tokens,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            activation=activation,
            fused_wgrad=fused_wgrad,
            fp8=fp8,
            dtype=dtype,
        )
        self.save_gathered = save_gathered

    @staticmethod
    def _bounds(in_features: int, out_features: int, ranks: int) -> tuple[int, int]:
        return in_features, max(in_features, out_features // ranks)

    def forward(
        self, x: torch.Tensor, tokens_per_rank: Sequence[int] | None = None
    ) -> torch.Tensor:
        """``[..., in]`` to ``[..., out / W]``, all ranks' tokens. Collective.

        Args:
            x: this rank's tokens; without sequence parallelism all tokens.
            tokens_per_rank: size of the sequence's dimension on each rank; None = the same.
        """
        own = self.sequence_parallel
        require_fitting(self.context, ALL_GATHER, self.max_tokens, x, tokens_per_rank, own)
        return column_parallel_linear(
            x,
            self.weight,
            self.bias,
            self.context,
            sequence_parallel=self.sequence_parallel,
            sequence_dim=self.sequence_dim,
            activation=self.activation,
            tokens_per_rank=tokens_per_rank,
            save_gathered=self.save_gathered,
            fused_wgrad=self.fused_wgrad,
            fp8=self.fp8,
        )


class RowParallelLinear(_Spread):
    """A linear layer of which each rank has some of the inputs: see `row_parallel_linear`.

    ``weight`` has columns ``rank * in / W`` and the next ones, as a DTensor where torch.distributed
    stands behind the communicator. ``bias`` is equal on all ranks, and so is its gradient. The
    arguments are those of `ColumnParallelLinear`, but for save_gathered; in_features is a multiple
    of W.
    """

    _DIM = 1
    _SPREADS_BIAS = False

    @staticmethod
    def _bounds(in_features: int, out_features: int, ranks: int) -> tuple[int, int]:
        return out_features, max(out_features, in_features // ranks)

    def forward(
        self, x: torch.Tensor, tokens_per_rank: Sequence[int] | None = None
    ) -> torch.Tensor:
        """``[..., in / W]``, all ranks' tokens, to ``[..., out]``. Collective.

        Args:
            x: all tokens.
            tokens_per_rank: size of the sequence's dimension of each rank's result; None = equal
                shares.
        """
        operation = REDUCE_SCATTER if self.sequence_parallel else ALL_REDUCE
        require_fitting(self.context, operation, self.max_tokens, x, tokens_per_rank, False)
        return row_parallel_linear(
            x,
            self.weight,
            self.bias,
            self.context,
            sequence_parallel=self.sequence_parallel,
            sequence_dim=self.sequence_dim,
            activation=self.activation,
            tokens_per_rank=tokens_per_rank,
            fused_wgrad=self.fused_wgrad,
            fp8=self.fp8,
        )


def _convert_loaded(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: parameters of all ranks become this rank's parts."""
    for name, dim in layer.spread_parameters().items():
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and not is_share(value):
            part = layer.own_part(name, value)
            state[prefix + name] = convert_loaded(part, getattr(layer, name), layer.first, dim)


class SequenceParallelMLP(nn.Module):
    """``out(act(in(x)))`` of tokens that are spread over the ranks.

    A `ColumnParallelLinear` that gathers them, and a `RowParallelLinear` that scatters them again.
    With ``"swiglu"`` the first layer has 2 * ffn outputs: output 2 i gates output 2 i + 1.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        activation: Literal["gelu", "relu", "swiglu"] = "gelu",
        bias: bool = True,
        context: TpContext | None = None,
        comm: Comm | None = None,
        max_tokens: int | None = None,
        sequence_parallel: bool = True,
        sequence_dim: int = 0,
        save_gathered: bool = True,
        fused_wgrad: bool = False,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes both layers. Collective if it makes its context.

        Args:
            hidden: columns of a token.
            ffn: columns between the layers, of all ranks.
            activation: "gelu" is the tanh form.
            bias: whether both layers have one.
            context, comm, max_tokens, sequence_parallel, sequence_dim, save_gathered, fused_wgrad,
                fp8, dtype: as of `ColumnParallelLinear`.

        Raises:
            ValueError: sizes do not fit each other, or there is no such activation.
        """
        super().__init__()
        dtype = dtype or (torch.get_default_dtype() if context is None else context.dtype)
        gated = activation == "swiglu"
        width = 2 * ffn if gated else ffn
        ranks = (context or comm or default_comm()).num_ranks
        self.activation = activation
        with told_to_peers(context, comm):
            if activation not in ("gelu", "relu", "swiglu"):
                expected = "expected 'gelu', 'relu' or 'swiglu'"
                raise ValueError(f"activation: {expected}, got {activation!r}")
            bounds = hidden, max(hidden, -(-width // ranks))
            self.context = context or agreed_context(comm, max_tokens, *bounds, dtype)
        options: dict[str, Any] = {
            "context": self.context,
            "max_tokens": max_tokens,
            "sequence_parallel": sequence_parallel,
            "sequence_dim": sequence_dim,
            "fused_wgrad": fused_wgrad,
            "fp8": fp8,
            "dtype": dtype,
        }
        fused: Activation | None = None if activation == "swiglu" else activation
        self.linear_in = ColumnParallelLinear(
            hidden, width, bias, activation=fused, save_gathered=save_gathered, **options
        )
        self.linear_out = RowParallelLinear(ffn, hidden, bias, **options)

    def forward(
        self, x: torch.Tensor, tokens_per_rank: Sequence[int] | None = None
    ) -> torch.Tensor:
        """``[..., hidden]``, this rank's tokens, to the same shape. Collective."""
        inner = self.linear_in(x, tokens_per_rank)
        if self.activation == "swiglu":
            gate, up = inner.unflatten(-1, (-1, 2)).unbind(-1)
            inner = F.silu(gate) * up
        return self.linear_out(inner, tokens_per_rank)


class TensorParallelAttentionProjections(nn.Module):
    """The projections around attention whose heads are spread over the ranks.

    `qkv` gathers this rank's tokens and gives queries, keys and values of its heads for the tokens
    of all ranks; `out` takes what attention made of them, and gives this rank's tokens. Rows of the
    first weight are in groups, one per head of keys and values: its queries' heads, the head of
    keys, that of values.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        context: TpContext | None = None,
        comm: Comm | None = None,
        max_tokens: int | None = None,
        sequence_parallel: bool = True,
        sequence_dim: int = 0,
        save_gathered: bool = True,
        fused_wgrad: bool = False,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes both layers. Collective if it makes its context.

        Args:
            hidden: columns of a token.
            num_heads: of queries, of all ranks.
            num_kv_heads: of keys and values, a divisor of num_heads and a multiple of W; None =
                num_heads.
            head_dim: columns of a head; None = hidden / num_heads.
            bias: whether both layers have one.
            context, comm, max_tokens, sequence_parallel, sequence_dim, save_gathered, fused_wgrad,
                fp8, dtype: as of `ColumnParallelLinear`.

        Raises:
            ValueError: sizes do not fit each other.
        """
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        ranks = (context or comm or default_comm()).num_ranks
        with told_to_peers(context, comm):
            if num_kv_heads < 1 or num_heads % num_kv_heads or num_kv_heads % ranks:
                raise ValueError(
                    f"num_kv_heads: expected a divisor of num_heads = {num_heads} and a multiple "
                    f"of {ranks} ranks, got {num_kv_heads}"
                )
        dtype = dtype or (torch.get_default_dtype() if context is None else context.dtype)
        self.head_dim = hidden // num_heads if head_dim is None else head_dim
        self.group = num_heads // num_kv_heads  # heads of queries that share keys and values
        self.local_kv_heads = num_kv_heads // ranks
        width = num_kv_heads * (self.group + 2) * self.head_dim
        with told_to_peers(context, comm):
            bounds = hidden, max(hidden, width // ranks)
            self.context = context or agreed_context(comm, max_tokens, *bounds, dtype)
        options: dict[str, Any] = {
            "context": self.context,
            "max_tokens": max_tokens,
            "sequence_parallel": sequence_parallel,
            "sequence_dim": sequence_dim,
            "fused_wgrad": fused_wgrad,
            "fp8": fp8,
            "dtype": dtype,
        }
        self.linear_qkv = ColumnParallelLinear(
            hidden, width, bias, save_gathered=save_gathered, **options
        )
        self.linear_out = RowParallelLinear(num_heads * self.head_dim, hidden, bias, **options)

    def qkv(
        self, x: torch.Tensor, tokens_per_rank: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[..., heads / W, D]``, keys and values ``[..., kv_heads / W, D]``. Collective.

        Args:
            x: ``[..., hidden]``, this rank's tokens.
            tokens_per_rank: as of `ColumnParallelLinear`.
        """
        both = self.linear_qkv(x, tokens_per_rank)
        grouped = both.unflatten(-1, (self.local_kv_heads, self.group + 2, self.head_dim))
        queries, keys, values = grouped.split((self.group, 1, 1), dim=-2)
        return queries.flatten(-3, -2), keys.squeeze(-2), values.squeeze(-2)

    def out(
        self, attended: torch.Tensor, tokens_per_rank: Sequence[int] | None = None
    ) -> torch.Tensor:
        """``[..., heads / W, D]``, all tokens, to ``[..., hidden]``, this rank's. Collective."""
        return self.linear_out(attended.flatten(-2), tokens_per_rank)
