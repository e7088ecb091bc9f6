"""The part that the classes of vLLM's layers have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

from crossdock._core import constants

from ._manager import Handle

__all__ = ["BLOCK", "Prepared", "PrepareAndFinalize", "in_blocks", "later_scale", "quantised_later"]

BLOCK = [128, 128]  # of weights; rows have a scale for as many columns
_MICRO_BATCHES = 2

# Quantised rows, their scales, counts, global ids and weights: as vLLM has it.
Prepared = tuple[Any, ...]


class PrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """Sends rows to experts, and combines what these make of them, straight into vLLM's output.

    The rows that a batch has received belong to torch's allocator. Groups are the manager's.

    Args:
        handle: from the manager.
        num_dispatchers: ranks.

    Attributes:
        handle: as given.
        back: by micro-batch, what its finalize needs.
    """

    def __init__(self, handle: Handle, num_dispatchers: int) -> None:
        super().__init__()
        self.handle = handle
        self.back: list[Any] = [None] * _MICRO_BATCHES
        self._num_dispatchers = num_dispatchers

    @staticmethod
    def maybe_roundup_layer_hidden_size(
        hidden_size: int, dtype: torch.dtype = torch.bfloat16
    ) -> int:
        """`hidden_size`, which stays as it is if a row has a multiple of 16 bytes."""
        unit = constants.ROW_ALIGNMENT // dtype.itemsize
        return -(-hidden_size // unit) * unit

    def topk_indices_dtype(self) -> torch.dtype | None:
        """None: ids are int32 or int64."""
        return None

    def num_dispatchers(self) -> int:
        """The number of ranks."""
        return self._num_dispatchers

    def output_is_reduced(self) -> bool:
        """Whether the output is the sum over all ranks, which it is."""
        return True

    def supports_async(self) -> bool:
        """Whether there are `prepare_async` and `finalize_async`, which there are."""
        return True

    def prepare(self, *args: Any, **options: Any) -> Prepared:
        """Does what `prepare_async` begins, and waits for it."""
        begun = self.prepare_async(*args, **options)
        if isinstance(begun, tuple):
            hook, begun = begun
            hook()
        return begun()

    def weighted_input(
        self, a1: torch.Tensor, weights: torch.Tensor, on_input: bool
    ) -> torch.Tensor:
        """The rows to send: weighted already if experts' results are not to be.

        Raises:
            ValueError: they are to be, and a token has several experts.
        """
        if not on_input:
            return a1
        if weights.shape[1] != 1:
            raise ValueError(
                "apply_router_weight_on_input: expected False for tokens with several experts, got "
                f"True with {weights.shape[1]}"
            )
        return a1 * weights.to(a1.dtype)

    def take(self, place: int) -> Any:
        """The way back of the batch that this micro-batch has prepared, which is kept no longer.

        Raises:
            RuntimeError: it has prepared none.
        """
        found, self.back[place] = self.back[place], None
        if found is None:
            raise RuntimeError(
                f"finalize: expected a prepare before, got none of micro-batch {place}"
            )
        return found


def in_blocks(config: Any, columns: int, dtype: torch.dtype) -> bool:
    """Whether dispatch can quantise rows as experts want them: FP8 with a scale per 128 columns."""
    return bool(
        config.quant_dtype == torch.float8_e4m3fn
        and config.block_shape == BLOCK
        and dtype == torch.bfloat16
        and columns % BLOCK[1] == 0
    )


def later_scale(config: Any) -> torch.Tensor | None:
    """The scale with which rows are quantised that have come as they were."""
    return config.a1_gscale if config.quant_dtype == "nvfp4" else config.a1_scale


def quantised_later(
    rows: torch.Tensor, config: Any, quant_dtype: Any, per_token: bool, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows that have come, by vLLM's own quantiser."""
    if rows.numel() == 0:
        return rows, None
    made: tuple[torch.Tensor, torch.Tensor | None] = moe_kernel_quantize_input(
        rows,
        later_scale(config),
        quant_dtype=quant_dtype,
        per_act_token_quant=per_token,
        block_shape=config.block_shape,
        **options,
    )
    return made


def reads_all_rows(config: Any) -> bool:
    """Whether quantising rows that have come looks at memory in which there may be none."""
    return config.quant_dtype is not None and later_scale(config) is None


Receiver = Callable[[], Prepared]
