#!/usr/bin/env python3
"""Checks the length of functions in CUDA sources by clang-tidy, as .clang-tidy has it.

usage: kernels.py CLANG_TIDY BUILD

clang reads them for the host. Its wrapper asks for two headers that newer toolkits lack or that are
installed apart, and that nothing here needs: they are empty. What else clang finds wrong is left to
nvcc, but for headers that are not found: then it has not read on. A build without CUDA has no
sources.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

MISSING = ["texture_fetch_functions.h", "curand_mtgp32_kernel.h"]
FINDING = re.compile(r"^.*(?:\[readability-function-size|file not found).*$", re.MULTILINE)
INCLUDES = re.compile(r"(?<=\s)(-[DI]\S+|-isystem[= ]\S+)")


def found(clang_tidy, stubs, entry):
    """What clang-tidy finds in one source."""
    options = INCLUDES.findall(entry["command"].replace("-isystem=", "-isystem "))
    toolkit = next(
        pathlib.Path(text.split()[1]) for text in options if re.match(r"-isystem .*cuda", text)
    )
    done = subprocess.run(
        [
            clang_tidy,
            "--quiet",
            "--checks=-*,readability-function-size",
            entry["file"],
            "--",
            "-x",
            "cuda",
            "--cuda-host-only",
            "-nocudalib",
            f"--cuda-path={toolkit.parent}",
            "-std=c++20",
            "-w",
            "-ferror-limit=0",
            f"-I{stubs}",
            "-isystem",
            toolkit / "cccl",
            *(word for text in options for word in text.split()),
        ],
        capture_output=True,
        text=True,
        cwd=entry["directory"],
    )
    return FINDING.findall(done.stdout)


def main():
    clang_tidy, build = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    stubs = build / "clang"
    stubs.mkdir(exist_ok=True)
    for name in MISSING:
        (stubs / name).touch()
    commands = json.loads((build / "compile_commands.json").read_text())
    sources = [entry for entry in commands if entry["file"].endswith(".cu")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        lists = pool.map(lambda entry: found(clang_tidy, stubs, entry), sources)
        findings = {finding for of_source in lists for finding in of_source}
    for finding in sorted(findings):
        print(finding)
    print(f"kernels: {len(sources)} CUDA sources, {len(findings)} functions too long")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
