#!/usr/bin/env python3
"""Draws what crossdock-bench ep --device cuda --preset sweep --json FILE has measured.

  plot.py FILE... [--out docs/figures] [--format svg]

ep-tokens: time against the tokens of a rank, with the wire's floor and NCCL's all-to-all of as many
bytes; ep-sms: time against the multiprocessors allowed, with the floor. Parts that the files lack
are left out. Needs matplotlib.
"""

import argparse
import json
import pathlib
import sys

from figures import finish_times, plt, save

COLORS = {"dispatch": "tab:blue", "combine": "tab:orange", "prepare": "tab:gray"}
LINES = {"bf16": "-", "fp8": "--", "bf16-fp8": "-."}
LABELS = {"tokens": "tokens per rank", "sms_allowed": "multiprocessors allowed"}


def read(paths):
    """(first line of the first file, all measured lines)."""
    heads, rows = [], []
    for path in paths:
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            (heads if "machine" in entry else rows).append(entry)
    if not heads:
        sys.exit("no line describes the machine: was this written by --json?")
    return heads[0], rows


def curves(rows, x, y):
    """{(operation, dtype): ([x], [y])} of the rows that have y, by ascending x."""
    found = {}
    for row in sorted(rows, key=lambda row: row[x]):
        if row.get(y):
            xs, ys = found.setdefault((row["operation"], row["dtype"]), ([], []))
            xs.append(row[x])
            ys.append(row[y])
    return found


def draw_panel(axes, rows, x):
    for (operation, dtype), (xs, ys) in curves(rows, x, "p50_us").items():
        label = operation if operation == "prepare" else f"{operation} {dtype}"
        axes.plot(
            xs, ys, LINES[dtype], color=COLORS[operation], marker="o", markersize=3, label=label
        )
    # Floor and baseline depend on the bytes alone, so dispatch's stand for all operations.
    nccl = "NCCL's all-to-all" + (" (takes what it wants)" if x == "sms_allowed" else "")
    for y, name, color in [("floor_us", "wire floor", "black"), ("nccl_us", nccl, "tab:green")]:
        for (operation, dtype), (xs, ys) in curves(rows, x, y).items():
            if operation == "dispatch":
                axes.plot(xs, ys, LINES[dtype], color=color, linewidth=1, label=f"{name} {dtype}")
    finish_times(axes, sorted({row[x] for row in rows}), LABELS[x])


def draw(head, rows, part, x, path):
    rows = [row for row in rows if row["part"] == part and row["memory"] == "zero-copy"]
    if not rows:
        return
    layouts = sorted({row["layout"] for row in rows}, reverse=True)
    size = (5 * len(layouts), 5)
    figure, panels = plt.subplots(1, len(layouts), figsize=size, sharey=True, squeeze=False)
    for axes, layout in zip(panels[0], layouts):
        # prepare is the same for both layouts, and measured with one.
        shown = [row for row in rows if layout == row["layout"] or row["operation"] == "prepare"]
        draw_panel(axes, shown, x)
        axes.set_title(f"rows by {layout}")
    first = rows[-1]
    tokens = "" if x == "tokens" else f"T={first['tokens']} tokens of a rank, "
    figure.suptitle(
        f"{first['ranks']} ranks on {first['gpus']} of {head['machine']['count']} "
        f"{head['machine']['name']}: {tokens}rows of H={first['hidden']}, "
        f"K={first['topk']} of E={first['experts']} experts",
        fontsize=10,
    )
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/figures"))
    parser.add_argument("--format", choices=["svg", "png"], default="svg")
    arguments = parser.parse_args()
    head, rows = read(arguments.files)
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(head, rows, "tokens", "tokens", arguments.out / f"ep-tokens.{arguments.format}")
    draw(head, rows, "sms", "sms_allowed", arguments.out / f"ep-sms.{arguments.format}")


if __name__ == "__main__":
    main()
