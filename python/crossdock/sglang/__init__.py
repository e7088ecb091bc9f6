"""A plug-in of SGLang: its DeepEP dispatchers run on Crossdock, whether DeepEP is installed or not.

SGLang loads it in each of its processes (entry point ``sglang.srt.plugins``) if ``XD_ENGINE`` or
``SGLANG_PLUGINS`` asks for it. See ``docs/sglang.md``.
"""

from __future__ import annotations

from ._known import ENGINE, OWN

__all__ = ["register", "register_deep_ep"]


def register() -> None:
    """Lets SGLang's dispatcher for DeepEP, and that for DeepEP 2, run on Crossdock.

    The former by classes of Crossdock's, the latter as `register_deep_ep` has it.

    Raises:
        ImportError: as `register_deep_ep`.
    """
    from crossdock.deep_ep import Buffer, ElasticBuffer

    from ._gates import open_gates
    from ._own import put_in_place

    OWN.take_over(lambda: open_gates() | put_in_place(), Buffer, ElasticBuffer)


def register_deep_ep() -> None:
    """Takes over SGLang's values of ``--moe-a2a-backend`` that mean DeepEP.

    Raises:
        ImportError: this SGLang is another one than is known, another ``deep_ep`` has been imported
            before, or this Crossdock was built without CUDA; nothing has been changed.
    """
    from crossdock.deep_ep import Buffer, ElasticBuffer

    from ._gates import open_gates

    ENGINE.take_over(open_gates, Buffer, ElasticBuffer)
