"""Output on a terminal: bars and colours with rich, plain text without it."""

from __future__ import annotations

import os
import pathlib
import pty
import re
import subprocess
import sys

import pytest

from commands import COMMAND, QUICK

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples/torch"


def on_terminal(*arguments: str, environment: dict[str, str], command: list[str] = COMMAND) -> str:
    """All that the command writes to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    settings = {"TERM": "xterm", "COLUMNS": "100"} | environment
    running = subprocess.Popen(
        [*command, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | settings,
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:
        pass  # so a terminal says that nobody writes to it any more
    finally:
        os.close(ours)
    assert running.wait(timeout=30) == 0, shown
    return shown.decode()


@pytest.fixture
def without_rich(tmp_path: pathlib.Path) -> dict[str, str]:
    """An environment in which rich cannot be imported."""
    (tmp_path / "rich.py").write_text("raise ImportError('not installed')\n")
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


BENCH = ["bench", "ep", *QUICK]


def test_bench_shows_a_bar_and_then_the_table():
    pytest.importorskip("rich")
    shown = on_terminal(*BENCH, environment={})
    bar, table = shown.rsplit("━", 1)
    assert "%" in bar
    assert "dispatch_bwd" in table


def test_without_rich_there_is_text_only(without_rich):
    shown = on_terminal(*BENCH, environment=without_rich)
    assert "\x1b" not in shown
    assert "dispatch_bwd" in shown
    assert "Features\r\n  cpu         ok  available" in on_terminal(
        "doctor", "--no-trial", environment=without_rich
    )


def test_doctor_colours_what_is_missing():
    pytest.importorskip("rich")
    assert "\x1b[31mno" in on_terminal("doctor", "--no-trial", environment={})


SHOW = """
from moe_lm.progress import Progress

with Progress("4 ranks, Crossdock", 200, 0) as progress:
    progress.show({"step": 198, "tokens": 4096, "loss": 2.0407, "load": [[0.5, 0.5]]})
"""


@pytest.mark.parametrize("columns", [80, 120])
def test_a_step_of_the_demo_is_one_line_with_a_bar(columns):
    pytest.importorskip("rich")
    shown = on_terminal(
        "-c",
        SHOW,
        command=[sys.executable],
        environment={"COLUMNS": str(columns), "PYTHONPATH": str(EXAMPLES)},
    )
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    line = next(line for line in re.split(r"[\r\n]+", plain) if "199/200" in line)
    assert "4 ranks, Crossdock" in line and "loss 2.0407" in line and "━" in line
    assert len(line.rstrip()) <= columns and "…" not in line
