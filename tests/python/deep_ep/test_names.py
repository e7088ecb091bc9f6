"""DeepEP's own module names, and names that are not there."""

from __future__ import annotations

import multiprocessing
import pathlib

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
"""
WITH_ALIAS = f"import sys; sys.path.insert(0, {str(ALIAS)!r}); "
BEGINNINGS = {
    "installed": "from crossdock.deep_ep import install; install(); install()",
    "alias": WITH_ALIAS + "import deep_ep",
    "alias of its C++ module": WITH_ALIAS + "import deep_ep_cpp",
}
ANOTHER = """
import sys
sys.path.insert(0, {folder!r})
import deep_ep
from crossdock.deep_ep import install
try:
    install()
    raise AssertionError("it is replaced")
except ImportError as error:
    place = {folder!r} + "/deep_ep.py"
    text = "install: expected that no other deep_ep has been imported, got " + place
    assert text in str(error), error
try:
    import deep_ep_cpp
    raise AssertionError("something has changed")
except ModuleNotFoundError as error:
    assert "No module named 'deep_ep_cpp'" in str(error), error
"""


@pytest.fixture(scope="module")
def new_process() -> multiprocessing.context.ForkServerContext:
    """Makes processes that have imported torch, which takes long, and nothing of Crossdock's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    return context


def run(context: multiprocessing.context.ForkServerContext, program: str) -> None:
    process = context.Process(target=exec, args=(program,))
    process.start()
    process.join(120)
    assert process.exitcode == 0, "its error is above"


@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS.keys())
def test_deep_eps_names_are_this_package(new_process, beginning: str) -> None:
    run(new_process, beginning + IMPORTS)


def test_another_deep_ep_is_not_replaced_once_it_is_imported(new_process, tmp_path) -> None:
    (tmp_path / "deep_ep.py").write_text("Buffer = 3")
    run(new_process, ANOTHER.format(folder=str(tmp_path)))


def test_names_that_are_not_there_are_named() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchName'"):
        deep_ep.NoSuchName  # noqa: B018
    with pytest.raises(ImportError):
        from crossdock.deep_ep import NoSuchName  # noqa: F401
