"""How a run shows itself: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

try:
    from rich.progress import BarColumn, Progress as RichProgress, TextColumn, TimeRemainingColumn
except ImportError:  # lines, then
    RichProgress = None

_LINES = 10  # of a whole run
_WIDE = 120  # columns of a terminal with room for a bar beside all that is known
_PAPER = 80  # columns of lines


class Progress:
    """Shows each step's record; a context manager."""

    def __init__(self, title: str, steps: int, done: int) -> None:
        self._title, self._steps, self._done = title, steps, done
        self._start, self._first = time.perf_counter(), done
        self._bar = None

    def __enter__(self) -> Progress:
        if RichProgress is not None and sys.stdout.isatty():
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
            )
            self._task = self._bar.add_task(
                self._title, total=self._steps, completed=self._done, text=""
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, record: dict[str, Any]) -> None:
        """A record of `Trainer.train_step`."""
        self._done = record["step"] + 1
        seconds = time.perf_counter() - self._start
        rate = (self._done - self._first) * record["tokens"] / seconds
        busiest = max(max(load) * len(load) for load in record["load"])
        text = f"step {self._done}/{self._steps}  loss {record['loss']:.4f}"
        more = (f"  {rate:,.0f} tokens/s", f"  busiest expert {busiest:.1f}x its share")
        if self._bar is not None:
            text += "".join(more if self._bar.console.width >= _WIDE else ())
            self._bar.update(self._task, completed=self._done, text=text)
        elif self._done % max(self._steps // _LINES, 1) == 0 or self._done in (1, self._steps):
            line = f"{self._title}: {text}"
            for part in more:
                line += part if len(line + part) <= _PAPER else ""
            print(line, flush=True)
