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

import torch_defaults  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu, and no others")
    parser.addoption(
        "--representative",
        action="store_true",
        help="run the tests marked representative only, unless XD_TEST_FULL=1",
    )


def pytest_configure(config: pytest.Config) -> None:
    torch_defaults.apply()
    config.addinivalue_line("markers", "gpu: needs a CUDA device; runs with --gpu only")
    config.addinivalue_line("markers", "representative: with --representative runs, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--gpu")
    few = config.getoption("--representative") and os.environ.get("XD_TEST_FULL") != "1"

    def is_wanted(item: pytest.Item) -> bool:
        if few and not item.get_closest_marker("representative"):
            return False
        return bool(item.get_closest_marker("gpu")) == wanted

    left_out = [item for item in items if not is_wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
