"""The products that bench/tp.py measures: those of known models' layers, and any others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
# Columns between the layers of a model, and inside its MLP; as in bench/gemm/shape.cc.
MODELS = {"70b": (8192, 28672), "8b": (4096, 14336)}
KEYS_AND_VALUES = 2 * 8 * 128


class Problem(NamedTuple):
    """``[M, K]`` times ``[K, N]`` on every rank, with a transfer before it or behind it.

    Attributes:
        shape: its name.
        operation: one of OPERATIONS.
        n, k: of a rank.
        tokens: M, of all ranks.
        ranks: W, of which each has equally many tokens.
        dtype: name of the element type.
    """

    shape: str
    operation: str
    n: int
    k: int
    tokens: int
    ranks: int
    dtype: str

    @property
    def gathers(self) -> bool:
        """Whether a is split over ranks by its rows; otherwise by its columns."""
        return self.operation == "all_gather"

    @property
    def own(self) -> int:
        """Tokens of a rank."""
        return self.tokens // self.ranks


class Way(NamedTuple):
    """One way to a result.

    Attributes:
        name: shown in the table.
        call: starts it.
        products: how many products `call` makes, one after the other.
        finish: returns when what `call` returned is complete.
        result: of what `call` returned, as a torch tensor on the CPU; None = not to be compared.
    """

    name: str
    call: Callable[[], Any]
    finish: Callable[[Any], Any]
    result: Callable[[Any], Any] | None
    products: int = 1


def read_shapes(text: str, ranks: int) -> list[tuple[str, str, int, int]]:
    """Name, operation, N and K of a rank, of MODEL, MODEL.LAYER, or OPERATION:NxK.

    Raises:
        ValueError: there is no such shape, or its columns cannot be dealt out equally.
    """
    sizes = re.fullmatch(r"(\w+):(\d+)x(\d+)", text)
    if sizes and sizes[1] in OPERATIONS:
        return [(text, sizes[1], int(sizes[2]), int(sizes[3]))]
    model = text.partition(".")[0]
    layers = _layers(model, ranks) if model in MODELS else []
    found = [layer for layer in layers if text in (model, layer[0])]
    if not found:
        raise ValueError(
            f"--shapes: expected {' or '.join(MODELS)}, one of their layers (70b.qkv, .o_proj, "
            ".fc1, .fc2, .fc2_all_reduce), or all_gather:NxK, reduce_scatter:NxK, all_reduce:NxK; "
            f"got {text!r}"
        )
    return found


def _layers(model: str, ranks: int) -> list[tuple[str, str, int, int]]:
    hidden, inner = MODELS[model]
    qkv = hidden + KEYS_AND_VALUES
    for whole in (hidden, inner, qkv):
        if whole % ranks:
            raise ValueError(f"--shapes {model}: {whole} columns cannot be dealt to {ranks} ranks")
    # Column-parallel layers have their part of N, row-parallel ones their part of K.
    return [
        (f"{model}.qkv", "all_gather", qkv // ranks, hidden),
        (f"{model}.o_proj", "reduce_scatter", hidden, hidden // ranks),
        (f"{model}.fc1", "all_gather", inner // ranks, hidden),
        (f"{model}.fc2", "reduce_scatter", hidden, inner // ranks),
        (f"{model}.fc2_all_reduce", "all_reduce", hidden, inner // ranks),
    ]
