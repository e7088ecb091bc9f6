#!/usr/bin/env python3
"""Checks a site that make docs has built, without a browser.

  check_site.py [build/site]

All links and anchors of all pages lead somewhere within the site; nothing but what the reader
clicks on is fetched from elsewhere; the search index can be read from a folder, without a server,
and names pages and anchors that there are; and no escape of Markdown is left in a text.
"""

from __future__ import annotations

import html.parser
import json
import pathlib
import posixpath
import sys
import urllib.parse

CODE = ("pre", "code", "script", "style")
WORKER = "assets/iframe-worker.js"  # of mkdocs.yml: with it the search runs without a server


class Page(html.parser.HTMLParser):
    """The links, fetched files, anchors and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors = {"", "__top"}  # the top of the page
        self.escapes: list[str] = []
        self._code = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        self._code += tag in CODE
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif "src" in found:
            self.fetched.append(found["src"])
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon"):
            self.fetched.append(found["href"])

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in CODE

    def handle_data(self, data: str) -> None:
        if not self._code and ("\\<" in data or "\\>" in data):
            self.escapes.append(data.strip())


def broken_links(name: str, pages: dict[str, Page], site: pathlib.Path) -> list[str]:
    """The mistakes in what a page links to and fetches."""
    page, wrong = pages[name], []
    for link in page.links + page.fetched:
        parts = urllib.parse.urlsplit(link)
        if parts.scheme or parts.netloc:
            if link in page.fetched and parts.scheme != "data":
                wrong.append(f"fetches {link}")
            continue
        path = urllib.parse.unquote(parts.path)
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
        if not (site / target).is_file():
            wrong.append(f"there is no {link}")
        elif target in pages and urllib.parse.unquote(parts.fragment) not in pages[target].anchors:
            wrong.append(f"there is no place {link}")
    return wrong


def mistakes_of_search(pages: dict[str, Page], site: pathlib.Path) -> list[str]:
    """The reasons why the search would not work from a folder."""
    index = site / "search/search_index.js"
    if not index.is_file():
        return ["there is no search/search_index.js, which pages read without a server"]
    name, _, text = index.read_text().partition("=")
    if name.strip() != "var __index":
        return ["search/search_index.js does not set __index"]
    entries = json.loads(text.strip().removesuffix(";"))["docs"]
    wrong = [] if entries else ["the search index is empty"]
    for entry in entries:
        page, _, anchor = entry["location"].partition("#")
        if page not in pages or urllib.parse.unquote(anchor) not in pages[page].anchors:
            wrong.append(f"the search leads to {entry['location']}, which there is not")
    for name, page in pages.items():
        if not any(link.endswith(WORKER) for link in page.fetched):
            wrong.append(f"{name}: does not load {WORKER}, so its search needs a server")
    return wrong


def mistakes(site: pathlib.Path) -> list[str]:
    """All mistakes in a site."""
    names = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    # Its links begin at the root of a server, as it can be shown in place of any page.
    pages = {name: Page((site / name).read_text()) for name in names if name != "404.html"}
    wrong = [] if pages else [f"{site}: no page"]
    for name, page in pages.items():
        wrong += [f"{name}: {one}" for one in broken_links(name, pages, site)]
        wrong += [f"{name}: shows an escape: {text}" for text in page.escapes]
    return wrong + mistakes_of_search(pages, site)


def main() -> int:
    site = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/site")
    wrong = mistakes(site)
    for one in wrong:
        print(f"error: {one}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
