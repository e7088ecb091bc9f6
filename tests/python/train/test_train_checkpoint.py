"""A run that goes on from a checkpoint is the run that was never interrupted."""

from __future__ import annotations

import errno
import io
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import crossdock.torch as xd
from crossdock.torch import _checkpoint_files
from crossdock.torch._agreement import from_rank_0, ranks_where
from moe_lm.compare import read_log
from runs import Outcome, run, small
from support import Rank, on_ranks, run_ranks

SAVED_AT, STEPS = 3, 6
STOPPED = {"steps": SAVED_AT, "schedule_steps": STEPS, "save_every": SAVED_AT}


def gathered(outcomes: list[Outcome]) -> dict[str, np.ndarray]:
    """All parameters, with experts put together from all ranks."""
    return {
        name: np.concatenate([outcome.parameters[name] for outcome in outcomes])
        if ".w_" in name
        else value
        for name, value in outcomes[0].parameters.items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[Outcome]]:
    """An uninterrupted run of 4 ranks: its folder, with a checkpoint in the middle, and its end."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_ranks(4, run, small(folder, steps=STEPS, save_every=SAVED_AT))


def resumed(ranks: int, folder: pathlib.Path, saved: pathlib.Path) -> list[Outcome]:
    """Goes on from the checkpoint in the middle of the run in folder `saved`."""
    name = f"step-{SAVED_AT:06d}"
    shutil.copytree(saved / name, folder / name)
    return run_ranks(ranks, run, small(folder, steps=STEPS, resume=True))


def test_resume_equals_the_uninterrupted_run(whole, tmp_path: pathlib.Path) -> None:
    folder, expected = whole
    run_ranks(4, run, small(tmp_path, **STOPPED))
    outcomes = run_ranks(4, run, small(tmp_path, steps=STEPS, resume=True))
    for got, wanted in zip(gathered(outcomes).items(), gathered(expected).items()):
        assert got[0] == wanted[0] and np.array_equal(got[1], wanted[1]), got[0]
    losses = [[record["loss"] for record in read_log(path)] for path in (tmp_path, folder)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoint_of_4_ranks_goes_on_on_fewer(whole, ranks: int, tmp_path: pathlib.Path) -> None:
    folder, expected = whole
    outcomes = resumed(ranks, tmp_path, folder)
    wanted = [record["loss"] for record in read_log(folder)][SAVED_AT:]
    got = [record["loss"] for record in read_log(tmp_path)]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for name, value in gathered(outcomes).items():
        # Adam turns the rounding of a gradient near zero into a step of any sign.
        np.testing.assert_allclose(value, gathered(expected)[name], atol=2e-3, err_msg=name)


def test_checkpoint_of_1_rank_goes_on_on_4(whole, tmp_path: pathlib.Path) -> None:
    folder, _ = whole
    (tmp_path / "one").mkdir()
    (tmp_path / "four").mkdir()
    run_ranks(1, run, small(tmp_path / "one", **STOPPED))
    resumed(4, tmp_path / "four", tmp_path / "one")
    wanted = [record["loss"] for record in read_log(folder)][SAVED_AT:]
    np.testing.assert_allclose(
        [record["loss"] for record in read_log(tmp_path / "four")], wanted, rtol=1e-5
    )


# ---- The checkpoint itself -----------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where a checkpoint may be saved."""
    return tmp_path / "saved"


class Model(torch.nn.Module):
    """A layer of experts, and a parameter and a buffer that every rank has."""

    def __init__(self, comm: xd.Comm, num_experts: int = 8) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.layer = xd.MoELayer(
            16, 8, num_experts, 2, comm=comm, max_tokens_per_rank=4, dtype=torch.float32
        )


def in_distributed(me: Rank, check, *args) -> None:
    dist.init_process_group("gloo")
    try:
        with xd.init(device="cpu") as comm:
            check(me, comm, *args)
    finally:
        dist.destroy_process_group()


def together(num_ranks: int, check, *args) -> None:
    """Runs ``check(me, comm, *args)`` on ranks that torch.distributed joins."""
    run_ranks(num_ranks, in_distributed, check, *args)


