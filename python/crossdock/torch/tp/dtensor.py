"""Plans for ``torch.distributed.tensor.parallel.parallelize_module`` that use these products.

`ColwiseParallel` and `RowwiseParallel` stand in for torch's classes of these names: parameters
become the same DTensors, and the module's transfers are hidden behind its product.

    parallelize_module(model, mesh["tp"], {
        "mlp.up": dtensor.ColwiseParallel(input_layouts=Shard(0), max_tokens=4096),
        "mlp.down": dtensor.RowwiseParallel(output_layouts=Shard(0), max_tokens=4096),
    })

Modules take and return this rank's tensors, as torch's do with ``use_local_output=True``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .._held import Held
from ._agreed import agreed_context, told_to_peers
from ._arguments import require_fitting
from ._context import TpContext
from ._groups import comm_of_group
from ._linear import column_parallel_linear, row_parallel_linear
from ._modules import held_by_linear
from ._operands import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ColwiseParallel", "RowwiseParallel"]


class _Linear(nn.Linear):
    """A linear layer whose weight has become a DTensor."""

    tp_context: TpContext
    tp_options: dict[str, Any]
    tp_max_tokens: int | None
    tp_dim: int  # of the weight, along which it is sharded

    def held_parameters(self) -> dict[str, Held]:
        """How ranks hold its parameters, for `average_gradients`, by their names."""
        options = self.tp_options
        return held_by_linear(
            self.tp_context,
            self.tp_dim,
            self.bias,
            options["sequence_parallel"],
            options["fused_wgrad"],
        )


class _Colwise(_Linear):
    tp_dim = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.tp_options["sequence_parallel"]
        require_fitting(self.tp_context, ALL_GATHER, self.tp_max_tokens, x, None, own)
        return column_parallel_linear(x, self.weight, self.bias, self.tp_context, **self.tp_options)


class _Rowwise(_Linear):
    tp_dim = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        operation = REDUCE_SCATTER if self.tp_options["sequence_parallel"] else ALL_REDUCE
        require_fitting(self.tp_context, operation, self.tp_max_tokens, x, None, False)
        return row_parallel_linear(x, self.weight, self.bias, self.tp_context, **self.tp_options)


class _Style(ParallelStyle):
    _KIND: type[_Linear]

    def __init__(
        self,
        layout: Placement,
        name: str,
        max_tokens: int | None,
        context: TpContext | None,
        use_local_output: bool,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        if not isinstance(layout, (Shard, Replicate)) or layout == Shard(-1):
            problem = f"expected Replicate() or Shard of a dimension but the last, got {layout}"
            raise ValueError(f"{name}: {problem}")
        if not use_local_output:
            raise ValueError("use_local_output: expected True, as modules return local tensors")
        if context is None and max_tokens is None:
            raise ValueError("max_tokens: expected a number, as no context is given; got None")
        self.max_tokens, self.context = max_tokens, context
        self.options = options | {"sequence_parallel": isinstance(layout, Shard)}
        if isinstance(layout, Shard):
            self.options["sequence_dim"] = layout.dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = comm_of_group(device_mesh) if self.context is None else self.context.comm
        with told_to_peers(self.context, comm):
            if type(module) is not nn.Linear:
                raise TypeError(f"module: expected an nn.Linear, got {type(module).__name__}")
            ranks, size = device_mesh.size(), module.weight.shape[self._KIND.tp_dim]
            if size % ranks:
                name = ("out_features", "in_features")[self._KIND.tp_dim]
                raise ValueError(f"{name}: expected a multiple of {ranks} ranks, got {size}")
            bounds = self._bounds(module.in_features, module.out_features, ranks)
            context = self.context or agreed_context(
                comm, self.max_tokens, *bounds, module.weight.dtype
            )
        self._spread(module, "weight", device_mesh, Shard(self._KIND.tp_dim))
        if module.bias is not None:
            self._spread(
                module, "bias", device_mesh, Shard(0) if self._KIND.tp_dim == 0 else Replicate()
            )
        module.__class__ = self._KIND
        spread: Any = module
        spread.tp_context, spread.tp_options = context, self.options
        spread.tp_max_tokens = self.max_tokens
        return module

    @staticmethod
    def _bounds(in_features: int, out_features: int, ranks: int) -> tuple[int, int]:
        raise NotImplementedError

    @staticmethod
    def _spread(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
        full: Any = getattr(module, name)
        share = distribute_tensor(full.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(share, requires_grad=full.requires_grad))


class ColwiseParallel(_Style):
    """A linear layer of which each rank has some of the outputs.

    Args:
        input_layouts: ``Replicate()``: all ranks have all tokens, as of torch's class by default;
            ``Shard(dim)``: tokens are spread along that dimension, and are gathered.
        output_layouts: ``Shard(-1)``, the only one.
        use_local_output: True, the only one.
        max_tokens: largest number of tokens of a rank, counted over all dimensions but the last;
            with ``Replicate()`` of all tokens, divided by the ranks.
        context: instead of one of the mesh's communicator with room for `max_tokens`, which is the
            layer's bound all the same.
        save_gathered, fused_wgrad: as of `column_parallel_linear`.

    Raises:
        ValueError: a layout that the class has not; no `max_tokens`. When applied: a module that is
            no ``nn.Linear`` (TypeError), or whose size does not fit the ranks.
    """

    _KIND = _Colwise

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        max_tokens: int | None = None,
        context: TpContext | None = None,
        save_gathered: bool = True,
        fused_wgrad: bool = False,
    ) -> None:
        if output_layouts not in (None, Shard(-1)):
            raise ValueError(f"output_layouts: expected Shard(-1), got {output_layouts}")
        options = {"save_gathered": save_gathered, "fused_wgrad": fused_wgrad}
        layout = Replicate() if input_layouts is None else input_layouts
        super().__init__(layout, "input_layouts", max_tokens, context, use_local_output, options)

    @staticmethod
    def _bounds(in_features: int, out_features: int, ranks: int) -> tuple[int, int]:
        return in_features, max(in_features, out_features // ranks)


class RowwiseParallel(_Style):
    """A linear layer of which each rank has some of the inputs.

    Args:
        input_layouts: ``Shard(-1)``, the only one.
        output_layouts: ``Replicate()``: each rank gets all tokens, as of torch's class by default;
            ``Shard(dim)``: tokens are scattered along that dimension.
        use_local_output, max_tokens, context, fused_wgrad: as of `ColwiseParallel`.

    Raises:
        As `ColwiseParallel`.
    """

    _KIND = _Rowwise

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        max_tokens: int | None = None,
        context: TpContext | None = None,
        fused_wgrad: bool = False,
    ) -> None:
        if input_layouts not in (None, Shard(-1)):
            raise ValueError(f"input_layouts: expected Shard(-1), got {input_layouts}")
        layout = Replicate() if output_layouts is None else output_layouts
        options = {"fused_wgrad": fused_wgrad}
        super().__init__(layout, "output_layouts", max_tokens, context, use_local_output, options)

    @staticmethod
    def _bounds(in_features: int, out_features: int, ranks: int) -> tuple[int, int]:
        return out_features, max(out_features, in_features // ranks)
