"""Files and folders of a checkpoint: there when they are complete, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import torch

__all__ = ["give_name", "make_folder", "require_new", "write"]


def write(path: Path, part: dict[str, Any]) -> None:
    """All or nothing under this name, and on the disk."""
    unfinished = path.with_suffix(".tmp")
    with open(unfinished, "wb") as file:
        torch.save(part, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def require_new(path: Path) -> None:
    """Refuses a path that this rank sees something under."""
    if path.exists():
        raise FileExistsError(f"path: expected a new folder, got {path}, which exists")


def make_folder(path: Path, partial: Path | None) -> None:
    """Looks on every rank, makes it on one."""
    require_new(path)
    if partial is not None:
        partial.mkdir(parents=True)


def give_name(partial: Path | None, path: Path) -> None:
    """Renames, and puts that on the disk; on one rank."""
    if partial is None:
        return
    appeared = FileExistsError(
        f"path: {path} has appeared while this checkpoint was written: do ranks of several "
        "communicators save to it? See `replicas` of save_checkpoint"
    )
    # Ranks of another communicator may have saved to it, also between these two lines: rename()
    # refuses a folder with files, and would replace an empty one.
    if path.exists():
        raise appeared
    try:
        partial.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise appeared from error
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
