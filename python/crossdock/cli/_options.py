"""Types of options for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def number(least: int) -> Callable[[str], int]:
    """Parses whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            expected = f"expected a whole number from {least} on"
            raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
        return int(text)

    return parse
