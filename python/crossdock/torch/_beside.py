"""Work beside an operation: on GPUs in a stream of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Beside"]

_streams: dict[torch.device, torch.cuda.Stream] = {}  # one a device: pieces of work take turns


class Beside:
    """Computes ``function(x)`` beside what the current stream is given until `result`.

    On the CPU, and under ``torch.compile``, which orders streams by itself, it computes at once.
    CUDA graphs may capture it. The backward pass runs in the same stream, beside likewise.

    Args:
        function: of one tensor; it keeps none of its tensors elsewhere.
        x: made by work that the current stream has been given.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        self._stream: torch.cuda.Stream | None = None
        if not x.is_cuda or torch.compiler.is_compiling():
            self._result = function(x)
            return
        self._stream = _streams.get(x.device)
        if self._stream is None:
            self._stream = _streams[x.device] = torch.cuda.Stream(x.device)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            self._result = function(x)
        x.record_stream(self._stream)

    def result(self) -> torch.Tensor:
        """The result, for which the current stream waits."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._result.device)
            current.wait_stream(self._stream)
            self._result.record_stream(current)
        return self._result
