"""TransformerEngine's userbuffers: products and transfers, exactly, and what options do."""

from __future__ import annotations

import inspect
import pathlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import crossdock.torch as xd
from crossdock.compat import te_overlap as te
from crossdock.compat.te_overlap._options import LAYERS, layer_configs
from crossdock.errors import Mismatch
from support import Rank, on_ranks
from torch_ranks import process_group

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "transformer_engine.md"
AG, RS = te.CommOverlapType.AG, te.CommOverlapType.RS
FP8 = te.UserBufferQuantizationMode.FP8
TOKENS, HIDDEN, COLUMNS = 6, 16, 8  # tokens of a rank, columns of a rank


def whole(seed: int, *shape: int) -> torch.Tensor:
    """-2 to 2, whose sums are exact."""
    numbers = np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)
    return torch.from_numpy(numbers).to(torch.get_default_device())


def same(name: str, got: torch.Tensor | None, want: torch.Tensor) -> None:
    assert got is not None, f"{name} is missing"
    assert got.shape == want.shape, f"{name}: got shape {tuple(got.shape)}, want {want.shape}"
    wrong = int((got.double() != want.double()).sum())
    assert not wrong, f"{name}: {wrong} of {want.numel()} elements differ"


@contextmanager
def buffers(
    me: Rank, tokens: int = TOKENS, columns: int = HIDDEN, **options: Any
) -> Iterator[None]:
    options.setdefault("dtype", torch.float32)
    te.initialize_ub([tokens * me.num_ranks, columns], me.num_ranks, **options)
    try:
        yield
    finally:
        te.destroy_ub()


def fp8_buffers(me: Rank, **options: Any) -> AbstractContextManager[None]:
    return buffers(me, 16, K8, dtype=torch.bfloat16, **options)


def own(me: Rank) -> slice:
    return slice(TOKENS * me.rank, TOKENS * (me.rank + 1))


# ---- Products ------------------------------------------------------------------------------------


def gathers(me: Rank) -> None:
    x = whole(1, TOKENS * me.num_ranks, HIDDEN)
    weight, bias = whole(10 + me.rank, COLUMNS, HIDDEN), whole(20 + me.rank, COLUMNS)
    with buffers(me, ub_cfgs={"fc1_fprop": {"aggregate": True}}):
        for name in ("qkv_fprop", "fc1_fprop"):
            ub = te.get_ub(name)
            ub.copy_into_buffer(x[own(me)], local_chunk=True)
            y, *rest = te.general_gemm(weight, ub.get_buffer(), ub=ub, ub_type=AG, bias=bias)
            assert rest == [None, None, None]
            same("y", y, F.linear(x, weight, bias))
            same("the buffer", ub.get_buffer(), x)
        ub = te.get_ub("proj_dgrad")  # rows that are not in the buffer, by a weight as it is stored
        rows, base = torch.empty_like(x), whole(30, TOKENS * me.num_ranks, COLUMNS)
        out = base.clone()
        got = te.general_gemm(
            weight.t().contiguous(),
            x[own(me)],
            layout="NN",
            out=out,
            accumulate=True,
            alpha=2.0,
            beta=3.0,
            ub=ub,
            ub_type=AG,
            extra_output=rows,
        )
        assert got[0] is out and got[3] is rows
        same("sum", out, 2 * (x @ weight.t()) + 3 * base)
        same("gathered rows", rows, x)


def gelu(me: Rank) -> None:
    x = whole(2, TOKENS * me.num_ranks, HIDDEN)
    weight, bias = whole(11, COLUMNS, HIDDEN), whole(21, COLUMNS)
    with buffers(me):
        ub = te.get_ub("fc1_fprop")
        common = {"ub": ub, "ub_type": AG, "bias": bias}
        y, none, before, _ = te.general_gemm(weight, x[own(me)], gelu=True, **common)
        assert none is None
        same("before GELU", before, F.linear(x, weight, bias))
        torch.testing.assert_close(y, F.gelu(before, approximate="tanh"), rtol=1e-5, atol=1e-6)
        y, sums, _, _ = te.general_gemm(
            weight, x[own(me)], gelu=True, gelu_in=before, grad=True, **common
        )
        curve = torch.autograd.functional.vjp(
            lambda at: F.gelu(at, approximate="tanh"), before, F.linear(x, weight)
        )[1]
        torch.testing.assert_close(y, curve, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums, y.sum(0), rtol=1e-5, atol=1e-4)


