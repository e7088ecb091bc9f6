#!/usr/bin/env python3
"""Runs clang-tidy over the sources of a build, and compiles each header for kernels alone.

usage: tidy.py CLANG_TIDY BUILD

C and C++ sources have all checks of .clang-tidy; of CUDA sources clang sees the lengths of
functions alone (nvcc has warned of the rest). ccache, where it is installed, keeps the verdicts
(verdict.sh): a source is looked at again if it, a header of it, its command or the checks have
changed.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OURS = ("bench", "examples", "python", "src", "tests", "tools")


# Words of a compiler's command that say nothing about what is checked: how code is made of it, and
# a precompiled header, which each source must do without.
UNRELATED = re.compile(r"-[Og].*|-fpch-preprocess|-Winvalid-pch")


def compiler_and_flags(command, source):
    """Returns the words of a compiler's command that matter to a check."""
    words = shlex.split(command)
    if pathlib.Path(words[0]).name == "ccache":
        del words[0]
    for option in ("-o", "-include"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    return tuple(
        word for word in words if word not in ("-c", source) and not UNRELATED.fullmatch(word)
    )


def commands(build):
    """Returns (source, compiler and flags without -c and -o), each different one once."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = pathlib.Path(entry["file"])
        if not source.is_relative_to(ROOT) or source.relative_to(ROOT).parts[0] not in OURS:
            continue  # generated, or of another project
        found[source, compiler_and_flags(entry["command"], entry["file"])] = None
    return list(found)


def kernel_headers(build, sources):
    """Returns the same for a source per header for kernels, which includes nothing else."""
    flags = next((words for source, words in sources if source.suffix == ".cu"), None)
    if flags is None:
        return []
    folder = build / "kernel_headers"
    folder.mkdir(exist_ok=True)
    made = []
    for header in sorted((ROOT / "src").rglob("*.cuh")):
        name = header.relative_to(ROOT / "src")
        source = folder / f"{str(name).replace('/', '_')}.cu"
        text = f'#include "{name}"\n'
        if not source.exists() or source.read_text() != text:
            source.write_text(text)
        made.append((source, flags))
    return made


def environment(clang_tidy):
    """Returns the environment in which ccache keeps verdicts, apart from objects."""
    version = subprocess.run([clang_tidy, "--version"], capture_output=True, check=True).stdout
    return os.environ | {
        "XD_CLANG_TIDY": str(clang_tidy),
        "CCACHE_PREFIX": str(HERE / "verdict.sh"),
        "CCACHE_NAMESPACE": "tidy-" + hashlib.sha256(version).hexdigest()[:16],
        "CCACHE_EXTRAFILES": f"{ROOT / '.clang-tidy'}:{HERE / 'verdict.sh'}",
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_NOHASHDIR": "1",
    }


def main():
    clang_tidy, build = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    sources = commands(build)
    headers = kernel_headers(build, sources)
    launcher = [shutil.which("ccache") or str(HERE / "verdict.sh")]
    variables = environment(clang_tidy)

    def finding(folder, number, source, words):
        done = subprocess.run(
            [*launcher, *words, "-c", str(source), "-o", f"{folder}/{number}.o"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=build,
            env=variables,
        )
        return f"{source}:\n{done.stdout}" if done.returncode else ""

    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        jobs = [
            pool.submit(finding, folder, number, *job)
            for number, job in enumerate([*sources, *headers])
        ]
        findings = [text for job in jobs if (text := job.result())]
    for text in findings:
        print(text)
    print(
        f"tidy: {len(sources)} sources, {len(headers)} kernel headers, {len(findings)} with faults"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
