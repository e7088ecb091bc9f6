#!/usr/bin/env python3
"""Checks what the documentation says twice or points to.

Links between pages, with their anchors; the tables of environment variables against env.def;
statuses against status.h; make targets against the Makefile; excerpts of code (blocks whose info
string is "<language> from=<file>") against the file they come from; and no marks of a merge.
"""

import pathlib
import re
import sys

LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
EXCERPT = re.compile(r"^```\w+ from=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(
    r'^XD_ENV_\w+\(\w+, ("\w+"), ("[^"]*"|-?\d+)(?:, -?\d+)?,\s+"(.*)"\)$', re.MULTILINE
)
ROW = re.compile(r"^\| `(XD_\w+)` \| (.*?) \| (.*) \|$", re.MULTILINE)
TABLES = ["docs/errors.md", "CONTRIBUTING.md"]  # of variables, as env.def has them
STATUS = re.compile(r"^\s+(XD_(?:SUCCESS|ERROR_\w+)) = \d+", re.MULTILINE)
TARGET = re.compile(r"`make (\w+)`")
MERGE = re.compile(r"^(?:<{7}|={7}|>{7})(?: .*)?$", re.MULTILINE)


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def broken_links(page):
    for path, anchor in LINK.findall(page.read_text()):
        if "://" in path:
            continue
        target = (page.parent / path) if path else page
        if not target.exists():
            yield f"there is no {path}"
        elif anchor and anchor not in anchors(target):
            yield f"{path or page.name} has no heading for #{anchor}"


def altered_excerpts(root, page):
    for name, block in EXCERPT.findall(page.read_text()):
        lines = [line.strip() for line in block.splitlines()]
        source = [line.strip() for line in (root / name).read_text().splitlines()]
        if not any(source[i : i + len(lines)] == lines for i in range(len(source))):
            yield f"the excerpt of {name} is not what stands there"


def unknown_targets(root, page):
    known = set(re.findall(r"^(\w+):", (root / "Makefile").read_text(), re.MULTILINE))
    for target in sorted(set(TARGET.findall(page.read_text())) - known):
        yield f"the Makefile has no target {target}"


def wrong_rows(root):
    """Of the tables of environment variables: (page, mistake)."""
    parts = (root / "src/base/env.def").read_text().split("\n// ---- ")
    for page, variables in zip(TABLES, parts, strict=True):
        described = set(ROW.findall((root / page).read_text()))
        for name, default, meaning in VARIABLE.findall(variables):
            name, default = name.strip('"'), default.strip('"') or "(empty)"
            if (name, default, meaning) not in described:
                yield page, f"expected the row | `{name}` | {default} | {meaning} |"


def missing_statuses(root):
    text = (root / "docs/errors.md").read_text()
    for status in STATUS.findall((root / "include/crossdock/status.h").read_text()):
        if not re.search(rf"^\| `{status}` \|", text, re.MULTILINE):
            yield f"the table of statuses lacks {status}"


def marks_of_a_merge(page):
    for mark in MERGE.findall(page.read_text()):
        yield f"a merge has left the line {mark}"


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    found = [(root / page, what) for page, what in wrong_rows(root)]
    found += [(root / "docs/errors.md", what) for what in missing_statuses(root)]
    for page in pages:
        found += [(page, what) for what in broken_links(page)]
        found += [(page, what) for what in marks_of_a_merge(page)]
        found += [(page, what) for what in altered_excerpts(root, page)]
        found += [(page, what) for what in unknown_targets(root, page)]
    for page, what in found:
        print(f"{page.relative_to(root)}: {what}")
    print(f"docs: {len(pages)} pages, {len(found)} mistakes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
