#!/usr/bin/env python3
"""Tells what the ranks of serve.py have written down, and puts it into one JSON file.

    timeline.py FOLDER [--json FILE]

bench/plot.py draws that file.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import pathlib
import statistics
import time
from typing import Any

BIN = 0.1  # seconds
MARKS = {  # in the order in which they come
    "killed": "rank {rank} is killed",
    "agreed": "the others have agreed on a view without it",
    "started": "the launcher has started it again",
    "joined": "the others have let it in",
    "activated": "it is a member, and works",
}


class Log:
    """A process's diary, line by line, so that much of it is left when it is killed."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file = path.open("w", buffering=1)
        self._bin = self._tokens = 0
        self._latest, self._longest = time.monotonic(), 0.0
        self._steps: collections.Counter[int] = collections.Counter()

    def mark(self, what: str) -> None:
        """Something has happened. Any thread."""
        self._write(mark=what, at=time.monotonic())

    def count(self, tokens: int, members: int) -> None:
        """So many ranks have made a step, and compared all outputs; this one's tokens."""
        now = time.monotonic()
        if self._steps:
            self._longest = max(self._longest, now - self._latest)
        self._latest = now
        if int(now / BIN) != self._bin:
            self._write(bin=self._bin, tokens=self._tokens)
            self._bin, self._tokens = int(now / BIN), 0
        self._tokens += tokens
        self._steps[members] += 1

    def close(self) -> None:
        """The end of a process that has done all."""
        self._write(bin=self._bin, tokens=self._tokens)
        self._write(steps=self._steps, longest_pause=round(self._longest, 4))
        self._file.close()

    def _write(self, **line: object) -> None:
        self._file.write(json.dumps(line) + "\n")


def read(folder: pathlib.Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The lines of each process, by its rank and how many processes that had before."""
    found = {}
    for path in folder.glob("rank-*.jsonl"):
        _, rank, times = path.stem.split("-")
        lines = path.read_text().splitlines(keepends=True)
        # A killed process may have left a part of a line.
        found[int(rank), int(times)] = [json.loads(line) for line in lines if line[-1] == "\n"]
    return dict(sorted(found.items()))


def report(folder: pathlib.Path) -> dict[str, Any]:
    """All events, in seconds since all ranks worked, and the tokens of tenths of a second."""
    processes = read(folder)
    tokens: collections.Counter[int] = collections.Counter()
    marks: dict[str, float] = {}
    again = []
    for (_, times), lines in processes.items():
        for line in lines:
            if line.get("tokens"):
                tokens[line["bin"]] += line["tokens"]
            if line.get("mark") in MARKS and (line["mark"] != "started" or times > 0):
                marks[line["mark"]] = max(line["at"], marks.get(line["mark"], 0))  # the last rank's
        again.append(sum(line.get("mark") == "made again" for line in lines))
    survivors = [lines[-1] for (_, times), lines in processes.items() if times == 0]
    survivors = [line for line in survivors if "steps" in line]
    missing = [what for what in MARKS if what not in marks]
    if missing or not survivors:
        raise SystemExit(f"{folder}: serve.py has not come to its end: {missing} missing")
    steps = {int(members): count for members, count in survivors[0]["steps"].items()}
    # Parts of the first and of the last tenth are missing.
    first, last = min(tokens) + 1, max(tokens) - 1
    return {
        "ranks": max(steps),
        "killed_rank": max(rank for rank, times in processes if times > 0),
        "marks": {what: round(marks[what] - first * BIN, 4) for what in MARKS},
        "steps": sum(steps.values()),
        "steps_without_it": sum(steps.values()) - steps[max(steps)],
        "steps_made_again": max(again),
        "longest_pause": max(line["longest_pause"] for line in survivors),
        "rows": [
            {"second": round((n - first) * BIN, 1), "tokens_per_second": round(tokens[n] / BIN)}
            for n in range(first, last + 1)
        ],
    }


def mean_rate(found: dict[str, Any], begin: float, end: float) -> int:
    """Tokens per second of the whole tenths between two times."""
    inside = [
        row["tokens_per_second"]
        for row in found["rows"]
        if begin <= row["second"] and row["second"] + BIN <= end
    ]
    return round(statistics.mean(inside)) if inside else 0


def tell(found: dict[str, Any]) -> None:
    """Prints it in words."""
    marks, begin = found["marks"], found["marks"]["killed"]
    for what, words in MARKS.items():
        time_of = f"{begin:8.3f} s" if what == "killed" else f"{marks[what] - begin:+8.3f} s"
        print(f"{time_of}  {words.format(rank=found['killed_rank'])}")
    print(
        f"{found['steps']} steps, {found['steps_without_it']} of them without rank "
        f"{found['killed_rank']}, {found['steps_made_again']} made again; all outputs are exact"
    )
    print(f"longest pause between two steps of a rank: {1000 * found['longest_pause']:.0f} ms")
    rates = (
        mean_rate(found, 0, begin),
        mean_rate(found, marks["agreed"], marks["started"]),
        mean_rate(found, marks["activated"], float("inf")),
    )
    print("tokens per second: {:,} before, {:,} without it, {:,} after".format(*rates))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, help="file for all of it")
    options = parser.parse_args()
    found = report(options.folder)
    tell(found)
    if options.json:
        from crossdock.cli import _host

        head = {"title": "examples/elastic_serving", "machine": _host.processor()}
        head |= {"date": datetime.date.today().isoformat()} | found
        rows = ",\n".join(map(json.dumps, head.pop("rows")))
        begin = json.dumps(head).removesuffix("}")
        options.json.write_text(f'{begin}, "rows": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
