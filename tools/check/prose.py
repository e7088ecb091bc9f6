#!/usr/bin/env python3
"""Reports sentences that have a pronoun or a relative clause for a subject.

CONTRIBUTING.md asks for a subject that a newcomer can point at: "A rank that is late waits", and
not "Who is late waits". So no sentence begins with What, Who, Whoever or Whatever, but for
questions, nor with That or Those before a verb; in comments of C, C++, CUDA, Python, CMake and
shell, in docstrings, and in the prose of Markdown. A comment behind code begins with none of them.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize

import lengths

SLASHES = {".h", ".c", ".cc", ".cu", ".cuh", ".def"}
HASHES = {".cmake", ".sh", ".toml", ".yml"}

# Words that come behind a pronoun and not before a noun that it points at: "That stack is full".
MODAL = "can|may|must|might|will|would|could|should|did|do|need|of|in|on|at|by|for|from"
SINGULAR = r"is|was|has|does|(?!process|class|bus\b|address|access|pass|always|this)\w+[^s\W]s"
SUBJECT = re.compile(
    r"(?:What|Who|Whoever|Whatever)\b"
    rf"|That (?:{MODAL}|{SINGULAR})\b|Those (?:{MODAL}|that|to|are|were|have|had)\b"
)
FRAGMENT = re.compile(r"(?:what|who|whoever|whatever|whose|that|those)\b")
SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=:)\s+(?=[A-Z])|\n(?=\s*(?:- |\n))")


def sentences(text):
    """(offset, sentence) of each sentence of a comment or paragraph."""
    start = 0
    for piece in SENTENCE.split(text):
        at = text.index(piece, start)
        start = at + len(piece)
        sentence = piece.lstrip("- \n")
        yield start - len(sentence), sentence


def faults(text):
    """(offset, sentence) of each sentence whose subject is none."""
    for at, sentence in sentences(text):
        if SUBJECT.match(sentence.lstrip("*")) and not sentence.rstrip("*").endswith("?"):
            yield at, sentence


def blocks_of(comments):
    """(first line, text) of comments (line, text, stands alone), joined where they follow."""
    block = None
    for line, text, alone in comments:
        if block and alone and block[2] and line == block[1] + 1:
            block = (block[0], line, True, block[3] + "\n" + text)
            continue
        if block:
            yield block[0], block[2], block[3]
        block = (line, line, alone, text)
    if block:
        yield block[0], block[2], block[3]


def slash_comments(text):
    pattern = re.compile(
        r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|//([^\n]*)|/\*(.*?)\*/", re.DOTALL
    )
    for found in pattern.finditer(text):
        body = found[1] if found[1] is not None else found[2]
        if body is None:
            continue
        line = text.count("\n", 0, found.start()) + 1
        before = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        for number, row in enumerate(body.split("\n")):
            yield line + number, re.sub(r"^[\s*/<]+", "", row), not before.strip()


def hash_comments(text):
    for number, row in enumerate(text.split("\n"), 1):
        found = re.match(r"((?:[^#\"'$\\]|\"[^\"]*\"|'[^']*')*?)(?:^|(?<=\s))#+ ?(.*)", row)
        if found and not found[2].startswith("!"):
            yield number, found[2], not found[1].strip()


def python_comments(text):
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            yield token.start[0], token.string.lstrip("# "), alone


def docstrings(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                first = node.body[0]
                yield first.lineno, True, re.sub(r"\n *", "\n", first.value.value)


def paragraphs(text):
    """(first line, alone, text) of paragraphs and list items of Markdown; tables have phrases."""
    quoted, block, first = False, [], 0
    for number, row in enumerate([*text.split("\n"), ""], 1):
        quoted ^= row.lstrip().startswith("```")
        item = re.match(r"\s*(?:[-*]|\d+\.) +(.*)", row)
        stop = quoted or not row.strip() or row.startswith(("#", "|", "```")) or item
        if stop and block:
            yield first, True, "\n".join(block)
            block = []
        if quoted or row.startswith(("#", "|", "```")) or not row.strip():
            continue
        if not block:
            first = number
        block.append(item[1] if item else row.strip())


def blocks(name, text):
    """(first line, stands alone, text) of all that is prose in a file."""
    suffix = pathlib.PurePath(name).suffix
    if suffix == ".md":
        yield from paragraphs(text)
    elif suffix in SLASHES or name.endswith((".h.in", ".cc.in")):
        yield from blocks_of(slash_comments(text))
    elif suffix in {".py", ".pyi"}:
        yield from blocks_of(python_comments(text))
        yield from docstrings(text)
    elif suffix in HASHES or name.endswith(("CMakeLists.txt", "Makefile")):
        yield from blocks_of(hash_comments(text))


def problems(name, text):
    """(line, sentence) of each sentence of a file that breaks the rule."""
    for first, alone, block in blocks(name, text):
        for at, sentence in faults(block):
            yield first + block[:at].count("\n"), " ".join(sentence.split())
        if not alone and FRAGMENT.match(block):
            yield first, block


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    files = found = 0
    for name, rows in lengths.texts(root):
        files += 1
        for line, sentence in problems(name, "\n".join(rows)):
            found += 1
            print(f"{name}:{line}: {sentence[:100]}")
    print(f"prose: {files} files, {found} sentences without a subject")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