def scatters(me: Rank) -> None:
    x = [whole(40 + r, TOKENS * me.num_ranks, COLUMNS) for r in range(me.num_ranks)]
    weights = [whole(50 + r, HIDDEN, COLUMNS) for r in range(me.num_ranks)]
    total = sum(F.linear(a, w) for a, w in zip(x, weights))
    for options in ({}, {"fc2_fprop": {"method": "ring_exchange"}, "proj_fprop": {"num_sm": 4}}):
        with buffers(me, ub_cfgs=options):
            for name in ("proj_fprop", "fc2_fprop"):
                common = {"ub": te.get_ub(name), "ub_type": RS}
                y, *_ = te.general_gemm(weights[me.rank], x[me.rank], **common)
                same("y", y, total[own(me)])
                out = torch.empty(TOKENS, HIDDEN)
                y, _, _, extra = te.general_gemm(
                    weights[me.rank], x[me.rank], extra_output=out, **common
                )
                assert y is out and extra is out
                same("extra_output", out, total[own(me)])
                base = torch.ones(TOKENS, HIDDEN)
                common |= {"accumulate": True, "out": base, "extra_output": out}
                with pytest.raises(ValueError, match="extra_output: expected None or out itself"):
                    te.general_gemm(weights[me.rank], x[me.rank], **common)
                common["extra_output"] = base
                te.general_gemm(weights[me.rank], x[me.rank], **common)
                same("sum", base, total[own(me)] + 1)


def bulk(me: Rank) -> None:
    rows = [whole(60 + r, TOKENS * me.num_ranks, HIDDEN) for r in range(me.num_ranks)]
    x, grad = whole(70 + me.rank, 12, HIDDEN), whole(80 + me.rank, 12, COLUMNS)
    with buffers(me):
        ub = te.get_ub("fc1_dgrad")
        ub.copy_into_buffer(rows[0][own(me)], local_chunk=True)
        common = {"layout": "NT", "grad": True, "bias": torch.zeros(COLUMNS), "bulk_overlap": True}
        product, bias_grad, _, _ = te.general_gemm(x, grad, ub=ub, ub_type=AG, **common)
        same("product", product, grad.t() @ x)
        same("gradient of the bias", bias_grad, grad.sum(0))
        same("gathered", ub.get_buffer(), rows[0])
        ub = te.get_ub("fc1_wgrad")
        ub.copy_into_buffer(rows[me.rank])
        out = torch.empty(TOKENS, HIDDEN)
        te.general_gemm(x, grad, ub=ub, ub_type=RS, extra_output=out, **common)
        same("summed", out, sum(rows)[own(me)])


# ---- fp8 -----------------------------------------------------------------------------------------

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Named:
    """A dtype as TransformerEngine's C++ module names it."""

    def __init__(self, name: str) -> None:
        self.name = name


def in_fp8(x: torch.Tensor, scale: float, kind: Any = E4M3, both: bool = False) -> te.Float8Tensor:
    """Whole numbers, which fp8 has; what they stand for is `scale` times as much."""
    dtype = kind if isinstance(kind, torch.dtype) else E4M3
    data = x.to(dtype).view(torch.uint8)
    return te.Float8Tensor(
        data=data,
        fp8_scale_inv=torch.full((1,), scale),
        fp8_dtype=kind,
        data_transpose=data.t().contiguous() if both else None,
    )


K8 = 32  # columns of a buffer of fp8, whose rows have whole 16 bytes


