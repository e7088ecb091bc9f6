"""The names that DeepEP's modules are imported by."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from ._arguments import topk_idx_t
from ._config import Config
from .buffer import Buffer
from .utils import EventHandle

_PACKAGE = __name__.rpartition(".")[0]


def install() -> None:
    """Lets ``deep_ep``, ``deep_ep.buffer``, ``deep_ep.utils`` and ``deep_ep_cpp`` be this package.

    For frameworks that import those names: call it before they do. ``import deep_ep`` then gives
    this package, in this process, also where a DeepEP is installed. Does nothing the second time.

    Raises:
        ImportError: another ``deep_ep`` has been imported already; nothing has changed.
    """
    names = {
        "deep_ep": importlib.import_module(_PACKAGE),
        "deep_ep.buffer": importlib.import_module(f"{_PACKAGE}.buffer"),
        "deep_ep.utils": importlib.import_module(f"{_PACKAGE}.utils"),
        "deep_ep_cpp": _extension,
    }
    for name, module in names.items():
        found = sys.modules.get(name)
        if found is not None and found is not module:
            place = getattr(found, "__file__", None) or "a module without a file"
            raise ImportError(
                f"install: expected that no other {name} has been imported, got "
                f"{place}; call install() before anything imports {name}"
            )
    sys.modules.update(names)


def _make_extension() -> ModuleType:
    """Makes the names that callers take from DeepEP's extension module."""
    module = ModuleType("deep_ep_cpp", "The names of DeepEP's extension that callers import.")
    module.__spec__ = ModuleSpec("deep_ep_cpp", None, origin=f"{_PACKAGE}.install")
    vars(module).update(
        Config=Config,
        EventHandle=EventHandle,
        is_sm90_compiled=Buffer.is_sm90_compiled,
        topk_idx_t=topk_idx_t,
    )
    return module


_extension = _make_extension()
