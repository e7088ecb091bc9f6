"""The custom calls in XLA's registry."""

from __future__ import annotations

import jax

from crossdock import _jax

__all__ = ["register"]

_registered: set[str] = set()


def register(platform: str) -> None:
    """Register types and handlers for a platform of JAX, ``"cpu"`` or ``"gpu"``, once.

    Its backend must have been initialised: JAX holds back registrations until then, and would
    replay the handlers before the types that they use.
    """
    xla_platform = {"cpu": "cpu", "gpu": "CUDA", "cuda": "CUDA"}[platform]
    if xla_platform in _registered:
        return
    known = _jax.registrations()[xla_platform]
    for name, type_registration in known["types"].items():
        jax.ffi.register_ffi_type(name, type_registration, platform=xla_platform)
    for name, stages in known["targets"].items():
        jax.ffi.register_ffi_target(name, stages, platform=xla_platform)
    _registered.add(xla_platform)