def fp8_gathers(me: Rank) -> None:
    x = whole(1, 16 * me.num_ranks, K8)
    mine = x[16 * me.rank :][:16].contiguous()
    weight, bias = whole(10 + me.rank, 16, K8), whole(20 + me.rank, 16)
    weights = in_fp8(weight, 0.5, E5M2)
    cases = (
        {"quantization_modes": [te.UserBufferQuantizationMode.NONE, FP8]},
        {"use_fp8": True, "ub_cfgs": {"qkv_fprop": {"aggregate": True}}},
    )
    for options in cases:
        with fp8_buffers(me, **options):
            ub = te.get_ub("qkv_fprop", use_fp8=True)
            assert ub.is_fp8_ubuf() and ub.get_buffer().dtype == torch.uint8
            assert not te.get_ub("proj_fprop", use_fp8=True).is_fp8_ubuf()
            local = in_fp8(mine, 4.0, Named("kFloat8E4M3"))
            ub.copy_into_buffer(local._data, local_chunk=True)
            # As TransformerEngine does: the buffer's rows, and the scale of this rank's.
            rows = te.Float8Tensor(
                data=ub.get_buffer(), fp8_scale_inv=local._scale_inv, fp8_dtype=E4M3
            )
            for split in (True, False):
                y, *rest = te.general_gemm(
                    weights,
                    rows,
                    ub=ub,
                    ub_type=AG,
                    out_dtype=torch.bfloat16,  # of fp8, cuBLASLt adds no float32 bias
                    use_split_accumulator=split,
                    bias=bias.bfloat16(),
                )
                assert rest == [None, None, None]
                same("y", y, (2 * F.linear(x, weight) + bias).bfloat16())
            same("the buffer", ub.get_buffer().view(E4M3).float(), x)
            y, *_ = te.general_gemm(weights, local, ub=ub, ub_type=AG)
            assert y.dtype == torch.bfloat16
            same("y of other rows", y.float(), 2 * F.linear(x, weight))


def fp8_scatters(me: Rank) -> None:
    tokens = 16 * me.num_ranks
    x = [whole(40 + r, tokens, K8) for r in range(me.num_ranks)]
    weights = [whole(50 + r, 16, K8) for r in range(me.num_ranks)]
    # Each rank's scales are its own.
    total = sum(2.0**r * F.linear(a, w) for r, (a, w) in enumerate(zip(x, weights)))
    mine = total[16 * me.rank :][:16]
    with fp8_buffers(me, use_fp8=True):
        common = {"ub": te.get_ub("fc2_fprop", use_fp8=True), "ub_type": RS}
        a, b = in_fp8(x[me.rank], 2.0**me.rank), in_fp8(weights[me.rank], 1.0)
        out = torch.empty(16, 16, dtype=torch.bfloat16)
        y, _, _, extra = te.general_gemm(b, a, extra_output=out, **common)
        assert y is out and extra is out
        same("sum", out, mine.bfloat16())


def fp8_bulk(me: Rank) -> None:
    """Products of the backward pass: stored both ways, as GPUs multiply fp8."""
    rows = whole(60, 16 * me.num_ranks, K8)
    mine = rows[16 * me.rank :][:16].contiguous()
    x, grad = whole(70 + me.rank, 32, K8), whole(80 + me.rank, 32, 16)
    weight = whole(90, 32, 16)  # [K, N]
    with fp8_buffers(me, use_fp8=True):
        ub = te.get_ub("fc1_dgrad", use_fp8=True)
        ub.copy_into_buffer(in_fp8(mine, 1.0)._data, local_chunk=True)
        common = {"ub": ub, "ub_type": AG, "bulk_overlap": True, "out_dtype": torch.float32}
        product, *_ = te.general_gemm(
            in_fp8(x, 0.5, both=True),
            in_fp8(grad, 2.0, E5M2, both=True),
            layout="NT",
            grad=True,
            **common,
        )
        same("product", product, grad.t() @ x)
        same("gathered", ub.get_buffer().view(E4M3).float(), rows)
        product, *_ = te.general_gemm(
            in_fp8(weight, 0.5, both=True), in_fp8(x, 4.0), layout="NN", **common
        )
        same("other product", product, 2 * x @ weight)


FP8_BODIES = [fp8_gathers, fp8_scatters, fp8_bulk]


@pytest.mark.parametrize(
    "body", [gathers, gelu, scatters, bulk, *FP8_BODIES], ids=lambda body: body.__name__
)
@on_ranks(1, 4)
def test_products_are_those_of_one_process(me: Rank, body: Callable[[Rank], None]) -> None:
    body(me)


