"""The demonstration of a serving rank that is killed and comes back, in small."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples/elastic_serving"


def launcher() -> str:
    """crossdock-run, which CTest names; by hand that of the latest build."""
    if named := os.environ.get("XD_CROSSDOCK_RUN"):
        return named
    built = ROOT.glob("build/*/tools/run/crossdock-run")
    newest = max(built, key=lambda path: path.stat().st_mtime, default=None)
    return str(newest) if newest else pytest.skip("crossdock-run was not built")


def run(*command: str) -> str:
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=330,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


# Steps without pauses, so that most kills come in the middle of one; rank 0 has written the
# invitation that is there, and is the lowest.
@pytest.mark.parametrize("rank", [2, 0])
def test_a_killed_rank_comes_back_and_no_output_is_wrong(rank: int, tmp_path: pathlib.Path):
    small = ["--step-ms", "0", "--kill-after", "0.2", "--steps", "40"]
    small += ["--patience", "150"]
    serve = [sys.executable, str(EXAMPLE / "serve.py"), "--folder", str(tmp_path), *small]
    job = [launcher(), "-n", "4", "--respawn", "3", "--timeout", "300", "--", *serve]
    said = run(*job, "--kill-rank", str(rank))
    assert f"rank {rank} failed: killed by signal 9 (Killed); started again, 1 of 3" in said

    result = tmp_path / "elastic.json"
    said = run(sys.executable, str(EXAMPLE / "timeline.py"), str(tmp_path), "--json", str(result))
    assert f"rank {rank} is killed" in said and "all outputs are exact" in said
    found = json.loads(result.read_text())
    assert (found["ranks"], found["killed_rank"]) == (4, rank)
    assert found["steps_without_it"] >= 1
    assert found["steps"] - found["steps_without_it"] >= 40
    assert found["marks"]["killed"] < found["marks"]["joined"] < found["marks"]["activated"]
    assert sum(row["tokens_per_second"] for row in found["rows"]) > 0
