"""Where files of the repository are in the site, and the pages of those that are no pages yet.

Pages in docs/ link to each other and to files beside docs/, as GitHub shows them. In the site every
file that a page links to is a page, too; the README is the first one.
"""

from __future__ import annotations

import pathlib
import posixpath
import re

import c_reference

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Where a file or folder of the repository is in the site, if not where the rules below say.
PLACES = {
    "README.md": "index.md",
    "docs/README.md": "documentation.md",
    "include/crossdock": "reference/c/index.md",
    "python/crossdock": "reference/python.md",
}
LANGUAGES = {".h": "c", ".cuh": "cuda", ".cu": "cuda", ".cc": "c++", ".py": "python", ".sh": "sh"}
FIRST = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")  # in the site, whoever links to them

# [text](target#anchor); no text where that has brackets of its own, which are left as they are.
_LINK = re.compile(r"(?:\[([^\]\[]*))?\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r"^# (.*)$", re.MULTILINE)


def place_of(path: str) -> str:
    """Where a file or folder of the repository is in the site."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    folder, name = posixpath.split(path)
    if folder == "include/crossdock" and name.endswith(".h"):
        return f"reference/c/{c_reference.page_of(name)}"
    return f"source/{path if path.endswith('.md') else path + '.md'}"


def title_of(text: str) -> str:
    """The title of a page, or nothing."""
    found = _TITLE.search(_FENCED.sub("", text))
    return found[1] if found else ""


def _is_elsewhere(link: str) -> bool:
    return "://" in link or link.startswith("mailto:")


def _target(path: str, link: str) -> str:
    """The file or folder of the repository that a page's link leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def targets_of(path: str, text: str) -> list[str]:
    """Files and folders of the repository that a page links to."""
    links = [link for _, link, _ in _LINK.findall(_FENCED.sub("", text))]
    return [_target(path, link) for link in links if not _is_elsewhere(link)]


def files_in(path: str) -> list[str]:
    """The files of a folder, not of those below it; none of a file."""
    place = ROOT / path
    inside = sorted(place.iterdir()) if place.is_dir() else []
    return [f"{path}/{one.name}" for one in inside if one.suffix and one.is_file()]


def page_of_source(path: str) -> str:
    """A page that shows a file, or lists the files of a folder."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if (ROOT / path).is_dir():
        here = posixpath.dirname(place_of(path))
        links = {file: posixpath.relpath(place_of(file), here) for file in files_in(path)}
        return head + "".join(f"- [{posixpath.basename(f)}]({links[f]})\n" for f in links)
    file = ROOT / path
    return f"{head}````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}````\n"


def pages_beside(pages: dict[str, str]) -> dict[str, str]:
    """{path: its page} of the files and folders that pages of docs/ lead to, however indirectly."""
    todo = [*FIRST, *(target for path, text in pages.items() for target in targets_of(path, text))]
    found: dict[str, str] = {}
    while todo:
        path = todo.pop()
        # A page of docs/ is one already, and mkdocs says which are nowhere.
        if path in found or path.startswith("docs/") or not (ROOT / path).exists():
            continue
        if path.endswith(".md"):
            found[path] = (ROOT / path).read_text()
            todo += targets_of(path, found[path])
        elif path not in PLACES:
            found[path] = page_of_source(path)
            todo += files_in(path)
    return found


def between_pages(path: str, text: str, titles: dict[str, str]) -> str:
    """A page whose links lead to pages of the site instead of files of the repository.

    Links that read as the name of a page's file read as its title, as `titles` has it by path.
    """
    here = posixpath.dirname(place_of(path)) or "."

    def moved(link: re.Match[str]) -> str:
        said, target, anchor = link.groups()
        if _is_elsewhere(target):
            return link[0]
        file = _target(path, target)
        if said in (posixpath.basename(file), target, file):
            said = titles.get(file) or said
        place = f"]({posixpath.relpath(place_of(file), here)}{anchor or ''})"
        return place if said is None else f"[{said}{place}"

    parts, end = [], 0
    for block in _FENCED.finditer(text):
        parts += [_LINK.sub(moved, text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, _LINK.sub(moved, text[end:])])
