"""A plug-in of SGLang: its DeepEP dispatchers run on Crossdock, whether DeepEP is installed or not.

SGLang loads it in each of its processes (entry point ``sglang.srt.plugins``). It does nothing
unless ``XD_ENGINE=1`` is set, or ``SGLANG_PLUGINS`` names ``crossdock``. See ``docs/sglang.md``.
"""

from __future__ import annotations

from ._known import ENGINE
from ._refusal import refuse_dispatchers

__all__ = ["register"]


def register() -> None:
    """Takes over SGLang's values of ``--moe-a2a-backend`` that mean DeepEP, if that is wanted.

    SGLang logs what a plug-in raises, and goes on. So what is raised here is raised once more when
    SGLang makes a dispatcher.

    Raises:
        ImportError: this SGLang is another one than is known, or another ``deep_ep`` has been
            imported before; nothing has been changed.
        ValueError: a bad value of ``XD_ENGINE``.
        SystemExit: of the former, in an SGLang that does not know the hooks that raise later.
    """
    try:
        if not ENGINE.wanted():
            return
        from crossdock.deep_ep import Buffer, ElasticBuffer

        ENGINE.require(Buffer, ElasticBuffer)
        from ._gates import open_gates

        if open_gates():
            ENGINE.say("--moe-a2a-backend deepep and deepep_v2")
    except Exception as error:
        refuse_dispatchers(error)
        raise
