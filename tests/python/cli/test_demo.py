"""crossdock demo hands over to the training program."""

from __future__ import annotations

import pytest

from commands import run
from crossdock.cli import _demo

torch = pytest.importorskip("torch")


def test_the_training_program_is_found():
    assert _demo.program().is_file()


def test_options_and_exit_codes_are_the_program_s():
    ended = run("demo", "--ranks", "2", "--", "--help")
    assert ended.returncode == 0
    assert ended.stdout.startswith("usage: train_moe_lm.py")
    ended = run("demo", "--", "--steps", "many")
    assert ended.returncode == 2
    assert "argument --steps: invalid int value: 'many'" in ended.stderr
