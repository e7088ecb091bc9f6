"""The runs of a comparison, one after the other, and what they show."""

from __future__ import annotations

import shutil
from pathlib import Path

from . import launch
from .compare import Check, compare, read_log
from .settings import Settings
from .trainer import train


def verify(settings: Settings, all_ranks: tuple[int, ...]) -> int:
    """Hold each number of ranks against one process without Crossdock; returns the exit code."""
    device = _pick_device(settings, max(all_ranks))
    settings = settings.replace(device=device, sample_bytes=0)
    plain = _run(settings.replace(plain=True), 1, "plain")
    agree = True
    for ranks in all_ranks:
        folder = _run(settings, ranks, f"{ranks}-ranks")
        agree = _print(ranks, compare(plain, folder)) and agree
    return 0 if agree else 1


def demo(settings: Settings, ranks: int) -> int:
    """One process without Crossdock, then ``ranks`` ranks; returns the exit code."""
    try:
        from . import figure
    except ImportError:
        figure = None
    ranks, device = _demo_ranks(settings, ranks)
    settings = settings.replace(device=device)
    plain = _run(settings.replace(plain=True, sample_bytes=0), 1, "plain")
    folder = _run(settings, ranks, f"{ranks}-ranks")
    agree = _print(ranks, compare(plain, folder))
    if figure is None:
        print("No figure: matplotlib is not installed.")
    else:
        picture = settings.folder / "loss.png"
        figure.draw(picture, {
            "1 process, plain PyTorch": read_log(plain),
            f"{ranks} ranks, Crossdock": read_log(folder),
        })
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


def _run(settings: Settings, ranks: int, name: str) -> Path:
    """Train in a new folder of that name, which is returned."""
    folder = settings.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    settings = settings.replace(folder=folder, save_gradients=True, resume=False)
    settings.check(ranks)
    launch.run_ranks(ranks, settings.device, train, settings)
    return folder


def _print(ranks: int, checks: list[Check]) -> bool:
    """Shows the checks; whether all hold."""
    many = f"{ranks} rank{'s' if ranks > 1 else ''}"
    print(f"{many} against one process without Crossdock, relative differences:")
    for check in checks:
        print(f"    {check}")
    return all(check.holds for check in checks)
