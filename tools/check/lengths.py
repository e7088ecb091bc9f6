#!/usr/bin/env python3
"""Reports long files and lines of all text in the tree, and long functions in Python.

Files over 600 lines and lines over 100 columns fail; in Markdown prose lines over 120. Headers of
kernels may have 900 lines, as a class that is compiled as a whole is not cut into files. Python
functions over 60 lines, docstrings aside, warn, over 150 fail; clang-tidy looks at those of C++
and CUDA.
"""

import ast
import pathlib
import subprocess
import sys

FUNCTION_WARN, FUNCTION_MAX, FILE_MAX, LINE_MAX, MARKDOWN_LINE_MAX = 60, 150, 600, 100, 120
KERNEL_HEADER_MAX = 900
WRITTEN_BY_PROGRAMS = ["docs/results/", "docs/figures/"]  # measurements, and drawings of them


def texts(root):
    """(name, lines) of each file that git tracks or would, where there is git; else of all."""
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
    )
    names = listed.stdout.split("\0") if listed.returncode == 0 else _walk(root)
    for name in sorted(filter(None, names)):
        path = root / name
        if not path.is_file() or any(name.startswith(folder) for folder in WRITTEN_BY_PROGRAMS):
            continue
        try:
            yield name, path.read_text().splitlines()
        except UnicodeDecodeError:
            continue  # no text


def _walk(root):
    for path in root.rglob("*"):
        name = path.relative_to(root)
        if name.parts[0] not in {"build", ".venv", ".git"} and "__pycache__" not in name.parts:
            yield str(name)


def long_lines(name, rows):
    markdown = name.endswith(".md")
    most = MARKDOWN_LINE_MAX if markdown else LINE_MAX
    quoted = False  # a block of code or output, which stays as it was printed
    for number, row in enumerate(rows, 1):
        quoted ^= markdown and row.lstrip().startswith("```")
        table = markdown and row.startswith("|")  # its rows cannot be wrapped
        if len(row) > most and not quoted and not table:
            yield f"{name}:{number}: {len(row)} columns, at most {most}"


def functions(rows):
    for node in ast.walk(ast.parse("\n".join(rows))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            yield node.name, node.lineno, lines


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    failures, warnings, files = [], [], 0
    for name, rows in texts(root):
        files += 1
        most = KERNEL_HEADER_MAX if name.endswith(".cuh") else FILE_MAX
        if len(rows) > most:
            failures.append(f"{name}: {len(rows)} lines, at most {most}")
        failures += long_lines(name, rows)
        for function, first, length in functions(rows) if name.endswith(".py") else ():
            if length > FUNCTION_WARN:
                report = failures if length > FUNCTION_MAX else warnings
                report.append(f"{name}:{first}: {function} has {length} lines")
    for warning in warnings:
        print("warning:", warning)
    for failure in failures:
        print("error:", failure)
    print(f"lengths: {files} files, {len(failures)} too long files, lines and functions")
    return 1 if failures or not files else 0


if __name__ == "__main__":
    sys.exit(main())
