#!/usr/bin/env python3
"""Draws what crossdock-bench ll --device cuda --json FILE has measured.

  plot_ll.py FILE [--out docs/figures/ll-tokens.svg]

Time against the tokens of a rank: by events, with a plain put and NCCL's all-to-all of the same
bytes; and of each of many operations in a CUDA graph. Needs matplotlib.
"""

import argparse
import json
import pathlib

from figures import finish_times, plt, save

COLORS = {
    "dispatch": "tab:blue",
    "combine": "tab:orange",
    "dispatch + combine": "tab:purple",
    "plain put": "black",
    "all-to-all": "tab:green",
}
LINES = {"bf16": "-", "fp8": "--"}


def draw_panel(axes, rows):
    for operation, color in COLORS.items():
        for kind, line in LINES.items():
            found = [row for row in rows if (row["operation"], row["rows"]) == (operation, kind)]
            if not found:
                continue
            name = "NCCL's all-to-all" if operation == "all-to-all" else operation
            axes.plot(
                [row["tokens"] for row in found],
                [row["p50_us"] for row in found],
                line,
                color=color,
                marker="o",
                markersize=3,
                label=f"{name} {kind}",
            )
    finish_times(axes, sorted({row["tokens"] for row in rows}), "tokens per rank")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default="docs/figures/ll-tokens.svg")
    arguments = parser.parse_args()
    report = json.loads(arguments.file.read_text())
    figure, panels = plt.subplots(1, 2, figsize=(10, 5), sharey=True)
    for axes, clock, title in zip(
        panels, ("events", "graph, dependent"), ("by events", "each of 20 in a CUDA graph")
    ):
        draw_panel(axes, [row for row in report["rows"] if row["clock"] == clock])
        axes.set_title(title)
    figure.suptitle(
        f"low latency, {report['ranks']} ranks: rows of H={report['hidden']}, "
        f"K={report['topk']} of E={report['experts']} experts",
        fontsize=10,
    )
    save(figure, arguments.out)


if __name__ == "__main__":
    main()
