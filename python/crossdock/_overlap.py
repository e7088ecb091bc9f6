"""Schedules of a layer's experts: whether rows travel beside products, and in how many parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from crossdock._core import constants

__all__ = ["Overlap", "OverlapOption", "check_overlap", "schedule_of", "sms_of"]

_DEFAULT_PARTS, _DEFAULT_SMS = 4, 16


@dataclasses.dataclass(frozen=True)
class Overlap:
    """A schedule: how many parts, and the multiprocessors of transfers beside products.

    Attributes:
        parts: P: the experts of every rank are dealt into that many parts, and the products of one
            run while rows of others travel. 1 to 16, at most the fewest experts of a rank; 1: in
            the backward pass alone something runs beside transfers, the gradients of matrices.
        sms: CUDA: multiprocessors of transfers that run beside products, at most the group's; 0 =
            as the group; None = 16, or the group's where these are fewer.
    """

    parts: int = _DEFAULT_PARTS
    sms: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("parts", self.parts, 1), ("sms", self.sms, 0)):
            if value is None and name == "sms":
                continue
            if type(value) is not int or not least <= value < 1 << 31:
                raise ValueError(f"{name}: expected an int of {least} or more, got {value!r}")


OverlapOption = bool | Literal["auto"] | Overlap


def check_overlap(overlap: Any) -> None:
    """Refuses what is no option.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(overlap, bool | Overlap) and not (
        isinstance(overlap, str) and overlap == "auto"
    ):
        raise TypeError(f"overlap: expected a bool, 'auto' or an Overlap, got {overlap!r}")


def schedule_of(
    overlap: OverlapOption, fewest: int, num_sms: int, automatic: Callable[[], dict[str, Any]]
) -> Overlap | None:
    """The schedule that an option stands for, with a number of `sms`; None = one after another.

    Args:
        overlap: False = one after another; True = 4 parts, or as many as `fewest`; "auto" = as
            `automatic` chooses.
        fewest: experts of the rank that has the fewest.
        num_sms: the group's; 0 = the library chooses.
        automatic: gives ``parts`` and ``num_sms`` of ``xd_moe_schedule``.

    Raises:
        TypeError: as `check_overlap`.
        ValueError: more parts than one, and than a rank has experts.
    """
    check_overlap(overlap)
    if overlap is False:
        return None
    if overlap == "auto":
        chosen = automatic()
        return Overlap(chosen["parts"], chosen["num_sms"]) if chosen["parts"] else None
    most = max(1, min(constants.MAX_PARTS, fewest))  # one part is everybody's, also without experts
    asked = Overlap(min(_DEFAULT_PARTS, most)) if overlap is True else overlap
    if asked.parts > most:
        raise ValueError(
            f"overlap: expected at most {most} parts, the experts of the rank with the fewest, got "
            f"{overlap}"
        )
    return dataclasses.replace(asked, sms=sms_of(asked.sms, num_sms))


def sms_of(sms: int | None, num_sms: int) -> int:
    """The multiprocessors of transfers beside products.

    Args:
        sms: as of `Overlap`.
        num_sms: the group's; 0 = the library chooses.
    """
    return min(_DEFAULT_SMS, num_sms or _DEFAULT_SMS) if sms is None else sms
