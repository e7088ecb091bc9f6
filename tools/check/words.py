#!/usr/bin/env python3
"""Holds docs/internals/words.md against the pages beside it, and against the tree.

The page has every word once, in alphabetical order, with a meaning. It has every word that other
pages of docs/internals define in *italics*; titles of list items do not count. Each word occurs in
src or in another page of docs.
"""

import pathlib
import re
import sys

PAGE = "docs/internals/words.md"
ROW = re.compile(r"^\| ([a-z][\w -]*) \| (\S.*?) \| (.*?) ?\|$", re.MULTILINE)
ITALIC = re.compile(r"(?<![*\w`])\*(\w[\w -]*)\*(?![*\w])")
TITLE = re.compile(r"^ *- \*(?!\*)[^*]*\*", re.MULTILINE)  # of a list item
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TEXT = {".md", ".h", ".cc", ".cu", ".cuh"}


def words_of(text):
    """The words of the page, in its order."""
    return [word for word, *_ in ROW.findall(text)]


def definitions(text):
    """The words that a page defines."""
    plain = TITLE.sub("", BLOCK.sub("", text))
    return [" ".join(word.lower().split()) for word in ITALIC.findall(plain)]


def is_known(word, words):
    return any(form in words for form in (word, word.removesuffix("s"), word.removesuffix("es")))


def occurs(word, text):
    pattern = r"\W+".join(map(re.escape, re.split(r"[ -]", word)))
    return re.search(rf"(?<![a-z]){pattern}", text) is not None


def problems(text, pages, tree):
    """Mistakes of the page `text`. pages: {name: text of a page}. tree: all texts, in one."""
    words = words_of(text)
    rows = text.count("\n| ") - 1  # the first is the table's head
    if len(words) != rows:
        yield PAGE, f"{rows - len(words)} rows are not | word | meaning | term elsewhere |"
    for before, after in zip(words, words[1:]):
        if after <= before:
            yield PAGE, f"{after} stands behind {before}: expected each word once, by the alphabet"
    for name, page in pages.items():
        for word in definitions(page):
            if not is_known(word, words):
                yield name, f"defines *{word}*, which {PAGE} lacks"
    for word in words:
        if not occurs(word, tree):
            yield PAGE, f"{word} occurs in no other page and in no source file"


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    page = root / PAGE
    others = [path for path in page.parent.glob("*.md") if path != page]
    pages = {str(path.relative_to(root)): path.read_text() for path in others}
    files = [path for folder in ("docs", "src") for path in (root / folder).rglob("*")]
    texts = [path.read_text() for path in files if path.suffix in TEXT and path != page]
    tree = "\n".join(texts).lower().replace("_", " ")
    text = page.read_text()
    found = list(problems(text, pages, tree))
    for name, why in found:
        print(f"{name}: {why}")
    print(f"words: {len(words_of(text))} words, {len(found)} mistakes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
