#!/usr/bin/env python3
"""Draws what crossdock-bench --json FILE has measured.

  plot.py [FILE...] [--out docs/figures] [--format svg]

Without a FILE, all figures of the documentation, from docs/results. A figure has its file's name.
Files of these programs have one:

  ep --device cuda   of its parts "tokens" and "sms": time against the tokens of a rank, and against
                     the multiprocessors allowed, with the wire's floor and NCCL's all-to-all
  ll --device cuda   time against the tokens of a rank, with a plain put and NCCL's all-to-all
  gemm               how many times as long as the product alone each way takes, against the tokens
                     of all ranks. Ways that have been captured count by their graphs
  layer.py           times of a layer's schedules and of their parts, by the serial schedule's
  placement.py       the busiest rank over the mean, against the slots moved
  timeline.py        tokens per second while a rank of examples/elastic_serving is replaced

and so have the losses of train_moe_lm.py by the wire of combine, put into one file.

Needs matplotlib.
"""

import argparse
import itertools
import json
import math
import pathlib
import sys

import figures
from figures import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE
from gemm.tables import APART, AUTO, PRODUCT, points_of

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
DRAWN = (
    "h100x2-tokens",
    "h100x2-sms",
    "h100x2-ll",
    "h100x2-gemm",
    "xeon2-gemm-bf16",
    "xeon2-elastic",
    "xeon2-placement",
    "xeon2-wire-loss",
)

DASHES = {"bf16": "-", "fp8": "--", "bf16-fp8": ":"}
OPERATIONS = {
    "prepare": {"color": GREY, "marker": "D"},
    "dispatch": {"color": BLUE, "marker": "o"},
    "combine": {"color": ORANGE, "marker": "s"},
    "dispatch + combine": {"color": PURPLE, "marker": "v"},
    "plain put": {"color": BLACK, "marker": "x"},
    "all-to-all": {"color": GREEN, "marker": "^"},
}
NAMES = {"all-to-all": "NCCL's all-to-all"}


def read(path):
    """(the first part of a file, which says what was run; the rows that were measured)."""
    text = path.read_text()
    try:
        report = json.loads(text)
    except json.JSONDecodeError:  # an object for each line
        head, *rows = map(json.loads, text.splitlines())
        return head, rows
    return report, report["rows"]


# ---- Expert parallelism --------------------------------------------------------------------------

X_LABELS = {"tokens": "tokens per rank", "sms_allowed": "multiprocessors allowed"}


def curves(rows, x, y):
    """{(operation, dtype): ([x], [y])} of the rows that have y, by ascending x."""
    found = {}
    for row in sorted(rows, key=lambda row: row[x]):
        if row.get(y):
            xs, ys = found.setdefault((row["operation"], row["dtype"]), ([], []))
            xs.append(row[x])
            ys.append(row[y])
    return found


def draw_ep_panel(axes, rows, x):
    for (operation, dtype), (xs, ys) in curves(rows, x, "p50_us").items():
        label = operation if operation == "prepare" else f"{operation} {dtype}"
        figures.plot(axes, xs, ys, label, linestyle=DASHES[dtype], **OPERATIONS[operation])
    # Floor and baseline depend on the bytes alone, so dispatch's stand for all operations.
    nccl = NAMES["all-to-all"] + (", which takes what it wants," if x == "sms_allowed" else "")
    others = [("floor_us", "wire floor", "plain put"), ("nccl_us", nccl, "all-to-all")]
    for y, name, look in others:
        for (operation, dtype), (xs, ys) in curves(rows, x, y).items():
            if operation == "dispatch":
                label, dashes = f"{name} {dtype}", DASHES[dtype]
                figures.plot(axes, xs, ys, label, linestyle=dashes, **OPERATIONS[look])
    figures.finish(axes, sorted({row[x] for row in rows}), X_LABELS[x])


