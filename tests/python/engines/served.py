"""Set-up of the tests that serve a whole model: they run the programs of ``examples/serving``."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import crossdock
from engines import PATHS, installed

SERVING = pathlib.Path(__file__).parents[3] / "examples" / "serving"
SECONDS = 900  # of imports, in ten processes


def environment(folder: pathlib.Path, *paths: str) -> dict[str, str]:
    """Variables by which vLLM finds Crossdock's plug-in, and what it imports.

    Args:
        folder: an empty one.
        paths: more folders of ``PYTHONPATH``.
    """
    # Not sys.path: tests have a folder deep_ep, which vLLM would take for DeepEP.
    own = str(pathlib.Path(os.path.abspath(crossdock.__file__)).parents[1])
    found = [installed(folder, "vllm.general_plugins"), *paths, *PATHS, own]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(found),
        "VLLM_DEEPEP_BUFFER_SIZE_MB": "16",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }


def ways_agree(
    folder: pathlib.Path, environment: dict[str, str], ways: Sequence[str], *words: str
) -> None:
    """Makes the model, and has vLLM serve it in these ways, of which each must give its tokens."""
    program = ["compare_vllm.py", "tiny", "--logs", "logs", "--timeout", str(SECONDS)]
    for command in (["tiny_moe.py", "tiny"], [*program, *words, "--ways", *ways]):
        done = subprocess.run(
            [sys.executable, SERVING / command[0], *command[1:]],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS + 60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"{len(ways)} of {len(ways)} ways gave the tokens" in done.stdout, done.stdout
    print(done.stdout)
