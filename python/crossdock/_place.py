"""Names of communicators by their places in a mesh, and other numbers of their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["other_numbers", "place_name"]


def place_name(indices: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """The name of the set of ranks at these indices of the mesh's other axes: ``"data=1,pipe=0"``.

    Axes of one index tell nothing, so they are left out.
    """
    return ",".join(f"{axis}={index}" for axis, index in indices.items() if sizes[axis] > 1)


def other_numbers(numbers: Sequence[int]) -> list[int]:
    """The numbers by which a program knows the ranks; none where they are those of the ranks."""
    return [] if list(numbers) == list(range(len(numbers))) else list(numbers)
