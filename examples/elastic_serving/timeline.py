#!/usr/bin/env python3
"""Tells what the ranks of serve.py have written down, and puts it into one JSON file.

    timeline.py FOLDER [--json FILE]

bench/plot.py draws that file.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import pathlib
import time
from typing import Any

RANKS, BIN = 4, 0.1  # seconds
MARKS = {  # in the order in which they come
    "killed": "rank {rank} is killed",
    "agreed": "the others have agreed on a view without it",
    "runs": "its new process runs",
    "joined": "the others have let it in",
    "activated": "it is a member, and works",
}


class Log:
    """A process's diary, line by line, so that it is left when that is killed."""

    def __init__(self, path: pathlib.Path, options: argparse.Namespace) -> None:
        self._file = path.open("w", buffering=1)
        given = vars(options) | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
        self._write(options={name: value for name, value in given.items() if name != "folder"})

    def mark(self, what: str) -> None:
        """Something has happened. Any thread."""
        self._write(mark=what, at=time.monotonic())

    def count(self, step: int, tokens: int, members: int) -> None:
        """So many ranks have made a step, each with exact outputs; this one's tokens."""
        self._write(step=step, tokens=tokens, members=members, at=time.monotonic())

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


def require(holds: bool, expected: str) -> None:
    """Ends the program if something is not as it has to be."""
    if not holds:
        raise SystemExit(f"expected {expected}: serve.py has failed, or still runs")


def report(folder: pathlib.Path) -> dict[str, Any]:
    """All events, in seconds since all ranks worked, and the tokens of tenths of a second."""
    processes = read(folder)
    rank = max((r for r, times in processes if times > 0), default=-1)
    require(rank >= 0, "a process that came later")
    done = {p: lines for p, lines in processes.items() if p != (rank, 0)}
    ended = {r for (r, _), lines in done.items() if lines and lines[-1].get("mark") == "done"}
    require(len(done) == RANKS == len(ended), "that all but the killed process come to their end")
    made = {p: [line for line in lines if "step" in line] for p, lines in processes.items()}
    survivors = [made[process] for process in done if process[1] == 0]
    equal = [[(line["step"], line["members"]) for line in steps] for steps in survivors]
    numbers = [step for step, _ in equal[0]]
    same = equal == [equal[0]] * (RANKS - 1) and numbers == list(range(len(numbers)))
    require(same, "the same steps on all survivors, each once")
    events = [line for lines in processes.values() for line in lines if "mark" in line]
    marks = {line["mark"]: line["at"] for line in sorted(events, key=lambda one: one["at"])}
    require(set(marks) >= set(MARKS), f"the marks {list(MARKS)}, not only {list(marks)}")
    # The figure is of the time when all first processes had begun, and none had ended.
    begin = max(steps[0]["at"] for (_, times), steps in made.items() if times == 0 and steps)
    end = min(made[process][-1]["at"] for process in done)
    tokens = [0] * int((end - begin) / BIN)
    for line in (line for steps in made.values() for line in steps):
        if 0 <= (n := math.floor((line["at"] - begin) / BIN)) < len(tokens):
            tokens[n] += line["tokens"]
    pauses = [[b["at"] - a["at"] for a, b in itertools.pairwise(s)] for s in survivors]
    again = [sum(line.get("mark") == "made again" for line in lines) for lines in done.values()]
    return {
        "options": processes[0, 0][0]["options"],
        "ranks": RANKS,
        "killed_rank": rank,
        "marks": {what: round(marks[what] - begin, 4) for what in MARKS},
        "steps": len(numbers),
        "steps_without_it": sum(members < RANKS for _, members in equal[0]),
        "steps_made_again": max(again),
        "outputs_checked": sum(line["tokens"] for steps in made.values() for line in steps),
        "longest_pause": round(max(map(max, pauses)), 4),
        "rows": [
            {"second": round(n * BIN, 1), "tokens_per_second": round(count / BIN)}
            for n, count in enumerate(tokens)
        ],
    }


def tell(found: dict[str, Any]) -> None:
    """Prints it in words."""
    marks, begin = found["marks"], found["marks"]["killed"]
    for what, words in MARKS.items():
        time_of = f"{begin:8.3f} s" if what == "killed" else f"{marks[what] - begin:+8.3f} s"
        print(f"{time_of}  {words.format(rank=found['killed_rank'])}")
    print(
        f"{found['steps']} steps, {found['steps_without_it']} of them without rank "
        f"{found['killed_rank']}, {found['steps_made_again']} made again; "
        f"{found['outputs_checked']:,} outputs compared, all exact"
    )
    print(f"longest time between the ends of two steps: {1000 * found['longest_pause']:.0f} ms")


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

        head = {"title": "examples/elastic_serving", "machine": _host.processor()} | found
        head["date"] = datetime.date.today().isoformat()
        rows = ",\n".join(map(json.dumps, head.pop("rows")))
        begin = json.dumps(head).removesuffix("}")
        options.json.write_text(f'{begin}, "rows": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
