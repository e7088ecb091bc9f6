#!/usr/bin/env python3
"""Checks that neither the library that people use nor its sources contain an instrument of tests.

usage: instruments.py LIBRARY INSTRUMENTED

The words below are in names or texts of INSTRUMENTED, the tests' library, which shows that they
would be found, and in none of LIBRARY. Sources have these words and the mutants' neither.
"""

import pathlib
import re
import sys

WORDS = ["chaos", "damage=", "in_?process_?(engine|region)", "XD_NET_TEST", "xd_test_"]
OF_SOURCES = [*WORDS, "damaged_in", "mutant", "wrong_?links"]
ROOT = pathlib.Path(__file__).resolve().parents[2]


def matches(words, text):
    pattern = rf"({'|'.join(words)})[\w:]*"
    return sorted({match.group() for match in re.finditer(pattern, text, re.IGNORECASE)})


def problems(product, instrumented):
    for name in matches(WORDS, product.read_text("latin-1")):
        yield f"{product} has the name or text {name}"
    tests = instrumented.read_text("latin-1")
    for word in WORDS:
        if not matches([word], tests):
            yield f"{instrumented} has no {word}, so nobody knows whether it would be found"
    for file in sorted(path for path in (ROOT / "src").rglob("*") if path.is_file()):
        for name in matches(OF_SOURCES, file.read_text()):
            yield f"{file.relative_to(ROOT)} speaks of {name}"


def main():
    found = list(problems(*map(pathlib.Path, sys.argv[1:])))
    for what in found:
        print(what)
    print(f"instruments: {len(WORDS)} words, {len(found)} mistakes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
