"""The program that compares ways of serving, on an engine that never answers."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from served import SERVING


@pytest.mark.parametrize("together", [False, True])
def test_what_does_not_answer_in_time_is_ended_and_no_more_begun(
    tmp_path: pathlib.Path, together: bool
) -> None:
    (tmp_path / "vllm.py").write_text("import threading\nthreading.Event().wait()\n")
    words = ["model", "--ranks", "1", "--timeout", "2", "--ways", "first", "1:second"]
    done = subprocess.run(
        [sys.executable, SERVING / "compare_vllm.py", *words, *["--together"] * together],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    _, first, second, *_ = (line.split(maxsplit=1) for line in done.stdout.splitlines() if line)
    assert first == ["first", "FAILED: --timeout 2 is over; rank 0 has ended, see first.0.log"]
    if together:
        assert second[1].startswith("FAILED: --timeout 2 is over; rank 0 has ended")
    else:
        assert second == ["1:second", "NOT RUN: --timeout 2 is over"]
