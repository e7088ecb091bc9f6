"""Rows by expert whose zones begin at multiples of an alignment that groups do not know.

Groups take powers of two. For another alignment rows travel without padding, and torch moves them
to zones with it, and back. D = rows without padding, M = rows with it, L = experts of this rank.
"""

from __future__ import annotations

import torch

_MOST = 1 << 20  # the largest alignment that groups take


def zones_of(alignment: int) -> int:
    """The alignment of zones that a group is asked for: 1 if groups do not know this one."""
    return alignment if alignment & (alignment - 1) == 0 and alignment <= _MOST else 1


class Padding:
    """The way between rows by expert without padding and with it. Nothing waits for the host.

    Args:
        counts: [L] int32: rows of each expert.
        offsets: [L+1] int32: where they lie without padding.
        alignment: of zones.
        sizes: D, at least the sum of `counts`, and M.

    Attributes:
        num_rows: M.
        starts: [L] int32: where zones begin.
        places: [D]: the place of each row with padding.
    """

    def __init__(
        self, counts: torch.Tensor, offsets: torch.Tensor, alignment: int, sizes: tuple[int, int]
    ) -> None:
        rows, self.num_rows = sizes
        aligned = (counts + (alignment - 1)) // alignment * alignment
        self.starts = torch.cumsum(aligned, 0, dtype=torch.int32) - aligned
        row = torch.arange(rows, dtype=torch.int32, device=counts.device)
        expert = torch.bucketize(row, offsets[1:], right=True)
        # Rows behind the last one belong to no expert, and follow the last zone.
        shift = torch.nn.functional.pad(self.starts - offsets[:-1], (0, 1))
        shift[-1] = aligned.sum() - offsets[-1]
        # A prepare that has failed leaves anything in counts.
        self.places = (row + shift[expert]).long().clamp(0, max(0, self.num_rows - 1))

    def around(self, rows: torch.Tensor) -> torch.Tensor:
        """[M,...] from rows [D,...]; padding is zero."""
        # Types that torch does not index are moved as bytes.
        moved = rows.view(torch.uint8) if rows.element_size() == 1 else rows
        out = moved.new_zeros(self.num_rows, *moved.shape[1:])
        return out.index_copy_(0, self.places, moved).view(rows.dtype)

    def without(self, rows: torch.Tensor) -> torch.Tensor:
        """[D,...] from rows [M,...]."""
        return rows.index_select(0, self.places)
