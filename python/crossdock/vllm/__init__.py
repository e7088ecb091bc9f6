"""A plug-in of vLLM: its values for DeepEP run on Crossdock, without a DeepEP that is installed.

vLLM loads it in each of its processes (entry point ``vllm.general_plugins``) if ``XD_ENGINE`` or
``VLLM_PLUGINS`` asks for it. See ``docs/vllm.md``.
"""

from __future__ import annotations

from ._known import ENGINE, OWN

__all__ = ["register", "register_deep_ep"]


def register() -> None:
    """Takes over vLLM's values of ``--all2all-backend`` for DeepEP with classes of Crossdock's.

    Raises:
        ImportError: this vLLM is another one than is known, or this Crossdock was built without
            CUDA; nothing has been changed.
    """
    from ._own import put_in_place

    OWN.take_over(put_in_place)


def register_deep_ep() -> None:
    """Lets vLLM's own classes for DeepEP run on `crossdock.deep_ep`.

    Raises:
        ImportError: as `register`; or another ``deep_ep`` has been imported before.
    """
    from crossdock.deep_ep import Buffer, ElasticBuffer

    from ._gates import open_gates

    ENGINE.take_over(open_gates, Buffer, ElasticBuffer)
