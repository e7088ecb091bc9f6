"""The checks of plug-ins for serving engines: do they know the engine.

An engine is looked at in its source, and not imported for it: so nothing has begun when it turns
out to be another one, and it does not matter which of its modules this process needs.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping

import crossdock
from crossdock import _core

_TIMEOUT = "XD_TIMEOUT_MS"
_USUAL_TIMEOUT_MS = 60000  # engines give up a step of their own after 300 s
# Names under which code for DeepEP keeps its buffer, in classes that are named after DeepEP.
_RECEIVERS = ("Buffer", "ElasticBuffer", "buf", "buffer", "handle")
# Functions and variables of such classes that have the keywords of a buffer's construction.
_GATHERER, _GATHERED = "_make_all2all_kwargs", "buffer_kwargs"


@dataclasses.dataclass(frozen=True)
class Engine:
    """A serving engine, as its plug-in knows it.

    Attributes:
        title: in texts.
        package: of Python, and of the registry.
        tested: versions that the tests have run with.
        names: of each file below the package, what the plug-in uses: a name, or ``Class.name``, and
            the parameters of a function as in ``"self, value"``; None = no function.
        callers: files whose classes for DeepEP call its methods.
        instead: what a user does who has another version.
        backends: the values of the engine's flag that mean DeepEP.
        way: what Crossdock is to these, in the line that says so.
    """

    title: str
    package: str
    tested: tuple[str, ...]
    names: Mapping[str, Mapping[str, str | None]]
    callers: tuple[str, ...]
    instead: str
    backends: str
    way: str = "is DeepEP for"

    def take_over(
        self,
        change: Callable[[], bool],
        buffer: type | None = None,
        elastic: type | None = None,
    ) -> None:
        """Lets the engine's values for DeepEP mean Crossdock.

        Args:
            change: changes the engine; False if that has been done before.
            buffer, elastic: as of `require`.

        Raises:
            ImportError: of `require` or `change`; nothing has been changed.
        """
        self.require(buffer, elastic)
        changed = change()
        limit_waits()
        if changed:
            self.say()

    def version(self) -> str:
        """The version that is installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "a version without metadata"

    def require(self, buffer: type | None = None, elastic: type | None = None) -> None:
        """Looks for all that the plug-in uses.

        Args:
            buffer, elastic: the classes that stand for those of DeepEP 1.2 and 2, whose methods
                `callers` call.

        Raises:
            ImportError: some name is missing or other than expected; the text has all of them. Or
                PyTorch has CUDA, and this Crossdock was built without.
        """
        import torch

        if torch.version.cuda is not None and not _core.built_with_cuda:
            raise ImportError(
                f"crossdock.{self.package}: this Crossdock was built without CUDA; see "
                "docs/install.md for how to build it with CUDA. Nothing has been changed"
            )
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"crossdock.{self.package}: {self.title} is not installed")
        root = pathlib.Path(spec.submodule_search_locations[0])
        found = [text for file, names in self.names.items() for text in _missing(root, file, names)]
        for file in self.callers:
            found += _unknown_calls(root, file, buffer, elastic)
        if found:
            raise ImportError(
                f"crossdock.{self.package} knows {self.title} {' and '.join(self.tested)}, and "
                f"found {self.version()}, in which {'; '.join(found)}. Nothing has been changed. "
                f"Use {self.instead}, or a version of {self.title} that is known to this Crossdock "
                f"({crossdock.__version__})"
            )

    def say(self) -> None:
        """Logs that the values of the engine's flag mean Crossdock, in its own log."""
        version = self.version()
        known = "tested" if version in self.tested else f"tested: {', '.join(self.tested)}"
        here = f"crossdock {crossdock.__version__}"
        text = f"{here} {self.way} {self.backends} ({self.title} {version}"
        logger = logging.getLogger(f"{self.package}.crossdock")
        if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
            logger.info("%s, %s)", text, known)
        else:  # the engine sets up its log later, in some of its processes
            print(f"{text}, {known})", file=sys.stderr, flush=True)


def limit_waits() -> None:
    """Lets Crossdock's waits end before the engine gives up, unless the user says when they do.

    Then an error names the rank that did not come. The library reads this when a communicator is
    made for the first time.
    """
    if not os.environ.get(_TIMEOUT):
        os.environ[_TIMEOUT] = str(_USUAL_TIMEOUT_MS)


