"""DeepEP's own module names, and names that are not there."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from crossdock import deep_ep

ALIAS = pathlib.Path(__file__).parents[3] / "python" / "deep_ep_alias"

IMPORTS = """
import importlib.util
import deep_ep
from deep_ep import Buffer, Config, topk_idx_t
from deep_ep.buffer import Buffer as again
from deep_ep.utils import EventHandle, EventOverlap
import deep_ep_cpp
from deep_ep_cpp import Config as config, EventHandle as handle

import crossdock.deep_ep as ours
assert deep_ep is ours and Buffer is ours.Buffer is again
assert Config is config is ours.Config and handle is EventHandle is ours.EventHandle
assert deep_ep_cpp.is_sm90_compiled() == Buffer.is_sm90_compiled()
assert deep_ep_cpp.topk_idx_t is topk_idx_t
for name in ("deep_ep", "deep_ep_cpp"):
    assert importlib.util.find_spec(name) is not None
print("fine")
"""


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, text=True, capture_output=True, timeout=120
    )
    return done.stdout + done.stderr


def test_installed_names_are_this_package() -> None:
    twice = "from crossdock.deep_ep import install; install(); install()"
    assert run(twice + IMPORTS) == "fine\n"


@pytest.mark.parametrize("first", ["deep_ep", "deep_ep_cpp"])
def test_alias_package_gives_this_package(first: str) -> None:
    begin = f"import sys; sys.path.insert(0, {str(ALIAS)!r}); import {first}\n"
    assert run(begin + IMPORTS) == "fine\n"


def test_another_deep_ep_is_not_replaced_once_it_is_imported(tmp_path: pathlib.Path) -> None:
    (tmp_path / "deep_ep.py").write_text("Buffer = 3")
    said = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import deep_ep\n"
        "from crossdock.deep_ep import install\n"
        "try: install()\n"
        "except ImportError as error: print(error)\n"
        "import deep_ep_cpp"
    )
    place = tmp_path / "deep_ep.py"
    assert f"install: expected that no other deep_ep has been imported, got {place}" in said
    assert "No module named 'deep_ep_cpp'" in said  # nothing has changed


def test_names_that_are_not_there_are_named() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchName'"):
        deep_ep.NoSuchName  # noqa: B018
    with pytest.raises(ImportError):
        from crossdock.deep_ep import NoSuchName  # noqa: F401
