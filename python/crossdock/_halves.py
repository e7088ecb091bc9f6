"""The order of second halves: the library takes them in the order of the first ones."""

from __future__ import annotations

__all__ = ["Half", "OpenHalves"]


class Half:
    """An operation whose first half is called, and which waits for its second."""

    def __init__(self) -> None:
        self.spent = ""  # why it has no second half any more


class OpenHalves:
    """The operations of one kind of a group that are between their halves, oldest first.

    The library knows operations by their order alone: a second half that is called out of order
    would be given another batch.

    Args:
        in_flight: as of the group's config, 0 = the default. One more is refused by the library, on
            a GPU only after the call, and has no second half to wait for.
    """

    def __init__(self, in_flight: int) -> None:
        self._most = in_flight or 2
        self._open: list[Half] = []

    def add(self, half: Half) -> None:
        """Its first half has succeeded."""
        if len(self._open) < self._most:
            self._open.append(half)

    def require_oldest(self, half: Half, call: str) -> None:
        """Refuses a second half that is not next; nothing has happened then.

        Args:
            half: of the operation. One that was never added is left to the library.
            call: what the caller has called, for the error's text.

        Raises:
            ValueError: it has had its second half, or older ones wait for theirs.
        """
        if half.spent:
            raise ValueError(f"{call}: {half.spent}")
        for older, one in enumerate(self._open):
            if one is half and older > 0:
                raise ValueError(
                    f"{call}: expected second halves in the order of their first ones, got one "
                    f"while {older} older of its kind wait for theirs"
                )

    def take(self, half: Half) -> None:
        """The second half is being called, come what may."""
        half.spent = "expected one call, got a second one"
        self._open = [one for one in self._open if one is not half]

    def forget(self) -> None:
        """The library has forgotten them all."""
        for half in self._open:
            half.spent = "expected an operation between its halves, got one that reset has dropped"
        self._open = []
