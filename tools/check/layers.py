#!/usr/bin/env python3
"""Checks that #include and import point down only, between the folders of the tree.

docs/internals/architecture.md draws the rooms of src/, and the drawing is the rule: a file may
include its own room's files and those of rooms that arrows lead to. Every room is drawn, and every
arrow stands for an include. Headers of other libraries have their folders. A folder that is not
drawn belongs to the room around it. No files include one another in a circle, and no more of a
folder than MOST_SHARING says share the first word of their names, which would be a folder's name.
Public headers stand on DLPack and two C headers, those of compat/ also on C++'s; the Python
extension, examples and the tests of the C API stand on the public headers alone, but for base/ in
tests of faults, which hold descriptors and processes. The Python packages stand one on another as
PYTHON_LEVELS lists them, and no files of theirs import one another in a circle, also not in
functions or for types alone.
"""

import ast
import pathlib
import re
import sys

DRAWING = "docs/internals/architecture.md"
SOURCES = {".h", ".c", ".cc", ".cu", ".cuh"}
PUBLIC_SYSTEM = {"stddef.h", "stdint.h", "dlpack/dlpack.h"}
# Headers of other libraries, and the folders of src/ that may include them.
FOREIGN = {
    r"rdma/": r"net/fabric",
    r"cuda|cublas|nccl": r"cuda|.*/cuda|.*/cuda/.*|gemm/cublasmp",
    r"nvtx3/": r"observe",
    r"hwy/": r"base|.*/cpu",
}
COMPAT_ALSO = r"[a-z]+|transformer_engine/\w+\.h"  # headers of C++, and forwarders to one another
API_ONLY = [
    "python",
    "tests/compat",
    "tests/conformance",
    "tests/faults",
    "tests/support",
    "examples",
]
# How many files of a folder may share the first word of their names.
MOST_SHARING = {"src": 2, "tests": 6, "bench": 6}
# The modules of crossdock itself, then its folders.
PYTHON_LEVELS = [{"crossdock"}, {"jax", "torch"}, {"compat", "deep_ep"}, {"cli", "sglang", "vllm"}]
PYTHON_LEVEL_OF = {name: level for level, names in enumerate(PYTHON_LEVELS) for name in names}

