#!/usr/bin/env python3
"""Serves a model by vLLM, its ranks data-parallel with experts spread over them, in several ways.

    compare_vllm.py MODEL [--ways allgather_reducescatter 1:deepep_v2 ...] [--ranks 2]

A way is a value of ``--all2all-backend``, behind ``XD_ENGINE=`` and a colon where it runs on
Crossdock. Greedy tokens must be those of the first way, and their log-probabilities about the same.
One way runs after the other, unless ``--together`` starts all engines at once; they generate one
after the other also then. No process of theirs outlives this program, however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

WAYS = (
    "allgather_reducescatter",
    *(
        f"{engine}:deepep_{kind}"
        for engine in ("1", "deep_ep")
        for kind in ("high_throughput", "low_latency", "v2")
    ),
)
TOLERANCE = 0.1  # of log-probabilities: sums are rounded to bfloat16 in another order
_ERROR = re.compile(
    r"(?!.*EngineDead|.*Engine core)(\(.* ERROR .*\] )?[\w.]*(Error|Exception|Timeout)\b"
)
_PATIENCE = 3.0  # seconds that ranks have to end by themselves
_COUNT = 64  # ids of prompts are below


def prompts_of(rank: int) -> list[list[int]]:
    """Of each rank other ones, and another number of them: ranks end at different steps."""
    lengths = [3, 17, 1, 40, 8, 5][: 6 - 3 * (rank % 2)]
    return [
        [(rank * 7 + number * 11 + place) % _COUNT for place in range(length)]
        for number, length in enumerate(lengths)
    ]


def serve(options: argparse.Namespace) -> None:
    """A rank of one way: makes an engine, and generates when it is told to. JSON lines out."""
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    heard = os.fdopen(os.dup(1), "w", buffering=1)  # by this program
    os.dup2(2, 1)  # vLLM's words, and its processes', go to the log
    from vllm import LLM, SamplingParams

    backend = options.way.rpartition(":")[2]
    engine = LLM(
        options.model,
        skip_tokenizer_init=True,
        enable_expert_parallel=True,
        all2all_backend=backend,
        enforce_eager=not options.graphs,
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        gpu_memory_utilization=options.memory,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        async_scheduling=False,
        seed=0,
        **json.loads(options.engine_options),
    )
    prompts: Any = [{"prompt_token_ids": ids} for ids in prompts_of(options.rank)]
    greedy = SamplingParams(
        temperature=0.0, max_tokens=options.tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    for _ in range(2):  # the first run compiles, and makes groups
        print(json.dumps({"ready": True}), file=heard)
        sys.stdin.readline()
        start = time.perf_counter()
        made = [one.outputs[0] for one in engine.generate(prompts, greedy, use_tqdm=False)]
        seconds = time.perf_counter() - start
        tokens = [list(one.token_ids) for one in made]
        said = {
            "tokens": tokens,
            "logprobs": [
                [place[token].logprob for place, token in zip(one.logprobs, one.token_ids)]
                for one in made
            ],
            "seconds": seconds,
            "crossdock": engine.collective_rpc(_calls)[0],
        }
        print(json.dumps(said), file=heard)
    sys.stdin.readline()


def _leave_with(parent: int) -> None:
    """Ends this process group, in which are all that vLLM has begun, when `parent` has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _calls(_: Any) -> dict[str, Any]:
    """In a worker: the manager of its traffic, and the calls that Crossdock's groups had."""
    from vllm.distributed.parallel_state import get_ep_group

    manager: Any = getattr(get_ep_group().device_communicator, "all2all_manager", None)
    calls: dict[str, int] = {}
    if "crossdock" in sys.modules:
        from crossdock._stats import seen_groups

        for group in seen_groups([os.getpid()]):
            for operation, number in group.stats.calls.items():
                calls[operation] = calls.get(operation, 0) + number
    kind = type(manager)
    return {"manager": f"{kind.__module__}.{kind.__name__}", "calls": calls}


class Way:
    """The ranks of one way, and what they have said.

    Args:
        options: of the command line.
        name: of the way.
    """

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self.name, port = name, str(_free_port(21000 + 100 * options.ways.index(name)))
        self.engine = name.rpartition(":")[0] or "0"
        self.logs = [options.logs / f"{name.replace(':', '-')}.{rank}.log" for rank in options.each]
        self.ranks: list[subprocess.Popen[str]] = []
        for rank, log in zip(options.each, self.logs):
            log.unlink(missing_ok=True)
            environment = os.environ | {
                "XD_ENGINE": self.engine,
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_RANK_LOCAL": str(rank),
                "VLLM_DP_SIZE": str(options.ranks),
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": port,
                "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # of the function that counts calls
            }
            words = [sys.executable, __file__, *options.words, "--way", name, "--rank", str(rank)]
            self.ranks.append(
                subprocess.Popen(
                    words,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log.open("a"),
                    text=True,
                    start_new_session=True,
                )
            )

    def hear(self) -> list[dict[str, Any]]:
        """The next message of each rank.

        Raises:
            RuntimeError: a rank has ended.
        """
        heard = []
        for number, rank in enumerate(self.ranks):
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if line:
                heard.append(json.loads(line))
            else:
                lines = self.logs[number].read_text().splitlines()
                first = next((i for i, one in enumerate(lines) if _ERROR.match(one)), len(lines))
                raise RuntimeError(
                    "\n".join(
                        [
                            f"rank {number} has ended, see {self.logs[number]}",
                            *lines[max(first - 4, 0) : first + 3],
                        ]
                    )
                )
        return heard

    def go(self) -> None:
        """Lets ranks go on."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()

    def run(self) -> list[dict[str, Any]]:
        """Generates twice. The second results of each rank."""
        for _ in range(2):
            self.hear()
            self.go()
            made = self.hear()
        return made

    def end(self) -> None:
        """Lets ranks end by themselves for a while, and then ends what is left of them."""
        patience = time.monotonic() + _PATIENCE
        for rank in self.ranks:
            assert rank.stdin is not None
            with contextlib.suppress(OSError):
                rank.stdin.close()
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(patience - time.monotonic(), 0))
        self.kill()

    def kill(self) -> None:
        """Ends all these processes at once."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                os.killpg(rank.pid, signal.SIGKILL)


