"""Matrix products over the zones of an expert-major receive tensor, differentiable.

A zone is the rows of one local expert: ``offsets[e] <= row < offsets[e + 1]``. Rows past the last
zone belong to no expert: they are never read, and are undefined in a result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from . import _calls
from ._autocast import autocast
from ._comm import Comm, default_comm
from ._custom_ops import LIBRARY
from ._derivatives import requires_grad
from ._direct import FUNCTIONS, unobserved
from ._group import group_of, pool_of
from ._sharding import local_tensor
from ._unseen import unseen

_GROUPED_MM: Callable[..., torch.Tensor] | None = getattr(
    torch.nn.functional, "grouped_mm", None
) or getattr(torch, "_grouped_mm", None)


def grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out_group: int = 0,
    grad_group: int = 0,
) -> torch.Tensor:
    """Multiplies the rows of each zone by that expert's matrix: ``y[r] = x[r] @ weight[e]``.

    Differentiable once in ``x`` and ``weight``; works under ``torch.compile``. Where a communicator
    has been made, the library computes it (``xd_grouped_product``) on the CPU, and on Hopper GPUs
    in bfloat16 and float16 with 16-byte rows; torch's grouped kernel does in bfloat16 elsewhere,
    and for the gradient of ``weight``. No host is asked then, so that CUDA graphs can capture it.
    Anything else is multiplied zone by zone, for which a GPU's host reads the offsets; a capture
    refuses that. Under ``torch.autocast`` both operands are cast to its dtype, as those of
    ``F.linear`` are (as of torch 2.13 those of ``F.grouped_mm`` are not).

    Args:
        x: ``[R, N]``, rows grouped by expert.
        weight: ``[L, N, M]``, dtype and device of ``x``; any strides. Of a DTensor, as
            `mark_experts` makes it, this rank's slices.
        offsets: ``[L + 1]`` int32, as in ``Plan.offsets``.
        out_group: handle of an ``EpGroup`` from whose symmetric memory the result is taken, for a
            result that goes to ``combine``; 0 = ordinary memory. A grouped kernel of GPUs makes its
            result in ordinary memory whatever this says, and nothing is copied for that: there an
            expert-major ``combine`` reads expert_out where it lies, as each rank sums its own rows
            and sends the sums.
        grad_group: the same for the gradient of ``x``, where ``x`` came from ``dispatch``; the
            backward pass of ``dispatch`` reads it as ``combine`` reads expert_out.

    Returns:
        ``[R, M]``.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes do not fit each other.
    """
    handle = out_group or grad_group
    x, weight = operands_of("grouped_mm", x, weight, offsets, handle)
    return run_local("grouped_mm", x, weight, offsets, False, out_group, grad_group)


def operands_of(
    function: str, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, handle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain tensors x and weight in autocast's dtype, which fit each other, or an error.

    Args:
        function: whose operands they are, for the error.
        handle: of the group whose rows they are; 0 = unknown.
    """
    for name, value in (("x", x), ("weight", weight), ("offsets", offsets)):
        if not isinstance(value, torch.Tensor):
            problem = f"{name}: expected a tensor, got {type(value).__name__}"
            refuse(function, TypeError, problem, handle)
    x, weight = autocast(x, local_tensor(weight))
    problem = _problem_of_shapes(x, weight, offsets)
    if weight.dtype != x.dtype:
        problem = f"weight: expected dtype {x.dtype} as x has, got {weight.dtype}"
        refuse(function, TypeError, problem, handle)
    if offsets.dtype != torch.int32:
        problem = f"offsets: expected dtype torch.int32, got {offsets.dtype}"
        refuse(function, TypeError, problem, handle)
    if problem:
        refuse(function, ValueError, problem, handle)
    return x, weight


