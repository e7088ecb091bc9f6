#!/usr/bin/env python3
"""Puts the tests that need a GPU into one folder that runs on another machine.

  package.py BUILD FOLDER

BUILD is configured so that programs look for libraries relative to their own place (make
gpu-package does). The folder repeats its tree, as far as it is needed, with debug information
stripped; lib/ has the libraries that a bare machine lacks, manifest the tests, one a line: name,
seconds, command. Files that a test's REQUIRED_FILES name come along.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys

BRING = re.compile(r"lib(hwy|sodium)\b")  # libraries of the system that travel along
SOURCES = [
    "python",
    "tests/python",
    "examples/jax",
    "examples/python",
    "examples/torch",
    "examples/serving",
]
PROGRAMS = ["bench/crossdock-bench", "tools/run/crossdock-run"]  # wanted beside the tests


ROOT = pathlib.Path(__file__).resolve().parents[2]


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def tests_of(build):
    listed = output_of("ctest", "--test-dir", str(build), "-L", "gpu", "--show-only=json-v1")
    for test in json.loads(listed)["tests"]:
        properties = {p["name"]: p["value"] for p in test["properties"]}
        command = [word.removeprefix(f"{build}/") for word in test["command"]]
        if test["name"].startswith("python."):
            pytest = command[command.index("pytest") :]
            command = [
                "./with-python",
                "python3",
                "-m",
                *(word.removeprefix(f"{ROOT}/") for word in pytest),
            ]
        if "ENVIRONMENT" in properties:
            command = ["env", *properties["ENVIRONMENT"], *command]
        if any(re.search(r"\s", word) for word in command):
            sys.exit(f"{test['name']}: a word of its command has a blank")
        files = [pathlib.Path(file) for file in properties.get("REQUIRED_FILES", [])]
        yield test["name"], int(properties["TIMEOUT"]), command, files


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)  # a link as what it points to
    subprocess.run(["strip", "--strip-debug", str(target)], check=True)


def copy_with_libraries(build, folder, program):
    copy(build / program, folder / program)
    for line in output_of("ldd", str(build / program)).splitlines():
        name, _, path = line.partition("=>")
        name, path = name.strip(), path.split("(")[0].strip()
        if path.startswith(f"{build}/"):
            copy(path, folder / pathlib.Path(path).relative_to(build).parent / name)
        elif path and BRING.match(name):
            copy(path, folder / "lib" / name)


def stage_python(build, folder):
    """Stages the sources from which with-python builds the package, and the tests."""
    install = folder / "install"
    output_of("cmake", "--install", str(build), "--prefix", str(install), "--strip")
    # Python finds the tests' library beside the one that it loads.
    (install / "lib/instrumented").symlink_to("../../src/instrumented")
    cache = (build / "CMakeCache.txt").read_text()
    dlpack = re.search(r"^DLPACK_INCLUDE_DIR:PATH=(.*)$", cache, re.MULTILINE)[1]
    shutil.copytree(pathlib.Path(dlpack) / "dlpack", install / "include" / "dlpack")
    for source in SOURCES:
        shutil.copytree(
            ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "tests/gpu/with-python.sh", folder / "with-python")


def command_of_rank(command):
    """The command that a rank runs: behind the --, where crossdock-run starts it."""
    return command[command.index("--") + 1 :] if "--" in command else command


def main(build, folder):
    build = pathlib.Path(build).resolve()
    folder = pathlib.Path(folder).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    tests = list(tests_of(build))
    if not tests:
        sys.exit(f"{build} has no tests that need a GPU: was it built with CUDA?")
    programs = {word for _, _, command, _ in tests for word in command if (build / word).is_file()}
    for name, _, command, _ in tests:
        if command[0] != "./with-python" and programs.isdisjoint(command_of_rank(command)):
            sys.exit(f"{name}: its program was not built: {' '.join(command_of_rank(command))}")
    for program in sorted(programs.union(p for p in PROGRAMS if (build / p).is_file())):
        copy_with_libraries(build, folder, program)
    for file in {file for _, _, _, files in tests for file in files}:
        copy(file, folder / file.relative_to(build))
    stage_python(build, folder)
    lines = [f"{name} {seconds} {' '.join(command)}\n" for name, seconds, command, _ in tests]
    (folder / "manifest").write_text("".join(lines))
    shutil.copy(ROOT / "tests/gpu/run-tests.sh", folder / "run-tests")
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{folder}: {len(tests)} tests, {size / 2**20:.1f} MiB")


main(*sys.argv[1:])
