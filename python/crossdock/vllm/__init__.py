"""A plug-in of vLLM: its DeepEP backends run on Crossdock, without a DeepEP that is installed.

vLLM loads it in each of its processes (entry point ``vllm.general_plugins``). It does nothing
unless ``XD_ENGINE=1`` is set, or ``VLLM_PLUGINS`` names ``crossdock``. See ``docs/vllm.md``.
"""

from __future__ import annotations

from ._known import ENGINE

__all__ = ["register"]


def register() -> None:
    """Takes over vLLM's values of ``--all2all-backend`` that mean DeepEP, if that is wanted.

    Raises:
        ImportError: this vLLM is another one than is known, or another ``deep_ep`` has been
            imported before; nothing has been changed.
        ValueError: a bad value of ``XD_ENGINE``.
    """
    if not ENGINE.wanted():
        return
    from crossdock.deep_ep import Buffer, ElasticBuffer

    ENGINE.require(Buffer, ElasticBuffer)
    from ._gates import open_gates

    if open_gates():
        ENGINE.say("deepep_high_throughput, deepep_low_latency and deepep_v2")
