#!/usr/bin/env python3
"""Compiles every public header alone, with warnings as errors.

Each is compiled as C11 and as C++11, those of compat/, which are C++ only, as C++17. CMake can
verify header sets as well, but only from version 3.24 on, where ours is 3.22, and in one language.

usage: headers.py C_COMPILER CXX_COMPILER DLPACK_INCLUDE_DIR
"""

import pathlib
import subprocess
import sys


def compile_alone(compiler, name, includes):
    """The compiler's messages about a header that is included alone; empty if it is good."""
    source = f"#include <{name}>\n"
    warnings = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"]
    command = [*compiler, *warnings, *includes, "-"]
    done = subprocess.run(command, input=source, text=True, capture_output=True)
    return "" if done.returncode == 0 else done.stderr or "failed"


def main():
    c_compiler, cxx_compiler, dlpack = sys.argv[1:]
    root = pathlib.Path(__file__).resolve().parents[2] / "include"
    compat = root / "crossdock" / "compat"
    # With what is experimental, as well.
    includes = ["-DXD_EXPERIMENTAL", f"-I{compat}", f"-I{root}", "-idirafter", dlpack]
    plain = [f"crossdock/{path.name}" for path in sorted((root / "crossdock").glob("*.h"))]
    compats = [f"crossdock/compat/{path.name}" for path in sorted(compat.glob("*.h"))]
    compats += [str(path.relative_to(compat)) for path in sorted(compat.glob("*/*.h"))]
    failed = 0
    for compiler, language, headers in [
        ([c_compiler, "-xc", "-std=c11"], "C11", plain),
        ([cxx_compiler, "-xc++", "-std=c++11"], "C++11", plain),
        ([cxx_compiler, "-xc++", "-std=c++17"], "C++17", compats),
    ]:
        for name in headers:
            complaint = compile_alone(compiler, name, includes)
            if complaint:
                failed += 1
                print(f"{name} as {language}:\n{complaint}")
    print(
        f"headers: {len(plain)} as C11 and C++11, {len(compats)} as C++17, {failed} failures",
    )
    return 1 if failed or not plain or not compats else 0


if __name__ == "__main__":
    sys.exit(main())
