"""Where runs write: folders of the user, in which only files of earlier runs may be replaced."""

from __future__ import annotations

import tempfile
from pathlib import Path

_OF_A_COMPARISON = ("log.jsonl", "first-step-*.pt")  # all that a run of a comparison writes


def make_folder(path: Path) -> None:
    """Makes ``path``, unless it is there, before a run needs it.

    Raises:
        ValueError: nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        problem = f"expected a folder to write to: {error.strerror}"
        raise ValueError(f"--folder: {path}: {problem}") from None


def make_room(*paths: Path) -> None:
    """`make_folder` each, and remove what earlier runs of a comparison have left there.

    Raises:
        ValueError: nothing can be written there, or there are files that no comparison writes; then
            none is removed.
    """
    for path in paths:
        make_folder(path)
    files = [file for path in paths for file in sorted(path.iterdir())]
    for file in files:
        if file.is_dir() or not any(file.match(pattern) for pattern in _OF_A_COMPARISON):
            problem = f"expected files of an earlier comparison only, to overwrite; got {file.name}"
            raise ValueError(f"--folder: {file.parent}: {problem}")
    for file in files:
        file.unlink()
