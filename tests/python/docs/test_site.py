"""The site that make docs builds: its pages, its links, and what checks them once it is built."""

from __future__ import annotations

import json
import pathlib
import posixpath
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools/site"))

import c_reference  # noqa: E402  (of tools/site)
import check_site  # noqa: E402
import places  # noqa: E402

PLACES = re.compile(r"^ *- (?:[^#\n]*: )?([\w./-]+\.md)$", re.MULTILINE)
# Where the hooks of mkdocs.yml have the README and the list of pages.
MOVED = {"README.md": "documentation.md", "../README.md": "index.md"}
DOCS = {str(page.relative_to(ROOT)): page.read_text() for page in (ROOT / "docs").rglob("*.md")}
BESIDE = places.pages_beside(DOCS)
LINK = re.compile(r"\]\(([^)#\s]+)")


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
    # The command; a folder of modules; names that are crossdock.torch's.
    untold = {"crossdock.cli", "crossdock.compat", "crossdock.torch.layers"}
    assert set(packages) - untold <= {package for _, package in listed}


def test_every_function_and_struct_of_c_has_a_place():
    everything = "".join(c_reference.pages().values())
    places = set(re.findall(r'\{ #(\w+) \}|<a id="(\w+)">', everything))
    for header in (ROOT / "include/crossdock").glob("*.h"):
        text = header.read_text()
        for name in re.findall(r"^XD_API [^(;]*?\b(xd_\w+)\(|^} (xd_\w+);$", text, re.MULTILINE):
            declared = "".join(name)
            assert {(declared, ""), ("", declared)} & places, f"{header.name}: {declared}"


def places_that_lead_nowhere(path: str, text: str) -> list[str]:
    """The links of a page of the site that lead to no page or file of it."""
    everything = DOCS.keys() | BESIDE.keys() | places.PLACES.keys()
    known = {places.place_of(each) for each in everything}
    known |= {f"reference/c/{page}" for page in c_reference.pages()}
    here = posixpath.dirname(places.place_of(path))
    targets = [posixpath.normpath(posixpath.join(here, link)) for link in LINK.findall(text)]
    files = [target for target in targets if target not in known]
    return [file for file in files if ":" not in file and not (ROOT / "docs" / file).is_file()]


def test_pages_of_files_beside_docs_lead_somewhere():
    folders = [path for path in BESIDE if (ROOT / path).is_dir()]
    assert "tests/conformance" in folders  # its README is a page of its own
    for path in folders:
        links = LINK.findall(BESIDE[path])
        assert len(links) == len(places.files_in(path)) > 0
        assert places_that_lead_nowhere(path, BESIDE[path]) == []


@pytest.mark.parametrize(
    "path", [*DOCS, *(path for path in BESIDE if path.endswith(".md"))], ids=lambda path: path
)
def test_links_between_files_become_links_between_pages(path):
    text = re.sub(r"^```.*?^```$", "", (DOCS | BESIDE)[path], flags=re.MULTILINE | re.DOTALL)
    assert places_that_lead_nowhere(path, places.between_pages(path, text, {})) == []


def test_links_that_read_as_files_read_as_titles():
    page = "[gemm.md](gemm.md#what), [so](gemm.md), [`a[0]`](gemm.md) and ![x](a.svg) [c.h](c.h)"
    assert places.between_pages("docs/python.md", page, {"docs/gemm.md": "Products"}) == (
        "[Products](gemm.md#what), [so](gemm.md), [`a[0]`](gemm.md) and ![x](a.svg) [c.h](c.h)"
    )
    assert places.title_of("---\na: b\n---\n```sh\n# no\n```\n# Yes\n") == "Yes"


HEADER = """/* Crossdock: what it is for.
 *
 *   drawn(as it is)
 * Sentence with xd_thing and a_name [T,H], 0 <= T.
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
        r"Sentence with [`xd_thing`](things.md#xd_thing) and a\_name \[T,H\], 0 &lt;= T.",
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


def a_site(folder: pathlib.Path) -> dict[str, str]:
    """A site of two pages in a folder, in which all is right; {file: text}."""
    head = f'<head><script src="{check_site.WORKER}"></script></head>'
    entry = {"location": "b.html#there", "title": "There", "text": ""}
    index = "var __index = " + json.dumps({"docs": [entry]})
    texts = {
        check_site.WORKER: "",
        "search/search_index.js": index,
        "a.html": head + '<a href="b.html#there">0 &lt;= T</a> <a href="https://x.org">x</a>',
        "b.html": head + '<h2 id="there">There</h2><code>\\&lt;</code><img src="data:,">',
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return texts


def test_a_site_in_which_all_is_right_passes(tmp_path):
    a_site(tmp_path)
    assert check_site.mistakes(tmp_path) == []


@pytest.mark.parametrize(
    "file, before, after, said",
    [
        ("a.html", "b.html#there", "c.html", "a.html: there is no c.html"),
        ("a.html", "#there", "#where", "a.html: there is no place b.html#where"),
        ("a.html", "0 &lt;=", r"0 \&lt;=", r"a.html: shows an escape: 0 \<= T"),
        ("b.html", "data:,", "https://x.org/y", "b.html: fetches https://x.org/y"),
        ("b.html", check_site.WORKER, "search/search_index.js", "b.html: does not load assets/"),
        ("search/search_index.js", "b.html", "c.html", "the search leads to c.html#there, which"),
        ("search/search_index.js", "#there", "#where", "the search leads to b.html#where, which"),
        ("search/search_index.js", "var __index", "{}", "search/search_index.js does not set"),
    ],
)
def test_mistakes_of_a_site_are_named(file, before, after, said, tmp_path):
    text = a_site(tmp_path)[file]
    assert before in text
    (tmp_path / file).write_text(text.replace(before, after))
    (mistake,) = check_site.mistakes(tmp_path)
    assert mistake.startswith(said)


def test_a_site_without_an_index_for_folders_fails(tmp_path):
    a_site(tmp_path)
    (tmp_path / "search/search_index.js").unlink()
    (mistake,) = check_site.mistakes(tmp_path)
    assert mistake.startswith("there is no search/search_index.js")
