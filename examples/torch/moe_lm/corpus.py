"""The text: the source files of Python's standard library, as bytes. Needs no framework."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

# Folders that are not the standard library's modules, or that hold tables rather than programs.
_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
_HELD_OUT_EVERY = 20  # one file in so many is never trained on


class Corpus(NamedTuple):
    """Bytes of all files, one after the other, in order of their names."""

    train: bytes
    held_out: bytes
    checksum: int  # of both


def read_corpus(folder: Path | None = None) -> Corpus:
    """The ``.py`` files below ``folder``, by default the standard library's; four spaces are a tab.

    Raises:
        ValueError: fewer than 100,000 bytes there.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    files = sorted(
        file for file in folder.rglob("*.py") if not _SKIPPED & set(file.relative_to(folder).parts)
    )
    for number, file in enumerate(files):
        # Indentation as tabs: less of nothing to predict.
        text = file.read_bytes().replace(b"    ", b"\t")
        parts[number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1].append(text)
    train, held_out = (b"".join(part) for part in parts)
    if min(len(train), len(held_out) * _HELD_OUT_EVERY) < 100_000:
        raise ValueError(f"text: expected at least 100000 bytes of .py files, got few in {folder}")
    return Corpus(train, held_out, zlib.crc32(held_out, zlib.crc32(train)))
