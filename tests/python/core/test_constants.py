"""The headers' numbers stand in ``crossdock._core.constants``, and in no other Python file."""

from __future__ import annotations

import ast
import pathlib
import typing
from collections.abc import Iterator

import pytest

import crossdock
from crossdock import _config, _gemm_config
from crossdock._core import constants

# The place in the sources: a build has links to them.
PACKAGE = pathlib.Path(crossdock.__file__).resolve().parent
WORDS = {
    *constants.LAYOUTS,
    *constants.OVERFLOWS,
    *constants.DUPLICATE_IDS,
    *constants.ON_ERROR,
    *constants.STAGINGS,
    *constants.PEER_LOSSES,
    *constants.PHASES,
    *constants.DTYPES,
    *constants.QUANTISE,
    *constants.ACTIVATIONS,
    *constants.DEVICE_TYPES,
    *constants.OPERATIONS,
    *constants.GEMM_OPERATIONS,
    *constants.GEMM_ALGOS,
    *constants.GEMM_EPILOGUES,
}
# Limits and blocks; others, such as 16, are numbers of many things.
LIMITS = {
    constants.MAX_RANKS,
    constants.MAX_EXPERTS,
    constants.MAX_TOKENS,
    constants.LL_MAX_TOKENS,
    constants.LL_MAX_RANKS,
    600_000,
    constants.QUANTISE["fp8_block128"][1],
}
OTHER_THINGS = {
    ("deep_ep/_agreement.py", 1024): "words of memory",
    ("jax/_platform.py", 1024): "elements of a sample",
    ("cli/_bench.py", 1024): "tokens by default",
    ("cli/_doctor.py", 128): "columns of a test",
    ("cli/_trace.py", 128): "what shells add to signals",
    ("jax/tp/_run.py", 128): "columns of a product's scale",
    ("sglang/_dispatchers.py", 128): "alignment of DeepGEMM's numbers of rows",
    ("sglang/_dispatchers.py", 1024): "tokens of a group for prefill",
    ("vllm/_layers.py", 128): "rows and columns of a block of weights",
}


def repeated(tree: ast.AST) -> Iterator[tuple[int, object]]:
    """Where code, not text, has a number of the headers, or numbers for their words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in LIMITS:
            yield node.lineno, node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            if isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.LShift):
                yield node.lineno, ast.unparse(node)  # DLPack's code << 8 | bits
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if (
                    isinstance(key, ast.Constant)
                    and key.value in WORDS
                    and (isinstance(value, ast.Constant) and type(value.value) is int)
                ):
                    yield node.lineno, key.value
        elif isinstance(node, ast.Tuple | ast.List):
            items = [item.value for item in node.elts if isinstance(item, ast.Constant)]
            if tuple(items) == constants.OPERATIONS:
                yield node.lineno, items


@pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE))
)
def test_no_file_repeats_the_headers(file: pathlib.Path) -> None:
    name = str(file.relative_to(PACKAGE))
    found = [
        (line, what)
        for line, what in repeated(ast.parse(file.read_text()))
        if (name, what) not in OTHER_THINGS
    ]
    assert not found


def test_words_of_types_are_those_of_the_headers() -> None:
    for literal, words in (
        (_config.Layout, constants.LAYOUTS),
        (_config.Overflow, constants.OVERFLOWS),
        (_config.DuplicateIds, constants.DUPLICATE_IDS),
        (_config.OnError, constants.ON_ERROR),
        (_config.Staging, constants.STAGINGS),
        (_config.PeerLoss, constants.PEER_LOSSES),
        (_gemm_config.GemmOperation, constants.GEMM_OPERATIONS),
        (_gemm_config.GemmOperation, constants.GEMM_BITS),
        (_gemm_config.Algo, constants.GEMM_ALGOS),
        (_gemm_config.Epilogue, constants.GEMM_EPILOGUES),
    ):
        assert typing.get_args(literal) == tuple(words)


def test_constants_are_those_of_the_interface() -> None:
    ep = "prepare", "dispatch", "combine", "dispatch_bwd", "combine_bwd"
    for word in (*ep, "ll_dispatch", "ll_combine", "ll_reset"):
        assert constants.OPERATIONS[getattr(constants, word.upper())] == word
    assert constants.QUANTISE["mxfp8"] == (4, 32, "float8_e8m0fnu")
    assert constants.DTYPES["bfloat16"] == 4 << 8 | 16
    assert constants.DEVICE_TYPES == {"cpu": 1, "cuda": 2}
