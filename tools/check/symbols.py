#!/usr/bin/env python3
"""Checks that a shared library exports the XD_API functions of the headers and nothing else.

usage: symbols.py LIBRARY
"""

import pathlib
import re
import subprocess
import sys

DECLARATION = re.compile(r"^XD_API\s[^;(]*?\b(\w+)\s*\(", re.MULTILINE)


def declared():
    headers = (pathlib.Path(__file__).resolve().parents[2] / "include/crossdock").glob("*.h")
    return {name for header in headers for name in DECLARATION.findall(header.read_text())}


def exported(library):
    """Names without their version; the version itself is an absolute symbol."""
    rows = subprocess.run(
        ["nm", "-D", "--defined-only", library], check=True, text=True, capture_output=True
    ).stdout.splitlines()
    return {name.split("@")[0] for _, kind, name in map(str.split, rows) if kind != "A"}


def main():
    want, got = declared(), exported(sys.argv[1])
    for name in sorted(want - got):
        print(f"{name}: declared in a public header, not exported")
    for name in sorted(got - want):
        print(f"{name}: exported, not declared in a public header")
    print(f"symbols: {len(got)} exported, {len(want)} declared")
    return 0 if want and want == got else 1


if __name__ == "__main__":
    sys.exit(main())
