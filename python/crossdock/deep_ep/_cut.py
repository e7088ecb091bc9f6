"""Several small tensors of one allocation: on GPUs an allocation costs more than cutting it up."""

from __future__ import annotations

import functools
import math

import torch

__all__ = ["Cut", "places_of_layout"]

Wanted = tuple[tuple[int, ...], torch.dtype]  # shape, dtype

_UNIT = 128  # bytes at whose multiples a tensor begins
_WORD = torch.int32.itemsize


class Cut:
    """A way to make several contiguous tensors of undefined content, at least one.

    On GPUs they share an allocation, which lives as long as any of them. To autograd they are
    strangers: none is a view, and each has its own version.
    """

    def __init__(self, *wanted: Wanted) -> None:
        self._wanted = wanted
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
        padded = [-(-size // _UNIT) * _UNIT for size in sizes]
        self._words = [size // _WORD for size in padded]
        self._places = [
            (at, dtype, shape, [math.prod(shape[axis + 1 :]) for axis in range(len(shape))])
            for at, (shape, dtype) in enumerate(wanted)
            if dtype != torch.int32 or shape != (self._words[at],)
        ]

    def make(self, device: torch.device) -> list[torch.Tensor]:
        """The tensors, in order."""
        if device.type == "cpu":
            return [
                torch.empty(*shape, dtype=dtype, device=device) for shape, dtype in self._wanted
            ]
        return self.make_of_one(device)

    def make_of_one(self, device: torch.device) -> list[torch.Tensor]:
        """The tensors, of one allocation in any case."""
        memory = torch.empty(sum(self._words), dtype=torch.int32, device=device)
        made = list(memory.unsafe_split_with_sizes(self._words))  # unsafe: no views
        for at, dtype, shape, strides in self._places:
            # `data` is no view either: nobody else has what it would be one of.
            made[at] = made[at].view(dtype).as_strided(shape, strides).data
        return made


@functools.lru_cache(maxsize=64)
def places_of_layout(tokens: int, ranks: int, experts: int) -> Cut:
    """is_token_in_rank, num_tokens_per_expert and num_tokens_per_rank of a Buffer."""
    numbers = ((experts,), torch.int32), ((ranks,), torch.int32)
    return Cut(((tokens, ranks), torch.bool), *numbers)
