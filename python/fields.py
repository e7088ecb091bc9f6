"""Writes tables of the fields of the C API's structs, of which the headers are the only list.

usage: fields.py OUTPUT HEADER...

Every struct that begins with struct_size gets a specialisation of ``Fields`` (src/fields.h).
"""

import pathlib
import re
import sys

_STRUCT = re.compile(r"^typedef struct (\w+) \{\n  size_t struct_size;\n(.*?)^\} \1;", re.M | re.S)
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_NAME = re.compile(r"(\w+)(?:\[\w+\])?[,;]")


def table(struct: str, body: str) -> str:
    """The specialisation for a struct with these declarations behind its size."""
    names = _NAME.findall(_COMMENT.sub("", body))
    fields = "".join(f'\n      Field{{"{name}", &{struct}::{name}}},' for name in names)
    return f"""template <>
struct Fields<{struct}> {{
  static constexpr const char* name = "{struct}";
  static constexpr {struct} init {struct.upper()}_INIT;
  static constexpr std::tuple list{{{fields.removesuffix(",")}}};
}};
"""


def main(output: str, *headers: str) -> None:
    """Reads the headers in their order."""
    texts = [pathlib.Path(header).read_text() for header in headers]
    tables = "\n".join(table(*found) for text in texts for found in _STRUCT.findall(text))
    pathlib.Path(output).write_text(f"#pragma once\n\nnamespace xdpy {{\n\n{tables}\n}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
