"""Views: which ranks go on together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from crossdock import _core

__all__ = ["View", "agree", "view_of"]


@dataclasses.dataclass(frozen=True)
class View:
    """A number and the ranks that go on together, equal on all ranks that have it.

    Attributes:
        number: 0 = that of creation, with all ranks.
        members: ranks, ascending.
        joined: members that were not in the view that this rank knew before.
        gone: the reverse.
        all_ok: whether all members voted ``ok=True``.
        first_step: the lowest step of the members' votes.
        last_step: the highest.
    """

    number: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    gone: tuple[int, ...]
    all_ok: bool
    first_step: int
    last_step: int


def view_of(core: _core.Comm) -> View:
    """The latest view that this rank has found."""
    return View(**core.view())


def agree(
    core: _core.Comm,
    *,
    step: int,
    ok: bool,
    leave: bool,
    leave_out: Iterable[int],
    timeout_ms: int,
    stream: int = 0,
) -> View:
    """As ``crossdock.Comm.agree``; ``stream``: address of a CUDA stream, 0 = none."""
    found = core.agree(
        step=step,
        ok=ok,
        leave=leave,
        leave_out=list(leave_out),
        timeout_ms=timeout_ms,
        stream=stream,
    )
    return View(**found)
