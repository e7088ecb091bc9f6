"""bench/plot.py: figures of the documentation, from the measurements beside it."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
RESULTS, FIGURES = ROOT / "docs/results", ROOT / "docs/figures"
DEVICES = {"h100": "2 × NVIDIA H100", "h200": "2 × NVIDIA H200", "xeon": "Intel Xeon"}

pytest.importorskip("matplotlib")


def draw(folder: pathlib.Path, *arguments: str | pathlib.Path) -> dict[str, str]:
    """The figures that the script writes into a folder, by name."""
    command = [sys.executable, ROOT / "bench/plot.py", *arguments, "--out", folder]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return {path.name: path.read_text() for path in folder.iterdir()}


def words(figure: str) -> list[str]:
    """The texts of an .svg."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", figure)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The figures of all results that have one."""
    return draw(tmp_path_factory.mktemp("figures"))


def test_figures_in_the_documentation_are_those_of_the_results_there(drawn):
    shown = {path.name: words(path.read_text()) for path in FIGURES.iterdir()}
    assert shown == {name: words(figure) for name, figure in drawn.items()}


def test_figures_name_device_and_day_and_are_dark_where_their_readers_are(drawn):
    for name, figure in drawn.items():
        (title,) = [word for word in words(figure) if re.search(r", \d+ November 2026$", word)]
        assert title.startswith(DEVICES[name[:4]])
        assert figure.count("prefers-color-scheme: dark") == 1


def legend(figure: str) -> list[str]:
    """The texts of a figure's only legend."""
    _, _, after = figure.partition('<g id="legend_1">')
    assert after and "legend_2" not in after
    return words(after)


def test_a_figure_of_multiprocessors_has_a_panel_for_each_layout_and_labels_apart(drawn):
    said = words(drawn["h100x2-sms.svg"])
    assert "rows by rank" in said and "rows by expert" in said
    assert "132" in said and "128" not in said  # which would lie upon one another
    assert any("T=4096 tokens" in word for word in said)
    assert legend(drawn["h100x2-sms.svg"])[:2] == ["dispatch bf16", "combine bf16"]


def test_a_figure_of_products_has_every_way_and_names_the_baseline(drawn):
    ways = ["SEQUENTIAL", "SPLIT", "SPLIT_P2P", "DIRECT", "AUTO"]
    assert sorted(legend(drawn["xeon2-gemm-bf16.svg"])) == sorted([*ways, "one after the other"])
    assert "NCCL and product, one after the other" in legend(drawn["h100x2-gemm.svg"])


def test_a_figure_of_layers_has_a_panel_for_each_pass_with_schedules(tmp_path):
    head = {"date": "2026-11-30", "gpus": {"name": "NVIDIA H200", "count": 2}, "ranks": 2}
    ways = ("serial", "2 parts, 16 SMs", "auto: serial", "operators", "products", "prepare")
    rows = [
        {"shape": shape, "pass": name, "what": what, "cool_us": 8.0 + at, "hot_us": 9.0 + at}
        for shape in "EA"
        for name, more in (("forward", ["transfers, 16 SMs", "bound"]), ("fp8", []), ("step", []))
        for at, what in enumerate([*ways, *more])
    ]
    results = tmp_path / "layer.json"
    results.write_text("\n".join(map(json.dumps, [head, *rows])))
    said = words(draw(tmp_path / "out", results)["layer.svg"])
    panels = [word for word in said if word.startswith("shape ")]
    assert panels == ["shape E, forward", "shape E, step", "shape A, forward", "shape A, step"]
    # The ways are named once in each line, at its left.
    labels = ["serial", "2 parts, 16 multiprocessors", "auto", "products alone", "perfect overlap"]
    assert [word for word in said if word in labels] == 2 * labels
    assert not {"operators", "prepare"} & set(said) and not any("transfers" in one for one in said)


def test_a_sweep_has_a_figure_for_each_of_its_parts(tmp_path):
    head, *tokens = (RESULTS / "h100x2-tokens.json").read_text().splitlines()
    sms = (RESULTS / "h100x2-sms.json").read_text().splitlines()[1:]
    sweep = tmp_path / "sweep.json"
    sweep.write_text("\n".join([head, *tokens, *sms]))
    assert set(draw(tmp_path / "out", sweep)) == {"sweep-tokens.svg", "sweep-sms.svg"}
