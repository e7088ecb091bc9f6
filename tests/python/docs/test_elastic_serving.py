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


def run(*command: str, fails: bool = False) -> str:
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (ended.returncode != 0) == fails, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


# Rank 0 has written the invitation that is there, and is the lowest. In the second case rank 3
# meets the loss in its dispatch, and the others meet it in their combine, where they need rank 3.
@pytest.mark.parametrize(("rank", "when"), [(2, "--kill-after=0.2"), (0, "--kill-step=20")])
def test_a_killed_rank_comes_back_and_no_output_is_wrong(
    rank: int, when: str, tmp_path: pathlib.Path
):
    small = ["--step-ms=0", "--steps=40", f"--kill-rank={rank}", when]
    serve = [sys.executable, str(EXAMPLE / "serve.py"), "--folder", str(tmp_path), *small]
    said = run(launcher(), "-n", "4", "--respawn", "3", "--timeout", "150", "--", *serve)
    assert f"rank {rank} failed: killed by signal 9 (Killed); started again, 1 of 3" in said
    assert said.count("started again") == 1  # nobody else failed
    logs = {"rank-0-0", "rank-1-0", "rank-2-0", "rank-3-0", f"rank-{rank}-1"}
    assert {path.stem for path in tmp_path.glob("*.jsonl")} == logs

    result = tmp_path / "elastic.json"
    tell = [sys.executable, str(EXAMPLE / "timeline.py"), str(tmp_path)]
    said = run(*tell, "--json", str(result))
    found = json.loads(result.read_text())
    assert f"rank {rank} is killed" in said
    assert f"{found['outputs_checked']:,} outputs compared, all exact" in said
    assert (found["ranks"], found["killed_rank"]) == (4, rank)
    assert found["steps_without_it"] >= 1
    together = found["steps"] - found["steps_without_it"]
    assert together >= 40
    # Each output of the ranks that lived; the killed one made some, and the new process its part.
    assert found["outputs_checked"] >= 32 * (3 * found["steps"] + 40 - 1)
    assert found["marks"]["killed"] < found["marks"]["joined"] < found["marks"]["activated"]
    if "step" in when:
        assert found["steps_made_again"] == 1
        # No rank that lives waited for one that lives until it counted as late.
        assert found["longest_pause"] < 20
    assert sum(row["tokens_per_second"] for row in found["rows"]) > 0

    (tmp_path / "rank-1-0.jsonl").write_text("")  # as of a rank that ended early
    assert "expected that all but" in run(*tell, fails=True)