def _problem_of_shapes(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> str:
    if x.dim() != 2:
        return f"x: expected 2 dimensions, got shape {tuple(x.shape)}"
    if weight.dim() != 3 or weight.shape[1] != x.shape[1]:
        return f"weight: expected shape [experts, {x.shape[1]}, columns], got {tuple(weight.shape)}"
    if offsets.dim() != 1 or offsets.shape[0] != weight.shape[0] + 1:
        return f"offsets: expected shape [{weight.shape[0] + 1}], got {tuple(offsets.shape)}"
    return ""


def refuse(function: str, kind: type[Exception], problem: str, handle: int = 0) -> NoReturn:
    """Raises an error of a function that is local, so that no peer has to hear of it.

    Args:
        function: its name.
        kind: of the error.
        problem: the argument, what was expected and what was got.
        handle: of the group in question; 0 = unknown, and the default communicator's rank is told.
    """
    try:
        comm = comm_of(handle)
    except RuntimeError:  # there is none
        raise kind(f"{function}: {problem}") from None
    raise kind(f"{function}: {problem} [rank {comm.rank} of {comm.num_ranks}]")


def comm_of(handle: int) -> Comm:
    """The communicator of a group; 0 = the default one, and RuntimeError where there is none."""
    return group_of(handle).comm if handle else default_comm()


def define_operator(schema: str, kernel: Callable[..., object]) -> None:
    """Defines an operator of these modules, which has one kernel for all devices."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    FUNCTIONS[name] = unseen(kernel)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, FUNCTIONS[name], key)


def run_local(name: str, x: torch.Tensor, *args: Any) -> Any:
    """Runs such an operator, directly where it has no gradient and nothing of torch looks at it."""
    given = (x, *(one for one in args if isinstance(one, torch.Tensor)))
    if not requires_grad(given) and unobserved(x, *given):
        return FUNCTIONS[name](x, *args)
    return getattr(torch.ops.crossdock, name).default(x, *args)


def _grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    transpose: bool,
    out_group: int,
    grad_group: int,
) -> torch.Tensor:
    matrices = weight.transpose(1, 2) if transpose else weight
    shape = (x.shape[0], matrices.shape[2])
    comm = comm_for(out_group or grad_group, x, matrices)
    if comm is not None:
        out = pool_of(out_group).empty(shape, x.dtype) if out_group and not x.is_cuda else None
        return run_product(comm, x, matrices, offsets, out)
    if _GROUPED_MM is not None and _one_kernel(x, matrices):
        # Torch's kernel has no out=. It runs on GPUs alone, where an expert-major combine or
        # dispatch_bwd reads these rows in any memory: there is nothing to gain by a copy.
        return _GROUPED_MM(_packed_rows(x), packed_matrices(matrices), offs=ends_inside(x, offsets))
    out = pool_of(out_group).empty(shape, x.dtype) if out_group else x.new_empty(shape)
    for expert, rows in zones_of(offsets):
        if rows.start < rows.stop:
            torch.mm(x[rows], matrices[expert], out=out[rows])
    return out


def run_product(
    comm: Comm,
    x: torch.Tensor,
    matrices: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor | None = None,
    **scales: torch.Tensor,
) -> torch.Tensor:
    """The product of grouped_mm by the library.

    Args:
        out: where it goes; None = new memory, bfloat16 if x is fp8.
        scales: ``a_scale`` and ``b_scale`` of fp8.
    """
    if out is None:
        dtype = x.dtype if x.dtype in _calls.SUMMABLE else torch.bfloat16
        out = x.new_empty(x.shape[0], matrices.shape[2], dtype=dtype)
    given = {"a": _packed_rows(x), "b": packed_matrices(matrices), "offsets": offsets, "d": out}
    _calls.run(comm.core, "grouped_product", x, given | scales)
    return out


define_operator(
    "grouped_mm(Tensor x, Tensor weight, Tensor offsets, bool transpose, int out_group, "
    "int grad_group) -> Tensor",
    _grouped_mm,
)


@torch.library.register_fake("crossdock::grouped_mm", lib=LIBRARY)
def _(x, weight, offsets, transpose, out_group, grad_group):
    return x.new_empty(x.shape[0], weight.shape[1] if transpose else weight.shape[2])


def _grouped_outer(
    x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, group: int
) -> torch.Tensor:
    """``[L, N, M]``: for each zone ``x[zone].T @ y[zone]``; zeros for an empty one."""
    if _GROUPED_MM is not None and _one_kernel(x, y):
        out = _GROUPED_MM(_packed_rows(x).t(), _packed_rows(y), offs=ends_inside(x, offsets))
        # Whether the kernel writes a group without rows differs between torch releases.
        return out.masked_fill_((offsets[1:] == offsets[:-1])[:, None, None], 0)
    out = x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1])
    comm = comm_for(group, x, y, out)
    if comm is not None:
        given = {"a": _packed_rows(x), "b": _packed_rows(y), "offsets": offsets, "d": out}
        _calls.run(comm.core, "grouped_outer", x, given)
        return out
    for expert, rows in zones_of(offsets):
        torch.mm(x[rows].t(), y[rows], out=out[expert])
    return out


define_operator(
    "grouped_outer(Tensor x, Tensor y, Tensor offsets, int group) -> Tensor", _grouped_outer
)


@torch.library.register_fake("crossdock::grouped_outer", lib=LIBRARY)
def _(x, y, offsets, group):
    return x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, offsets, ctx.transpose, ctx.out_group, ctx.grad_group = inputs
    ctx.save_for_backward(x, weight, offsets)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.crossdock.grouped_mm(
            grad, weight, offsets, not ctx.transpose, ctx.grad_group, ctx.out_group
        )
    if ctx.needs_input_grad[1]:
        pair = (grad, x) if ctx.transpose else (x, grad)
        group = ctx.out_group or ctx.grad_group
        grad_weight = torch.ops.crossdock.grouped_outer(*pair, offsets, group)
    return grad_x, grad_weight, None, None, None, None


torch.library.register_autograd(
    "crossdock::grouped_mm", _backward, setup_context=_setup_context, lib=LIBRARY
)


def comm_for(group: int, x: torch.Tensor, *others: torch.Tensor) -> Comm | None:
    """The communicator whose rank multiplies these, x first; None: torch does."""
    takes = _on_tensor_cores(x, *others) if x.is_cuda else x.dtype in _calls.SUMMABLE
    if not takes or not others[-1].numel():
        return None
    try:
        comm = comm_of(group)
    except RuntimeError:  # there is none
        return None
    return comm if comm.device == x.device and not comm.core.closed else None


def _on_tensor_cores(*operands: torch.Tensor) -> bool:
    """Whether the library's kernel takes these operands of a GPU, packed."""
    return _capability(operands[0].device) == (9, 0) and all(
        one.dtype in _TENSOR_CORES and one.shape[-1] * one.itemsize % 16 == 0 for one in operands
    )


_TENSOR_CORES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def _packed_rows(x: torch.Tensor) -> torch.Tensor:
    """x as kernels take it: the elements of a row side by side, on GPUs in whole 16 bytes."""
    return _packed(x, x.stride(1) == 1 and x.stride(0) >= x.shape[1])


def packed_matrices(x: torch.Tensor) -> torch.Tensor:
    """x likewise, or the elements of a column."""
    rows = x.stride(2) == 1 and x.stride(1) >= x.shape[2]
    columns = x.stride(1) == 1 and x.stride(2) >= x.shape[1]
    return _packed(x, bool(x.stride(0)) and (rows or columns))


def _packed(x: torch.Tensor, is_packed: bool) -> torch.Tensor:
    aligned = not x.is_cuda or (
        x.data_ptr() % 16 == 0
        and all(stride * x.itemsize % 16 == 0 for stride in x.stride() if stride != 1)
    )
    return x if is_packed and aligned else x.clone(memory_format=torch.contiguous_format)


def _one_kernel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch's kernel takes these operands."""
    return (
        a.is_cuda
        and a.dtype == torch.bfloat16
        and a.shape[0] > 0
        and a.shape[-1] % 8 == 0
        and b.shape[-1] % 8 == 0
        and _capability(a.device) >= (9, 0)
    )


_capability = functools.cache(torch.cuda.get_device_capability)


def ends_inside(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Where zones end, inside x: those of a plan that overflows go on behind it."""
    return offsets[1:].clamp(max=x.shape[0])


def zones_of(offsets: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows), from offsets that the host reads."""
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "grouped_mm: cannot be captured in a CUDA graph here, because the host must read the "
            "offsets; expected bfloat16 with columns in multiples of 8, torch 2.8 or newer and "
            "compute capability 9.0 or higher"
        )
    bounds = offsets.tolist()
    for expert, (first, end) in enumerate(zip(bounds, bounds[1:])):
        yield expert, slice(first, end)
