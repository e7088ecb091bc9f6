"""Nothing in the package follows torch's default device or default dtype.

The whole suite shows that the package runs under other defaults: see torch_defaults.py.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest
import torch
from torch.utils._device import _device_constructors

import crossdock

PACKAGE = pathlib.Path(crossdock.__file__).parent
# Functions that make tensors on torch's default device unless they are told another; by their
# names, for the same reason as in ``torch.set_default_device``.
MAKERS = {made.__name__ for made in _device_constructors()}
# Functions whose dtype is the default one unless it is given, or comes from an argument.
FLOATING = {
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "zeros",
}


def makings(source: str) -> Iterator[tuple[int, str, set[str]]]:
    """Line, name and keywords of every call ``torch.<maker>(...)``."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in MAKERS:
            # A keyword without a name is a mapping, which is made near by.
            yield node.lineno, node.func.attr, {one.arg or "**" for one in node.keywords}


def missing(source: str) -> list[str]:
    found = []
    for line, name, keywords in makings(source):
        needed = {"device", "dtype"} if name in FLOATING else {"device"}
        if "**" not in keywords and needed - keywords:
            found.append(f"{line}: torch.{name} without {' and '.join(sorted(needed - keywords))}")
    return found


def test_the_check_finds_what_follows_a_default() -> None:
    assert {"empty", "zeros", "arange", "tensor", "randperm"} <= MAKERS >= FLOATING
    assert missing("torch.empty(3, dtype=torch.int32)") == ["1: torch.empty without device"]
    assert missing("x = f(torch.zeros(3))") == ["1: torch.zeros without device and dtype"]
    assert missing("torch.arange(3, device=d); torch.empty_like(x); torch.ones(1, **kind)") == []


@pytest.mark.parametrize(
    "path",
    sorted(PACKAGE.glob("*/*.py")) + sorted(PACKAGE.glob("*.py")),
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_every_tensor_is_made_on_a_named_device_of_a_named_dtype(path: pathlib.Path) -> None:
    assert missing(path.read_text(encoding="utf-8")) == []


def test_default_device_is_really_another_where_the_suite_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch_defaults

    for wanted, device, dtype in (
        ("meta", "meta", torch.float32),
        ("float64", "cpu", torch.float64),
        ("meta,float64", "meta", torch.float64),
    ):
        monkeypatch.setenv(torch_defaults.VARIABLE, wanted)
        torch_defaults.apply()
        try:
            as_package: dict[str, object] = {"__name__": "crossdock.made_up", "torch": torch}
            exec("made = torch.zeros(3)", as_package)
            made = as_package["made"]
            assert isinstance(made, torch.Tensor)
            assert (made.device.type, made.dtype) == (device, dtype)
            assert torch.zeros(3).device.type == "cpu" and torch.zeros(3).dtype == torch.float32
        finally:
            torch_defaults._active.pop().__exit__(None, None, None)
