"""Products overlapped with transfers, on NumPy arrays: every element, exactly, and mistakes."""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest

import crossdock
import support
from core_support import dtype_of, equal, peers_are_told, poison, rows_of
from crossdock import GemmArgs, GemmConfig, GemmContext
from support import Rank, on_ranks

SEED = 1509
K, N = 24, 40


@dataclasses.dataclass(frozen=True)
class Case:
    """Matrices of all ranks, of small whole numbers: every sum is exact in every type."""

    tokens: tuple[int, ...]
    dtype: str = "float32"
    transpose_a: bool = False
    transpose_b: bool = True
    symmetric: bool = True
    algo: str = "auto"

    def config(self, **options) -> GemmConfig:
        sizes = {"max_tokens": max(1, *self.tokens), "max_k": 64, "max_n": 64}
        return GemmConfig(**sizes, dtype=self.dtype, **options)

    def matrices(self, salt: int, *shapes: tuple[int, int]) -> list[np.ndarray]:
        random = np.random.default_rng(SEED + salt)
        return [random.integers(-2, 3, shape).astype(self.type) for shape in shapes]

    @property
    def type(self) -> np.dtype:
        return dtype_of(self.dtype)

    @property
    def all_tokens(self) -> int:
        return sum(self.tokens)


CASES = [
    Case((3, 3)),
    Case((5, 0, 8), algo="split"),
    Case((7,)),
    Case((0, 0)),
    Case((4, 9), dtype="bfloat16", symmetric=False),
    Case((8, 16, 0, 24), dtype="float16", transpose_b=False, algo="sequential"),
    Case((8, 16), transpose_a=True, transpose_b=False, symmetric=False),
]


def stored(matrix: np.ndarray, transposed: bool) -> np.ndarray:
    return np.ascontiguousarray(matrix.T if transposed else matrix)


def products(me: Rank, case: Case) -> None:
    """The three operations, twice, on all of the paths of `case`."""
    rows, weights = case.all_tokens, [(N, K)] * me.num_ranks
    tokens = case.matrices(1, *((count, K) for count in case.tokens))
    halves = case.matrices(2, *[(rows, K)] * me.num_ranks)
    b = case.matrices(3, *weights)
    first = sum(case.tokens[: me.rank])
    own = slice(first, first + case.tokens[me.rank])
    wide = [matrix.astype(np.float32) for matrix in b]
    gathered = np.concatenate(tokens).astype(np.float32)
    summed = sum(half.astype(np.float32) @ each.T for half, each in zip(halves, wide))
    options = {
        "tokens_per_rank": case.tokens,
        "transpose_a": case.transpose_a,
        "transpose_b": case.transpose_b,
    }
    b_here = stored(b[me.rank], not case.transpose_b)
    bias = np.arange(-20, 20, dtype=np.float32)
    with me.comm(heap_bytes=(1 << 20) * case.symmetric) as comm:
        poison(comm)
        with GemmContext(comm, case.config(keep_gathered=True)) as context:
            for _ in range(2):
                a = stored(tokens[me.rank], case.transpose_a)
                x = np.full((rows, N), 99, case.type)
                more = {"bias": bias, "epilogue": "relu", "pre_activation": x, "algo": case.algo}
                d = context.all_gather(a, b_here, **options, **more)
                want = gathered @ wide[me.rank].T + bias
                equal(x, want, "pre_activation", case.type)
                equal(d, np.maximum(want, 0), "all_gather", case.type)
                equal(context.gathered(), stored(gathered, case.transpose_a), "gathered", case.type)

                a = stored(halves[me.rank], case.transpose_a)
                sums = np.full(N, 99, np.float32)
                d = context.reduce_scatter(a, b_here, bias_grad=sums, **options)
                equal(d, summed[own], "reduce_scatter", case.type)
                equal(sums, summed[own].sum(0), "bias_grad")

                c = np.full((rows, N), 3, case.type)
                d = context.all_reduce(
                    a, b_here, alpha=2, beta=-1.0, c=c, out=c, **options | {"tokens_per_rank": None}
                )
                assert d is c
                equal(d, 2 * summed - 3, "all_reduce", case.type)
            assert (context.errors(), context.status().status) == (0, "XD_SUCCESS")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_equal_the_reference(case: Case) -> None:
    support.run_ranks(len(case.tokens), products, case)


def test_ranks_may_be_threads_of_one_process() -> None:
    support.run_threads(3, products, CASES[1])


