#!/usr/bin/env python3
"""Draws what crossdock-bench gemm --device cuda --json FILE has measured.

  plot_gemm.py FILE... [--out docs/figures/gemm-tokens.svg]

A panel for each layer: how many times as long as the product alone each way takes, against the
tokens of all ranks. Ways that have been captured count by their graphs. Needs matplotlib.
"""

import argparse
import math
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of what draws)

from gemm_tables import ALGORITHMS, APART, AUTO, PRODUCT, read  # noqa: E402

LINES = {APART: ("NCCL and product", "s--", "tab:green"), AUTO: ("AUTO", "o-", "black")}
COLORS = ("tab:blue", "tab:orange", "tab:red", "tab:purple")
COLUMNS = 3


def draw_panel(axes, points):
    lines = {name: (name, ".:", color) for name, color in zip(ALGORITHMS, COLORS)}
    for way, (label, line, color) in {**lines, **LINES}.items():
        found = [point for point in points if point.p50(way) and point.p50(PRODUCT)]
        if not found:
            continue
        axes.plot(
            [point.tokens for point in found],
            [point.p50(way) / point.p50(PRODUCT) for point in found],
            line,
            color=color,
            markersize=4,
            label=label,
        )
    tokens = sorted({point.tokens for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, labels=tokens, rotation=45)
    axes.minorticks_off()
    axes.axhline(1, color="gray", linewidth=1)
    axes.set_title(points[0].shape)
    axes.set_xlabel("tokens of all ranks")
    axes.set_ylabel("p50 / product alone")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default="docs/figures/gemm-tokens.svg")
    arguments = parser.parse_args()
    reports, points = read(arguments.files)
    layers = list(dict.fromkeys(point.shape for point in points))
    plt.rcParams["svg.hashsalt"] = "crossdock"
    lines = math.ceil(len(layers) / COLUMNS)
    figure, panels = plt.subplots(
        lines, min(len(layers), COLUMNS), figsize=(13, 4.2 * lines), squeeze=False
    )
    for axes, layer in zip(panels.flat, layers):
        draw_panel(axes, [point for point in points if point.shape == layer])
    for axes in panels.flat[len(layers) :]:
        axes.remove()
    figure.suptitle(f"{reports[0]['ranks']} ranks, {reports[0]['dtype']}", fontsize=10)
    figure.tight_layout()
    # Without the date: equal input gives equal files.
    svg = arguments.out.suffix == ".svg"
    figure.savefig(arguments.out, metadata={"Date": None} if svg else None)
    print(arguments.out)


if __name__ == "__main__":
    main()
