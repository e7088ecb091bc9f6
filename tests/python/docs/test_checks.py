"""The checks of prose and of words find what they look for, and nothing else."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tools/check"))

import prose  # noqa: E402  (of tools/check)
import words  # noqa: E402


@pytest.mark.parametrize(
    "name, text, lines",
    [
        (
            "a.h",
            "// What a rank holds.\n// Rows.\nint a;\n\n// Rows. Who is late\n// waits.\n",
            [1, 5],
        ),
        ("a.cc", "int a;  // that nobody reads\nint b;  // a row that nobody reads\n", [1]),
        ("a.cu", 'f("// What is this");  /* Rows of peers. That is all. */\n', [1]),
        ("a.c", "/* Rows:\n *   - What is behind them is zero. */\n", [2]),
        ("a.py", 'def f():\n    """What f does."""\n\n\nb = "# What"  # those of peers\n', [2, 5]),
        ("CMakeLists.txt", "# Whatever is built.\nset(A 1)  # a number that is one\n", [1]),
        ("a.md", "## What it does\n\nRows. Those of peers\nstay.\n\n| What | Who |\n", [3]),
        ("a.md", "What is a row? That row is full. Those processes end.\n", []),
    ],
)
def test_prose_names_each_sentence_without_a_subject(name: str, text: str, lines: list[int]):
    assert sorted(line for line, _ in prose.problems(name, text)) == lines


PAGE = "# Words\n\n| Word | Means | Elsewhere |\n|---|---|---|\n| near | here | local |\n"


def wrong(page: str = PAGE, other: str = "A *near* rank.", tree: str = "near ranks") -> list[str]:
    return [why for _, why in words.problems(page, {"other.md": other}, tree)]


def test_words_are_held_against_the_pages_and_the_tree():
    assert wrong() == []
    assert wrong(other="- *A title.* *Near* ranks.\n```\na *b* c\n```\n") == []
    assert wrong(other="A *remote* rank.") == [
        "defines *remote*, which docs/internals/words.md lacks"
    ]
    assert wrong(tree="ranks nearby, linear") == [] and len(wrong(tree="linear")) == 1
    assert "by the alphabet" in wrong(PAGE + "| half | a phase | phase |\n", tree="near half")[0]
    assert "by the alphabet" in wrong(PAGE + "| near | here | local |\n")[0]
    assert "1 rows are not" in wrong(PAGE + "| Zone | rows | group |\n")[0]
