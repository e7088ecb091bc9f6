"""Set-up of all Python tests: the package's path, the limit of a wait, tests that need a GPU."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

# support.py and reference.py, for the tests and for the processes that they spawn.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

# A rank that waits longer than this for another has found a mistake.
os.environ.setdefault("XD_TIMEOUT_MS", "60000")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu, and no others")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; runs with --gpu only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--gpu")
    left_out = [item for item in items if bool(item.get_closest_marker("gpu")) != wanted]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
