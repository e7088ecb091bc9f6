"""Numbers by which operators find their groups and contexts."""

from __future__ import annotations

import hashlib
import itertools

__all__ = ["new_handle"]

_numbers = itertools.count(1)


def new_handle(*facts: object) -> int:
    """A number that nothing else in this process has, of 63 bits.

    Torch's persistent caches of compiled programs see this number, and nothing of what it stands
    for. So its upper half is a hash of all that decides the shapes of operators' results.

    Args:
        facts: that, with equal representations in all processes where it is equal.
    """
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "big") >> 1 << 32) + next(_numbers)
