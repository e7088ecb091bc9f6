#!/usr/bin/env python3
"""Train a byte-level mixture-of-experts language model on a mesh of data times experts, with JAX.

    train_moe.py                  4 ranks, 2 x 2, as devices of one process on the CPU
    train_moe.py --device gpu     the same on 4 GPUs
    train_moe.py --processes      ranks as processes of this host with one device each
    train_moe.py --tensor-parallel  ranks along the experts' axis also share their sequences, and
                                  the heads of attention
    train_moe.py --check          first compares the model on the mesh with the model on one device
                                  without Crossdock: forward, and every gradient; then trains
                                  both, but for --processes

Writes FOLDER/log.jsonl and, with matplotlib, FOLDER/loss.png.
Exit code 0; 1 after a failure or a disagreement, 2 after a usage error, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from crossdock.launch import RankFailed

# The text, options, progress bar and figure are those of the PyTorch example; they need no PyTorch.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))

from moe_lm.corpus import read_corpus  # noqa: E402
from moe_lm.folders import make_folder  # noqa: E402
from moe_lm.options import MODEL, add_numbers, make_parser, read_settings  # noqa: E402
from moe_model import launch  # noqa: E402
from moe_model.settings import Settings  # noqa: E402

_MESH = {  # option: help
    "data": "ranks along the mesh's axis for data",
    "experts-axis": "ranks along the mesh's axis for experts",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    options = parser.parse_args(arguments)
    settings = read_settings(Settings, options)
    try:
        settings.check()
        make_folder(settings.folder)
        if options.processes and launch.started_rank() is None:
            return launch.run_processes(settings.ranks, main, arguments)
        launch.set_up_jax(settings.ranks, options.device)
        return _run(settings, options.check)
    except ValueError as error:
        parser.error(str(error))
    except RankFailed as error:
        print(f"train_moe.py: a rank failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(settings: Settings, check: bool) -> int:
    import jax  # after its set-up

    from moe_model.compare import compare
    from moe_model.crossdock_layers import make_layers, make_mesh
    from moe_model.plain_layers import make_plain_layers
    from moe_model.trainer import Trainer

    s = settings
    first = jax.process_index() == 0
    text = read_corpus(s.text).train
    mesh = make_mesh(s)
    launch.meet(mesh)
    trainer = Trainer(
        s, f"{s.data} x {s.experts_axis} ranks, Crossdock", make_layers(s, mesh), mesh
    )
    runs, agree = {}, True
    if check:
        plain = Trainer(s, "1 device, plain JAX", make_plain_layers(s))
        agree = compare(plain, trainer, text, show=first)
        if jax.process_count() == 1:
            plain.train(text, show=True)
            runs[plain.title] = plain.records
    trainer.train(text, show=first)
    if first:
        _draw(s.folder / "loss.png", runs | {trainer.title: trainer.records})
    return 0 if agree else 1


def _draw(path: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    try:
        from moe_lm import figure
    except ImportError:
        print("No figure: matplotlib is not installed.")
        return
    figure.draw(path, runs)
    print(f"Loss curves and use of the experts: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("moe-jax"), help="log and figure (moe-jax)"
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="(cpu)")
    parser.add_argument("--processes", action="store_true", help="one process per rank")
    parser.add_argument(
        "--tensor-parallel", action="store_true", help="share sequences and heads, too"
    )
    parser.add_argument("--check", action="store_true", help="compare with one device")
    add_numbers(parser, Settings, _MESH | MODEL)
    return parser


if __name__ == "__main__":
    sys.exit(main())
