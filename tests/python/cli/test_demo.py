"""crossdock demo hands over to the training program."""

from __future__ import annotations

import pathlib
import runpy
import subprocess
import sys
import sysconfig
from unittest import mock

import pytest

from commands import process, run, wide_lines

pytest.importorskip("torch")
pytest.importorskip("matplotlib")


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The end and output of the demo, whose program takes this process's place for a while only."""

    def execve(interpreter: str, command: list[str], environment: dict[str, str]) -> None:
        program = command[1]
        assert interpreter == sys.executable and pathlib.Path(program).is_file()
        with (
            mock.patch.object(sys, "argv", command[1:]),
            mock.patch.object(sys, "path", [str(pathlib.Path(program).parent), *sys.path]),
        ):
            runpy.run_path(program, run_name="__main__")

    with mock.patch("os.execve", execve):
        return run("demo", *arguments)


def test_options_and_exit_codes_are_the_program_s():
    ended = demo("--ranks", "2", "--", "--help")
    assert ended.returncode == 0
    assert ended.stdout.startswith("usage: crossdock demo ")
    ended = demo("--", "--steps", "many")
    assert ended.returncode == 2
    assert "crossdock demo: error: argument --steps: invalid int value: 'many'" in ended.stderr


TINY = (
    "--steps 4 --device cpu --sequences 4 --context 16 --hidden 32 --layers 1 --ffn 16 "
    "--sample-bytes 8"
)


def test_it_compares_writes_text_and_draws_in_lines_for_a_narrow_terminal(tmp_path: pathlib.Path):
    for run_folder in ("plain", "2-ranks"):  # as an earlier demo leaves them
        (tmp_path / run_folder).mkdir()
        (tmp_path / run_folder / "first-step-3.pt").write_bytes(b"of four ranks")
        (tmp_path / run_folder / "log.jsonl").write_text("old\n")
    text = str(pathlib.Path(sysconfig.get_paths()["stdlib"]) / "asyncio")
    options = ["--text", text, *TINY.split()]
    ended = process("demo", "--ranks", "2", "--folder", str(tmp_path), "--", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 ranks against one process without Crossdock" in ended.stdout
    assert "    | class Reader:\n    |     def read(self, " in ended.stdout
    assert ended.stdout.count("agrees") == 5
    assert wide_lines(ended.stdout.replace(str(tmp_path), "demo")) == []
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_before_the_program_starts_are_told_as_the_user_made_them():
    for ranks in (3, 16):
        ended = demo("--ranks", str(ranks))
        assert (ended.returncode, ended.stdout) == (2, "")
        said = f"crossdock: demo: --ranks {ranks}: expected one of 1, 2, 4, 8, which share 16 seq"
        assert ended.stderr.startswith(said)
    ended = demo("--steps", "5")
    assert ended.returncode == 2
    assert "go behind --, as in 'demo -- --steps ...'" in ended.stderr
    ended = demo("--ranks", "3", "--", "--sequences", "16")
    assert ended.returncode == 2 and "--sequences 16: expected a multiple of 3" in ended.stderr


@pytest.mark.parametrize(
    "folder, why", [("/proc/nope", "No such file or directory"), (__file__, "Not a directory")]
)
def test_a_folder_that_cannot_be_made_is_a_mistake_of_the_user(folder: str, why: str):
    ended = demo("--folder", folder, "--", "--device", "cpu")
    assert (ended.returncode, ended.stdout) == (2, "")
    said = f"{folder}/plain: expected a folder to write to: {why}"
    assert ended.stderr == f"crossdock demo: error: --folder: {said}\n"


@pytest.mark.parametrize("mine", ["plain/thesis.tex", "2-ranks/step-000100/common.pt"])
def test_files_of_the_user_stay(mine: str, tmp_path: pathlib.Path):
    logs = [tmp_path / run / "log.jsonl" for run in ("plain", "2-ranks")]
    for file in (*logs, tmp_path / mine):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("weeks of work")
    ended = demo("--ranks", "2", "--folder", str(tmp_path), "--", "--device", "cpu")
    assert (ended.returncode, ended.stdout) == (2, "")
    run_folder, name, *_ = pathlib.Path(mine).parts
    assert ended.stderr.splitlines()[-1] == (
        f"crossdock demo: error: --folder: {tmp_path / run_folder}: expected files of an earlier "
        f"comparison only, to overwrite; got {name}"
    )
    assert all(file.read_text() == "weeks of work" for file in (*logs, tmp_path / mine))
