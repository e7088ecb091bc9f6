#!/usr/bin/env python3
"""Draws what crossdock-bench ll --device cuda --json FILE has measured.

  plot_ll.py FILE [--out docs/figures/ll-tokens.svg]

Time against the tokens of a rank: by events, with a plain put and NCCL's all-to-all of the same
bytes; and of each of many operations in a CUDA graph. Needs matplotlib.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of what draws)
from matplotlib import ticker  # noqa: E402

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
    tokens = sorted({row["tokens"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, labels=tokens)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("microseconds, p50 of the slowest rank")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default="docs/figures/ll-tokens.svg")
    arguments = parser.parse_args()
    report = json.loads(arguments.file.read_text())
    plt.rcParams["svg.hashsalt"] = "crossdock"
    figure, panels = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    for axes, clock, title in zip(
        panels, ("events", "graph, dependent"), ("by events", "each of 20 in a CUDA graph")
    ):
        draw_panel(axes, [row for row in report["rows"] if row["clock"] == clock])
        axes.set_title(title)
    figure.suptitle(
        f"low latency, {report['ranks']} ranks, H={report['hidden']} K={report['topk']} "
        f"E={report['experts']}",
        fontsize=10,
    )
    figure.tight_layout()
    # Without the date: equal input gives equal files.
    svg = arguments.out.suffix == ".svg"
    figure.savefig(arguments.out, metadata={"Date": None} if svg else None)
    print(arguments.out)


if __name__ == "__main__":
    main()
