"""A plug-in of vLLM: its DeepEP backends run on Crossdock, without a DeepEP that is installed.

vLLM loads it in each of its processes (entry point ``vllm.general_plugins``) if ``XD_ENGINE=1`` is
set, or ``VLLM_PLUGINS`` names ``crossdock``. See ``docs/vllm.md``.
"""

from __future__ import annotations

from ._known import ENGINE

__all__ = ["register"]


def register() -> None:
    """Takes over vLLM's values of ``--all2all-backend`` that mean DeepEP.

    Raises:
        ImportError: this vLLM is another one than is known, another ``deep_ep`` has been imported
            before, or this Crossdock was built without CUDA; nothing has been changed.
    """
    from crossdock.deep_ep import Buffer, ElasticBuffer

    from ._gates import open_gates

    ENGINE.take_over(open_gates, Buffer, ElasticBuffer)
