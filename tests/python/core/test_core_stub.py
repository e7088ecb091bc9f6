"""The stub that type checkers read says what the extension has, name by name."""

from __future__ import annotations

import ast
import pathlib
import re
from types import ModuleType

import crossdock
from crossdock import _core

STUB = ast.parse((pathlib.Path(crossdock.__file__).parent / "_core.pyi").read_text())

OF_KEYWORDS = tuple(
    ("__init__", kind) for kind in (_core.Group, _core.LowLatencyGroup, _core.GemmContext)
)


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of a stub's function's parameters but self, in order."""
    arguments = function.args
    names = [argument.arg for argument in arguments.args + arguments.kwonlyargs]
    return [name for name in names if name != "self"]


def bound_parameters(function: object) -> list[str]:
    """The same of a function of the extension, from the signature in its docstring."""
    (inside,) = re.findall(r"\((.*)\) -> ", str(function.__doc__).splitlines()[0])
    names = re.findall(r"(?:^|, )(\w+)(?=:|,|$|\))", re.sub(r"\[[^]]*\]", "", inside))
    return [name for name in names if name != "self"]


def compare(stubs: list[ast.stmt], bound: type | ModuleType) -> None:
    functions = {item.name: item for item in stubs if isinstance(item, ast.FunctionDef)}
    public = {name for name in vars(bound) if not name.startswith("_")}
    classes = {item.name for item in stubs if isinstance(item, ast.ClassDef)}
    values = {item.target.id for item in stubs if isinstance(item, ast.AnnAssign)}
    assert public == {name for name in functions if name != "__init__"} | classes | values
    for name, stub in functions.items():
        if stub.decorator_list:  # a property
            assert type(getattr(bound, name)) is property
        elif not stub.args.kwarg and (name, bound) not in OF_KEYWORDS:
            assert parameters(stub) == bound_parameters(getattr(bound, name)), name


def test_stub_has_the_names_of_the_extension() -> None:
    compare(STUB.body, _core)
    for item in STUB.body:
        if isinstance(item, ast.ClassDef):
            compare(item.body, getattr(_core, item.name))
