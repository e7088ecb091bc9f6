"""The command line itself: help, exit codes, mistakes of its user."""

from __future__ import annotations

import pytest

import crossdock
from commands import QUICK, SMALL, process, run, start, wide_lines

COMMANDS = ["", "doctor", "bench", "bench ep", "bench ll", "bench gemm"]
COMMANDS += ["net-check", "top", "trace", "demo"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_command_on_a_narrow_terminal(command):
    ended = run(*command.split(), "--help", environment={"COLUMNS": "80"})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"usage: crossdock {command}".rstrip())
    assert wide_lines(ended.stdout) == []


def test_help_names_the_commands_and_exit_codes():
    text = process("--help").stdout
    for word in ("doctor", "bench", "demo", "0 done", "1 failed", "130 Ctrl-C"):
        assert word in text


def test_version_is_the_package_s():
    assert run("--version").stdout.split() == ["crossdock", crossdock.__version__]


MISTAKES = {
    "no rank": (["net-check"], "WORLD_SIZE is not set"),
    "unknown command": (["repair"], "repair"),
    "no benchmark": (["bench"], "BENCHMARK"),
    "unknown option": (["doctor", "--all"], "--all"),
    "word for a number": (["bench", "ep", "--tokens", "many"], "'many'"),
    "negative number": (["bench", "ep", "--iters", "-3"], "a whole number from 1 on"),
    "unknown layout": (["bench", "ep", "--layout", "diagonal"], "diagonal"),
    "a layout of low latency": (["bench", "ep", "--layout", "expert_slots"], "expert_slots"),
    "a layout for low latency": (["bench", "ll", "--layout", "rank_major"], "--layout"),
    "no number of tokens": (["bench", "ll", "--tokens", "1,,2"], "from 1 on, got ''"),
    "no few tokens": (["bench", "ll", "--tokens", "8,1025"], "--tokens 1025: at most 1024"),
    "no few ranks": (["bench", "ll", "--ranks", "73", "--device", "cpu"], "at most 72"),
    "columns without a scale": (["bench", "ll", "--hidden", "192"], "a multiple of 128"),
    "uneven experts": (["bench", "ep", "--ranks", "3"], "66 would be"),
    "more choices than experts": (["bench", "ep", "--topk", "65"], "--experts 64"),
    "too many choices": (["bench", "ep", "--topk", "33"], "at most 32"),
    "too many ranks": (["bench", "ep", "--ranks", "2048", "--experts", "2048"], "at most 1024"),
    "too many experts": (["bench", "ep", "--experts", "65540"], "at most 65536"),
    "too many tokens": (["bench", "ep", "--tokens", "99999999999"], "at most 67108864"),
    "too long a row": (["bench", "ep", "--hidden", "16777232"], "at most 16777216"),
    "too long a wait": (["bench", "ep", "--timeout", "99999999999"], "at most 2147483"),
    "negative seed": (["bench", "ep", "--seed", "-5"], "a whole number from 0 on, got '-5'"),
    "odd row": (["bench", "ep", "--hidden", "33", "--dtype", "fp32"], "of 4 elements of fp32"),
    "plot of another kind": (["bench", "ep", "--plot", "x.gif"], ".png, .svg, .pdf"),
    "no such folder": (["bench", "ep", "--json", "/no/such/folder/x"], "no folder /no/such/folder"),
    "a folder for a file": (["bench", "ep", "--json", "/"], "is a folder"),
    "numpy on a GPU": (["bench", "ep", "--device", "cuda", "--through", "numpy"], "--"),
}


@pytest.mark.parametrize("arguments, said", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_of_the_user_gets_one_explanation_and_code_2(arguments, said):
    ended = run(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr.splitlines()[-1]


def test_a_mistake_ends_the_process_with_code_2():
    ended = process("bench", "ep", "--ranks", "3", "--device", "cpu")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("crossdock: --experts 64: ") and ended.stderr.count("\n") == 1


def test_a_device_that_is_missing_is_named_with_the_library_s_reason():
    available, reason = crossdock.feature_available("cuda"), crossdock.feature_reason("cuda")
    if available:
        pytest.skip("this machine has GPUs")
    ended = run("bench", "ep", *SMALL, "--device", "cuda")
    assert ended.returncode == 2
    assert ended.stderr == f"crossdock: --device cuda: {reason}\n"


def test_a_reader_that_has_seen_enough_is_no_accident():
    doctor = start("doctor", "--no-trial")
    doctor.stdout.close()
    assert doctor.stderr.read() == ""
    assert doctor.wait(timeout=20) == 1


def test_results_are_shown_even_where_they_cannot_be_written():
    ended = run("bench", "ep", *QUICK, "--json", "/proc/version")
    assert ended.returncode == 1
    assert "\ndispatch_bwd " in ended.stdout
    assert ended.stderr.startswith("crossdock: --json /proc/version: ")
    assert ended.stderr.count("\n") == 1


def test_alone_it_prints_its_help():
    ended = run()
    assert ended.returncode == 0 and "commands:" in ended.stdout
