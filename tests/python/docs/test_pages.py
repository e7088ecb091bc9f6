"""Python code in the documentation is quoted from programs, and the programs run."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples/python"
# tests/python/deep_ep and tests/python/compat run what they say.
ELSEWHERE = ["deep_ep.md", "transformer_engine.md"]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in ELSEWHERE),
]
BLOCK = re.compile(r"^ *```(py\S*|python)([^\n]*)\n", re.MULTILINE)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def run(*command: str) -> str:
    """Runs a program, which must succeed, and returns its output."""
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


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
        "numpy_products.py",
        "numpy_stats.py",
        "errors.py",
        "torch_round_trip.py",
        "torch_moe_layer.py",
        "torch_moe_model.py",
        "torch_compile.py",
        "torch_graph.py",
        "torch_mesh.py",
        "torch_async_tp.py",
        "torch_tensor_parallel.py",
        "torch_tensor_parallel_layers.py",
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == named


def test_numpy_round_trip():
    assert run(sys.executable, str(EXAMPLES / "numpy_round_trip.py")).count("as expected") == 2


def test_numpy_products():
    assert run(sys.executable, str(EXAMPLES / "numpy_products.py")).count("as expected") == 2


def test_numpy_stats():
    said = run(sys.executable, str(EXAMPLES / "numpy_stats.py"))
    assert said.count("20 calls of prepare") == 2
    waited = float(re.search(r"rank 0 waited (\d+\.\d) s for rank 1", said)[1])
    assert waited >= 0.1  # the late rank sleeps for twice that


def test_numpy_lost_rank():
    said = run(sys.executable, str(EXAMPLES / "numpy_lost_rank.py"))
    assert said.count("goes on without rank 2") == 2
    assert said.count("12 steps, mask [0, 0, 1]") == 2


def test_errors_are_what_the_page_quotes():
    run(
        sys.executable,
        str(ROOT / "tests/docs/page.py"),
        str(ROOT / "docs/python_errors.md"),
        sys.executable,
        str(EXAMPLES / "errors.py"),
    )


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_torch_mesh(way):
    pytest.importorskip("torch")
    program = str(EXAMPLES / "torch_mesh.py")
    said = run(*TORCHRUN[:-1], "4", program, way)
    learned = re.findall(r"loss (\d\.\d+) at first, (\d\.\d+) at last; saved", said)
    assert len(learned) == 4 and all(float(last) < 0.8 * float(first) for first, last in learned)


def test_decode_moe():
    pytest.importorskip("torch")
    said = run(*TORCHRUN, str(ROOT / "examples/torch/decode_moe.py"))
    assert said.count("24 steps agree with one process") == 2


# Inductor takes long, and is tested with crossdock.torch.
@pytest.mark.parametrize(
    "program, arguments, said",
    [
        ("torch_round_trip.py", [], "sums as expected"),
        ("torch_moe_layer.py", [], "at last"),
        ("torch_moe_model.py", [], "at last"),
        ("torch_async_tp.py", [], "as expected"),
        ("torch_tensor_parallel.py", [], "gradient as expected"),
        ("torch_tensor_parallel_layers.py", [], "agree with plain layers"),
        ("torch_compile.py", ["aot_eager"], "gradients agree"),
    ],
    ids=lambda value: str(value),
)
def test_torch_example(program, arguments, said):
    pytest.importorskip("torch")
    text = run(*TORCHRUN, str(EXAMPLES / program), *arguments)
    assert text.count(said) == 2
