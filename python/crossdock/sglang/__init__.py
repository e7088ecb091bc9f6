"""A plug-in of SGLang: its DeepEP dispatchers run on Crossdock, whether DeepEP is installed or not.

SGLang loads it in each of its processes (entry point ``sglang.srt.plugins``) if ``XD_ENGINE=1`` is
set, or ``SGLANG_PLUGINS`` names ``crossdock``. See ``docs/sglang.md``.
"""

from __future__ import annotations

from ._known import ENGINE

__all__ = ["register", "register_deep_ep"]


def register_deep_ep() -> None:
    """Takes over SGLang's values of ``--moe-a2a-backend`` that mean DeepEP.

    Raises:
        ImportError: this SGLang is another one than is known, another ``deep_ep`` has been imported
            before, or this Crossdock was built without CUDA; nothing has been changed.
    """
    from crossdock.deep_ep import Buffer, ElasticBuffer

    from ._gates import open_gates

    ENGINE.take_over(open_gates, Buffer, ElasticBuffer)


register = register_deep_ep
