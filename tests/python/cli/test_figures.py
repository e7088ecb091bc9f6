"""bench/plot*.py: figures of the documentation, from the measurements beside it."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs/results"

pytest.importorskip("matplotlib")


def drawn(folder: pathlib.Path, script: str, *arguments: str | pathlib.Path) -> dict[str, str]:
    """What a script draws of measurements, by name."""
    command = [sys.executable, ROOT / "bench" / script, *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return {path.name: path.read_text() for path in folder.iterdir()}


def words(figure: str) -> list[str]:
    """The texts of an .svg, which has them as outlines and as comments."""
    return re.findall(r"<!-- (.*) -->", figure)


def test_figures_of_expert_parallelism_are_readable_also_in_the_dark(tmp_path):
    files = [RESULTS / f"h100x2-{part}.json" for part in ("tokens", "sms")]
    figures = drawn(tmp_path, "plot.py", *files, "--out", tmp_path)
    assert set(figures) == {"ep-tokens.svg", "ep-sms.svg"}
    for figure in figures.values():
        assert "prefers-color-scheme: dark" in figure
        said = words(figure)
        assert len([word for word in said if word.startswith("dispatch bf16")]) == 1  # one legend
        assert "rows by rank" in said and "rows by expert" in said
    said = words(figures["ep-sms.svg"])
    assert "132" in said and "128" not in said  # which would lie upon one another
    assert any("T=4096 tokens" in word for word in said)
    assert "NCCL's all-to-all (takes what it wants) bf16" in said


@pytest.mark.parametrize(
    "script, result", [("plot_ll.py", "h100x2-ll"), ("plot_gemm.py", "h100x2-gemm")]
)
def test_other_figures_are_drawn_likewise(script, result, tmp_path):
    path = tmp_path / "figure.svg"
    figures = drawn(tmp_path, script, RESULTS / f"{result}.json", "--out", path)
    assert "prefers-color-scheme: dark" in figures["figure.svg"]


def test_figures_in_the_documentation_are_dark_where_their_readers_are():
    for path in (ROOT / "docs/figures").glob("*.svg"):
        assert "prefers-color-scheme: dark" in path.read_text(), path.name