def _missing(root: pathlib.Path, file: str, names: Mapping[str, str | None]) -> list[str]:
    """Lists what a file does not have, in words."""
    tree = _parsed(root / file)
    if tree is None:
        return [f"there is no {root.name}/{file}"]
    texts = []
    for name, parameters in names.items():
        node = _find(tree, name)
        if node is None:
            texts.append(f"{root.name}/{file} has no {name}")
        elif parameters is not None:
            got = _parameters(node)
            if got != parameters:
                texts.append(f"{name} has the parameters ({got}) in place of ({parameters})")
    return texts


def _parsed(path: pathlib.Path) -> ast.Module | None:
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


def _find(tree: ast.Module, name: str) -> ast.AST | None:
    """The statement that binds a name of the module, or one in a class of it."""
    owner, _, member = name.rpartition(".")
    body: list[ast.stmt] = tree.body
    if owner:
        place = _find(tree, owner)
        if not isinstance(place, ast.ClassDef):
            return None
        body = place.body
        for node in ast.walk(place):  # an attribute that its methods set
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if node.attr == member and ast.unparse(node.value) == "self":
                    return node
    return next((one for one in _statements(body) if member in _bound(one)), None)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a scope, also in its branches."""
    for one in body:
        yield one
        if isinstance(one, (ast.If, ast.Try, ast.With)):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(one, name, []))
            for handler in getattr(one, "handlers", ()):
                yield from _statements(handler.body)


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement gives a value."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in statement.names]
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _parameters(node: ast.AST) -> str:
    """The parameters of a function, by their names."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "of no function"
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [one.arg for one in given.kwonlyargs]
    return ", ".join(names + ([f"**{given.kwarg.arg}"] if given.kwarg else []))


def _unknown_calls(
    root: pathlib.Path, file: str, buffer: type | None, elastic: type | None
) -> list[str]:
    """Lists calls that DeepEP's interface does not have here, in words."""
    tree = _parsed(root / file)
    if tree is None:
        return [f"there is no {root.name}/{file}"]
    texts = []
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef) or "DeepEP" not in owner.name:
            continue
        kind = elastic if "v2" in owner.name.lower() else buffer
        if kind is None:
            continue
        for call in _calls(owner, kind.__name__):
            if text := _unknown(call, kind):
                texts.append(f"{owner.name} ({file}:{call.lineno}) {text}")
    return texts


def _calls(owner: ast.ClassDef, constructor: str) -> Iterator[ast.Call]:
    """The calls in a class; also the constructions for which it gathers keywords in a ``dict``."""
    for node in ast.walk(owner):
        if isinstance(node, ast.Call):
            yield node
        gathered: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef) and node.name == _GATHERER:
            gathered = [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
            gathered += [one.value for one in ast.walk(node) if isinstance(one, ast.Assign)]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _GATHERED:
            gathered = [node.value]
        for one in gathered:
            if isinstance(one, ast.Call) and ast.unparse(one.func) == "dict":
                made = ast.Call(ast.Name(constructor), one.args, one.keywords)
                yield ast.copy_location(made, one)


def _unknown(call: ast.Call, kind: type) -> str | None:
    """Says what is unknown in a call of a method of that class, or in its construction."""
    receiver, _, method = ast.unparse(call.func).rpartition(".")
    if method == kind.__name__:
        method, called = "__init__", kind.__name__
    elif receiver.rpartition(".")[2] in _RECEIVERS:
        called = f"{kind.__name__}.{method}"
    else:
        return None
    function = getattr(kind, method, None)
    if function is None:
        return f"calls {called}, which crossdock.deep_ep does not have"
    parameters = inspect.signature(function).parameters
    known = {*parameters, *getattr(function, "also_named", ())}
    unknown = [one.arg for one in call.keywords if one.arg and one.arg not in known]
    kinds = [one.kind for one in parameters.values()]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        return f"gives {called} the argument {', '.join(unknown)}, which it does not take"
    places = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places -= not isinstance(inspect.getattr_static(kind, method), staticmethod)  # self
    if len(call.args) > places and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return f"gives {called} {len(call.args)} positional arguments, of which it takes {places}"
    return None
