#!/usr/bin/env python3
"""Draws what crossdock-bench gemm --device cuda --json FILE has measured.

  plot_gemm.py FILE... [--out docs/figures/gemm-tokens.svg]

A panel for each layer: how many times as long as the product alone each way takes, against the
tokens of all ranks. Ways that have been captured count by their graphs. Needs matplotlib.
"""

import argparse
import math
import pathlib

from figures import finish, plt, save
from gemm_tables import ALGORITHMS, APART, AUTO, PRODUCT, read

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
    axes.axhline(1, color="gray", linewidth=1)
    axes.set_title(points[0].shape)
    tokens = sorted({point.tokens for point in points})
    finish(axes, tokens, "tokens of all ranks", "p50 / product alone")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default="docs/figures/gemm-tokens.svg")
    arguments = parser.parse_args()
    reports, points = read(arguments.files)
    layers = list(dict.fromkeys(point.shape for point in points))
    lines = math.ceil(len(layers) / COLUMNS)
    figure, panels = plt.subplots(
        lines, min(len(layers), COLUMNS), figsize=(11, 3.6 * lines), squeeze=False
    )
    for axes, layer in zip(panels.flat, layers):
        draw_panel(axes, [point for point in points if point.shape == layer])
    for axes in panels.flat[len(layers) :]:
        axes.remove()
    figure.suptitle(f"{reports[0]['ranks']} ranks, {reports[0]['dtype']}", fontsize=10)
    save(figure, arguments.out)


if __name__ == "__main__":
    main()
