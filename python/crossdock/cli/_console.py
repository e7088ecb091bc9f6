"""Text on the terminal: tables and progress, with rich on a terminal, as plain lines elsewhere.

Plain output is what people paste into reports and what scripts read, so a pipe always gets it.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

try:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table
except ImportError:  # plain lines then
    _HAS_RICH = False
else:
    _HAS_RICH = True

_PLAIN_INTERVAL = 10.0  # seconds between two plain progress lines: a log wants few of them

Advance = Callable[[str, float], None]
"""What a progress bar is driven with: (what is being done, share of all that is done)."""


def _rich(stream: TextIO) -> Console | None:
    return Console(file=stream) if _HAS_RICH and stream.isatty() else None


def _plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: int) -> str:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = []
    for line in lines:
        cells = [
            cell.rjust(width) if column >= len(line) - right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0) -> None:
    """Prints rows of cells under a header; the last `right` columns are flush right."""
    console = _rich(sys.stdout)
    if not console:
        print(_plain_table(header, rows, right))
        return
    console.print(grid(header, rows, right=right), markup=False, highlight=False)


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0) -> Table:
    """The same as rich draws it, which must be installed."""
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for column, name in enumerate(header):
        drawn.add_column(name, justify="right" if column >= len(header) - right else "left")
    for row in rows:
        drawn.add_row(*row)
    return drawn


_PAPER = 80  # columns of a narrow terminal, and of what people paste into reports


def paragraph(text: str) -> None:
    """Prints text that is wrapped."""
    print(textwrap.fill(text, _PAPER))


def fact(name: str, text: str) -> None:
    """Prints a name and what is known, wrapped behind it."""
    print(textwrap.fill(text, _PAPER, initial_indent=f"{name:<9}", subsequent_indent=" " * 9))


_MARKS = {True: ("ok", "green"), False: ("no", "red"), None: ("", "dim")}


def facts(title: str, rows: Sequence[tuple[str, bool | None, str]]) -> None:
    """Prints a section of (name, good / bad / neither, what is known), wrapped to the screen."""
    console = _rich(sys.stdout)
    width = max(40, shutil.get_terminal_size((100, 24)).columns - 19)
    if console:
        console.print(f"[bold]{title}[/bold]")
    else:
        print(title)
    for name, good, text in rows:
        word, style = _MARKS[good]
        mark = word.ljust(4)
        if console:
            mark = f"[{style}]{mark}[/{style}]"
        first, *rest = textwrap.wrap(text, width) or [""]
        line = f"  {name:<11} {mark}"
        if console:
            console.print(line, end="", highlight=False)
            print(first)
        else:
            print(f"{line}{first}".rstrip())
        for more in rest:
            print(" " * 18 + more)


@contextlib.contextmanager
def progress(title: str) -> Iterator[Advance]:
    """A progress bar on standard error while the context lasts.

    Not on standard output, where results go. Without a terminal: a line now and then.
    """
    console = _rich(sys.stderr)
    if not console:
        yield _plain_advance(title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # Few refreshes: drawing takes a core from the ranks that are being measured.
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda what, done: bar.update(task, description=what, completed=done)


def _plain_advance(title: str) -> Advance:
    last = time.monotonic()

    def advance(what: str, done: float) -> None:
        nonlocal last
        if time.monotonic() - last >= _PLAIN_INTERVAL:
            last = time.monotonic()
            print(f"{title}: {what}, {done:.0%}", file=sys.stderr, flush=True)

    return advance
