"""Python code in the documentation is quoted from programs, and the programs run."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

from support import Rank, run_ranks

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples/python"
# tests/python/deep_ep and tests/python/compat run what they say.
ELSEWHERE = ["deep_ep.md", "transformer_engine.md"]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in ELSEWHERE),
]
BLOCK = re.compile(r"^ *```(py\S*|python)([^\n]*)\n", re.MULTILINE)


def run(*command: str, **settings: str) -> str:
    """Runs a program, which must succeed, and returns its output."""
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | settings,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def run_example(name: str) -> str:
    return run(sys.executable, str(EXAMPLES / name))


def _main(me: Rank, program: str, arguments: list[str]) -> str:
    """Runs a program as this rank of torchrun, and returns its output."""
    output = io.StringIO()
    before = sys.argv, sys.path
    sys.argv, sys.path = [program, *arguments], [str(pathlib.Path(program).parent), *sys.path]
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        assert not end.code, output.getvalue()
    finally:
        sys.argv, sys.path = before
    import crossdock.torch as xd

    with contextlib.suppress(RuntimeError):  # there is none
        xd.default_comm().close()  # as the end of a process would, for the next program's
    return output.getvalue()


def on_ranks(ranks: int, program: pathlib.Path, *arguments: str) -> str:
    """The output of a program on ranks, whose processes serve the next program as well."""
    pytest.importorskip("torch")
    return "".join(run_ranks(ranks, _main, str(program), list(arguments), timeout=100))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_are_quotations(page: pathlib.Path):
    # docs.py checks that all quotations agree with their files.
    for language, source in BLOCK.findall(page.read_text()):
        assert language == "python"
        quoted = re.fullmatch(r" from=(examples/\S+\.py)", source)
        assert quoted and (ROOT / quoted[1]).is_file(), f"{page.name}: ```{language}{source}"


def test_every_example_is_run_here():
    named = {
        "numpy_round_trip.py",
        "numpy_lost_rank.py",
        "numpy_placement.py",
        "numpy_products.py",
        "numpy_rebalance.py",
        "numpy_replaced_rank.py",
        "numpy_resumed_group.py",
        "numpy_stats.py",
        "errors.py",
        "torch_round_trip.py",
        "torch_moe_layer.py",
        "torch_moe_model.py",
        "torch_moe_decode.py",
        "torch_compile.py",
        "torch_graph.py",
        "torch_mesh.py",
        "torch_mixed_precision.py",
        "torch_own_layer.py",
        "torch_async_tp.py",
        "torch_tensor_parallel.py",
        "torch_tensor_parallel_layers.py",
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == named


@pytest.mark.parametrize("name", ["numpy_round_trip.py", "numpy_products.py"])
def test_numpy_example(name):
    assert run_example(name).count("as expected") == 2


def test_numpy_placement():
    assert run_example("numpy_placement.py").count("as expected") == 1


def test_numpy_rebalance():
    assert run_example("numpy_rebalance.py").count("as expected") == 4


def test_numpy_stats():
    said = run_example("numpy_stats.py")
    assert said.count("20 calls of prepare") == 2
    waited = float(re.search(r"rank 0 waited (\d+\.\d) s for rank 1", said)[1])
    assert waited >= 0.1  # the late rank sleeps for twice that


def test_numpy_lost_rank():
    said = run_example("numpy_lost_rank.py")
    assert said.count("goes on without rank 2") == 2
    assert said.count("12 steps, mask [0, 0, 1]") == 2


def test_numpy_replaced_rank():
    said = run_example("numpy_replaced_rank.py")
    assert said.count("goes on with [0, 1]") == 2
    assert said.count("works with [0, 1, 2]") == 3


def test_numpy_resumed_group():
    said = run_example("numpy_resumed_group.py")
    assert said.count("step 3 again with (0, 1, 3)") == 3
    assert said.count("8 steps are right") == 3


def test_errors_are_what_the_page_quotes():
    check, page = ROOT / "tests/docs/page.py", ROOT / "docs/python_errors.md"
    run(sys.executable, str(check), str(page), sys.executable, str(EXAMPLES / "errors.py"))


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_torch_mesh(way):
    said = on_ranks(4, EXAMPLES / "torch_mesh.py", way)
    learned = re.findall(r"loss (\d\.\d+) at first, (\d\.\d+) at last; saved", said)
    assert len(learned) == 4 and all(float(last) < 0.8 * float(first) for first, last in learned)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "scaled"])
def test_torch_mixed_precision(way):
    said = on_ranks(4, EXAMPLES / "torch_mixed_precision.py", way)
    learned = re.findall(r"loss (\d\.\d+) at first, (\d\.\d+) at last", said)
    assert len(learned) == 4 and all(float(last) < 0.8 * float(first) for first, last in learned)


def test_torchrun_starts_an_example():
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    said = run(*torchrun, str(EXAMPLES / "torch_round_trip.py"), OMP_NUM_THREADS="1")
    assert said.count("sums as expected") == 2


# Inductor takes long, and is tested with crossdock.torch.
@pytest.mark.parametrize(
    "program, arguments, said",
    [
        ("python/torch_moe_layer.py", [], "at last"),
        ("python/torch_moe_model.py", [], "at last"),
        ("python/torch_moe_decode.py", [], "with the same bits"),
        ("python/torch_own_layer.py", [], "at last; saved"),
        ("python/torch_async_tp.py", [], "as expected"),
        ("python/torch_tensor_parallel.py", [], "gradient as expected"),
        ("python/torch_tensor_parallel_layers.py", [], "agree with plain layers"),
        ("python/torch_compile.py", ["aot_eager"], "gradients agree"),
        ("torch/decode_moe.py", [], "24 steps agree with one process"),
    ],
    ids=lambda value: str(value),
)
def test_torch_example(program, arguments, said):
    text = on_ranks(2, EXAMPLES.parent / program, *arguments)
    assert text.count(said) == 2
