#!/usr/bin/env python3
"""Prints what the parts of a run of `.ci/run` took beside their budgets, and the runners' results.

usage: parts.py BUDGET PARTS BUILD SECONDS

BUDGET has a line `part seconds` per part, for a bare machine of 2 cores. PARTS has the lines of
tools/part.sh. Tests of BUILD are parts by their label: what they took one by one, though they run
side by side. A part that took half as long again as its budget, or has none,
is warned of; a machine that is slower in all parts is no reason for a warning to be believed.
"""

import collections
import json
import pathlib
import re
import subprocess
import sys

# Parts of less are not worth a line of their own, nor a warning.
LEAST = 5
OVER = 1.5

# A test in ctest's output.
ENDED = re.compile(
    r"^ *\d+/\d+ Test +#\d+: (\S+) [ .]*(?:\*\*\*)?(\w+).*? ([\d.]+) sec", re.MULTILINE
)


def budgets(path):
    """Returns the seconds of each part."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if words and words[0] != "#"}


def parts(path):
    """Returns the seconds of each part that ran, in the order in which they began."""
    seconds = collections.Counter()
    if path.exists():
        for line in path.read_text().splitlines():
            name, took = line.split("\t")
            seconds[name] += int(took)
    return seconds


def tests(build):
    """Returns the seconds of tests by label, and how many have passed, failed and been skipped."""
    seconds, ended = collections.Counter(), collections.Counter()
    log = build / "tests.log"
    if not log.exists():
        return seconds, ended
    listed = subprocess.run(
        ["ctest", "--test-dir", build, "--show-only=json-v1"], capture_output=True, check=True
    )
    labels = {
        test["name"]: item["value"][0]
        for test in json.loads(listed.stdout)["tests"]
        for item in test["properties"]
        if item["name"] == "LABELS"
    }
    for name, result, took in ENDED.findall(log.read_text(errors="replace")):
        label = labels.get(name, "other")
        seconds[name if label == "python" else f"tests.{label}"] += float(took)
        ended[result] += 1
    return seconds, ended


def main():
    budget = budgets(pathlib.Path(sys.argv[1]))
    rows = parts(pathlib.Path(sys.argv[2]))
    of_tests, ended = tests(pathlib.Path(sys.argv[3]))
    rows.update({name: round(took) for name, took in of_tests.items()})
    rows["all"] = int(sys.argv[4])
    print(f"\n{'part':<24}{'seconds':>8}{'budget':>8}")
    warnings = []
    for name, took in rows.items():
        if took < LEAST and name not in budget:
            continue
        print(f"{name:<24}{took:>8}{budget.get(name, '-'):>8}")
        if name not in budget:
            warnings.append(f"{name} took {took} s and has no budget")
        elif took > max(OVER * budget[name], LEAST):
            warnings.append(f"{name} took {took} s of its {budget[name]} s")
    for warning in warnings:
        print(f"warning: {warning} (.ci/budget.tsv)")
    if ended:
        passed, skipped = ended.pop("Passed", 0), ended.pop("Skipped", 0)
        print(f"ctest: {passed} passed, {sum(ended.values())} failed, {skipped} skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
