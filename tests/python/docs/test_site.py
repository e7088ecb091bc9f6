"""The site that make docs builds names every page and every function of the C API."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools/site"))

import c_reference  # noqa: E402  (of tools/site)

PLACES = re.compile(r"^ *- (?:[^#\n]*: )?([\w./-]+\.md)$", re.MULTILINE)
# Where mkdocs.yml's hooks have the README and the list of pages.
MOVED = {"README.md": "documentation.md", "../README.md": "index.md"}


def nav() -> list[str]:
    _, _, text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    return PLACES.findall(text)


def test_every_page_is_in_the_navigation_once():
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - set(MOVED)
    shown = [page for page in nav() if not page.startswith(("reference/", "source/"))]
    assert sorted(shown) == sorted(pages | set(MOVED.values()))


def test_every_header_is_in_the_navigation():
    pages = {f"reference/c/{page}" for page in c_reference.pages()}
    assert {page for page in nav() if page.startswith("reference/c/")} == pages


def test_every_package_has_a_reference_in_the_navigation():
    hooks = (ROOT / "tools/site/site.py").read_text()
    listed = re.findall(r'^    "(\w+)": \("(crossdock[\w.]*)", ', hooks, re.MULTILINE)
    shown = [page for page in nav() if re.fullmatch(r"reference/\w+\.md", page)]
    assert sorted(shown) == sorted(f"reference/{name}.md" for name, _ in listed)
    packages = [
        ".".join(path.parent.relative_to(ROOT / "python").parts)
        for path in ROOT.glob("python/crossdock/**/__init__.py")
    ]
    untold = {"crossdock.cli", "crossdock.compat"}  # the command; a folder of modules
    assert set(packages) - untold <= {package for _, package in listed}


def test_every_function_and_struct_of_c_has_a_place():
    everything = "".join(c_reference.pages().values())
    places = set(re.findall(r'\{ #(\w+) \}|<a id="(\w+)">', everything))
    for header in (ROOT / "include/crossdock").glob("*.h"):
        text = header.read_text()
        for name in re.findall(r"^XD_API [^(;]*?\b(xd_\w+)\(|^} (xd_\w+);$", text, re.MULTILINE):
            declared = "".join(name)
            assert {(declared, ""), ("", declared)} & places, f"{header.name}: {declared}"


HEADER = """/* Crossdock: what it is for.
 *
 *   drawn(as it is)
 * Sentence with xd_thing and a_name [T,H].
 */
#ifndef CROSSDOCK_THINGS_H_
#define CROSSDOCK_THINGS_H_

/* ---- Things ---- */

/* A thing. See `xd_make`. */
typedef struct xd_thing {
  /* In bytes; of more lines,
   * too. */
  size_t size;
} xd_thing;
#define XD_THING_INIT \\
  { 0 }

/* Makes one, by xd_thing. */
XD_API xd_status xd_make(xd_thing* out,
                         int count);

#endif /* CROSSDOCK_THINGS_H_ */
"""


def test_a_header_becomes_comments_and_declarations():
    first, section, struct, function = c_reference.pieces(HEADER)
    assert first.comment.startswith("Crossdock: what it is for.") and not first.code
    assert section.comment == "---- Things ----"
    assert struct.names() == ["xd_thing", "XD_THING_INIT"]
    assert struct.code.startswith("typedef struct xd_thing {") and struct.code.endswith("{ 0 }")
    assert function.names() == ["xd_make"]
    assert function.code.endswith("int count);")


@pytest.mark.parametrize(
    "said",
    [
        "```text\ndrawn(as it is)\n```",
        r"Sentence with [`xd_thing`](things.md#xd_thing) and a\_name \[T,H\].",
        "## Things",
        "### `xd_thing` { #xd_thing }",
        "A thing. See `xd_make`.",
        "Makes one, by [`xd_thing`](things.md#xd_thing).",
    ],
)
def test_a_page_has_links_code_and_no_other_marks(said, tmp_path, monkeypatch):
    (tmp_path / "things.h").write_text(HEADER)
    monkeypatch.setattr(c_reference, "HEADERS", tmp_path)
    assert said in c_reference.pages()["things.md"]