def draw_ep(head, rows, part, path):
    """Draws a panel for each layout."""
    x = {"tokens": "tokens", "sms": "sms_allowed"}[part]
    layouts = sorted({row["layout"] for row in rows}, reverse=True)
    figure, panels = figures.new(1, len(layouts), 4.6)
    for axes, layout in zip(panels, layouts):
        # prepare is the same for both layouts, and measured with one.
        shown = [row for row in rows if layout == row["layout"] or row["operation"] == "prepare"]
        draw_ep_panel(axes, shown, x)
        axes.set_title(f"rows by {layout}")
    figures.finish_times(panels)
    first = rows[-1]
    tokens = "" if part == "tokens" else f"T={first['tokens']} tokens per rank, "
    said = f"{first['ranks']} ranks, {tokens}rows of H={first['hidden']}, "
    said += f"K={first['topk']} of E={first['experts']} experts"
    figures.save(figure, said, head, path)


# ---- Low latency ---------------------------------------------------------------------------------

CLOCKS = {
    "events": "one call, between two CUDA events",
    "graph, dependent": "one of 20 calls in a CUDA graph",
}


def draw_ll(report, rows, path):
    """Draws a panel for each of two ways to take the time."""
    figure, panels = figures.new(1, 2, 4.4)
    for axes, (clock, title) in zip(panels, CLOCKS.items()):
        here = [row for row in rows if row["clock"] == clock and "sms_allowed" not in row]
        for operation, look in OPERATIONS.items():
            for dtype in ("bf16", "fp8"):
                one = [row for row in here if (row["operation"], row["rows"]) == (operation, dtype)]
                xs, ys = [row["tokens"] for row in one], [row["p50_us"] for row in one]
                if one:
                    label = f"{NAMES.get(operation, operation)} {dtype}"
                    figures.plot(axes, xs, ys, label, linestyle=DASHES[dtype], **look)
        figures.finish(axes, sorted({row["tokens"] for row in here}), X_LABELS["tokens"])
        axes.set_title(title)
    figures.finish_times(panels)
    said = f"low latency: {report['ranks']} ranks, rows of H={report['hidden']}, "
    said += f"K={report['topk']} of E={report['experts']} experts"
    figures.save(figure, said, report, path)


# ---- Products ------------------------------------------------------------------------------------

# Several take nearly the same time: wide pale lines lie below narrow ones, and rings around all.
WAYS = {
    APART: {"color": GREEN, "marker": "^", "linestyle": "--"},
    "SEQUENTIAL": {"color": PURPLE, "marker": "x", "linestyle": "-"},
    "SPLIT": {"color": BLUE, "marker": "s", "linewidth": 4, "alpha": 0.35, "markersize": 6},
    "SPLIT_P2P": {"color": ORANGE, "marker": ".", "linestyle": "-", "fill": ORANGE},
    "DIRECT": {"color": BLACK, "marker": "v", "linestyle": ":"},
    AUTO: {"color": BLACK, "marker": "o", "linestyle": "", "markersize": 8, "fill": "none"},
}
COLUMNS = 3


def draw_gemm_panel(axes, points, names):
    for way, look in WAYS.items():
        found = [point for point in points if point.p50(way) and point.p50(PRODUCT)]
        xs = [point.tokens for point in found]
        ys = [point.p50(way) / point.p50(PRODUCT) for point in found]
        if found:
            figures.plot(axes, xs, ys, names.get(way, way), **look)
    axes.axhline(1, color=BLACK, linewidth=1, zorder=1)
    axes.set_title(points[0].shape)
    tokens = sorted({point.tokens for point in points})
    figures.finish(axes, tokens, "tokens of all ranks", most=10)


