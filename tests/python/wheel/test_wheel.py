"""The wheel, built without CUDA, works in an environment that has NumPy and nothing else."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PIP = [sys.executable, "-m", "pip"]


def run(*command: str | pathlib.Path) -> str:
    """Runs the command, in an environment without the build's package, and returns its output."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # As in Makefile: the wheel finds the objects of the build in the compiler's cache.
    environment = {"CCACHE_NOHASHDIR": "1", "CCACHE_BASEDIR": str(ROOT)} | environment
    done = subprocess.run(
        [str(word) for word in command],
        env=environment,
        text=True,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=480,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A new folder as far below the sources as that of the build, so that both have the same
    # relative paths, and warnings treated alike: by these the compiler's cache knows objects.
    build = ROOT / "build" / "wheel"
    shutil.rmtree(build, ignore_errors=True)
    werror = os.environ.get("WERROR", "OFF")
    options = (
        "--no-build-isolation --no-deps -C cmake.define.CROSSDOCK_CUDA=OFF"
        f" -C cmake.define.CROSSDOCK_WERROR={werror} -C"
    )
    run(*PIP, "wheel", ROOT, *options.split(), f"build-dir={build}", "--wheel-dir", folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The interpreter of a new environment with the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    run(*PIP, "--python", python, "install", wheel)
    return python


def test_wheel_has_all_that_the_package_is_made_of(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = ROOT / "python"
    sources = {
        str(path.relative_to(package))
        for folder in ("crossdock", "_crossdock_engines")
        for path in (package / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources - names == set()
    assert "crossdock/libcrossdock.so.0" in names
    assert "crossdock/examples/torch/train_moe_lm.py" in names  # for `crossdock demo`
    assert any(re.fullmatch(r"crossdock/_core\..*\.so", name) for name in names)


def test_metadata_says_what_it_is_in_a_few_lines(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        head = archive.read(name).decode().split("\n\n")[0].splitlines()
    fields = {line.split(": ")[0] for line in head}
    assert "License-Expression: Apache-2.0" in head and "License" not in fields, head
    assert {"Author", "Keywords", "Classifier"} <= fields and len(head) < 40, head


def test_engines_find_their_plug_ins(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        lines = archive.read(name).decode().splitlines()
    for group, package in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        assert lines[lines.index(f"[{group}]") + 1] == f"crossdock = _crossdock_engines:{package}"


def test_installed_package_is_imported_and_moves_tokens(python: pathlib.Path) -> None:
    printed = run(python, pathlib.Path(__file__).parent / "two_ranks.py")
    assert printed.startswith(str(python.parents[1]))
    assert printed.rstrip().endswith("two ranks got what they should")


def test_environment_has_no_torch_and_the_command_runs(python: pathlib.Path) -> None:
    installed = run(*PIP, "--python", python, "list", "--format=freeze")
    assert {line.split("==")[0] for line in installed.split()} & {"torch", "rich"} == set()
    assert "doctor" in run(python.parent / "crossdock", "--help")
