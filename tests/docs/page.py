#!/usr/bin/env python3
"""Compares a page of docs/ with the program whose output it quotes.

  page.py [--update] PAGE COMMAND...

The program prints sections, each after a line "=== NAME". In the page a section is a code block
whose info string is "text run=NAME". Every section must be quoted, word for word. --update writes
the program's output into the page's blocks instead.
"""

import difflib
import pathlib
import re
import subprocess
import sys

BLOCK = re.compile(r"^```text run=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections(output):
    parts = re.split(r"^=== (\S+)\n", output, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def differences(quoted, printed):
    for name in sorted(quoted.keys() | printed.keys()):
        if name not in printed:
            yield f"{name}: the page quotes it, the program does not print it"
        elif name not in quoted:
            yield f"{name}: the program prints it, the page does not quote it"
        elif quoted[name] != printed[name]:
            lines = difflib.unified_diff(
                quoted[name].splitlines(),
                printed[name].splitlines(),
                "page",
                "program",
                lineterm="",
            )
            yield f"{name}:\n" + "\n".join(lines)


def main():
    arguments = sys.argv[1:]
    update = arguments[0] == "--update"
    page, *command = arguments[1:] if update else arguments
    page = pathlib.Path(page)
    text = page.read_text()
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    printed = sections(run.stdout)
    if update:
        page.write_text(
            BLOCK.sub(lambda m: f"```text run={m[1]}\n{printed.get(m[1], m[2])}```", text)
        )
        return 0
    found = list(differences(dict(BLOCK.findall(text)), printed))
    print("\n".join(found + [f"{page.name}: {len(printed)} blocks, {len(found)} differences"]))
    return 1 if found or not printed else 0


if __name__ == "__main__":
    sys.exit(main())
