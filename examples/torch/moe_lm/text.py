"""The text: the source files of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

# Folders that are not the library's own modules, or much like each other.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_HELD_OUT_EVERY = 20  # one file in so many is never trained on


@dataclass(frozen=True)
class Text:
    """Bytes of all files, one after the other, in order of their names."""

    train: torch.Tensor  # [bytes] uint8
    held_out: torch.Tensor  # [bytes] uint8
    checksum: int  # of both, to notice a resume with another text


def read_text(folder: Path | None = None) -> Text:
    """The ``.py`` files below ``folder``, by default the standard library's.

    Raises:
        ValueError: fewer than 100,000 bytes there.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    files = sorted(
        file for file in folder.rglob("*.py") if not _SKIPPED & set(file.relative_to(folder).parts)
    )
    for number, file in enumerate(files):
        parts[number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1].append(file.read_bytes())
    train, held_out = (b"".join(part) for part in parts)
    if min(len(train), len(held_out) * _HELD_OUT_EVERY) < 100_000:
        raise ValueError(f"text: expected at least 100000 bytes of .py files, got few in {folder}")
    return Text(_as_tensor(train), _as_tensor(held_out), zlib.crc32(held_out, zlib.crc32(train)))


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch_of_step(
    data: torch.Tensor, seed: int, step: int, sequences: int, context: int, rank: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the batch of a step; the whole batch depends on seed and step alone.

    Returns:
        Inputs and targets, ``[sequences / ranks, context]`` int64 each.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(data.numel() - context - 1, (sequences,), generator=generator)
    mine = starts[rank * sequences // ranks : (rank + 1) * sequences // ranks]
    windows = data[mine[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
