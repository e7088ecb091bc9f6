"""A whole model served by SGLang on ranks of the CPU, through Crossdock."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from crossdock._stats import seen_groups
from engines import PATHS, needs
from served import SERVING, Page, environment, run, server, words_of


def _is_whole() -> bool:
    """Whether there is all that SGLang's launcher looks for."""
    names = ("sglang", "fastapi", "jsonschema", "triton", "uvicorn", "uvloop")
    found = [importlib.machinery.PathFinder.find_spec(name, [*PATHS, *sys.path]) for name in names]
    origin = found[0].origin if found[0] and all(found) else None
    return origin is not None and (pathlib.Path(origin).parent / "kernels/jit/csrc").exists()


pytestmark = [
    needs("sglang"),
    pytest.mark.skipif(not _is_whole(), reason="only a part of SGLang or its needs is here"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="it makes the model"
    ),
]
_COUNT = 64  # tokens of the model: after each comes the next one
# Packages that SGLang imports and nothing here uses.
_UNUSED = ("IPython", "anthropic", "gguf", "scipy", "soundfile", "torchvision", "traitlets")
_FIND_UNUSED = f"""\
import sys

from engines import _Missing

sys.meta_path.append(_Missing(set({_UNUSED})))
"""


def _on_cpu(folder: pathlib.Path, path: str) -> dict[str, str]:
    """Variables by which SGLang finds Crossdock's plug-in, what it imports, and the page's path."""
    (folder / "sitecustomize.py").write_text(_FIND_UNUSED)
    here, page = pathlib.Path(__file__).parent, SERVING.parents[1] / path
    assert page.is_dir()
    found = (str(page), str(here), str(here.parent))
    return environment(folder, *found, group="sglang.srt.plugins") | {"HF_HUB_OFFLINE": "1"}


def test_a_server_answers_as_the_page_says(tmp_path: pathlib.Path) -> None:
    """The commands of docs/sglang.md for CPUs; and 16 requests at once."""
    page = Page("sglang.md")
    given, words = words_of("sglang.md", "PYTHONPATH=")
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert words[: len(page.words)] == page.words
    variables = _on_cpu(tmp_path, given.pop("PYTHONPATH")) | given
    run(tmp_path, variables, "tiny_moe.py", "tiny")
    with server(tmp_path, variables, words[2], words[3:]) as sglang:

        def count_from(first: int) -> Any:
            sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
            body = {"input_ids": [first], "sampling_params": sampling}
            return sglang.ask(page.path, body)["output_ids"]

        sglang.wait()
        assert sglang.ask(page.path, page.body)["output_ids"] == [6, 7, 8, 9]
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(count_from, range(0, _COUNT, 4)))
        assert made == [
            [(first + step) % _COUNT for step in range(1, 17)] for first in range(0, _COUNT, 4)
        ]
        groups = seen_groups(sglang.processes())
        assert {group.rank for group in groups if group.stats.calls} == {0, 1}, groups
        assert sglang.end() == []