class Clock:
    """The seconds that all ways have together. When they are over it ends what runs.

    Args:
        seconds: how many.
        ways: those that have begun.

    Attributes:
        is_over: whether they are.
    """

    def __init__(self, seconds: float, ways: list[Way]) -> None:
        self.is_over, self._ways, self._lock = False, ways, threading.Lock()
        clock = threading.Timer(seconds, self._stop)
        clock.daemon = True
        clock.start()

    def begin(self, options: argparse.Namespace, name: str) -> Way | None:
        """A way, which begins unless it has; None if it is too late for that."""
        with self._lock:
            found = next((way for way in self._ways if way.name == name), None)
            if found is None and not self.is_over:
                found = Way(options, name)
                self._ways.append(found)
            return found

    def _stop(self) -> None:
        with self._lock:
            self.is_over = True
            for way in self._ways:
                way.kill()


def judge(way: str, made: Sequence[dict[str, Any]], want: Sequence[dict[str, Any]]) -> list[str]:
    """The mistakes in the results of a way's ranks, in words."""
    wrong = []
    for rank, (one, right) in enumerate(zip(made, want)):
        for number, (got, expected) in enumerate(zip(one["tokens"], right["tokens"])):
            if got != expected:
                wrong.append(f"rank {rank}, prompt {number}: {got}, and not {expected}")
        apart = _apart(one["logprobs"], right["logprobs"])
        if apart > TOLERANCE:
            wrong.append(f"rank {rank}: log-probabilities are {apart:.3f} apart")
        calls = sum(one["crossdock"]["calls"].values())
        if (":" in way) != (calls > 0):
            wrong.append(f"rank {rank}: {calls} calls of Crossdock, in {one['crossdock']}")
    return wrong


def _apart(some: list[list[float]], others: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(some, others) for a, b in zip(one, other))


def _line(way: str, made: Sequence[dict[str, Any]], want: Sequence[dict[str, Any]]) -> str:
    tokens = sum(len(one) for rank in made for one in rank["tokens"])
    speed = tokens / max(rank["seconds"] for rank in made)
    apart = max(_apart(a["logprobs"], b["logprobs"]) for a, b in zip(made, want))
    calls = [sum(rank["crossdock"]["calls"].values()) for rank in made]
    manager = made[0]["crossdock"]["manager"].rpartition(".")[2]
    return f"{way:<32} {speed:>9.0f} {apart:>7.3f}  {calls} {manager}"


def compare(options: argparse.Namespace) -> int:
    """Runs all ways. The number of those that failed."""
    ways: list[Way] = []
    clock = Clock(options.timeout, ways)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    failed, want = 0, None
    print(f"{'way':<32} {'tokens/s':>9} {'apart':>7}  Crossdock's calls per rank", flush=True)
    try:
        if options.together:
            for name in options.ways:
                clock.begin(options, name)
        for name in options.ways:
            way = clock.begin(options, name)
            if way is None:
                print(f"{name:<32} NOT RUN: --timeout {options.timeout:g} is over", flush=True)
                failed += 1
                continue
            try:
                made = way.run()
            except (OSError, RuntimeError) as error:
                over = f"--timeout {options.timeout:g} is over; " if clock.is_over else ""
                print(f"{name:<32} FAILED: {over}{error}", flush=True)
                failed += 1
                continue
            finally:
                way.end()
            want = want or made
            wrong = judge(name, made, want)
            failed += bool(wrong)
            print(
                *(_line(name, made, want), *(f"  WRONG: {one}" for one in wrong)),
                sep="\n",
                flush=True,
            )
    finally:
        for way in ways:
            way.kill()
    if want is not None:
        right = f"{len(options.ways) - failed} of {len(options.ways)}"
        print(f"{right} ways gave the tokens {want[0]['tokens'][0]} ...")
    return failed


def _free_port(first: int) -> int:
    """The first of some ports in a row that are free: vLLM takes the next ones as well."""
    for port in range(first, first + 90, 10):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for one in range(port, port + 10):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", one))
            return port
    raise RuntimeError(f"ports {first} to {first + 90}: expected free ones")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--together", action="store_true", help="start all engines at once")
    parser.add_argument("--graphs", action="store_true", help="let vLLM use CUDA graphs")
    parser.add_argument("--memory", type=float, default=0.05, help="of a GPU, for each engine")
    parser.add_argument("--engine-options", default="{}", help="JSON, more arguments of vLLM's LLM")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that all ways have")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.words, options.each = sys.argv[1:], range(options.ranks)
    if options.way is not None:
        serve(options)
    else:
        options.logs.mkdir(parents=True, exist_ok=True)
        sys.exit(min(compare(options), 1))


if __name__ == "__main__":
    main()
