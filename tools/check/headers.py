#!/usr/bin/env python3
"""Compiles every public header alone, as C11 and as C++11, with warnings as errors.

CMake can verify header sets as well, but only from version 3.24 on, where ours is 3.22, and in one
language.

usage: headers.py C_COMPILER CXX_COMPILER DLPACK_INCLUDE_DIR
"""

import pathlib
import subprocess
import sys


def main():
    c_compiler, cxx_compiler, dlpack = sys.argv[1:]
    include = pathlib.Path(__file__).resolve().parents[2] / "include"
    headers = sorted((include / "crossdock").glob("*.h"))
    failed = 0
    for compiler, language in [
        ([c_compiler, "-xc", "-std=c11"], "C11"),
        ([cxx_compiler, "-xc++", "-std=c++11"], "C++11"),
    ]:
        for header in headers:
            source = f"#include <crossdock/{header.name}>\n"
            command = [
                *compiler,
                "-Wall",
                "-Wextra",
                "-pedantic",
                "-Werror",
                "-fsyntax-only",
                f"-I{include}",
                "-isystem",
                dlpack,
                "-",
            ]
            done = subprocess.run(command, input=source, text=True, capture_output=True)
            if done.returncode != 0:
                failed += 1
                print(f"{header.name} as {language}:\n{done.stderr}")
    print(f"headers: {len(headers)} headers as C11 and C++11, {failed} failures")
    return 1 if failed or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
