"""crossdock bench gemm: which programs it starts, and what becomes of their results."""

from __future__ import annotations

import pathlib
import sys

import pytest

from commands import process, report, run

# In place of crossdock-run: becomes one rank, and leaves its own options behind.
LAUNCHER = """
import os, pathlib, sys
place = sys.argv.index("--")
pathlib.Path(sys.argv[0]).with_name("launch").write_text(" ".join(sys.argv[1:place]))
os.execv(sys.argv[place + 1], sys.argv[place + 1:])
"""
# In place of crossdock-bench: leaves its options behind, and measures nothing.
PROGRAM = """
import json, pathlib, sys
options = sys.argv[1:sys.argv.index("--json")]
pathlib.Path(sys.argv[0]).with_name("options").write_text(" ".join(options))
if "--seed" in options:
    sys.exit(int(options[options.index("--seed") + 1]))
rows = [
    {"shape": shape, "tokens": tokens, "way": way, "p50_us": 1.5 * tokens, **more}
    for shape in ("all_gather:8x8", "all_reduce:8x8")
    for tokens in (1, 16)
    for way, more in (("product alone", {}), ("AUTO", {"algo": "SPLIT"}))
]
report = {"title": "measured nothing", "rows": rows}
pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(report))
print("a table")
"""


@pytest.fixture
def programs(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder like that of a build, with programs of the test's own."""
    for place, text in (("tools/run/crossdock-run", LAUNCHER), ("bench/crossdock-bench", PROGRAM)):
        path = tmp_path / place
        path.parent.mkdir(parents=True)
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
    return tmp_path


def test_starts_the_ranks_of_the_program_with_its_options(programs):
    ended = process(
        *f"bench gemm --programs {programs} --ranks 3 --shapes 8b,all_gather:8x8".split(),
        *"--tokens 1,16 --dtype bf16 --iters 7 --warmup 0 --device cpu".split(),
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "a table\n"
    launch = (programs / "tools/run/launch").read_text().split()
    assert launch[:2] == ["-n", "3"]
    assert (programs / "bench/options").read_text() == (
        "gemm --device cpu --shapes 8b,all_gather:8x8 --tokens 1,16 --dtype bf16 --iters 7 "
        "--warmup 0"
    )


def test_leaves_what_it_does_not_know_to_the_program(programs):
    words = "--no-such-option 7 --device cpu"
    assert run("bench", "gemm", "--programs", str(programs), *words.split()).returncode == 0
    options = (programs / "bench/options").read_text()
    assert options == "gemm --device cpu --no-such-option 7"


def test_leaves_what_it_is_not_told_to_the_program(programs):
    assert run("bench", "gemm", "--programs", str(programs)).returncode == 0
    assert (programs / "bench/options").read_text() == "gemm"


def test_writes_the_program_s_results(programs, tmp_path):
    found, _ = report(tmp_path / "gemm.json", "gemm", "--programs", str(programs))
    assert found["title"] == "measured nothing"
    assert len(found["rows"]) == 8


def test_draws_them(programs, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "gemm.svg"
    ended = run("bench", "gemm", "--programs", str(programs), "--plot", str(path))
    assert ended.returncode == 0, ended.stderr
    drawn = path.read_text()
    for label in ("all_gather:8x8", "all_reduce:8x8", "product alone", "AUTO"):
        assert f">{label}</text>" in drawn


def test_finds_programs_in_the_path(programs):
    path = f"{programs / 'tools/run'}:{programs / 'bench'}"
    assert run("bench", "gemm", environment={"PATH": path}).returncode == 0


def test_says_what_is_missing_where_programs_are_not_installed(programs):
    for ended, what in (
        (run("bench", "gemm", environment={"PATH": "/nowhere"}), "no crossdock-run in PATH"),
        (run("bench", "gemm", "--programs", "/nowhere"), "/nowhere: there is no crossdock-run"),
    ):
        assert ended.returncode == 2
        assert what in ended.stderr and "cmake" in ended.stderr
    (programs / "bench/crossdock-bench").unlink()
    ended = run("bench", "gemm", "--programs", str(programs))
    assert ended.returncode == 2
    assert "there is no crossdock-bench" in ended.stderr


def test_ends_as_the_program_does(programs):
    wrong = run("bench", "gemm", "--programs", str(programs), "--seed", "1")
    assert wrong.returncode == 1
    assert "exit code 1" in wrong.stderr
    assert run("bench", "gemm", "--programs", str(programs), "--seed", "2").returncode == 2
