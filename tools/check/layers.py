#!/usr/bin/env python3
"""Checks that #include and import point down only, between the folders of the tree.

A folder of src/ may include itself and folders of a lower level; folders of one level do not know
each other. An executor (src/ep/cpu) knows src/ep, never the reverse. Public headers stand on DLPack
and two C headers; the Python extension, examples and the tests of the C API stand on the public
headers alone. The Python packages stand one on another as PYTHON_LEVELS lists them.
"""

import pathlib
import re
import sys

LEVELS = [{"base"}, {"cuda"}, {"bootstrap", "memory", "net"}, {"mesh"}, {"comm"}, {"turn"},
          {"ep", "gemm"}, {"capi"}]
LEVEL_OF = {folder: level for level, folders in enumerate(LEVELS) for folder in folders}
PUBLIC_SYSTEM = {"stddef.h", "stdint.h", "dlpack/dlpack.h"}
API_ONLY = ["python", "tests/conformance", "tests/faults", "tests/support", "examples"]
PYTHON_LEVELS = [{"crossdock"}, {"jax", "torch"}, {"deep_ep"}, {"cli"}]  # and folders of crossdock
PYTHON_LEVEL_OF = {name: level for level, names in enumerate(PYTHON_LEVELS) for name in names}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
IMPORT = re.compile(r"^\s*(?:from|import)\s+crossdock\.?(\w*)", re.MULTILINE)


def includes(root, folder):
    """(file, bracket, included name) of all C and C++ files below a folder."""
    for path in sorted((root / folder).rglob("*")):
        if path.suffix in {".h", ".c", ".cc", ".cu", ".cuh"}:
            for bracket, name in INCLUDE.findall(path.read_text()):
                yield path.relative_to(root), bracket, name


def source_problem(root, file, name):
    """Why a file of src/ may not include src/<name>, or None."""
    if not (root / "src" / name).is_file():
        return "there is no such file in src/"
    own, other = file.parts[1], name.split("/")[0]
    if own != other and LEVEL_OF[own] <= LEVEL_OF[other]:
        return f"{other} is not below {own}"
    own_room, other_room = "/".join(file.parts[1:-1]), name.rpartition("/")[0]
    if own == other and other_room not in {own, own_room}:
        return f"{own_room} does not know {other_room}"
    return None


def problems(root):
    for file, bracket, name in includes(root, "src"):
        if file.parts[1] not in LEVEL_OF:
            yield file, name, f"src/{file.parts[1]} has no level in {__file__}"
        elif bracket == '"' and (why := source_problem(root, file, name)):
            yield file, name, why
    for file, _, name in includes(root, "include"):
        if name not in PUBLIC_SYSTEM and not name.startswith("crossdock/"):
            yield file, name, "public headers include DLPack, stddef, stdint and one another only"
    for folder in API_ONLY:
        for file, bracket, name in includes(root, folder):
            if bracket == '"' and (root / "src" / name).is_file():
                yield file, name, "this folder uses the public headers only"


def python_problems(root):
    package = root / "python" / "crossdock"
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).parts
        own = inside[0] if len(inside) > 1 else "crossdock"
        for name in IMPORT.findall(path.read_text()):
            folder = name if name and (package / name).is_dir() else "crossdock"
            if folder != own and PYTHON_LEVEL_OF[folder] >= PYTHON_LEVEL_OF[own]:
                yield path.relative_to(root), f"crossdock.{folder}", f"it is not below {own}"


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    found = [*problems(root), *python_problems(root)]
    for file, name, why in found:
        print(f"{file}: takes in {name}: {why}")
    print(f"layers: {len(found)} includes and imports in a wrong direction")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
