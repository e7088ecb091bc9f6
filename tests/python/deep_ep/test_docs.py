"""The program in docs/deep_ep.md runs, and tables of the pages name every argument there is."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
from typing import Any

import pytest
import torch

import deep_ep_cases as cases
from crossdock.deep_ep import Buffer, Config, ElasticBuffer
from crossdock.deep_ep._config import _LONG_NAMES
from deep_ep_cases import on_buffers
from deep_ep_reference import make_batch

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "deep_ep.md"
ELASTIC_PAGE = PAGE.with_name("deep_ep_elastic.md")
SEED = 60


@on_buffers(2)
def test_program_on_the_page_runs(buffer: Buffer) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    page: dict[str, Any] = {}
    exec(program, page)
    assert page["Buffer"] is Buffer
    batch = make_batch(SEED, buffer.group_size)

    def experts(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        cases.same("recv_x", x, batch.received(buffer.rank, batch.x))
        for got, want in zip((idx, weights), batch.received_topk(buffer.rank)):
            cases.same("top-k", got, want)
        return x

    of_rank = (part[buffer.rank] for part in (batch.x, batch.topk_idx, batch.topk_weights))
    out = page["moe_layer"](buffer, *of_rank, batch.num_experts, experts)
    outputs = [batch.received(rank, batch.x) for rank in range(buffer.group_size)]
    cases.same("combined_x", out, batch.combined(buffer.rank, outputs))


def section_of(title: str, page: pathlib.Path = PAGE) -> str:
    text = page.read_text(encoding="utf-8")
    (section,) = re.findall(rf"### {re.escape(title)}\n(.*?)\n##", text, re.DOTALL)
    return section


@pytest.mark.parametrize(
    "page, owner, method",
    [
        (PAGE, Buffer, "__init__"),
        (PAGE, Buffer, "get_dispatch_layout"),
        (PAGE, Buffer, "dispatch"),
        (PAGE, Buffer, "combine"),
        (PAGE, Buffer, "low_latency_dispatch"),
        (PAGE, Buffer, "low_latency_combine"),
        (PAGE, Buffer, "get_local_buffer_tensor"),
        (ELASTIC_PAGE, ElasticBuffer, "__init__"),
        (ELASTIC_PAGE, ElasticBuffer, "dispatch"),
        (ELASTIC_PAGE, ElasticBuffer, "combine"),
    ],
)
def test_page_says_what_each_argument_does(page: pathlib.Path, owner: type, method: str) -> None:
    title = owner.__name__ if method == "__init__" else method
    parameters = list(inspect.signature(getattr(owner, method)).parameters)[1:]
    assert arguments_in(section_of(f"`{title}(...)`", page)) == parameters


def arguments_in(section: str) -> list[str]:
    """The names in the first column of the first table."""
    _, _, tables = section.partition("| Argument |")
    table = tables.split("\n\n")[0]
    return [
        name
        for line in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", line)
    ]


def test_page_says_what_config_takes() -> None:
    section = section_of("`Config(...)`")
    table, other_names = section.strip().rsplit("\n\n", 1)
    fields = [field.name for field in dataclasses.fields(Config)]
    assert arguments_in(table) == fields
    assert re.findall(r"`(\w+)`", other_names) == list(_LONG_NAMES)
    assert list(_LONG_NAMES.values()) == fields[1:]


def test_page_says_what_size_hints_take() -> None:
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| (.*?) \|", section_of("Size hints"), re.MULTILINE)
    named = {(owner, name): re.findall(r"`(\w+)`", arguments) for owner, name, arguments in rows}
    there_are = {}
    for owner in (Buffer, Config):
        for name in filter(lambda name: name.endswith("size_hint"), dir(owner)):
            parameters = inspect.signature(getattr(owner, name)).parameters
            there_are[owner.__name__, name] = [one for one in parameters if one != "self"]
    assert named == there_are
