"""`crossdock trace`: spans of a command's ranks, in one file."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from commands import process, run

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "examples/python/numpy_stats.py"
PARTS = {"stage", "wait for entries", "move", "wait for ends", "complete"}


def test_a_trace_has_a_line_for_each_group_with_operations_and_their_parts(tmp_path):
    output = tmp_path / "trace.json"
    ended = run("trace", "-o", str(output), "--", sys.executable, str(PROGRAM))
    assert ended.returncode == 0, ended.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    events = json.loads(output.read_text())["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert set(names.values()) == {"rank 0", "rank 1"}
    titles = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert any(title.startswith("rank 1: layer 3 (EXPERT_MAJOR") for title in titles)
    waited = 0.0
    for pid, name in names.items():
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == pid]
        whole = [span for span in spans if span["name"] == "prepare"]
        assert len(whole) == 20
        assert {span["name"] for span in spans} == PARTS | {"prepare"}
        for span in spans:  # each lies inside an operation
            end = span["ts"] + span["dur"] - 0.01  # times are rounded
            assert any(one["ts"] <= span["ts"] and end <= one["ts"] + one["dur"] for one in whole)
        if name == "rank 0":
            waited = sum(span["dur"] for span in spans if span["name"] == "wait for entries")
    assert waited >= 100_000  # microseconds: the other rank sleeps for twice that


def test_it_ends_with_the_commands_exit_code_and_says_what_is_missing(tmp_path):
    output = str(tmp_path / "trace.json")
    ended = run("trace", "-o", output, "--", sys.executable, "-c", "raise SystemExit(3)")
    assert ended.returncode == 1 and "has made a group" in ended.stderr
    ended = run("trace", "-o", output, "--", "/no/such/program")
    assert ended.returncode == 1 and "/no/such/program: No such file" in ended.stderr
    ended = run("trace", "-o", "/no/such/folder/t.json", "--", "true")
    assert ended.returncode == 1 and "/no/such/folder" in ended.stderr


def test_lines_of_devices_are_asked_for(tmp_path):
    program = "import os; print(os.environ.get('XD_TRACE_DEVICE', 'none'))"
    for options, said in (([], "none"), (["--device"], "1")):
        place = ["-o", str(tmp_path / "trace.json")]
        ended = process("trace", *options, *place, "--", sys.executable, "-c", program)
        assert ended.stdout == f"{said}\n"


def test_a_folder_that_cannot_be_written_costs_the_trace_and_nothing_else(tmp_path):
    ended = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=os.environ | {"XD_TRACE": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stderr.count("there is no trace of this process") == 2
    assert ended.stdout.count("20 calls of prepare") == 2
