#!/usr/bin/env python3
"""Reports long functions, files and lines, and how much of the library's code is comment.

Functions over 60 lines warn; functions over 150, files over 600 and lines over 100 columns fail.
C++ is read by its braces, not parsed: a brace opens a function if it follows a parameter list and
everything around it is a namespace, an extern "C" block or a class.
"""

import ast
import pathlib
import re
import sys

FUNCTION_WARN, FUNCTION_MAX, FILE_MAX, LINE_MAX = 60, 150, 600, 100
FOLDERS = ["include", "src", "python", "tests", "bench", "examples", "tools"]
C_FILES = {".h", ".c", ".cc", ".cu", ".cuh"}

NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"'
    r"|(?<!\w)'(?:\\.|[^'\\\n])+'|^\s*#(?:\\\n|[^\n])*", re.DOTALL | re.MULTILINE)
# A brace after these is part of an expression: = {...}, f({...}), a constructor's member{...}.
EXPRESSION = re.compile(r"[=,(]\s*$|\)[^()]*[^:]:[^:].*[\w>]$", re.DOTALL)
CONTAINER = re.compile(r"\b(namespace|class|struct|union)\b|\bextern\s*$")


def blank(match):
    """The same lines without their text."""
    return "\n" * match.group(0).count("\n")


def c_functions(text):
    """(name, first line, last line) of the function definitions of a C or C++ file."""
    line, head, head_line = 1, "", 1  # head: what stands before the next brace, from head_line on
    stack = []  # per open brace: what it opened, and the head to go on with after it
    for char in NOT_CODE.sub(blank, text):
        if char == "\n":
            line += 1
        if char == "{":
            piece = bool(EXPRESSION.search(head)) or head.count("(") > head.count(")")
            nested = any(kind != "container" for kind, _, _ in stack)
            kind = "other" if piece or nested else opened(head)
            stack.append((kind, head if piece else "", head_line))
            head = ""
        elif char == "}" and stack:
            kind, head, head_line = stack.pop()
            if kind not in {"container", "other"}:
                yield kind, head_line, line
        elif char == ";" and head.count("(") == head.count(")"):
            head = ""
        else:
            if not head.strip():
                head_line = line
            head += char


def opened(head):
    """What a brace at file or class level opens: "container", a function's name, or "other"."""
    signature = re.sub(r"\b(requires|alignas|decltype)\s*\((\([^()]*\)|[^()])*\)", "", head)
    if CONTAINER.search(signature) and "(" not in signature:
        return "container"
    name = re.search(r"([~\w:]+|operator\S+)\s*\(", signature)
    return name.group(1) if name else "other"


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.lineno, node.end_lineno


def comment_lines(text):
    code_lines = NOT_CODE.sub(
        lambda m: blank(m) if m.group(0).startswith("/") else m.group(0), text).split("\n")
    before = text.split("\n")
    return sum(1 for a, b in zip(before, code_lines) if a.strip() and not b.strip())


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    files = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*")
                   if path.suffix in C_FILES | {".py", ".sh"} and path.is_file())
    failures, warnings, functions, comments, lines = [], [], 0, 0, 0
    for path in files:
        text, name = path.read_text(), path.relative_to(root)
        rows = text.splitlines()
        if len(rows) > FILE_MAX:
            failures.append(f"{name}: {len(rows)} lines, at most {FILE_MAX}")
        failures += [f"{name}:{number}: {len(row)} columns, at most {LINE_MAX}"
                     for number, row in enumerate(rows, 1) if len(row) > LINE_MAX]
        reader = {".py": python_functions, ".sh": lambda _: ()}.get(path.suffix, c_functions)
        for function, first, last in reader(text):
            functions += 1
            length = last - first + 1
            if length > FUNCTION_WARN:
                report = failures if length > FUNCTION_MAX else warnings
                report.append(f"{name}:{first}: {function} has {length} lines")
        if path.suffix in C_FILES and name.parts[0] in {"include", "src"}:
            comments += comment_lines(text)
            lines += sum(1 for row in rows if row.strip())

    long_functions = sum(" has " in text for text in warnings + failures)
    for warning in warnings:
        print("warning:", warning)
    for failure in failures:
        print("error:", failure)
    print(f"lengths: {functions} functions in {len(files)} files, {long_functions} "
          f"({long_functions / max(functions, 1):.1%}) over {FUNCTION_WARN} lines; "
          f"{comments / max(lines, 1):.1%} of the library's lines are comments")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