@on_ranks(4)
def test_programs_on_the_page_run(me: Rank) -> None:
    texts = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(texts) == 2
    page: dict[str, Any] = {}
    exec("\n".join(texts), page)
    x, weight = whole(1, TOKENS * me.num_ranks, HIDDEN), whole(2 + me.rank, COLUMNS, HIDDEN)
    y, rows = page["column_parallel"](x[own(me)].contiguous(), weight, me.num_ranks)
    same("y", y, F.linear(x, weight))
    same("rows", rows, x)
    x, weight = whole(3, 16 * me.num_ranks, K8), whole(4 + me.rank, 16, K8)
    with fp8_buffers(me, use_fp8=True):
        mine = in_fp8(x[16 * me.rank :][:16], 0.5)
        y = page["column_parallel_fp8"](
            mine._data.view(E4M3),
            mine._scale_inv,
            in_fp8(weight, 1.0),
            te.get_ub("fc1_fprop", use_fp8=True),
        )
        same("y of fp8", y.float(), F.linear(x, weight) / 2)


# ---- Ranks ---------------------------------------------------------------------------------------


@on_ranks(4)
def test_ranks_in_a_row_have_a_layer_together(me: Rank) -> None:
    x = whole(5 + me.rank // 2, 2 * TOKENS, HIDDEN)  # of the two ranks that have a layer together
    weight = whole(6 + me.rank, COLUMNS, HIDDEN)
    mine = x[TOKENS * (me.rank % 2) :][:TOKENS]
    with process_group():
        for backend in (None, "gloo"):
            te.initialize_ub(
                [2 * TOKENS, HIDDEN], 2, dtype=torch.float32, bootstrap_backend=backend
            )
            ub = te.get_ub("qkv_fprop")
            assert ub.get_tp_size() == 2
            same("y", te.general_gemm(weight, mine, ub=ub, ub_type=AG)[0], F.linear(x, weight))
            te.destroy_ub()
        with pytest.raises(ValueError, match="tp_size = 3: expected a divisor of"):
            te.initialize_ub([12, HIDDEN], 3)


@on_ranks(4)
def test_a_communicator_may_be_given_and_stays_the_callers(me: Rank) -> None:
    with xd.init() as comm:
        with buffers(me, comm=comm):
            assert te.get_ub("qkv_fprop").comm is comm
        comm.barrier()  # it is still open
        helper = te.CommOverlapHelper(comm=comm)
        ub = te.CommOverlap([4 * me.num_ranks, HIDDEN], torch.float32, helper, me.num_ranks)
        assert not ub.is_p2p_overlap() and not ub.is_fp8_ubuf() and not ub.with_cublasmp()
        assert te.CommOverlapP2P(
            [4 * me.num_ranks, HIDDEN], torch.float32, helper, me.num_ranks, RS, atomic_gemm=True
        ).is_atomic_gemm()
        with pytest.raises(ValueError, match=f"tp_size = 7: expected the {me.num_ranks} ranks"):
            te.CommOverlap([28, HIDDEN], torch.float32, helper, 7)
        with pytest.raises(NotImplementedError, match="get_communication_stream"):
            ub.get_communication_stream()
        helper.close()
        comm.barrier()


# ---- Errors --------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_mistake_raises_by_its_name_and_mismatch_on_the_others(me: Rank) -> None:
    x, weight = whole(1, TOKENS * me.num_ranks, HIDDEN), whole(2, COLUMNS, HIDDEN)
    mine = x[own(me)]
    many = in_fp8(mine, 1.0)
    many._scale_inv = torch.ones(2)

    class Blocks(torch.Tensor):
        _rowwise_data = None

    bad: list[tuple[type[Exception], str, torch.Tensor, dict[str, Any]]] = [
        (ValueError, "layout: expected one of TN, NN", mine, {"layout": "NT"}),
        (ValueError, "gelu_in: expected a tensor", mine, {"gelu": True, "grad": True}),
        (ValueError, "gelu_in: expected None", mine, {"gelu": True, "gelu_in": mine}),
        (ValueError, "beta: expected None without accumulate, got 3.0", mine, {"beta": 3.0}),
        (ValueError, "out: expected a tensor to accumulate into", mine, {"accumulate": True}),
        (
            ValueError,
            "bias: expected None with grad",
            mine,
            {"bias": torch.zeros(COLUMNS), "grad": True},
        ),
        (TypeError, "B: expected a plain tensor, or a Float8Tensor.*got Blocks", Blocks(), {}),
        (TypeError, "A, B: expected both in fp8, or none", in_fp8(mine, 1.0), {}),
        (TypeError, "B: expected float8_e4m3fn or float8", in_fp8(x, 1.0, Named("kFloat8")), {}),
        (ValueError, r"B: expected one scale of .*shape \(2,\)", many, {}),
    ]
    with buffers(me):
        common = {"ub": te.get_ub("qkv_fprop"), "ub_type": AG}
        for kind, text, given, options in bad:
            if me.rank == 0:
                with pytest.raises(kind, match=f"all_gather: {text}"):
                    te.general_gemm(weight, given, **options, **common)
            else:
                with pytest.raises(Mismatch, match="rank 0"):
                    te.general_gemm(weight, mine, **common)
        y, *_ = te.general_gemm(weight, mine, **common)
        same("y", y, F.linear(x, weight))
        with pytest.raises(ValueError, match="quantization_params: expected None"):
            te.general_gemm(weight, x, quantization_params=object(), **common)
        with pytest.raises(ValueError, match="ub, ub_type: expected a buffer"):
            te.general_gemm(weight, x)


@on_ranks(4)
def test_buffers_are_made_once_until_they_are_destroyed(me: Rank) -> None:
    with pytest.raises(RuntimeError, match="call initialize_ub"):
        te.get_ub("qkv_fprop")
    te.destroy_ub()
    for _ in range(2):
        with buffers(me):
            with pytest.raises(RuntimeError, match="call destroy_ub"):
                te.initialize_ub([8, HIDDEN], me.num_ranks)
            with pytest.raises(ValueError, match="name: expected one of qkv_fprop.*got 'fc3'"):
                te.get_ub("fc3")
            with pytest.raises(ValueError, match="use_fp8 = True: expected .*FP8 among the quant"):
                te.get_ub("qkv_fprop", use_fp8=True)
            ub = te.get_ub("qkv_fprop")
            with pytest.raises(ValueError, match="shape = .3, 3.: expected"):
                ub.get_buffer(shape=(3, 3))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quantization_modes": [FP8, FP8]}, "quantization_modes = .*: expected each mode once"),
        (
            {"use_fp8": True, "ub_cfgs": {"fc2_fprop": {"fp8_buf": True}}},
            r"\['fc2_fprop'\]\['fp8_buf'\] = True: no sums travel in fp8",
        ),
        ({"with_cublasmp": True}, "with_cublasmp = True: cuBLASMp gives no gathered"),
        ({"ub_cfgs": {"fc3_fprop": {}}}, "ub_cfgs: expected layers of .*; got 'fc3_fprop'"),
        ({"ub_cfgs": {"fc1_fprop": {"sms": 1}}}, r"ub_cfgs\['fc1_fprop'\]: .*; got 'sms'"),
        ({"ub_cfgs": {"fc1_fprop": {"method": "p2p"}}}, r"\['method'\]: expected .*; got 'p2p'"),
        ({"ub_cfgs": {"fc1_fprop": {"fp8_buf": True}}}, r"\['fp8_buf'\] = True: expected quant"),
        ({"ub_cfgs": {"fc1_fprop": {"use_ce": False}}}, "use_ce = False: expected True"),
        ({"ub_cfgs": [{}, {}]}, "ub_cfgs = .*: expected 1 dictionaries, as of q"),
        (
            {"ub_cfgs": {"fc1_dgrad": {"method": "pipeline"}, "fc1_wgrad": {}}},
            r"ub_cfgs\['fc1_wgrad'\]: expected none, as fc1_dgrad",
        ),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused_by_its_name(options, text):
    with pytest.raises(ValueError, match=text):
        te.initialize_ub([8, HIDDEN], 1, **options)
    te.initialize_ub([8, HIDDEN], 1)  # nothing was left behind
    te.destroy_ub()


@pytest.mark.parametrize("made", [te.CommOverlap, te.CommOverlapP2P])
def test_cublasmp_and_unknown_arguments_are_refused(made):
    with xd.init() as comm:
        common = ([8, HIDDEN], torch.float32, te.CommOverlapHelper(comm=comm), 1)
        with pytest.raises(ValueError, match="use_cublasmp = True"):
            made(*common, comm_type=AG, use_cublasmp=True)
        with pytest.raises(TypeError, match="sms"):
            made(*common, comm_type=AG, sms=1)
        if made is te.CommOverlap:
            with pytest.raises(ValueError, match="buffer_dtype = torch.uint8: .* no sums travel"):
                made([8, HIDDEN], torch.uint8, *common[2:], comm_type=RS)
        with pytest.raises(ValueError, match=r"buffer_shape\[0\]|not a valid"):
            made(*common, comm_type=5)


# ---- Options -------------------------------------------------------------------------------------


def test_layers_and_defaults_are_transformer_engines():
    configs = layer_configs({}, 4)
    assert set(configs) == set(LAYERS) and len(configs) == 12
    for method, names in {
        "ring_exchange": {"qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"},
        "pipeline": {"proj_fprop", "fc2_fprop"},
        "external": {"proj_wgrad", "fc2_wgrad"},
    }.items():
        assert {n for n, c in configs.items() if c["method"] == method} == names
    scattered = {n for n, c in configs.items() if c["is_reduce_scatter"]}
    assert scattered == {"proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad"}
    ring, pipeline = configs["qkv_fprop"], configs["proj_fprop"]
    assert (ring["num_sm"], ring["cga_size"], ring["num_splits"]) == (1, 1, 4)
    assert (pipeline["num_sm"], pipeline["cga_size"], pipeline["num_splits"]) == (16, 2, 4)
    assert pipeline["set_sm_margin"] and not ring["set_sm_margin"]
    quantised = layer_configs({}, 4, FP8)
    assert {n for n, c in quantised.items() if c["fp8_buf"]} == set(configs) - scattered
    own_rows = layer_configs({"qkv_dgrad": {"method": "ring_exchange"}}, 2)
    assert own_rows["qkv_dgrad"]["is_reduce_scatter"] and "qkv_wgrad" not in own_rows


def test_arguments_have_transformer_engines_names_and_defaults():
    def defaults(function: Any) -> dict[str, Any]:
        parameters = list(inspect.signature(function).parameters.values())
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    of_both = {
        "num_max_streams": 3,
        "gemm_priority": 0,
        "comm_priority": 0,
        "atomic_gemm": False,
        "use_cublasmp": False,
    }
    assert defaults(te.CommOverlap) == of_both | {
        "comm_type": RS,
        "num_splits": 4,
        "comm_cga_size": 2,
        "num_comm_sm": 16,
        "set_sm_margin": True,
        "rs_overlap_first_gemm": False,
    }
    assert defaults(te.CommOverlapP2P) == of_both | {
        "comm_cga_size": 1,
        "num_comm_sm": 1,
        "set_sm_margin": False,
        "use_ce": True,
        "aggregate": False,
    }
    assert (RS, AG, te.CommOverlapAlgo.EXTERNAL_BULK_OVERLAP_AG) == (0, 1, 8)


def named_in(title: str) -> set[str]:
    """The words in backquotes in the first columns of a section's tables."""
    page = PAGE.read_text(encoding="utf-8")
    (section,) = re.findall(rf"### {re.escape(title)}\n(.*?)(?:\n##|\Z)", page, re.DOTALL)
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return {word.partition("(")[0] for cell in cells for word in re.findall(r"`([^`]+)`", cell)}


def parameters(*functions: Any) -> set[str]:
    return {name for f in functions for name in inspect.signature(f).parameters}


METHODS = ("copy_into_buffer", "get_buffer", "get_communication_stream", "get_tp_size")
QUESTIONS = ("is_atomic_gemm", "is_p2p_overlap", "is_fp8_ubuf", "with_cublasmp")


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("`initialize_ub(...)`", parameters(te.initialize_ub)),
        ("Options of a layer", set(layer_configs({}, 1)["qkv_fprop"])),
        (
            "`CommOverlap(...)` and `CommOverlapP2P(...)`",
            parameters(te.CommOverlap, te.CommOverlapP2P) | {*METHODS, *QUESTIONS},
        ),
        ("`general_gemm(...)`", parameters(te.general_gemm)),
    ],
)
def test_the_page_says_of_every_option_what_becomes_of_it(title, names):
    assert named_in(title) == names
