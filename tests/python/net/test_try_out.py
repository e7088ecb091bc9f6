"""Network namespaces as machines, as docs/scale-out.md makes them, in a namespace of users."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
IN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-e", "-c"]
SECONDS = 240


def shell(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script where no root is needed."""
    script = f"mount -t tmpfs none /run\n{script}"
    return subprocess.run(
        [*IN_NAMESPACE, script], timeout=SECONDS, capture_output=True, text=True, check=False
    )


def test_network_namespaces_are_machines():
    page = (ROOT / "docs/scale-out.md").read_text()
    [block] = re.findall(r"^```sh\n(for host in .*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert "unshare --user --map-root-user --net --mount sh`" in page
    if shutil.which("ip") is None or shell("ip netns add probe").returncode != 0:
        pytest.skip("this system lets users have no namespaces, or has no program ip")
    check = shlex.join([sys.executable, "-m", "crossdock.cli", "net-check"])
    assert "./your_program" in block
    done = shell(block.replace("./your_program", check))
    assert "2 ranks on 2 hosts" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("every element right") == 2, done.stdout + done.stderr
