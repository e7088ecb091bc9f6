"""A part of dispatch or combine, and the multiprocessors of one call.

Such calls are for authors of schedules, who order them by streams and events. They go to the
functions of operators directly, and have no derivative: a part writes into outputs of an earlier
call, which an operator of torch must not do.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._group import EpGroup
    from ._outputs import Outputs

__all__ = ["WHOLE", "Portion"]


@dataclasses.dataclass(frozen=True)
class Portion:
    """The part of an operation that one call does, its multiprocessors and its outputs.

    Attributes:
        part: 0 = all; p = the p-th part.
        num_sms: CUDA: multiprocessors; 0 = as the group.
        out: the outputs in their order, which an earlier part has returned; None = new ones.
    """

    part: int = 0
    num_sms: int = 0
    out: tuple[Tensor | None, ...] | None = None

    def __bool__(self) -> bool:
        return self.part != 0 or self.num_sms != 0 or self.out is not None

    def fields(self) -> dict[str, int]:
        """The fields of the C struct."""
        return {"part": self.part, "num_sms": self.num_sms} if self else {}

    def outputs(self, wanted: Outputs) -> dict[str, Any] | None:
        """The given outputs by the names of `wanted`; None = none are given."""
        if self.out is None:
            return None
        return dict(zip([name for parts in wanted for name in parts], self.out, strict=True))

    def check(self, group: EpGroup, operation: int, recorded: bool) -> None:
        """Refuses what such a call cannot be; the peers get Mismatch."""
        if torch.compiler.is_compiling():
            raise ValueError("part, num_sms, out: expected none under torch.compile")
        for name, value in (("part", self.part), ("num_sms", self.num_sms)):
            if not isinstance(value, int) or not 0 <= value < 1 << 31:
                group.refuse(operation, ValueError, f"{name}: expected 0 or more, got {value!r}")
        if recorded:
            problem = (
                "part, num_sms, out: expected none where a tensor requires grad: such calls have "
                "no derivative; use torch.no_grad()"
            )
            group.refuse(operation, ValueError, problem)
        if self.part > 1 and self.out is None:
            problem = f"out: expected what part 1 has returned, got None with part = {self.part}"
            group.refuse(operation, ValueError, problem)


WHOLE = Portion()
