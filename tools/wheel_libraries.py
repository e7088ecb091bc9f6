#!/usr/bin/env python3
"""Fails where an installed crossdock has loaded libsodium or Highway from outside its wheel."""

import pathlib
import sys

import crossdock

site = pathlib.Path(crossdock.__file__).resolve().parents[1]
lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
loaded = {line.split()[-1] for line in lines if "/" in line}
found = sorted(path for path in loaded if "libsodium" in path or "libhwy" in path)
for name in ("libsodium", "libhwy"):
    mine = [path for path in found if name in path and path.startswith(str(site))]
    if not mine:
        sys.exit(f"wheel: {name} is not the wheel's own: {found}")
foreign = [path for path in found if not path.startswith(str(site))]
if foreign:
    sys.exit(f"wheel: libraries of the system are in use: {foreign}")