ROOM = re.compile(r'(\w+)\["([^":]+):')  # id["room: what it owns"]
ARROW = re.compile(r"^\s*(\w+)[^>\n]*?-->\s*(\w+)", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def includes(root, folder):
    """(file, bracket, included name) of all C and C++ files below a folder."""
    for path in sorted((root / folder).rglob("*")):
        if path.suffix in SOURCES:
            for bracket, name in INCLUDE.findall(path.read_text()):
                yield path.relative_to(root), bracket, name


def drawn_arrows(root):
    """{room: the rooms that its arrows lead to} as the page draws them."""
    drawing = re.search(r"^```mermaid\n(.*?)^```$", (root / DRAWING).read_text(), re.M | re.S)[1]
    room_of = dict(ROOM.findall(drawing))
    arrows = {room: set() for room in room_of.values()}
    for ends in ARROW.findall(drawing):
        upper, lower = (room_of.get(end, end) for end in ends)  # an id without a label is a room
        arrows.setdefault(upper, set()).add(lower)
        arrows.setdefault(lower, set())
    return arrows


def rooms_below(arrows, room):
    """All rooms that arrows lead to from a room, over other rooms as well."""
    found, ahead = set(), [room]
    while ahead:
        new = arrows[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def room_of_folder(folder, rooms):
    """The innermost drawn room around a folder, or the folder itself."""
    around = [room for room in rooms if f"{folder}/".startswith(f"{room}/")]
    return max(around, key=len, default=folder)


def circles(includes_of):
    """Every (file, included file) that closes a circle of includes."""
    done, path = set(), []

    def visit(file):
        path.append(file)
        for name in includes_of.get(file, []):
            if name in path:
                yield file, name
            elif name not in done:
                yield from visit(name)
        done.add(path.pop())

    for file in sorted(includes_of):
        if file not in done:
            yield from visit(file)


def prefixes(root):
    """(folder, prefix, names) of every prefix that more names of a folder share than may."""
    files = [path for base in MOST_SHARING for path in (root / base).rglob("*.*")]
    for folder in sorted({path.parent for path in files}):
        most = MOST_SHARING[folder.relative_to(root).parts[0]]
        names = {path.stem for path in folder.iterdir() if path.suffix in SOURCES}
        for prefix in sorted({name.split("_")[0] for name in names}):
            sharing = sorted(name for name in names if name.split("_")[0] == prefix)
            if len(sharing) > most:
                yield folder.relative_to(root), prefix, sharing


def source_problems(root):
    arrows = drawn_arrows(root)
    below = {room: rooms_below(arrows, room) for room in arrows}
    unused = {(upper, lower) for upper, lowers in arrows.items() for lower in lowers}
    seen, includes_of = set(), {}
    for file, bracket, name in includes(root, "src"):
        own = room_of_folder("/".join(file.parts[1:-1]), arrows)
        other = room_of_folder(name.rpartition("/")[0], arrows)
        includes_of.setdefault("/".join(file.parts[1:]), []).append(name)
        seen.add(own)
        if own not in arrows:
            yield file, name, f"{DRAWING} does not draw the room {own}"
        elif bracket == '"' and not (root / "src" / name).is_file():
            yield file, name, "there is no such file in src/"
        elif bracket == '"' and own != other and other not in below[own]:
            yield file, name, f"in {DRAWING} no arrow leads from {own} to {other}"
        unused.discard((own, other))
        folder = "/".join(file.parts[1:-1])
        for header, folders in FOREIGN.items():
            if bracket == "<" and re.match(header, name) and not re.fullmatch(folders, folder):
                yield file, name, f"the folder does not match {folders}"
    for file, name in circles(includes_of):
        yield f"src/{file}", name, "it includes this file again, over others or itself"
    for folder, prefix, names in prefixes(root):
        yield folder, ", ".join(names), f"they want a folder {prefix}"
    for upper, lower in sorted(unused):
        yield DRAWING, f"{upper} --> {lower}", "no file includes along this arrow"
    for room in sorted(arrows):
        if room not in seen:
            yield DRAWING, room, "there is no such room in src/"
        if room in below[room]:
            yield DRAWING, room, "arrows lead back to it"


def problems(root):
    yield from source_problems(root)
    for file, _, name in includes(root, "include"):
        compat = "compat" in file.parts and re.fullmatch(COMPAT_ALSO, name)
        if name not in PUBLIC_SYSTEM and not name.startswith("crossdock/") and not compat:
            yield file, name, "public headers include DLPack, stddef, stdint and one another only"
    for folder in API_ONLY:
        for file, bracket, name in includes(root, folder):
            of_base = folder == "tests/faults" and name.startswith("base/")
            if bracket == '"' and (root / "src" / name).is_file() and not of_base:
                yield file, name, "this folder uses the public headers only"


def python_file(package, names):
    """The file of a module of the package, relative to it; None if there is no such module."""
    module = package.joinpath(*names)
    for file in (module.with_suffix(".py"), module.with_suffix(".pyi"), module / "__init__.py"):
        if file.is_file():
            return file.relative_to(package)
    return None


def imports(package, path):
    """The files of the package that a file of it names in any import, wherever that stands."""
    around = path.relative_to(package.parent).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        named = []
        if isinstance(node, ast.Import):
            named = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = around[: len(around) + 1 - node.level] if node.level else ()
            module = [*base, *(node.module.split(".") if node.module else ())]
            named = [[*module, alias.name] for alias in node.names]
        for first, *names in named:
            if first == package.name:
                # The last name may be that of something in a module.
                yield python_file(package, names) or python_file(package, names[:-1])


def python_problems(root):
    package = root / "python" / "crossdock"
    imports_of = {}
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package)
        own = file.parts[0] if len(file.parts) > 1 else "crossdock"
        found = imports_of[str(file)] = sorted({str(name) for name in imports(package, path)})
        folders = {name.split("/")[0] if "/" in name else "crossdock" for name in found}
        for folder in sorted(folders):
            if folder != own and PYTHON_LEVEL_OF[folder] >= PYTHON_LEVEL_OF[own]:
                yield path.relative_to(root), f"crossdock.{folder}", f"it is not below {own}"
    for file, name in circles(imports_of):
        yield f"python/crossdock/{file}", name, "it imports this file again, over others or itself"


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    found = [*problems(root), *python_problems(root)]
    for file, name, why in found:
        print(f"{file}: takes in {name}: {why}")
    print(f"layers: {len(found)} includes and imports in a wrong direction")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
