"""The example trains, and agrees with one device; the documentation's programs run."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples" / "jax"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES.parent / "torch")]  # their settings are shared

import train_moe  # noqa: E402
from xla_flags import QUICK_TO_COMPILE  # noqa: E402

SMALL = ["--steps", "3", "--context", "16", "--hidden", "16", "--ffn", "32", "--sequences", "8"]


def run(*command: str, code: int = 0) -> str:
    """Runs a program, which must end with that exit code, and returns its output."""
    environment = os.environ | {"XLA_FLAGS": QUICK_TO_COMPILE}
    ended = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


# Every process compiles the model: two of them show what processes add.
TWO_PROCESSES = "--processes --layers 1 --data 1 --experts-axis 2".split()
TENSOR_PARALLEL = "--tensor-parallel --layers 1".split()


@pytest.mark.parametrize(
    "where",
    [[], TWO_PROCESSES, TENSOR_PARALLEL],
    ids=["devices", "processes", "tensor-parallel"],
)
def test_training_agrees_with_one_device(where, tmp_path):
    text = run(str(EXAMPLES / "train_moe.py"), *SMALL, *where, "--check", "--folder", str(tmp_path))
    checked = re.findall(r"^ +(.+?) +differs by .* agrees$", text, re.MULTILINE)
    assert len(checked) == 12 and "DISAGREES" not in text  # losses, load, 10 parameters
    assert {"losses", "load of experts", "gradient of blocks moe router"} < set(checked)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert records[2]["loss"] < records[0]["loss"]
    assert (tmp_path / "loss.png").exists() or "matplotlib is not installed" in text


def test_disagreement_is_an_exit_code(tmp_path):
    # A model of which the plain one knows nothing: its experts' weights are not scaled.
    program = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import functools\n"
        "import train_moe, crossdock.jax.moe as moe\n"
        "import crossdock.jax as xd\n"
        "router = xd.RouterOptions(normalize=False)\n"
        "xd.moe_layer = functools.partial(moe.moe_layer, router=router)\n"
        "from moe_model.trainer import Trainer\n"
        "Trainer.train = train_moe._draw = lambda *_, **__: None\n"  # it has been compared
        "sys.exit(train_moe.main(sys.argv[1:]))\n"
    )
    text = run("-c", program, *SMALL, "--layers", "1", "--check", "--folder", str(tmp_path), code=1)
    assert "gradient of blocks moe router" in text and "DISAGREES" in text


MISTAKES = {
    "heads": (["--heads", "0"], "--heads 0: expected at least 1"),
    "sequences": (["--sequences", "6"], "--sequences 6: expected a multiple of 4, the ranks"),
    "heads of a rank": (
        ["--tensor-parallel", "--heads", "1"],
        '--heads 1: expected a multiple of 2, the ranks along "expert", for --tensor-parallel',
    ),
    "no folder": (["--folder", "/proc/nope"], "--folder: /proc/nope: expected a folder to write"),
    "file": (["--folder", __file__], f"--folder: {__file__}: expected a folder to write to: File"),
}


@pytest.mark.parametrize("arguments, said", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_moe.py"])
    with pytest.raises(SystemExit, match="2"):
        train_moe.main(arguments)
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"train_moe.py: error: {said}")


def test_gpus_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = ["--device", "gpu", "--folder", str(tmp_path)]
    text = run(str(EXAMPLES / "train_moe.py"), *options, code=2)
    said = "--device gpu: expected 4 devices for the mesh, found none: "
    assert text.splitlines()[-1].startswith(f"train_moe.py: error: {said}")
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "program, said",
    [
        ("operations.py", "gradients as expected\nexperts as expected"),
        ("decode.py", "three steps as expected"),
        ("rebalance.py", "sums as expected"),
    ],
)
def test_programs_of_the_documentation(program, said):
    assert said in run(str(EXAMPLES / program))


def test_tensor_parallelism_of_the_documentation():
    said = run(str(EXAMPLES / "tensor_parallel.py"))
    first, last = re.findall(r"loss (\S+) at first, (\S+) at last; agrees with plain JAX", said)[0]
    assert float(last) < 0.8 * float(first)


def test_program_of_the_documentation_learns():
    losses = re.findall(r"step \d+  loss (\S+)", run(str(EXAMPLES / "quickstart.py")))
    assert len(losses) == 4 and float(losses[-1]) < 0.7 * float(losses[0])
    lines = (EXAMPLES / "quickstart.py").read_text().splitlines()
    assert len(lines) <= 45
