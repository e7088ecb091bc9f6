"""Pages of the C API, made of the headers in include/crossdock, which are its manual.

A header is comments and declarations. A comment right above a declaration belongs to it; one that
an empty line follows stands for itself, and "---- Title ----" begins a section. Declarations are
shown as they are written, with the comments of their fields.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADERS = ROOT / "include/crossdock"

_NAME = re.compile(r"\b(?:xd|XD)_\w*\w\b")
_SECTION = re.compile(r"^-+ (.*?) -+$")
_LEFT_OUT = re.compile(
    r"#(?:include|pragma|endif|ifdef|ifndef|if|else|elif|undef)\b|extern \"C\"|}$"
    r"|/\* clang-format (?:on|off) \*/$|#define CROSSDOCK_\w+_H_$|#define XD_API"
)
_DECLARED = re.compile(
    r"^#define (XD_\w+)"
    r"|^} (\w+);$"  # typedef struct { ... } name;
    r"|^typedef [^{;]*\(\*(\w+)\)\("
    r"|^typedef [^{;(]*?\b(\w+);$"
    r"|^(?:XD_API|static inline) [^(;]*?\b(\w+)\(",
    re.MULTILINE,
)


@dataclasses.dataclass
class Piece:
    """A comment, declarations, or these with that."""

    comment: str = ""
    code: str = ""

    def names(self) -> list[str]:
        """The declared names; those of initialisers come last."""
        found = ["".join(groups) for groups in _DECLARED.findall(self.code)]
        return sorted(dict.fromkeys(found), key=lambda name: name.endswith("_INIT"))


def page_of(header: str) -> str:
    """The page of a header that `pages` has, below that of all."""
    return header.removesuffix(".h") + ".md"


def _comment_text(lines: list[str]) -> str:
    """A comment without its stars."""
    text = re.sub(r"^/\*+ ?|\s*\*/$", "", "\n".join(lines).strip())
    return "\n".join(re.sub(r"^\s*\* ?", "", line) for line in text.split("\n")).strip("\n")


def _blocks(lines: list[str]) -> list[tuple[str, list[str]]]:
    """("comment", "code" or "gap", its lines) of a header, in order."""
    found: list[tuple[str, list[str]]] = []
    i = 0
    while i < len(lines):
        start, line, kind = i, lines[i], "code"
        if not line.strip():
            kind = "gap"
        elif _LEFT_OUT.match(line) or line.startswith("#"):
            while lines[i].endswith("\\"):
                i += 1
            kind = "" if _LEFT_OUT.match(line) else "code"
        elif line.startswith("/*"):
            while "*/" not in lines[i]:
                i += 1
            kind = "comment"
        else:
            i = _end_of_declaration(lines, i)
        i += 1
        if kind:
            found.append((kind, lines[start:i]))
    return found


def _end_of_declaration(lines: list[str], i: int) -> int:
    """The last line of the declaration that begins with line i."""
    depth = 0
    while i + 1 < len(lines):
        bare = re.sub(r"/\*.*?\*/", "", lines[i]).rstrip()
        depth += bare.count("{") - bare.count("}")
        if depth == 0 and bare.endswith((";", "}")):
            break
        i += 1
    return i


def pieces(text: str) -> list[Piece]:
    """The pieces of a header, in order."""
    found: list[Piece] = []
    begun = False  # whether the last piece takes a declaration that follows at once
    for kind, lines in _blocks(text.split("\n")):
        if kind == "gap":
            begun = False
        elif kind == "comment" or not begun:
            comment = _comment_text(lines) if kind == "comment" else ""
            found.append(Piece(comment, "" if comment else "\n".join(lines)))
            begun = not _SECTION.match(comment)
        else:
            found[-1].code = "\n".join(filter(None, [found[-1].code, *lines]))
    return found


def _prose(text: str, places: dict[str, str]) -> str:
    """A comment as Markdown: what is indented is shown as it is written."""
    out, part, was_drawn = [], [], False

    def end() -> None:
        lines = "\n".join(part).strip("\n")
        if lines:
            drawn = f"```text\n{textwrap.dedent(lines)}\n```"
            out.append(drawn if was_drawn else _linked(lines, places))
        part.clear()

    for line in text.split("\n"):
        is_drawn = line.startswith("  ") if line else was_drawn
        if is_drawn != was_drawn:
            end()
        was_drawn = is_drawn
        part.append(line)
    end()
    return "\n\n".join(out)


def _linked(text: str, places: dict[str, str]) -> str:
    """Text whose names lead to their declarations, and whose other characters mean nothing."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part[:1] == "`" else _with_links(part, places) for part in parts)


def _with_links(text: str, places: dict[str, str]) -> str:
    parts, end = [], 0
    for name in _NAME.finditer(text):
        place = places.get(name[0])
        shown = f"[`{name[0]}`]({place})" if place else f"`{name[0]}`"
        parts += [_escaped(text[end : name.start()]), shown]
        end = name.end()
    return "".join([*parts, _escaped(text[end:])])


def _escaped(text: str) -> str:
    text = re.sub(r"([\\*_\[\]#|])", r"\\\1", text)
    return text.replace("<", "&lt;").replace(">", "&gt;")  # which a backslash does not escape


def _page(name: str, found: list[Piece], places: dict[str, str]) -> str:
    body = [f"# {name}"]
    for piece in found:
        names, section = piece.names(), _SECTION.match(piece.comment)
        if section:
            body.append(f"## {section[1]}")
            continue
        if names:
            shown = [one for one in names if not one.endswith("_INIT")] or names
            anchors = "".join(f'<a id="{one.lower()}"></a>' for one in names[1:])
            title = ", ".join(f"`{one}`" for one in shown[:3]) + (", …" if shown[3:] else "")
            body.append(f"### {title} {{ #{names[0].lower()} }}\n{anchors}".strip())
        if piece.comment:
            own = {key: place for key, place in places.items() if key not in names}
            body.append(_prose(piece.comment, own))
        if piece.code:
            body.append(f"```c\n{piece.code}\n```")
    return "\n\n".join(body) + "\n"


def pages() -> dict[str, str]:
    """{page: its Markdown} of the headers of the C API, and the list of them."""
    headers = {path.name: pieces(path.read_text()) for path in sorted(HEADERS.glob("*.h"))}
    places = {
        name: f"{page_of(header)}#{name.lower()}"
        for header, found in headers.items()
        for piece in found
        for name in piece.names()
    }
    out = {page_of(header): _page(header, found, places) for header, found in headers.items()}
    index = ["# The C API", "", "The headers are the manual; begin with `crossdock.h`.", ""]
    for header, found in headers.items():
        first = re.split(r"\n\n|(?<=\.)\s", found[0].comment)[0].replace("\n", " ")
        about = _escaped(first.removeprefix("Crossdock: "))
        index.append(f"- [`{header}`]({page_of(header)}): {about}")
    out["index.md"] = "\n".join(index) + "\n"
    return out
