#!/usr/bin/env python3
"""Fails where an installed crossdock has loaded libsodium or Highway from outside its wheel.

Or where the wheel has them without their licences.
"""

import importlib.metadata
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
licences = {file.name for file in importlib.metadata.files("crossdock") if "bundled" in file.parts}
for name in ("libsodium", "libhwy", "nanobind"):
    if name not in licences:
        sys.exit(f"wheel: the licence of {name} is missing; there are those of {sorted(licences)}")
