"""The runs of a comparison, one after the other, and what they show."""

from __future__ import annotations

from . import launch
from .compare import Check, compare, read_log
from .folders import make_room
from .settings import Settings
from .trainer import train


def verify(settings: Settings, all_ranks: tuple[int, ...]) -> int:
    """Holds each number of ranks against one process without Crossdock; returns the exit code."""
    device = _pick_device(settings, max(all_ranks))
    settings = settings.replace(device=device, sample_bytes=0)
    plain = _of_run(settings.replace(plain=True, tensor_parallel=1), 1, "plain")
    runs = {ranks: _of_run(settings, ranks, f"{ranks}-ranks") for ranks in all_ranks}
    make_room(plain.folder, *(run.folder for run in runs.values()))
    _train(plain, 1)
    agree = True
    for ranks, run in runs.items():
        _train(run, ranks)
        agree = _print(ranks, compare(plain.folder, run.folder)) and agree
    return 0 if agree else 1


def demo(settings: Settings, ranks: int) -> int:
    """One process without Crossdock, then ``ranks`` ranks; returns the exit code."""
    try:
        from . import figure
    except ImportError:
        figure = None
    ranks, device = _demo_ranks(settings, ranks)
    settings = settings.replace(device=device)
    plain = _of_run(settings.replace(plain=True, tensor_parallel=1, sample_bytes=0), 1, "plain")
    run = _of_run(settings, ranks, f"{ranks}-ranks")
    make_room(plain.folder, run.folder)
    _train(plain, 1)
    _train(run, ranks)
    agree = _print(ranks, compare(plain.folder, run.folder))
    if figure is None:
        print("No figure: matplotlib is not installed.")
    else:
        picture = settings.folder / "loss.png"
        figure.draw(
            picture,
            {
                "1 process, plain PyTorch": read_log(plain.folder),
                f"{ranks} ranks, Crossdock": read_log(run.folder),
            },
        )
        print(f"Loss curves and use of the experts: {picture}")
    return 0 if agree else 1


def _demo_ranks(settings: Settings, ranks: int) -> tuple[int, str]:
    """Number of ranks, and device: rather two ranks on GPUs than four on the CPU."""
    if settings.device == "auto" and 2 <= launch.num_gpus() < ranks:
        return 2, "cuda"
    return ranks, _pick_device(settings, ranks)


def _pick_device(settings: Settings, ranks: int) -> str:
    """The device; says so if that is the CPU although the machine has GPUs."""
    device, gpus = launch.pick_device(settings.device, ranks), launch.num_gpus()
    if settings.device == "auto" and device == "cpu" and gpus:
        print(f"On the CPU: {ranks} ranks take a GPU each, and this machine has {gpus}.")
    return device


def _of_run(settings: Settings, ranks: int, name: str) -> Settings:
    """The settings of one run, in the folder of that name; ValueError if it cannot be."""
    folder = settings.folder / name
    run = settings.replace(folder=folder, save_first_step=True, resume=False)
    run.check(ranks)
    return run


def _train(run: Settings, ranks: int) -> None:
    launch.run_ranks(ranks, run.device, train, run)


def _print(ranks: int, checks: list[Check]) -> bool:
    """Shows the checks; whether all hold."""
    many = f"{ranks} rank{'s' if ranks > 1 else ''}"
    print(f"{many} against one process without Crossdock, differences and what is allowed:")
    for check in checks:
        print(f"    {check}")
    return all(check.holds for check in checks)
