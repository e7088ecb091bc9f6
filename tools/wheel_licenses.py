"""Puts the licences of what a repaired wheel contains of others beside the project's own.

  wheel_licenses.py WHEEL

Libraries in it are those of Debian or Ubuntu packages, which have a file of copyrights each;
nanobind is compiled into the extension.
"""

import base64
import hashlib
import importlib.metadata
import pathlib
import re
import sys
import zipfile

SYSTEM = pathlib.Path("/usr/share/doc")


def of_library(name: str) -> bytes:
    """The copyrights of a library that auditwheel has named libNAME-HASH.so.VERSION."""
    stem = name.partition("-")[0]
    found = sorted(SYSTEM.glob(f"{stem}[0-9]*/copyright"))
    if not found:
        sys.exit(f"wheel: {name}: expected its licence in {SYSTEM}/{stem}*/copyright, got none")
    return found[0].read_bytes()


def of_nanobind() -> bytes:
    for file in importlib.metadata.files("nanobind") or ():
        if file.name == "LICENSE" and ".dist-info" in file.parts[0]:
            return pathlib.Path(file.locate()).read_bytes()
    sys.exit("wheel: nanobind: expected its LICENSE among its files, got none")


def record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(content)}"


def main(path: pathlib.Path) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: (entry, archive.read(entry)) for entry in archive.infolist()}
    libraries = [name for name in entries if re.match(r"[^/]+\.libs/lib", name)]
    licences = {name.rpartition("/")[2].partition("-")[0]: name for name in libraries}
    texts = {stem: of_library(pathlib.Path(name).name) for stem, name in licences.items()}
    texts["nanobind"] = of_nanobind()

    (record,) = (name for name in entries if name.endswith(".dist-info/RECORD"))
    folder = record.rpartition("/")[0]
    head, mark, rest = entries[f"{folder}/METADATA"][1].decode().partition("License-File: ")
    added = "".join(f"License-File: bundled/{stem}\n" for stem in texts)
    changed = {f"{folder}/METADATA": f"{head}{added}{mark}{rest}".encode()}
    changed |= {f"{folder}/licenses/bundled/{stem}": text for stem, text in texts.items()}
    lines = [
        line
        for line in entries[record][1].decode().splitlines()
        if line.partition(",")[0] not in changed
    ]
    lines[-1:-1] = [record_line(name, content) for name, content in changed.items()]
    changed[record] = ("\n".join(lines) + "\n").encode()

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (entry, content) in entries.items():
            if name not in changed:
                archive.writestr(entry, content)
        for name, content in changed.items():
            archive.writestr(name, content)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
