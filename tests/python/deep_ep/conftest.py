"""Runs tests that take `me` on ranks, and lets the tests in gpu/ import the cases.

Every rank runs the function of such a test. ``@pytest.mark.ranks(2, 4, apart=(3,))`` has it run on
2 ranks, on 4, and on 3 that are on two hosts (spread.py); more keywords are

    options: of the Buffer over these ranks, which the test has if it takes `buffer`;
    loses: the rank whose process ends in the test, which the others must survive;
    representative: the number of ranks that is marked so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import pathlib
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@dataclasses.dataclass(frozen=True)
class Place:
    """The ranks that run a test."""

    number: int
    apart: bool = False

    def __str__(self) -> str:
        return f"{self.number} apart" if self.apart else f"{self.number}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ranks: the ranks that run the test; see deep_ep/conftest.py"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    places = [Place(number) for number in marker.args]
    places += [Place(number, apart=True) for number in marker.kwargs.get("apart", ())]
    few = Place(marker.kwargs.get("representative", 0))
    marks = {few: [pytest.mark.representative]}
    metafunc.parametrize(
        "me", [pytest.param(one, marks=marks.get(one, []), id=str(one)) for one in places]
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests that end processes last, as the others share these."""
    items.sort(key=lambda item: any("loses" in one.kwargs for one in item.iter_markers("ranks")))


@pytest.fixture
def buffer() -> None:
    """Stands for the Buffer that every rank makes for itself."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs the test on processes that serve all tests of as many ranks or fewer."""
    place = pyfuncitem.funcargs.get("me")
    if place is None:
        return None
    import deep_ep_cases
    import support

    options = pyfuncitem.get_closest_marker("ranks").kwargs
    names = inspect.signature(pyfuncitem.obj).parameters.keys()
    most = most_ranks(pyfuncitem.session.items, place.apart)
    body = deep_ep_cases.Body(
        pyfuncitem.obj,
        {name: pyfuncitem.funcargs[name] for name in names - {"me", "buffer"}},
        # Of ranks on two hosts the first half, rounded up, is on the first (spread.py).
        (most + 1) // 2 - (place.number + 1) // 2 if place.apart else 0,
        place.number,
        "nccl" if pyfuncitem.get_closest_marker("gpu") else "gloo",
        options.get("options", {}) if "buffer" in names else None,
    )
    with failure_of(options.get("loses")):
        support.run_ranks(most, body, apart=place.apart, timeout=180)
    return True


def most_ranks(items: list[pytest.Item], apart: bool) -> int:
    """The most ranks that one of the session's tests has in such a place."""
    places = [item.callspec.params.get("me") for item in items if hasattr(item, "callspec")]
    # A test that no number of ranks can run here has a parameter that is no place.
    return max(one.number for one in places if isinstance(one, Place) and one.apart == apart)


@contextlib.contextmanager
def failure_of(rank: int | None) -> Iterator[None]:
    """Expects that rank, and no other one, to fail; None = none."""
    from crossdock import launch

    if rank is None:
        yield
        return
    with pytest.raises(launch.RankFailed) as caught:
        yield
    assert [failure.rank for failure in caught.value.failures] == [rank], caught.value