def draw_gemm(report, rows, path):
    """Draws a panel for each layer."""
    points = points_of(rows)
    layers = list(dict.fromkeys(point.shape for point in points))
    lines = math.ceil(len(layers) / COLUMNS)
    figure, panels = figures.new(lines, min(len(layers), COLUMNS), 2.4 * lines + 1)
    names = {APART: "NCCL and product, one after the other"} if "gpus" in report else {}
    for axes, layer in zip(panels, layers):
        draw_gemm_panel(axes, [point for point in points if point.shape == layer], names)
    for axes in panels[len(layers) :]:
        axes.remove()
    for axes in panels[: len(layers) : COLUMNS]:
        axes.set_ylabel("p50 ÷ product alone")
    said = f"products of {report['ranks']} ranks, {report['dtype']}; 1 is the product alone"
    figures.save(figure, said, report, path)


# ---- Layers of experts ---------------------------------------------------------------------------

STATES = {
    "cool_us": ("with pauses between passes", {"color": BLUE, "marker": "o"}),
    "hot_us": ("without pauses", {"color": ORANGE, "marker": "s"}),
}
NOT_DRAWN = ("prepare", "transfers,", "operators")  # of no use to readers of a page
BOUND = {"bound": "perfect overlap", "products": "products alone", "transfers": "transfers alone"}


def draw_layer_panel(axes, rows, places):
    """Draws a mark for each way, at its time by that of the serial schedule."""
    serial = rows[0]
    for state, (label, look) in STATES.items():
        xs, ys = [row[state] / serial[state] for row in rows], [places[row["way"]] for row in rows]
        figures.plot(axes, xs, ys, label, linestyle="", **look)
    axes.axvline(1, color=BLACK, linewidth=1, zorder=1)
    axes.set_title(f"shape {serial['shape']}, {serial['pass']}")
    axes.set_xlim(0)


def draw_layer(head, rows, path):
    """Draws a line of panels for each shape, with one for each pass that has schedules."""
    shown = []
    for row in rows:
        what = row["what"]
        if row["pass"] != "fp8" and not what.startswith(NOT_DRAWN):
            what = "auto" if what.startswith("auto") else what.replace(" SMs", " multiprocessors")
            shown.append(row | {"way": BOUND.get(what, what)})
    shapes, passes = (list(dict.fromkeys(row[key] for row in shown)) for key in ("shape", "pass"))
    ways = list(dict.fromkeys(row["way"] for row in shown))
    places = {way: -index for index, way in enumerate(ways)}
    figure, panels = figures.new(len(shapes), len(passes), 2.3 * len(shapes) + 0.9)
    for axes, (shape, name) in zip(panels, itertools.product(shapes, passes)):
        here = [row for row in shown if (row["shape"], row["pass"]) == (shape, name)]
        draw_layer_panel(axes, here, places)
    for axes in panels[-len(passes) :]:
        axes.set_xlabel("p50 ÷ serial schedule")
    panels[0].set_yticks(list(places.values()), labels=ways)
    said = f"routed experts of a layer, {head['ranks']} ranks; 1 is the serial schedule"
    figures.save(figure, said, head, path)


# ---- Placements ----------------------------------------------------------------------------------

PLANS = {
    "not planned again": {"color": GREY, "marker": "D", "linestyle": ""},
    "at most": {"color": BLUE, "marker": "o", "linestyle": "-"},
    "from the current one": {"color": ORANGE, "marker": "s", "linestyle": ""},
    "from scratch": {"color": PURPLE, "marker": "v", "linestyle": ""},
}


def draw_placement(report, rows, path):
    """Draws a panel for each number of ranks and slots."""
    shapes = list(dict.fromkeys((row["experts"], row["ranks"], row["slots"]) for row in rows))
    figure, panels = figures.new(1, len(shapes), 3.4)
    for axes, shape in zip(panels, shapes):
        here = [row for row in rows if (row["experts"], row["ranks"], row["slots"]) == shape]
        for plan, look in PLANS.items():
            found = [row for row in here if row["plan"].startswith(plan)]
            xs = [row["moved_percent"] for row in found]
            label = "with a bound on moves" if plan == "at most" else plan
            figures.plot(axes, xs, [row["busiest"] for row in found], label, **look)
        axes.set_xlabel("slots moved (%)")
        axes.set_title("E={}, W={}, {} slots each".format(*shape))
    panels[0].set_ylabel("busiest rank ÷ mean")
    said = (
        f"placements after each load has changed by exp(0.2·normal), p50 of {report['draws']} draws"
    )
    figures.save(figure, said, report, path)


