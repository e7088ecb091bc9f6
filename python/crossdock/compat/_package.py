"""Which releases of a framework a module knows, and whether this one has all that it uses."""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

__all__ = ["Package"]


class Package:
    """A framework that a module of ours stands on. A context manager for the imports from it.

    A name that is missing, within it or in `require`, is an ImportError that says which, the
    framework's version and the versions that are tested. Other versions are taken if they have it
    all.

    Args:
        user: our module.
        name: the framework's distribution.
        tested: its versions.
    """

    def __init__(self, user: str, name: str, *tested: str) -> None:
        self._user, self._name, self._tested = user, name, tested

    def __enter__(self) -> Package:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ImportError):
            raise self._error(str(error), error.name) from error

    def require(self, owner: Any, *names: str, **parameters: str) -> None:
        """Looks for names of a class or module.

        Args:
            owner: which has them.
            names: any.
            parameters: by the name of a function or a class its parameters, separated by blanks and
                without ``self``.

        Raises:
            ImportError: one is missing, or has other parameters.
        """
        where = getattr(owner, "__qualname__", owner.__name__)
        for name in (*names, *parameters):
            if not hasattr(owner, name):
                raise self._error(f"{where} has no {name}", owner.__name__)
        for name, text in parameters.items():
            found = inspect.signature(getattr(owner, name)).parameters
            expected, got = text.split(), [one for one in found if one != "self"]
            if got != expected:
                problem = f"expected ({', '.join(expected)}), got ({', '.join(got)})"
                raise self._error(f"parameters of {where}.{name}: {problem}", owner.__name__)

    def _error(self, problem: str, module: str | None) -> ImportError:
        try:
            version = f"found {importlib.metadata.version(self._name)}"
        except importlib.metadata.PackageNotFoundError:
            version = "it is not installed"
        return ImportError(
            f"{self._user}: {problem} ({self._name}: {version}, tested with "
            f"{' and '.join(self._tested)})",
            name=module,
        )
