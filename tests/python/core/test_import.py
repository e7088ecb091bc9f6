"""The errors of importing the packages where a part is missing."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import crossdock

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import {package}
"""


def said_by(program: str, folder: pathlib.Path | None = None) -> str:
    environment = os.environ | ({"PYTHONPATH": str(folder)} if folder else {})
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    return ended.stderr.splitlines()[-1]


def test_without_its_extension_it_says_how_to_get_it(tmp_path):
    source = pathlib.Path(crossdock.__file__).parent
    (tmp_path / "crossdock").mkdir()
    for file in source.glob("*.py"):
        shutil.copy(file, tmp_path / "crossdock")
    said = said_by("import crossdock", tmp_path)
    assert said.startswith("ImportError: crossdock's extension cannot be loaded: No module named")
    assert said.endswith("pip install .")


@pytest.mark.parametrize("package", ["torch", "torch.tp", "deep_ep", "compat.te_overlap"])
def test_without_pytorch_it_says_what_to_install(package):
    said = said_by(WITHOUT_TORCH.format(package=f"crossdock.{package}"))
    assert said.startswith("ImportError: crossdock.torch needs PyTorch 2.6 or newer: pip install")