# ---- Losses --------------------------------------------------------------------------------------


def draw_losses(report, rows, path):
    """Draws the loss of each step by the wire."""
    figure, (axes,) = figures.new(1, 1, 3.2)
    looks = ({"color": GREY, "linewidth": 4}, {"color": ORANGE, "linewidth": 1})
    for row, look in zip(rows, looks):
        steps = range(1, len(row["losses"]) + 1)
        figures.plot(axes, steps, row["losses"], f'combine_wire="{row["wire"]}"', **look)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per byte (nats)")
    said = f"a small language model with experts on {report['ranks']} ranks, float32"
    figures.save(figure, said, report, path)


# ---- A rank that is replaced ---------------------------------------------------------------------

MARKS = {
    "killed": {"color": ORANGE, "linestyle": "-"},
    "agreed": {"color": BLACK, "linestyle": "--"},
    "runs": {"color": GREY, "linestyle": ":"},
    "joined": {"color": PURPLE, "linestyle": "-."},
    "activated": {"color": GREEN, "linestyle": "-"},
}
LABELS = {"runs": "runs again"}


def draw_elastic(report, rows, path):
    """Draws tokens per second over time, and what happened when."""
    figure, (axes,) = figures.new(1, 1, 3.2)
    xs, ys = [row["second"] for row in rows], [row["tokens_per_second"] for row in rows]
    axes.step([*xs, 2 * xs[-1] - xs[-2]], [*ys, ys[-1]], where="post", color=BLUE)
    for what, look in MARKS.items():
        at = report["marks"][what]
        later = f"{at - report['marks']['killed']:+.3f} s" if what != "killed" else f"at {at:.2f} s"
        axes.axvline(at, label=f"{LABELS.get(what, what)} {later}", linewidth=1, zorder=1, **look)
    axes.set_ylim(0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens per second, all ranks")
    said = f"{report['ranks']} ranks decode, rank {report['killed_rank']} is killed and replaced; "
    figures.save(figure, f"{said}sums of tenths of a second", report, path)


# --------------------------------------------------------------------------------------------------


def draw(path, folder, ending):
    """Draws all that a file has; returns whether there was anything."""
    head, rows = read(path)
    place = folder / f"{path.stem}.{ending}"
    if "clock" in rows[0]:
        draw_ll(head, rows, place)
    elif "what" in rows[0]:
        draw_layer(head, rows, place)
    elif "marks" in head:
        draw_elastic(head, rows, place)
    elif "losses" in rows[0]:
        draw_losses(head, rows, place)
    elif "plan" in rows[0]:
        draw_placement(head, rows, place)
    elif "way" in rows[0]:
        draw_gemm(head, rows, place)
    else:
        parts = {"tokens": [], "sms": []}
        for row in rows:
            if row.get("part") in parts and row["memory"] == "zero-copy":
                parts[row["part"]].append(row)
        for part, found in parts.items():
            name = path.stem if path.stem.endswith(part) else f"{path.stem}-{part}"
            if found:
                draw_ep(head, found, part, folder / f"{name}.{ending}")
        return any(parts.values())
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=DOCS / "figures")
    parser.add_argument("--format", choices=["svg", "png"], default="svg")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in arguments.files or [DOCS / f"results/{name}.json" for name in DRAWN]:
        if not draw(path, arguments.out, arguments.format):
            sys.exit(f"{path}: nothing that this program draws")


if __name__ == "__main__":
    main()
