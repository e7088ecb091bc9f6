"""Tests that are the function which ranks run: a promise and its check stand in one place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def as_test(
    body: Callable[..., Any], start: Callable[..., object], own: tuple[str, ...] = ()
) -> Callable[..., None]:
    """Makes a test that calls ``start(body, *given)``, of a function that is called on ranks.

    What is given are the test's `own` arguments and those of `body` behind its first one, which is
    the rank's. Ranks that are other processes find the function at the test, as its ``body``.
    """
    behind = list(inspect.signature(body).parameters.values())[1:]
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [*(inspect.Parameter(name, keyword) for name in own), *behind]

    def test(**given: Any) -> None:
        start(body, *(given[one.name] for one in parameters if one.name in given))

    functools.update_wrapper(test, body)
    body.__qualname__ = f"{body.__name__}.body"
    test.body = body  # type: ignore[attr-defined]
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return test
