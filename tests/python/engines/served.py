"""Set-up of the tests that serve a whole model: they run the programs of ``examples/serving``."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import crossdock
from engines import PATHS, installed

_ROOT = pathlib.Path(__file__).parents[3]
SERVING = _ROOT / "examples" / "serving"
SECONDS = 900  # of imports, in ten processes


def environment(
    folder: pathlib.Path, *paths: str, group: str = "vllm.general_plugins"
) -> dict[str, str]:
    """Variables by which an engine finds Crossdock's plug-in, and what it imports.

    Args:
        folder: an empty one.
        paths: more folders of ``PYTHONPATH``.
        group: of entry points.
    """
    # Not sys.path: tests have a folder deep_ep, which vLLM would take for DeepEP.
    own = str(pathlib.Path(os.path.abspath(crossdock.__file__)).parents[1])
    found = [installed(folder, group), *paths, *PATHS, own]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(found),
        "VLLM_DEEPEP_BUFFER_SIZE_MB": "16",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }


def run(folder: pathlib.Path, environment: dict[str, str], program: str, *words: str) -> str:
    """Runs a program of ``examples/serving`` in a folder. Returns its output."""
    done = subprocess.run(
        [sys.executable, SERVING / program, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS + 60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def ways_agree(
    folder: pathlib.Path, environment: dict[str, str], ways: Sequence[str], *words: str
) -> None:
    """Makes the model, and has vLLM serve it in these ways, of which each must give its tokens."""
    run(folder, environment, "tiny_moe.py", "tiny")
    limits = ("--logs", "logs", "--timeout", str(SECONDS))
    said = run(folder, environment, "compare_vllm.py", "tiny", *limits, *words, "--ways", *ways)
    assert f"{len(ways)} of {len(ways)} ways gave the tokens" in said, said
    print(said)


class Server:
    """An engine's server as a page of the documentation has it, and requests to it.

    Attributes:
        group: the process group in which are all that it has begun.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: pathlib.Path, url: str) -> None:
        self.group, self._process, self._log, self._url = process.pid, process, log, url

    def text(self) -> str:
        """Its log."""
        return self._log.read_text(errors="replace")

    def wait(self) -> None:
        """Waits until it takes requests."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            assert self._process.poll() is None, self.text()[-5000:]
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=10):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"no answer in {SECONDS} s: {self.text()[-5000:]}")

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Its answer."""
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.load(answer)

    def processes(self) -> list[int]:
        """The numbers of the processes in its group that have not ended."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            except (OSError, ValueError):  # it has just ended
                continue
            if int(group) == self.group and state not in "ZX":
                found.append(int(path.parent.name))
        return found

    def end(self) -> list[int]:
        """Tells its first process to end. Returns those that this kills five minutes later."""
        self._process.terminate()
        left = self.processes()
        until = time.monotonic() + 300
        while left and time.monotonic() < until:
            self._process.poll()
            time.sleep(0.1)
            left = self.processes()
        if left:
            os.killpg(self.group, signal.SIGKILL)
        self._process.wait(60)
        return left


def words_of(name: str, begin: str) -> tuple[dict[str, str], list[str]]:
    """The variables and the words of the server's command line that begins so on a page."""
    return _split(_block(name, begin)[0])


def _block(name: str, begin: str) -> list[list[str]]:
    """The words of each command in the block of a page that begins so, and serves the model."""
    text = (_ROOT / "docs" / name).read_text()
    found = re.search(rf"^```\n({begin}[^`]* tiny .*?)^```", text, re.M | re.S)
    assert found is not None
    return [shlex.split(line) for line in found[1].replace("\\\n", " ").splitlines()]


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Its variables, and the words from its program on."""
    program = next(place for place, word in enumerate(words) if "=" not in word)
    return dict(word.split("=", 1) for word in words[:program]), words[program:]


class Page:
    """The commands by which a page of the documentation serves the model of ``tiny_moe.py``.

    Attributes:
        variables, words: of the server's command line, up to its program.
        path, body: of the request.
    """

    def __init__(self, name: str) -> None:
        serve, curl = _block(name, "XD_ENGINE=1 ")
        self.variables, self.words = _split(serve)
        assert curl[0] == "curl"
        self.path = re.sub("^http://localhost:[0-9]+", "", curl[1])
        self.body: dict[str, Any] = json.loads(curl[curl.index("-d") + 1])


@contextmanager
def server(
    folder: pathlib.Path, environment: dict[str, str], module: str, words: Sequence[str]
) -> Iterator[Server]:
    """A server of an engine; none of its processes stays.

    Args:
        folder: where it runs.
        environment: of `environment`, and the page's.
        module: its program.
        words: of its command line.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    log = folder / "serve.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words, "--port", port],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    made = Server(process, log, f"http://127.0.0.1:{port}")
    try:
        yield made
    finally:
        made.end()
