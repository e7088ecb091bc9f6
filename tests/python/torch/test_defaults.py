"""Nothing in the package follows torch's default device or default dtype.

Tests of all kinds of operations show that the package runs under others: see torch_defaults.py.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

import crossdock
import test_torch_fp8 as fp8
import test_torch_low_latency as low_latency
import test_torch_ops as ops
import test_tp_fp8 as tp_fp8
import test_tp_layers as tp_layers
import test_tp_ops as tp_ops
from support import Rank, on_ranks
from torch_defaults import OtherDefaults

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


# Tests with their arguments; each of them is also run under torch's usual defaults.
REPRESENTATIVE = [
    *(
        (ops.test_layer_and_its_gradients_are_exact, layout, dtype, options)
        for layout in ops.LAYOUTS
        for dtype, options in ((torch.bfloat16, {}), (torch.float32, {"exact": True}))
    ),
    *(
        (fp8.test_quantised_rows_and_their_gradient, layout, name)
        for layout in fp8.LAYOUTS
        for name in ("fp8_block128", "fp8_block128_e8m0")
    ),
    *((fp8.test_given_scales_travel_with_their_rows, layout) for layout in fp8.LAYOUTS),
    *(
        (low_latency.test_every_element_equals_the_reference, torch.bfloat16, elsewhere)
        for elsewhere in (False, True)
    ),
    *(
        (tp_ops.test_products_and_their_gradients_are_exact, operation, torch.bfloat16)
        for operation in tp_ops.OPERATIONS
    ),
    (tp_layers.test_an_mlp_is_that_of_one_process_exactly,),
    (tp_fp8.test_layers_in_fp8_and_their_gradients_are_exact_for_whole_numbers,),
]


@pytest.mark.parametrize("test, args", [(one, args) for one, *args in REPRESENTATIVE])
@on_ranks(2)
def test_results_are_the_same_under_other_defaults(
    me: Rank, test: Callable[..., None], args: list[Any]
) -> None:
    with OtherDefaults("meta", torch.float64):
        test(me, *args)


def test_defaults_are_really_others_for_the_package() -> None:
    as_package: dict[str, Any] = {"__name__": "crossdock.made_up", "torch": torch}
    with OtherDefaults("meta", torch.float64):
        exec("made = torch.zeros(3)", as_package)
        here = torch.zeros(3)
    assert (as_package["made"].device.type, as_package["made"].dtype) == ("meta", torch.float64)
    assert (here.device.type, here.dtype) == ("cpu", torch.float32)
