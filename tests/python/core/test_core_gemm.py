"""Products overlapped with transfers, on NumPy arrays: every element, exactly, and mistakes."""

from __future__ import annotations

import dataclasses
import time

import ml_dtypes
import numpy as np
import pytest

import crossdock
import support
from crossdock import GemmArgs, GemmConfig, GemmContext, errors
from support import Rank

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
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    @property
    def all_tokens(self) -> int:
        return sum(self.tokens)


CASES = [
    Case((3, 3)),
    Case((5, 0, 8), algo="split_p2p"),
    Case((7,)),
    Case((0, 0)),
    Case((4, 9), dtype="bfloat16", symmetric=False),
    Case((8, 16, 0, 24), dtype="float16", transpose_b=False, algo="sequential"),
    Case((8, 16), transpose_a=True, transpose_b=False, symmetric=False),
]


def stored(matrix: np.ndarray, transposed: bool) -> np.ndarray:
    return np.ascontiguousarray(matrix.T if transposed else matrix)


def equal(name: str, got: np.ndarray, want: np.ndarray, dtype: np.dtype | None = None) -> None:
    assert got.shape == want.shape, f"{name}: got shape {got.shape}, want {want.shape}"
    assert dtype is None or got.dtype == dtype, name
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64), err_msg=name)