def save_numbered(me: Rank, comm: xd.Comm, path: pathlib.Path, **options) -> None:
    """A checkpoint in which every expert's values are its number, and so is its momentum."""
    model = Model(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model.seen.fill_(7)
    with torch.no_grad():
        model.scale.fill_(1.5)
        for local in range(model.layer.num_local_experts):
            number = model.layer.first_expert + local
            xd.local_tensor(model.layer.experts.w_in)[local] = number
            xd.local_tensor(model.layer.experts.w_out)[local] = 10 + number
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = 100 + parameter.detach()
    xd.save_checkpoint(
        path, model, optimizer, extra={"step": 5, "random": torch.arange(3)}, **options
    )


def load_numbered(me: Rank, comm: xd.Comm, path: pathlib.Path) -> None:
    model = Model(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1)
    extra = xd.load_checkpoint(path, model, optimizer)
    assert extra["step"] == 5 and torch.equal(extra["random"], torch.arange(3))
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[0]["momentum"] == 0.9
    assert (model.seen == 7).all() and (model.scale == 1.5).all()
    for local in range(model.layer.num_local_experts):
        number = model.layer.first_expert + local
        assert (xd.local_tensor(model.layer.experts.w_in)[local] == number).all()
        assert (xd.local_tensor(model.layer.experts.w_out)[local] == 10 + number).all()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        expected = 100 + xd.local_tensor(parameter.detach())
        assert torch.equal(xd.local_tensor(state["momentum_buffer"]), expected)


def adafactor_after_a_step(model: Model) -> torch.optim.Optimizer:
    """Has a mean of each row and of each column of an expert, besides the step's number."""
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def means(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of experts by name, with the number of the first one that is in it."""
    layer = model.layer
    return {
        f"{name} {key}": (value, layer.first_expert if len(local) < layer.num_experts else 0)
        for name, parameter in (("in", layer.experts.w_in), ("out", layer.experts.w_out))
        for key, value in optimizer.state[parameter].items()
        if key != "step"
        for local in [xd.local_tensor(value)]
    }


def save_adafactor(me: Rank, comm: xd.Comm, path: pathlib.Path) -> None:
    """A checkpoint in which the means of every expert are its number."""
    model = Model(comm, num_experts=4)
    optimizer = adafactor_after_a_step(model)
    for value, first in means(model, optimizer).values():
        for local, expert in enumerate(xd.local_tensor(value)):
            expert.fill_(1 + first + local)
    xd.save_checkpoint(path, model, optimizer)


def load_adafactor(me: Rank, comm: xd.Comm, path: pathlib.Path) -> None:
    models = [Model(comm, num_experts=4), Model(comm, num_experts=4)]
    expected = means(models[0], adafactor_after_a_step(models[0]))
    optimizer = torch.optim.Adafactor(models[1].parameters(), lr=0.5)
    xd.load_checkpoint(path, models[1], optimizer)
    for name, (value, first) in means(models[1], optimizer).items():
        made = expected[name][0]
        assert (type(value), value.shape) == (type(made), made.shape), name
        assert getattr(value, "placements", None) == getattr(made, "placements", None), name
        local = xd.local_tensor(value)
        numbers = 1 + first + torch.arange(len(local), dtype=local.dtype)
        assert torch.equal(local, numbers[:, None, None].expand_as(local)), name
    for parameter in models[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("saved_on, loaded_on", [(4, (4, 2, 1)), (2, (4,)), (1, (2,))], ids=str)
@pytest.mark.parametrize(
    "save, load",
    [(save_numbered, load_numbered), (save_adafactor, load_adafactor)],
    ids=["numbers", "means of rows and columns"],
)
def test_state_lands_on_the_rank_that_holds_its_expert(
    save: Any, load: Any, saved_on: int, loaded_on: tuple[int, ...], path: pathlib.Path
) -> None:
    together(saved_on, save, path)
    for ranks in loaded_on:
        together(ranks, load, path)


def save_codes(me: Rank, comm: xd.Comm, path: pathlib.Path) -> None:
    """State of which nothing says how experts divide it, and a number that all have in common."""
    model = Model(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.state[model.layer.experts.w_in] = {"codes": torch.arange(3), "step": torch.ones(1)}
    xd.save_checkpoint(path, model, optimizer)


def load_codes(me: Rank, comm: xd.Comm, path: pathlib.Path, refused: bool) -> None:
    model = Model(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = xd.local_tensor(model.layer.experts.w_in).clone()
    if refused:
        with pytest.raises(ValueError, match=r"'codes' of layer.experts.w_in has shape \(3,\)"):
            xd.load_checkpoint(path, model, optimizer)
        assert torch.equal(before, xd.local_tensor(model.layer.experts.w_in))
    else:
        xd.load_checkpoint(path, model, optimizer)
        assert optimizer.state[model.layer.experts.w_in]["codes"].tolist() == [0, 1, 2]


def test_state_that_cannot_be_divided_is_named_on_another_number_of_ranks(
    path: pathlib.Path,
) -> None:
    together(2, save_codes, path)
    together(2, load_codes, path, False)
    together(1, load_codes, path, True)


def refuse_other_models(me: Rank, comm: xd.Comm, path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="experts 0 to 15"):
        xd.load_checkpoint(path, Model(comm, num_experts=16))
    other = Model(comm)
    other.more = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"lacks \['more'\]"):
        xd.load_checkpoint(path, other)
    other = Model(comm)
    other.scale = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"scale: expected shape \(4,\), .* has \(3,\)"):
        xd.load_checkpoint(path, other)
    with pytest.raises(FileExistsError, match="expected a new folder"):
        xd.save_checkpoint(path, Model(comm))


def renamed_layer(comm: xd.Comm) -> Model:
    """A model with the same layers under other names."""
    model = Model(comm)
    model.other = model.layer
    del model.layer
    return model


def state_of(part: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
    return part["optimizer"]["state"][name]


FIRST, SECOND, COMMON, W_IN = "experts-0-4.pt", "experts-4-8.pt", "common.pt", "layer.experts.w_in"
OTHER = {"momentum_buffer": torch.ones(7)}
# Damages to a file of a checkpoint, by name, and the text that loading it says behind its name.
DAMAGE: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    (FIRST, lambda part: part["model"].pop(W_IN), W_IN),
    (SECOND, lambda part: part["model"].pop(W_IN), W_IN),
    (
        SECOND,
        lambda part: part["model"].update({W_IN: torch.ones(2, 16, 16)}),
        r"has \(2, 16, 16\)",
    ),
    (FIRST, lambda part: part.update(model=3), "expected tensors by name"),
    (FIRST, lambda part: part.update(first=1), "is of other experts: 1 to 3"),
    (SECOND, lambda part: part.update(optimizer=None), "lacks the optimiser's state"),
    (FIRST, lambda part: part["optimizer"]["state"].clear(), W_IN),
    (SECOND, lambda part: part["optimizer"]["state"].clear(), W_IN),
    (SECOND, lambda part: state_of(part, W_IN).clear(), "lacks .'momentum_buffer'"),
    (FIRST, lambda part: state_of(part, W_IN).update(OTHER), r"got .'momentum_buffer': \[7\]"),
    (COMMON, lambda part: state_of(part, "scale").update(OTHER), r"got .*_buffer': \[7\]"),
    (COMMON, lambda part: part.pop("extra"), "lacks .'extra'"),
]


def refuse_damaged_parts(me: Rank, comm: xd.Comm, path: pathlib.Path) -> None:
    model = Model(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def refuse(file: str, text: str) -> None:
        with pytest.raises(ValueError, match=f"{re.escape(str(path / file))}.*{text}"):
            xd.load_checkpoint(path, model, optimizer)

    common, experts = path / COMMON, path / FIRST
    whole = {file: file.read_bytes() for file in path.iterdir()}
    torch.save([1, 2, 3], no_part := io.BytesIO())
    for file, damaged, text in (
        *((experts, whole[experts][:-cut], "is damaged") for cut in (2, 10, 1000)),
        (experts, whole[experts][: len(whole[experts]) // 2], "is damaged"),
        (experts, b"PK\x03\x04 cut off", "is damaged"),
        (experts, whole[common], "lacks .'first', 'end'"),
        (common, whole[experts], "lacks .'format'"),
        (common, b"\x01\x02" * 50, "is damaged"),
        (common, b"", "is damaged"),
        (common, no_part.getvalue(), "is no part of a checkpoint"),
    ):
        file.write_bytes(damaged)
        refuse(file.name, text)
        file.write_bytes(whole[file])
    for name, change, text in DAMAGE:
        part = torch.load(path / name)
        change(part)
        torch.save(part, path / name)
        refuse(name, text)
        (path / name).write_bytes(whole[path / name])
    with pytest.raises(
        ValueError, match=r"it lacks \['other.experts.w_in', .*'layer.experts.w_in'"
    ):
        xd.load_checkpoint(path, renamed_layer(comm))
    with pytest.raises(FileNotFoundError, match="expected the folder of a checkpoint"):
        xd.load_checkpoint(common, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_what_does_not_fit_is_named_and_nothing_overwritten(path: pathlib.Path) -> None:
    together(2, save_numbered, path)
    together(2, refuse_other_models, path)
    together(1, refuse_damaged_parts, path)
    together(2, load_numbered, path)


def fill_disk_of_rank_1(me: Rank, comm: xd.Comm, path: pathlib.Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    if me.rank == 1:
        with mock.patch("os.fsync", side_effect=full), pytest.raises(OSError, match="No space"):
            xd.save_checkpoint(path, Model(comm))
    else:
        with pytest.raises(RuntimeError, match="another rank could not .*: rank 1"):
            xd.save_checkpoint(path, Model(comm))


def test_a_rank_that_cannot_write_fails_all_and_leaves_no_checkpoint(path: pathlib.Path) -> None:
    together(2, fill_disk_of_rank_1, path)
    assert not list(path.parent.iterdir())
    together(2, save_numbered, path)
    together(2, load_numbered, path)


def miss_files(me: Rank, comm: xd.Comm, path: pathlib.Path) -> None:
    """One rank's host shows it nothing of what others have written, as network file systems do."""
    if me.rank == 1:
        with (
            mock.patch.object(pathlib.Path, "iterdir", lambda self: iter(())),
            mock.patch.object(pathlib.Path, "exists", lambda self: False),
        ):
            save_numbered(me, comm, path)
    else:
        save_numbered(me, comm, path)


def test_what_a_rank_sees_of_the_folder_decides_nothing(path: pathlib.Path) -> None:
    together(2, miss_files, path)
    together(1, load_numbered, path)


def without_distributed(me: Rank, path: pathlib.Path) -> None:
    with xd.init(device="cpu") as comm:
        save_numbered(me, comm, path)
        with pytest.raises(FileExistsError, match="expected a new folder"):
            save_numbered(me, comm, path)


def test_saving_needs_no_torch_distributed(path: pathlib.Path) -> None:
    run_ranks(2, without_distributed, path)
    together(1, load_numbered, path)


@on_ranks(4)
def test_ranks_agree(me: Rank) -> None:
    dist.init_process_group("gloo")
    try:
        for ranks in (1, 3, 4):
            some = dist.new_group(list(range(ranks)))
            if me.rank < ranks:
                agree(some, me.rank, ranks)
    finally:
        dist.destroy_process_group()


def agree(process_group: dist.ProcessGroup, rank: int, num_ranks: int) -> None:
    with xd.init(process_group, device="cpu") as comm:
        # The smallest group there can be: one token, one expert of each.
        group = xd.EpGroup(
            num_experts=num_ranks,
            hidden=16,
            max_topk=1,
            max_tokens_per_rank=1,
            dtype=torch.uint8,
            recv_capacity=1,
            comm=comm,
        )
        assert ranks_where(group, rank in (0, 2)) == [one for one in (0, 2) if one < num_ranks]
        assert from_rank_0(group, bytes([rank] * 16)) == bytes(16)


def test_a_folder_that_appears_in_the_last_moment_is_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "common.pt").write_text(folder.name)
    monkeypatch.setattr(pathlib.Path, "exists", lambda self: False)
    with pytest.raises(FileExistsError, match="has appeared while this checkpoint was written"):
        _checkpoint_files.give_name(mine, theirs)
    assert (theirs / "common.pt").read_text() == "theirs"


def save_on_a_mesh(me: Rank, path: pathlib.Path) -> None:
    """Four ranks, two by two, call it together; then each pair for itself, which cannot be."""
    dist.init_process_group("gloo")
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        with xd.init(mesh["expert"], device="cpu") as comm:
            save_numbered(me, comm, path / "together", replicas=mesh["data"])
            assert (path / "together" / "common.pt").exists()
            with pytest.raises(
                (FileExistsError, RuntimeError),
                match="expected a new folder|the "
                "replica that writes could not: path: expected a new folder",
            ):
                save_numbered(me, comm, path / "together", replicas=mesh["data"])
            dist.barrier()
            try:
                save_numbered(me, comm, path / "apart")
                saved = True
            except (FileExistsError, OSError, RuntimeError) as error:
                # A rank that comes late finds a folder that is there, or has come meanwhile.
                known = ("appeared while", "another rank", "expected a new folder")
                assert any(text in str(error) for text in known), error
                saved = False
            verdicts: list[bool] = [False] * 4
            dist.all_gather_object(verdicts, saved)
            assert verdicts in ([True, True, False, False], [False, False, True, True]), verdicts
            assert sorted(file.name for file in path.iterdir()) == ["apart", "together"]
    finally:
        dist.destroy_process_group()


def test_on_a_mesh_all_ranks_save_together_and_replicas_never_lose_parts(
    tmp_path: pathlib.Path,
) -> None:
    run_ranks(4, save_on_a_mesh, tmp_path)
    for folder in ("together", "apart"):
        together(1, load_numbered, tmp_path / folder)
