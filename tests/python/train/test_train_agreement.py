"""Training with the experts spread over ranks is what one process without Crossdock does."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_lm import comparison, launch
from moe_lm.compare import SAME_CHOICES_STEPS, SAME_CHOICES_TOLERANCE, compare, read_log
from moe_lm.trainer import PROMPT
from runs import TEXT, run, small
from support import run_ranks
from train_moe_lm import main


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a run in one process without Crossdock."""
    folder = tmp_path_factory.mktemp("plain")
    run_ranks(1, run, small(folder, plain=True, save_first_step=True))
    return folder


@pytest.mark.parametrize("ranks, tensor_parallel", [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_losses_and_gradients_agree_with_one_process(
    ranks: int, tensor_parallel: int, plain: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    settings = small(
        tmp_path, save_first_step=True, sample_bytes=20, tensor_parallel=tensor_parallel
    )
    outcomes = run_ranks(ranks, run, settings)
    checks = compare(plain, tmp_path)
    assert all(check.holds for check in checks), checks
    # The seed is one in which no token goes to another expert: every step is held to the rounding.
    assert f"losses of the {settings.steps} steps of equal choices" in [c.what for c in checks]
    # Every rank has the same parameters except for its experts and heads, and rank 0 alone writes
    # text.
    for rank, outcome in enumerate(outcomes):
        assert outcome.held_out == outcomes[0].held_out
        for name, value in outcome.parameters.items():
            of_heads = name.endswith(("qkv.weight", "out.weight"))
            same = outcomes[rank % tensor_parallel if of_heads else 0].parameters[name]
            assert ".w_" in name or (value == same).all(), name
    assert [len(outcome.sample) for outcome in outcomes] == [len(PROMPT) + 20] + [0] * (ranks - 1)


def write_log(folder: pathlib.Path, records: list[dict[str, Any]]) -> None:
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def change_loss(folder: pathlib.Path) -> None:
    """One loss becomes larger by more than is allowed where choices are equal."""
    records = read_log(folder)
    records[2]["loss"] *= 1 + 10 * SAME_CHOICES_TOLERANCE
    write_log(folder, records)


def change_choices(folder: pathlib.Path) -> None:
    """Tokens of the third step go to other experts, as they may later on."""
    records = read_log(folder)
    records[SAME_CHOICES_STEPS - 1]["load"][1].reverse()
    write_log(folder, records)


def change_first_step(folder: pathlib.Path, name: str) -> None:
    """The second row of a tensor becomes larger by more than is allowed."""
    path = folder / "first-step-0.pt"
    tensors = torch.load(path)
    *_, tensor = tensors[name]
    tensor[1].mul_(1 + 100 * SAME_CHOICES_TOLERANCE)
    torch.save(tensors, path)


def change_gradient(folder: pathlib.Path) -> None:
    """The gradient of one expert's matrix."""
    change_first_step(folder, "blocks.1.experts.experts.w_in")


def change_logits(folder: pathlib.Path) -> None:
    change_first_step(folder, "logits")


@pytest.mark.parametrize(
    "change, check",
    [
        (None, None),
        (change_logits, 0),
        (change_gradient, 1),
        (change_loss, 2),
        (change_choices, 2),
    ],
)
def test_a_disagreement_is_found(
    change: Callable[[pathlib.Path], None] | None,
    check: int | None,
    plain: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if change is not None:
        change(tmp_path)
    assert [c.holds for c in compare(plain, tmp_path)] == [i != check for i in range(5)]


def run_main(*arguments: Any) -> int:
    """Runs the program in this process; its ranks have processes of their own."""
    return main([str(word) for word in arguments])


SMALL = "--device cpu --sequences 4 --context 16 --hidden 32 --layers 1 --ffn 16 --sample-bytes 8"
TINY = ("--text", TEXT, *SMALL.split())


@pytest.mark.parametrize(
    "gpus, ranks, expected, words",
    [
        (0, 4, (4, "cpu"), ""),
        (1, 4, (4, "cpu"), "On the CPU: 4 ranks take a GPU each, and this machine has 1.\n"),
        (1, 1, (1, "cuda"), ""),
        (2, 4, (2, "cuda"), ""),
        (4, 4, (4, "cuda"), ""),
    ],
)
def test_demo_says_when_it_leaves_a_gpu_alone(
    gpus: int,
    ranks: int,
    expected: tuple[int, str],
    words: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "num_gpus", lambda: gpus)
    assert comparison._demo_ranks(small(tmp_path, device="auto"), ranks) == expected
    assert capsys.readouterr().out == words


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("--ranks", 3), "--sequences 16: expected a multiple of 3, the ranks"),
        (("--ranks", 4, "--experts", 6), "--experts 6: expected a multiple of 4, the ranks"),
        (("--plain",), "--plain: expected --ranks 1"),
        (("--tensor-parallel", 3), "--ranks 4: expected a multiple of 3, for --tensor-parallel"),
        (("--tensor-parallel", 4, "--heads", 2), "--heads 2: expected a multiple of 4, for"),
        (("--topk", 9), "--topk 9: expected 1 to 8, the experts"),
        (("--heads", 0), "--heads 0: expected at least 1"),
        (("--hidden", 100), "--hidden 100: expected a multiple of 8"),
        (("--folder", "/proc/no"), "--folder: /proc/no: expected a folder to write to: No such"),
        (("--folder", __file__), f"--folder: {__file__}: expected a folder to write to: File"),
    ],
    ids=str,
)
def test_a_users_mistake_is_named(
    arguments: tuple[Any, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_main(*arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_check_compares_ranks_of_tensor_parallelism(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mesh = ("--ranks", 2, "--tensor-parallel", 2)
    assert run_main("--check", *mesh, "--folder", tmp_path, "--steps", 2, *TINY) == 0
    said = capfd.readouterr().out
    assert "2 ranks against one process without Crossdock" in said
    assert said.count("agrees") == 5


def test_resume_with_another_model_says_what_differs(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, run, small(tmp_path, layers=1, steps=1, save_every=1))
    other = ("--ranks", 1, "--folder", tmp_path, "--steps", 1, *TINY, "--hidden", 16)
    assert run_main(*other, "--resume") == 1
    said = capfd.readouterr().err
    assert "current: torch.Size([256, 16])" in said and "Traceback" not in said