def poison(comm: crossdock.Comm) -> None:
    """Fills all symmetric memory with NaN, for arrays that are allocated later."""
    size = comm.memory().largest_free_bytes
    if size:
        comm.empty(size // 4, np.float32).fill(np.nan)


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
                d = context.all_gather(
                    a,
                    b_here,
                    bias=bias,
                    epilogue="relu",
                    pre_activation=x,
                    **options,
                    algo=case.algo,
                )
                want = gathered @ wide[me.rank].T + bias
                equal("pre_activation", x, want)
                equal("all_gather", d, np.maximum(want, 0), case.type)
                equal("gathered", context.gathered(), stored(gathered, case.transpose_a), case.type)

                a = stored(halves[me.rank], case.transpose_a)
                sums = np.full(N, 99, np.float32)
                d = context.reduce_scatter(a, b_here, bias_grad=sums, **options, algo=case.algo)
                equal("reduce_scatter", d, summed[own], case.type)
                equal("bias_grad", sums, summed[own].sum(0))

                c = np.full((rows, N), 3, case.type)
                d = context.all_reduce(
                    a, b_here, alpha=2, beta=-1.0, c=c, out=c, **options | {"tokens_per_rank": None}
                )
                assert d is c
                equal("all_reduce", d, 2 * summed - 3, case.type)
            assert (context.errors(), context.status().status) == (0, "XD_SUCCESS")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_equal_the_reference(case: Case) -> None:
    support.run_ranks(len(case.tokens), products, case)


def test_ranks_may_be_threads_of_one_process() -> None:
    support.run_threads(3, products, CASES[1])


def scaled(me: Rank) -> None:
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
            equal(way, d, want, np.dtype("float32"))
            equal(f"gathered, {way}", kept, np.concatenate(a))
            assert amax == np.abs(want).max()
            d = context.all_gather(a[me.rank], b, **args, dtype=fp8, d_scale=out_scale)
            equal(f"to fp8, {way}", d, (want / 4).astype(fp8), np.dtype(fp8))
            assert context.all_gather(a[me.rank], b, **args).dtype == ml_dtypes.bfloat16


def test_fp8_with_scales_of_each_kind() -> None:
    support.run_ranks(2, scaled)


def beside_products(me: Rank) -> None:
    case = Case((3, 0, 4))
    arrays = case.matrices(5, *((count, 24) for count in case.tokens))
    terms = case.matrices(6, *[(7, 12)] * 3)
    grad, x = case.matrices(7, (11, 8), (11, 20))
    first = sum(case.tokens[: me.rank])
    config = case.config(
        operations=("all_gather", "reduce_scatter", "bulk", "start_all_gather"), slots=2
    )
    with me.comm(heap_bytes=1 << 16) as comm, GemmContext(comm, config) as context:
        product = GemmArgs(a=grad, b=x, transpose_a=True, transpose_b=False)
        given = {"product": product, "tokens_per_rank": case.tokens}
        out, weight_grad = context.bulk("all_gather", arrays[me.rank], **given)
        equal("gathered", out, np.concatenate(arrays))
        equal("product", weight_grad, grad.T @ x)
        grad_into = np.ones_like(weight_grad)
        product = dataclasses.replace(product, c=grad_into, out=grad_into, beta=1.0)
        out, same = context.bulk(
            "reduce_scatter", terms[me.rank], product=product, tokens_per_rank=case.tokens
        )
        assert same is grad_into
        equal("reduced", out, sum(terms)[first : first + case.tokens[me.rank]])
        equal("accumulated", grad_into, grad.T @ x + 1)
        with pytest.raises(crossdock.Mismatch, match="tag "):
            context.bulk("all_gather", arrays[me.rank], tokens_per_rank=case.tokens, tag=me.rank)
        raw = (np.arange(case.tokens[me.rank] * 16) + me.rank).astype(np.uint8).reshape(-1, 16)
        out, nothing = context.bulk("all_gather", raw, tokens_per_rank=case.tokens)
        assert nothing is None and out.shape == (7, 16) and out.dtype == np.uint8

        out = context.start_all_gather(arrays[me.rank], tokens_per_rank=case.tokens, tag=4)
        with pytest.raises(crossdock.Busy):
            context.start_all_gather(arrays[me.rank], tokens_per_rank=case.tokens)
        context.wait()
        equal("gathered beside", out, np.concatenate(arrays))
        context.wait()


def test_transfers_beside_a_product_and_beside_other_work() -> None:
    support.run_ranks(3, beside_products)


def explained(me: Rank) -> None:
    case = CASES[0]
    a, b = case.matrices(1, (3, K), (N, K))
    with me.comm() as comm, GemmContext(comm, case.config()) as context:
        plan = context.explain("all_gather", GemmArgs(a=a, b=b))
        assert plan.algo in crossdock._core.constants.GEMM_ALGOS
        assert plan.estimate_us > 0 and plan.num_products >= 1
        assert "SPLIT_P2P" in plan.text and "SEQUENTIAL" in plan.text
        assert context.explain("all_gather", GemmArgs(a=a, b=b, algo="split_p2p")).algo == (
            "split_p2p"
        )
        with pytest.raises(crossdock.InvalidArgument, match="b: has K = 40"):
            context.explain("all_gather", GemmArgs(a=a, b=np.zeros((K, N), np.float32)))
        with pytest.raises(ValueError, match="operation: expected one of .*, got 'gather'"):
            context.explain("gather", GemmArgs(a=a, b=b))


def test_explain_says_what_a_call_would_do() -> None:
    support.run_ranks(2, explained)


def mistakes(me: Rank) -> None:
    case = Case((3, 3))
    a, b = case.matrices(1, (3, K), (N, K))
    nothing = np.empty(0, np.float32)
    calls = [
        (TypeError, "a: expected a NumPy array, got list", {"a": [1]}),
        (TypeError, "b: expected a dtype of float32, .*, got int32", {"b": b.astype(np.int32)}),
        (ValueError, r"a: expected 2 dimensions, got shape \(3,\)", {"a": a[:, 0].copy()}),
        (ValueError, "a: expected a C-contiguous array", {"a": a[:, ::2]}),
        (ValueError, "epilogue: expected one of 'none', .*, got 'tanh'", {"epilogue": "tanh"}),
        (
            ValueError,
            "tokens_per_rank: expected the tokens of 2 ranks, got 1",
            {"tokens_per_rank": (3,)},
        ),
        (
            TypeError,
            "tokens_per_rank: expected a sequence of whole numbers, got 3",
            {"tokens_per_rank": 3},
        ),
        (TypeError, "tag: expected a whole number, got 'fc1'", {"tag": "fc1"}),
        (ValueError, r"tag: expected a whole number from 0 below 2\^32, got -1", {"tag": -1}),
        (TypeError, "unexpected keyword argument 'biass'", {"biass": nothing}),
        (
            crossdock.InvalidArgument,
            "bias: has 0 elements, expected 40|bias: .*expected 40",
            {"bias": nothing},
        ),
        (crossdock.InvalidArgument, r"b: has K = 20, expected 24", {"b": b[:, :20].copy()}),
        (
            crossdock.InvalidArgument,
            "a: has 4 tokens, expected at most max_tokens = 3",
            {"a": np.zeros((4, K), np.float32)},
        ),
    ]
    with me.comm() as comm, GemmContext(comm, case.config()) as context:
        for kind, text, changed in calls:
            if me.rank == 1:
                with pytest.raises(kind, match=rf"{text}.*\[rank 1 of 2\]$"):
                    context.all_gather(**{"a": a, "b": b} | changed)
            else:
                start = time.monotonic()
                with pytest.raises(crossdock.Mismatch) as raised:
                    context.all_gather(a, b)
                assert time.monotonic() - start < 5, "the peer was told late"
                error = raised.value
                assert (error.peer, error.operation, error.fatal) == (1, "gemm_all_gather", False)
        with pytest.raises(crossdock.Mismatch, match="K 20, here 24|K 24, here 20"):
            width = (24, 20)[me.rank]
            context.all_gather(a[:, :width].copy(), b[:, :width].copy())
        with pytest.raises(crossdock.Mismatch, match="tag 9, here 8|tag 8, here 9"):
            context.all_gather(a, b, tag=8 + me.rank)
        with pytest.raises(crossdock.Unsupported, match="FUSED"):
            context.all_gather(a, b, algo="fused")
        with pytest.raises(crossdock.Unsupported, match="config.operations"):
            context.bulk("all_gather", a)
        with pytest.raises(crossdock.InvalidArgument, match="keep_gathered|gathered"):
            context.gathered()
        d = context.all_gather(a, b)  # still usable
        equal("all_gather", d, np.concatenate([a, a]) @ b.T)
        assert context.errors() > 0 and context.status().operation is None


def test_a_mistake_is_named_and_the_peers_are_told_at_once() -> None:
    support.run_ranks(2, mistakes)


def bad_configs(me: Rank) -> None:
    with me.comm() as comm:
        for kind, text, make in (
            (TypeError, "config: expected a GemmConfig, got dict", lambda: {}),
            (
                crossdock.InvalidArgument,
                "config.max_tokens = 0, expected 1 to",
                lambda: GemmConfig(max_tokens=0, max_k=8, max_n=8),
            ),
            (
                crossdock.InvalidArgument,
                "config.slots = 3",
                lambda: GemmConfig(max_tokens=1, max_k=8, max_n=8, slots=3),
            ),
        ):
            good = GemmConfig(max_tokens=1, max_k=8, max_n=8)
            with pytest.raises(kind if me.rank == 0 else crossdock.Mismatch) as raised:
                GemmContext(comm, make() if me.rank == 0 else good)
            assert me.rank == 1 or text in str(raised.value)
        with pytest.raises(crossdock.Mismatch, match="max_n"):
            GemmContext(comm, GemmConfig(max_tokens=1, max_k=8, max_n=8 + me.rank))
        context = GemmContext(comm, good)
        assert context.comm is comm and context.config is good
        context.close()
        with pytest.raises(crossdock.InvalidArgument, match="this context has been closed"):
            context.wait()


def test_a_bad_config_is_refused_on_all_ranks() -> None:
    support.run_ranks(2, bad_configs)


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


def test_a_status_names_its_operation() -> None:
    numbers = crossdock._core.constants.GEMM_OPERATIONS
    found = {"status": "XD_ERROR_MISMATCH", "operation": numbers["bulk"]}
    assert errors.in_words(found)["operation"] == "gemm_bulk"
    assert errors.operation_word(max(numbers.values()) + 1) is None
