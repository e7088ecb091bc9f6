"""The text as tensors, and the batch of each step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .corpus import read_corpus


@dataclass(frozen=True)
class Text:
    """Bytes of all files, one after the other, in order of their names."""

    train: torch.Tensor  # [bytes] uint8
    held_out: torch.Tensor  # [bytes] uint8
    checksum: int  # of both, to notice a resume with another text


def read_text(folder: Path | None = None) -> Text:
    """The ``.py`` files below ``folder``; see `read_corpus`."""
    train, held_out, checksum = read_corpus(folder)
    return Text(_as_tensor(train), _as_tensor(held_out), checksum)


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