@on_ranks(2)
def test_fp8_with_scales_of_each_kind(me: Rank) -> None:
    """fp8 with scales of each kind: powers of two, so that products are exact."""
    random = np.random.default_rng(SEED)
    rows, columns, inner = 4, 16, 256
    fp8 = ml_dtypes.float8_e4m3fn
    a = [random.integers(-1, 2, (rows, inner)).astype(fp8) for _ in range(me.num_ranks)]
    b = random.integers(-1, 2, (columns, inner)).astype(fp8)

    def powers(*shape: int) -> np.ndarray:
        return np.exp2(random.integers(-1, 2, shape)).astype(np.float32)

    ranks = range(me.num_ranks)
    ways = {
        "tensor": ([np.float32([2.0**rank]) for rank in ranks], np.float32([0.5])),
        "rows": ([powers(rows) for _ in ranks], powers(columns)),
        "blocks": ([powers(rows, 2) for _ in ranks], powers(1, 2)),
    }

    def widened(matrix: np.ndarray, scale: np.ndarray) -> np.ndarray:
        if scale.ndim == 1:
            return matrix.astype(np.float32) * scale[:, None]
        of_rows = np.resize(scale, (len(matrix), 2))  # a single row of them is everybody's
        return matrix.astype(np.float32) * np.repeat(of_rows, 128, 1)

    config = GemmConfig(max_tokens=rows, max_k=inner, max_n=columns)
    with me.comm() as comm, GemmContext(comm, config) as context:
        for way, (a_scale, b_scale) in ways.items():
            kept = np.empty((rows * me.num_ranks, inner), fp8)
            amax, out_scale = np.empty(1, np.float32), np.float32([0.25])
            args = {"a_scale": a_scale[me.rank], "b_scale": b_scale, "gathered": kept}
            want = np.concatenate([widened(*pair) for pair in zip(a, a_scale)])
            want = want @ widened(b, b_scale).T
            d = context.all_gather(a[me.rank], b, **args, dtype=np.float32, d_amax=amax)
            equal(d, want, way, np.dtype("float32"))
            equal(kept, np.concatenate(a), f"gathered, {way}")
            assert amax == np.abs(want).max()
            d = context.all_gather(a[me.rank], b, **args, dtype=fp8, d_scale=out_scale)
            equal(d, (want / 4).astype(fp8), f"to fp8, {way}", np.dtype(fp8))
            assert context.all_gather(a[me.rank], b, **args).dtype == ml_dtypes.bfloat16


@on_ranks(3)
def test_transfers_beside_a_product_and_beside_other_work(me: Rank) -> None:
    case = Case((3, 0, 4))
    arrays = case.matrices(5, *((count, 24) for count in case.tokens))
    terms = case.matrices(6, *[(7, 12)] * 3)
    grad, x = case.matrices(7, (11, 8), (11, 20))
    first = sum(case.tokens[: me.rank])
    config = case.config(operations=("all_gather", "reduce_scatter", "bulk", "start_all_gather"))
    with me.comm(heap_bytes=1 << 16) as comm, GemmContext(comm, config) as context:
        product = GemmArgs(a=grad, b=x, transpose_a=True, transpose_b=False)
        given = {"product": product, "tokens_per_rank": case.tokens}
        out, weight_grad = context.bulk("all_gather", arrays[me.rank], **given)
        equal(out, np.concatenate(arrays), "gathered")
        equal(weight_grad, grad.T @ x, "product")
        grad_into = np.ones_like(weight_grad)
        product = dataclasses.replace(product, c=grad_into, out=grad_into, beta=1.0)
        out, same = context.bulk(
            "reduce_scatter", terms[me.rank], product=product, tokens_per_rank=case.tokens
        )
        assert same is grad_into
        equal(out, sum(terms)[first : first + case.tokens[me.rank]], "reduced")
        equal(grad_into, grad.T @ x + 1, "accumulated")
        with pytest.raises(crossdock.Mismatch, match="tag "):
            context.bulk("all_gather", arrays[me.rank], tokens_per_rank=case.tokens, tag=me.rank)
        raw = (np.arange(case.tokens[me.rank] * 16) + me.rank).astype(np.uint8).reshape(-1, 16)
        out, nothing = context.bulk("all_gather", raw, tokens_per_rank=case.tokens)
        assert nothing is None and out.shape == (7, 16) and out.dtype == np.uint8

        out = context.start_all_gather(arrays[me.rank], tokens_per_rank=case.tokens, tag=4)
        with pytest.raises(crossdock.Busy):
            context.start_all_gather(arrays[me.rank], tokens_per_rank=case.tokens)
        context.wait()
        equal(out, np.concatenate(arrays), "gathered beside")
        context.wait()


