"""A part of dispatch or combine, and the multiprocessors of one call.

Such calls are for authors of schedules, who order them by streams and events. They go to the
functions of operators directly, and have no derivative: a part writes into outputs of an earlier
call, which an operator of torch must not do. So they are refused where something of torch has to
see operators.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._direct import why_seen

if TYPE_CHECKING:
    from ._group import EpGroup
    from ._outputs import Outputs

__all__ = ["WHOLE", "Portion", "raise_versions"]

try:  # older releases take one tensor
    torch.autograd.graph.increment_version([])
except TypeError:
    _TAKES_LISTS = False
else:
    _TAKES_LISTS = True

# An output that stands for others in autograd, which the library does not write.
_UNWRITTEN = "link"


@dataclasses.dataclass(frozen=True)
class Portion:
    """The part of an operation that one call does, its multiprocessors and its outputs.

    They are as a caller gives them, of any type, until `check` and `outputs` have seen them.

    Attributes:
        part: 0 = all; p = the p-th part.
        num_sms: CUDA: multiprocessors; 0 = as the group.
        out: the outputs in their order, which an earlier part has returned; None = new ones.
    """

    part: int = 0
    num_sms: int = 0
    out: tuple[Tensor | None, ...] | None = None

    def __bool__(self) -> bool:
        numbers = (self.part, self.num_sms)
        return self.out is not None or any(type(one) is not int or one != 0 for one in numbers)

    def fields(self) -> dict[str, int]:
        """The fields of the C struct."""
        return {"part": self.part, "num_sms": self.num_sms} if self else {}

    def check(
        self, group: EpGroup, operation: int, recorded: bool, **inputs: Tensor | None
    ) -> None:
        """Refuses what such a call cannot be; the peers get Mismatch.

        Args:
            operation: as of `EpGroup.refuse`.
            recorded: whether autograd would have to record the call.
            inputs: tensors of the group's device, by their names.
        """
        if torch.compiler.is_compiling():
            raise ValueError("part, num_sms, out: expected none under torch.compile")
        for name, value in (("part", self.part), ("num_sms", self.num_sms)):
            if type(value) is not int or not 0 <= value < 1 << 31:  # bool is no number here
                problem = f"{name}: expected an int of 0 or more, got {value!r}"
                group.refuse(operation, ValueError, problem)
        if reason := why_seen(**inputs):
            group.refuse(operation, ValueError, reason)
        if recorded:
            problem = (
                "part, num_sms, out: expected none where a tensor, or an earlier operation of the "
                "plan, requires grad: such calls have no derivative; use torch.no_grad() or "
                "plan.detach()"
            )
            group.refuse(operation, ValueError, problem)
        if self.part > 1 and self.out is None:
            problem = f"out: expected what part 1 has returned, got None with part = {self.part}"
            group.refuse(operation, ValueError, problem)

    def outputs(self, group: EpGroup, operation: int, wanted: Outputs) -> dict[str, Any] | None:
        """The given outputs by the names of `wanted`; None = none are given.

        Refuses others than an earlier part returns; the peers get Mismatch.
        """
        if self.out is None:
            return None
        expected = {name: output for parts in wanted for name, output in parts.items()}
        if not isinstance(self.out, tuple) or len(self.out) != len(expected):
            number = f" of {len(self.out)}" if isinstance(self.out, tuple) else ""
            problem = (
                f"out: expected what part 1 has returned, a tuple of {len(expected)} tensors or "
                f"None; got a {type(self.out).__name__}{number}"
            )
            group.refuse(operation, TypeError, problem)
        given = dict(zip(expected, self.out))
        for name, tensor in given.items():
            _check_output(group, operation, name, tensor, expected[name])
        return given

    def tell_graphs(self) -> None:
        """Raises the versions of outputs that the call has overwritten.

        So the backward pass of a graph that has saved them knows. Only the first part does: what
        experts have computed with its zones stays as it is in later parts.
        """
        if self.part <= 1 and self.out is not None:
            raise_versions(*self.out)


def _check_output(
    group: EpGroup,
    operation: int,
    name: str,
    tensor: Tensor | None,
    expected: tuple[tuple[int, ...], torch.dtype] | None,
) -> None:
    named = name if name == "out" else f"out.{name.removeprefix('recv_')}"
    if expected is None or tensor is None:
        if expected is not None or tensor is not None:
            wanted = "None" if expected is None else f"{expected[1]} of shape {expected[0]}"
            got = "None" if tensor is None else f"a {type(tensor).__name__}"
            group.refuse(operation, ValueError, f"{named}: expected {wanted}, got {got}")
        return
    group.require_tensors(operation, **{named: tensor})
    if problem := why_seen(**{named: tensor}):
        group.refuse(operation, ValueError, problem)
    shape, dtype = expected
    if tensor.dtype != dtype or tensor.shape != shape:
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        group.refuse(
            operation, ValueError, f"{named}: expected {dtype} of shape {shape}, got {got}"
        )
    if name == _UNWRITTEN:
        return
    if not tensor.is_contiguous():
        problem = f"{named}: expected a contiguous tensor, got strides {tensor.stride()}"
        group.refuse(operation, ValueError, problem)
    if torch.is_grad_enabled() and (tensor.requires_grad or _is_view_of_recorded(tensor)):
        problem = (
            f"{named}: expected a tensor that does not require grad, and is no view of one that "
            "does, while gradients are recorded; use torch.no_grad()"
        )
        group.refuse(operation, ValueError, problem)


def _is_view_of_recorded(tensor: Tensor) -> bool:
    base = tensor._base if tensor._is_view() else None
    return base is not None and base.requires_grad


def raise_versions(*tensors: Tensor | None) -> None:
    """Tells autograd that these tensors have been overwritten: see `Portion.tell_graphs`.

    Not in inference mode, where calls are to take no time that is not needed.
    """
    if torch.is_inference_mode_enabled():
        return
    given = [one for one in tensors if one is not None]
    if _TAKES_LISTS:
        torch.autograd.graph.increment_version(given)
        return
    for tensor in given:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


WHOLE = Portion()