@on_ranks(2)
def test_explain_says_what_a_call_would_do(me: Rank) -> None:
    case = CASES[0]
    a, b = case.matrices(1, (3, K), (N, K))
    with me.comm() as comm, GemmContext(comm, case.config()) as context:
        plan = context.explain("all_gather", GemmArgs(a=a, b=b))
        assert plan.algo in crossdock._core.constants.GEMM_ALGOS
        assert plan.estimate_us > 0 and plan.num_products >= 1
        assert "SPLIT" in plan.text and "SEQUENTIAL" in plan.text
        assert context.explain("all_gather", GemmArgs(a=a, b=b, algo="split")).algo == "split"
        with pytest.raises(crossdock.InvalidArgument, match="b: has K = 40"):
            context.explain("all_gather", GemmArgs(a=a, b=np.zeros((K, N), np.float32)))
        with pytest.raises(ValueError, match="operation: expected one of .*, got 'gather'"):
            context.explain("gather", GemmArgs(a=a, b=b))


@on_ranks(2)
def test_a_mistake_is_named_and_the_peers_are_told_at_once(me: Rank) -> None:
    case = Case((3, 3))
    a, b = case.matrices(1, (3, K), (N, K))
    whole = "a whole number"
    table = {
        TypeError: [
            ({"a": [1]}, "a: expected a NumPy array, got list"),
            ({"b": b.astype(np.int32)}, "b: expected a dtype of float32, .*, got int32"),
            ({"tokens_per_rank": 3}, "tokens_per_rank: .* a sequence of whole numbers, got 3"),
            ({"tag": "fc1"}, f"tag: expected {whole}, got 'fc1'"),
            ({"biass": b}, "unexpected keyword argument 'biass'"),
        ],
        ValueError: [
            ({"a": a[:, 0].copy()}, r"a: expected 2 dimensions, got shape \(3,\)"),
            ({"a": a[:, ::2]}, "a: expected a C-contiguous array"),
            ({"epilogue": "tanh"}, "epilogue: expected one of 'none', .*, got 'tanh'"),
            ({"tokens_per_rank": (3,)}, "tokens_per_rank: expected the tokens of 2 ranks, got 1"),
            ({"tag": -1}, rf"tag: expected {whole} from 0 below 2\^32, got -1"),
        ],
        crossdock.InvalidArgument: [
            ({"bias": np.empty(0, np.float32)}, "bias: has 0 elements, exp.* 40|bias: .*exp.* 40"),
            ({"b": b[:, :20].copy()}, "b: has K = 20, expected 24"),
            ({"a": np.zeros((4, K), np.float32)}, "a: has 4 tokens, .* at most max_tokens = 3"),
        ],
    }
    with me.comm() as comm, GemmContext(comm, case.config()) as context:
        right = functools.partial(context.all_gather, a=a, b=b)
        for kind, wrong, text in rows_of(table):
            said = rf"(?:{text}).*\[rank 1 of 2\]$"
            error = peers_are_told(me, kind, said, functools.partial(right, **wrong), right)
            if error:
                assert (error.peer, error.operation) == (1, "gemm_all_gather")
        with pytest.raises(crossdock.Mismatch, match="K 20, here 24|K 24, here 20"):
            width = (24, 20)[me.rank]
            context.all_gather(a[:, :width].copy(), b[:, :width].copy())
        with pytest.raises(crossdock.Mismatch, match="tag 9, here 8|tag 8, here 9"):
            context.all_gather(a, b, tag=8 + me.rank)
        with pytest.raises(crossdock.Unsupported, match="DIRECT"):
            context.all_gather(a, b, algo="direct")
        with pytest.raises(crossdock.Unsupported, match="config.operations"):
            context.bulk("all_gather", a)
        with pytest.raises(crossdock.InvalidArgument, match="keep_gathered|gathered"):
            context.gathered()
        equal(right(), np.concatenate([a, a]) @ b.T, "all_gather")  # still usable
        assert context.errors() > 0 and context.status().operation is None


def test_a_config_knows_its_words_and_its_memory() -> None:
    with pytest.raises(ValueError, match="algo: expected one of 'auto', .*, got 'ring'"):
        GemmConfig(max_tokens=1, algo="ring")
    with pytest.raises(ValueError, match="operations: expected one of .*, got 'gather'"):
        GemmConfig(max_tokens=1, operations=("gather",))
    with pytest.raises(TypeError, match="operations: expected a sequence of words, got 'bulk'"):
        GemmConfig(max_tokens=1, operations="bulk")
    config = GemmConfig(max_tokens=64, max_k=128, max_n=256, dtype=np.float32)
    memory = config.context_memory(2)
    assert memory.symmetric_bytes >= 64 * (128 + 2 * 256) * 4 and memory.private_bytes > 0
    assert [crossdock.gemm_local_size(10, rank, 4) for rank in range(4)] == [3, 3, 3, 1]
    with pytest.raises(crossdock.InvalidArgument, match="rank = 4"):
        crossdock.gemm_local_size(10, 4, 4)
